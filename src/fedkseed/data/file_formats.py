"""Rows of data files: CSV, TSV, JSON and JSON lines, plain or packed; Parquet; data sets that `datasets` saved.

A file is read within limits of its bytes, rows and lines, whatever it claims: it may come from a stranger.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError, first_line, needs_extra
from .layouts import LAYOUTS, normalised

SAMPLES = ("dolly-sample", "intents")  # shipped with the package, as NAME.jsonl.gz
TEXT_FORMATS = (".csv", ".tsv", ".json", ".jsonl")
PACKINGS = (".gz", ".zst")
READABLE = "*.csv, *.tsv, *.json, *.jsonl, each plain, .gz or .zst, and *.parquet"  # the formats, for errors
# All examples of a file are in memory. Dolly has 15,011 rows in 13 MB, Alpaca 52,002 in 23 MB.
MAX_BYTES = 1 << 32  # a file's text, unpacked
MAX_LINE = 1 << 24  # bytes in a row, and in a line
PIECE = 1 << 20  # bytes read at once of a file that is read whole
MAX_ROWS = 1 << 22  # rows, or lines
# gzip packs text to a third or a tenth, and what is made to fill a disk or a memory to a thousandth.
MAX_RATIO = 100
MAX_SMALL = 1 << 24  # bytes, up to which a file may unpack whatever its ratio: a few rows again and again
BOM = codecs.BOM_UTF8
MARKED = {  # byte order marks of other encodings, the longer first, since one begins with another -> their names
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
}
REMEDY = "; save the file as UTF-8, which Excel calls 'CSV UTF-8'"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
SPACE = re.compile(r"[ \t\r\n]*")
SEPARATORS = ",;\t|"  # of CSV; of those that suit the first line equally well, the first
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
    return (ending, packing) if ending in TEXT_FORMATS or (ending == ".parquet" and not packing) else None


def is_saved(path: Path) -> bool:
    """Whether a folder is a data set, or several, that `save_to_disk` of the package `datasets` wrote."""
    one, several = ("state.json", "dataset_info.json"), ("dataset_dict.json",)
    return path.is_dir() and any(all((path / name).is_file() for name in names) for names in (one, several))


def open_rows(source: str, columns: Iterable[str] = ()) -> tuple[str, Placed]:
    """The place of a source, and its rows, which are read as they are asked for.

    Args:
        source: a sample, a file, the folder of a saved data set, or the name of a data set on the hub.
        columns: names of columns that are expected beside the layouts', by which the separator of CSV is chosen.

    Raises:
        FedKSeedError: none is there, or it is of another format. Reading the rows raises it, too: a file is damaged or
            beyond a limit.
    """
    path = Path(source).expanduser()
    if source in SAMPLES:
        path = Path(str(files("fedkseed.data") / f"{source}.jsonl.gz"))
    if is_saved(path):
        return str(path), _table(str(path), "saved")
    if not path.is_file():
        # A folder `owner` here means a file that is missing: to ask the hub without a network takes half a minute.
        if HUB_NAME.fullmatch(source) and format_of(source) is None and not path.parent.exists():
            return source, _table(source, "hub")
        others = f"a folder that `save_to_disk` wrote, or one of {', '.join(SAMPLES)}"
        raise FedKSeedError(f"no data file at {path}; give a file ({READABLE}), {others}")
    if (formatted := format_of(path.name)) is None:
        raise FedKSeedError(f"{path} is of a kind that is not read; give a file of {READABLE}")
    if formatted[0] == ".parquet":
        return str(path), _table(str(path), "Parquet")
    return str(path), _unpacked_rows(path, *formatted, columns)


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8; other bytes are refused with an error that names their place."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{content[error.start]:02X} at {error.start + 1:,}, perhaps of Windows-1252"
        raise FedKSeedError(f"{where}: not valid UTF-8 ({byte}){REMEDY}") from error


def parse(content: bytes, where: str, remedy: str) -> Any:
    """Parse JSON; broken text is refused with an error that names the place and the remedy."""
    text = decode(content, where)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise FedKSeedError(f"{where}: not valid JSON ({_reason(error)}); {remedy}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; one with two values for a key is refused, since one would be lost."""
    cells = dict(pairs)
    if len(cells) < len(pairs):
        first = dict(reversed(pairs))
        if twice := [key for key, cell in cells.items() if repr(first[key]) != repr(cell)]:
            raise ValueError(f"the key {twice[0]!r} is there twice, with different values")
    return cells


