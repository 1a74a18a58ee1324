"""Conversion of records to bytes and back. docs/wire.md is the specification.

    header   56 bytes: magic, version, kind, family, flags, round, pool key, pool size − 1, digest of w_0
             88 where a basis has the directions: the SHA-256 of the basis follows
    body     numbers of the record, then its arrays, little-endian
    trailer  CRC-32 of all that precedes

A decoder uses nothing before the length, the checksum and every field fit; it returns a whole
record or raises. Below, the functions that write and read a kind of message stand side by side.
"""

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..directions import Pool
from ..directions.families import numbered
from ..errors import FedKSeedError
from .int8 import pack, packed_size, unpack
from .numbers import MAX_SCALARS, NAN, WIRES, pack_bits, pack_scalars, packed_scalars, unpack_bits, unpack_scalars
from .records import (
    KEY,
    MAX_BROADCAST,
    Broadcast,
    Change,
    Delta,
    History,
    Lack,
    Masked,
    Run,
    Secured,
    Shares,
    Subtotal,
    Survivors,
    Upload,
    Values,
)  # fmt: skip

VERSION = 2  # 2: scalar gradients are multiples of numbers.GRID
MAGIC = b"FKSd"
HEADER = struct.Struct("<4sBBBBIQI32s")
BASIS = 32  # bytes of a basis' digest after the header
TRAILER = struct.Struct("<I")
OWN = 128  # kinds from here on are those of a user's program
WIRE = {"exact": 0, "compact": 2, "sign": 4}  # flags of messages whose numbers travel in several ways


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

WITH_PROBABILITIES = 1  # flag of a broadcast


def _write_broadcast(message: Broadcast) -> Written:
    vectors = [message.coefficients] if message.probabilities is None else [message.coefficients, message.probabilities]
    flags = WIRE[message.wire] | WITH_PROBABILITIES * (len(vectors) - 1)
    fixed = message.lr, message.eps, message.clip, message.steps, message.probes
    return flags, fixed, [_floats(values, message.wire) for values in vectors]


def _broadcast_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    return [_width(head.run.pool.size, _wire(head))] * (1 + (head.flags & WITH_PROBABILITIES))


def _read_broadcast(head: Head, fixed: Sequence[Any], parts: Parts) -> Broadcast:
    lr, eps, clip, steps, probes = fixed
    wire = _wire(head)
    c, *rest = [_numbers(part, head.run.pool.size, wire) for part in parts]
    return Broadcast(head.run, head.round, lr, eps, steps, clip, c, probes, rest[0] if rest else None, wire)


BROADCAST = Kind(
    1, Broadcast, "broadcast", struct.Struct("<ddfII"), _write_broadcast, _broadcast_sizes, _read_broadcast,
    flags=(0, 1, 2, 3, 4, 5),
)  # fmt: skip


WITH_SKIPPED = 8  # flag of signs: a second row of bits marks the probes without a sign


def _write_upload(message: Upload) -> Written:
    flags = WIRE[message.wire] | WITH_SKIPPED * (message.wire == "sign" and message.skipped > 0)
    fixed = message.client, message.examples, _loss_bits(message.loss), message.scalars.size
    return flags, fixed, [pack_scalars(message.scalars, message.wire)]


def _upload_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    *_, count = fixed
    if count > MAX_SCALARS:  # a bit of a sign becomes a float32, and more on the way
        raise FedKSeedError(f"an upload has at most {MAX_SCALARS:,} scalar gradients, this one announces {count:,}")
    return [packed_scalars(count, _wire(head), bool(head.flags & WITH_SKIPPED))]


def _read_upload(head: Head, fixed: Sequence[Any], parts: Parts) -> Upload:
    client, examples, loss, count = fixed
    wire = _wire(head)
    scalars = unpack_scalars(parts[0], count, wire, bool(head.flags & WITH_SKIPPED))
    return Upload(head.run, head.round, client, examples, _loss(loss), scalars, wire)


UPLOAD = Kind(
    2, Upload, "upload", struct.Struct("<IIII"), _write_upload, _upload_sizes, _read_upload,
    flags=(0, WIRE["compact"], WIRE["sign"], WIRE["sign"] | WITH_SKIPPED),
)  # fmt: skip


def _write_values(message: Values) -> Written:
    return 0, (message.lr, message.values.size), [_bytes(message.values, "<f4")]


def _values_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    *_, size = fixed
    return [4 * size]


def _read_values(head: Head, fixed: Sequence[Any], parts: Parts) -> Values:
    lr, size = fixed
    return Values(head.run, head.round, lr, _numbers(parts[0], size))


VALUES = Kind(3, Values, "broadcast of weights", struct.Struct("<dQ"), _write_values, _values_sizes, _read_values)


WITH_DIRECTIONS = 1  # flag of a history


def _write_history(message: History) -> Written:
    flags = WITH_DIRECTIONS if message.directions.size else 0
    fixed = message.lr, message.since, message.counts.shape[1], message.coefficients.size
    counts, directions = _bytes(message.counts, "<u4"), _bytes(message.directions, "<u4")
    return flags, fixed, [counts, directions, _bytes(message.coefficients, "<f4")]


