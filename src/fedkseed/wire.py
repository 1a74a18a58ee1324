"""Records to bytes and back. docs/wire.md is the specification.

    header   56 bytes: magic, version, kind, family, flags, round, pool key, pool size − 1, digest of w_0
    body     numbers of the record, then its arrays, little-endian
    trailer  CRC-32 of all that precedes

A decoder reads nothing before the length, the checksum and every field fit; it returns a whole
record or raises.
"""

import struct
import zlib
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .compact import pack, packed_size, unpack
from .directions import FAMILIES, Pool
from .errors import FedKSeedError
from .messages import Broadcast, Change, History, Run, Upload, Values

VERSION = 1
MAGIC = b"FKSd"
HEADER = struct.Struct("<4sBBBBIQI32s")
BROADCAST = struct.Struct("<ddfII")  # lr, eps, clip, steps, probes
UPLOAD = struct.Struct("<IIfI")  # client, examples, loss, pairs
VALUES = struct.Struct("<dQ")  # lr, weights
HISTORY = struct.Struct("<dIIQ")  # lr, since, counts of a round, coefficients
CHANGE = struct.Struct("<IIfIIQ")  # client, examples, loss, skipped, counts, numbers
TRAILER = struct.Struct("<I")
Message = TypeVar("Message", Broadcast, Upload, Values, History, Change)
KINDS = {1: Broadcast, 2: Upload, 3: Values, 4: History, 5: Change}
WITH_PROBABILITIES = 1  # flag of a broadcast
WITH_DIRECTIONS = 1  # flag of a history
COMPACT = 2  # flag of a broadcast and of numbers that come up: 8 bits each


def encode(message: Broadcast | Upload | Values | History | Change) -> bytes:
    """The bytes of a message; their length is the traffic that is counted."""
    pool, flags = message.run.pool, 0
    match message:
        case Broadcast():
            fixed = BROADCAST.pack(message.lr, message.eps, message.clip, message.steps, message.probes)
            vectors = [message.coefficients]
            if message.probabilities is not None:
                flags = WITH_PROBABILITIES
                vectors.append(message.probabilities)
            flags |= COMPACT * (message.bits == 8)
            parts = [_floats(values, message.bits) for values in vectors]
        case Upload():
            loss = float(np.float32(message.loss))
            fixed = UPLOAD.pack(message.client, message.examples, loss, message.scalars.size)
            parts = [_bytes(message.directions, _index(pool)), _bytes(message.scalars, "<f4")]
        case Values():
            fixed = VALUES.pack(message.lr, message.values.size)
            parts = [_bytes(message.values, "<f4")]
        case History():
            flags = WITH_DIRECTIONS if message.directions.size else 0
            fixed = HISTORY.pack(message.lr, message.since, message.counts.shape[1], message.coefficients.size)
            parts = [
                _bytes(message.counts, "<u4"), _bytes(message.directions, "<u4"), _bytes(message.coefficients, "<f4")
            ]  # fmt: skip
        case Change():
            loss, counts = float(np.float32(message.loss)), message.counts.size
            fixed = CHANGE.pack(
                message.client, message.examples, loss, message.skipped, counts, message.values.size
            )  # fmt: skip
            flags = COMPACT * (message.bits == 8)
            parts = [_bytes(message.counts, "<u4"), _floats(message.values, message.bits)]
    kind = next(number for number, of in KINDS.items() if isinstance(message, of))
    family = FAMILIES.index(pool.family)
    header = HEADER.pack(
        MAGIC, VERSION, kind, family, flags, message.round, pool.key, pool.size - 1, message.run.base
    )  # fmt: skip
    check = 0
    for part in (header, fixed, *parts):
        check = zlib.crc32(part, check)
    return b"".join((header, fixed, *parts, TRAILER.pack(check)))


def decode(data: bytes, *kinds: type[Message]) -> Message:
    """The record in `data`, which must be of one of the kinds.

    Raises:
        FedKSeedError: the bytes are cut short, too long, damaged, of another version or kind, or
            hold a value that is not allowed.
    """
    if len(data) < HEADER.size + TRAILER.size:
        raise FedKSeedError(
            f"a message has at least {HEADER.size + TRAILER.size} bytes, got {len(data)}; it was cut short"
        )
    magic, version, number, family, flags, round_, key, last, base = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FedKSeedError(f"not a fedkseed message: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise FedKSeedError(
            f"the message has protocol version {version}, this program speaks {VERSION}; use one release"
        )
    if zlib.crc32(memoryview(data)[: -TRAILER.size]) != TRAILER.unpack_from(data, len(data) - TRAILER.size)[0]:
        raise FedKSeedError(
            "the message's checksum does not fit: it was damaged or cut short on the way; send it again"
        )
    kind = KINDS.get(number)
    if kind is None or kind not in kinds:
        got = f"kind {number}" if kind is None else kind.__name__
        raise FedKSeedError(f"expected a message of kind {' or '.join(k.__name__ for k in kinds)}, got {got}")
    if family >= len(FAMILIES):
        raise FedKSeedError(f"the message names direction family number {family}; known are 0 to {len(FAMILIES) - 1}")
    run = Run(Pool(key, last + 1, FAMILIES[family]), base)
    body = memoryview(data)[HEADER.size : -TRAILER.size]
    return cast("Message", READERS[kind](run, round_, flags, body))


