"""Work of a client between two syncs: settings of its local steps, and the steps themselves."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FedKSeedError, require_choice
from .client import Client
from .schedules import require_positive, require_settings, scheduled
from .zeroth_order import Steps, zeroth_order_steps

if TYPE_CHECKING:  # a server aggregates without PyTorch
    from ..weights.full import FullWeights
    from .first_order import Trained

POINTS = {"one point": 1, "two points": 2}


@dataclass(frozen=True, slots=True)
class LocalWork:
    """Local steps of one kind.

    Args:
        rounds: T, the length of the learning-rate schedule.
        steps_of: `sgd`, `adam`, or zeroth-order ones with `one point` or `two points`.
        steps: τ, local steps of a client in a round, unless `epochs` sets the passes over its data.
        lr: η at the start.
        eps: ε, the perturbation scale.
        schedule: `constant`, `linear` (to zero after T rounds) or `cosine` (likewise).
        probes: P, directions a step: their estimates on one batch are averaged.
        clip: largest |ρ|, a safeguard against a broken loss; infinite for none, as in the paper.
    """

    rounds: int
    steps_of: str = "two points"
    steps: int = 200
    epochs: int | None = None
    batch_size: int = 1
    lr: float = 3e-7
    eps: float = 5e-4
    schedule: str = "constant"
    probes: int = 1
    clip: float = math.inf

    def __post_init__(self) -> None:
        require_settings(self.schedule, rounds=self.rounds, steps=self.steps, probes=self.probes)
        require_positive(lr=self.lr, eps=self.eps)
        require_choice("kind of local steps", self.steps_of, ("sgd", "adam", *POINTS))

    @property
    def backpropagates(self) -> bool:
        return self.steps_of not in POINTS

    @property
    def scalars(self) -> int:
        """The number of scalars that zeroth-order steps find in a round, τ P."""
        return self.steps * self.probes

    def learning_rate(self, round_: int) -> float:
        """The learning rate η of a round, counted from 0."""
        return scheduled(self.lr, self.schedule, round_, self.rounds)

    def count(self, examples: int) -> int:
        """The number of a client's first-order steps: `steps`, or those of `epochs` passes over its data."""
        return self.steps if self.epochs is None else self.epochs * math.ceil(examples / min(self.batch_size, examples))

    def zeroth_order(self, client: Client[Any], round_: int, lr: float, directions: NDArray[np.uint32]) -> Steps:
        """Take zeroth-order steps along the directions, shape (τ P,)."""
        return zeroth_order_steps(
            client.weights,
            client.loss,
            client.batches(round_),
            directions,
            probes=self.probes,
            points=POINTS[self.steps_of],
            lr=lr,
            eps=self.eps,
            clip=self.clip,
            on_step=client.on_step,
        )

    def first_order(self, client: "Client[FullWeights]", round_: int, lr: float) -> "Trained":
        """Take first-order steps along gradients.

        Raises:
            FedKSeedError: the client can't backpropagate, or its weights diverge.
        """
        from .first_order import first_order_steps

        who = f"client {client.number}"
        if client.graph is None:
            raise FedKSeedError(f"{who} brings no loss to backpropagate through; give it Client(graph=...)")
        batches, steps = client.batches(round_), self.count(client.examples)
        trained = first_order_steps(
            client.weights, client.graph, batches, steps=steps, lr=lr, optimizer=self.steps_of, on_step=client.on_step
        )
        if not client.weights.finite:
            raise FedKSeedError(f"weights of {who} have diverged in round {round_ + 1}; use a smaller lr than {lr:g}")
        return trained
