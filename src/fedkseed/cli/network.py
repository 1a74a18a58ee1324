"""The commands of a federation over a network: serve, shard and join over HTTPS, peer without a server, and doctor."""

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from ..errors import INTERRUPTED, FedKSeedError
from ..network.protocol.addresses import is_loopback
from ..report.bars import Bars
from ..report.terminal import print_json, say
from ..run.progress import Silent
from .options import Changes, Json, Output, RecipeFile, end_run, require_packages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..network.https.browser_page import Page
    from ..network.https.server import Address

PACKAGES = ("cryptography", "httpx", "starlette", "uvicorn")
Certs = Annotated[Path, Option(help="The directory that `fedkseed certs` has made.")]
Host = Annotated[str, Option(help="Address to listen on; 0.0.0.0 for clients on other machines.")]
Port = Annotated[int, Option(help="The port that clients connect to.", min=1, max=65535)]
Tls = Annotated[
    bool,
    Option(
        "--tls/--no-tls",
        help="Have the certificate here; without, listen on this machine alone, for nginx: fedkseed examples deploy",
    ),
]
Strangers = Annotated[float, Option(help="Requests a second of an address without session; more for a proxy.", min=1)]
Data = Annotated[
    str, Option(help="File of this client's own examples: CSV, JSON, Parquet and more, see `fedkseed docs data`.")
]
Key = Annotated[Path, Option(help="This client's private key, as made by `fedkseed certs request`.")]
Authority = Annotated[Path, Option(help="The authority's certificate: ca.pem of the server's owner.")]
Model = Annotated[
    str | None, Option(help="The base model: a folder, a .gguf file, or owner/name; not needed for a Python package's.")
]
BasisFile = Annotated[
    Path | None, Option(help="The server's file of a basis, where the recipe needs one; its digest is checked.")
]
Members = Annotated[
    Path | None,
    Option(
        help="The public lines of all clients, from `fedkseed certs members`: uploads are masked for these keys alone, "
        "and their noise counts. Without it the server's word is taken, and no noise but this client's."
    ),
]
Device = Annotated[str, Option(help="Device to compute on: cpu, cuda, cuda:1, mps, …; auto: a GPU if there is one.")]
State = Annotated[
    Path | None, Option(help="Directory of all that is kept here; default runs/NAME, by the key's file name.")
]
PolicyFile = Annotated[
    Path | None,
    Option(
        help="A TOML file with what a recipe may ask of this client: columns, held-out categories, algorithms, "
        "batches, steps. `fedkseed examples policy` writes all keys; without a file, its values hold."
    ),
]


class Notes(Silent):
    """A watcher of a process without rounds of its own, which prints lines."""

    def note(self, text: str) -> None:
        say(text)


def keep_private() -> None:
    """Keep all files of a command and its children private."""
    os.umask(0o077)


@contextmanager
def stoppable(goes_on: str) -> "Iterator[None]":
    """Say what the same command does, where Ctrl-C ends this one."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopped; the same command {goes_on}")
        raise Exit(INTERRUPTED) from None


def _address(host: str, port: int, tls: bool, strangers: float, page: "Page | None" = None) -> "Address":
    """The place at which a server listens; without a certificate on this machine alone."""
    from ..network.https.server import Address

    if not tls and not is_loopback(host):
        raise FedKSeedError(f"without TLS this server listens on this machine alone, not on {host}: leave --host out")
    return Address(host, port, tls, strangers, page)


def serve(
    recipe: Annotated[Path, Argument(help="A recipe whose clients have split = 'files'.")],
    certs: Certs,
    output: Output = None,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    tls: Tls = True,
    strangers: Strangers = 50,
    page: Annotated[
        bool, Option("--page", help="Serve a page by which browsers take part (`fedkseed docs browser`).")
    ] = False,
    model_files: Annotated[
        Path | None, Option(help="Folder or GGUF file of the model, which anybody may then get.")
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Serve a federation over plain HTTPS: wait for clients, run the rounds with them, save the tuned model.

    One process serves many clients: each keeps one connection, on which it waits for its task. The command may be
    stopped or killed at any moment: the same command goes on from the last finished round. `fedkseed docs session` has
    all requests that a client can make.

    fedkseed serve recipe.toml --certs keys --host 0.0.0.0
    """
    require_packages("HTTPS needs", *PACKAGES)
    if model_files and not page:
        raise FedKSeedError("--model-files are for the page: add --page, or leave them out")
    from ..network.https.browser_page import Page, files_of
    from ..network.https.server import run
    from ..network.protocol.server.serving import begin
    from ..recipe.rules import Where

    keep_private()
    directory = output or Path("runs") / recipe.stem
    address = _address(host, port, tls, strangers, Page(files_of(model_files) if model_files else {}) if page else None)
    wanted = begin(recipe, changes or (), directory, *([Where.PAGE] if page else []), note=say)
    with stoppable("goes on from the last finished round"), Bars(wanted.training.rounds) as bars:
        result = run(directory, wanted, certs.resolve(), address, bars)
    end_run(result, directory, as_json)


