"""The split of a recipe's data: it is read, held out in part, and divided among clients."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import DataTable, Recipe
from .batches import Encoded
from .file_formats import is_saved
from .layouts import Example, names_of
from .natural_instructions import subsample
from .sources import DataFile, Reader, require_columns

DEFAULT_CATEGORY = DataTable.model_fields["held_out"].default  # a category of Dolly, which the paper holds out
SHARE_WITHOUT_IT = 0.1  # held-out share of data without that category, if the recipe names no other
TRIES = 1000  # draws of a Dirichlet split
Row = TypeVar("Row", Encoded, "OwnedRow")  # as tokens, or as it was read


@dataclass(frozen=True, slots=True)
class OwnedRow:
    """A row of the data, its owner, and where it stands."""

    example: Example
    owner: int = 0  # number of the file, folder, task or named client
    file: DataFile | None = None  # None for a row of a task
    index: int = 0  # the example's number in `file`


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a recipe's source, held-out ones apart from those that clients may train on."""

    held_out: list[OwnedRow]
    training: list[OwnedRow]
    owners: list[str]  # names of files, folders, tasks or clients; one without a name where a split shares rows out
    files: list[DataFile] = field(default_factory=list)
    too_small: int = 0  # training tasks with too few examples to be a client


def read_source(recipe: Recipe) -> SourceRows:
    """Read a recipe's data as its split of clients has it.

    Raises:
        FedKSeedError: the data can't be read, or is not what the split needs.
    """
    reader, source, split = reader_of(recipe), recipe.data.source, recipe.clients.split
    if split == "tasks":
        return _read_tasks(recipe)
    if split == "files":
        files_of = reader.folder(source)
    elif is_folder(source):
        raise FedKSeedError(f"{source} is a folder: set [clients] split = 'files' for a client each, or name one file")
    else:
        files_of = {"": [reader.file(source)]}
    files, owners = [file for each in files_of.values() for file in each], list(files_of)
    require_columns(files)
    rows = [row for owner, each in enumerate(files_of.values()) for row in rows_of(each, owner)]
    if split == "column":
        (file,) = files
        column = " or ".join(names_of(recipe.data.columns, ["client"])) or "client"
        if not any(file.clients):
            raise FedKSeedError(
                f"{file.place(0)}: no client is named; [clients] split = 'column' takes it from the column {column!r}, "
                "or that which [data] columns names, as columns = {client = 'department'}"
            )
        for index, client in enumerate(file.clients):
            if not client:
                file.add_fault(
                    FedKSeedError(f"{file.place(index)}: no client is named; it is taken from the column {column!r}")
                )
        file.refuse_faults()
        owners = sorted(set(file.clients) - {""})
        numbers = {name: number for number, name in enumerate(owners)}
        rows = [replace(row, owner=numbers[client]) for row in rows if (client := file.clients[row.index])]
    held_out, training = hold_out(rows, recipe)
    return SourceRows(held_out, training, owners, files)


def _read_tasks(recipe: Recipe) -> SourceRows:
    """The tasks of Natural Instructions, whose own lists say which are held out."""
    data = recipe.data
    tasks = subsample(
        data.source, recipe.seed, recipe.held_out_seed, protocol=data.protocol, max_characters=data.max_tokens,
        least=recipe.clients.min_examples,
    )  # fmt: skip
    held_out = [OwnedRow(e) for examples in tasks.held_out.values() for e in examples]
    training = [OwnedRow(e, owner) for owner, examples in enumerate(tasks.clients.values()) for e in examples]
    return SourceRows(held_out, training, list(tasks.clients), too_small=len(tasks.too_small))


def reader_of(recipe: Recipe) -> Reader:
    data = recipe.data
    return Reader(data.columns, data.layout, data.strict, bool(data.leave_out_faulty))


def read_files(source: str, recipe: Recipe) -> list[DataFile]:
    """A file, or all files of a folder."""
    if is_folder(source):
        return [file for files in reader_of(recipe).folder(source).values() for file in files]
    return [reader_of(recipe).file(source)]


def rows_of(files: Sequence[DataFile], owner: int = 0) -> list[OwnedRow]:
    return [OwnedRow(example, owner, file, index) for file in files for index, example in enumerate(file.examples)]


def is_folder(source: str) -> bool:
    """Whether a source is a folder of files; one that `save_to_disk` wrote is read as a file."""
    path = Path(source).expanduser()
    return path.is_dir() and not is_saved(path)


