"""Local steps that say next to nothing of a single example, by noise that the client itself adds to each of them.

In a step, every example of the batch gives one row of L numbers, found by the example alone: its gradient along all K
directions, or its scalar gradients along the step's P directions, all at the same point. In place of the batch's mean
the step takes

    (Σ_i q_i + N) · grid / B        B: examples of a batch, the same in every step
    q_i = row i, cut to the Euclidean norm C, in whole numbers of the grid, to the nearest; zeros if it is not finite
    grid = C / (FINE √L)
    N: discrete Gaussian on each of the L numbers, σ = z s
    s = FINE √L + √L / 2 + 1        the most that one example changes the sum: its norm, and the rounding of each number

What the step does with it is post-processing. The 1 in s is for the rounding of floating-point numbers.

Sources: Abadi et al., 2016, Algorithm 1, https://arxiv.org/abs/1607.00133 (gradients); Bao et al., 2025, DP-AggZO,
https://www.usenix.org/conference/usenixsecurity25/presentation/bao-ergute (one example's estimates along many
directions are cut as one vector)
"""

import math
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..secure.noise import discrete_gaussian

FINE = 1 << 10  # norm of the longest row, in units of the grid, over √L: rounding adds 0.05 % to the noise


def sensitivity(length: int) -> int:
    """The largest Euclidean norm of one example's whole numbers, for a row of this many."""
    return math.ceil((FINE + 0.5) * math.sqrt(length)) + 1


@dataclass(frozen=True, slots=True)
class Private:
    """The noise of one client's local steps in one run.

    It follows from the secret, the round, the step and the sum: the same task again gives the same numbers, and other
    numbers have other noise.
    """

    multiplier: float  # z, standard deviation of the noise on a step's sum over the most that one example changes it
    norm: float  # C, largest Euclidean norm of an example's row; longer ones are cut to it
    secret: bytes = field(repr=False)  # of the client and the run

    def __post_init__(self) -> None:
        if not self.secret:
            raise FedKSeedError(
                "a client's noise needs a secret of its own, got none: over a network set secret_batches = true in the "
                "client's policy"
            )

    def grid(self, length: int) -> float:
        """The unit of the whole numbers of a row of this many."""
        return self.norm / (FINE * math.sqrt(length))

    def coded(self, rows: NDArray[np.float64]) -> NDArray[np.int64]:
        """Each row as whole numbers of the grid, shape (B, L); a row that is not finite becomes zeros."""
        largest = np.abs(rows).max(1, keepdims=True)
        sound = np.isfinite(largest)
        largest = np.where(sound & (largest > 0), largest, 1.0)
        unit = np.where(sound, rows, 0.0) / largest  # whose squares neither overflow nor vanish
        long = np.sqrt(np.square(unit).sum(1, keepdims=True))  # at least 1, but for zeros
        kept = unit * np.minimum(largest, self.norm / np.maximum(long, 1.0))
        return np.rint(kept / self.grid(rows.shape[1])).astype(np.int64)

    def mean(self, round_: int, step: int, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean of a step's rows with its noise, shape (L,), from rows of shape (B, L)."""
        length, total = rows.shape[1], self.coded(rows).sum(0)
        numbers = round_.to_bytes(8, "little") + step.to_bytes(8, "little") + total.astype("<i8").tobytes()
        key = sha256(b"fedkseed noise of examples 1\n" + self.secret + numbers).digest()
        noise = discrete_gaussian(math.ceil((self.multiplier * sensitivity(length)) ** 2), length, key)
        return (total + noise) * (self.grid(length) / len(rows))
