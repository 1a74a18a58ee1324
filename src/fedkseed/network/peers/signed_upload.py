"""The element that peers share: an upload with what it was trained from, signed by the key of its client.

    entry    "FKSp", version, 0, step u32, base (32 bytes), the upload (docs/wire.md), signature (64)

Its name is the SHA-256 of what is signed. There are many good signatures of one statement, and anyone can make a second
one of the first; so the signature is not in the name.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from ...errors import FedKSeedError
from ..protocol.envelope import UNSIGNED

STATEMENT = b"fedkseed, version 2: a peer adds an upload to the set of a run\n"
MAGIC, VERSION = b"FKSp", 1
LAYOUT = struct.Struct("<4sBBI32s")
DIGEST = 32  # bytes


@dataclass(frozen=True)
class SignedUpload:
    """An entry of the set of a run."""

    step: int  # the round that was open when it was done, by its client's clock, and in which it counts
    base: bytes  # SHA-256 of the broadcast from which its client trained
    upload: bytes  # an encoded `Upload` or `Change`, which names the round in which its client began
    signature: bytes = UNSIGNED

    def statement(self, run: bytes) -> bytes:
        """The bytes that are signed.

        Args:
            run: digest of the run, 32 bytes, see `MergeRule`.
        """
        return STATEMENT + run + struct.pack("<I", self.step) + self.base + hashlib.sha256(self.upload).digest()

    def name(self, run: bytes) -> bytes:
        """The digest by which peers know it."""
        return hashlib.sha256(self.statement(run)).digest()

    @cached_property
    def encoded(self) -> bytes:
        return LAYOUT.pack(MAGIC, VERSION, 0, self.step, self.base) + self.upload + self.signature

    @classmethod
    def decode(cls, data: bytes) -> "SignedUpload":
        """The entry encoded in `data`; the upload in it is not looked at.

        Raises:
            FedKSeedError: the bytes are of something else, or cut short.
        """
        if len(data) <= LAYOUT.size + len(UNSIGNED):
            raise FedKSeedError(f"a peer's entry has more than {LAYOUT.size + len(UNSIGNED)} bytes, got {len(data)}")
        magic, version, zero, step, base = LAYOUT.unpack_from(data)
        if (magic, version, zero) != (MAGIC, VERSION, 0):
            raise FedKSeedError(f"no peer's entry of version {VERSION}: it begins with {data[:6]!r}; use one release")
        end = len(data) - len(UNSIGNED)
        return cls(step, base, bytes(data[LAYOUT.size : end]), bytes(data[end:]))


def cut(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]


def framed(entries: list[bytes]) -> bytes:
    """Encoded entries one after the other, each after its length (u32)."""
    return b"".join(struct.pack("<I", len(data)) + data for data in entries)


def unframed(data: bytes, most: int) -> list[bytes]:
    """The encoded entries in the body of a request or an answer.

    Args:
        most: the number of entries that it may have.

    Raises:
        FedKSeedError: it is cut short, or has more.
    """
    entries, at = list[bytes](), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data) or len(entries) == most:
            raise FedKSeedError(f"a body has up to {most} whole entries, this one is cut short or has more")
        entries.append(data[at - size : at])
    return entries
