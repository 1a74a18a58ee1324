"""The parts that all commands share: options, --quiet and --verbose, refusals in one line, and exit codes."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from ..errors import DIVERGED, INTERRUPTED, REFUSED, FedKSeedError
from ..report.terminal import QUIET, USUAL, VERBOSE, print_error, showing

if TYPE_CHECKING:
    from ..run.loop import Result

Directory: TypeAlias = Annotated[Path, typer.Argument(help="The directory of a run, as made by `fedkseed run`.")]
RecipeFile: TypeAlias = Annotated[
    Path, typer.Argument(help="The recipe of a run: a TOML file that names model, data and algorithm.")
]
AdapterFile: TypeAlias = Annotated[
    Path, typer.Argument(help="The directory of a finished run, an adapter file, or a folder of `fedkseed export`.")
]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value in place of the recipe's, as training.rounds=20; none, as training.eps=, leaves the key out. May "
        "be repeated.",
    ),
]
BaseModel: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="The base model (folder, file or name), if it has moved since the run.")
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout in place of tables; all else goes to stderr.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show results and errors alone, no progress.")]
Verbose: TypeAlias = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show each step, and of an error where it arose.")
]


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """A command with --quiet and --verbose, whose refusals are one line on stderr and an exit code."""

    @wraps(function)
    def command(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        # progress bars of transformers would run into ours, and into the one line of an error
        environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        level = QUIET if quiet else VERBOSE if verbose else USUAL
        with showing(level, options.get("as_json", False)):
            try:
                function(*args, **options)
            except FedKSeedError as error:
                print_error(error)
                raise typer.Exit(REFUSED) from None
            except KeyboardInterrupt:
                print("fedkseed: stopped", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None

    signature, levels = inspect.signature(function), {"quiet": Quiet, "verbose": Verbose}
    parameters = [
        *signature.parameters.values(),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
          for name, option in levels.items()),
    ]  # fmt: skip
    with_levels: Any = command  # typer reads options from the signature
    with_levels.__signature__ = signature.replace(parameters=parameters)
    with_levels.__annotations__ = function.__annotations__ | levels
    return command


def require_new(file: Path) -> None:
    """Refuse to write over a file.

    Raises:
        FedKSeedError: it exists.
    """
    if file.exists():
        raise FedKSeedError(f"{file} exists already; choose another file")


def end_run(result: "Result", as_json: bool) -> None:
    """Print the result of a run.

    Raises:
        typer.Exit: it has diverged.
    """
    from ..report.results import show_result

    show_result(result, as_json)
    if result.diverged:
        raise typer.Exit(DIVERGED)
