"""Records to bytes and back. docs/wire.md is the specification.

    header   56 bytes: magic, version, kind, family, flags, round, pool key, pool size − 1, digest of w_0
    body     numbers of the record, then its arrays, little-endian
    trailer  CRC-32 of all that precedes

A decoder reads nothing before the length, the checksum and every field fit; it returns a whole
record or raises.
"""

import math
import struct
import zlib
from typing import TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..directions import Pool
from ..directions.families import numbered
from ..errors import FedKSeedError
from .int8 import pack, packed_size, unpack
from .numbers import NAN, WIRES, pack_scalars, packed_scalars, unpack_scalars
from .records import Broadcast, Change, Delta, History, Lack, Run, Upload, Values

VERSION = 1
MAGIC = b"FKSd"
HEADER = struct.Struct("<4sBBBBIQI32s")
BROADCAST = struct.Struct("<ddfII")  # lr, eps, clip, steps, probes
UPLOAD = struct.Struct("<IIII")  # client, examples, loss, scalars
VALUES = struct.Struct("<dQ")  # lr, weights
HISTORY = struct.Struct("<dIIQ")  # lr, since, counts of a round, coefficients
CHANGE = struct.Struct("<IIIIIQ")  # client, examples, loss, skipped, counts, numbers
DELTA = struct.Struct("<II")  # checksums of the message that was kept and of the one that comes of it
LACK = struct.Struct("<I")  # client
TRAILER = struct.Struct("<I")
Record: TypeAlias = Broadcast | Upload | Values | History | Change | Delta | Lack
Message = TypeVar("Message", Broadcast, Upload, Values, History, Change, Delta, Lack)
KINDS: dict[int, type[Record]] = {
    1: Broadcast, 2: Upload, 3: Values, 4: History, 5: Change, 6: Delta, 7: Lack,
}  # fmt: skip
WITH_PROBABILITIES = 1  # flag of a broadcast
WITH_DIRECTIONS = 1  # flag of a history
WIRE = {"exact": 0, "compact": 2, "sign": 4}  # flags of messages whose numbers travel in several ways
WITH_SKIPPED = 8  # flag of signs: a second row of bits says which there are none of


def encode(message: Record) -> bytes:
    """The bytes of a message; their length is the traffic that is counted."""
    pool, flags = message.run.pool, 0
    match message:
        case Broadcast():
            fixed = BROADCAST.pack(message.lr, message.eps, message.clip, message.steps, message.probes)
            vectors = [message.coefficients]
            if message.probabilities is not None:
                flags = WITH_PROBABILITIES
                vectors.append(message.probabilities)
            flags |= WIRE[message.wire]
            parts = [_floats(values, message.wire) for values in vectors]
        case Upload():
            fixed = UPLOAD.pack(message.client, message.examples, _loss_bits(message.loss), message.scalars.size)
            flags = WIRE[message.wire] | WITH_SKIPPED * (message.wire == "sign" and message.skipped > 0)
            parts = [pack_scalars(message.scalars, message.wire)]
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
            sizes = message.counts.size, message.values.size
            fixed = CHANGE.pack(
                message.client, message.examples, _loss_bits(message.loss), message.skipped, *sizes
            )  # fmt: skip
            flags = WIRE[message.wire]
            parts = [_bytes(message.counts, "<u4"), _floats(message.values, message.wire)]
        case Delta():
            fixed, parts = DELTA.pack(message.kept, message.whole), [message.difference]
        case Lack():
            fixed, parts = LACK.pack(message.client), []
    kind = next(number for number, of in KINDS.items() if isinstance(message, of))
    header = HEADER.pack(
        MAGIC, VERSION, kind, pool.record.number, flags, message.round, pool.key, pool.size - 1, message.run.base
    )  # fmt: skip
    return sealed(header, fixed, *parts)


def sealed(*parts: bytes | memoryview) -> bytes:
    """A message's parts with their checksum after them."""
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return b"".join((*parts, TRAILER.pack(check)))


def kind_of(data: bytes) -> type[Record] | None:
    """What a message says that it is; `decode` checks the rest."""
    return KINDS.get(data[5]) if len(data) > 5 else None


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
    run = Run(Pool(key, last + 1, numbered(family).name), base)
    body = memoryview(data)[HEADER.size : -TRAILER.size]
    return cast("Message", READERS[kind](run, round_, flags, body))


def _broadcast(run: Run, round_: int, flags: int, body: memoryview) -> Broadcast:
    lr, eps, clip, steps, probes = _fixed(BROADCAST, flags, body, "broadcast", (0, 1, 2, 3, 4, 5))
    size, wire = run.pool.size, _wire(flags)
    each, vectors = _width(size, wire), 1 + (flags & WITH_PROBABILITIES)
    _require(body, BROADCAST.size + each * vectors, "broadcast")
    coefficients, *rest = [_read(body, BROADCAST.size + k * each, size, wire) for k in range(vectors)]
    return Broadcast(run, round_, lr, eps, steps, clip, coefficients, probes, rest[0] if rest else None, wire)


