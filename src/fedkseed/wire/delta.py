"""A broadcast as the difference to one that the client has kept: fewer bytes, and the same bytes in the end.

Most coefficients are what they were a round ago. The bodies of the two messages are subtracted byte by byte, modulo
256, and deflated: 4,312 bytes become 1,563 where 4 clients have drawn 200 of 4,096 directions each, 2,089 where 10
have (`python benchmarks/bytes.py`). The whole is sent where it has no more bytes.
"""

import zlib

import numpy as np

from ..errors import FedKSeedError
from .codec import HEADER, TRAILER, decode, encode, head_of, kind_of, sealed
from .records import Delta, Lack

FAMILY, ROUND, RUN = 6, slice(8, 12), slice(12, HEADER.size)  # where a header has them


def shorten(whole: bytes, kept: bytes) -> bytes:
    """A message, or the `Delta` that makes it from the one kept, if there is one and it has fewer bytes."""
    if not _alike(whole, kept):
        return whole
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_RLE)  # the smallest of zlib's strategies here
    difference = squeeze.compress((_body(whole) - _body(kept)).tobytes()) + squeeze.flush()
    head = head_of(whole)
    delta = encode(Delta(head.run, head.round, _check(kept), _check(whole), difference))
    return delta if len(delta) < len(whole) else whole


def restore(data: bytes, kept: bytes | None) -> bytes | None:
    """The message that a server has sent, whole or as a difference; None if the client has not kept what it needs.

    Raises:
        FedKSeedError: the difference is broken, or what comes of it is not what the server meant.
    """
    if kind_of(data) is not Delta:
        return data
    delta = decode(data, Delta)
    if kept is None or delta.kept != _check(kept) or (data[FAMILY], data[RUN]) != (kept[FAMILY], kept[RUN]):
        return None
    size, inflate = len(kept) - HEADER.size - TRAILER.size, zlib.decompressobj(-15)
    try:
        difference = inflate.decompress(delta.difference, size + 1)  # never more memory than this
    except zlib.error as error:
        raise FedKSeedError(f"a delta's difference can't be inflated ({error}); ask for the whole message") from error
    if len(difference) != size or not inflate.eof or inflate.unused_data:
        raise FedKSeedError(
            f"a delta's difference must have the {size} bytes of the message kept, and nothing after it"
        )
    header = bytearray(kept[: HEADER.size])
    header[ROUND] = data[ROUND]
    whole = sealed(bytes(header), (_body(kept) + np.frombuffer(difference, np.uint8)).tobytes())
    if _check(whole) != delta.whole:
        raise FedKSeedError("what comes of a delta is not what the server meant: its checksum differs")
    return whole


def lack(data: bytes, client: int) -> bytes:
    """What a client answers to a difference to something that it has not kept."""
    delta = decode(data, Delta)
    return encode(Lack(delta.run, delta.round, client))


def _alike(whole: bytes, kept: bytes) -> bool:
    """Do two messages differ in their rounds and bodies only?"""
    return (len(whole), whole[: ROUND.start], whole[RUN]) == (len(kept), kept[: ROUND.start], kept[RUN])


def _body(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)[HEADER.size : -TRAILER.size]


def _check(data: bytes) -> int:
    return TRAILER.unpack(data[-TRAILER.size :])[0]
