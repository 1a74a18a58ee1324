"""A training of `Trainer` without its callbacks: its settings, and where it stands."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..local.work import LocalWork
from ..round import Report
from ..strategies.kseed import State
from .datasets import Batches
from .judge import Judge
from .own_model import Parties


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
        rate: the learning rate of a step, counted from 0, as of steps on the weights themselves.
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
        judge: of the losses of its models.
        eps: the perturbation scale, once it is found.
        factor: of all learning rates, where one was searched.
        logged: the step of the last entry of the log.
    """

    parties: Parties
    judge: Judge
    server: State
    eps: float | None
    factor: float = 1.0
    tally: Tally = field(default_factory=Tally)
    logged: int = 0
    reports: list[Report] = field(default_factory=list)


def identity(plan: TrainingPlan, parties: Parties) -> dict[str, Any]:
    """The facts that a training and its checkpoints share."""
    run, local = parties.strategy.run, plan.local
    return {
        "base": run.base.hex(), "pool": [run.pool.key, run.pool.size, run.pool.family, run.pool.basis.hex()],
        "tuned": list(parties.patterns), "seed": plan.seed, "batches": [len(batches) for batches in plan.batches],
        "cohort": plan.cohort, "steps_of": "adam" if plan.moments else local.steps_of, "local_steps": local.steps,
        "probes": local.probes, "clip": str(local.clip), "wire": plan.wire,
    }  # fmt: skip
