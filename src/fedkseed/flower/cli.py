"""The commands of a federation over a network: certs make, certs request, certs add, server, client."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import DIVERGED, INTERRUPTED, FedKSeedError
from ..tools.display import Bars, console
from .compat import require_flower

CERTS = """Make, request and add the keys of a federation, in four steps.

\b
1. The server's owner makes the server's keys and certificates:
       fedkseed certs keys --host fl.example.org

\b
2. Each client makes a key, keeps it, and sends my-key.pub to the server's owner:
       fedkseed certs request --key my-key

\b
3. The owner takes it in, compares its fingerprint with the client's, and sends keys/ca.pem in return:
       fedkseed certs add keys my-key.pub

\b
4. Both start:
       fedkseed server RECIPE --certs keys
       fedkseed client --key my-key --ca ca.pem --server fl.example.org:8443 --data FILE

`fedkseed certs DIRECTORY` is short for `fedkseed certs make DIRECTORY`.
"""


class DirectoryFirst(TyperGroup):
    """Commands of which `make` may be left out, where the first word is a directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["make", *args]
        return super().parse_args(ctx, args)


def make(
    directory: Annotated[Path, typer.Argument(help="Directory for keys and certificates; made if it is missing.")],
    clients: Annotated[
        int,
        typer.Option(
            help="Number of clients that have a key in the end. Private keys that are missing are made here, so that "
            "whoever has this machine can act as these clients; `request` and `add` do without.",
            min=0,
        ),
    ] = 0,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name or address under which clients reach the server; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.", min=1)] = 365,
) -> None:
    """Make a certificate authority and the server's certificate, on the server's machine.

    Existing files are never overwritten. To renew the server's certificate, remove server.pem and server.key first,
    bring ca.key back, and give --host again. The server keeps the directory; every client gets a copy of ca.pem.
    """
    require_flower()
    from . import certs

    made = certs.make(directory, clients, host or [], days)
    for path in made:
        console.print(f"made {path}", highlight=False, soft_wrap=True)
    if not made:
        console.print(f"{directory} has all of it already", highlight=False)
    if clients and any(path.name.startswith("client-") for path in made):
        console.print(
            "warning: the clients' private keys were made here, so this machine can act as any of these clients. Give "
            "client-K to its client and remove it here, or let clients make their own: fedkseed certs request",
            highlight=False,
            soft_wrap=True,
        )
    if any(path.name == "ca.key" for path in made):
        console.print(
            f"warning: whoever has {directory / 'ca.key'} can act as the server. No other command needs it: keep it on "
            "another machine until the server's certificate is renewed",
            highlight=False,
            soft_wrap=True,
        )


def request(
    key: Annotated[
        Path, typer.Option(help="File for the new private key; its public half gets the same name and .pub.")
    ],
) -> None:
    """Make a client's key pair, on the client's machine.

    Send the public file to the server's owner, who answers with ca.pem. The private file stays on this machine.
    """
    require_flower()
    from . import certs

    public = certs.request(key)
    console.print(
        f"made {key}, which stays on this machine\nmade {public}: send it to the server's owner, with the fingerprint "
        f"over another channel\nfingerprint {certs.shown(public)}",
        highlight=False,
        soft_wrap=True,
    )


def add(
    directory: Annotated[Path, typer.Argument(help="The server's directory, as made by `fedkseed certs`.")],
    file: Annotated[Path, typer.Argument(help="A client's public file, as made by `fedkseed certs request`.")],
) -> None:
    """Take a client's public key into the server's directory, under the next number.

    Clients that are added after a run has begun take part in new runs.
    """
    require_flower()
    from . import certs

    public = certs.add(directory, file)
    console.print(
        f"{file} is now {public}: compare the fingerprint with its owner, and send back {directory / 'ca.pem'}\n"
        f"fingerprint {certs.shown(public)}",
        highlight=False,
        soft_wrap=True,
    )


def members(
    directory: Annotated[Path, typer.Argument(help="The server's directory, as made by `fedkseed certs`.")],
) -> None:
    """Print the public lines of all clients, in the order of their numbers.

    Clients that give them to `fedkseed client --members FILE` mask their uploads for these keys alone. Get the file
    from somebody else than the server's owner, or compare it with each other.
    """
    require_flower()
    from . import certs

    print(certs.members(directory), end="")


