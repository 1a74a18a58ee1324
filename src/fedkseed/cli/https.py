"""The commands of a federation over HTTPS: serve, shard, join."""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ..errors import INTERRUPTED, FedKSeedError
from ..network.protocol.addresses import is_loopback, require_files
from ..report.bars import Bars
from ..report.terminal import console
from ..run.progress import Silent
from .network import (
    Authority,
    BasisFile,
    Certs,
    Changes,
    Data,
    Device,
    Idle,
    Key,
    Members,
    Model,
    Output,
    PolicyFile,
    Port,
    RecipeFile,
    State,
    begun,
    prepare,
)  # fmt: skip
from .options import Json, end_run

PACKAGES = ("cryptography", "httpx", "starlette", "uvicorn")


Host: TypeAlias = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for clients on other machines.")]
Tls: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        help="Whether this process has the certificate; without, it listens on this machine alone, behind a proxy that "
        "has it (deploy/nginx-https.conf).",
    ),
]
Strangers: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Requests a second of one address that have no session yet; more where many clients are behind one.", min=1
    ),
]


class Notes(Silent):
    """A watcher of a process without rounds of its own, which prints lines."""

    def note(self, text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _require_loopback(tls: bool, host: str) -> None:
    if not tls and not is_loopback(host):
        raise FedKSeedError(f"without TLS this server listens on this machine alone, not on {host}: leave --host out")


def require_https() -> None:
    """Refuse to go on without the packages of this transport.

    Raises:
        FedKSeedError: one is missing.
    """
    if lacking := [name for name in PACKAGES if find_spec(name) is None]:
        raise FedKSeedError(f"HTTPS needs the package {lacking[0]}; install it with: pip install 'fedkseed[https]'")


def serve(
    recipe: RecipeFile,
    certs: Certs,
    output: Output = None,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    tls: Tls = True,
    strangers: Strangers = 50,
    page: Annotated[
        bool, typer.Option("--page", help="Serve a page, too, on which browsers take part (docs/browser.md).")
    ] = False,
    model_files: Annotated[
        Path | None,
        typer.Option(help="Folder of the model, from which the page's visitors, and anybody else, may get its files."),
    ] = None,
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Serve a federation over plain HTTPS: wait for clients, run the rounds with them, save the tuned model.

    One process serves many clients: each keeps one connection, on which it waits for its task. The command may be
    stopped or killed at any moment: the same command goes on from the last finished round. docs/session.md has all
    requests that a client can make.
    """
    require_https()
    _require_loopback(tls, host)
    if model_files and not page:
        raise FedKSeedError("--model-files are for the page: add --page, or leave them out")
    from ..network.https.browser_page import Page
    from ..network.https.server import Address, run
    from ..recipe.rules import Where

    address = Address(host, port, tls, strangers, Page(model_files) if page else None)
    wanted, directory = begun(recipe, changes, output, *([Where.PAGE] if page else []))
    try:
        with Bars(wanted.training.rounds) as bars:
            result = run(directory, wanted, certs.resolve(), address, bars)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last finished round", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    end_run(result, as_json)


def shard(
    url: Annotated[str, typer.Argument(help="Address of the server above, as https://root.example.org:8443.")],
    certs: Certs,
    key: Annotated[Path, typer.Option(help="This shard's private key, whose public one the server above has.")],
    ca: Authority,
    first: Annotated[
        int,
        typer.Option(help="Number in the run of this shard's client 0; its others come after it.", min=0),
    ] = 0,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    tls: Tls = True,
    strangers: Strangers = 50,
    state: Annotated[
        Path | None, typer.Option(help="Directory for what this shard must not forget; default runs/NAME-OF-THE-KEY.")
    ] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for all clients, before the server above may ask.", min=0)
    ] = 600,
) -> None:
    """Serve a part of a federation's clients, and hand the sum of their uploads up to another server.

    Clients join this server as they would any. The one above has [network] shards in its recipe and this server's key
    among its clients' keys; it sees sums of a shard's clients in place of uploads, and ends with the digest that it
    would have if the same uploads came to it. No recipe, model or data is needed here. docs/scaling.md has an example.
    """
    require_https()
    _require_loopback(tls, host)
    from ..network.https.server import Address
    from ..network.https.shard import run

    prepare()
    require_files(ca, key)
    directory = state or Path("runs") / key.name
    with suppress(KeyboardInterrupt):
        address = Address(host, port, tls, strangers)
        run(
            directory, certs.resolve(), address, Notes(), url=url, ca=ca, key=key, first=first, patience=patience
        )  # fmt: skip
    console.print("stopped")


def join(
    url: Annotated[str, typer.Argument(help="The server's address, as https://fl.example.org:8443.")],
    data: Data,
    key: Key,
    ca: Authority,
    model: Model = None,
    basis: BasisFile = None,
    members: Members = None,
    device: Device = "auto",
    state: State = None,
    policy: PolicyFile = None,
    idle: Idle = 1800,
) -> None:
    """Join a federation over plain HTTPS: train on a file of this machine for a server elsewhere, until stopped.

    The examples stay on this machine; only the result of training is sent, for FedKSeed one scalar for each direction
    of a local step. The server's recipe says how to train, within the limits of --policy. It can't name a file, a model
    or a function of this machine, and no program that the server sends is run. A recipe that asks for more is refused:
    the server gets one word, as "policy" or "data", and worker.log in the --state directory says why. asked.jsonl there
    has every recipe that was asked for. A lost connection is made again, also after this command was killed and called
    again.
    """
    require_https()
    from ..network.https.join import HttpsClient, WorkerDesk
    from ..network.protocol.client.recipe_consent import OwnerSettings, owner_of

    prepare()
    owner = owner_of(data, model, device, policy, basis, members)
    require_files(ca, key)
    directory = state or Path("runs") / key.name
    desk = WorkerDesk(directory, OwnerSettings(owner, idle, str(key.resolve()), str(ca.resolve())))
    client = HttpsClient(directory, url, ca, key, desk)
    with suppress(KeyboardInterrupt):
        client.serve(Notes().note)
    console.print("stopped")
