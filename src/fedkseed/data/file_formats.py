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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError

SAMPLES = ("dolly-sample", "intents")  # shipped with the package, as NAME.jsonl.gz
KINDS = (".csv", ".tsv", ".json", ".jsonl")
PACKINGS = (".gz", ".zst")
PARQUET = ".parquet"
NAMES = "*.csv, *.tsv, *.json, *.jsonl, each plain, .gz or .zst, and *.parquet"  # as errors name them
# All examples of a file are in memory. Dolly has 15,011 rows in 13 MB, Alpaca 52,002 in 23 MB.
MAX_BYTES = 1 << 32  # of a file's text, unpacked
MAX_LINE = 1 << 24  # bytes of one row, and of one line
MAX_ROWS = 1 << 22  # and lines
# gzip packs text to a third or a tenth, and what is made to fill a disk or a memory to a thousandth.
MAX_RATIO = 100
SMALL = 1 << 24  # bytes, up to which a file may unpack whatever its ratio: a few rows again and again
CHUNK = 1 << 20  # characters of a JSON array that are read at once
FEED = 512  # bytes given to zstandard at once: 4 of them can make 128 KiB, so these make 16 MiB at most
BOM = codecs.BOM_UTF8
HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name
SPACE = re.compile(r"[ \t\r\n]*")

Numbered: TypeAlias = Iterator[tuple[int, Any]]  # number of the line or row, from 1, and the row


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """The rows of a source, each with its number; they are read as they are asked for."""

    source: str
    unit: str  # of the numbers: line or row
    each: Numbered

    def place(self, number: int) -> str:
        return f"{self.source}, {self.unit} {number}"


def kind_of(name: str) -> tuple[str, str] | None:
    """The format and the packing by the endings of a file's name, as (".csv", ".gz"); None for any other file."""
    stem = name.lower()
    packing = next((packing for packing in PACKINGS if stem.endswith(packing)), "")
    kind = Path(stem.removesuffix(packing)).suffix
    return (kind, packing) if kind in KINDS or (kind == PARQUET and not packing) else None


def is_saved(path: Path) -> bool:
    """Whether a folder is a data set, or several, that `save_to_disk` of the package `datasets` wrote."""
    written = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
    return path.is_dir() and any(all((path / name).is_file() for name in names) for names in written)


def rows_of(source: str) -> NumberedRows:
    """The rows of a sample, of a file, of a saved data set's folder, or of a data set on the hub.

    Raises:
        FedKSeedError: none is there, or it is of another kind. Reading the rows raises it, too: a file is damaged or
            beyond a limit.
    """
    path = Path(source).expanduser()
    if source in SAMPLES:
        path = Path(str(files("fedkseed.data") / f"{source}.jsonl.gz"))
    if is_saved(path):
        return NumberedRows(str(path), "row", _table(_saved(path), str(path)))
    if not path.is_file():
        # A folder `owner` here means a file that is missing: to ask the hub without a network takes half a minute.
        if HUB.fullmatch(source) and kind_of(source) is None and not path.parent.exists():
            return NumberedRows(source, "row", _table(_hub(source), source))
        raise FedKSeedError(
            f"no data file at {path}; give a file ({NAMES}), a folder that `save_to_disk` wrote, or one of "
            f"{', '.join(SAMPLES)}"
        )
    if (found := kind_of(path.name)) is None:
        raise FedKSeedError(f"{path} is of a kind that is not read; give a file of {NAMES}")
    kind, packing = found
    if kind == PARQUET:
        return NumberedRows(str(path), "row", _table(_parquet(path), str(path)))
    array = kind == ".json" and _first(path, packing) == b"["
    reader = _array if array else _objects if kind in (".json", ".jsonl") else _separated
    return NumberedRows(str(path), "row" if array else "line", _streamed(path, packing, reader))


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8; other bytes are refused with an error that names their place."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise FedKSeedError(f"{where}: not valid UTF-8; save the file as UTF-8") from error


def parse(content: bytes, where: str, remedy: str) -> Any:
    """Parse JSON; broken text is refused with an error that names the place and the remedy."""
    try:
        return json.loads(decode(content, where))
    except FedKSeedError:
        raise
    except (ValueError, RecursionError) as error:
        raise FedKSeedError(f"{where}: not valid JSON ({_reason(error)}); {remedy}") from error


