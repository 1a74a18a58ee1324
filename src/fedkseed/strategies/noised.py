"""Any sum of clients' changes with noise that the server adds: what it sends, writes and reports is private.

Clients trust the server with their uploads. Against the server itself there are masks, where clients add the noise.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
from ..secure.grid import Grid
from ..strategy import Noise, Settings, Strategy
from .averaging import Averaging
from .checks import Arrivals
from .kseed import KSeed

BITS = 14  # of a client's number on the grid, which does not travel


def noised(strategy: Strategy[Any], noise: Noise) -> Strategy[Any]:
    """The noisy form of an algorithm of sums: another aggregator, and reports without losses."""
    server: Any = strategy.aggregator
    return replace(strategy, aggregator=NoisedAggregator(strategy.settings, server, noise), private=True)


@dataclass(slots=True)
class CodedSum:
    """The sum of a round's changes in whole numbers, so far and without noise."""

    state: Any
    arrivals: Arrivals
    size: int = 0  # numbers of a change: an upload shows it
    total: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))


@dataclass(frozen=True, slots=True)
class NoisedAggregator:
    """The sum of changes, each cut to a norm, all clients alike, and noise on it."""

    settings: Settings
    server: KSeed | Averaging  # tells what change of coefficients or weights an upload stands for, and makes the step
    noise: Noise

    @property
    def replies(self) -> tuple[type[Any], ...]:
        return self.server.replies

    def start(self, state: Any, sent: Mapping[int, Any], earlier_states: Any = None) -> CodedSum:
        if not self.noise.secret:
            raise FedKSeedError("the noise of a sum needs a secret, and this party has none: it is the server's")
        return CodedSum(state, Arrivals.of(self.settings.run, state, sent))

    def add_(self, accumulator: CodedSum, upload: Any) -> None:
        accumulator.arrivals.require(upload)
        change = self.server.change(accumulator.state, upload)
        accumulator.total = accumulator.total + self.grid(change.size).coded(change, upload.round, upload.client)
        accumulator.size = change.size
        accumulator.arrivals.note_(upload)

    def finish(self, accumulator: CodedSum) -> Any:
        """The state after the step with (Σ Δ_i + noise) / m, each change Δ_i of m clients cut to the norm."""
        from ..secure.noise import discrete_gaussian  # rounds without noise need no `cryptography`

        accumulator.arrivals.require_any()
        state, total, grid = accumulator.state, accumulator.total, self.grid(accumulator.size)
        # The noise follows from the sum, too: a round that is done again with other uploads must not have the same.
        made_of = b"fedkseed noise 1\n", self.noise.secret, state.round.to_bytes(8, "little"), total.tobytes()
        noise = discrete_gaussian(self.variance(grid), total.size, hashlib.sha256(b"".join(made_of)).digest())
        return self.server.stepped(state, -grid.change(total + noise, state.round) / len(accumulator.arrivals.came))

    def grid(self, size: int) -> Grid:
        """The whole numbers on which changes of a size are added up, with the norm to which they are cut."""
        return Grid(self.noise.norm, BITS, size, self.settings.run.pool.key)

    def variance(self, grid: Grid) -> int:
        """The variance σ² of the noise in each number of a sum."""
        return math.ceil((self.noise.multiplier * self.noise.scale * grid.sensitivity) ** 2)