def _history_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    _, since, tensors, size = fixed
    return [4 * max(0, head.round - since) * tensors, 4 * size * (head.flags & WITH_DIRECTIONS), 4 * size]


def _read_history(head: Head, fixed: Sequence[Any], parts: Parts) -> History:
    lr, since, tensors, size = fixed
    if head.flags and not size:
        raise FedKSeedError("a history that names directions has some, got none")
    counts, directions = _words(parts[0]).reshape(max(0, head.round - since), tensors), _words(parts[1])
    return History(head.run, head.round, lr, since, counts, directions, _numbers(parts[2], size))


HISTORY = Kind(
    4, History, "history", struct.Struct("<dIIQ"), _write_history, _history_sizes, _read_history,
    flags=(0, WITH_DIRECTIONS),
)  # fmt: skip


def _write_change(message: Change) -> Written:
    sizes = message.counts.size, message.values.size
    fixed = message.client, message.examples, _loss_bits(message.loss), message.skipped, *sizes
    return WIRE[message.wire], fixed, [_bytes(message.counts, "<u4"), _floats(message.values, message.wire)]


def _change_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    *_, tensors, size = fixed
    wire = _wire(head)
    if wire != "exact" and size > MAX_BROADCAST:  # a byte becomes a float32, and more on the way; weights are exact
        raise FedKSeedError(f"a change has at most {MAX_BROADCAST:,} compact numbers, this one announces {size:,}")
    return [4 * tensors, _width(size, wire)]


def _read_change(head: Head, fixed: Sequence[Any], parts: Parts) -> Change:
    client, examples, loss, skipped, _, size = fixed
    counts, wire = _words(parts[0]), _wire(head)
    values = _numbers(parts[1], size, wire)
    return Change(head.run, head.round, client, examples, _loss(loss), skipped, values, counts, wire)


CHANGE = Kind(
    5, Change, "change", struct.Struct("<IIIIIQ"), _write_change, _change_sizes, _read_change,
    flags=(0, WIRE["compact"]),
)  # fmt: skip


def _write_delta(message: Delta) -> Written:
    return 0, (message.kept, message.whole), [message.difference]


def _read_delta(head: Head, fixed: Sequence[Any], parts: Parts) -> Delta:
    kept, whole = fixed
    return Delta(head.run, head.round, kept, whole, bytes(parts[0]))


DELTA = Kind(6, Delta, "delta", struct.Struct("<II"), _write_delta, None, _read_delta)


def _write_lack(message: Lack) -> Written:
    return 0, (message.client,), []


def _read_lack(head: Head, fixed: Sequence[Any], parts: Parts) -> Lack:
    (client,) = fixed
    return Lack(head.run, head.round, client)


LACK = Kind(7, Lack, "lack", struct.Struct("<I"), _write_lack, lambda head, fixed: [], _read_lack)


def _write_secured(message: Secured) -> Written:
    return 0, (message.members.size, len(message.broadcast)), [*_roster(message), message.broadcast]


def _secured_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    members, broadcast = fixed
    return [4 * members, KEY * members, broadcast]


def _read_secured(head: Head, fixed: Sequence[Any], parts: Parts) -> Secured:
    return Secured(head.run, head.round, *_read_roster(parts), bytes(parts[2]))


SECURED = Kind(8, Secured, "broadcast for masked uploads", struct.Struct("<HI"), _write_secured, _secured_sizes,
    _read_secured)  # fmt: skip


def _write_masked(message: Masked) -> Written:
    fixed = message.client, message.width, message.numbers.size, *message.bundles.shape
    return 0, fixed, [pack_bits(message.numbers, message.width), message.bundles.tobytes()]


