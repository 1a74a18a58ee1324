"""Rows of data files: CSV, TSV, JSON and JSON lines, plain or packed; sheets; Parquet; what `datasets` saved.

A file is read within limits of its bytes, rows and lines, whatever it claims: it may come from a stranger.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError, needs_extra, others_border
from ..files import require_fetched
from .first_bytes import LOOKED_AT, TEXT, what_it_is
from .layouts import KNOWN_NAMES, Columns, listed, names_of, needed_columns, simplified
from .packed_lists import object_of
from .parquet import as_stored, parquet_rows
from .spreadsheets import sheets_of
from .text_encodings import REMEDY, decode, encoding_of, marked_encoding

SAMPLES = ("dolly-sample", "intents")  # shipped with the package, as NAME.jsonl.gz
TABLES = (".csv", ".tsv")
PACKINGS = (".gz", ".zst")
SHEETS = (".xlsx", ".xlsm", ".xls", ".ods")
READABLE = "*.csv, *.tsv, *.json, *.jsonl, each plain, .gz or .zst, *.parquet, *.xlsx and *.ods"  # formats, for errors
# All examples of a file are in memory. Dolly has 15,011 rows in 13 MB, Alpaca 52,002 in 23 MB.
MAX_BYTES = 1 << 32  # a file's text, unpacked
MAX_LINE = 1 << 24  # bytes in a row, and in a line
PIECE = 1 << 20  # bytes read at once of a file that is read whole
MAX_ROWS = 1 << 22  # rows, or lines
# gzip packs text to a third or a tenth, and what is made to fill a disk or a memory to a thousandth.
MAX_RATIO = 100
MAX_SMALL = 1 << 24  # bytes, up to which a file may unpack whatever its ratio: a few rows again and again
MAX_COLUMNS = 1 << 14  # of a table, as of a sheet of Excel
HEAD = 20  # first lines of a table, among which the names of its columns stand
LONGEST_NAMES = 1 << 14  # characters of a line in which names are looked for
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
SPACE = re.compile(r"[ \t\r\n]*")
SEPARATORS = ",;\t|"  # of CSV; of those that suit the first line equally well, the first
UNQUOTED = "\t|"  # separators of files that programs often write without quoting
QUOTE_AFTER_SPACE = re.compile(r' +"[^"]')  # within a quoted field it would be doubled
SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # as Excel reads it
WRAPPERS = "data", "train", "rows", "examples"  # keys of an object whose list has a file's rows
# The beginning of an object in several lines, or of one with such a list.
OBJECT = re.compile(
    r"""\s*\{\s*?([\r\n]|(\s*"[^"]*"\s*:\s*("[^"]*"|[\w.+-]+)\s*,)*\s*"(data|train|rows|examples)"\s*:\s*\[)"""
)

# Place of a row, as "line 1" or "row 1", and the row; or in its place the error of one that can't be read.
Placed: TypeAlias = Iterator[tuple[str, Any]]


def format_of(name: str) -> tuple[str, str] | None:
    """The format and the packing by the endings of a file's name, as (".csv", ".gz"); None for any other file."""
    name = name.lower()
    packing = next((packing for packing in PACKINGS if name.endswith(packing)), "")
    ending = Path(name.removesuffix(packing)).suffix
    return (ending, packing) if ending in TEXT or (ending in (".parquet", *SHEETS) and not packing) else None


def is_saved(path: Path) -> bool:
    """Whether a folder is a data set, or several, that `save_to_disk` of the package `datasets` wrote."""
    one, several = ("state.json", "dataset_info.json"), ("dataset_dict.json",)
    return path.is_dir() and any(all((path / name).is_file() for name in names) for names in (one, several))


def open_rows(source: str, columns: Columns | None = None, notes: list[str] | None = None) -> tuple[str, Placed]:
    """The place of a source, and its rows, which are read as they are asked for.

    Args:
        source: a sample, a file, the folder of a saved data set, or the name of a data set on the hub.
        columns: names of columns that are expected beside the usual ones, by which a table's separator and the line
            with the names are found.
        notes: is given, as rows are read, what was guessed and what was not used.

    Raises:
        FedKSeedError: none is there, or it is of another format. Reading the rows raises it, too: a file is damaged or
            beyond a limit.
    """
    path = Path(source).expanduser()
    if source in SAMPLES:
        path = Path(str(files("fedkseed.data") / f"{source}.jsonl.gz"))
    if is_saved(path):
        require_fetched(*path.rglob("*.arrow"))
        return str(path), _table(str(path), "saved")
    if not path.is_file():
        # A folder `owner` here means a file that is missing: to ask the hub without a network takes half a minute.
        if HUB_NAME.fullmatch(source) and format_of(source) is None and not path.parent.exists():
            return source, _table(source, "hub")
        others = f"a folder that `save_to_disk` wrote, or one of {', '.join(SAMPLES)}"
        raise FedKSeedError(f"no data file at {path}; give a file ({READABLE}), {others}")
    formatted = format_of(path.name)
    if not path.stat().st_size:
        raise FedKSeedError(
            f"the data file {path} can't be read: it is empty, and holds no examples; save or copy it again"
        )
    require_fetched(path)
    known = what_it_is(path, path.suffix.lower())
    if formatted is None:
        raise FedKSeedError(f"{path} is of a kind that is not read; give a file of {READABLE}{known and '; ' + known}")
    if known:
        raise FedKSeedError(f"the data file {path} can't be read: {known}")
    if formatted[0] == ".parquet":
        return str(path), _parquet(path)
    table = _Names(str(path), columns or {}, [] if notes is None else notes)
    return str(path), (_sheets(path, table) if formatted[0] in SHEETS else _unpacked_rows(path, *formatted, table))


def parse(text: str, where: str, remedy: str) -> Any:
    """Parse JSON; broken text is refused with an error that names the place and the remedy."""
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise FedKSeedError(f"{where}: not valid JSON ({_reason(error)}); {remedy}") from error


def _reason(error: Exception, begin: int = 0) -> str:
    """The reason of a refusal of JSON that begins at a character of a text."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg} at character {error.pos - begin + 1}"


class _Unpacked:
    """The unpacked text of a file, whole or in lines, of which there are no more than the limits allow.

    Args:
        file: a buffered reader.
        notes: is given a guess of the encoding.
    """

    def __init__(self, path: Path, packing: str, file: Any, notes: list[str]) -> None:
        self.path, self._file, self._notes = path, file, notes
        self.encoding = marked_encoding(file.peek(LOOKED_AT)[:LOOKED_AT])  # None: UTF-8 or a guess, by the text itself
        if self.encoding in ("utf-16-le", "utf-16-be"):
            notes.append("read as UTF-16, of which it has no mark")
        self.row_bytes = 0  # of a row's lines so far, for formats whose rows can have several
        self._room = room_of(path) if packing else MAX_BYTES

    def lines(self) -> Iterator[tuple[int, str]]:
        """The number of each line, and its text with the end of line, but without a byte order mark.

        A file that was put together of several has one at the beginning of each.
        """
        lines = self._lines()
        for number, line in lines:
            if self.encoding or line.isascii():
                yield number, line.removeprefix("\ufeff") if self.encoding else line
                continue
            ahead, size = [(number, line)], len(line)
            while size < PIECE and (following := next(lines, None)):
                ahead.append(following)
                size += len(following[1])
            encoding = self._guess("".join(line for _, line in ahead).encode("latin-1"), self.place(number))
            for index, undecoded in chain(ahead, lines):
                text = decode(undecoded.encode("latin-1"), self.place(index), encoding)
                yield index, text.removeprefix("\ufeff")

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The lines with a character for each byte where the encoding is not known yet."""
        number = 0
        try:
            with io.TextIOWrapper(self._file, self.encoding or "latin-1", newline="") as text:
                while line := text.readline(MAX_LINE + 1):
                    number += 1
                    where = self.place(number)
                    if len(line) > MAX_LINE:
                        raise FedKSeedError(f"{where}: a line has at most {MAX_LINE:,} bytes; is it a data file?")
                    self._room -= len(line)
                    self.require(self._room >= 0 and number <= MAX_ROWS, where, "line")
                    yield number, line
        except UnicodeError as error:
            raise FedKSeedError(f"{self.place(number + 1)}: not valid {self.encoding}{REMEDY}") from error

    def whole(self) -> str:
        content = bytearray()
        while piece := self._file.read(PIECE):  # a read of all that is allowed would take that much memory first
            content += piece
            self.require(len(content) <= self._room, str(self.path), "row")
        encoding = self.encoding or self._guess(content, str(self.path))
        return decode(content, str(self.path), encoding).removeprefix("\ufeff")

    def _guess(self, content: bytes | bytearray, where: str) -> str:
        encoding, note = encoding_of(content, where)
        self._notes += [note] if note else []
        return encoding

    def place(self, number: int, unit: str = "line") -> str:
        return f"{self.path}, {unit} {number}"

    def require(self, within: bool, where: str, unit: str) -> None:
        """Refuse a file beyond its limits."""
        if not within:
            raise FedKSeedError(
                f"{where}: a file has at most {MAX_ROWS:,} {unit}s of {MAX_BYTES:,} bytes in all, packed to no less "
                f"than 1/{MAX_RATIO}; is it a data file? Else share it out over several"
            )


def _open(path: Path, packing: str) -> Any:  # a buffered reader
    if packing != ".zst":
        return gzip.open(path, "rb") if packing else path.open("rb")
    with needs_extra("reading .zst needs", "data"):
        import pyarrow
    return io.BufferedReader(pyarrow.CompressedInputStream(path.open("rb"), "zstd"))  # a name may be no Unicode


def _unpacked_rows(path: Path, ending: str, packing: str, table: "_Names") -> Placed:
    try:
        with _open(path, packing) as file:
            unpacked = _Unpacked(path, packing, file, table.notes)
            if packing and (known := what_it_is(path, ending, file.peek(LOOKED_AT))):
                raise FedKSeedError(f"the data file {path} can't be read: {known}")
            begin = file.peek(LOOKED_AT).decode(unpacked.encoding or "utf-8-sig", errors="ignore")
            if ending in TABLES:
                yield from _separated_values(unpacked, "\t" if ending == ".tsv" else SEPARATORS, table)
            elif begin.lstrip()[:1] == "[":
                yield from _json_array(unpacked, unpacked.whole())
            elif ending == ".json" and OBJECT.match(begin):
                yield from _json_object(unpacked)
            else:
                for number, line in unpacked.lines():
                    if line.strip():
                        yield f"line {number}", _json_line(line, unpacked.place(number))
    except (OSError, EOFError, zlib.error) as error:
        raise FedKSeedError(f"the data file {path} can't be read: {error}") from error


def _json_line(line: str, where: str) -> Any:
    """The row of a line, or the error of one that can't be parsed."""
    try:
        return parse(line, where, "mend or remove the line")
    except FedKSeedError as error:
        return error


def _json_object(unpacked: _Unpacked) -> Placed:
    """The rows in a list of an object, as {"data": [...]}; or the one row that the object is."""
    text = unpacked.whole()
    whole = parse(text, str(unpacked.path), "mend the file")
    lists = [key for key, cell in whole.items() if isinstance(cell, list) and key in WRAPPERS]
    others = [key for key, cell in whole.items() if isinstance(cell, list | dict) and key not in lists[:1]]
    if not lists:
        yield "row 1", whole
        return
    if others:
        raise FedKSeedError(
            f"{unpacked.path} has {' and '.join([lists[0], *others])}; a file has one list of rows: give each its own"
        )
    yield from ((f"row {number}", row) for number, row in enumerate(whole[lists[0]], 1))


def _json_array(unpacked: _Unpacked, text: str) -> Placed:
    """The rows of a JSON array, parsed one by one, so that an error can name its row."""
    parser, number, begin, mark = json.JSONDecoder(object_pairs_hook=object_of), 0, 0, ","
    try:
        at = _skip_space(text, text.index("[") + 1)
        if text[at : at + 1] == "]":
            mark, at = "]", _skip_space(text, at + 1)
        while mark == ",":
            number, begin = number + 1, at
            unpacked.require(number <= MAX_ROWS, unpacked.place(number, "row"), "row")
            row, end = parser.raw_decode(text, begin)
            if end - begin > MAX_LINE:
                raise ValueError(f"a row has at most {MAX_LINE:,} characters")
            yield f"row {number}", row
            end = _skip_space(text, end)
            mark, at = text[end : end + 1], _skip_space(text, end + 1)
            if not mark:
                raise ValueError("the file ends in the middle of the array")
            if mark not in ",]":
                raise ValueError(f"a comma or the array's end is expected after the row, got {mark!r}")
        if at < len(text):
            raise ValueError(f"the array is followed by {text[at]!r}")
    except FedKSeedError:
        raise
    except (ValueError, RecursionError) as error:
        where, reason = unpacked.place(number, "row"), _reason(error, begin)
        raise FedKSeedError(f"{where}: not valid JSON ({reason}); mend or remove the row") from error


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess] — it matches nothing, too


