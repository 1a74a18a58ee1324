"""Keys, seeds and masks of a round, and which clients share them.

Every secret of a round follows from a client's private key and the round's context, the digest of what all its clients
were sent: a context that differs in one client, one key or one bit of the broadcast gives other masks.
"""

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..randomness import Purpose, generator
from ..wire.records import KEY

SEED = 16  # bytes of the seed of a mask
TAG = 16  # bytes by which a sealed bundle is longer
# Where each of 100 clients fails in one round of 20, one of them lacks a third of its 21 holders in 5 rounds of 1,000.
USUAL = 20
MOST_HOLDERS = 255  # of shares in a field of 256 elements
ONCE = bytes(12)  # the nonce of a key that seals one bundle


@dataclass(frozen=True, slots=True)
class MaskRoster:
    """The clients of a round with masks, and who shares a mask with whom; a place is an index into `members`."""

    run: bytes  # its name: two runs never share a mask
    round: int
    members: NDArray[np.uint32]  # numbers of the clients, ascending, shape (n,)
    keys: NDArray[np.uint8]  # their X25519 public keys, shape (n, 32)
    broadcast: bytes  # SHA-256 of the round's broadcast
    neighbours: int | None = None  # with which each shares a mask, an even number; None: all, USUAL of more

    @property
    def context(self) -> bytes:
        """SHA-256 of everything that the clients of a round must agree on."""
        numbers = struct.pack("<III", self.round, self.members.size, self.neighbours or 0)
        parts = b"fedkseed masks 1\n", hashlib.sha256(self.run).digest(), numbers, self.members.astype("<u4").tobytes()
        return hashlib.sha256(b"".join((*parts, self.keys.tobytes(), self.broadcast))).digest()

    @property
    def enough(self) -> int:
        """The least number of clients whose sum is made: more than two thirds."""
        return 2 * self.members.size // 3 + 1

    @property
    def threshold(self) -> int:
        """The number of shares that give a secret: more than two thirds of its holders.

        A server that says to some holders that a client is there, and to others that it is not, gets both kinds of
        shares of it only if a third of the holders help.
        """
        return 2 * (self._reach + 1) // 3 + 1

    @property
    def _reach(self) -> int:
        return min(self.members.size - 1, self.neighbours or USUAL)

    def key(self, place: int) -> bytes:
        return self.keys[place].tobytes()

    def others(self, place: int) -> list[int]:
        """Places of the clients with which the one at a place shares a mask, ascending.

        Where not all do, they stand in a circle, in an order that the context gives, and share with both sides alike.
        """
        n = self.members.size
        if self._reach == n - 1:
            return [other for other in range(n) if other != place]
        circle = generator(int.from_bytes(self.context[:8], "little"), Purpose.NEIGHBOURS).permutation(n)
        at, half = int(np.flatnonzero(circle == place)[0]), self._reach // 2
        return sorted(int(circle[(at + far) % n]) for far in (*range(-half, 0), *range(1, half + 1)))

    def holders(self, place: int) -> list[int]:
        """Places of the clients that hold shares of the one at a place: itself, and those that share a mask with it.

        They stand in a circle that begins at the place, so that each client is among the last of as many.
        """
        return sorted([*self.others(place), place], key=lambda holder: (holder - place) % self.members.size)

    def sealed_for(self, place: int) -> list[int]:
        """Places of the holders that are sent their shares; the shares of the others follow from secrets of pairs."""
        return self.holders(place)[self.threshold - 1 :]

    def require_readable(self, there: Collection[int], secrets: Iterable[int]) -> None:
        """Refuse a set of survivors of which no honest server can make a sum.

        Clients that give shares refuse it, too. Else a server could say to each of 20 neighbours of a client that the
        19 others are gone, of 100 clients a few, and get the seeds of all masks of that client.

        Args:
            there: places of the clients whose uploads have come.
            secrets: places of those of them whose holders are counted.

        Raises:
            FedKSeedError: too few clients are there, or too few holders of a secret.
        """
        if len(there) < self.enough:
            raise FedKSeedError(
                f"round {self.round}: {len(there)} of {self.members.size} masked uploads have come, a sum is made from "
                f"{self.enough} on; nothing of them can be read"
            )
        for place in secrets:
            if (holders := len({*there}.intersection(self.holders(place)))) < self.threshold:
                raise FedKSeedError(
                    f"round {self.round}: {holders} holders of client {self.members[place]}'s shares are there, "
                    f"{self.threshold} are needed; nothing of the round can be read"
                )

    def require(self) -> None:
        """Refuse a round in which masks protect nobody, or whose shares have too many holders."""
        if self._reach + 1 > MOST_HOLDERS:
            raise FedKSeedError(
                f"shares have at most {MOST_HOLDERS} holders, a round of {self.members.size} clients would have "
                f"{self._reach + 1}: set [secure] neighbours, 30 or more"
            )
        if self._reach < 2 or (self._reach % 2 and self._reach != self.members.size - 1):
            raise FedKSeedError(f"[secure] neighbours is an even number from 2 on, got {self.neighbours}")


def derived(secret: bytes, context: bytes, *label: object, size: int = KEY) -> bytes:
    """`size` bytes that follow from a secret, the round's context and a label: HKDF with SHA-256."""
    info = b"fedkseed " + " ".join(map(str, label)).encode()
    return HKDF(hashes.SHA256(), size, context, info).derive(secret)


def mask(seed: bytes, count: int, width: int) -> NDArray[np.uint32]:
    """The mask of a seed: `count` numbers below 2^width, from ChaCha20's stream under a key that follows from the seed.

    Number j is the stream's bytes 4 j to 4 j + 3, as a little-endian number, modulo 2^width.
    """
    stream = Cipher(ChaCha20(hashlib.sha256(b"fedkseed mask\n" + seed).digest(), bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(4 * count)), "<u4").astype(np.uint32) & np.uint32((1 << width) - 1)


def sealed(key: bytes, data: bytes) -> bytes:
    """Data that only holders of the key can read or make; a key seals once."""
    return ChaCha20Poly1305(key).encrypt(ONCE, data, None)


def opened(key: bytes, data: bytes) -> bytes:
    """The data in a bundle that was sealed with the same key, and not changed since."""
    try:
        return ChaCha20Poly1305(key).decrypt(ONCE, data, None)
    except InvalidTag as error:
        raise FedKSeedError(
            "a bundle of shares can't be opened: the client that made it was sent another round, or it was changed"
        ) from error


def share(points: Mapping[int, bytes], x: int) -> bytes:
    """The value at x of the polynomials through these points, byte by byte in the field of 256 elements.

    In this field x + x = 0: a polynomial in x + x' has at 0 the value that the same one in x has at x'. So the library,
    which finds values at 0 alone, finds all.

    Args:
        points: x -> values, as many points as coefficients.

    Raises:
        FedKSeedError: values have different lengths.
    """
    try:
        return bytes(shamir.combine([bytearray(values) + bytes([at ^ x]) for at, values in points.items()]))
    except ValueError as error:
        raise FedKSeedError(f"shares can't be put together: {error}") from error


def signed(place: int, other: int) -> int:
    """+1 or −1: of a mask that two clients share, one adds it and the other takes it off."""
    return 1 if place < other else -1
