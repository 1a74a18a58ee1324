"""The grid on which masked numbers are added up: whole numbers of a fixed width, the same for all clients.

A change x of m' numbers (of c, or of a round's shared directions) becomes

    y = H (s ∘ x) / √m        s: signs from the pool's key and the round, H: Walsh–Hadamard, m: m' up to a power of two
    q = ⌊y / step + u⌋        u: uniform in [0, 1), of (key, round, client), so that q · step has the mean y
    step = REACH · norm / √m / (2^(bits − 1) − 1)

after cutting x to the Euclidean norm `norm`. H spreads a change evenly: y is about normal with at most norm / √m, and
REACH of that is cut in 6 of 100,000 numbers. The sum of whole numbers is turned back in integers, and so exact.

Source: Kairouz et al., 2021, Algorithm 1, https://arxiv.org/abs/2102.06387
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..directions.reference import transform
from ..errors import FedKSeedError
from ..randomness import Purpose, generator

REACH = 4.0  # standard deviations of y that the grid holds
NOISE_REACH = 7.0  # those of noise that a masked number holds: a sum is beyond them once in 4e11


@dataclass(frozen=True, slots=True)
class Grid:
    """The fixed grid of a run."""

    norm: float  # largest Euclidean norm of a client's change; larger ones are cut to it
    bits: int  # of one client's number, sign included
    size: int  # m', the numbers of a change
    key: int  # of the pool, for the signs

    @property
    def padded(self) -> int:
        """m, the numbers that are masked."""
        return 1 << (self.size - 1).bit_length()

    @property
    def most(self) -> int:
        """The largest |q| of one client."""
        return (1 << self.bits - 1) - 1

    @property
    def step(self) -> float:
        return REACH * self.norm / math.sqrt(self.padded) / self.most

    @property
    def sensitivity(self) -> float:
        """The largest Euclidean norm of a client's whole numbers: that of its change, and a rounding of each."""
        return self.norm / self.step + math.sqrt(self.padded)

    def width(self, clients: int, variance: float = 0.0) -> int:
        """Bits of a masked number, which holds the sum of any of these clients' numbers.

        Args:
            variance: of the noise that all of them together add to each number.
        """
        return math.ceil(2 * (clients * self.most + NOISE_REACH * math.sqrt(variance))).bit_length()

    def signs(self, round_: int) -> NDArray[np.int64]:
        return 1 - 2 * generator(self.key, Purpose.SIGNS, round_).integers(0, 2, self.padded)

    def coded(self, change: NDArray[np.floating], round_: int, client: int) -> NDArray[np.int64]:
        """A change as whole numbers, shape (m,), at most `most` in size."""
        x = np.zeros(self.padded)
        x[: self.size] = change
        length = math.sqrt(math.fsum(np.square(x).tolist()))
        if not math.isfinite(length):
            raise FedKSeedError("a change with numbers that are not finite can't be added up; use a smaller lr")
        if length > self.norm:
            x *= self.norm / length
        y = transform(x * self.signs(round_)) / math.sqrt(self.padded) / self.step
        u = generator(self.key, Purpose.ROUNDING, round_, client).random(self.padded)
        return np.clip(np.floor(y + u).astype(np.int64), -self.most, self.most)

    def change(self, total: NDArray[np.int64], round_: int) -> NDArray[np.float64]:
        """The sum of changes that a sum of whole numbers stands for, shape (m',)."""
        back = transform(total) * self.signs(round_)
        return back[: self.size].astype(np.float64) * (self.step / math.sqrt(self.padded))

    def require_plausible(self, total: NDArray[np.int64], clients: int, variance: float = 0.0) -> None:
        """Refuse a sum that no uploads on this grid have: a wrong share leaves a mask on it.

        Args:
            variance: of the noise in each number of the sum.

        Raises:
            FedKSeedError: it is longer than the sum of as many changes of the largest norm, each rounded.
        """
        length = math.sqrt(math.fsum(np.square(total.astype(np.float64)).tolist()))
        noise = math.sqrt(variance * (self.padded + 10 * math.sqrt(self.padded)))  # χ² with 7 standard deviations more
        most = clients * self.sensitivity + noise
        if length > most:
            raise FedKSeedError(
                f"the sum of {clients} masked uploads has the norm {length:.4g}, and {most:.4g} is the most that they "
                "can have: a client has sent a wrong share or numbers beyond the grid; the round is not counted; "
                "`fedkseed rollback` to it begins it again with other masks"
            )