def _reason(error: Exception, begin: int = 0) -> str:
    """The reason of a refusal of JSON that begins at a character of a text."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg} at character {error.pos - begin + 1}"


class _Unpacked:
    """The unpacked bytes of a file, whole or in lines, of which there are no more than the limits allow."""

    def __init__(self, path: Path, packing: str, file: Any) -> None:  # a buffered reader
        self.path, self._file = path, file
        begin = file.peek(4)  # where a byte order mark names another encoding than UTF-8
        self.encoding = next((encoding for mark, encoding in MARKED.items() if begin.startswith(mark)), None)
        self.row_bytes = 0  # of a row's lines so far, for formats whose rows can have several
        self._room = min(MAX_BYTES, max(MAX_SMALL, MAX_RATIO * path.stat().st_size)) if packing else MAX_BYTES

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The number of each line, and its bytes with the end of line, but without a byte order mark."""
        encoding, number = self.encoding, 0
        try:
            with io.TextIOWrapper(self._file, encoding or "latin-1", newline="") as text:  # each byte is a character
                while line := text.readline(MAX_LINE + 1):
                    number, content = number + 1, line.encode("utf-8" if encoding else "latin-1")
                    where = self.place(number)
                    if len(content) > MAX_LINE:
                        raise FedKSeedError(f"{where}: a line has at most {MAX_LINE:,} bytes; is it a data file?")
                    self._room -= len(content)
                    self.require(self._room >= 0 and number <= MAX_ROWS, where, "line")
                    yield number, content.removeprefix(BOM) if number == 1 else content
        except UnicodeError as error:
            raise FedKSeedError(f"{self.place(number + 1)}: not valid {encoding}{REMEDY}") from error

    def whole(self) -> str:
        content, encoding = bytearray(), self.encoding
        while piece := self._file.read(PIECE):  # a read of all that is allowed would take that much memory first
            content += piece
            self.require(len(content) <= self._room, str(self.path), "row")
        try:
            return content.decode(encoding or "utf-8-sig")
        except UnicodeDecodeError as error:
            where = f"{self.path}, byte {error.start + 1:,}"
            raise FedKSeedError(f"{where}: not valid {encoding or 'UTF-8'}{REMEDY}") from error

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


def _unpacked_rows(path: Path, ending: str, packing: str, columns: Iterable[str]) -> Placed:
    try:
        with _open(path, packing) as file:
            unpacked = _Unpacked(path, packing, file)
            begin = file.peek(4096).decode(unpacked.encoding or "utf-8-sig", errors="ignore")
            if ending in (".csv", ".tsv"):
                yield from _separated_values(unpacked, "\t" if ending == ".tsv" else SEPARATORS, columns)
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


def _json_line(line: bytes, where: str) -> Any:
    """The row of a line, or the error of one that can't be parsed."""
    decode(line, where)  # another encoding is refused, and is no fault of one row
    try:
        return parse(line, where, "mend or remove the line")
    except FedKSeedError as error:
        return error


def _json_object(unpacked: _Unpacked) -> Placed:
    """The rows in a list of an object, as {"data": [...]}; or the one row that the object is."""
    text = unpacked.whole()
    whole = parse(text.encode(), str(unpacked.path), "mend the file")
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
    parser, number, begin, mark = json.JSONDecoder(object_pairs_hook=_object), 0, 0, ","
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
    """The decoded lines of rows that can have several; whoever reads them sets `row_bytes` to 0 after each row."""
    for number, line in unpacked.lines():
        unpacked.row_bytes += len(line)
        where = unpacked.place(number)
        if unpacked.row_bytes > MAX_LINE:
            raise FedKSeedError(f"{where}: a row has at most {MAX_LINE:,} bytes; is a closing quote missing?")
        if b"\0" in line:
            raise FedKSeedError(f"{where}: a NUL byte, as UTF-16 has and damaged files{REMEDY}")
        yield decode(line, where)


