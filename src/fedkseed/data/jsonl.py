"""Read instruction data: one JSON object a line, plain or gzipped."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import FedKSeedError

SAMPLES = {"dolly-sample": "dolly-sample.jsonl.gz"}  # shipped with the package
REQUIRED = ("instruction", "response")


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its response, in the field names of Dolly."""

    instruction: str
    response: str
    context: str = ""
    category: str = ""


def read(source: str) -> list[Example]:
    """All examples of a file.

    Args:
        source: `dolly-sample` (2,400 rows that come with the package), or the path of a `.jsonl`
            or `.jsonl.gz` file with the columns instruction, response and, optionally, context
            and category.

    Raises:
        FedKSeedError: the file is missing, or a line is broken (its number is told).
    """
    path = Path(str(files("fedkseed.data") / SAMPLES[source])) if source in SAMPLES else Path(source).expanduser()
    if not path.is_file():
        raise FedKSeedError(f"no data file at {path}; give a .jsonl or .jsonl.gz file, or one of {', '.join(SAMPLES)}")
    try:
        examples = [_parse(line, f"{path}, line {number}") for number, line in _lines(path)]
    except (OSError, EOFError) as error:
        raise FedKSeedError(f"the data file {path} can't be read: {error}") from error
    if not examples:
        raise FedKSeedError(f"the data file {path} holds no examples")
    return examples


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _parse(line: bytes, where: str) -> Example:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise FedKSeedError(f"{where}: not valid UTF-8; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise FedKSeedError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); mend or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise FedKSeedError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if missing := [name for name in REQUIRED if name not in row]:
        raise FedKSeedError(f"{where}: no column {' and no '.join(missing)}; columns found: {', '.join(row) or 'none'}")
    values = {name: row.get(name, "") for name in ("instruction", "response", "context", "category")}
    if wrong := [name for name, value in values.items() if not isinstance(value, str)]:
        raise FedKSeedError(f"{where}: {wrong[0]} must be text, got {type(values[wrong[0]]).__name__}")
    if not values["response"].strip():
        raise FedKSeedError(f"{where}: the response is empty, so there is nothing to learn; remove the line")
    return Example(**values)
