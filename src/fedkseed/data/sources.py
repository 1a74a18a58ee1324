"""Reader of data: files of many formats and layouts, folders of them, and the samples of the package."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from .file_formats import READABLE, SAMPLES, SHEETS, TABLES, format_of, is_saved, open_rows
from .first_bytes import what_it_is
from .layouts import (
    AFTER,
    LAYOUTS,
    NAMES_SHOWN,
    SKIPPED,
    SPLITS,
    Columns,
    Example,
    RowLayout,
    alike_in_form,
    answer_beside,
    fit,
    is_placeholder,
    listed,
    names_of,
    normalised,
)

MAX_FAULTS = 1 << 16  # faulty rows of a file: each has a text in memory, of a row that may have two bytes
FAULTS_SHOWN = 20  # faulty rows in an error; of more, their number
DETAILS = re.compile(r"""\d+|'[^']*'|"[^"]*\"""")  # in which faults of one kind differ
# What stands in rows and hardly in names of columns: 40 characters or 7 words and more, a sentence, or a number.
ROW_CELL = re.compile(r"(?s).{40,}|\s*(\S+\s+){6,}\S+\s*|.*[.!?]\s*|[\d.,% -]+")
SPLIT_IN_NAME = re.compile(rf"(?i:(?<![a-z])({'|'.join(SPLITS)})(?![a-z]))")  # as train-00000-of-00002
SPLIT_COLUMNS = ("split", "Split", "SPLIT")


@dataclass(slots=True)
class DataFile:
    """The examples of one file, and what was found in it."""

    name: str  # the file's path within the source
    source: str
    layout: RowLayout = LAYOUTS["instruction"]
    examples: list[Example] = field(default_factory=list)
    places: list[str] = field(default_factory=list)  # each example's row or line, as "line 3"
    clients: list[str] = field(default_factory=list)  # the client that each row names; "": none
    empty: int = 0  # rows left out because there is nothing to learn
    unused: Counter[str] = field(default_factory=Counter)  # columns and keys that nothing uses -> how often
    lacking: list[str] = field(default_factory=list)  # columns that a recipe names and no row has
    columns: list[str] = field(default_factory=list)  # those of the first row
    faults: list[str] = field(default_factory=list)  # of rows that can't be used, as "line 3: the reason"
    notes: list[str] = field(default_factory=list)  # what was guessed, and sheets and lines that are not used
    leaves_out: bool = False  # whether the owner has asked to leave such rows out

    def add_fault(self, error: FedKSeedError) -> None:
        """Note a row that can't be used; the error's text begins with its place, as `place` gives it."""
        self.faults.append(str(error).removeprefix(f"{self.source}, "))
        if len(self.faults) > MAX_FAULTS:
            raise _refusal(self.source, self.faults, "is it a data file? Mend it, or share it out over several")

    def refuse_faults(self) -> None:
        """Refuse the file if some rows can't be used, unless its owner has asked to leave them out.

        Raises:
            FedKSeedError: the text has the place and the reason of each row, or of the first `FAULTS_SHOWN`.
        """
        if self.faults and not self.leaves_out:
            leaves_out = "[data] leave_out_faulty = true leaves such rows out"
            raise _refusal(self.source, self.faults, leaves_out if self.examples else "none of its rows can be used")

    def place(self, index: int) -> str:
        """The place of an example, for an error."""
        return f"{self.source}, {self.places[index]}"

    def summary(self, *more: str) -> str:
        """One line on the file: its rows and layout, and remarks on them."""
        rows = f"{len(self.examples):,} row{'s' * (len(self.examples) != 1)} as {self.layout.title}"
        return f"{self.name}: {rows}{remarks([self], *more)}"


