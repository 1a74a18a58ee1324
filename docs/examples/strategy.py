"""FedKSeed whose server takes the median over clients: one of five that lies moves c no further than others found.

All clients of a round take the same directions, so that their scalars can be compared. In a recipe:

    [training]
    algorithm = "docs/examples/strategy.py:median"
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkseed import Broadcast, LocalWork, Run, Settings, Upload
from fedkseed.randomness import draw_directions
from fedkseed.recipe.algorithms import Algorithm
from fedkseed.strategies.checks import NEVER, in_order, require_scalars
from fedkseed.wire.numbers import scalars


@dataclass(frozen=True, slots=True)
class State:
    round: int  # rounds done
    coefficients: np.ndarray  # (K,)


@dataclass(frozen=True, slots=True)
class Median:
    message, state, replies = Broadcast, State, (Upload,)  # the records that travel, the class of states
    weights, remembers, sized, reads = "coefficients", False, True, frozenset()  # see fedkseed.strategy.Strategy
    run: Run
    local: LocalWork

    @classmethod
    def make(cls, settings: Settings, **options: Any) -> "Median":
        return cls(settings.run, settings.local, **options)

    def work(self, differentiates: bool) -> LocalWork:
        return self.local

    def init(self) -> State:
        return State(0, np.zeros(self.run.pool.size))

    def broadcast(self, state: State, cohort) -> dict[int, Broadcast]:
        local, c = self.local, state.coefficients.astype(np.float32)
        lr = local.learning_rate(state.round)
        message = Broadcast(self.run, state.round, lr, local.eps, local.steps, local.clip, c, local.probes)
        return dict.fromkeys(cohort, message)

    def sync(self, message: Broadcast, weights) -> None:
        weights.load(message.coefficients)

    def train(self, message: Broadcast, client) -> Upload:
        found = self.local.zeroth_order(client, message.round, message.lr, self.drawn(message.round))
        return Upload(self.run, message.round, client.number, client.examples, found.loss, found.scalars)

    def aggregate(self, state: State, uploads, earlier=NEVER) -> State:
        ordered = in_order(uploads, self.run, state.round)
        for upload in ordered:
            require_scalars(upload, self.local.scalars, self.local.clip)
        rho = np.median([np.nan_to_num(upload.scalars) for upload in ordered], axis=0)  # (τ P,)
        c = state.coefficients.copy()
        np.subtract.at(c, self.drawn(state.round), self.local.learning_rate(state.round) / self.local.probes * rho)
        return State(state.round + 1, c)

    def drawn(self, round_: int) -> np.ndarray:
        """The directions of a round, the same for all clients."""
        return draw_directions(self.run.pool.key, round_, 0, self.local.scalars, self.run.pool.size, None)

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng) -> Upload:
        return Upload(self.run, round_, client, examples, 1.0, scalars(rng.normal(size=self.local.scalars)))


median = Algorithm(Median, local="two points", down="K coefficients", up="scalars", source="docs/extending.md")
