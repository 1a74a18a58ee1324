"""A training of `Trainer` without its callbacks: its settings, where it stands, and its steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..local.optimizers import Optimizer
from ..local.work import LocalWork
from ..randomness import Purpose, generator
from ..round import Report, run_round
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
        cohort: clients of a step; None: all.
        local: the local steps of a client in a step of the training.
        server: the optimiser of the mean update; it has Adam's moments where a client takes a single step, so that
            checkpoints keep them.
        eps: the perturbation scale; None: it is searched before the first step, or no step needs one.
        rate: the learning rate of a step, counted from 0.
        options: further arguments of `Parties`.
    """

    batches: Sequence[Batches]
    cohort: int | None
    local: LocalWork
    server: Optimizer
    eps: float | None
    searches: bool
    wire: str
    seed: int
    rate: Callable[[int], float]
    options: dict[str, Any]

    @property
    def steps(self) -> int:
        return self.local.rounds

    @property
    def clients_a_step(self) -> int:
        return self.cohort or len(self.batches)

    @property
    def steps_an_epoch(self) -> int:
        return steps_an_epoch(self.batches, self.clients_a_step * self.local.steps)

    def strategy(self, settings: Settings, step: int, eps: float) -> Strategy[State]:
        """The strategy with the rate of a step."""
        rate, local = self.rate(step), replace(settings.local, eps=eps)
        settings = replace(settings, local=local, server=self.server.kind)
        if self.server.kind == "adam":
            return KSeed.make(replace(settings, server_lr=rate))
        derivatives = settings.derivatives and replace(settings.derivatives, lr=rate)
        return KSeed.make(replace(settings, local=replace(local, lr=rate), derivatives=derivatives))


def steps_an_epoch(batches: Sequence[Batches], batches_a_step: int) -> int:
    return math.ceil(sum(map(len, batches)) / batches_a_step)


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

    @property
    def mean(self) -> float:
        return self.total / self.steps if self.steps else math.nan

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


def begun(plan: TrainingPlan, parties: Parties) -> Training:
    """The training before its first step.

    Raises:
        FedKSeedError: the cohort can't be drawn.
    """
    parties.cohort(0, plan.cohort)
    parties.strategy = plan.strategy(parties.strategy.settings, 0, plan.local.eps)
    return Training(parties, parties.strategy.server.init(), plan.eps)


def step_(training: Training, plan: TrainingPlan, number: int) -> None:
    """Take one step: a round of a cohort."""
    parties, eps = training.parties, plan.local.eps if training.eps is None else training.eps
    parties.strategy = plan.strategy(parties.strategy.settings, number, eps)
    cohort = parties.cohort(number, plan.cohort)
    training.server, report = run_round(parties.strategy, training.server, cohort, parties.transport)
    training.reports.append(report)
    training.tally.add_(report)


def searched_eps(parties: Parties, seed: int) -> float:
    """The eps of least error for the base model, on first batches of clients.

    Raises:
        FedKSeedError: no eps measures a slope.
    """
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
        "base": run.base.hex(),
        "pool": [run.pool.key, run.pool.size, run.pool.family, run.pool.basis.hex()],
        "tuned": list(parties.patterns),
        "seed": plan.seed,
        "batches": [len(batches) for batches in plan.batches],
        "cohort": plan.cohort,
        "steps_of": "adam" if plan.server.kind == "adam" else local.steps_of,
        "local_steps": local.steps,
        "probes": local.probes,
        "clip": str(local.clip),
        "wire": plan.wire,
    }
