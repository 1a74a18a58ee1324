"""Conversion of records to bytes and back. docs/wire.md is the specification.

    header   56 bytes: magic, version, kind, family, flags, round, pool key, pool size − 1, digest of w_0
             88 where a basis has the directions: the SHA-256 of the basis follows
    body     numbers of the record, then its arrays, little-endian
    trailer  CRC-32 of all that precedes

A decoder uses nothing before the length, the checksum and every field fit; it returns a whole
record or raises. ROWS has the kinds; longer functions that write and read one stand before it, side by side.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from isal.isal_zlib import crc32  # zlib's value in a sixth of its time
from numpy.typing import NDArray

from ..directions import Pool
from ..directions.families import numbered
from ..errors import FedKSeedError
from . import records
from .int8 import pack, packed_size, unpack
from .numbers import NAN, WIRES, pack_bits, pack_scalars, packed_scalars, unpack_bits, unpack_scalars
from .records import KEY, MAX_BROADCAST, Run

VERSION = 2  # 2: scalar gradients are multiples of numbers.GRID
MAGIC = b"FKSd"
HEADER = struct.Struct("<4sBBBBIQI32s")
BASIS = 32  # bytes of a basis' digest after the header
TRAILER = struct.Struct("<I")
OWN = 128  # kinds from here on are those of a user's program
# Flags: of messages whose numbers travel in several ways; of a broadcast; of a history; of signs, for a second row of
# bits that marks the probes without a sign.
WIRE = {"exact": 0, "compact": 2, "sign": 4}
WITH_PROBABILITIES, WITH_DIRECTIONS, WITH_SKIPPED = 1, 1, 8


class Record(Protocol):
    """Any message: its run and round are in the header."""

    @property
    def run(self) -> Run: ...

    @property
    def round(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a header that a record is made from."""

    run: Run
    round: int
    flags: int


Written = tuple[int, Sequence[Any], Sequence[bytes | memoryview]]  # flags, fixed numbers, arrays
Parts = Sequence[memoryview]
Message = TypeVar("Message", bound=Record)


@dataclass(frozen=True, slots=True)
class Kind(Generic[Message]):
    """One kind of message: its record, and the functions that write and read its body.

    Args:
        number: the kind's number in the header, 1 to 255. It never changes.
        record: a dataclass with `run` and `round` that checks itself when made, so that a decoded one is sound.
        name: the name in error messages.
        fixed: the layout of the numbers that the body begins with.
        write: maps a record to its flags, the numbers of `fixed`, and the bytes of the arrays after them.
        sizes: maps (head, numbers) to the bytes of each array; None for one array that is the rest of the body.
        read: maps (head, numbers, arrays) to the record.
        flags: the values of the header's flags that are allowed.
    """

    number: int
    record: type[Message]
    name: str
    fixed: struct.Struct
    write: Callable[[Message], Written]
    sizes: Callable[[Head, Sequence[Any]], Sequence[int]] | None
    read: Callable[[Head, Sequence[Any], Parts], Message]
    flags: tuple[int, ...] = (0,)


# --- the kinds ----------------------------------------------------------------------------------


def _write_broadcast(message: records.Broadcast) -> Written:
    vectors = [message.coefficients] if message.probabilities is None else [message.coefficients, message.probabilities]
    flags = WIRE[message.wire] | WITH_PROBABILITIES * (len(vectors) - 1)
    fixed = message.lr, message.eps, message.clip, message.steps, message.probes
    return flags, fixed, [_floats(values, message.wire) for values in vectors]


