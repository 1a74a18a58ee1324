"""The local steps of a round so far, in a file: a client that was killed, or has given up, goes on with them.

After a sync to the broadcast, scalars say where two-point steps have led, and coefficients and moments where steps by
derivatives have; the batches follow from the round. So the upload is that of a client that nothing happened to.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from safetensors.numpy import load, save

from ..errors import FedKSeedError
from ..files import read_whole, sweep, write_atomically

MOST = 1 << 28  # bytes: three vectors of a million coefficients, and the scalars of a million steps, are a tenth of it
SEAL = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """The file of one client's steps in one round at a time.

    Args:
        of: a digest of what the steps depend on, so that none of another round, or of other rows, is taken up.
    """

    path: Path
    of: bytes

    def within(self, parts: Iterable[bytes]) -> Self:
        """The same file, for steps that depend on further parts, too."""
        digest = hashlib.sha256(self.of)
        for part in parts:
            digest.update(hashlib.sha256(part).digest())
        return replace(self, of=digest.digest())

    def read(self) -> Mapping[str, NDArray[Any]]:
        """The arrays that `keep` has written after the last step; empty if there are none of this round, whole."""
        sweep(self.path.parent, self.path.name)
        with suppress(FedKSeedError):  # there is no file yet
            data = read_whole(self.path, MOST, f"{self.path}")
            if data[:SEAL] == self._seal(data[SEAL:]):
                return load(data[SEAL:])
        return {}

    def keep(self, **arrays: NDArray[Any]) -> None:
        """Write where the steps have led; a full disk stops no step."""
        data = save(arrays)
        with suppress(FedKSeedError):
            write_atomically(self.path, self._seal(data) + data, lasting=False)  # no step waits for a disk

    def _seal(self, data: bytes) -> bytes:
        return hashlib.sha256(self.of + data).digest()
