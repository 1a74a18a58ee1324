"""The terminal: how much a command shows, its lines and errors, and JSON documents in their place."""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import without_controls

console = Console(markup=False)  # paths and texts of users may hold brackets
QUIET, USUAL, VERBOSE = range(3)
shown_level: ContextVar[int] = ContextVar("shown_level", default=USUAL)  # how much is shown beside results


@contextmanager
def showing(level: int, as_json: bool = False) -> Iterator[None]:
    """Show more or less than usual of a command's progress; with `as_json`, all but the document goes to stderr."""
    before, token = console.stderr, shown_level.set(level)
    console.stderr = as_json or before
    try:
        yield
    finally:
        console.stderr = before
        shown_level.reset(token)


def say(text: str) -> None:
    """Print a text as it is, but for control characters: without colours, broken into lines by the terminal alone."""
    console.print(without_controls(text), highlight=False, soft_wrap=True)


def note(text: str, style: str = "dim") -> None:
    """Print a line on what a command does, unless it is quiet: on a terminal as wide as that, in a log in one piece."""
    if shown_level.get() != QUIET:
        console.print(Text(without_controls(text), style), highlight=False, soft_wrap=not console.is_terminal)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout: numbers that are not finite are null, objects are text."""
    utf = "utf" in (sys.stdout.encoding or "utf").lower()
    print(json.dumps(finite(document), indent=1, ensure_ascii=not utf, default=str))


def print_rows(titles: Sequence[str], rows: Sequence[Sequence[Any]], as_json: bool) -> None:
    """Print rows as a table, in which a list without members is `none`, or as one JSON document."""
    from rich.table import Table

    if as_json:
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
        return
    table = Table(*titles)
    table.columns[0].no_wrap, table.columns[0].min_width = True, max((len(f"{row[0]}") for row in rows), default=0)
    for row in rows:
        table.add_row(*((", ".join(cell) or "none") if isinstance(cell, list) else str(cell) for cell in row))
    console.print(table)


def finite(value: Any) -> Any:
    """A value for JSON, with None in place of NaN and infinities, which JSON lacks, and records as tables."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): finite(member) for key, member in value.items()}
        case list() | tuple():
            return [finite(member) for member in value]
    return finite(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value


def short(number: float) -> str:
    """A number as three digits and a letter: 17,748 is 17.7 k, 134,515,008 is 135 M."""
    for letter in ("", " k", " M", " G"):
        if abs(number) < 999.5 or letter == " G":
            break
        number /= 1000
    return f"{number:.3g}{letter}"
