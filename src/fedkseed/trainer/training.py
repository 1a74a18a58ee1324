"""A training of `Trainer` without its callbacks: its settings, where it stands, and the search of eps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..local.work import LocalWork
from ..randomness import Purpose, generator
from ..round import Report
from ..run.eps_ladder import SAMPLES, judge, ladder
from ..strategies.kseed import KSeed, State
from ..strategy import Settings, Strategy
from .datasets import Batches
from .own_model import Parties

UNTIL_FOUND = 1e-3  # eps; a broadcast has one even where no step needs it


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a training, which its arguments decide.

    Args:
        batches: of each client.
        steps_an_epoch: steps of the training that take each batch once.
        cohort: clients of a step; None: all.
        local: the local steps of a client in a step of the training, and the number of those.
        moments: whether the server has Adam's moments, so that checkpoints keep them: a client takes a single step.
        eps: the perturbation scale; None: it is searched before the first step, or no step needs one.
        rate: the learning rate of a step, counted from 0.
        options: further arguments of `Parties`.
    """

    batches: Sequence[Batches]
    steps_an_epoch: int
    cohort: int | None
    local: LocalWork
    moments: bool
    eps: float | None
    wire: str
    seed: int
    rate: Callable[[int], float]
    options: dict[str, Any]

    def strategy(self, settings: Settings, step: int, eps: float) -> Strategy[State]:
        """The strategy with the rate of a step."""
        rate, local = self.rate(step), replace(settings.local, eps=eps)
        if self.moments:
            return KSeed.make(replace(settings, local=local, server="adam", server_lr=rate))
        derivatives = settings.derivatives and replace(settings.derivatives, lr=rate)
        return KSeed.make(replace(settings, local=replace(local, lr=rate), derivatives=derivatives))


@dataclass(slots=True)
class Tally:
    """Losses of steps: since the last entry of the log, and of the whole training."""

    since: list[float] = field(default_factory=list)
    rho: list[float] = field(default_factory=list)  # mean |ρ| of each step since then
    total: float = 0.0
    steps: int = 0

    def add_(self, report: Report) -> None:
        if math.isfinite(report.loss):
            self.since.append(report.loss)
            self.total, self.steps = self.total + report.loss, self.steps + 1
        if report.scalar is not None:
            self.rho.append(report.scalar)

    def means_since_(self) -> dict[str, float]:
        """The means since the last call."""
        means = {"loss": fmean(self.since) if self.since else math.nan}
        if self.rho:
            means["rho"] = fmean(self.rho)
        self.since, self.rho = [], []
        return means


@dataclass(slots=True)
class Training:
    """The state of a training.

    Args:
        server: the server's state, which is the model.
        eps: the perturbation scale, once it is found.
        logged: the step of the last entry of the log.
    """

    parties: Parties
    server: State
    eps: float | None
    tally: Tally = field(default_factory=Tally)
    logged: int = 0
    reports: list[Report] = field(default_factory=list)


def searched_eps(parties: Parties, seed: int) -> float:
    """The eps of least error for the base model, on first batches of clients; refused if no eps measures a slope."""
    parties.load(parties.strategy.server.init())
    drawn = generator(seed, Purpose.TUNE, 0).integers(parties.weights.pool.size, size=SAMPLES).tolist()
    losses = [ladder(parties.client(k % len(parties.batches)), j) for k, j in enumerate(drawn)]
    parties.load(parties.strategy.server.init())
    if (eps := judge(np.array(losses)).eps) is None:
        raise FedKSeedError(
            "no eps of the ladder measures a slope of this model's loss: at least half of each scalar is rounding "
            "or curvature. Hold the model in float32, take larger batches, or give eps, a number such as 1e-3"
        )
    return eps


def identity(plan: TrainingPlan, parties: Parties) -> dict[str, Any]:
    """The facts that a training and its checkpoints share."""
    run, local = parties.strategy.run, plan.local
    return {
        "base": run.base.hex(), "pool": [run.pool.key, run.pool.size, run.pool.family, run.pool.basis.hex()],
        "tuned": list(parties.patterns), "seed": plan.seed, "batches": [len(batches) for batches in plan.batches],
        "cohort": plan.cohort, "steps_of": "adam" if plan.moments else local.steps_of, "local_steps": local.steps,
        "probes": local.probes, "clip": str(local.clip), "wire": plan.wire,
    }  # fmt: skip
