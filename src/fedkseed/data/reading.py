"""Read instruction data: JSON lines, plain or gzipped, and Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError

SAMPLES = ("dolly-sample", "intents")  # shipped with the package, as NAME.jsonl.gz
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
REQUIRED = ("instruction", "response")
FIELDS = (*REQUIRED, "context", "category")
# All examples of a file are in memory. Dolly has 15,011 rows in 13 MB, Alpaca 52,002 in 23 MB.
MAX_BYTES = 1 << 32  # of a file's text, unpacked
MAX_LINE = 1 << 24  # bytes of one row
MAX_ROWS = 1 << 22
# gzip packs text to a third or a tenth, and what is made to fill a disk or a memory to a thousandth.
MAX_RATIO = 100
SMALL = 1 << 24  # bytes, up to which a file may unpack whatever its ratio: a few rows again and again


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its response, in the field names of Dolly."""

    instruction: str
    response: str
    context: str = ""
    category: str = ""


def read(source: str, columns: Mapping[str, str] | None = None) -> list[Example]:
    """All examples of a file.

    Args:
        source: `dolly-sample` (2,400 instructions) or `intents` (693 requests of seven kinds), which come with the
            package, or the path of a `.jsonl`, `.jsonl.gz` or `.parquet` file.
        columns: the names of fields in the file, where they differ, as in {"instruction": "question"}.
            Instruction and response must be present; context and category are optional.

    Raises:
        FedKSeedError: the file is missing or damaged, or a row is broken (the text names its number).
    """
    shipped = files("fedkseed.data") / f"{source}.jsonl.gz"
    path = Path(str(shipped)) if source in SAMPLES else Path(source).expanduser()
    if not path.is_file():
        kinds = ", ".join(f"*{ending}" for ending in ENDINGS)
        raise FedKSeedError(f"no data file at {path}; give a file ({kinds}) or one of {', '.join(SAMPLES)}")
    if unknown := set(columns or {}) - set(FIELDS):
        raise FedKSeedError(
            f"[data] columns: no field is called {sorted(unknown)[0]!r}; fields are {', '.join(FIELDS)}"
        )
    names = {name: (columns or {}).get(name, name) for name in FIELDS}
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _lines(path)
        examples = [_example(row, names, where) for row, where in rows]
    except (OSError, EOFError, zlib.error) as error:
        raise FedKSeedError(f"the data file {path} can't be read: {error}") from error
    if not examples:
        raise FedKSeedError(f"the data file {path} holds no examples")
    return examples


def is_here(source: str) -> bool:
    """Whether this machine has a source: a sample of the package, a file or a folder."""
    return source in SAMPLES or Path(source).expanduser().exists()


def read_folder(folder: str, columns: Mapping[str, str] | None = None) -> list[list[Example]]:
    """The examples of every data file of a folder, in the order of the files' names; one file is one client."""
    path = Path(folder).expanduser()
    found = sorted(p for p in path.iterdir() if p.name.endswith(ENDINGS)) if path.is_dir() else []
    if not found:
        raise FedKSeedError(
            f"no folder with data files at {path}; one file a client is wanted, *{' or *'.join(ENDINGS)}"
        )
    return [read(str(p), columns) for p in found]


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    packed = path.suffix == ".gz"
    most = min(MAX_BYTES, max(SMALL, MAX_RATIO * path.stat().st_size)) if packed else MAX_BYTES
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number, most, where = number + 1, most - len(line), f"{path}, line {number + 1}"
            if len(line) > MAX_LINE:
                raise FedKSeedError(f"{where}: a line has at most {MAX_LINE:,} bytes; is it a data file?")
            if most < 0 or number > MAX_ROWS:
                raise FedKSeedError(
                    f"{where}: a file has at most {MAX_ROWS:,} lines of {MAX_BYTES:,} bytes in all, and gzip packs "
                    f"them to no less than 1/{MAX_RATIO}; is it a data file? Else share it out over several"
                )
            if line.strip():
                yield parse(line, where, "mend or remove the line"), where


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        from datasets import Dataset
        from pyarrow.parquet import read_metadata
    except ImportError as error:
        raise FedKSeedError("reading .parquet needs the extra `data`: pip install 'fedkseed[data]'") from error
    try:
        about = read_metadata(path)
        size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
        if about.num_rows > MAX_ROWS or size > MAX_BYTES:
            raise FedKSeedError(
                f"{path}: a file has at most {MAX_ROWS:,} rows of {MAX_BYTES:,} bytes in all, it has "
                f"{about.num_rows:,} of {size:,}; share it out over several"
            )
        table = Dataset.from_parquet(str(path), keep_in_memory=True)
    except FedKSeedError:
        raise
    except Exception as error:  # pyarrow and datasets raise many kinds for a damaged file
        raise FedKSeedError(f"the data file {path} can't be read: {error}") from error
    for number, row in enumerate(table, 1):
        yield row, f"{path}, row {number}"


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
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise FedKSeedError(f"{where}: not valid JSON ({reason}); {remedy}") from error


def text(value: Any, where: str, name: str) -> str:
    """Return a value if it is text that can be written as UTF-8; refuse it otherwise."""
    if not isinstance(value, str):
        raise FedKSeedError(f"{where}: {name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FedKSeedError(f"{where}: {name} holds half a character (a lone surrogate); mend the text") from error
    return value


def _example(row: Any, names: Mapping[str, str], where: str) -> Example:
    if not isinstance(row, dict):
        raise FedKSeedError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if missing := [names[name] for name in REQUIRED if names[name] not in row]:
        raise FedKSeedError(f"{where}: no column {' and no '.join(missing)}; columns found: {', '.join(row) or 'none'}")
    values = {name: text(row.get(column, ""), where, column) for name, column in names.items()}
    if not values["response"].strip():
        raise FedKSeedError(f"{where}: the response is empty, so there is nothing to learn; remove the line")
    return Example(**values)