def _lines_of_rows(unpacked: _Unpacked) -> Iterator[str]:
    """The lines of rows that can have several; whoever reads them sets `row_bytes` to 0 after each row."""
    for number, line in unpacked.lines():
        unpacked.row_bytes += len(line)
        where = unpacked.place(number)
        if unpacked.row_bytes > MAX_LINE:
            raise FedKSeedError(f"{where}: a row has at most {MAX_LINE:,} bytes; is a closing quote missing?")
        if "\0" in line:
            raise FedKSeedError(f"{where}: a NUL byte, as damaged files have{REMEDY}")
        yield line


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a table's columns: those that are expected, and the place where they stand."""

    source: str
    expected: Columns
    notes: list[str]

    def separator(self, head: Sequence[str], separators: str) -> str:
        """The separator that gives the first line the most known names, or else another; of such the first the most."""
        known = {simplified(name) for name in (*names_of(self.expected), *KNOWN_NAMES)}

        def suits(separator: str) -> tuple[int, int, int]:
            lines = [next(csv.reader([line[:LONGEST_NAMES]], delimiter=separator), []) for line in head]
            first, *others = (len(known.intersection(map(simplified, names))) for names in lines)
            return first, max(others, default=0), len(lines[0])

        return max(separators, key=suits)

    def rows(self, records: Iterable[tuple[str, list[str]]], remedy: str, ragged: bool = False) -> Placed:
        """The records below the names, which are the first that fit a layout, or else the first.

        Args:
            ragged: whether a record may have any number of empty fields behind those that have names.
        """
        records = (record for record in records if any(map(str.strip, record[1])))  # empty ones are skipped
        head = list(islice(records, HEAD))
        above, needed = self.header([names for _, names in head])
        if above:
            self.notes.append(f"{above} line{'s' * (above > 1)} above the names of columns not used")
        place, header = head[above] if head else ("", [])
        if len(header) > MAX_COLUMNS:
            raise FedKSeedError(
                f"{self.source}, {place}: {len(header):,} columns, at most {MAX_COLUMNS:,} go; is it a data file?"
            )
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise FedKSeedError(f"{self.source}, {place}: two columns have the name {twice[0]!r}; rename one")
        nameless = [k for k, name in enumerate(header) if not name]
        names = [name or f"column {k + 1}" * (len(nameless) > 1) for k, name in enumerate(header)]
        shown, header_words, repeats = listed(header), [*map(simplified, header)], 0
        longest = max(map(len, header), default=0)
        widths = Counter(sorted(len(record) for _, record in head[above + 1 :]))
        # a comma in a text shifts the fields of its row alone; one at the ends of lines is in most of them
        most = max(len(header), widths.most_common(1)[0][0]) if widths and not ragged else MAX_COLUMNS
        for place, record in chain(head[above + 1 :], records):
            fault = ""
            if len(record) < len(header) or len(record) > most or any(record[len(header) :]):
                fault = f"{len(record)} fields, and the first line names {len(header)} columns ({shown}); {remedy}"
            elif len(needed) > 1 and len(record[0]) <= longest and simplified(record[0]) in header_words:
                words = [*map(simplified, record[: len(header)])]
                if words == header_words:
                    repeats += 1
                    continue
                again = sorted(words) == sorted(header_words)
                fault = (
                    f"the names of the columns again, in another order than {shown}; give each table its own file"
                    * again
                )
            if fault:
                yield place, FedKSeedError(f"{self.source}, {place}: {fault}")
            else:
                yield place, dict(zip(names, record, strict=False))
        if repeats:
            self.notes.append(f"{repeats:,} line{'s' * (repeats > 1)} with the names of the columns again not used")

    def header(self, head: Sequence[Sequence[str]]) -> tuple[int, tuple[str, ...]]:
        """The index of the row with the columns' names, and the columns that its layout needs.

        Only the first row may fit with a single column: further down that can be chance. Where none fits: 0 and ().
        """
        for index, names in enumerate(head):
            needed = needed_columns(names, self.expected)
            if len(needed) > min(index, 1):
                return index, needed
        return 0, ()