def remarks(files: Sequence[DataFile], *more: str) -> str:
    """The end of a line on files: what is left out, not used or repeated in them, and `more`."""
    counts = sum((file.unused for file in files), Counter[str]())
    skipped, after = counts.pop(SKIPPED, 0), counts.pop(AFTER, 0)
    empty = sum(file.empty for file in files)
    doubts = Counter(doubt_of(example) for file in files for example in file.examples)
    notes = gathered((file.name * (len(files) > 1), note) for file in files for note in file.notes)
    repeated = sum(len(file.examples) - len(set(file.examples)) for file in files)
    faults = [fault if len(files) == 1 else f"{file.name}, {fault}" for file in files for fault in file.faults]
    unused = [f"{name} ({count:,})" for name, count in counts.items()]
    if len(unused) > NAMES_SHOWN:
        unused[NAMES_SHOWN:] = [f"and {len(unused) - NAMES_SHOWN:,} more"]
    clients = sorted({client for file in files for client in file.clients}, key=lambda name: (name.casefold(), name))
    alike = [pair for pair in pairwise(clients) if len(set(map(str.casefold, pair))) == 1]
    labels = alike_in_form(example.response for file in files for example in file.examples if not example.plain)
    words = (
        *notes,
        f"{empty:,} without a response left out" if empty else "",
        f"{skipped:,} left out by their flag" if skipped else "",
        f"{said} ([data] leave_out_faulty = true leaves such rows out)" if (said := counted(doubts)) else "",
        f"{repeated:,} repeated" if repeated else "",
        *more,
        f"{after:,} {AFTER} left out" if after else "",
        f"not used: {', '.join(unused)}" if unused else "",
        f"the clients {alike[0][0]!r} and {alike[0][1]!r} differ by case alone" if alike else "",
        f"the responses {labels[0]!r} and {labels[1]!r} differ by case, space or form alone" if labels else "",
        f"{len(faults):,} faulty row{'s' * (len(faults) != 1)} left out: {faults[0]}" if faults else "",
    )
    return f"; {', '.join(filter(None, words))}" if any(words) else ""


def gathered(remarks: Iterable[tuple[str, ...]], joint: str = " ", places: int = NAMES_SHOWN) -> list[str]:
    """Remarks on places in one line a kind: the first in full, and where the others are."""
    kinds = dict[str, list[tuple[str, ...]]]()
    for place, reason in remarks:
        kinds.setdefault(DETAILS.sub("", reason), []).append((place, reason))
    lines = list[str]()
    for (first, reason), *others in kinds.values():
        more = f" and {len(others) - places:,} more" if len(others) > places else ""
        alike = f" (so {', '.join(place for place, _ in others[:places])}{more})" if others else ""
        lines.append(f"{first}{joint * bool(first)}{reason}{alike}")
    return lines


def doubt_of(example: Example) -> str:
    """The reason why an example should perhaps not be learned; empty for most."""
    asked, answer = example.instruction.strip(), example.response.strip()
    if not (asked and not is_placeholder(asked)) and not (example.context or example.turns or example.plain):
        return "without a question"
    return f"with the answer {answer!r}" if is_placeholder(answer) and not example.plain else ""


def counted(doubts: Counter[str]) -> str:
    """Doubts and their numbers, as "2 without a question, 1 with the answer 'n/a'"."""
    return ", ".join(f"{count:,} {doubt}" for doubt, count in doubts.items() if doubt)


