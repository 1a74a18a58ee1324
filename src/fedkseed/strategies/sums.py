"""Sums of uploads in integers: any order, grouping or sharding of a round's clients gives the same bits.

An upload becomes one integer q a direction, its gradient in units of GRID: q = Σ ρ / GRID over the client's draws of
the direction. As ρ travels in multiples of GRID, q is exact; other changes of a coefficient are rounded to the nearest.
A round's sum is Σ_i w_i q_i with whole weights w_i. With |q| and Σ w_i bounded as below, |Σ w q| < 2^62: no sum of
int64 overflows, nor does a sum of masked numbers modulo 2^64. docs/aggregation.md is the definition.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DivergedError, FedKSeedError
from ..wire.numbers import GRID

MOST = 1 << 38  # |q| of an upload: four times LARGEST along one direction
HEAVIEST = (1 << 24) - 1  # Σ w of a round
COARSE, FINE = 2.0**-14, 2.0**-52  # units of the two integers that a weight is split into, see `WeightSum`
SOME = 1 << 18  # weights that are split at a time: temporary arrays stay within the caches
MANY = 1 << 20  # weights from which on a kernel adds them, 8 to 12 times faster: below, loading Numba takes longer


@dataclass(frozen=True, slots=True)
class Contribution:
    """One upload as integers, along the directions that it has something to say about.

    Raises:
        FedKSeedError: a number is beyond the bound of this module.
    """

    client: int
    weight: int  # w, at least 1
    directions: NDArray[np.uint32]  # (n,), ascending, each once
    values: NDArray[np.int64]  # (n,), q: the gradient along each direction in units of GRID
    sizes: NDArray[np.int64]  # (n,), Σ |ρ| of each direction in units of GRID; 0 where no scalars were sent
    counts: NDArray[np.int64]  # (n,), number of scalars of each direction

    def __post_init__(self) -> None:
        if max(np.abs(self.values).max(initial=0), self.sizes.max(initial=0)) > MOST:
            raise _beyond(self.client)

    @classmethod
    def of_scalars(
        cls, client: int, weight: int, drawn: NDArray[np.uint32], scalars: NDArray[np.float32], factor: float = 1.0
    ) -> Self:
        """The contribution of scalar gradients along directions in the order in which they were drawn.

        Args:
            factor: of a late upload; a product that is no whole number is rounded to the nearest, half to even.
        """
        rho = scalars.astype(np.float64) / GRID
        directions, places = np.unique(drawn, return_inverse=True)
        sums = np.zeros((3, directions.size), np.int64)
        for row, numbers in zip(sums, (np.rint(rho * factor), np.abs(rho), np.ones(rho.size)), strict=True):
            np.add.at(row, places, numbers.astype(np.int64))
        return cls(client, weight, directions.astype(np.uint32), *sums)

    @classmethod
    def of_change(cls, client: int, weight: int, change: NDArray[np.float32], unit: float, factor: float = 1.0) -> Self:
        """The contribution of a change of every coefficient, shape (K,).

        Args:
            unit: change of a coefficient for a gradient of GRID; the quotient is rounded to the nearest, half to even.
        """
        values = -change.astype(np.float64) / unit * factor
        if np.abs(values).max(initial=0) > MOST:  # before it becomes an integer, which could not hold it
            raise _beyond(client)
        directions, zeros = np.arange(change.size, dtype=np.uint32), np.zeros(change.size, np.int64)
        return cls(client, weight, directions, np.rint(values).astype(np.int64), zeros, zeros)


@dataclass(slots=True)
class Sum:
    """The sum of a round's contributions, or of those of a shard of its clients, along K directions."""

    values: NDArray[np.int64]  # (K,), Σ w q
    weight: int  # Σ w
    sizes: NDArray[np.int64]  # (K,), Σ |ρ| in units of GRID
    counts: NDArray[np.int64]  # (K,), how often each direction was drawn

    @classmethod
    def of(cls, contributions: Iterable[Contribution], size: int) -> "Sum":
        """The sum of contributions, for K = `size` directions."""
        total = cls(np.zeros(size, np.int64), 0, np.zeros(size, np.int64), np.zeros(size, np.int64))
        for contribution in contributions:
            total.add_(contribution)
        return total

    def add_(self, contribution: Contribution) -> None:
        """Add a contribution."""
        self.values[contribution.directions] += contribution.weight * contribution.values
        self.weight += contribution.weight
        self.sizes[contribution.directions] += contribution.sizes
        self.counts[contribution.directions] += contribution.counts

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(
            self.values + other.values, self.weight + other.weight, self.sizes + other.sizes, self.counts + other.counts
        )

    def mean(self, unit: float) -> NDArray[np.float64]:
        """The mean gradient times `unit`, shape (K,); each number is rounded by IEEE-754 alone.

        Clients that nobody agrees with weigh 0, and where all do, nothing moves.
        """
        if self.weight == 0:
            return np.zeros(self.values.shape)
        return self.values.astype(np.float64) / self.weight * unit


@dataclass(slots=True)
class WeightSum:
    """The weighted sum of clients' weights, 16 bytes a weight for any number of clients.

    A weight becomes h COARSE + l FINE with whole h and l: exactly from 2^-28 on, else rounded to a multiple of FINE.
    Σ w h and Σ w l stay below 2^62, as all sums of this module.
    """

    coarse: NDArray[np.int64]  # (d,), Σ w h
    fine: NDArray[np.int64]  # (d,), Σ w l
    weight: int = 0  # Σ w

    @classmethod
    def zeros(cls, size: int) -> Self:
        """The sum of nothing; the system gives its memory when the first weights are added."""
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int64))

    def add_(self, client: int, weight: int, values: NDArray[np.float32]) -> None:
        """Add a client's weights.

        Raises:
            DivergedError: one is beyond the bound of this module, MOST COARSE = 2^24; the sum is as it was.
        """
        if (largest := float(max(values.max(initial=0), -values.min(initial=0)))) > MOST * COARSE:
            raise DivergedError(
                f"client {client} has trained a weight to {largest:g}, at most {MOST * COARSE:g} is averaged: its "
                "steps diverge; take a smaller lr"
            )
        self.weight += weight
        if values.size >= MANY:
            from ..directions.numba_cpu.averages import add_weights  # it loads Numba

            values = np.require(values, requirements=["C", "A"])
            add_weights(self.coarse, self.fine, values, weight, 1 / COARSE, COARSE / FINE)
            return
        for at in range(0, values.size, SOME):
            scaled = values[at : at + SOME].astype(np.float64) / COARSE
            whole = np.rint(scaled)
            self.coarse[at : at + SOME] += weight * whole.astype(np.int64)
            self.fine[at : at + SOME] += weight * np.rint((scaled - whole) * (COARSE / FINE)).astype(np.int64)

    def mean(self) -> NDArray[np.float32]:
        """The mean, shape (d,): sum and quotient in float64, then one rounding to float32."""
        mean = np.empty(self.coarse.size, np.float32)
        for at in range(0, mean.size, SOME):
            fine = self.coarse[at : at + SOME] * (COARSE / FINE) + self.fine[at : at + SOME]
            mean[at : at + SOME] = fine / (self.weight / FINE)
        return mean


def _beyond(client: int) -> FedKSeedError:
    return FedKSeedError(
        f"client {client} reports a gradient beyond {MOST * GRID:g} in one direction; lower clip or lr"
    )
