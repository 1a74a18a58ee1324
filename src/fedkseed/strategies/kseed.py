"""FedKSeed and FedKSeed-Pro: the model is K numbers.

Qin et al., 2024, Algorithm 1, https://arxiv.org/abs/2312.06353
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError
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
        max_staleness: how many rounds ago a client may have begun; 0: all of a round begin with it.
        staleness_power: an upload that is s rounds old counts (1 + s)^−power of a fresh one.
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
    max_staleness: int = 0
    staleness_power: float = 0.5

    def __post_init__(self) -> None:
        require_settings(self.schedule, rounds=self.rounds, steps=self.steps, probes=self.probes)
        for name in ("max_staleness", "staleness_power"):
            if not (value := getattr(self, name)) >= 0:
                raise FedKSeedError(f"{name} must be at least 0, got {value}")

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
        """c_j ← c_j − Σ_i η_i (n_i / n) (1 + s_i)^−power Σ ρ / P.

        n_i are the examples of client i, n those of all uploads, s_i the rounds since the one that it began with
        and η_i the learning rate of that one. Where rounds are synchronous, s_i = 0 and η_i = η. Shares of stale
        uploads are not made up for: they add up to less than 1, as in FedBuff.

        Clients are added in the order of their numbers, so that float sums have one value.

        Source of the factor: Nguyen et al., 2022, https://arxiv.org/abs/2106.06639

        Raises:
            FedKSeedError: there is no upload, or one is too old, of another run, came twice, or
                reports a scalar above the clip, or the sum overflows; the state is unchanged.
        """
        ordered = in_order(uploads, self.run, state.round, self.max_staleness)
        for upload in ordered:
            require_scalars(upload, self.asked, self.clip)
        total = sum(upload.examples for upload in ordered)
        coefficients, magnitudes, counts = state.coefficients.copy(), state.magnitudes.copy(), state.counts.copy()
        for upload in ordered:
            scalars = upload.scalars.astype(np.float64)
            lr = self.learning_rate(upload.round) / self.probes
            np.subtract.at(coefficients, upload.directions, lr * self._share(state, upload, total) * scalars)
            np.add.at(magnitudes, upload.directions, np.abs(scalars))
            np.add.at(counts, upload.directions, 1)
        require_sendable(state.round, coefficients)
        return State(state.round + 1, coefficients, magnitudes, counts)

    def _share(self, state: State, upload: Upload, total: int) -> float:
        """What an upload counts: its share of all examples, less if it is old; a fresh one's factor is exactly 1."""
        return (upload.examples / total) * (1 + state.round - upload.round) ** -self.staleness_power

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
