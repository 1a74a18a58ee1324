"""A check of a GGUF file's header, before the libraries that read such files believe the counts in it; one reading.

They loop over 2^60 strings if a file says that it has them, and build a layer for each of a billion blocks. Layout of
the header: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any
from unittest.mock import patch  # swaps a name of a module, and puts it back whatever is raised

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..files import border

MAGIC, VERSIONS = b"GGUF", (2, 3)
FORMATS = {**dict(enumerate("BbHhIifB")), 10: "Q", 11: "q", 12: "d"}  # kind of a value -> struct's format of it
STRING, ARRAY = 8, 9
BLOCKS = {kind.value: sizes for kind, sizes in GGML_QUANT_SIZES.items()}  # of a tensor -> numbers, bytes of a block
# Libraries make Python objects of each, of 0.3 to 3 KB, whatever it has in the file.
MAX_ITEMS = 1 << 21  # of all arrays together: the largest vocabularies, of 2^18 tokens, have 1.3 million of four kinds
MAX_TENSORS, MAX_PAIRS = 1 << 16, 1 << 14  # the largest models have 20,000 and 100
MAX_DEPTH = 2  # arrays in arrays
MAX_DIMENSIONS = 4  # ggml's own limit
WIDTHS = (".embedding_length", ".feed_forward_length")  # a matrix of the file has at least as many numbers


_READING = RLock()
Found = tuple[dict[str, int | float], dict[str, tuple[tuple[int, ...], int]]]  # numbers; tensors' shapes and bytes


@contextmanager
def read_once() -> Iterator[None]:
    """Let `gguf` read each file once, and make each table of names once, until the end of the `with` block.

    Transformers reads anew for configuration, tokenizer and weights, 2 s each for SmolLM2-135M, and makes a table for
    each of its 397 modules, 10 ms each. Both depend on the arguments alone.
    """
    with (
        _READING,  # threads that load at once would put back each other's
        patch.object(gguf, "GGUFReader", cache(PlainReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield


class PlainReader(gguf.GGUFReader):
    """A reader whose arrays are plain views of the file: of a vocabulary it makes a million.

    Those of NumPy's memmap take several times as long, and 0.3 GB for 151,936 tokens.
    """

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> NDArray[Any]:
        kind = _ordered(dtype, self.byte_order if override_order is None else override_order)
        return np.ndarray(int(count), kind, self.data, int(offset))


@cache
def _ordered(dtype: Any, order: Any) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder(order)


class GgufHeader:
    """The part of a file's header that is not read yet."""

    def __init__(self, data: mmap.mmap, order: str) -> None:
        self.data, self.order, self.at, self.items = data, order, 4, 0

    def skip(self, size: int) -> int:
        """Go on by some bytes, and return where they begin."""
        begin = self.at
        if not 0 <= size <= len(self.data) - begin:
            raise FedKSeedError(f"its header announces {size:,} bytes at {begin:,}, the file has {len(self.data):,}")
        self.at += size
        return begin

    def number(self, kind: str = "Q") -> Any:
        number = struct.Struct(self.order + kind)
        return number.unpack_from(self.data, self.skip(number.size))[0]

    def text(self) -> str:
        begin = self.skip(self.number())
        return self.data[begin : self.at].decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Go on over a value, and return it if it is a number."""
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            self.skip(self.number())
            return None
        if kind != ARRAY or depth == MAX_DEPTH:
            raise FedKSeedError(f"its header has a value of kind {kind}, {depth} arrays deep")
        inner, items = self.number("I"), self.number()
        self.items += items
        if self.items > MAX_ITEMS:
            raise FedKSeedError(f"its header has an array of {items:,} items, at most {MAX_ITEMS:,} in all go")
        if inner in FORMATS:
            self.skip(items * struct.calcsize(self.order + FORMATS[inner]))
        else:
            for _ in range(items):
                self.value(inner, depth + 1)
        return None


def require_sane(path: Path) -> Found:
    """Refuse a GGUF file whose header announces more than the file can hold; returns what is in the header, by name.

    Raises:
        FedKSeedError: it does, or the file is no GGUF.
    """
    with border(f"can't read {path}"), path.open("rb") as file:
        if file.read(4) != MAGIC or not (word := file.read(4)).strip(b"\0"):
            raise FedKSeedError(f"{path} is no GGUF file: it does not begin with {MAGIC!r} and a version")
        order = "<" if word[2:] == b"\0\0" else ">"  # a small number, by either end first
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                found = _checked(GgufHeader(data, order))
            except FedKSeedError as error:
                raise FedKSeedError(f"{path} is damaged: {error}; get it again") from error
    if (parts := found[0].get("split.count", 0)) > 1:
        raise FedKSeedError(
            f"{path} is one of {parts} parts of a model; join them: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    return found


def _checked(header: GgufHeader) -> Found:
    if (version := header.number("I")) not in VERSIONS:
        raise FedKSeedError(f"it has version {version} of GGUF, versions {VERSIONS} are read")
    tensors, pairs = header.number(), header.number()
    for number, most, what in ((tensors, MAX_TENSORS, "tensors"), (pairs, MAX_PAIRS, "keys")):
        if number > most:
            raise FedKSeedError(f"its header announces {number:,} {what}, at most {most:,} go")
    alignment, places = 32, list[tuple[int, int, str]]()  # the data's default alignment; begin and size of each tensor
    numbers, stored = dict[str, int | float](), dict[str, tuple[tuple[int, ...], int]]()
    for _ in range(pairs):
        name, value = header.text(), header.value(header.number("I"))
        if value is not None:
            numbers[name] = value
        for ends_with, most, what in ((".block_count", tensors, "tensors"), (WIDTHS, len(header.data), "bytes")):
            if name.endswith(ends_with) and not (isinstance(value, int) and 0 <= value <= most):
                raise FedKSeedError(f"it has {most:,} {what}, and {name} = {value}")
        if name == "general.alignment" and isinstance(value, int) and value > 0:
            alignment = value
    for _ in range(tensors):
        name = header.text()
        if (dimensions := header.number("I")) > MAX_DIMENSIONS:
            raise FedKSeedError(f"it has a tensor of {dimensions:,} dimensions")
        shape = tuple(header.number() for _ in range(dimensions))
        kind, begin = header.number("I"), header.number()
        if kind in BLOCKS:
            block, size = BLOCKS[kind]
            stored[name] = shape, prod(shape) // block * size
            places.append((begin, stored[name][1], name))
    begin = -(-header.at // alignment) * alignment
    for offset, size, name in places:
        if (end := begin + offset + size) > len(header.data):
            raise FedKSeedError(f"it is cut short: {name} ends at byte {end:,}, it has {len(header.data):,}")
    if (total := sum(size for _, size, _ in places)) > len(header.data):  # each would be a copy of the same bytes
        raise FedKSeedError(f"its tensors have {total:,} bytes together, it has {len(header.data):,}")
    return numbers, stored
