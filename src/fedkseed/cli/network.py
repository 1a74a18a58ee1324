"""The parts that the commands of all transports share: options, the run of a server, the settings of a client."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
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
    from ..network.protocol.server.serving import begin

    prepare()
    directory = output or Path("runs") / recipe.stem
    return begin(recipe, changes or (), directory, *places), directory


def prepare() -> None:
    """Keep all files of a command and its children private, and let SIGTERM end it as Ctrl-C does.

    Ctrl-C ends the children first, and prints a line.
    """
    os.umask(0o077)

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