def _masked_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    _, width, count, holders, size = fixed
    if count > MAX_BROADCAST:
        raise FedKSeedError(f"a masked upload has at most {MAX_BROADCAST:,} numbers, this one announces {count:,}")
    return [-(-count * width // 8), holders * size]


def _read_masked(head: Head, fixed: Sequence[Any], parts: Parts) -> Masked:
    client, width, count, *shape = fixed
    if not 2 <= width <= 32:
        raise FedKSeedError(f"masked numbers have 2 to 32 bits, got {width}")
    return Masked(head.run, head.round, client, width, unpack_bits(parts[0], count, width), _rows(parts[1], shape))


MASKED = Kind(9, Masked, "masked upload", struct.Struct("<IBIHH"), _write_masked, _masked_sizes, _read_masked)


def _write_survivors(message: Survivors) -> Written:
    there = np.packbits(message.there, bitorder="little").tobytes()
    fixed = message.members.size, *message.bundles.shape
    return 0, fixed, [*_roster(message), message.broadcast, there, message.bundles.tobytes()]


def _survivors_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    members, bundles, size = fixed
    return [4 * members, KEY * members, 32, -(-members // 8), bundles * size]


def _read_survivors(head: Head, fixed: Sequence[Any], parts: Parts) -> Survivors:
    members, *shape = fixed
    bits = np.unpackbits(np.frombuffer(parts[3], np.uint8), bitorder="little").astype(bool)
    if bits[members:].any():
        raise FedKSeedError("a message says of clients beyond those of its round that they are there")
    rows = _rows(parts[4], shape)
    return Survivors(head.run, head.round, *_read_roster(parts), bytes(parts[2]), bits[:members], rows)


SURVIVORS = Kind(10, Survivors, "request for shares", struct.Struct("<HHH"), _write_survivors, _survivors_sizes,
    _read_survivors)  # fmt: skip


def _write_shares(message: Shares) -> Written:
    return 0, (message.client, len(message.data)), [message.data]


def _shares_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    _, size = fixed
    return [size]


def _read_shares(head: Head, fixed: Sequence[Any], parts: Parts) -> Shares:
    client, _ = fixed
    return Shares(head.run, head.round, client, bytes(parts[0]))


SHARES = Kind(11, Shares, "shares", struct.Struct("<II"), _write_shares, _shares_sizes, _read_shares)


def _write_subtotal(message: Subtotal) -> Written:
    fixed = message.client, message.weight, _loss_bits(message.loss), message.skipped, message.clients.size
    numbers = _bytes(message.values, "<i8"), _bytes(message.sizes, "<i8"), _bytes(message.counts, "<u4")
    return 0, fixed, [_bytes(message.clients, "<u4"), *numbers]


def _subtotal_sizes(head: Head, fixed: Sequence[Any]) -> Sequence[int]:
    *_, clients = fixed
    size = head.run.pool.size
    return [4 * clients, 8 * size, 8 * size, 4 * size]


def _read_subtotal(head: Head, fixed: Sequence[Any], parts: Parts) -> Subtotal:
    client, weight, loss, skipped, _ = fixed
    values, sizes = (np.frombuffer(part, "<i8").astype(np.int64) for part in parts[1:3])
    clients, counts = _words(parts[0]), _words(parts[3])
    return Subtotal(head.run, head.round, client, clients, weight, _loss(loss), skipped, values, sizes, counts)


SUBTOTAL = Kind(12, Subtotal, "subtotal", struct.Struct("<IIIII"), _write_subtotal, _subtotal_sizes, _read_subtotal)


KINDS: dict[int, Kind[Any]] = {
    kind.number: kind
    for kind in (BROADCAST, UPLOAD, VALUES, HISTORY, CHANGE, DELTA, LACK, SECURED, MASKED, SURVIVORS, SHARES, SUBTOTAL)
}


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
        FedKSeedError: no known kind of message has this record.
    """
    kind = next((kind for kind in KINDS.values() if type(message) is kind.record), None)
    if kind is None:
        known = ", ".join(kind.record.__name__ for kind in KINDS.values())
        raise FedKSeedError(f"{type(message).__name__} is no kind of message: add it by add_kind; known are {known}")
    flags, fixed, parts = kind.write(message)
    pool = message.run.pool
    header = HEADER.pack(
        MAGIC, VERSION, kind.number, pool.record.number, flags, message.round, pool.key, pool.size - 1, message.run.base
    )  # fmt: skip
    return sealed(header, pool.basis, kind.fixed.pack(*fixed), *parts)


def sealed(*parts: bytes | memoryview) -> bytes:
    """A message's parts with their checksum after them."""
    check = 0
    for part in parts:
        check = zlib.crc32(part, check)
    return b"".join((*parts, TRAILER.pack(check)))


def kind_of(data: bytes) -> type[Any] | None:
    """The kind of record that a message claims to be; `decode` checks the rest."""
    kind = KINDS.get(data[5]) if len(data) > 5 else None
    return kind.record if kind else None


def header_size(data: bytes) -> int:
    """The bytes before the body: more where the family's directions come from a basis.

    Raises:
        FedKSeedError: the header names no known family.
    """
    return HEADER.size + BASIS * numbered(data[6]).informed


def head_of(data: bytes) -> Head:
    """The run, round and flags of a message.

    Raises:
        FedKSeedError: the header is cut short, or names no known family or no valid pool.
    """
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
    if len(data) < HEADER.size + TRAILER.size:
        raise FedKSeedError(
            f"a message has at least {HEADER.size + TRAILER.size} bytes, got {len(data)}; it was cut short"
        )
    magic, version, number = HEADER.unpack_from(data)[:3]
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
    return unpack(part, size)


def _words(part: memoryview) -> NDArray[np.uint32]:
    return np.frombuffer(part, "<u4").astype(np.uint32)


def _roster(message: Secured | Survivors) -> list[bytes | memoryview]:
    return [_bytes(message.members, "<u4"), message.keys.tobytes()]


def _read_roster(parts: Parts) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    return _words(parts[0]), np.frombuffer(parts[1], np.uint8).reshape(-1, KEY)


def _rows(part: memoryview, shape: Sequence[int]) -> NDArray[np.uint8]:
    return np.frombuffer(part, np.uint8).reshape(shape)


def _floats(values: NDArray[np.float32], wire: str) -> memoryview | bytes:
    return _bytes(values, "<f4") if wire == "exact" else pack(values)


def _bytes(values: NDArray, dtype: str) -> memoryview:
    return np.ascontiguousarray(values, dtype).data.cast("B") if values.size else memoryview(b"")