def _broadcast(run: Run, round_: int, flags: int, body: memoryview) -> Broadcast:
    lr, eps, clip, steps, probes = _fixed(BROADCAST, flags, body, "broadcast", WITH_PROBABILITIES | COMPACT)
    size, bits = run.pool.size, 8 if flags & COMPACT else 32
    each, vectors = _width(size, bits), 1 + (flags & WITH_PROBABILITIES)
    _require(body, BROADCAST.size + each * vectors, "broadcast")
    coefficients, *rest = [_read(body, BROADCAST.size + k * each, size, bits) for k in range(vectors)]
    return Broadcast(run, round_, lr, eps, steps, clip, coefficients, probes, rest[0] if rest else None, bits)


def _upload(run: Run, round_: int, flags: int, body: memoryview) -> Upload:
    client, examples, loss, pairs = _fixed(UPLOAD, flags, body, "upload")
    index = np.dtype(_index(run.pool))
    _require(body, UPLOAD.size + pairs * (index.itemsize + 4), "upload")
    directions = np.frombuffer(body, index, count=pairs, offset=UPLOAD.size).astype(np.uint32)
    scalars = np.frombuffer(body, "<f4", offset=UPLOAD.size + pairs * index.itemsize).astype(np.float32)
    return Upload(run, round_, client, examples, loss, directions, scalars)


def _values(run: Run, round_: int, flags: int, body: memoryview) -> Values:
    lr, size = _fixed(VALUES, flags, body, "broadcast of weights")
    _require(body, VALUES.size + 4 * size, "broadcast of weights")
    return Values(run, round_, lr, _numbers(body, size, VALUES.size))


def _history(run: Run, round_: int, flags: int, body: memoryview) -> History:
    lr, since, tensors, size = _fixed(HISTORY, flags, body, "history", WITH_DIRECTIONS)
    rows, named = max(0, round_ - since), size if flags else 0
    _require(body, HISTORY.size + 4 * (rows * tensors + named + size), "history")
    at = HISTORY.size + 4 * rows * tensors
    counts = np.frombuffer(body, "<u4", rows * tensors, HISTORY.size).astype(np.uint32).reshape(rows, tensors)
    directions = np.frombuffer(body, "<u4", named, at).astype(np.uint32)
    return History(run, round_, lr, since, counts, directions, _numbers(body, size, at + 4 * named))


def _change(run: Run, round_: int, flags: int, body: memoryview) -> Change:
    client, examples, loss, skipped, tensors, size = _fixed(CHANGE, flags, body, "upload", COMPACT)
    bits = 8 if flags & COMPACT else 32
    at = CHANGE.size + 4 * tensors
    _require(body, at + _width(size, bits), "upload")
    counts = np.frombuffer(body, "<u4", tensors, CHANGE.size).astype(np.uint32)
    return Change(run, round_, client, examples, loss, skipped, _read(body, at, size, bits), counts, bits)


READERS = {Broadcast: _broadcast, Upload: _upload, Values: _values, History: _history, Change: _change}


def _fixed(layout: struct.Struct, flags: int, body: memoryview, name: str, allowed: int = 0) -> tuple:
    if flags & ~allowed:
        known = " or ".join(str(flag) for flag in range(allowed + 1) if not flag & ~allowed)
        raise FedKSeedError(f"a {name} has flags {known}, got {flags}")
    if len(body) < layout.size:
        raise FedKSeedError(f"the body of a {name} has at least {layout.size} bytes, got {len(body)}")
    return layout.unpack_from(body)


def _numbers(body: memoryview, size: int, at: int) -> NDArray[np.float32]:
    """A view of the message where the machine is little-endian: these can be all weights of a model."""
    return np.frombuffer(body, "<f4", size, at).astype(np.float32, copy=False)


def _width(size: int, bits: int) -> int:
    """Bytes of so many numbers."""
    return packed_size(size) if bits == 8 else 4 * size


def _read(body: memoryview, at: int, size: int, bits: int) -> NDArray[np.float32]:
    if bits == 8:
        return unpack(body[at : at + packed_size(size)], size)
    return _numbers(body, size, at)


def _floats(values: NDArray[np.float32], bits: int) -> memoryview | bytes:
    return pack(values) if bits == 8 else _bytes(values, "<f4")


def _require(body: memoryview, expected: int, name: str) -> None:
    if len(body) != expected:
        raise FedKSeedError(f"this {name}'s body must have {expected} bytes, got {len(body)}")


def _index(pool: Pool) -> str:
    """Indices travel as 16 bits where the pool allows: 400 bytes less at 200 steps."""
    return "<u2" if pool.size <= 1 << 16 else "<u4"


def _bytes(values: NDArray, dtype: str) -> memoryview:
    return np.ascontiguousarray(values, dtype).data.cast("B") if values.size else memoryview(b"")
