"""The state of a training of `Trainer`."""

import math
from dataclasses import dataclass, field
from statistics import fmean

from ..round import Report
from ..strategies.kseed import State
from .judge import Judge
from .own_model import Parties


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
