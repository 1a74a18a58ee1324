"""A run from its first round to its last, whoever carries the messages: every round is committed before the next."""

import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..evaluation.statistics import Evaluation
from ..round import Report
from .setup import Party
from .store import Store

NOT_EVALUATED = Evaluation([], [], [])  # by a server that has no held-out data


class Federation(Party, ABC):
    """A party that aggregates, and a way to its clients."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, str]:
        """What must not change between a run's processes."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many rounds ago a client may have begun; 0: rounds are synchronous."""

    @abstractmethod
    def holdings(self) -> dict[str, Any] | None:
        """Who holds what, where that is known."""

    @abstractmethod
    def evaluate(self, state: Any, what: str, write: bool = True) -> Evaluation:
        """Score the model of a state on the held-out examples; `write` the answers that the recipe asks for."""

    @abstractmethod
    def round(self, state: Any, earlier: Callable[[int], Any]) -> tuple[Any, Report]:
        """The next round.

        Args:
            earlier: finds the state after so many rounds, with which a client of an asynchronous round began.
        """


@dataclass(frozen=True, slots=True)
class Result:
    """What a whole run was like."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    step_seconds: float | None  # median; None if no step was taken here: by clients elsewhere, or in an earlier process
    sync_seconds: float | None  # nearly nothing, if streamed; None where a client replays what it has missed
    weights: int  # d, those that are tuned
    digest: str  # of the tuned model, hexadecimal
    output: Path | None  # the tuned model: coefficients, adapters or all weights


def work(store: Store, federation: Federation) -> Result:
    """Do what is left of a run; the caller keeps other processes off it."""
    store.require_same(federation.identity)
    state = store.state(federation.strategy.state)
    if state is None:
        store.commit(state := federation.strategy.init(), None)
    if holdings := federation.holdings():
        store.remember("clients", holdings)
    store.copy_metrics()
    rounds, every = federation.recipe.training.rounds, federation.recipe.evaluation.every
    reach = federation.reach
    store.remember("reach", reach)
    before = _evaluated(store, federation, federation.strategy.init())
    while state.round < rounds:
        if every and state.round % every == 0:
            _evaluated(store, federation, state)
        state, report = federation.round(state, lambda done: store.state(federation.strategy.state, done))
        store.commit(state, report, keep=2 + reach)
        federation.progress.round_done(report)
    after = _evaluated(store, federation, state)
    output = federation.save(state, store)
    store.remember("peak_memory", peak_memory())
    return Result(
        before=before,
        after=after,
        reports=store.reports(),
        peak_memory=peak_memory(),
        step_seconds=median(federation.stopwatch.steps) if federation.stopwatch.steps else None,
        sync_seconds=None if federation.algorithm.remembers else federation.load(state),
        weights=federation.weights.layout.size,
        digest=federation.weights.digest().hex(),
        output=output,
    )


def _evaluated(store: Store, federation: Federation, state: Any) -> Evaluation:
    """The evaluation after some rounds, done once in a run's life; the first and the last model write answers."""
    ends = (0, federation.recipe.training.rounds)
    known = store.evaluations().get(state.round)
    if known is not None:
        return Evaluation(**known)
    found = federation.evaluate(state, f"held-out examples, round {state.round}", state.round in ends)
    if found != NOT_EVALUATED:
        store.evaluated(state.round, asdict(found))
    return found


def peak_memory() -> int:
    """The most memory that this process had resident so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
