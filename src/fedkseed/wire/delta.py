"""A broadcast as the difference to an earlier one that the client has kept: fewer bytes for the same message.

Most coefficients are what they were a round ago. The bodies of the two messages are subtracted byte by byte, modulo
256, and deflated: 4,312 bytes become 1,563 where 4 clients have drawn 200 of 4,096 directions each, 2,089 where 10
have (`python benchmarks/bytes.py`). The whole message is sent where it is not longer.
"""

import zlib

import numpy as np

from ..errors import FedKSeedError
from .codec import TRAILER, decode, encode, head_of, header_size, kind_of, sealed
from .records import Delta, Lack

FAMILY, ROUND = 6, slice(8, 12)  # their places in a header


def shorten(whole: bytes, kept: bytes) -> bytes:
    """A `Delta` that makes `whole` from `kept`, if one is possible and has fewer bytes; else `whole`."""
    if (len(whole), whole[: ROUND.start], _run(whole)) != (len(kept), kept[: ROUND.start], _run(kept)):
        return whole  # they differ in more than their rounds and bodies
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_RLE)  # the smallest of zlib's strategies here
    difference = squeeze.compress((_body(whole) - _body(kept)).tobytes()) + squeeze.flush()
    head = head_of(whole)
    delta = encode(Delta(head.run, head.round, _check(kept), _check(whole), difference))
    return delta if len(delta) < len(whole) else whole


def restore(data: bytes, kept: bytes | None) -> bytes | None:
    """The message of a server that sent it whole or as a difference; None if the client lacks the earlier message.

    Raises:
        FedKSeedError: the difference is broken, or it does not restore the message that the server meant.
    """
    if kind_of(data) is not Delta:
        return data
    delta = decode(data, Delta)
    if kept is None or delta.kept != _check(kept):
        return None
    if (data[FAMILY], _run(data)) != (kept[FAMILY], _run(kept)):
        raise FedKSeedError("a delta is of another family, pool, basis or base than the message to which it refers")
    size, inflate = _body(kept).size, zlib.decompressobj(-15)
    try:
        difference = inflate.decompress(delta.difference, size + 1)  # a broken delta can't fill the memory
    except zlib.error as error:
        raise FedKSeedError(f"a delta's difference can't be inflated ({error}); ask for the whole message") from error
    if len(difference) != size or not inflate.eof or inflate.unused_data:
        raise FedKSeedError(f"a delta's difference must have the {size} bytes of the message kept, and no more")
    header = bytearray(kept[: header_size(kept)])
    header[ROUND] = data[ROUND]
    whole = sealed(bytes(header), (_body(kept) + np.frombuffer(difference, np.uint8)).tobytes())
    if _check(whole) != delta.whole:
        raise FedKSeedError("a delta does not restore the message that the server meant: the checksum differs")
    return whole


def lack(data: bytes, client: int) -> bytes:
    """The reply of a client that has not kept the message to which a difference refers."""
    delta = decode(data, Delta)
    return encode(Lack(delta.run, delta.round, client))


def _run(data: bytes) -> bytes:
    """The part of a header that names pool and base model."""
    return data[ROUND.stop : header_size(data)]


def _body(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)[header_size(data) : -TRAILER.size]


def _check(data: bytes) -> int:
    return TRAILER.unpack(data[-TRAILER.size :])[0]