def public(
    key: Annotated[Path, typer.Argument(help="A client's private key.")],
) -> None:
    """Print the public line of a client's key, as `fedkseed certs request` has written it into its public file.

    Files of older releases have no key for masks; this line does.
    """
    require_flower()
    from . import certs

    print(certs.public(key), end="")


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
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value in place of the recipe's, as training.rounds=20; may be repeated. Give it again when the "
            "server goes on.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON document on stdout; all else goes to stderr.")
    ] = False,
) -> None:
    """Serve a federation: wait for clients on other machines, run the rounds with them, save the tuned model.

    The command starts Flower and ends it. It may be stopped or killed at any moment: the same command goes on from the
    last finished round. Clients reach one path of one port, over TLS, with keys that `fedkseed certs` made;
    docs/deployment.md describes the setup.
    """
    require_flower()
    from ..recipe.reading import own_recipe
    from ..run.store import Store
    from ..tools.display import show_result
    from .recipes import largest_request, networked, require_networked
    from .server.processes import Host

    wanted, directory = networked(own_recipe(recipe, changes or ())).absolute(), output or Path("runs") / recipe.stem
    require_networked(wanted)  # now, and not when the clients are there
    _prepare()
    if (directory / "recipe.toml").exists():
        begun = Store(directory).load_recipe()
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
                Store(directory).change_recipe(wanted.to_toml())  # [network] may have changed
                bars.note(f"clients connect to port {port} of {host}")
                result = running.run()
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last finished round", highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    show_result(result, as_json)
    if result.diverged:
        raise typer.Exit(DIVERGED)


def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Annotated[str, typer.Option(help="File of this client's own examples: .jsonl, .jsonl.gz or .parquet.")],
    key: Annotated[Path, typer.Option(help="This client's private key, as made by `fedkseed certs request`.")],
    ca: Annotated[Path, typer.Option(help="The authority's certificate: ca.pem of the server's owner.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The base model: a folder, a .gguf file, or owner/name on the hub. Needed unless the recipe's model "
            "is part of an installed Python package."
        ),
    ] = None,
    basis: Annotated[
        Path | None,
        typer.Option(
            help="The basis of the directions, where the server's recipe needs one: the server's file, whose digest is "
            "checked."
        ),
    ] = None,
    members: Annotated[
        Path | None,
        typer.Option(
            help="The public lines of all clients, from `fedkseed certs members`: uploads are masked for these keys "
            "alone. Without it the server's word is taken."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, mps, …; auto: a GPU if there is one.")
    ] = "auto",
    state: Annotated[
        Path | None, typer.Option(help="Directory for this client's logs and sockets; default runs/NAME-OF-THE-KEY.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with what a server's recipe may ask of this client: columns, held-out categories, "
            "algorithms, batches, steps. recipes/policy.toml has all keys; without a file, its values hold."
        ),
    ] = None,
    idle: Annotated[
        float, typer.Option(help="Seconds without work after which the model is unloaded from memory.", min=1)
    ] = 1800,
) -> None:
    """Join a federation as a client: train on a file of this machine for a server elsewhere, until stopped.

    The examples stay on this machine; only the result of training is sent, for FedKSeed one scalar for each direction
    of a local step. The server's recipe says how to train, within the limits of --policy. It can't name a file, a model
    or a function of this machine, and no program that the server sends is run. A recipe that asks for more is refused:
    the server gets one word, as "policy" or "data", and worker.log in the --state directory says why. asked.jsonl there
    has every recipe that was asked for. A lost connection is made again, also after this command was killed and called
    again.
    """
    require_flower()
    from .client.consent import Owner
    from .client.policy import Policy, load_policy
    from .client.supervisor import Connection, Node

    _prepare()
    path = Path(data).expanduser()
    place = Path(model).expanduser() if model is not None else None
    owner = Owner(
        str(path.resolve()) if path.exists() else data,
        str(place.resolve()) if place is not None and place.exists() else model,
        device,
        load_policy(policy) if policy is not None else Policy(),
        basis=str(basis.expanduser().resolve()) if basis is not None else None,
        members=str(members.expanduser().resolve()) if members is not None else None,
    )
    connection = Connection(server, ca.resolve(), key.resolve())
    node = Node(state or Path("runs") / key.name, connection, owner, idle)
    with suppress(KeyboardInterrupt):
        node.serve(lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))
    console.print("stopped")


def _prepare() -> None:
    """Keep all files of a command and its children private, and let SIGTERM end it as Ctrl-C does.

    Ctrl-C ends the children first, and prints a line.
    """
    os.umask(0o077)  # files of Flower's own: its database, its logs

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