def _reason(error: Exception, begin: int = 0) -> str:
    """The reason of a refusal of JSON, which begins at a character of the text that was parsed."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg} at character {error.pos - begin + 1}"


# --- bytes --------------------------------------------------------------------------------------


class _Stream:
    """The unpacked bytes of a file, in lines or parts, of which there are no more than the limits allow."""

    def __init__(self, path: Path, packing: str, file: io.BufferedIOBase) -> None:
        self.path, self._file = path, file
        self._left = min(MAX_BYTES, max(SMALL, MAX_RATIO * path.stat().st_size)) if packing else MAX_BYTES

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The number of each line, and its bytes with the end of line, but without a byte order mark."""
        number = 0
        while line := self._file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise FedKSeedError(f"{self.place(number)}: a line has at most {MAX_LINE:,} bytes; is it a data file?")
            self._count(len(line), number, "line")
            yield number, line.removeprefix(BOM) if number == 1 else line

    def read(self, size: int, number: int) -> bytes:
        """The next bytes, in which row `number` is sought."""
        data = self._file.read(size)
        self._count(len(data), number, "row")
        return data

    def place(self, number: int, unit: str = "line") -> str:
        return f"{self.path}, {unit} {number}"

    def _count(self, size: int, number: int, unit: str) -> None:
        self._left -= size
        if self._left < 0 or number > MAX_ROWS:
            raise FedKSeedError(
                f"{self.place(number, unit)}: a file has at most {MAX_ROWS:,} {unit}s of {MAX_BYTES:,} bytes in all, "
                f"packed to no less than 1/{MAX_RATIO}; is it a data file? Else share it out over several"
            )


def _opened(path: Path, packing: str) -> io.BufferedIOBase:
    match packing:
        case ".gz":
            return gzip.open(path, "rb")
        case ".zst":
            return io.BufferedReader(_Unpacked(path))
        case _:
            return path.open("rb")


class _Unpacked(io.RawIOBase):
    """The bytes that zstandard unpacks, in pieces of a bounded size.

    The package's own stream ends without an error where a file was cut short.
    """

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise FedKSeedError("reading .zst needs the extra `data`: pip install 'fedkseed[data]'") from error
        self._file = path.open("rb")
        self._error, self._unpacker = zstandard.ZstdError, zstandard.ZstdDecompressor()
        self._frame = self._unpacker.decompressobj()
        self._begun, self._rest, self._ready = False, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            packed = self._rest or self._file.read(FEED)
            if not packed:
                if self._begun and not self._frame.eof:
                    raise EOFError("it ends in the middle of a packed block")
                return 0
            if self._frame.eof:  # files may be frames one after the other
                self._frame = self._unpacker.decompressobj()
            try:
                self._begun, self._ready = True, self._frame.decompress(packed)
            except self._error as error:
                raise OSError(str(error)) from error
            self._rest = self._frame.unused_data if self._frame.eof else b""
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _first(path: Path, packing: str) -> bytes:
    """The first byte of a file that is no space."""
    try:
        with _opened(path, packing) as file:
            return file.read(4096).removeprefix(BOM).lstrip()[:1]
    except (OSError, EOFError, zlib.error):
        return b""  # read again from its beginning, it is refused


def _streamed(path: Path, packing: str, reader: Callable[[_Stream], Numbered]) -> Numbered:
    try:
        with _opened(path, packing) as file:
            yield from reader(_Stream(path, packing, file))
    except (OSError, EOFError, zlib.error) as error:
        raise FedKSeedError(f"the data file {path} can't be read: {error}") from error


# --- text ---------------------------------------------------------------------------------------


def _objects(stream: _Stream) -> Numbered:
    """JSON lines."""
    for number, line in stream.lines():
        if line.strip():
            yield number, parse(line, stream.place(number), "mend or remove the line")


def _array(stream: _Stream) -> Numbered:
    """A JSON array of rows, of which one at a time is in memory."""
    text, parser = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
    buffer, at, number = "", 0, 0

    def refused(reason: str) -> FedKSeedError:
        return FedKSeedError(f"{stream.place(number, 'row')}: not valid JSON ({reason}); mend or remove the row")

    def more() -> bool:
        nonlocal buffer, at
        data = stream.read(max(CHUNK, len(buffer) - at), number)  # twice as much each time, not to parse n² characters
        try:
            buffer, at = buffer[at:] + text.decode(data, final=not data), 0
        except UnicodeDecodeError as error:
            raise FedKSeedError(
                f"{stream.path}, in row {max(1, number)} or after it: not valid UTF-8; save the file as UTF-8"
            ) from error
        return bool(data)

    def ahead() -> str:
        """The next character that is no space; none at the end."""
        nonlocal at
        while True:
            at = SPACE.match(buffer, at).end()  # pyright: ignore[reportOptionalMemberAccess] — it matches nothing, too
            if at < len(buffer):
                return buffer[at]
            if not more():
                return ""

    def row() -> Any:
        nonlocal at
        ahead()
        while True:
            try:
                found, end = parser.raw_decode(buffer, at)
            except (ValueError, RecursionError) as error:
                reason = _reason(error, at)
                if len(buffer) - at > MAX_LINE:
                    raise refused(f"{reason}, or it has more than {MAX_LINE:,} characters") from error
                if not more():
                    raise refused(reason) from error
                continue
            if end - at > MAX_LINE:
                raise refused(f"a row has at most {MAX_LINE:,} characters")
            at = end
            return found

    ahead()
    at += 1  # the bracket
    if ahead() == "]":
        return
    while True:
        number += 1
        yield number, row()
        match ahead():
            case ",":
                at += 1
            case "]":
                break
            case "":
                raise refused("the file ends in the middle of the array")
            case other:
                raise refused(f"a comma or the array's end is expected after the row, got {other!r}")
    at += 1
    if other := ahead():
        raise refused(f"the array is followed by {other!r}")


