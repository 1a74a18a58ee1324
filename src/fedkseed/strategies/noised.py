"""Any sum of clients' changes with noise that the server adds: what it sends, writes and reports is private.

Clients trust the server with their uploads. Against the server itself there is `Secure`, where clients add the noise.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..strategy import Noise
from ..wire.records import Run
from .averaging import Averaging
from .checks import NEVER, in_order
from .kseed import KSeed

if TYPE_CHECKING:  # rounds without noise need no `cryptography`
    from ..secure.grid import Grid

BITS = 14  # of a client's number on the grid: nothing of it travels


@dataclass(frozen=True, slots=True)
class Noised:
    """An algorithm with each client's change cut to a norm, all clients alike, and noise on their sum.

    Args:
        inner: the algorithm; it makes broadcasts, local steps and the server's step. The change is that of K
            coefficients, or of d weights.
        noise: its size, and the secret from which the noise of each round follows.
    """

    remembers: ClassVar[bool] = False

    inner: KSeed | Averaging
    noise: Noise

    @property
    def message(self) -> type[Any]:
        return self.inner.message

    @property
    def state(self) -> type[Any]:
        return self.inner.state

    @property
    def weights(self) -> str:
        return self.inner.weights

    @property
    def reads(self) -> frozenset[str]:
        return self.inner.reads

    @property
    def run(self) -> Run:
        return self.inner.run

    @property
    def sized(self) -> bool:
        return self.inner.sized

    @property
    def replies(self) -> tuple[type[Any], ...]:
        return self.inner.replies

    def work(self, differentiates: bool) -> LocalWork:
        return self.inner.work(differentiates)

    def init(self) -> Any:
        return self.inner.init()

    def broadcast(self, state: Any, cohort: Sequence[int]) -> Mapping[int, Any]:
        return self.inner.broadcast(state, cohort)

    def sync(self, message: Any, weights: Any) -> None:
        self.inner.sync(message, weights)

    def train(self, message: Any, client: Client[Any]) -> Any:
        return self.inner.train(message, client)

    def aggregate(self, state: Any, uploads: Sequence[Any], earlier: Mapping[int, Any] = NEVER) -> Any:
        """The state after the step with (Σ Δ_i + noise) / m, each change Δ_i of m clients cut to the norm.

        Raises:
            FedKSeedError: there is no upload, or one is of another run or round, came twice, has another size, or
                reports more than the clip; or this party lacks the secret. The state is unchanged.
        """
        from ..secure.noise import discrete_gaussian

        if not self.noise.secret:
            raise FedKSeedError("the noise of a sum needs a secret, and this party has none: it is the server's")
        ordered = in_order(uploads, self.run, state.round)
        grid = self.grid(self.inner.checked_change(state, ordered[0]).size)
        total = np.zeros(grid.padded, np.int64)
        for upload in ordered:
            total += grid.coded(self.inner.checked_change(state, upload), state.round, upload.client)
        # Of the sum, too: a round that is done again with other uploads must not have the same noise.
        made_of = b"fedkseed noise 1\n", self.noise.secret, state.round.to_bytes(8, "little"), total.tobytes()
        total += discrete_gaussian(self.variance(grid), total.size, hashlib.sha256(b"".join(made_of)).digest())
        return self.inner.stepped(state, -grid.change(total, state.round) / len(ordered))

    def grid(self, size: int) -> "Grid":
        """The whole numbers on which changes of a size are added up, with the norm to which they are cut."""
        from ..secure.grid import Grid

        return Grid(self.noise.norm, BITS, size, self.run.pool.key)

    def variance(self, grid: "Grid") -> int:
        """The variance σ² of the noise in each number of a sum."""
        return math.ceil((self.noise.multiplier * self.noise.scale * grid.sensitivity) ** 2)

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator) -> Any:
        return self.inner.example(round_, client, examples, differentiates, rng)
