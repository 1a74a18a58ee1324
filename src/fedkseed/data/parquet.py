"""Rows of Parquet files, in batches, without a copy on disk; a file may come from a stranger.

Ten bytes of it can stand for 2^31 values, and a footer may say any size. So the header of each page is read first, and
decoded texts are counted before they are made. Layout: https://parquet.apache.org/docs/file-format/
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FedKSeedError, first_line, needs_extra

BATCH = 1 << 14  # values, and so rows of one column
FLAT, NESTED = 8, 64  # bytes that a value takes in memory at least: in a column, and as an item of a row's list
FOOTER: Any = {"thrift_container_size_limit": 1 << 16, "thrift_string_size_limit": 1 << 26}  # items, bytes
UNCOMPRESSED, COMPRESSED, VALUES = 2, 3, 1  # fields of headers
PAGES = 5, 7, 8  # fields with the header of a page of values, of a dictionary, of values in version 2
GROUPS, CHUNKS, ABOUT, CHUNK_BYTES, FIRST_PAGES = 4, 1, 3, 7, (9, 11)  # fields of the footer, and what is in them
BOOLEANS, BYTE, INTEGERS, DOUBLE, BINARY, LIST, STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, 9, 12  # Thrift's compact protocol


def parquet_rows(path: str, most_rows: int, most_columns: int, room: int) -> Iterator[dict[str, Any]]:
    """The rows of a file; classes, which `datasets` stores as numbers, by their names.

    Args:
        room: bytes that the file may decode to.

    Raises:
        FedKSeedError: the file is beyond a limit; a damaged one raises an error of pyarrow.
    """
    with needs_extra(f"reading {path} needs", "data"):
        import datasets
        from pyarrow.parquet import ParquetFile
    with ParquetFile(path, **FOOTER) as file:
        about, columns = file.metadata, [file.schema.column(k) for k in range(len(file.schema))]
        if len(columns) > most_columns:
            raise FedKSeedError(f"{path} has {len(columns):,} columns, at most {most_columns:,} go; is it a data file?")
        texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
    size = 0 if about.num_rows > most_rows else _announced(path, columns, room)
    if about.num_rows > most_rows or size > room:
        limits = f"at most {most_rows:,} rows of {room:,} bytes, of a file of {Path(path).stat().st_size:,}"
        got = f"{about.num_rows:,} rows" if about.num_rows > most_rows else f"pages of {size:,} bytes"
        raise FedKSeedError(f"{path} has {got}, {limits}, go; share it out over several")
    with ParquetFile(path, read_dictionary=texts, **FOOTER) as file:
        features = datasets.Features.from_arrow_schema(file.schema_arrow)
        if len(features) < len(file.schema_arrow):
            raise FedKSeedError(f"{path}: two columns have one name; rename one")
        write = as_stored(features)
        batches = file.iter_batches(max(1, BATCH // max(1, len(columns))))
        while (batch := _following(batches, path)) is not None:
            room -= sum(map(_decoded, batch.columns))
            if room < 0:
                raise FedKSeedError(f"{path} decodes to far more bytes than it has; is it a data file?")
            yield from map(write, batch.to_pylist())


def _following(batches: Iterator[Any], path: str) -> Any | None:
    """The next batch; None: there is none. Texts are read into dictionaries, which pyarrow can't with all encodings."""
    try:
        return next(batches, None)
    except OSError as error:
        if "Not yet implemented" not in str(error):
            raise
        raise FedKSeedError(
            f"{path} has texts in an encoding that is not read, as DELTA_BYTE_ARRAY ({first_line(error)}); write it "
            "anew, as pandas and pyarrow do by default"
        ) from error


def as_stored(features: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that gives rows the names of their classes, and short floats as few digits as tell them apart.

    A class is stored as a number, -1 where there is none; 1.2 as a float32 is 1.2000000476837158 as a float64.
    """
    import datasets

    labels = {name: of for name, of in features.items() if isinstance(of, datasets.ClassLabel)}
    types: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    short = {name: types[dtype] for name, of in features.items() if (dtype := getattr(of, "dtype", "")) in types}

    def write(row: dict[str, Any]) -> dict[str, Any]:
        for name, names in labels.items():
            row[name] = None if row[name] in (None, -1) else names.int2str(row[name])
        for name, kind in short.items():
            row[name] = row[name] if row[name] is None else float(str(kind(row[name])))
        return row

    return write


def _decoded(array: Any) -> int:
    """The bytes of an array's values, each text as often as it is there."""
    import pyarrow as pa
    import pyarrow.compute

    functions: Any = pyarrow.compute
    if pa.types.is_dictionary(array.type):
        lengths = functions.binary_length(array.dictionary)
        return functions.sum(lengths.cast("int64").take(array.indices)).as_py() or 0
    if pa.types.is_struct(array.type):
        return sum(map(_decoded, array.flatten()))
    if pa.types.is_nested(array.type):
        return _decoded(array.flatten()) + FLAT * len(array)
    return array.nbytes


def _announced(path: str, columns: list[Any], room: int) -> int:
    """The bytes to which a file's pages unpack, or of which their values take more, until they are more than `room`."""
    size = 0
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # pyarrow's own view of a chunk ends the process (std::terminate, pyarrow 26) where its statistics are wrong
        footer, _ = _struct(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
        for group in footer.get(GROUPS, ()):
            for chunk, column in zip(group[CHUNKS], columns, strict=True):
                about = chunk[ABOUT]
                at = min(about[page] for page in FIRST_PAGES if about.get(page))
                end, each = at + about[CHUNK_BYTES], NESTED if column.max_repetition_level else FLAT
                while at < end:
                    header, at = _struct(data, at)
                    values = sum(header[kind].get(VALUES, 0) for kind in PAGES if kind in header)
                    size += max(header[UNCOMPRESSED], values * each, NESTED)
                    if min(header[UNCOMPRESSED], header[COMPRESSED], values) < 0:
                        raise FedKSeedError(f"{path} is damaged: a page has a negative size; get it again")
                    if size > room:
                        return size
                    at += header[COMPRESSED]
    return size


def _struct(data: mmap.mmap, at: int) -> tuple[dict[int, Any], int]:
    """The integers, structs and lists of a Thrift struct by their fields' numbers, and the byte behind it."""
    fields, number = dict[int, Any](), 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _field(data, at, head & 15)
    return fields, at + 1


def _field(data: mmap.mmap, at: int, kind: int, listed: bool = False) -> tuple[Any, int]:
    """A value, or None for one that is of no use here, and the byte behind it."""
    if kind in INTEGERS:
        return _integer(data, at)
    if kind == STRUCT:
        return _struct(data, at)
    if kind == LIST:
        items, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if items == 15:
            items, at = varint(data, at)
        values = list[Any]()
        for _ in range(items):  # each takes a byte at least, so that a large number ends with the file
            value, at = _field(data, at, inner, listed=True)
            values.append(value)
        return values, at
    if kind == BINARY:
        length, at = varint(data, at)
        return None, at + length
    return None, at + {BYTE: 1, DOUBLE: 8, **dict.fromkeys(BOOLEANS, int(listed))}[kind]


def _integer(data: mmap.mmap, at: int) -> tuple[int, int]:
    number, at = varint(data, at)
    return (number >> 1) ^ -(number & 1), at


def varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """The number of variable length at a place, as of protobuf and Thrift, and the place behind it."""
    number = shift = 0
    while data[at] & 128 and shift < 64:
        number, at, shift = number | (data[at] & 127) << shift, at + 1, shift + 7
    return number | data[at] << shift, at + 1
