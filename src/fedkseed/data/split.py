"""The split of a recipe's data: it is read, held out in part, and divided among clients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..recipe.schema import DataTable, Recipe
from .batches import Encoded
from .file_formats import is_saved
from .layouts import Example
from .natural_instructions import subsample
from .partition import dirichlet, even
from .sources import DataFile, Reader, require_columns

DEFAULT_CATEGORY = DataTable.model_fields["held_out"].default  # a category of Dolly, which the paper holds out
SHARE_WITHOUT_IT = 0.1  # held-out share of data without that category, if the recipe names no other


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
    if recipe.clients.split == "tasks":
        return _read_tasks(recipe)
    if recipe.clients.split == "files":
        files_of = reader_of(recipe).folder(recipe.data.source)
        files, owners = [file for each in files_of.values() for file in each], list(files_of)
        require_columns(files)
        rows = [row for owner, name in enumerate(owners) for row in rows_of(files_of[name], owner)]
    else:
        file = _read_one_file(recipe)
        files, owners = [file], _clients_in(file, recipe) if recipe.clients.split == "column" else [""]
        numbers = {name: number for number, name in enumerate(owners)}
        named = enumerate(zip(file.examples, file.clients, strict=True))
        rows = [OwnedRow(e, numbers.get(client, 0), file, index) for index, (e, client) in named]
    held_out, training = hold_out(rows, recipe)
    return SourceRows(held_out, training, owners, files)


def _read_tasks(recipe: Recipe) -> SourceRows:
    """The tasks of Natural Instructions, whose own lists say which are held out."""
    tasks = subsample(
        recipe.data.source,
        recipe.seed,
        protocol=recipe.data.protocol,
        max_characters=recipe.data.max_tokens,
        least=recipe.clients.min_examples,
    )
    return SourceRows(
        held_out=[OwnedRow(e) for task in tasks.held_out for e in task.examples],
        training=[OwnedRow(e, owner) for owner, task in enumerate(tasks.clients) for e in task.examples],
        owners=[task.name for task in tasks.clients],
        too_small=len(tasks.too_small),
    )


def _read_one_file(recipe: Recipe) -> DataFile:
    source = recipe.data.source
    if _is_folder(source):
        raise FedKSeedError(
            f"{source} is a folder: set [clients] split = 'files' for one client a file or folder in it, or name "
            "one file"
        )
    file = reader_of(recipe).file(source)
    require_columns([file])
    return file


def _clients_in(file: DataFile, recipe: Recipe) -> list[str]:
    """The names of the clients that a column of a file gives, sorted."""
    if "" in file.clients:
        raise FedKSeedError(
            f"{file.place(file.clients.index(''))}: no client is named; [clients] split = 'column' takes it from the "
            f"column {recipe.data.columns.get('client', 'client')!r}, or that which [data] columns names, as columns = "
            "{client = 'department'}"
        )
    return sorted(set(file.clients))


def reader_of(recipe: Recipe) -> Reader:
    return Reader(recipe.data.columns, recipe.data.layout, recipe.data.strict)


def read_files(source: str, recipe: Recipe) -> list[DataFile]:
    """A file, or all files of a folder."""
    if _is_folder(source):
        return [file for files in reader_of(recipe).folder(source).values() for file in files]
    return [reader_of(recipe).file(source)]


def rows_of(files: Sequence[DataFile], owner: int = 0) -> list[OwnedRow]:
    return [OwnedRow(example, owner, file, index) for file in files for index, example in enumerate(file.examples)]


def _is_folder(source: str) -> bool:
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
        order = generator(recipe.seed, Purpose.HOLDOUT).permutation(len(rows))
        chosen = set(order[: round(asked * len(rows))].tolist())
    return [rows[k] for k in sorted(chosen)], [row for k, row in enumerate(rows) if k not in chosen]


def divide(
    examples: Sequence[Encoded], owner_of: Sequence[int], owners: Sequence[str], recipe: Recipe
) -> tuple[list[list[Encoded]], list[str]]:
    """Each client's examples, and the clients' names where owners have names.

    Args:
        owner_of: the number of each example's owner.

    Raises:
        FedKSeedError: the examples are too few, or not those of as many clients as the recipe says.
    """
    clients, rng = recipe.clients, generator(recipe.seed, Purpose.PARTITION)
    match clients.split, clients.count:
        case "dirichlet", int(count):
            labels = [e.example.category for e in examples]
            parts = dirichlet(labels, count, clients.alpha, clients.min_examples, rng)
        case "even", int(count):
            parts = even(len(examples), count, clients.min_examples, rng)
        case _:
            return _divide_by_owner(examples, owner_of, owners, recipe)
    return [[examples[k] for k in part] for part in parts], []


def _divide_by_owner(
    examples: Sequence[Encoded], owner_of: Sequence[int], owners: Sequence[str], recipe: Recipe
) -> tuple[list[list[Encoded]], list[str]]:
    """One client an owner; a task with only long examples is no client."""
    settings, names = recipe.clients, list(owners)
    shares: list[list[Encoded]] = [[] for _ in owners]
    for example, owner in zip(examples, owner_of, strict=True):
        shares[owner].append(example)
    if settings.split == "tasks":
        names = [name for name, share in zip(owners, shares, strict=True) if share]
        shares = [share for share in shares if share]
    if not shares or settings.count not in (None, len(shares)):
        raise FedKSeedError(
            f"{recipe.data.source} holds the data of {len(shares)} clients"
            + (f", [clients] count says {settings.count}" if settings.count else "; lower [clients] min_examples")
        )
    if settings.split != "tasks" and min(map(len, shares)) < settings.min_examples:
        least = min(range(len(shares)), key=lambda client: len(shares[client]))
        raise FedKSeedError(
            f"client {least} has {len(shares[least])} examples of {names[least]!r} after holding out and leaving out "
            f"long ones, [clients] min_examples says {settings.min_examples}"
        )
    return shares, names
