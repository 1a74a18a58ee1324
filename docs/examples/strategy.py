"""FedKSeed whose server takes the median over clients: one of five that lies moves c no further than others found.

All clients of a round take the same directions, so that their scalars can be compared. In a recipe:

    [training]
    algorithm = "strategy.py:median"
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkseed import Broadcast, Settings, Strategy, Upload
from fedkseed.randomness import draw_directions
from fedkseed.recipe.algorithms import Algorithm
from fedkseed.strategies.checks import Arrivals, KeptUploads, require_scalars
from fedkseed.wire.numbers import scalars


@dataclass(frozen=True, slots=True)
class State:
    round: int  # rounds done
    coefficients: np.ndarray  # (K,)


@dataclass(frozen=True, slots=True)
class Median:
    """The server's part: the first state, the message of a state, and the fold over uploads."""

    state, replies = State, (Upload,)  # the class of states, the records that clients send
    weights, remembers, reads = "coefficients", False, frozenset()  # see fedkseed.strategy.ServerPart
    settings: Settings

    @classmethod
    def make(cls, settings: Settings) -> Strategy:
        server: Any = cls(settings)
        client: Any = MedianClient(settings)
        return Strategy(settings, server, server, client)

    def init(self) -> State:
        return State(0, np.zeros(self.settings.run.pool.size))

    def broadcast(self, state: State) -> Broadcast:
        local, c = self.settings.local, state.coefficients.astype(np.float32)
        lr = local.learning_rate(state.round)
        return Broadcast(self.settings.run, state.round, lr, local.eps, local.steps, local.clip, c, local.probes)

    def start(self, state: State, sent, earlier_states=None) -> KeptUploads:
        return KeptUploads(state, Arrivals.of(self.settings.run, state, sent))

    def add_(self, accumulator: KeptUploads, upload: Upload) -> None:
        accumulator.arrivals.require(upload)
        require_scalars(upload, self.settings.local.scalars, self.settings.local.clip)
        accumulator.keep_(upload)

    def finish(self, accumulator: KeptUploads) -> State:
        uploads, state, local = accumulator.in_order(), accumulator.state, self.settings.local
        rho = np.median([np.nan_to_num(upload.scalars) for upload in uploads], axis=0)  # (τ P,)
        c = state.coefficients.copy()
        np.subtract.at(c, drawn(self.settings, state.round), local.learning_rate(state.round) / local.probes * rho)
        return State(state.round + 1, c)


@dataclass(frozen=True, slots=True)
class MedianClient:
    """A client: what it does with the broadcast."""

    message = Broadcast  # the record that comes down
    settings: Settings

    def sync(self, message: Broadcast, weights) -> None:
        weights.load(message.coefficients)

    def train(self, message: Broadcast, client) -> Upload:
        settings = self.settings
        directions = drawn(settings, message.round)
        steps = settings.local.zeroth_order(client, message.round, message.lr, directions)
        return Upload(settings.run, message.round, client.number, client.examples, steps.loss, steps.scalars)

    def example(self, round_: int, client: int, examples: int, differentiates: bool, rng) -> Upload:
        random = scalars(rng.normal(size=self.settings.local.scalars))
        return Upload(self.settings.run, round_, client, examples, 1.0, random)


def drawn(settings: Settings, round_: int) -> np.ndarray:
    """The directions of a round, the same for all clients."""
    pool = settings.run.pool
    return draw_directions(pool.key, round_, 0, settings.local.scalars, pool.size, None)


median = Algorithm(Median, local="two points", down="K coefficients", up="scalars", source="docs/extending.md")