def _read_broadcast(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Broadcast:
    (lr, eps, clip, steps, probes), wire = fixed, _wire(head)
    c, *p = [_numbers(part, head.run.pool.size, wire) for part in parts]
    return records.Broadcast(head.run, head.round, lr, eps, steps, clip, c, probes, p[0] if p else None, wire)


def _write_upload(message: records.Upload) -> Written:
    flags = WIRE[message.wire] | WITH_SKIPPED * (message.wire == "sign" and message.skipped > 0)
    fixed = message.client, message.examples, _loss_bits(message.loss), message.scalars.size
    return flags, fixed, [pack_scalars(message.scalars, message.wire)]


def _read_upload(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Upload:
    (client, examples, loss, count), wire = fixed, _wire(head)
    scalars = unpack_scalars(parts[0], count, wire, bool(head.flags & WITH_SKIPPED))
    return records.Upload(head.run, head.round, client, examples, _loss(loss), scalars, wire)


def _write_history(message: records.History) -> Written:
    flags = WITH_DIRECTIONS if message.directions.size else 0
    fixed = message.lr, message.since, message.counts.shape[1], message.coefficients.size
    counts, directions = _bytes(message.counts, "<u4"), _bytes(message.directions, "<u4")
    return flags, fixed, [counts, directions, _bytes(message.coefficients, "<f4")]


def _history_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    _, since, tensors, size = fixed
    return [4 * max(0, head.round - since) * tensors, 4 * size * (head.flags & WITH_DIRECTIONS), 4 * size]


def _read_history(head: Head, fixed: Sequence[Any], parts: Parts) -> records.History:
    lr, since, tensors, size = fixed
    if head.flags and not size:
        raise FedKSeedError("a history that names directions has some, got none")
    counts, directions = _words(parts[0]).reshape(max(0, head.round - since), tensors), _words(parts[1])
    return records.History(head.run, head.round, lr, since, counts, directions, _numbers(parts[2], size))


def _write_change(message: records.Change) -> Written:
    sizes = message.counts.size, message.values.size
    fixed = message.client, message.examples, _loss_bits(message.loss), message.skipped, *sizes
    return WIRE[message.wire], fixed, [_bytes(message.counts, "<u4"), _floats(message.values, message.wire)]


def _read_change(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Change:
    (client, examples, loss, skipped, _, size), wire = fixed, _wire(head)
    values = _numbers(parts[1], size, wire)
    return records.Change(head.run, head.round, client, examples, _loss(loss), skipped, values, _words(parts[0]), wire)


def _read_masked(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Masked:
    client, width, count, *shape = fixed
    if not (2 <= width <= 32 and count <= MAX_BROADCAST):
        got = f"{count:,} of {width}"
        raise FedKSeedError(f"a masked upload has up to {MAX_BROADCAST:,} numbers of 2 to 32 bits, it announces {got}")
    numbers = unpack_bits(parts[0], count, width)
    return records.Masked(head.run, head.round, client, width, numbers, _rows(parts[1], shape))


def _write_survivors(message: records.Survivors) -> Written:
    there = np.packbits(message.there, bitorder="little").tobytes()
    fixed = message.members.size, *message.bundles.shape
    return 0, fixed, [*_roster(message), message.broadcast, there, message.bundles.tobytes()]


def _read_survivors(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Survivors:
    members, *shape = fixed
    bits = np.unpackbits(np.frombuffer(parts[3], np.uint8), bitorder="little").astype(bool)
    if bits[members:].any():
        raise FedKSeedError("a message says of clients beyond those of its round that they are there")
    rows = _rows(parts[4], shape)
    return records.Survivors(head.run, head.round, *_read_roster(parts), bytes(parts[2]), bits[:members], rows)


def _write_subtotal(message: records.Subtotal) -> Written:
    fixed = message.client, message.weight, _loss_bits(message.loss), message.skipped, message.clients.size
    numbers = _bytes(message.values, "<i8"), _bytes(message.sizes, "<i8"), _bytes(message.counts, "<u4")
    return 0, fixed, [_bytes(message.clients, "<u4"), *numbers]


def _read_subtotal(head: Head, fixed: Sequence[Any], parts: Parts) -> records.Subtotal:
    client, weight, loss, skipped, _ = fixed
    values, sizes = (np.frombuffer(part, "<i8").astype(np.int64) for part in parts[1:3])
    clients, counts = _words(parts[0]), _words(parts[3])
    return records.Subtotal(head.run, head.round, client, clients, weight, _loss(loss), skipped, values, sizes, counts)


# Number, record, name, fixed numbers; what is written; the bytes of each array; what is read; flags.
ROWS: tuple[Kind[Any], ...] = (
    Kind(
        1, records.Broadcast, "broadcast", struct.Struct("<ddfII"), _write_broadcast,
        lambda head, fixed: [_width(head.run.pool.size, _wire(head))] * (1 + (head.flags & WITH_PROBABILITIES)),
        _read_broadcast, (0, 1, 2, 3, 4, 5),
    ),
    Kind(
        2, records.Upload, "upload", struct.Struct("<IIII"), _write_upload,
        lambda head, fixed: [packed_scalars(fixed[3], _wire(head), bool(head.flags & WITH_SKIPPED))],
        _read_upload, (0, 2, 4, 4 | WITH_SKIPPED),
    ),
    Kind(
        3, records.Values, "broadcast of weights", struct.Struct("<dQ"),
        lambda message: (0, (message.lr, message.values.size), [_bytes(message.values, "<f4")]),
        lambda head, fixed: [4 * fixed[1]],
        lambda head, fixed, parts: records.Values(head.run, head.round, fixed[0], _numbers(parts[0], fixed[1])),
    ),
    Kind(
        4, records.History, "history", struct.Struct("<dIIQ"), _write_history, _history_sizes, _read_history,
        (0, WITH_DIRECTIONS),
    ),
    Kind(
        5, records.Change, "change", struct.Struct("<IIIIIQ"), _write_change,
        lambda head, fixed: [4 * fixed[4], _width(fixed[5], _wire(head))], _read_change, (0, 2),
    ),
    Kind(
        6, records.Delta, "delta", struct.Struct("<II"),
        lambda message: (0, (message.kept, message.whole), [message.difference]), None,
        lambda head, fixed, parts: records.Delta(head.run, head.round, fixed[0], fixed[1], bytes(parts[0])),
    ),
    Kind(
        7, records.Lack, "lack", struct.Struct("<I"), lambda message: (0, (message.client,), []),
        lambda head, fixed: [], lambda head, fixed, parts: records.Lack(head.run, head.round, fixed[0]),
    ),
    Kind(
        8, records.Secured, "broadcast for masked uploads", struct.Struct("<HI"),
        lambda message: (0, (message.members.size, len(message.broadcast)), [*_roster(message), message.broadcast]),
        lambda head, fixed: [4 * fixed[0], KEY * fixed[0], fixed[1]],
        lambda head, fixed, parts: records.Secured(head.run, head.round, *_read_roster(parts), bytes(parts[2])),
    ),
    Kind(
        9, records.Masked, "masked upload", struct.Struct("<IBIHH"),
        lambda message: (
            0, (message.client, message.width, message.numbers.size, *message.bundles.shape),
            [pack_bits(message.numbers, message.width), message.bundles.tobytes()],
        ),
        lambda head, fixed: [-(-fixed[2] * fixed[1] // 8), fixed[3] * fixed[4]], _read_masked,
    ),
    Kind(
        10, records.Survivors, "request for shares", struct.Struct("<HHH"), _write_survivors,
        lambda head, fixed: [4 * fixed[0], KEY * fixed[0], 32, -(-fixed[0] // 8), fixed[1] * fixed[2]], _read_survivors,
    ),
    Kind(
        11, records.Shares, "shares", struct.Struct("<II"),
        lambda message: (0, (message.client, len(message.data)), [message.data]), lambda head, fixed: [fixed[1]],
        lambda head, fixed, parts: records.Shares(head.run, head.round, fixed[0], bytes(parts[0])),
    ),
    Kind(
        12, records.Subtotal, "subtotal", struct.Struct("<IIIII"), _write_subtotal,
        lambda head, fixed: [4 * fixed[4], 8 * head.run.pool.size, 8 * head.run.pool.size, 4 * head.run.pool.size],
        _read_subtotal,
    ),
)  # fmt: skip
KINDS: dict[int, Kind[Any]] = {kind.number: kind for kind in ROWS}


def add_kind(kind: Kind[Message]) -> Kind[Message]:
    """Register a kind of message in this process, so that `encode` and `decode` take its record.

    Raises:
        FedKSeedError: its number is not one of 128 to 255, or another kind has its number or record.
    """
    if not OWN <= kind.number <= 255:
        raise FedKSeedError(f"a program's own kinds of messages have numbers {OWN} to 255, got {kind.number}")
    for other in KINDS.values():
        if other.number == kind.number or other.record is kind.record:
            raise FedKSeedError(
                f"kind {other.number} is {other.record.__name__}; {kind.record.__name__} with number {kind.number} "
                "needs a number and a record of its own"
            )
    KINDS[kind.number] = kind
    return kind


# --- any message --------------------------------------------------------------------------------


def encode(message: Record) -> bytes:
    """The bytes of a message; their length is the traffic that is counted.

    Raises:
        FedKSeedError: no known kind of message has this record, or a number has more bits than its field.
    """
    kind = next((kind for kind in KINDS.values() if type(message) is kind.record), None)
    if kind is None:
        known = ", ".join(kind.record.__name__ for kind in KINDS.values())
        raise FedKSeedError(f"{type(message).__name__} is no kind of message: add it by add_kind; known are {known}")
    flags, fixed, parts = kind.write(message)
    pool, base = message.run.pool, message.run.base
    about = MAGIC, VERSION, kind.number, pool.record.number, flags, message.round, pool.key, pool.size - 1, base
    try:
        return sealed(HEADER.pack(*about), pool.basis, kind.fixed.pack(*fixed), *parts)
    except struct.error as error:
        numbers = {f.name: v for f in fields(kind.record) if isinstance(v := getattr(message, f.name), int | float)}
        raise FedKSeedError(f"a number of a {kind.name} is beyond the bits that it travels in: {numbers}") from error


def sealed(*parts: bytes | memoryview) -> bytes:
    """A message's parts with their checksum after them."""
    check = 0
    for part in parts:
        check = crc32(part, check)
    return b"".join((*parts, TRAILER.pack(check)))


def kind_of(data: bytes) -> type[Any] | None:
    """The kind of record that a message claims to be; `decode` checks the rest."""
    kind = KINDS.get(data[5]) if len(data) > 5 else None
    return kind.record if kind else None


def header_size(data: bytes) -> int:
    """The bytes before the body: more where the family's directions come from a basis."""
    return HEADER.size + BASIS * numbered(data[6]).informed


def head_of(data: bytes) -> Head:
    """The run, round and flags of a message, whose header is whole and names a known family and a valid pool."""
    _, _, _, family, flags, round_, key, last, base = HEADER.unpack_from(data)
    size, name = header_size(data), numbered(family).name
    if len(data) < size + TRAILER.size:
        raise FedKSeedError(f"a message of {name} directions has at least {size + TRAILER.size} bytes, got {len(data)}")
    return Head(Run(Pool(key, last + 1, name, data[HEADER.size : size]), base), round_, flags)


def decode(data: bytes, *kinds: type[Message]) -> Message:
    """The record in `data`, which must be of one of the kinds.

    Raises:
        FedKSeedError: the bytes are cut short, too long, damaged, of another version or kind, or
            hold a value that is not allowed.
    """
    least = HEADER.size + TRAILER.size
    if len(data) < least:
        raise FedKSeedError(f"a message has at least {least} bytes, got {len(data)}; it was cut short")
    magic, version, number = HEADER.unpack_from(data)[:3]
    if magic != MAGIC:
        raise FedKSeedError(f"not a fedkseed message: it starts with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise FedKSeedError(f"a message of protocol version {version}, this program speaks {VERSION}; use one release")
    if crc32(memoryview(data)[: -TRAILER.size]) != TRAILER.unpack_from(data, len(data) - TRAILER.size)[0]:
        raise FedKSeedError("the message's checksum does not fit: it was damaged or cut short; send it again")
    kind = KINDS.get(number)
    if kind is None or kind.record not in kinds:
        got = f"kind {number}" if kind is None else kind.record.__name__
        raise FedKSeedError(f"expected a message of kind {' or '.join(k.__name__ for k in kinds)}, got {got}")
    head, body = head_of(data), memoryview(data)[header_size(data) : -TRAILER.size]
    return cast("Message", kind.read(head, *_split(kind, head, body)))


def _split(kind: Kind[Any], head: Head, body: memoryview) -> tuple[Sequence[Any], Parts]:
    """The numbers of a body and its arrays, whose bytes must add up to those that flags and numbers imply."""
    if head.flags not in kind.flags:
        allowed = " or ".join(map(str, kind.flags))
        raise FedKSeedError(f"this {kind.name} may have flags {allowed}, got {head.flags}")
    at = kind.fixed.size
    if len(body) < at:
        raise FedKSeedError(f"the body of this {kind.name} has at least {at} bytes, got {len(body)}")
    fixed = kind.fixed.unpack_from(body)
    sizes = [len(body) - at] if kind.sizes is None else kind.sizes(head, fixed)
    if len(body) != at + sum(sizes):
        raise FedKSeedError(f"this {kind.name}'s body must have {at + sum(sizes)} bytes, got {len(body)}")
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    return fixed, parts


# --- numbers ------------------------------------------------------------------------------------


def _wire(head: Head) -> str:
    return WIRES[(head.flags & 6) >> 1]


def _loss_bits(loss: float) -> int:
    """A loss as the bits of a float32, with one bit pattern for NaN."""
    return NAN if math.isnan(loss) else int(np.float32(loss).view(np.uint32))


def _loss(bits: int) -> float:
    loss = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isnan(loss) and bits != NAN:
        raise FedKSeedError(f"a loss that is no number travels as {NAN:08x}, got {bits:08x}")
    return loss


def _width(size: int, wire: str) -> int:
    """The bytes that `size` numbers take."""
    return 4 * size if wire == "exact" else packed_size(size)


def _numbers(part: memoryview, size: int, wire: str = "exact") -> NDArray[np.float32]:
    """Read `size` numbers.

    Exact ones are a view of the message where the machine is little-endian: these can be all weights of a model.
    """
    if wire == "exact":
        return np.frombuffer(part, "<f4", size).astype(np.float32, copy=False)
    if size > MAX_BROADCAST:  # a byte becomes a float32, and more on the way
        raise FedKSeedError(f"a message has at most {MAX_BROADCAST:,} compact numbers, this one announces {size:,}")
    return unpack(part, size)


def _words(part: memoryview) -> NDArray[np.uint32]:
    return np.frombuffer(part, "<u4").astype(np.uint32)


def _roster(message: records.Secured | records.Survivors) -> list[bytes | memoryview]:
    return [_bytes(message.members, "<u4"), message.keys.tobytes()]


def _read_roster(parts: Parts) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    return _words(parts[0]), _rows(parts[1], (-1, KEY))


def _rows(part: memoryview, shape: Sequence[int]) -> NDArray[np.uint8]:
    return np.frombuffer(part, np.uint8).reshape(shape)


def _floats(values: NDArray[np.float32], wire: str) -> memoryview | bytes:
    return _bytes(values, "<f4") if wire == "exact" else pack(values)


def _bytes(values: NDArray, dtype: str) -> memoryview:
    return np.ascontiguousarray(values, dtype).data.cast("B") if values.size else memoryview(b"")