def shard(
    url: Annotated[str, Argument(help="Address of the server above, as https://root.example.org:8443.")],
    certs: Certs,
    key: Annotated[Path, Option(help="This shard's private key, whose public one the server above has.")],
    ca: Authority,
    first: Annotated[int, Option(help="Number in the run of this shard's first client.", min=0, max=1 << 20)] = 0,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    tls: Tls = True,
    strangers: Strangers = 50,
    state: State = None,
    patience: Annotated[float, Option(help="Seconds to wait for all clients at first.", min=0)] = 600,
) -> None:
    """Serve a part of a federation's clients, and hand the sum of their uploads up to another server.

    Clients join this server as they would any. The one above has [network] shards in its recipe and this server's key
    among its clients' keys; it sees sums of a shard's clients in place of uploads, and ends with the digest that it
    would have if the same uploads came to it. No recipe, model or data is needed here (`fedkseed docs operations`).

    fedkseed shard https://root.example.org:8443 --certs keys --key shard-0 --ca root-ca.pem --host 0.0.0.0
    """
    require_packages("HTTPS needs", *PACKAGES)
    from ..network.https.shard import run
    from ..network.protocol.certs import require_identity

    address = _address(host, port, tls, strangers)
    keep_private()
    require_identity(ca, key)
    directory = state or Path("runs") / key.name
    with stoppable("goes on with this shard"):
        run(directory, certs.resolve(), address, Notes(), url=url, ca=ca, key=key, first=first, patience=patience)


def join(
    url: Annotated[str, Argument(help="The server's address, as https://fl.example.org:8443.")],
    data: Data,
    key: Key,
    ca: Authority,
    model: Model = None,
    basis: BasisFile = None,
    members: Members = None,
    device: Device = "auto",
    state: State = None,
    policy: PolicyFile = None,
    idle: Annotated[float, Option(help="Seconds without work until the model is unloaded.", min=1)] = 1800,
) -> None:
    """Join a federation over plain HTTPS: train on a file of this machine for a server elsewhere, until its run ends.

    The file is read first, as --policy says. The examples stay on this machine; only the result of training is sent,
    for FedKSeed one scalar for each direction of a local step. The server's recipe says how to train, within the limits
    of --policy. It can't name a file, a model or a function of this machine, and no program that the server sends is
    run. A recipe that asks for more is refused: the server gets one word, as "policy" or "data", and this command ends
    and says why. asked.jsonl in the --state directory has every recipe that was asked for. A server that is not up is
    waited for, and a lost connection is made again, also after this command was killed and called again. The proxy of
    HTTPS_PROXY is used, but for what NO_PROXY names and this machine.

    fedkseed join https://fl.example.org:8443 --data rows.csv --key my-key --ca ca.pem --policy policy.toml
    """
    require_packages("HTTPS needs", *PACKAGES)
    from ..network.https.join import client_of
    from ..network.protocol.client.recipe_consent import owner_of, usable_rows

    keep_private()
    owner = owner_of(data, model, device, policy, basis, members)
    client = client_of(owner, url, ca, key, state or Path("runs") / key.name, idle)
    say(usable_rows(owner))
    with stoppable("goes on with this client"):
        client.serve(say)


