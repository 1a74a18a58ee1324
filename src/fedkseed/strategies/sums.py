"""Sums of uploads in integers: any order, grouping or sharding of a round's clients gives the same bits.

An upload becomes one integer q a direction, its gradient in units of GRID: q = Σ ρ / GRID over the client's draws of
the direction. As ρ travels in multiples of GRID, q is exact; other changes of a coefficient are rounded to the nearest.
A round's sum is Σ_i w_i q_i with whole weights w_i. With |q| and Σ w_i bounded as below, |Σ w q| < 2^62: no sum of
int64 overflows, nor does a sum of masked numbers modulo 2^64. docs/aggregation.md is the definition.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..wire.numbers import GRID

MOST = 1 << 38  # |q| of an upload: four times LARGEST along one direction
HEAVIEST = (1 << 24) - 1  # Σ w of a round


@dataclass(frozen=True, slots=True)
class Contribution:
    """One upload as integers, along the directions that it has something to say about.

    Args:
        weight: w, at least 1.
        directions: ascending, each once, shape (n,).
        values: q, the gradient along each direction in units of GRID.
        sizes: Σ |ρ| of each direction in units of GRID; 0 where no scalars were sent.
        counts: number of scalars of each direction.
    """

    client: int
    weight: int
    directions: NDArray[np.uint32]
    values: NDArray[np.int64]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of_scalars(
        cls, client: int, weight: int, drawn: NDArray[np.uint32], scalars: NDArray[np.float32], factor: float = 1.0
    ) -> Self:
        """The contribution of scalar gradients along directions in the order in which they were drawn.

        Args:
            factor: of a late upload; a product that is no whole number is rounded to the nearest, half to even.
        """
        found = scalars.astype(np.float64) / GRID
        directions, places = np.unique(drawn, return_inverse=True)
        sums = np.zeros((3, directions.size), np.int64)
        for row, numbers in zip(sums, (np.rint(found * factor), np.abs(found), np.ones(found.size)), strict=True):
            np.add.at(row, places, numbers.astype(np.int64))
        return cls(client, weight, directions.astype(np.uint32), *sums)

    @classmethod
    def of_change(cls, client: int, weight: int, change: NDArray[np.float32], unit: float, factor: float = 1.0) -> Self:
        """The contribution of a change of every coefficient, shape (K,).

        Args:
            unit: change of a coefficient for a gradient of GRID; the quotient is rounded to the nearest, half to even.
        """
        values = -change.astype(np.float64) / unit * factor
        if np.abs(values).max(initial=0) > MOST:
            raise _beyond(client)
        all_, none = np.arange(change.size, dtype=np.uint32), np.zeros(change.size, np.int64)
        return cls(client, weight, all_, np.rint(values).astype(np.int64), none, none)

    def scaled(self, factor: float) -> "Contribution":
        """The same with smaller numbers, rounded to the nearest, half to even."""
        values, sizes = (np.rint(numbers * factor).astype(np.int64) for numbers in (self.values, self.sizes))
        return Contribution(self.client, self.weight, self.directions, values, sizes, self.counts)

    def with_sizes_of(self, most: float) -> "Contribution":
        """The same with sizes that add up to at most `most`."""
        total = int(self.sizes.sum())
        if total <= most:
            return self
        sizes = np.rint(self.sizes * (most / total)).astype(np.int64)
        return Contribution(self.client, self.weight, self.directions, self.values, sizes, self.counts)

    def weighing(self, weight: int) -> "Contribution":
        """The same with another weight."""
        return Contribution(self.client, weight, self.directions, self.values, self.sizes, self.counts)


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ w q of a round or of a shard of its clients, and Σ w; sums can be added."""

    values: NDArray[np.int64]  # (K,)
    weight: int

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.values + other.values, self.weight + other.weight)

    def mean(self, unit: float) -> NDArray[np.float64]:
        """The mean gradient times `unit`, shape (K,); each number is rounded by IEEE-754 alone.

        Clients that nobody agrees with weigh 0, and where all do, nothing moves: one alone is tried so, too.
        """
        if self.weight == 0:
            return np.zeros(self.values.shape)
        return self.values.astype(np.float64) / self.weight * unit


def tallied(contributions: Iterable[Contribution], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Σ |ρ| in units of GRID and the number of scalars, of each of K = `size` directions."""
    sizes, counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for one in contributions:
        sizes[one.directions] += one.sizes
        counts[one.directions] += one.counts
    return sizes, counts


def summed(contributions: Iterable[Contribution], size: int) -> Sum:
    """The weighted sum of contributions, for K = `size` directions."""
    values, weight = np.zeros(size, np.int64), 0
    for one in contributions:
        values[one.directions] += one.weight * one.values
        weight += one.weight
    return Sum(values, weight)


def require_summable(contributions: Sequence[Contribution], times: int = 1) -> None:
    """Refuse numbers and weights whose sum int64 might not hold.

    Args:
        times: the most by which a weight is still multiplied.

    Raises:
        FedKSeedError: a client's numbers or the weights are beyond the bounds of this module.
    """
    for one in contributions:
        if max(np.abs(one.values).max(initial=0), one.sizes.max(initial=0)) > MOST:
            raise _beyond(one.client)
    total, most = sum(one.weight for one in contributions), HEAVIEST // times
    if total > most:
        raise FedKSeedError(
            f"the clients of this round stand for {total} examples, integers hold the sum of {most}: "
            "set [trust] most_examples, the largest weight of a client"
        )


def _beyond(client: int) -> FedKSeedError:
    return FedKSeedError(
        f"client {client} reports a gradient beyond {MOST * GRID:g} along one direction; set a smaller clip or lr"
    )
