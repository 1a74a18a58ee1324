"""FedKSeed and FedKSeed-Pro: the model is K numbers.

Qin et al., 2024, Algorithm 1, https://arxiv.org/abs/2312.06353
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ..local.zeroth_order import zeroth_order_steps
from ..messages import Broadcast, Run, Upload
from ..randomness import draw_directions
from ..settings import require_settings, scheduled
from ..strategy import Client
from .common import in_order, require_scalars, require_sendable

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights import Pooled, Weights


@dataclass(frozen=True, slots=True)
class State:
    """What the server knows; its size does not depend on the model's."""

    round: int  # rounds done
    coefficients: NDArray[np.float64]  # (K,), c = −η A of the paper
    magnitudes: NDArray[np.float64]  # (K,), Σ |ρ| of a direction
    counts: NDArray[np.int64]  # (K,), how often a direction was drawn


@dataclass(frozen=True, slots=True)
class KSeed:
    """Scalar gradients along a fixed pool of directions.

    Args:
        run: the pool and the base model.
        rounds: T, the length of the learning-rate schedule.
        steps: τ, local steps of a client in a round.
        lr: η at the start.
        eps: ε, the scale of a perturbation.
        schedule: `constant`, `linear` (to zero after T rounds) or `cosine` (likewise). c holds
            steps and not gradients, so any schedule is right.
        probes: P, directions a step: their estimates on one batch are averaged.
        importance: FedKSeed-Pro: draw directions by the mean size of their scalar gradients.
        clip: largest |ρ|, a safeguard against a broken loss; infinite for none, as in the paper.
    """

    message: ClassVar[type[Broadcast]] = Broadcast
    state: ClassVar[type[State]] = State

    run: Run
    rounds: int
    steps: int = 200
    lr: float = 3e-7
    eps: float = 5e-4
    schedule: str = "constant"
    probes: int = 1
    importance: bool = False
    clip: float = math.inf

    def __post_init__(self) -> None:
        require_settings(self.schedule, rounds=self.rounds, steps=self.steps, probes=self.probes)

    @property
    def reply(self) -> type[Upload]:
        return Upload

    @property
    def asked(self) -> int:
        return self.steps * self.probes

    def init(self) -> State:
        size = self.run.pool.size
        return State(0, np.zeros(size), np.zeros(size), np.zeros(size, np.int64))

    def broadcast(self, state: State, cohort: Sequence[int]) -> dict[int, Broadcast]:
        message = Broadcast(
            run=self.run,
            round=state.round,
            lr=self.learning_rate(state.round),
            eps=self.eps,
            steps=self.steps,
            probes=self.probes,
            clip=float(np.float32(self.clip)),
            coefficients=state.coefficients.astype(np.float32),
            probabilities=importance(state).astype(np.float32) if self.importance else None,
        )
        return dict.fromkeys(cohort, message)

    def sync(self, message: Broadcast, weights: "Weights") -> None:
        cast("Pooled", weights).load(message.coefficients)

    def train(self, message: Broadcast, client: Client) -> Upload:
        pool, pairs = self.run.pool, message.steps * message.probes
        found = zeroth_order_steps(
            client.weights,
            client.loss,
            client.batches(message.round),
            draw_directions(pool.key, message.round, client.number, pairs, pool.size, message.probabilities),
            probes=message.probes,
            lr=message.lr,
            eps=message.eps,
            clip=message.clip,
            on_step=client.on_step,
        )
        return Upload(
            run=self.run,
            round=message.round,
            client=client.number,
            examples=client.examples,
            loss=found.loss,
            directions=found.directions,
            scalars=found.scalars,
        )

    def aggregate(self, state: State, uploads: Sequence[Upload]) -> State:
        """c_j ← c_j − η Σ_i (n_i / n) Σ ρ / P, n_i the examples of client i, n those of all this round's clients.

        Clients are added in the order of their numbers, so that float sums have one value.

        Raises:
            FedKSeedError: there is no upload, or one is of another round or run, came twice, or
                reports a scalar above the clip, or the sum overflows; the state is unchanged.
        """
        ordered = in_order(uploads, self.run, state.round)
        for upload in ordered:
            require_scalars(upload, self.asked, self.clip)
        lr, total = self.learning_rate(state.round) / self.probes, sum(upload.examples for upload in ordered)
        coefficients, magnitudes, counts = state.coefficients.copy(), state.magnitudes.copy(), state.counts.copy()
        for upload in ordered:
            scalars = upload.scalars.astype(np.float64)
            np.subtract.at(coefficients, upload.directions, lr * (upload.examples / total) * scalars)
            np.add.at(magnitudes, upload.directions, np.abs(scalars))
            np.add.at(counts, upload.directions, 1)
        require_sendable(state.round, coefficients)
        return State(state.round + 1, coefficients, magnitudes, counts)

    def learning_rate(self, round_: int) -> float:
        """η of a round, from 0."""
        return scheduled(self.lr, self.schedule, round_, self.rounds)


def importance(state: State) -> NDArray[np.float64]:
    """Probabilities p of the directions, shape (K,): softmax of the min-max normalised mean |ρ|.

    A direction that was never drawn counts as the average of those that were: nothing is known
    of it, and any extreme would make it drawn too often or never again. (The official code starts
    each history with a zero instead, which makes often-drawn directions look important.)

    Source: Qin et al., 2024, Section 4.3
    """
    drawn = state.counts > 0
    if not drawn.any():
        return np.full(state.counts.size, 1 / state.counts.size)
    psi = np.divide(state.magnitudes, state.counts, out=np.zeros_like(state.magnitudes), where=drawn)
    psi[~drawn] = psi[drawn].mean()
    spread = psi.max() - psi.min()
    weights = np.exp((psi - psi.min()) / spread) if spread > 0 else np.ones_like(psi)
    return weights / weights.sum()
