"""The command of a federation without a server: peer."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import INTERRUPTED, FedKSeedError
from ..network.protocol.addresses import require_files
from ..report.terminal import console, print_json
from .https import Notes, require_https
from .network import Authority, BasisFile, Changes, Data, Device, Key, Model, PolicyFile, prepare
from .options import Json


def peer(
    recipe: Annotated[Path, typer.Argument(help="The recipe, the same for all peers, with split = 'files'.")],
    peers: Annotated[
        Path, typer.Option(help="The file that all peers have: start and length of the rounds, keys, addresses.")
    ],
    data: Data,
    key: Key,
    cert: Annotated[Path, typer.Option(help="The certificate for this key: client-K.pem of `fedkseed certs sign`.")],
    ca: Authority,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where this peer listens; 0.0.0.0:8443 for other machines.")
    ] = "127.0.0.1:8443",
    until: Annotated[
        float,
        typer.Option(
            help="Seconds without a new upload after the last round, until the command ends; longer, where peers may "
            "be cut off for longer.",
            min=0,
        ),
    ] = 60,
    model: Model = None,
    basis: BasisFile = None,
    device: Device = "auto",
    state: Annotated[
        Path | None, typer.Option(help="Directory for this peer's uploads and tuned model; default runs/NAME-OF-KEY.")
    ] = None,
    policy: PolicyFile = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Take part in a federation without a server: train when a round opens, and share uploads with the other peers.

    The peers' file says when rounds open. Each peer trains from the model of the uploads that it has, signs its own
    upload, and passes it on. The model is computed from the set of all uploads by sums of integers: peers that have the
    same set have the same model, to the bit, in whatever order uploads came and however long they were cut off from
    each other.

    \b
    1. One person makes an authority, takes in the keys, and signs a certificate for each:
           fedkseed certs keys --host localhost
           fedkseed certs add keys peer-0.pub
           fedkseed certs sign keys 0 --host peer0.example.org

    \b
    2. All get ca.pem, their own certificate, the recipe, and a file peers.toml:
           start = 2030-01-31T12:00:00Z
           seconds = 600
           peers = [{ key = "ecdsa-sha2-nistp256 AAAA...", address = "https://peer0.example.org:8443" }, ...]

    \b
    3. Each starts its peer, before the first round or later:
           fedkseed peer recipe.toml --peers peers.toml --key peer-0 --cert client-0.pem
               --ca ca.pem --data rows.jsonl --listen 0.0.0.0:8443

    The command may be stopped or killed at any moment: the same command goes on. Uploads are not masked: each peer sees
    those of all others (docs/peers.md).
    """  # noqa: D301 — click keeps the lines after a \b as they are
    require_https()
    from ..network.peers.peer import PeerFiles, run
    from ..network.protocol.client.recipe_consent import owner_of
    from ..recipe.reading import own_recipe

    host, _, port = listen.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise FedKSeedError(f"--listen takes HOST:PORT, as 0.0.0.0:8443, got {listen!r}")
    prepare()
    wanted = own_recipe(recipe, changes or ()).absolute()
    owner = owner_of(data, model, device, policy, basis, None)
    require_files(ca, key)
    directory = state or Path("runs") / key.name
    files = PeerFiles(directory, peers.resolve(), key.resolve(), cert.resolve(), ca.resolve())
    try:
        outcome = run(wanted, files, owner, (host.strip("[]"), int(port)), Notes().note, quiet=until)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on, with all uploads that were here", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(asdict(outcome))
        return
    here = f"{outcome.from_here} of them trained from this very model"
    lines = [
        f"{outcome.uploads} uploads in {outcome.rounds} rounds, {here}",
        f"the set of digest {outcome.set}",
        f"the tuned model {outcome.adapter}, of digest {outcome.digest}",
    ]
    if outcome.contradictions:
        lines.insert(1, f"left out: {outcome.contradictions} times a peer has signed two uploads for one round")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
