"""Lists that a cell of a table holds as text, or as an object of columns: tables have no lists of their own."""

import ast
import json
import re
import warnings
from typing import Any

from ..errors import FedKSeedError

MAX_PRINTED = 1 << 18  # characters of a list as Python prints it: for a million its parser can take 0.5 GB
# A string of Python's; or what is between two objects that NumPy prints, which is no comma.
STRING_OR_GAP = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(\}\s+(?=\{))""")
ARRAYS = re.compile(r"\s*\{['\"](text|answer_start)['\"]: array\(")


def unpacked(value: Any) -> Any:
    """The list or object of a cell in whatever form it is kept; a cell that holds none, as it is."""
    read = parsed(value) if isinstance(value, str) else value
    if isinstance(read, dict) and read and all(isinstance(cell, list) for cell in read.values()):
        columns = [*read.values()]
        if len({*map(len, columns)}) == 1:
            return [dict(zip(read, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return read if isinstance(read, list | dict) else value


def parsed(text: str) -> Any:
    """The list or object that a text says in JSON, or as Python and NumPy print it; None where it says none.

    pandas and the package `datasets` write lists into CSV files as the latter two do.
    """
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError:
        pass
    except (ValueError, RecursionError):  # a key twice, or brackets within brackets
        return None
    if len(text) > MAX_PRINTED:
        return None
    commas = STRING_OR_GAP.sub(lambda found: "}, " if found[1] else found[0], text.strip())
    try:
        with warnings.catch_warnings(action="ignore"):  # of a backslash before a letter
            return json.loads(json.dumps(ast.literal_eval(commas)))  # JSON has no sets, and no number without a bound
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; one with two values for a key is refused, since one would be lost."""
    cells = dict(pairs)
    if len(cells) < len(pairs):
        first = dict(reversed(pairs))
        if twice := [key for key, cell in cells.items() if repr(first[key]) != repr(cell)]:
            raise ValueError(f"the key {twice[0]!r} is there twice, with different values")
    return cells


def first_answer(value: Any, where: str) -> tuple[Any, bool]:
    """The first of the answers in a cell of SQuAD's column `answers`, and whether there are others.

    They are an object of texts and their places, also as its text; any other value is returned as it is.

    Raises:
        FedKSeedError: it is the text of such an object as pandas prints NumPy's arrays in one.
    """
    cell = parsed(value) if isinstance(value, str) else value
    if not isinstance(cell, dict) or cell.keys() != {"text", "answer_start"} or not isinstance(cell["text"], list):
        if isinstance(value, str) and ARRAYS.match(value):
            raise FedKSeedError(f"{where}: answers as pandas prints arrays, {value!r:.60}; write the text of one alone")
        return value, False
    different = [answer for answer in cell["text"] if answer not in (None, "")]
    return (different or [None])[0], any(answer != different[0] for answer in different)