def _separated_values(unpacked: _Unpacked, separators: str, columns: Iterable[str]) -> Placed:
    """Rows of CSV, by the names in the first line, which is after a line as "sep=;" where there is one."""
    lines = _lines_of_rows(unpacked)
    first, before = next(lines, ""), 0
    if named := SEPARATOR_LINE.fullmatch(first):
        first, separators, before = next(lines, ""), named[1], 1
    separator = _separator(first, separators, columns)
    reader, number, header = csv.reader(chain([first], lines), delimiter=separator, strict=True), before, list[str]()
    names = list[str]()
    limit_before = csv.field_size_limit(MAX_LINE)  # the process's: 131,072 by default, less than a document
    try:
        for row in reader:
            unpacked.row_bytes, where, number = 0, unpacked.place(number + 1), before + reader.line_num
            place = where.removeprefix(f"{unpacked.path}, ")
            if not header:
                header = row
                if twice := [name for name, count in Counter(header).items() if name and count > 1]:
                    raise FedKSeedError(f"{where}: two columns have the name {twice[0]!r}; rename one")
                nameless = [k for k, name in enumerate(header) if not name]
                names = [name or f"column {k + 1}" * (len(nameless) > 1) for k, name in enumerate(header)]
            elif any(map(str.strip, row)) or len(row) >= max(2, len(header)):  # else it is a blank line
                if len(row) < len(header) or any(row[len(header) :]):
                    yield (
                        place,
                        FedKSeedError(
                            f"{where}: {len(row)} fields, and the first line names {len(header)} columns "
                            f"({', '.join(header)}); put fields with {separator!r}, quotes or line breaks into quotes"
                        ),
                    )
                else:
                    yield place, dict(zip(names, row, strict=False))
    except csv.Error as error:
        raise FedKSeedError(
            f"{unpacked.place(number + 1)}: not valid CSV ({error}); mend its quotes and end"
        ) from error
    finally:
        csv.field_size_limit(limit_before)


def _separator(first: str, separators: str, columns: Iterable[str]) -> str:
    """The separator that gives a first line the most columns with expected names, and of such the most columns."""
    expected = set(
        map(normalised, [*columns, *(name for layout in LAYOUTS.values() for name in layout.columns.values())])
    )

    def suits(separator: str) -> tuple[int, int]:
        names = next(csv.reader([first], delimiter=separator), [])
        return len(expected.intersection(map(normalised, names))), len(names)

    return max(separators, key=suits)


def _table(source: str, kind: str) -> Placed:
    """The rows of a Parquet file, a folder that `save_to_disk` wrote, or a data set on the hub."""
    try:
        with needs_extra(f"reading {source} needs", "data"):
            import datasets
            from pyarrow.parquet import read_metadata
        if kind == "hub":
            table = datasets.load_dataset(source, split="train")
        elif kind == "Parquet":
            about = read_metadata(source)  # before the file is unpacked
            size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
            _require_size(source, about.num_rows, size)
            table = datasets.Dataset.from_parquet(source, keep_in_memory=True)
        else:
            table = datasets.load_from_disk(source)
        if isinstance(table, datasets.DatasetDict):
            name, *others = map(str, table)
            if others:
                of = ", ".join([name, *others])
                raise FedKSeedError(f"{source} holds the data sets {of}; name one, as {Path(source, name)}")
            table = table[name]
        table = table.with_format(None)  # a saved one may give its rows as tensors
        _require_size(source, table.num_rows, table.data.nbytes)
        labels = {name: of for name, of in table.features.items() if isinstance(of, datasets.ClassLabel)}
        for number, row in enumerate(map(dict, table), 1):
            for name, names in labels.items():  # stored as numbers, and -1 where there is none
                row[name] = None if row[name] in (None, -1) else names.int2str(row[name])
            yield f"row {number}", row
    except FedKSeedError:
        raise
    except Exception as error:  # many kinds: for a damaged file; on the hub for no network, no such name or split
        if kind == "hub":
            raise FedKSeedError(
                f"there is no data file at {source}, and the rows 'train' of a data set of this name on the Hugging "
                f"Face hub can't be loaded: {first_line(error)}"
            ) from error
        raise FedKSeedError(f"the data file {source} can't be read: {error}") from error


def _require_size(source: str, rows: int, size: int) -> None:
    if rows > MAX_ROWS or size > MAX_BYTES:
        raise FedKSeedError(
            f"{source}: a file has at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes in all, it has {rows:,} of "
            f"{size:,}; share it out over several"
        )
