"""The options and beginnings that the commands of all transports share, and the commands of keys: certs make, …"""

import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from ..errors import FedKSeedError
from ..report.terminal import console

if TYPE_CHECKING:
    from ..network.protocol.client.consent import Owner
    from ..recipe.schema import Recipe

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
   and takes it out again with: fedkseed certs revoke keys 0

\b
4. Both start:
       fedkseed serve RECIPE --certs keys
       fedkseed join https://fl.example.org:8443 --key my-key --ca ca.pem --data FILE
   or, over Flower, `fedkseed server` and `fedkseed client`

`fedkseed certs DIRECTORY` is short for `fedkseed certs make DIRECTORY`.
"""


# The options that servers and clients of every transport have.
RecipeFile: TypeAlias = Annotated[Path, typer.Argument(help="A recipe whose clients have split = 'files'.")]
Certs: TypeAlias = Annotated[Path, typer.Option(help="The directory that `fedkseed certs` has made.")]
Output: TypeAlias = Annotated[
    Path | None, typer.Option(help="Directory of the run; default runs/NAME, by the recipe's file name.")
]
Port: TypeAlias = Annotated[int, typer.Option(help="The port that clients connect to.", min=1, max=65535)]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value in place of the recipe's, as training.rounds=20; may be repeated. Give it again when the "
        "server goes on.",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON document on stdout; all else goes to stderr.")
]
Data: TypeAlias = Annotated[
    str, typer.Option(help="File of this client's own examples: CSV, JSON, Parquet and more, see docs/data.md.")
]
Key: TypeAlias = Annotated[Path, typer.Option(help="This client's private key, as made by `fedkseed certs request`.")]
Authority: TypeAlias = Annotated[Path, typer.Option(help="The authority's certificate: ca.pem of the server's owner.")]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The base model: a folder, a .gguf file, or owner/name on the hub. Needed unless the recipe's model "
        "is part of an installed Python package."
    ),
]
BasisFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="The basis of the directions, where the server's recipe needs one: the server's file, whose digest is "
        "checked."
    ),
]
Members: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="The public lines of all clients, from `fedkseed certs members`: uploads are masked for these keys "
        "alone. Without it the server's word is taken."
    ),
]
Device: TypeAlias = Annotated[
    str, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, mps, …; auto: a GPU if there is one.")
]
State: TypeAlias = Annotated[
    Path | None, typer.Option(help="Directory for this client's logs and sockets; default runs/NAME-OF-THE-KEY.")
]
PolicyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A TOML file with what a server's recipe may ask of this client: columns, held-out categories, "
        "algorithms, batches, steps. recipes/policy.toml has all keys; without a file, its values hold."
    ),
]
Idle: TypeAlias = Annotated[
    float, typer.Option(help="Seconds without work after which the model is unloaded from memory.", min=1)
]


def require_keys() -> None:
    """Refuse to go on without the package that makes keys.

    Raises:
        FedKSeedError: it is missing.
    """
    if find_spec("cryptography") is None:
        raise FedKSeedError(
            "keys need the package cryptography; install it with: pip install 'fedkseed[https]', or 'fedkseed[flower]'"
        )


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
    require_keys()
    from ..network.protocol import certs

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
    require_keys()
    from ..network.protocol import certs

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
    require_keys()
    from ..network.protocol import certs

    public = certs.add(directory, file)
    console.print(
        f"{file} is now {public}: compare the fingerprint with its owner, and send back {directory / 'ca.pem'}\n"
        f"fingerprint {certs.shown(public)}",
        highlight=False,
        soft_wrap=True,
    )


def revoke(
    directory: Annotated[Path, typer.Argument(help="The server's directory, as made by `fedkseed certs`.")],
    number: Annotated[int, typer.Argument(help="The client's number, as in client-3.pub.", min=0)],
) -> None:
    """Take a client's public key out of the server's directory, where it was stolen or the client has left.

    A server with a round under way refuses the key within seconds, and never takes it again for its run. The others go
    on. Give the number to somebody else's key before a new run begins: a run's clients have the numbers 0, 1, …
    without a gap.
    """
    require_keys()
    from ..network.protocol import certs

    kept = certs.revoke(directory, number)
    console.print(f"the key of client {number} is revoked; it is kept as {kept}", highlight=False, soft_wrap=True)


def sign(
    directory: Annotated[Path, typer.Argument(help="The authority's directory, as made by `fedkseed certs`.")],
    number: Annotated[int, typer.Argument(help="The client's number, as in client-3.pub.", min=0)],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name or address under which other peers reach it; may be repeated, or left out."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificate is valid.", min=1)] = 365,
) -> None:
    """Sign a certificate for a client's key, with which it can be a peer: `fedkseed peer --cert`.

    The client's private key stays where it is. Send client-K.pem and ca.pem back to it.
    """
    require_keys()
    from ..network.protocol import certs

    made = certs.sign(directory, number, host or [], days)
    console.print(f"made {made}: send it to the owner of {made.with_suffix('.pub')}", highlight=False, soft_wrap=True)


def members(
    directory: Annotated[Path, typer.Argument(help="The server's directory, as made by `fedkseed certs`.")],
) -> None:
    """Print the public lines of all clients, in the order of their numbers.

    Clients that give them to `fedkseed client --members FILE` mask their uploads for these keys alone. Get the file
    from somebody else than the server's owner, or compare it with each other.
    """
    require_keys()
    from ..network.protocol import certs

    print(certs.members(directory), end="")


def public(
    key: Annotated[Path, typer.Argument(help="A client's private key.")],
) -> None:
    """Print the public line of a client's key, as `fedkseed certs request` has written it into its public file.

    Files of older releases have no key for masks; this line does.
    """
    require_keys()
    from ..network.protocol import certs

    print(certs.public(key), end="")


def begun(
    recipe: Path, changes: list[str] | None, output: Path | None, alone: str | None = None
) -> "tuple[Recipe, Path]":
    """The recipe of a server, and the directory of its run, which is made or goes on.

    Args:
        alone: the kind of server, where shards can't be its clients.

    Raises:
        FedKSeedError: the recipe can't be followed over a network, or the directory holds a run of another.
    """
    from ..network.protocol.networked_recipe import networked, require_networked, require_one_server
    from ..recipe.reading import own_recipe
    from ..run.progress import Silent
    from ..run.store import Store
    from ..run.trackers import Trackers

    wanted, directory = networked(own_recipe(recipe, changes or ())).absolute(), output or Path("runs") / recipe.stem
    require_networked(wanted)  # now, and not when the clients are there
    if alone is not None:
        require_one_server(wanted, alone)
    Trackers(wanted.report.to, Silent())  # refuses one whose package is missing
    prepare()
    if (directory / "recipe.toml").exists():
        known = Store(directory).load_recipe()
        if known.model_copy(update={"network": wanted.network, "report": wanted.report}) != wanted:
            raise FedKSeedError(
                f"{directory} holds a run of another recipe than {recipe}: undo the change, or choose another "
                "--output; only [network] and [report] may change"
            )
    else:
        with Store.create(directory, wanted.to_toml()):
            pass
    return wanted, directory


def owner_of(
    data: str, model: str | None, device: str, policy: Path | None, basis: Path | None, members: Path | None
) -> "Owner":
    """The settings that the owner of a client decides.

    Raises:
        FedKSeedError: there is no such file, or the policy can't be read.
    """
    from ..network.protocol.client.consent import Owner
    from ..network.protocol.client.policy import Policy, load_policy

    path = Path(data).expanduser()
    place = Path(model).expanduser() if model is not None else None
    return Owner(
        str(path.resolve()) if path.exists() else data,
        str(place.resolve()) if place is not None and place.exists() else model,
        device,
        load_policy(policy) if policy is not None else Policy(),
        basis=str(basis.expanduser().resolve()) if basis is not None else None,
        members=str(members.expanduser().resolve()) if members is not None else None,
    )


def prepare() -> None:
    """Keep all files of a command and its children private, and let SIGTERM end it as Ctrl-C does.

    Ctrl-C ends the children first, and prints a line.
    """
    os.umask(0o077)  # files of Flower's own: its database, its logs

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
