"""Reader of data: files of many formats and layouts, folders of them, and the samples of the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import FedKSeedError
from .file_formats import NAMES, SAMPLES, is_saved, kind_of, rows_of
from .layouts import CONVERSATIONS, LAYOUTS, Example, fit, plainly


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The examples of one file, and what was found in it."""

    name: str  # of the file, from the source on
    layout: str  # a name of `LAYOUTS`
    examples: Sequence[Example]
    places: Sequence[int]  # of each example: the number of its row or line
    source: str
    unit: str  # of the numbers: line or row
    clients: Sequence[str]  # of each example: the client that its row names; empty where it names none
    empty: int = 0  # rows left out because there is nothing to learn
    lacking: Sequence[str] = ()  # columns that a recipe names and no row has
    columns: Sequence[str] = ()  # of the first row

    def place(self, k: int) -> str:
        """The place of example k, for an error."""
        return f"{self.source}, {self.unit} {self.places[k]}"

    @property
    def conversations(self) -> bool:
        return self.layout in CONVERSATIONS

    def said(self, *more: str) -> str:
        """One line on the file: its rows and layout, rows without a response, and `more`."""
        repeated = len(self.examples) - len(set(self.examples))
        found = [
            f"{self.empty:,} without a response left out" if self.empty else "",
            f"{repeated:,} repeated" if repeated else "",
            *more,
        ]
        remarks = ", ".join(filter(None, found))
        rows = f"{len(self.examples):,} row{'s' * (len(self.examples) != 1)} as {LAYOUTS[self.layout].title}"
        return f"{self.name}: {rows}" + (f"; {remarks}" if remarks else "")


@dataclass(frozen=True, slots=True)
class Reader:
    """The way in which a recipe wants files to be read.

    Args:
        columns: the names of columns where they differ from the layout's, as in {"instruction": "question"}.
        layout: a name of `LAYOUTS`; None: the one that fits the columns of each file.
        strict: refuse rows without a response and repeated rows; else the first are left out, and both are counted.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    strict: bool = False

    def part(self, source: str, name: str | None = None) -> SourcePart:
        """The examples of a file, a folder that `save_to_disk` wrote, a sample, or a data set on the hub.

        Raises:
            FedKSeedError: it is missing or damaged, or a row is broken (the text names its place).
        """
        rows, columns = rows_of(source), list[str]()
        examples, places, clients, fitted, empty = list[Example](), list[int](), list[str](), None, 0
        seen: dict[Example, int] = {}
        lacking = {plainly(column): column for column in self.columns.values()}
        for number, row in rows.each:
            where = rows.place(number)
            if not isinstance(row, dict):
                raise FedKSeedError(f"{where}: expected a JSON object, got {type(row).__name__}")
            fitted, columns = fitted or fit(row, self.columns, self.layout, where), columns or [*map(str, row)]
            if lacking:
                there = {*map(plainly, map(str, row))}
                lacking = {plain: column for plain, column in lacking.items() if plain not in there}
            example = fitted.example(row, where)
            if not example.response.strip():
                self._refuse(where, "the response is empty, so there is nothing to learn")
                empty += 1
                continue
            if self.strict and seen.setdefault(example, number) != number:
                self._refuse(where, f"the row is the same as that of {rows.unit} {seen[example]}")
            examples.append(example)
            places.append(number)
            clients.append(fitted.client(row))
        if fitted is None or not examples:
            found = f" to learn from: none of its {empty:,} rows has a response" if empty else ""
            raise FedKSeedError(f"the data file {rows.source} holds no examples{found}")
        name = name or (source if source in SAMPLES else Path(source).name)
        found = examples, places, rows.source, rows.unit, clients, empty, [*lacking.values()], columns
        return SourcePart(name, fitted.name, *found)

    def folder(self, folder: str) -> dict[str, list[SourcePart]]:
        """The data files of each client, by the client's name: a client is a file or a folder in the folder.

        Raises:
            FedKSeedError: there is none, one can't be read, or a file is of another kind. Hidden files alone are left
                out.
        """
        path = Path(folder).expanduser()
        found = _visible(path) if path.is_dir() and not is_saved(path) else []
        if not found:
            raise FedKSeedError(f"no folder with data files at {path}; one file or folder a client is wanted, {NAMES}")
        names = [_stem(entry) for entry in found]
        if len(set(names)) < len(names):  # as of hr.csv and hr.json
            names = [entry.name for entry in found]
        return {
            name: [self.part(str(file), str(file.relative_to(path))) for file in _files(entry)]
            for name, entry in zip(names, found, strict=True)
        }

    def _refuse(self, where: str, reason: str) -> None:
        if self.strict:
            raise FedKSeedError(f"{where}: {reason}; remove the row, or set [data] strict = false")


def require_columns(parts: Sequence[SourcePart]) -> None:
    """Refuse names of columns that no row of these files has: a name with a slip of the pen would be ignored.

    One that some file has is right: files of several kinds may share a recipe.

    Raises:
        FedKSeedError: there is one.
    """
    lacking = set.intersection(*(set(part.lacking) for part in parts)) if parts else set[str]()
    if lacking:
        where = parts[0].source if len(parts) == 1 else f"none of {len(parts)} files, as {parts[0].source},"
        no = "has no column" if len(parts) == 1 else "has a column"
        raise FedKSeedError(
            f"[data] columns: {where} {no} {' or '.join(map(repr, sorted(lacking)))}; found: "
            f"{', '.join(parts[0].columns)}. Mend the name, or leave it out"
        )


def read(source: str, columns: Mapping[str, str] | None = None) -> list[Example]:
    """All examples of a file; rows without a response are left out.

    Args:
        source: `dolly-sample` (2,400 instructions) or `intents` (693 requests of seven kinds), which come with the
            package; a file or a folder of one data set, see docs/data.md; or `owner/name` of a data set on the hub.
        columns: see `Reader`.

    Raises:
        FedKSeedError: the source is missing or damaged, or a row is broken (the text names its place).
    """
    part = Reader(columns or {}).part(source)
    require_columns([part])
    return list(part.examples)


def is_here(source: str) -> bool:
    """Whether this machine has a source: a sample of the package, a file or a folder."""
    return source in SAMPLES or Path(source).expanduser().exists()


def _visible(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _stem(entry: Path) -> str:
    """The name of a file without its format and packing."""
    kind = None if entry.is_dir() else kind_of(entry.name)
    return entry.name[: len(entry.name) - sum(map(len, kind))] if kind else entry.name


def _files(entry: Path) -> list[Path]:
    """A data file, or those of a client's folder; all else is refused by its name."""
    inside = _visible(entry) if entry.is_dir() and not is_saved(entry) else [entry]
    for file in inside:
        if not is_saved(file) and (file.is_dir() or kind_of(file.name) is None):
            raise FedKSeedError(
                f"{file} is no data file ({NAMES}), and data of a client must not be left out in silence: convert it, "
                "or move it out of the folder"
            )
    if not inside:
        raise FedKSeedError(f"the folder of a client, {entry}, holds no data files; remove it or put {NAMES} there")
    return inside
