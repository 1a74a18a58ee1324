"""What the commands of all transports share: options, the run of a server, the settings of a client."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ..errors import FedKSeedError

if TYPE_CHECKING:
    from ..network.protocol.client.recipe_consent import Owner
    from ..recipe.rules import Where
    from ..recipe.schema import Recipe

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


def begun(recipe: Path, changes: list[str] | None, output: Path | None, *places: "Where") -> "tuple[Recipe, Path]":
    """The recipe of a server, and the directory of its run, which is made or goes on.

    Args:
        places: of the server, whose rules hold beside those of a network.

    Raises:
        FedKSeedError: the recipe can't be followed over a network, or the directory holds a run of another.
    """
    from ..network.protocol.networked_recipe import with_network_defaults
    from ..recipe.reading import own_recipe
    from ..recipe.rules import Where, require_legal
    from ..run.progress import Silent
    from ..run.store import Store
    from ..run.trackers import Trackers

    wanted, directory = (
        with_network_defaults(own_recipe(recipe, changes or ())).absolute(),
        output or Path("runs") / recipe.stem,
    )
    require_legal(wanted, Where.NETWORK, *places)  # now, and not when the clients are there
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
    from ..network.protocol.client.policy import Policy, load_policy
    from ..network.protocol.client.recipe_consent import Owner

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
