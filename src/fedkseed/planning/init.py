"""A first recipe for a user's data: the data is looked at, and every value that is written has its reason beside it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from ..data.file_formats import is_saved, open_rows
from ..data.layouts import LAYOUTS, Example, normalised
from ..data.sources import Reader, require_columns
from ..data.wording import Wording, encode_all
from ..errors import FedKSeedError
from ..recipe.algorithms import ONE, OUTPUT, TWO, algorithm_of

TASKS = ("answers", "labels")
LABELS = 32  # different responses, up to which they are taken for labels; the metric `choice` takes no more
LOOKED_AT = 500  # rows that are turned into tokens, evenly from the whole file
CLIENTS, ROWS = 20, 20  # the most clients of a draft, and the rows that each has on average, at least
ROOM = 32  # max_tokens is a multiple of this
SHARE = 0.1  # of the rows, held out
RATES = {"fedkseed-backprop": 6e-5, "fedkseed-plus": 1e-5}  # of results/classification/small and recipes/dolly.toml
PARTIES = 200  # different values of a column, up to which they may be clients
# Words in the names of columns whose values are often the parties that hold the rows.
OWNERS = (
    "author", "bank", "branch", "client", "clinic", "company", "country", "customer", "department", "dept", "device",
    "group", "hospital", "institution", "office", "org", "owner", "party", "region", "school", "silo", "site", "source",
    "speaker", "team", "tenant", "user", "ward",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """The size and the kind of some data."""

    rows: int
    categories: dict[str, int]  # name -> rows; empty where rows have none
    labels: int  # different responses
    tokens: tuple[int, int, int]  # of an example: the median, the 95th percentile, the most
    files: int | None  # of a folder, one a client; None for one file
    owners: tuple[str, int] | None = None  # a column whose values may be clients, and their number

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
    clients = [*reader.folder(source).values()] if folder else [[reader.file(source)]]
    require_columns([part for parts in clients for part in parts])
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
        owners=None if folder else _owners(source, columns),
    )


def _owners(source: str, columns: Mapping[str, str]) -> tuple[str, int] | None:
    """The column of a file that looks most like the owner of a row, and the number of its different values.

    Its name has one of OWNERS as a word, every row has a value, few are different, and each is there again and again.
    The column that `columns` names for the client is taken whatever it is.
    """
    named, counts, total = columns.get("client"), dict[str, Counter[str]](), 0
    used = {normalised(name) for name in columns.values()} | {
        n for one in LAYOUTS.values() for n in one.columns.values()
    }
    for _, row in open_rows(source).rows:
        total += 1
        for column, value in row.items() if isinstance(row, dict) else ():
            if isinstance(value, str | int) and not isinstance(value, bool) and (text := str(value).strip()):
                counts.setdefault(str(column), Counter())[text] += 1
    if named is not None:
        own = next((column for column in counts if normalised(column) == normalised(named)), None)
        return (own, len(counts[own])) if own is not None else None
    fitting = [
        (column, len(found))
        for column, found in counts.items()
        if (normalised(column) == "client" or normalised(column) not in used)
        and any(
            word in OWNERS for word in re.split(r"[^a-z]+", normalised(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column)))
        )
        and 2 <= len(found) <= min(PARTIES, total // 4)
        and found.total() == total
    ]
    return min(fitting, key=lambda one: (normalised(one[0]) != "client", one[1])) if fitting else None


def _tokens(rows: Sequence[Example], tokenizer: Any) -> list[int]:
    some = rows[:: max(1, len(rows) // LOOKED_AT)]
    return [len(one.tokens) for one in encode_all(some, tokenizer, Wording("paper", "\n"))]


def draft(
    source: str,
    columns: Mapping[str, str],
    model: str,
    found: Look,
    task: str,
    algorithm: str,
    clients: int | None = None,
) -> str:
    """The text of a recipe, with comments.

    Args:
        task: one of TASKS.
        algorithm: a name of ALGORITHMS.
        clients: number of them; None: by the number of rows.
    """
    by_column = found.owners[1] if found.owners and "client" in columns and clients is None else 0
    count = found.files or clients or by_column or max(2, min(CLIENTS, found.rows // ROWS))
    usual, long, longest = found.tokens
    fits = -(-long // ROOM) * ROOM
    held = max(2, min(64, round(SHARE * found.rows)))  # as many as a run holds out
    named = f" in {len(found.categories)} categories" if found.categories else ""
    drawn = "dirichlet" if len(found.categories) > 1 else "even"
    split = "files" if found.files else "column" if by_column else drawn
    splits = {
        "files": "one client for each file of the folder",
        "column": f"one client for each of the {count} values of that column",
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
        *([] if split in ("files", "column") else [f"count = {count}"]),
        *([] if by_column else _proposed(found.owners, columns)),
        f"cohort = {min(4, count)} # clients of a round",
        *(["alpha = 0.5 # smaller is more uneven"] if split == "dirichlet" else []),
        "min_examples = 1",
        "",
        *_training(algorithm),
        "",
        "[evaluation]",
        f"examples = {_toml('all') if held < 64 else 64} # of the held-out rows",
        "every = 5 # rounds",
        "# patience = 2 # end after 2 evaluations without a better one, with the best round's model: half of the rows",
        "# then choose that round, and the other half is reported (docs/evaluation.md)",
        "# clients = 0.1 # of each client's rows, which it does not train on: did each client gain?",
    ]
    if task == "labels":
        lines += [
            f"metrics = [{metrics.removeprefix(', ')}] # {found.labels} different responses",
            f"generated = {held} # answers to write, for the exact match",
            "max_new_tokens = 8",
        ]
    return "\n".join(lines) + "\n"


def _training(algorithm: str) -> list[str]:
    """The lines of [training], and of [derivatives] where the algorithm's learning rate is there."""
    row = algorithm_of(algorithm)
    zeroth = row.local in (ONE, TWO)
    if zeroth or row.local == OUTPUT:
        why = "clients run the model forward only"
    else:
        why = "with a pass back through the model; fedkseed-plus needs none"
    searched = "`fedkseed tune RECIPE` finds a better one in minutes"
    rate, own = RATES.get(algorithm), f"lr = {RATES.get(algorithm, row.lr):g}".replace("e-0", "e-")
    return [
        "[training]",
        f"algorithm = {_toml(algorithm)} # {why}; docs/algorithms.md compares them",
        "rounds = 10",
        f"steps = {200 if zeroth else 4} # of a client in a round" + ("; the paper's number" if zeroth else ""),
        "batch_size = 4",
        *([] if rate else [f"{own} # the paper's; {searched}"]),
        'schedule = "linear"',
        *(["", "[derivatives]", f"{own} # {searched}"] if rate else []),
    ]


def _proposed(owners: tuple[str, int] | None, columns: Mapping[str, str]) -> list[str]:
    """Comment lines that propose a column as the clients."""
    if owners is None:
        return []
    column, count = owners
    named = dict(columns) | ({"client": column} if normalised(column) != "client" else {})
    fields = ", ".join(f"{field} = {_toml(name)}" for field, name in named.items())
    return [
        f"# The column {column!r} has {count} values, each in several rows: are they the parties that hold the rows?",
        "# Then, in place of split and count:",
        '# split = "column"',
        *([f"# and in [data]: columns = {{ {fields} }}"] if named != columns else []),
    ]


def _toml(value: Any) -> str:
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