def hold_out(rows: Sequence[OwnedRow], recipe: Recipe) -> tuple[list[OwnedRow], list[OwnedRow]]:
    """Part the held-out rows, a whole category or a random share, from the others.

    Raises:
        FedKSeedError: the data has no such category.
    """
    asked, categories = recipe.data.held_out, sorted({row.example.category for row in rows})
    if asked == DEFAULT_CATEGORY and asked not in categories:
        asked = SHARE_WITHOUT_IT
    if isinstance(asked, str):
        if asked not in categories:
            raise FedKSeedError(
                f"[data] held_out is no category of the data: {asked!r}; it has {', '.join(categories) or 'none'}; "
                "a number as 0.1 holds out a random share"
            )
        chosen = {k for k, row in enumerate(rows) if row.example.category == asked}
    else:
        order = generator(recipe.held_out_seed, Purpose.HOLDOUT).permutation(len(rows))
        chosen = set(order[: round(asked * len(rows))].tolist())
    return [rows[k] for k in sorted(chosen)], [row for k, row in enumerate(rows) if k not in chosen]


def divide(
    examples: Sequence[Row], owner_of: Sequence[int], owners: Sequence[str], recipe: Recipe
) -> tuple[list[list[Row]], list[str]]:
    """Each client's examples, and the clients' names where owners have names.

    Args:
        owner_of: the number of each example's owner.

    Raises:
        FedKSeedError: the examples are too few, or not those of as many clients as the recipe says.
    """
    settings, rng = recipe.clients, generator(recipe.seed, Purpose.PARTITION)
    if settings.count and settings.split in ("dirichlet", "even"):
        labels, count, least = [e.example.category for e in examples], settings.count, settings.min_examples
        is_even = settings.split == "even"
        parts = (
            even(len(labels), count, least, rng) if is_even else dirichlet(labels, count, settings.alpha, least, rng)
        )
        return [[examples[k] for k in part] for part in parts], []
    shares: list[list[Row]] = [[] for _ in owners]
    for example, owner in zip(examples, owner_of, strict=True):
        shares[owner].append(example)
    named = [(name, share) for name, share in zip(owners, shares, strict=True) if share or settings.split != "tasks"]
    if settings.split == "tasks" and settings.count and settings.count < len(named):
        # the head of one permutation, so that a larger count adds tasks
        named = [named[k] for k in sorted(rng.permutation(len(named))[: settings.count].tolist())]
    if not named or settings.count not in (None, len(named)):
        raise FedKSeedError(
            f"{recipe.data.source} holds the data of {len(named)} clients"
            + (f", [clients] count says {settings.count}" if settings.count else "; lower [clients] min_examples")
        )
    least = min(range(len(named)), key=lambda client: len(named[client][1]))
    name, share = named[least]
    if settings.split != "tasks" and len(share) < settings.min_examples:
        raise FedKSeedError(
            f"client {least} has {len(share)} examples of {name!r} after holding out and leaving out long ones, "
            f"[clients] min_examples says {settings.min_examples}: give it more rows, or leave it out"
            + ("" if not share else f", or set min_examples = {len(share)}")
        )
    return [share for _, share in named], [name for name, _ in named]


def dirichlet(
    labels: Sequence[str], clients: int, alpha: float, least: int, rng: np.random.Generator
) -> list[list[int]]:
    """Split examples so that each label's shares over the clients are Dirichlet(α) distributed.

    Small α (0.5 in the paper): few kinds of task a client; large α: similar clients. A client that already
    holds its even share gets no more; the draw is repeated until every client has `least` examples.

    Returns:
        For each client the indices of its examples, ascending.

    Raises:
        FedKSeedError: α ≤ 0, more clients than examples, or no draw gives every client enough.

    Source: Qin et al., 2024, Appendix C; the balancing rule is that of Li et al., 2022
    """
    _require(len(labels), clients, least)
    if not alpha > 0:
        raise FedKSeedError(f"alpha must be greater than 0, got {alpha}; 0.5 is strongly uneven, 5.0 nearly even")
    groups = [np.flatnonzero(np.asarray(labels) == label) for label in sorted(set(labels))]
    for _ in range(TRIES):
        shares: list[list[int]] = [[] for _ in range(clients)]
        for group in groups:
            p = rng.dirichlet(np.full(clients, alpha))
            p *= [len(share) < len(labels) / clients for share in shares]
            if not p.sum() > 0:
                p[:] = 1
            cuts = (np.cumsum(p / p.sum())[:-1] * len(group)).astype(int)
            for share, part in zip(shares, np.split(rng.permutation(group), cuts), strict=True):
                share.extend(part.tolist())
        if min(map(len, shares)) >= least:
            return [sorted(share) for share in shares]
    raise FedKSeedError(
        f"{TRIES} draws gave some client fewer than {least} of {len(labels)} examples; "
        "use fewer clients, a larger alpha or a smaller min_examples"
    )


def even(count: int, clients: int, least: int, rng: np.random.Generator) -> list[list[int]]:
    """Split `count` examples into equal random parts (IID)."""
    _require(count, clients, least)
    return [sorted(part.tolist()) for part in np.array_split(rng.permutation(count), clients)]


def _require(examples: int, clients: int, least: int) -> None:
    if examples < clients * max(least, 1):
        raise FedKSeedError(
            f"{clients} clients with at least {max(least, 1)} examples each need {clients * max(least, 1)}, "
            f"got {examples}; use fewer clients or more data"
        )
