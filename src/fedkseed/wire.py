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

from .directions import FAMILIES, Pool
from .errors import FedKSeedError
from .messages import Broadcast, Run, Upload

VERSION = 1
MAGIC = b"FKSd"
HEADER = struct.Struct("<4sBBBBIQI32s")
BROADCAST = struct.Struct("<ddfII")  # lr, eps, clip, steps, probes
UPLOAD = struct.Struct("<IIfI")  # client, examples, loss, pairs
TRAILER = struct.Struct("<I")
Message = TypeVar("Message", Broadcast, Upload)
KINDS = {1: Broadcast, 2: Upload}
WITH_PROBABILITIES = 1


def encode(message: Broadcast | Upload) -> bytes:
    """The bytes of a message; their length is the traffic that is counted."""
    pool = message.run.pool
    if isinstance(message, Broadcast):
        kind, flags = 1, 0 if message.probabilities is None else WITH_PROBABILITIES
        body = BROADCAST.pack(message.lr, message.eps, message.clip, message.steps, message.probes) + _bytes(
            message.coefficients, "<f4"
        )
        if message.probabilities is not None:
            body += _bytes(message.probabilities, "<f4")
    else:
        kind, flags = 2, 0
        body = UPLOAD.pack(message.client, message.examples, float(np.float32(message.loss)), message.scalars.size)
        body += _bytes(message.directions, _index(pool)) + _bytes(message.scalars, "<f4")
    family = FAMILIES.index(pool.family)
    header = HEADER.pack(
        MAGIC, VERSION, kind, family, flags, message.round, pool.key, pool.size - 1, message.run.base
    )  # fmt: skip
    return header + body + TRAILER.pack(zlib.crc32(header + body))


def decode(data: bytes, kind: type[Message]) -> Message:
    """The record in `data`, which must be of one kind.

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
    if zlib.crc32(data[: -TRAILER.size]) != TRAILER.unpack_from(data, len(data) - TRAILER.size)[0]:
        raise FedKSeedError(
            "the message's checksum does not fit: it was damaged or cut short on the way; send it again"
        )
    if KINDS.get(number) is not kind:
        got = KINDS[number].__name__ if number in KINDS else f"kind {number}"
        raise FedKSeedError(f"expected a message of kind {kind.__name__}, got {got}")
    if family >= len(FAMILIES):
        raise FedKSeedError(f"the message names direction family number {family}; known are 0 to {len(FAMILIES) - 1}")
    run = Run(Pool(key, last + 1, FAMILIES[family]), base)
    body = memoryview(data)[HEADER.size : -TRAILER.size]
    read = _broadcast if kind is Broadcast else _upload
    return cast("Message", read(run, round_, flags, body))


def _broadcast(run: Run, round_: int, flags: int, body: memoryview) -> Broadcast:
    if flags not in (0, WITH_PROBABILITIES):
        raise FedKSeedError(f"a broadcast has flags 0 or {WITH_PROBABILITIES}, got {flags}")
    vectors = 1 + flags
    _require(body, BROADCAST.size + 4 * run.pool.size * vectors, "broadcast")
    lr, eps, clip, steps, probes = BROADCAST.unpack_from(body)
    values = np.frombuffer(body, "<f4", offset=BROADCAST.size).astype(np.float32).reshape(vectors, run.pool.size)
    return Broadcast(run, round_, lr, eps, steps, clip, values[0], probes, values[1] if flags else None)


def _upload(run: Run, round_: int, flags: int, body: memoryview) -> Upload:
    if flags:
        raise FedKSeedError(f"an upload has flags 0, got {flags}")
    if len(body) < UPLOAD.size:
        raise FedKSeedError(f"an upload's body has at least {UPLOAD.size} bytes, got {len(body)}")
    client, examples, loss, pairs = UPLOAD.unpack_from(body)
    index = np.dtype(_index(run.pool))
    _require(body, UPLOAD.size + pairs * (index.itemsize + 4), "upload")
    directions = np.frombuffer(body, index, count=pairs, offset=UPLOAD.size).astype(np.uint32)
    scalars = np.frombuffer(body, "<f4", offset=UPLOAD.size + pairs * index.itemsize).astype(np.float32)
    return Upload(run, round_, client, examples, loss, directions, scalars)


def _require(body: memoryview, expected: int, name: str) -> None:
    if len(body) != expected:
        raise FedKSeedError(f"this {name}'s body must have {expected} bytes, got {len(body)}")


def _index(pool: Pool) -> str:
    """Indices travel as 16 bits where the pool allows: 400 bytes less at 200 steps."""
    return "<u2" if pool.size <= 1 << 16 else "<u4"


def _bytes(values: NDArray, dtype: str) -> bytes:
    return values.astype(dtype).tobytes()
