"""The parts that all commands share: options, help, --quiet and --verbose, refusals in one line, and exit codes."""

import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import wraps
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Abort, Argument, Exit, Option
from typer.core import TyperCommand, TyperGroup

from ..errors import DIVERGED, INTERRUPTED, REFUSED, FedKSeedError
from ..report.terminal import QUIET, USUAL, VERBOSE, showing

if TYPE_CHECKING:
    from ..run.loop import Result

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or a user's part of it
Directory = Annotated[Path, Argument(metavar="RUN", help="The directory of a run, as made by `fedkseed run`.")]
RecipeFile = Annotated[Path, Argument(help="The recipe of a run: a TOML file that names model, data and algorithm.")]
Output = Annotated[
    Path | None, Option("--output", "-o", help="Directory of the run; default runs/NAME, by the recipe's file name.")
]
AdapterFile = Annotated[
    Path, Argument(metavar="RUN", help="A run's directory, an adapter file, or a folder of `fedkseed export`.")
]
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
Ensemble = Annotated[
    int, Option(metavar="N", help="The mean of a run's models after its last N rounds, of K numbers each.", min=1)
]
Json = Annotated[bool, Option("--json", help="Print one JSON document on stdout, not tables; all else goes to stderr.")]
LEVELS = {
    "quiet": Annotated[bool, Option("--quiet", "-q", help="Show results and errors alone, no progress.")],
    "verbose": Annotated[bool, Option("--verbose", "-v", help="Show each step, and of an error where it arose.")],
}

METAVARS = {"integer": "N", "integer range": "N", "float": "NUMBER", "float range": "NUMBER"}  # leave room for the help
OTHER_NAMES = {"train": "run", "start": "run", "chat": "generate", "ask": "generate", "client": "join"}  # of commands


class Taught:
    """The help of a command or a group: its docstring and options as they are written, then its examples.

    Examples are the paragraphs from the first with a line of a command on. They are printed as they are, so that a line
    can be copied from a terminal of any width; in other paragraphs the terminal breaks the lines.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        paragraphs = inspect.cleandoc(settings.pop("help", None) or "").split("\n\n")
        first = next((i for i, text in enumerate(paragraphs) if re.search(r"(?m)^ *fedkseed ", text)), len(paragraphs))
        prose, self.examples = paragraphs[:first], "\n\n".join(paragraphs[first:])
        # else typer breaks lines where they end here, and takes [directions] for a style
        settings["help"] = escape("\n\n".join(text.replace("\n", " ") for text in prose))
        super().__init__(*args, **settings)
        for parameter in vars(self)["params"]:
            parameter.help = escape(parameter.help or "")
            kind = getattr(parameter, "type", None)  # later releases of typer have short names of their own
            parameter.metavar = parameter.metavar or METAVARS.get(getattr(kind, "name", ""))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)  # type: ignore[misc] — of the class beside it in `Command`
        if self.examples:
            print(f"For example:\n\n{self.examples}")


class Command(Taught, TyperCommand):
    """A command."""


class Group(Taught, TyperGroup):
    """A group of commands, of which `help NAME` is another way to write `NAME --help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            near = [
                OTHER_NAMES.get(match, match) for match in get_close_matches(name, {**self.commands, **OTHER_NAMES})
            ]
            ctx.fail(f"No such command {name!r}." + f" Did you mean {' or '.join(near)}?" * bool(near))
        return super().resolve_command(ctx, args)


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """A command with --quiet and --verbose, whose refusals are one line on stderr and an exit code."""

    @wraps(function)
    def command(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        # progress bars of transformers would run into ours, and into the one line of an error
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
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
            except (KeyboardInterrupt, Abort):  # the second, at a question
                print("fedkseed: stopped", file=sys.stderr)
                raise Exit(INTERRUPTED) from None

    signature = inspect.signature(function)
    levels = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=LEVELS[n]) for n in LEVELS]
    with_levels: Any = command  # typer reads options from the signature
    with_levels.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *levels])
    return command


@contextmanager
def writing_all() -> Iterator[None]:
    """End the process with a line and an exit code where a disk is full, rather than lose what is printed.

    What still waits to be printed is written here: at Python's own end an error would be a line of no command's.
    """
    full: OSError | None = None
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = error
    finally:
        try:
            if sys.stdout is not None:  # it is None where it was closed
                sys.stdout.flush()
        except OSError as error:  # of a reader that has left, as `head` does, too
            full = full or (error if error.errno in FULL else None)
            with suppress(OSError, ValueError):  # else Python writes what is left at its end, and fails again
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if full is not None:
            what = "" if full.filename is None else f" {full.filename}"
            with suppress(OSError):  # where that is full, too
                print(f"fedkseed: can't write{what}: {full.strerror}; make room", file=sys.stderr)
            raise SystemExit(REFUSED)


def require_packages(what: str, *names: str) -> None:
    """Refuse to go on without packages of the extra `https`; `what` is as "keys need"."""
    if lacking := [name for name in names if find_spec(name) is None]:
        raise FedKSeedError(f"{what} the package {lacking[0]}; install it with: pip install 'fedkseed[https]'")


def end_run(result: "Result", directory: Path, as_json: bool) -> None:
    """Print the result of a run.

    Raises:
        typer.Exit: it has diverged.
    """
    from ..report.results import show_result
    from ..report.verdict import RunVerdict
    from ..run.store import Store

    show_result(result, RunVerdict.of(Store(directory)), as_json)
    if result.diverged:
        raise Exit(DIVERGED)