def _has_quotes_behind_spaces(head: Sequence[str], separator: str) -> bool:
    """Tell whether the first lines, as `a, "b"`, are valid CSV with quoted fields once spaces before fields are cut."""
    raw = csv.reader(head, delimiter=separator, quoting=csv.QUOTE_NONE)
    with suppress(csv.Error):  # the reader of all lines tells it, with its place
        if any(QUOTE_AFTER_SPACE.match(field) for record in raw for field in record[1:]):
            whole = head if len(head) < HEAD else head[:-1]  # a record of several lines may go on behind them
            return bool([*csv.reader(whole, delimiter=separator, strict=True, skipinitialspace=True)])
    return False


def _separated_values(unpacked: _Unpacked, separators: str, table: _Names) -> Placed:
    """Rows of CSV, by the names in the first lines, which are after a line as "sep=;" where there is one."""
    lines, head, before = _lines_of_rows(unpacked), list[str](), 0
    for line in lines:
        unpacked.row_bytes = 0
        if not head and not before and (named := SEPARATOR_LINE.fullmatch(line)):
            separators, before = named[1], 1
            continue
        head.append(line)
        if len(head) == HEAD:
            break
    separator = table.separator(head or [""], separators)
    limit_before = csv.field_size_limit((HEAD + 1) * MAX_LINE)  # the process's: 131,072 by default, less than a text
    of_record, number = list[str](), before  # the lines of the record that is read

    def kept(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            of_record.append(line)
            yield line

    # quotes behind a space, as in `a, "b"`, are marks of fields, too
    spaced = _has_quotes_behind_spaces(head, separator)
    if spaced:
        table.notes.append("spaces before the quotes of fields not used")
    reader = csv.reader(kept(chain(head, lines)), delimiter=separator, strict=True, skipinitialspace=spaced)

    def records() -> Iterator[tuple[str, list[str]]]:
        nonlocal number
        fields, quoted = 0, separator in UNQUOTED  # whether all fields are in quotes so far
        for record in reader:
            fields = max(fields, len(record))
            # Text that has quotes of its own is hardly in quotes from the first record on.
            quoted = quoted and "".join(of_record).rstrip("\r\n") == all_quoted(record)
            joins = separator in UNQUOTED and len(of_record) > 1 and {*map(fields_of, of_record)} == {fields}
            if joins and not quoted:
                raise csv.Error(
                    f"a quote joins {len(of_record):,} lines of {fields} fields each, as where quotes are no marks of "
                    "fields but part of the text"
                )
            of_record.clear()
            unpacked.row_bytes, place, number = 0, f"line {number + 1}", before + reader.line_num
            yield place, record

    def fields_of(line: str) -> int:
        return line.count(separator) + 1

    def all_quoted(record: Sequence[str]) -> str:
        """A record as a file has it that puts each field into quotes."""
        return separator.join('"{}"'.format(field.replace('"', '""')) for field in record)

    try:
        yield from table.rows(records(), f"put fields with {separator!r}, quotes or line breaks into quotes")
    except csv.Error as error:
        plain = (
            "; of a file without quoting, pandas.read_csv(FILE, sep=SEPARATOR, quoting=3).to_csv(NEW, index=False) "
            "makes one with it"
        )
        raise FedKSeedError(
            f"{unpacked.place(number + 1)}: not valid CSV ({error}); mend its quotes and end"
            + plain * (separator in UNQUOTED)
        ) from error
    finally:
        csv.field_size_limit(limit_before)


def _sheets(path: Path, table: _Names) -> Placed:
    """The rows of the sheets whose columns fit a layout, or else of the longest; the others are named in the notes."""
    sheets = sheets_of(path, room_of(path))
    filled = {sheet.name: [row for row in sheet.rows if any(row)] for sheet in sheets}
    needed = {name: table.header(rows[:HEAD])[1] for name, rows in filled.items()}
    shown = [sheet for sheet in sheets if not sheet.hidden]
    used = [sheet for sheet in shown if needed[sheet.name]] or sorted(shown, key=lambda sheet: -len(sheet.rows))[:1]
    if sheets and not shown:
        raise FedKSeedError(f"{path} has rows in hidden sheets alone; show the one that is meant")
    if len({needed[sheet.name] for sheet in used}) > 1:
        names = " and ".join(f"{sheet.name!r} ({', '.join(needed[sheet.name])})" for sheet in used)
        raise FedKSeedError(f"{path}: the sheets {names} have different columns; save each as a file of its own")
    table.notes.append(f"sheet{'s' * (len(used) > 1)} {', '.join(repr(sheet.name) for sheet in used)}")
    for sheet in sheets:
        if sheet not in used:
            hidden, count = "hidden " * sheet.hidden, len(filled[sheet.name])
            table.notes.append(f"{hidden}sheet {sheet.name!r} not used ({count:,} row{'s' * (count > 1)})")
    for sheet in used:
        within = f"sheet {sheet.name!r}, " if len(shown) > 1 else ""
        yield from table.rows(
            ((f"{within}row {k}", row) for k, row in enumerate(sheet.rows, 1)), "name the others", True
        )


def _parquet(path: Path) -> Placed:
    with others_border(f"the data file {path} can't be read"):
        for number, row in enumerate(parquet_rows(str(path), MAX_ROWS, MAX_COLUMNS, room_of(path)), 1):
            yield f"row {number}", row


def room_of(path: Path) -> int:
    """The bytes to which a packed file may unpack."""
    return min(MAX_BYTES, max(MAX_SMALL, MAX_RATIO * path.stat().st_size))


def _table(source: str, kind: str) -> Placed:
    """The rows of a folder that `save_to_disk` wrote, or a data set on the hub."""
    missing = (
        f"there is no data file at {source}, and the rows 'train' of a data set of this name on the Hugging Face hub "
        "can't be loaded"
    )
    with needs_extra(f"reading {source} needs", "data"):
        import datasets
    with others_border(missing if kind == "hub" else f"the data file {source} can't be read"):
        table = datasets.load_dataset(source, split="train") if kind == "hub" else datasets.load_from_disk(source)
        if isinstance(table, datasets.DatasetDict):
            name, *others = map(str, table)
            if others:
                of = ", ".join([name, *others])
                raise FedKSeedError(f"{source} holds the data sets {of}; name one, as {Path(source, name)}")
            table = table[name]
        table = table.with_format(None)  # a saved one may give its rows as tensors
        if table.num_rows > MAX_ROWS or table.data.nbytes > MAX_BYTES:
            raise FedKSeedError(
                f"{source}: a file has at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes in all, it has "
                f"{table.num_rows:,} of {table.data.nbytes:,}; share it out over several"
            )
        write = as_stored(table.features)
        for number, row in enumerate(map(dict, table), 1):
            yield f"row {number}", write(row)
