"""A check of a GGUF file's header, before the libraries that read such files believe the counts in it.

They loop over 2^60 strings if a file says that it has them, and build a layer for each of a billion blocks. Layout of
the header: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from math import prod
from pathlib import Path

from ..errors import FedKSeedError
from ..files import border

MAGIC, VERSIONS = b"GGUF", (2, 3)
FORMATS = {**dict(enumerate("BbHhIifB")), 10: "Q", 11: "q", 12: "d"}  # kind of a value -> struct's format of it
STRING, ARRAY = 8, 9
# Kind of a tensor -> numbers of a block, bytes of a block: float32, float16, Q4_0, Q4_1, Q8_0, bfloat16. Those of other
# kinds are left to the library that reads them.
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 30: (1, 2)}
MAX_ITEMS = 1 << 22  # in an array: libraries make a Python object of each; the largest vocabularies have 2^18 tokens
MAX_DEPTH = 2  # arrays in arrays
MAX_DIMENSIONS = 4  # ggml's own limit
WIDTHS = (".embedding_length", ".feed_forward_length")  # a matrix of the file has at least as many numbers


class GgufHeader:
    """The part of a file's header that is not read yet."""

    def __init__(self, data: mmap.mmap, order: str) -> None:
        self.data, self.order, self.at = data, order, 4

    def skip(self, size: int) -> int:
        """Go on by some bytes, and return where they begin."""
        begin = self.at
        if not 0 <= size <= len(self.data) - begin:
            raise FedKSeedError(f"its header announces {size:,} bytes at {begin:,}, the file has {len(self.data):,}")
        self.at += size
        return begin

    def number(self, kind: str) -> int | float:
        number = struct.Struct(self.order + kind)
        return number.unpack_from(self.data, self.skip(number.size))[0]

    def count(self, kind: str = "Q") -> int:
        return int(self.number(kind))

    def text(self) -> bytes:
        size = self.count()
        begin = self.skip(size)
        return self.data[begin : begin + size]

    def value(self, kind: int, depth: int = 0) -> int | float | None:
        """Go on over a value, and return it if it is a number."""
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            self.skip(self.count())
            return None
        if kind != ARRAY or depth == MAX_DEPTH:
            raise FedKSeedError(f"its header has a value of kind {kind}, {depth} arrays deep")
        inner, items = self.count("I"), self.count()
        if items > MAX_ITEMS:
            raise FedKSeedError(f"its header has an array of {items:,} items, at most {MAX_ITEMS:,} go")
        if inner in FORMATS:
            self.skip(items * struct.calcsize(self.order + FORMATS[inner]))
        else:
            for _ in range(items):
                self.value(inner, depth + 1)
        return None


def require_sane(path: Path) -> None:
    """Refuse a GGUF file whose header announces more than the file can hold.

    Raises:
        FedKSeedError: it does, or the file is no GGUF.
    """
    with border(f"can't read {path}"), path.open("rb") as file:
        if file.read(4) != MAGIC or not (word := file.read(4)).strip(b"\0"):
            raise FedKSeedError(f"{path} is no GGUF file: it does not begin with {MAGIC!r} and a version")
        order = "<" if word[2:] == b"\0\0" else ">"  # a small number, by either end first
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _check(GgufHeader(data, order))
            except FedKSeedError as error:
                raise FedKSeedError(f"{path} is damaged: {error}; get it again") from error


def _check(header: GgufHeader) -> None:
    if (version := header.count("I")) not in VERSIONS:
        raise FedKSeedError(f"it has version {version} of GGUF, versions {VERSIONS} are read")
    tensors, pairs = header.count(), header.count()
    alignment, ends = 32, list[tuple[int, str]]()  # the data's default alignment; the byte at which each tensor ends
    for _ in range(pairs):  # each takes bytes of the file, so that a large number ends with it
        name, value = header.text().decode(errors="replace"), header.value(header.count("I"))
        if name.endswith(".block_count") and not (isinstance(value, int) and 0 <= value <= tensors):
            raise FedKSeedError(f"it has {tensors:,} tensors, and {name} = {value}")
        if name.endswith(WIDTHS) and not (isinstance(value, int) and 0 <= value <= len(header.data)):
            raise FedKSeedError(f"it has {len(header.data):,} bytes, and {name} = {value}")
        if name == "general.alignment" and isinstance(value, int) and value > 0:
            alignment = value
    for _ in range(tensors):
        name = header.text().decode(errors="replace")
        if (dimensions := header.count("I")) > MAX_DIMENSIONS:
            raise FedKSeedError(f"it has a tensor of {dimensions:,} dimensions")
        numbers, kind, begin = prod(header.count() for _ in range(dimensions)), header.count("I"), header.count()
        if kind in BLOCKS:
            block, size = BLOCKS[kind]
            ends.append((begin + numbers // block * size, name))
    begin = -(-header.at // alignment) * alignment
    for end, name in ends:
        if begin + end > len(header.data):
            raise FedKSeedError(f"it is cut short: {name} ends at byte {begin + end:,}, it has {len(header.data):,}")
