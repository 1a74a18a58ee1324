"""A first recipe for a user's data: the data is looked at, and every value that is written has its reason beside it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from ..data.formats import is_saved
from ..data.layouts import Example
from ..data.reading import Reader
from ..data.wording import Wording, encode_all
from ..errors import FedKSeedError

TASKS = ("answers", "labels")
LABELS = 32  # different responses, up to which they are taken for labels; the metric `choice` takes no more
LOOKED_AT = 500  # rows that are turned into tokens, evenly from the whole file
CLIENTS, ROWS = 20, 20  # the most clients of a draft, and the rows that each has on average, at least
ROOM = 32  # max_tokens is a multiple of this
SHARE = 0.1  # of the rows, held out


@dataclass(frozen=True, slots=True)
class Look:
    """The size and the kind of some data."""

    rows: int
    categories: dict[str, int]  # name -> rows; empty where rows have none
    labels: int  # different responses
    tokens: tuple[int, int, int]  # of an example: the median, the 95th percentile, the most
    files: int | None  # of a folder, one a client; None for one file

    @property
    def task(self) -> str:
        """The kind of task: labels where few responses come again and again."""
        return "labels" if 2 <= self.labels <= min(LABELS, self.rows // 4) else "answers"


def look(source: str, columns: Mapping[str, str], tokenizer: Any) -> Look:
    """Read the data and measure it.

    Raises:
        FedKSeedError: the data can't be read, or has fewer than 20 rows.
    """
    reader, path = Reader(dict(columns)), Path(source).expanduser()
    folder = path.is_dir() and not is_saved(path)
    clients = [*reader.folder(source).values()] if folder else [[reader.part(source)]]
    rows = [row for parts in clients for part in parts for row in part.examples]
    if len(rows) < ROWS:
        raise FedKSeedError(f"{source} has {len(rows)} rows; a federation of two clients needs {ROWS} at least")
    named = Counter(row.category for row in rows if row.category)
    sizes = sorted(_tokens(rows, tokenizer))
    return Look(
        rows=len(rows),
        categories=dict(named.most_common()),
        labels=len({row.response for row in rows}),
        tokens=(int(median(sizes)), sizes[int(0.95 * (len(sizes) - 1))], sizes[-1]),
        files=len(clients) if folder else None,
    )


def _tokens(rows: Sequence[Example], tokenizer: Any) -> list[int]:
    some = rows[:: max(1, len(rows) // LOOKED_AT)]
    return [len(one.tokens) for one in encode_all(some, tokenizer, Wording("paper", "\n"))]


def draft(
    source: str, columns: Mapping[str, str], model: str, found: Look, task: str, clients: int | None = None
) -> str:
    """The text of a recipe, with comments.

    Args:
        task: one of TASKS.
        clients: number of them; None: by the number of rows.
    """
    count = found.files or clients or max(2, min(CLIENTS, found.rows // ROWS))
    usual, long, longest = found.tokens
    fits = -(-long // ROOM) * ROOM
    held = max(2, min(64, int(SHARE * found.rows) if found.files is None else 64))
    named = f" in {len(found.categories)} categories" if found.categories else ""
    split = "files" if found.files else "dirichlet" if len(found.categories) > 1 else "even"
    splits = {
        "files": "one client for each file of the folder",
        "dirichlet": "clients have uneven shares of the categories, see alpha",
        "even": "clients have equal shares",
    }
    metrics = ', "choice", "exact match"' if task == "labels" else ""
    lines = [
        f"# A first recipe for {source}: {found.rows:,} rows{named}. Every key: docs/recipe.md",
        "seed = 1",
        "",
        "[model]",
        f"name = {_toml(model)}",
        "",
        "[data]",
        f"source = {_toml(source)}",
        *([f"columns = {{ {', '.join(f'{k} = {_toml(v)}' for k, v in columns.items())} }}"] if columns else []),
        f"max_tokens = {fits} # examples have {usual} tokens as the median, {long} at 95 %, {longest} at most",
        f"held_out = {SHARE} # share of the rows that no client trains on; or the name of a category",
        "",
        "[clients]",
        f"split = {_toml(split)} # {splits[split]}",
        *([] if split == "files" else [f"count = {count}"]),
        f"cohort = {min(4, count)} # clients of a round",
        *(["alpha = 0.5 # smaller is more uneven"] if split == "dirichlet" else []),
        "min_examples = 1",
        "",
        "[training]",
        'algorithm = "fedkseed-plus" # clients run the model forward only; docs/algorithms.md has a table to choose by',
        "rounds = 10",
        "steps = 4 # of a client in a round",
        "batch_size = 4",
        'schedule = "linear"',
        "",
        "[derivatives]",
        "lr = 1e-5 # `fedkseed tune RECIPE` finds a better one in minutes",
        "",
        "[evaluation]",
        f"examples = {_toml('all') if held < 64 else 64} # of the held-out rows",
        "every = 5 # rounds",
    ]
    if task == "labels":
        lines += [
            f"metrics = [{metrics.removeprefix(', ')}] # {found.labels} different responses",
            f"generated = {min(16, held)} # answers to write, for the exact match",
            "max_new_tokens = 8",
        ]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
