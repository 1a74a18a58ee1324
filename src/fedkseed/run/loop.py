"""A run from its first round to its last, whoever carries the messages: every round is committed before the next.

    Federation    a strategy, the next round, and an evaluator: all that a run is made of
    work          does what is left of a run
    WithoutModel  the evaluator of a server that has no model

Nothing here imports PyTorch: a server that only adds up needs none.
"""

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..evaluation.statistics import NOT_EVALUATED, Evaluation
from ..recipe.schema import Recipe
from ..round import Report
from ..strategy import Strategy
from ..weights.adapter import Adapter
from .progress import Progress, Silent
from .store import Store

NEWCOMER = (1 << 32) - 1  # a client that has seen nothing: what it is sent gives the whole model


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a run, as its evaluator has measured it."""

    output: Path | None  # the tuned model: coefficients, adapters or all weights
    steps: Sequence[float] = ()  # seconds of single local steps that were taken here
    sync_seconds: float | None = None  # nearly nothing, if streamed; None where a client replays what it has missed
    weights: int | None = None  # d, those that are tuned; None without a model
    digest: str | None = None  # of the tuned model, hexadecimal; None without a model


class Evaluator(Protocol):
    """Whoever judges and keeps the models of a run."""

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        """Score the model of a state on the held-out examples; `write` the answers that the recipe asks for."""
        ...

    def finish(self, state: Any, store: Store) -> Finished:
        """Write the last model into the run's directory."""
        ...


@dataclass(frozen=True, slots=True)
class Federation:
    """The parts of a run.

    Args:
        identity: facts that must not change between a run's processes.
        round: (state, a function that finds the state after so many rounds) to the next state and its report. An
            asynchronous round needs the states that its clients began with.
        reach: how many rounds ago a client may have begun; 0: rounds are synchronous.
        holdings: the data of each client, where that is known.
    """

    recipe: Recipe
    strategy: Strategy[Any]
    identity: dict[str, str]
    round: Callable[[Any, Callable[[int], Any]], tuple[Any, Report]]
    evaluator: Evaluator
    progress: Progress = field(default_factory=Silent)
    reach: int = 0
    holdings: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run in numbers."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    step_seconds: float | None  # median; None if no step was taken here: by clients elsewhere, or in an earlier process
    sync_seconds: float | None  # see `Finished`, as for the rest
    weights: int | None
    digest: str | None
    output: Path | None


def work(store: Store, federation: Federation) -> Result:
    """Do what is left of a run; the caller keeps other processes off it."""
    strategy, evaluator = federation.strategy, federation.evaluator
    store.require_same(federation.identity)
    state = store.state(strategy.state)
    if state is None:
        store.commit(state := strategy.init(), None)
    if federation.holdings:
        store.remember("clients", federation.holdings)
    store.copy_metrics()
    rounds, every = federation.recipe.training.rounds, federation.recipe.evaluation.every
    store.remember("reach", federation.reach)
    before = _evaluated(store, federation, strategy.init())
    while state.round < rounds:
        if every and state.round % every == 0:
            _evaluated(store, federation, state)
        state, report = federation.round(state, lambda done: store.state(strategy.state, done))
        store.commit(state, report, keep=2 + federation.reach)
        federation.progress.round_done(report)
    after = _evaluated(store, federation, state)
    finished = evaluator.finish(state, store)
    store.remember("peak_memory", peak_memory())
    return Result(
        before=before,
        after=after,
        reports=store.reports(),
        peak_memory=peak_memory(),
        step_seconds=median(finished.steps) if finished.steps else None,
        sync_seconds=finished.sync_seconds,
        weights=finished.weights,
        digest=finished.digest,
        output=finished.output,
    )


def _evaluated(store: Store, federation: Federation, state: Any) -> Evaluation:
    """The evaluation after some rounds, done once in a run's life; the first and the last model write answers."""
    ends = (0, federation.recipe.training.rounds)
    known = store.evaluations().get(state.round)
    if known is not None:
        return Evaluation(**known)
    what = f"held-out examples, round {state.round}"
    found = federation.evaluator.evaluate(state, what, state.round in ends)
    if found != NOT_EVALUATED:
        store.evaluated(state.round, asdict(found))
    return found


class Coefficients:
    """Weights of a party without a model: the K coefficients alone, as a broadcast sets them."""

    def __init__(self) -> None:
        self.c = np.empty(0, np.float32)

    def load(self, c: NDArray[np.floating]) -> None:
        self.c = np.array(c, np.float32)


@dataclass(frozen=True, slots=True)
class WithoutModel:
    """The evaluator of a server that has no model: it scores nothing, and its adapter names no digest of w(c)."""

    recipe: Recipe
    strategy: Strategy[Any]

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        return NOT_EVALUATED

    def finish(self, state: Any, store: Store) -> Finished:
        weights, run = Coefficients(), self.strategy.run
        self.strategy.sync(self.strategy.broadcast(state, [NEWCOMER])[NEWCOMER], weights)
        patterns = tuple(self.recipe.model.tuned or ("*",))
        Adapter(
            run.pool, weights.c, run.base.hex(), None, patterns, provenance(self.recipe, state.round)
        ).save(store.adapter)  # fmt: skip
        return Finished(store.adapter)


def provenance(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """The origin of a tuned model, as its file tells it."""
    return {
        "model": recipe.model.name,
        "dtype": recipe.model.dtype,
        "storage": recipe.model.storage,
        "template": recipe.data.template,
        "separator": recipe.data.separator,
        "algorithm": recipe.training.algorithm,
        "rounds": rounds,
        "seed": recipe.seed,
    }


def peak_memory() -> int:
    """The most memory that this process had resident so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
