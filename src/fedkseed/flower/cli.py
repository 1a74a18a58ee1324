"""The three commands of a federation over a network: certs, server, client."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import FedKSeedError
from ..tools.display import Bars, console
from .compat import require_flower


def certs(
    directory: Annotated[Path, typer.Argument(help="Directory for keys and certificates; made if it is missing.")],
    clients: Annotated[int, typer.Option(help="Number of clients; each gets a key.", min=1)],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name or address under which clients reach the server; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.", min=1)] = 365,
) -> None:
    """Make the keys of a federation: a certificate authority, the server's certificate, a key for each client.

    Existing files are never overwritten. For more clients, call the command again with a larger --clients. To renew
    the server's certificate, remove server.pem and server.key first, and give --host again. The server keeps the
    directory; client K gets two of its files, client-K and ca.pem.
    """
    require_flower()
    from .certs import make

    made = make(directory, clients, host or [], days)
    for path in made:
        console.print(f"made {path}", highlight=False)
    if not made:
        console.print(f"{directory} has all of it already", highlight=False)


def server(
    recipe: Annotated[Path, typer.Argument(help="A recipe with [clients] split = 'files'.")],
    certs: Annotated[Path, typer.Option(help="The directory that `fedkseed certs` has made.")],
    output: Annotated[
        Path | None, typer.Option(help="Directory of the run; default runs/NAME, by the recipe's file name.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 for clients on other machines, which needs nginx installed."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port that clients connect to.", min=1, max=65535)] = 8443,
) -> None:
    """Serve a federation: wait for clients on other machines, run the rounds with them, save the tuned model.

    The command starts Flower and ends it. It may be stopped or killed at any moment: the same command goes on from the
    last finished round. Clients reach one path of one port, over TLS, with keys that `fedkseed certs` made;
    docs/deployment.md describes the setup.
    """
    require_flower()
    from ..files import write_atomically
    from ..recipe.reading import load_recipe
    from ..run.store import Store
    from ..tools.display import print_result
    from .recipes import largest_request
    from .server.processes import Host

    _stop_when_told()
    wanted, directory = load_recipe(recipe).absolute(), output or Path("runs") / recipe.stem
    if (directory / "recipe.toml").exists():
        store = Store(directory)
        begun = load_recipe(store.recipe)
        if begun.model_copy(update={"network": wanted.network}) != wanted:
            raise FedKSeedError(
                f"{directory} holds a run of another recipe than {recipe}: undo the change, or choose another "
                "--output; only [network] may change"
            )
    else:
        with Store.create(directory, wanted.to_toml()):
            pass
    try:
        with Bars(wanted.training.rounds) as bars:
            running = Host(directory, certs, host, port, largest_request(wanted), bars)
            with running.running():  # no other server works on the run now
                write_atomically(directory / "recipe.toml", wanted.to_toml().encode())  # [network] may have changed
                bars.note(f"clients connect to port {port} of {host}")
                result = running.run()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last finished round", highlight=False)
        raise typer.Exit(130) from None
    print_result(result)


def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Annotated[str, typer.Option(help="File of this client's own examples: .jsonl, .jsonl.gz or .parquet.")],
    key: Annotated[Path, typer.Option(help="This client's private key: the file client-K made by `fedkseed certs`.")],
    ca: Annotated[Path, typer.Option(help="The authority's certificate: the file ca.pem made by `fedkseed certs`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The base model: a folder, a .gguf file, or owner/name on the hub. Needed unless the recipe's model "
            "is part of an installed Python package."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, mps, …; auto: a GPU if there is one.")
    ] = "auto",
    state: Annotated[
        Path | None, typer.Option(help="Directory for this client's logs and sockets; default runs/NAME-OF-THE-KEY.")
    ] = None,
    idle: Annotated[
        float, typer.Option(help="Seconds without work after which the model is unloaded from memory.", min=1)
    ] = 1800,
) -> None:
    """Join a federation as a client: train on a file of this machine for a server elsewhere, until stopped.

    The examples stay on this machine; only the result of training is sent, for FedKSeed one scalar for each direction
    of a local step. The server's recipe says how to train. It can't name a file, a model or a function of this
    machine, and no program that the server sends is run. A lost connection is made again, also after this command was
    killed and called again.
    """
    require_flower()
    from .client.consent import Owner
    from .client.supervisor import Connection, Node

    _stop_when_told()
    path = Path(data).expanduser()
    place = Path(model).expanduser() if model is not None else None
    owner = Owner(
        str(path.resolve()) if path.exists() else data,
        str(place.resolve()) if place is not None and place.exists() else model,
        device,
    )
    connection = Connection(server, ca.resolve(), key.resolve())
    node = Node(state or Path("runs") / key.name, connection, owner, idle)
    with suppress(KeyboardInterrupt):
        node.serve(lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))
    console.print("stopped")


def _stop_when_told() -> None:
    """Let SIGTERM end a command as Ctrl-C does: children are ended, then a line is printed."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