def _upload(run: Run, round_: int, flags: int, body: memoryview) -> Upload:
    allowed = (0, WIRE["compact"], WIRE["sign"], WIRE["sign"] | WITH_SKIPPED)
    client, examples, loss, count = _fixed(UPLOAD, flags, body, "upload", allowed)
    wire, skipped = _wire(flags), bool(flags & WITH_SKIPPED)
    _require(body, UPLOAD.size + packed_scalars(count, wire, skipped), "upload")
    scalars = unpack_scalars(body[UPLOAD.size :], count, wire, skipped)
    return Upload(run, round_, client, examples, _loss(loss), scalars, wire)


def _values(run: Run, round_: int, flags: int, body: memoryview) -> Values:
    lr, size = _fixed(VALUES, flags, body, "broadcast of weights")
    _require(body, VALUES.size + 4 * size, "broadcast of weights")
    return Values(run, round_, lr, _numbers(body, size, VALUES.size))


def _history(run: Run, round_: int, flags: int, body: memoryview) -> History:
    lr, since, tensors, size = _fixed(HISTORY, flags, body, "history", (0, WITH_DIRECTIONS))
    if flags and not size:
        raise FedKSeedError("a history that names directions has some, got none")
    rows, named = max(0, round_ - since), size if flags else 0
    _require(body, HISTORY.size + 4 * (rows * tensors + named + size), "history")
    at = HISTORY.size + 4 * rows * tensors
    counts = np.frombuffer(body, "<u4", rows * tensors, HISTORY.size).astype(np.uint32).reshape(rows, tensors)
    directions = np.frombuffer(body, "<u4", named, at).astype(np.uint32)
    return History(run, round_, lr, since, counts, directions, _numbers(body, size, at + 4 * named))


def _change(run: Run, round_: int, flags: int, body: memoryview) -> Change:
    client, examples, loss, skipped, tensors, size = _fixed(CHANGE, flags, body, "change", (0, WIRE["compact"]))
    wire = _wire(flags)
    at = CHANGE.size + 4 * tensors
    _require(body, at + _width(size, wire), "change")
    counts = np.frombuffer(body, "<u4", tensors, CHANGE.size).astype(np.uint32)
    values = _read(body, at, size, wire)
    return Change(run, round_, client, examples, _loss(loss), skipped, values, counts, wire)


def _delta(run: Run, round_: int, flags: int, body: memoryview) -> Delta:
    kept, whole = _fixed(DELTA, flags, body, "delta")
    return Delta(run, round_, kept, whole, bytes(body[DELTA.size :]))


def _lack(run: Run, round_: int, flags: int, body: memoryview) -> Lack:
    (client,) = _fixed(LACK, flags, body, "lack")
    _require(body, LACK.size, "lack")
    return Lack(run, round_, client)


READERS = {
    Broadcast: _broadcast, Upload: _upload, Values: _values, History: _history, Change: _change, Delta: _delta,
    Lack: _lack,
}  # fmt: skip


def _fixed(layout: struct.Struct, flags: int, body: memoryview, name: str, allowed: tuple[int, ...] = (0,)) -> tuple:
    if flags not in allowed:
        raise FedKSeedError(f"this {name} may have flags {' or '.join(map(str, allowed))}, got {flags}")
    if len(body) < layout.size:
        raise FedKSeedError(f"the body of this {name} has at least {layout.size} bytes, got {len(body)}")
    return layout.unpack_from(body)


def _wire(flags: int) -> str:
    return WIRES[(flags & 6) >> 1]


def _loss_bits(loss: float) -> int:
    """A float32 as it travels: there is one NaN."""
    return NAN if math.isnan(loss) else int(np.float32(loss).view(np.uint32))


def _loss(bits: int) -> float:
    loss = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isnan(loss) and bits != NAN:
        raise FedKSeedError(f"a loss that is no number travels as {NAN:08x}, got {bits:08x}")
    return loss


def _numbers(body: memoryview, size: int, at: int) -> NDArray[np.float32]:
    """A view of the message where the machine is little-endian: these can be all weights of a model."""
    return np.frombuffer(body, "<f4", size, at).astype(np.float32, copy=False)


def _width(size: int, wire: str) -> int:
    """Bytes of so many numbers."""
    return 4 * size if wire == "exact" else packed_size(size)


def _read(body: memoryview, at: int, size: int, wire: str) -> NDArray[np.float32]:
    if wire == "exact":
        return _numbers(body, size, at)
    return unpack(body[at : at + packed_size(size)], size)


def _floats(values: NDArray[np.float32], wire: str) -> memoryview | bytes:
    return _bytes(values, "<f4") if wire == "exact" else pack(values)


def _require(body: memoryview, expected: int, name: str) -> None:
    if len(body) != expected:
        raise FedKSeedError(f"this {name}'s body must have {expected} bytes, got {len(body)}")


def _bytes(values: NDArray, dtype: str) -> memoryview:
    return np.ascontiguousarray(values, dtype).data.cast("B") if values.size else memoryview(b"")
