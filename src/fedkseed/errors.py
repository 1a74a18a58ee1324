"""The one exception that a user meets: its text says what was found, what was expected and what to do.

Every check (of configuration, files, messages, arguments of the public functions) raises it; the command line prints
its text on one line and exits with code 2.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def without_controls(text: str) -> str:
    """A text that is safe to print: spaces stand for characters that move the cursor, set colours or reverse the order.

    Files, servers and peers write parts of what is printed, and could write over what was said before.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


class FedKSeedError(ValueError):
    """Refused input or a failure, with a text for a person; nothing was changed when it is raised."""

    def __init__(self, *texts: object) -> None:
        super().__init__(*(without_controls(str(text)) for text in texts))


class DivergedError(FedKSeedError):
    """A training whose numbers have left all bounds; `best` is the adapter of its best model, where there was one."""

    best: Any = None


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Say what to install where an import of an optional package fails; `what` is as "adapters need"."""
    try:
        yield
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        lacking = f" ({error.name} is missing)" if missing else f" ({first_line(error)})"
        raise FedKSeedError(f"{what} the extra `{extra}`: pip install 'fedkseed[{extra}]'{lacking}") from error


@contextmanager
def others_border(what: str, advice: str = "") -> Iterator[None]:
    """Turn an error of another library, of whatever kind, into a FedKSeedError: `what`, the reason, and what to do."""
    try:
        yield
    except FedKSeedError:
        raise
    except Exception as error:
        raise FedKSeedError(f"{what}: {first_line(error)}{advice and '; '}{advice}") from error


def require_choice(what: str, value: object, choices: Sequence[object]) -> None:
    """Refuse an unknown setting: a misspelt one must not be taken for another."""
    if value not in choices:
        raise FedKSeedError(f"no {what} is called {value!r}; choose one of {', '.join(map(str, choices))}")


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its kind where it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


REFUSED, DIVERGED, INTERRUPTED = 2, 3, 130  # exit codes of commands, see `fedkseed --help`