def _separated(stream: _Stream) -> Numbered:
    """Rows of CSV, by the names in the first line: separated by commas, or, where it has none, semicolons or tabs."""
    used = 0

    def texts() -> Iterator[str]:
        nonlocal used
        for number, line in stream.lines():
            used += len(line)
            if used > MAX_LINE:
                raise FedKSeedError(
                    f"{stream.place(number)}: a row has at most {MAX_LINE:,} bytes; is a closing quote missing?"
                )
            yield decode(line, stream.place(number))

    lines = texts()
    first = next(lines, "")
    unquoted = re.sub(r'"[^"]*"', "", first)
    tabs = kind_of(stream.path.name) in [(".tsv", packing) for packing in ("", *PACKINGS)]
    separator = "\t" if tabs else next((s for s in (",", ";", "\t") if s in unquoted), ",")
    reader = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    number, before = (
        1,
        csv.field_size_limit(MAX_LINE),
    )  # of the process: 131,072 by default, less than a document may have
    try:
        header = next(reader, [])
        named = [name for name in header if name]
        if twice := next((name for name in named if named.count(name) > 1), None):
            raise FedKSeedError(f"{stream.place(1)}: two columns have the name {twice!r}; rename one of them")
        while True:
            number, used = reader.line_num + 1, 0
            if (row := next(reader, None)) is None:
                return
            if not any(map(str.strip, row)) and len(row) < max(2, len(header)):
                continue  # a blank line
            if len(row) != len(header):
                raise FedKSeedError(
                    f"{stream.place(number)}: {len(row)} fields, and the first line names {len(header)} columns "
                    f"({', '.join(header)}); put fields that hold {separator!r}, quotes or line breaks into quotes"
                )
            yield number, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise FedKSeedError(f"{stream.place(number)}: not valid CSV ({error}); mend its quotes and its end") from error
    finally:
        csv.field_size_limit(before)


# --- tables -------------------------------------------------------------------------------------


def _table(open_: Callable[[], Any], source: str) -> Numbered:
    """The rows of a data set of the package `datasets`."""
    try:
        table = open_().with_format(None)  # a saved one may give its rows as tensors
        if table.num_rows > MAX_ROWS or table.data.nbytes > MAX_BYTES:
            raise FedKSeedError(
                f"{source}: a file has at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes in all, it has "
                f"{table.num_rows:,} of {table.data.nbytes:,}; share it out over several"
            )
        yield from enumerate(table, 1)
    except FedKSeedError:
        raise
    except ImportError as error:
        raise FedKSeedError(f"reading {source} needs the extra `data`: pip install 'fedkseed[data]'") from error
    except Exception as error:  # pyarrow and datasets raise many kinds for a damaged file
        raise FedKSeedError(f"the data file {source} can't be read: {error}") from error


def _parquet(path: Path) -> Callable[[], Any]:
    def opened() -> Any:
        from datasets import Dataset
        from pyarrow.parquet import read_metadata

        about = read_metadata(path)  # before the file is unpacked
        size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
        if about.num_rows > MAX_ROWS or size > MAX_BYTES:
            raise FedKSeedError(
                f"{path}: a file has at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes in all, it has "
                f"{about.num_rows:,} of {size:,}; share it out over several"
            )
        return Dataset.from_parquet(str(path), keep_in_memory=True)

    return opened


def _saved(path: Path) -> Callable[[], Any]:
    def opened() -> Any:
        from datasets import DatasetDict, load_from_disk

        found = load_from_disk(str(path))
        if not isinstance(found, DatasetDict):
            return found
        if len(found) != 1:
            raise FedKSeedError(
                f"{path} holds the data sets {', '.join(map(str, found))}; name one, as {path / str(next(iter(found)))}"
            )
        return next(iter(found.values()))

    return opened


def _hub(name: str) -> Callable[[], Any]:
    def opened() -> Any:
        from datasets import load_dataset

        try:
            return load_dataset(name, split="train")
        except Exception as error:  # no network, no such name, no such split: many kinds
            raise FedKSeedError(
                f"there is no data file at {name}, and the rows 'train' of a data set of this name on the Hugging Face "
                f"hub can't be loaded: {str(error).partition(chr(10))[0]}"
            ) from error

    return opened