def peer(
    recipe: Annotated[Path, Argument(help="The recipe, the same for all peers, with split = 'files'.")],
    peers: Annotated[Path, Option(help="The file that all peers have: start and length of rounds, keys, addresses.")],
    data: Data,
    key: Key,
    cert: Annotated[Path, Option(help="The certificate for this key: client-K.pem of `fedkseed certs sign`.")],
    ca: Authority,
    listen: Annotated[
        str, Option(metavar="HOST:PORT", help="Where to listen; 0.0.0.0:8443 for other machines.")
    ] = "127.0.0.1:8443",
    until: Annotated[float, Option(help="Seconds without an upload, until it ends after the last round.", min=0)] = 60,
    model: Model = None,
    basis: BasisFile = None,
    device: Device = "auto",
    state: State = None,
    policy: PolicyFile = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    r"""Take part in a federation without a server: train when a round opens, and share uploads with the other peers.

    The peers' file says when rounds open. Each peer trains from the model of the uploads that it has, signs its own
    upload, and passes it on. The model is computed from the set of all uploads by sums of integers: peers that have the
    same set have the same model, to the bit, in whatever order uploads came and however long they were cut off from
    each other; where that may be long, give a longer --until.

    The command may be stopped or killed at any moment: the same command goes on. Uploads are not masked: each peer sees
    those of all others (`fedkseed docs peers`).

    1. One person makes an authority, takes in the keys, and signs a certificate for each:
           fedkseed certs keys --host localhost
           fedkseed certs add keys peer-0.pub
           fedkseed certs sign keys 0 --host peer0.example.org

    2. All get ca.pem, their own certificate, the recipe, and a file peers.toml:
           start = 2030-01-31T12:00:00Z
           seconds = 600
           peers = [{ key = "ecdsa-sha2-nistp256 AAAA...", address = "https://peer0.example.org:8443" }, ...]

    3. Each starts its peer, before the first round or later:
           fedkseed peer recipe.toml --peers peers.toml --key peer-0 --cert client-0.pem \
               --ca ca.pem --data rows.jsonl --listen 0.0.0.0:8443
    """
    require_packages("HTTPS needs", *PACKAGES)
    from ..network.protocol.certs import require_identity
    from ..network.protocol.client.recipe_consent import owner_of, usable_rows
    from ..recipe.reading import own_recipe

    host, _, port = listen.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise FedKSeedError(f"--listen takes HOST:PORT, as 0.0.0.0:8443, got {listen!r}")
    keep_private()
    wanted = own_recipe(recipe, changes or ()).absolute()
    owner = owner_of(data, model, device, policy, basis, None)
    require_identity(ca, key)
    say(usable_rows(owner))
    from ..network.peers.peer import run

    directory = state or Path("runs") / key.name
    files = {"peers": peers.resolve(), "key": key.resolve(), "cert": cert.resolve(), "ca": ca.resolve()}
    with stoppable("goes on, with all uploads that were here"):
        outcome = run(wanted, directory, owner, (host.strip("[]"), int(port)), say, until, **files)
    if as_json:
        print_json(outcome)
        return
    here = f"{outcome.from_here} of them trained from this very model"
    say(f"{outcome.uploads} uploads in {outcome.rounds} rounds, {here}")
    if outcome.contradictions:
        say(f"left out: {outcome.contradictions} times a peer has signed two uploads for one round")
    say(f"the set of digest {outcome.set}\nthe tuned model {outcome.adapter}, of digest {outcome.digest}")


def doctor(
    recipe: RecipeFile,
    url: Annotated[str | None, Option(help="Check a client of this server, as https://fl.example.org:8443.")] = None,
    data: Annotated[str | None, Option(help="File of the client's own examples.")] = None,
    key: Annotated[Path | None, Option(help="The client's private key.")] = None,
    ca: Annotated[Path | None, Option(help="The authority's certificate, ca.pem.")] = None, model: Model = None,
    basis: BasisFile = None, members: Members = None, device: Device = "auto", state: State = None,
    policy: PolicyFile = None, certs: Annotated[Path | None, Option(help="Check a server with these keys.")] = None,
    output: Output = None, host: Host = "127.0.0.1", port: Port = 8443,
    changes: Changes = None, as_json: Json = False,
    tell: Annotated[bool, Option("--tell", help="Tell the server which checks fail, or that all pass.")] = False,
) -> None:  # fmt: skip
    """Check a client's or a server's machine before a run: all that the recipe will need, in a line for each check.

    The options are those of `fedkseed join` or `fedkseed serve`; a client has the recipe from the server's owner. What
    fails says what to do, the other checks go on, and the exit code is 2. No row leaves the machine, and no result but
    by --tell, for the server to print.

    fedkseed doctor recipe.toml --url https://fl.example.org:8443 --data rows.csv --key my-key --ca ca.pem --model MODEL
    fedkseed doctor recipe.toml --certs keys
    """
    require_packages("HTTPS needs", *PACKAGES)
    from ..network.doctor import Finding, client_checks, findings, server_checks
    from ..network.protocol.client.recipe_consent import owner_of
    from ..network.protocol.server.serving import begin
    from ..recipe.reading import own_recipe

    found = list[Finding]()
    if certs and not (url or data or key or ca or tell):
        directory = output or Path("runs") / recipe.stem
        served = partial(begin, recipe, changes or (), directory, note=id, makes=False)
        checks = server_checks(served, directory, certs, host, port)
    elif url and data and key and ca and not certs:
        owner = partial(owner_of, data, model, device, policy, basis, members)
        asked = partial(own_recipe, recipe, changes or ())
        directory = state or Path("runs") / key.name
        checks = client_checks(asked, owner, url, ca, key, directory, found if tell else None)
    else:
        raise FedKSeedError("a client is checked with --url, --data, --key and --ca, a server with --certs")
    for finding in findings(checks):
        found.append(finding)
        if not as_json:
            say(
                f"{ {True: 'passes', False: 'FAILS', None: 'skipped'}[finding.passed]:8}{finding.check}: {finding.said}"
            )
    if as_json:
        print_json([finding._asdict() for finding in found])
    if failed := [finding.check for finding in found if finding.passed is False]:
        raise FedKSeedError(f"{len(failed)} of {len(found)} checks fail: {', '.join(failed)}")
