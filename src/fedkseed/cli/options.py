"""The parts that all commands share: options, --quiet and --verbose, refusals in one line, and exit codes."""

import inspect
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from io import TextIOWrapper
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Exit, Option

from ..errors import DIVERGED, INTERRUPTED, REFUSED, FedKSeedError
from ..report.terminal import QUIET, USUAL, VERBOSE, showing

if TYPE_CHECKING:
    from ..run.loop import Result

Directory = Annotated[Path, Argument(help="The directory of a run, as made by `fedkseed run`.")]
RecipeFile = Annotated[Path, Argument(help="The recipe of a run: a TOML file that names model, data and algorithm.")]
Output = Annotated[Path | None, Option(help="Directory of the run; default runs/NAME, by the recipe's file name.")]
AdapterFile = Annotated[Path, Argument(help="A run's directory, an adapter file, or a folder of `fedkseed export`.")]
Changes = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value in place of the recipe's, as training.rounds=20; none, as training.eps=, leaves the key out. May "
        "be repeated; give it again when a server goes on.",
    ),
]
BaseModel = Annotated[str | None, Option("--model", help="The base model, if it has moved since the run.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout, not tables; all else goes to stderr.")]
LEVELS = {
    "quiet": Annotated[bool, Option("--quiet", "-q", help="Show results and errors alone, no progress.")],
    "verbose": Annotated[bool, Option("--verbose", "-v", help="Show each step, and of an error where it arose.")],
}


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """A command with --quiet and --verbose, whose refusals are one line on stderr and an exit code."""

    @wraps(function)
    def command(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        # progress bars of transformers would run into ours, and into the one line of an error
        environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if isinstance(sys.stdout, TextIOWrapper):  # texts of users, where a terminal or a log lacks their letters
            sys.stdout.reconfigure(errors="backslashreplace")
        level = QUIET if quiet else VERBOSE if verbose else USUAL
        with showing(level, options.get("as_json", False)):
            try:
                function(*args, **options)
            except FedKSeedError as error:
                if level == VERBOSE:
                    traceback.print_exception(error)
                print(f"fedkseed: {error}", file=sys.stderr)
                raise Exit(REFUSED) from None
            except KeyboardInterrupt:
                print("fedkseed: stopped", file=sys.stderr)
                raise Exit(INTERRUPTED) from None

    signature = inspect.signature(function)
    levels = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=LEVELS[n]) for n in LEVELS]
    with_levels: Any = command  # typer reads options from the signature
    with_levels.__doc__ = escape(function.__doc__ or "")  # else [directions] would be taken for a style
    with_levels.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *levels])
    return command


def require_packages(what: str, *names: str) -> None:
    """Refuse to go on without packages of the extra `https`; `what` is as "keys need"."""
    if lacking := [name for name in names if find_spec(name) is None]:
        raise FedKSeedError(f"{what} the package {lacking[0]}; install it with: pip install 'fedkseed[https]'")


def end_run(result: "Result", as_json: bool) -> None:
    """Print the result of a run.

    Raises:
        typer.Exit: it has diverged.
    """
    from ..report.results import show_result

    show_result(result, as_json)
    if result.diverged:
        raise Exit(DIVERGED)