@dataclass(frozen=True, slots=True)
class Reader:
    """The way in which a recipe wants files to be read."""

    columns: Columns = field(default_factory=dict)  # names that differ, as in {"instruction": "question"}
    layout: str | None = None  # a name of `LAYOUTS`; None: the one that fits the columns of each file
    strict: bool = False  # refuse rows without a response and repeated ones; else leave out the first, and count both
    leave_out_faulty: bool = False  # leave out rows that can't be read, and count them; else refuse the file

    def file(self, source: str, name: str | None = None) -> DataFile:
        """The examples of a file, a folder that `save_to_disk` wrote, a sample, or a data set on the hub.

        Raises:
            FedKSeedError: it is missing or damaged, or a row is broken (the text names its place).
        """
        notes = list[str]()
        place_of_file, rows = open_rows(source, self.columns, notes)
        file = DataFile(name or (source if source in SAMPLES else Path(source).name), place_of_file, notes=notes)
        file.leaves_out = self.leave_out_faulty
        lacking = {normalised(column): column for column in names_of(self.columns)}
        first_places, refused = dict[Example, str](), list[str]()
        misfit: tuple[RowLayout, dict[str, Any], str] | None = None  # the first row with columns of no layout
        splits = Counter[str]()
        try:
            for place, row in rows:
                for column in map(normalised, row) if lacking and isinstance(row, dict) else ():
                    lacking.pop(column, None)
                if not file.columns and isinstance(row, dict):
                    layout = fit(row, self.columns, self.layout, f"{file.source}, {place}")
                    file.layout, file.columns = layout, [] if layout.missing(row) else [*row]
                    if not self.layout and "text" not in self.columns and (answer := answer_beside(layout, row)):
                        learned = f"{{instruction = {layout.columns['text']!r}, response = {answer!r}}}"
                        notes.append(f"{answer!r} is not learned, [data] columns = {learned} learns it")
                    misfit = misfit or (layout, row, f"{file.source}, {place}")
                before = len(file.examples)
                try:
                    self._add(file, place, row, first_places, refused)
                except FedKSeedError as error:
                    file.add_fault(error)
                if len(file.examples) > before and (split := next(filter(row.get, SPLIT_COLUMNS), "")):
                    splits[SPLITS.get(normalised(str(row[split])), "")] += 1
        except FedKSeedError as damage:
            if not file.faults or file.leaves_out:
                raise
            file.add_fault(damage)
        if not file.columns and misfit is not None:
            layout, row, where = misfit
            if (format_of(file.source) or [""])[0] in (*TABLES, *SHEETS) and any(map(ROW_CELL.fullmatch, row)):
                shown = ", ".join(f"{name:.40}" for name in row)
                raise FedKSeedError(
                    f"{file.source}: the first line does not look like names of columns: {shown}. If it is a row, "
                    "write a line above it, as question,answer; if these are names, say which is which, as options of "
                    "`fedkseed init` do: --column instruction=NAME --column response=NAME"
                )
            layout.example(row, where)  # refuses it, and says which columns are expected
        file.refuse_faults()
        del splits[""]  # that are no parts' names
        is_used = "split" in map(normalised, file.layout.columns.values())
        if splits["train"] and len(splits) > 1 and not is_used:
            raise FedKSeedError(
                f"{file.source}: the column split says {', '.join(f'{part} ({n:,})' for part, n in splits.items())}, "
                "and all rows would be used as one; write those to use into a file of their own, or remove the column"
            )
        file.lacking = list(lacking.values())
        if refused:
            raise _refusal(file.source, refused, "remove the row, or set [data] strict = false")
        if not file.examples:
            left_out = file.empty + file.unused[SKIPPED]
            reason = f" to learn from: none of its {left_out:,} rows has a response" if left_out else ""
            raise FedKSeedError(f"the data file {file.source} holds no examples{reason}")
        return file

    def _add(self, file: DataFile, place: str, row: Any, first_places: dict[Example, str], refused: list[str]) -> None:
        """Add a row to a file, or the reason why [data] strict refuses it to `refused`.

        Args:
            first_places: the first place of each example so far, which a strict reader needs.

        Raises:
            FedKSeedError: the row can't be used.
        """
        where, counts = f"{file.source}, {place}", Counter[str]()
        if isinstance(row, FedKSeedError):
            raise row
        if not isinstance(row, dict):
            raise FedKSeedError(f"{where}: expected a JSON object, got {type(row).__name__}")
        if not file.columns or file.layout.missing(row):
            raise FedKSeedError(file.layout.refusal(row, where))
        example = file.layout.example(row, where, counts)
        file.unused.update(counts)
        if counts[SKIPPED]:
            return
        is_empty, doubt = not example.response.strip(), doubt_of(example)
        first = first_places.setdefault(example, place) if self.strict else place
        if self.leave_out_faulty and doubt and not is_empty:
            raise FedKSeedError(f"{where}: a row {doubt}")
        if self.strict and (is_empty or doubt or first != place):
            same = f"a row {doubt}" if doubt else f"the row is the same as that of {first}"
            refused.append(f"{place}: " + ("the response is empty, so there is nothing to learn" if is_empty else same))
        elif is_empty:
            file.empty += 1
        else:
            file.examples.append(example)
            file.places.append(place)
            file.clients.append(file.layout.client(row))

    def folder(self, folder: str) -> dict[str, list[DataFile]]:
        """The data files of each client, by the client's name: a client is a file or a folder in the folder.

        Raises:
            FedKSeedError: there is none, one can't be read, or a file is of another format. Hidden files alone are left
                out.
        """
        path = Path(folder).expanduser()
        entries = _visible(path) if path.is_dir() and not is_saved(path) else []
        if not entries:
            raise FedKSeedError(f"no folder with data files at {path}; give one file or folder a client, {READABLE}")
        endings = ["".join(format_of(entry.name) or ()) if entry.is_file() else "" for entry in entries]
        names = [entry.name[: len(entry.name) - len(end)] for entry, end in zip(entries, endings, strict=True)]
        _require_no_parts(path, names)
        if len(set(names)) < len(names):  # hr.csv beside hr.json
            names = [entry.name for entry in entries]
        clients, refusals = dict[str, list[DataFile]](), list[str]()
        for name, entry in zip(names, entries, strict=True):
            clients[name] = []
            if entry.is_dir() and not is_saved(entry):
                _require_no_parts(entry, [file.name for file in _visible(entry)])
            for file in _data_files(entry, refusals):
                try:
                    clients[name].append(self.file(str(file), str(file.relative_to(path))))
                except FedKSeedError as refusal:
                    refusals.append(str(refusal))
        if refusals:
            lines = gathered((text.partition(": ")[::2] for text in refusals), ": ")
            more = len(lines) - FAULTS_SHOWN
            raise FedKSeedError("\n".join([*lines[:FAULTS_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]))
        return clients


def _require_no_parts(folder: Path, names: Sequence[str]) -> None:
    """Refuse files for training and files for tests, by their names, as clients, or as the rows of one."""
    parts = [SPLITS[part[1].lower()] if (part := SPLIT_IN_NAME.search(name)) else "" for name in names]
    if "train" in parts and len(set(parts)) > 1 and all(parts):
        raise FedKSeedError(
            f"the files in {folder}, {listed(names)}, are parts of one data set by their names, and all would be "
            "trained on; name the file to train on as [data] source, whose rows [clients] split shares out, or leave "
            "only the files to train on there"
        )


def _refusal(source: str, faults: Sequence[str], remedy: str) -> FedKSeedError:
    """The refusal of a file for some of its rows, each with its place: of the first `FAULTS_SHOWN`."""
    lines = gathered((fault.partition(": ")[::2] for fault in faults), ": ", FAULTS_SHOWN)
    more = f"; and {len(lines) - FAULTS_SHOWN:,} more" if len(lines) > FAULTS_SHOWN else ""
    count = f"{len(faults):,} faulty rows: " if len(faults) > 1 else ""
    return FedKSeedError(f"{source}, {'; '.join(lines[:FAULTS_SHOWN])}{more}; {count}{remedy}")


def require_columns(files: Sequence[DataFile]) -> None:
    """Refuse names of columns that no row of these files has: a name with a slip of the pen would be ignored.

    One that some file has is right: files of several layouts may share a recipe.

    Raises:
        FedKSeedError: there is one.
    """
    if lacking := set.intersection(*(set(file.lacking) for file in files)):
        alone = len(files) == 1
        where = files[0].source if alone else f"none of {len(files)} files, as {files[0].source},"
        raise FedKSeedError(
            f"[data] columns: {where} {'has no column' if alone else 'has a column'} "
            f"{' or '.join(map(repr, sorted(lacking)))}; found: {', '.join(files[0].columns)}. Mend the name, or leave "
            "it out"
        )


def read(source: str, columns: Columns | None = None) -> list[Example]:
    """All examples of a file; rows without a response are left out.

    Args:
        source: `dolly-sample` (2,400 instructions) or `intents` (693 requests of seven kinds), which come with the
            package; a file or a folder of one data set, see docs/data.md; or `owner/name` of a data set on the hub.
        columns: see `Reader`.

    Raises:
        FedKSeedError: the source is missing or damaged, or a row is broken (the text names its place).
    """
    file = Reader(columns or {}).file(source)
    require_columns([file])
    return file.examples


def is_here(source: str) -> bool:
    """Whether this machine has a source: a sample of the package, a file or a folder."""
    return source in SAMPLES or Path(source).expanduser().exists()


def _visible(path: Path) -> list[Path]:
    """The entries of a folder, without hidden ones and those by which Excel marks an open file."""
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "~$")))


def _data_files(entry: Path, refusals: list[str]) -> list[Path]:
    """A data file, or those of a client's folder; all else is refused by its name, in `refusals`."""
    inside = _visible(entry) if entry.is_dir() and not is_saved(entry) else [entry]
    others = [file for file in inside if not is_saved(file) and (file.is_dir() or format_of(file.name) is None)]
    refusals += [
        f"{file} is no data file that is read: {READABLE} are, and data of a client must not be left out in silence; "
        "convert it, or move it out of the folder"
        + (f"; {known}" if file.is_file() and (known := what_it_is(file, file.suffix.lower())) else "")
        for file in others
    ]
    if not inside:
        refusals.append(f"the folder of a client, {entry}, holds no data files; remove it or put {READABLE} there")
    return [file for file in inside if file not in others]
