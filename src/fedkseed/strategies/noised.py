"""FedKSeed with noise that the server adds to each round's sum: what it sends, writes and reports is private.

Clients trust the server with their uploads. Against the server itself there is `Secure`, where clients add the noise.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ..errors import FedKSeedError
from ..local.client import Client
from ..local.work import LocalWork
from ..strategy import COEFFICIENTS, OPTIONAL, Noise, Settings
from ..wire.records import Broadcast, Change, Run, Upload
from .checks import NEVER, in_order, require_change, require_scalars, require_size
from .kseed import KSeed, State

if TYPE_CHECKING:  # a server aggregates without PyTorch; rounds without noise need no `cryptography`
    from ..secure.grid import Grid
    from ..weights.base import Pooled

BITS = 16  # of a client's number on the grid: nothing of it travels


@dataclass(frozen=True, slots=True)
class Noised:
    """FedKSeed with a client's change of c cut to a norm, all clients alike, and noise on the sum.

    Args:
        inner: the algorithm; it makes broadcasts, local steps and the server's step.
        grid: the whole numbers on which changes are added up, with the norm to which they are cut.
        noise: its size, and the secret from which the noise of each round follows.
    """

    message: ClassVar[type[Broadcast]] = Broadcast
    state: ClassVar[type[State]] = State
    weights: ClassVar[str] = COEFFICIENTS
    remembers: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = OPTIONAL

    inner: KSeed
    grid: "Grid"
    noise: Noise

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> Self:
        if settings.noise is None:
            raise FedKSeedError("[privacy] noise is missing: a run fills it in, from epsilon and delta")
        try:
            from ..secure.grid import Grid
        except ModuleNotFoundError as error:
            raise FedKSeedError(f"[privacy] needs the package {error.name}: pip install 'fedkseed[privacy]'") from error
        inner, pool = KSeed.make(settings, **options), settings.run.pool
        if inner.importance:
            raise FedKSeedError(
                "[privacy] has no noise for the sizes of single clients' scalars, by which FedKSeed-Pro draws "
                "directions and which everybody could read in its broadcasts: use fedkseed"
            )
        return cls(inner, Grid(settings.noise.norm, BITS, pool.size, pool.key), settings.noise)

    @property
    def run(self) -> Run:
        return self.inner.run

    @property
    def sized(self) -> bool:
        return self.inner.sized

    @property
    def replies(self) -> tuple[type[Upload] | type[Change], ...]:
        return self.inner.replies

    def work(self, differentiates: bool) -> LocalWork:
        return self.inner.work(differentiates)

    def init(self) -> State:
        return self.inner.init()

    def broadcast(self, state: State, cohort: Sequence[int]) -> dict[int, Broadcast]:
        return self.inner.broadcast(state, cohort)

    def sync(self, message: Broadcast, weights: "Pooled") -> None:
        self.inner.sync(message, weights)

    def train(self, message: Broadcast, client: "Client[Pooled]") -> Upload | Change:
        return self.inner.train(message, client)

    def aggregate(
        self, state: State, uploads: Sequence[Upload | Change], earlier: Mapping[int, State] = NEVER
    ) -> State:
        """The state after c ← c + (Σ Δ_i + noise) / m, with each change Δ_i cut to the grid's norm.

        Raises:
            FedKSeedError: there is no upload, or one is of another run or round, came twice, has another size, or
                reports a scalar above the clip. The state is unchanged.
        """
        from ..secure.noise import discrete_gaussian

        ordered, inner = in_order(uploads, self.run, state.round, 0), self.inner
        (message,) = inner.broadcast(state, [0]).values()
        total = np.zeros(self.grid.padded, np.int64)
        for upload in ordered:
            if isinstance(upload, Change):
                require_size(upload, self.run.pool.size)
                require_change(upload, inner.most(state.round))
            else:
                clip = math.inf if inner.wire == "sign" else inner.local.clip
                require_scalars(upload, inner.local.scalars, clip, inner.wire)
            total += self.grid.coded(inner.along_all(message, upload), state.round, upload.client)
        if variance := self.variance:
            # Of the sum, too: a round that is done again with other uploads must not have the same noise.
            made_of = b"fedkseed noise 1\n", self.noise.secret, state.round.to_bytes(8, "little"), total.tobytes()
            total += discrete_gaussian(variance, total.size, hashlib.sha256(b"".join(made_of)).digest())
        return inner.stepped(state, -self.grid.change(total, state.round) / len(ordered))

    @property
    def variance(self) -> int:
        """The variance σ² of the noise in each number of a sum."""
        return math.ceil((self.noise.multiplier * self.noise.scale * self.grid.sensitivity) ** 2)

    def example(
        self, round_: int, client: int, examples: int, differentiates: bool, rng: np.random.Generator
    ) -> Upload | Change:
        return self.inner.example(round_, client, examples, differentiates, rng)
