"""The loop over the rounds of a run, for simulations and networks alike: each round is committed before the next.

This module does not import PyTorch: a server that only aggregates needs none.
"""

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..directions.factors import Basis
from ..errors import FedKSeedError
from ..evaluation.statistics import NOT_EVALUATED, Evaluation, Gain, gains, require_finite
from ..recipe.rules import Where, broken_rules
from ..recipe.schema import BEHAVIOUR, Recipe
from ..round import Broadcasts, Report
from ..strategy import COEFFICIENTS, ServerPart, Strategy
from ..weights.adapter import Adapter
from .best_round import best_round, diverged, exhausted, lowers_loss, lowest_round, require_movement, suspicious
from .digest_chain import Receipt
from .privacy_plan import about, exhausted_budget, spent
from .progress import Progress, Silent
from .store import DIVERGED, NOTES, REACH, STOPPED, Store

ADVICE = "take a smaller lr, or let `fedkseed tune` find one"
UNDONE = "undone"  # the fact with the rounds that the guard has undone


@dataclass(frozen=True, slots=True)
class Finished:
    """The tuned model of a finished run and its measurements, by the run's evaluator."""

    output: Path | None  # the tuned model: coefficients, adapters or all weights
    steps: Sequence[float] = ()  # seconds of single local steps that were taken in this process
    sync_seconds: float | None = None  # nearly 0 in mode streamed; None where clients replay the rounds they missed
    weights: int | None = None  # d, the number of tuned weights; None without a model
    digest: str | None = None  # of the tuned model, hexadecimal; None without a model
    lora: int | None = None  # weights that a LoRA of rank 8 of the model has, for comparison; None if that is not known


class Evaluator(Protocol):
    """The part of a run that scores and saves its models."""

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
        identity: facts that must stay the same when a run is continued by another process.
        round: does the next round: takes the state, a function from a number of rounds to the state after them, and
            the run's broadcasts, and returns the next state and its report. An asynchronous round needs the states that
            its clients began with.
        reach: the greatest number of rounds since a client of a round began; 0: rounds are synchronous.
        holdings: the data of each client, where that is known.
        notes: what was said of the data when it was read.
        receipts: the uploads of the last round by client, with their signatures.
        clients: number of all clients, of which rounds draw their cohorts.
        base: the base model's scores, where they are known before the run begins; see `base_scores`.
    """

    recipe: Recipe
    strategy: Strategy[Any]
    identity: dict[str, str]
    round: Callable[[Any, Callable[[int], Any], Broadcasts[Any]], tuple[Any, Report]]
    evaluator: Evaluator
    progress: Progress = field(default_factory=Silent)
    reach: int = 0
    holdings: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    receipts: Callable[[], Mapping[int, Receipt]] = dict
    clients: int = 0
    base: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Finished):
    """The results and measurements of a whole run."""

    before: Evaluation
    after: Evaluation
    reports: list[dict[str, Any]]
    peak_memory: int  # bytes, of this process
    best: int | None = None  # rounds of the tuned model, where [evaluation] best chooses them: `after` is of it
    stopped: str | None = None  # the reason, where a run has ended early
    diverged: bool = False  # whether that is the reason
    gains: list[Gain] = field(default_factory=list)  # of each client, where its own rows were measured
    notes: list[str] = field(default_factory=list)  # what was said of the data

    @property
    def step_seconds(self) -> float | None:
        """The median; None if no step was taken here: by clients elsewhere, or in an earlier process."""
        return median(self.steps) if self.steps else None


def work(store: Store, federation: Federation) -> Result:
    """Carry out the remaining rounds of a run, with evaluations; the caller holds the run's lock."""
    server, settings = federation.strategy.server, federation.recipe.evaluation
    # A client may hold the broadcast of the round before the one that it began with; of weights nobody keeps one.
    broadcasts = Broadcasts(server, 2 + federation.reach if server.weights == COEFFICIENTS else 1)
    state = _opened(store, federation, broadcasts)
    before = _evaluated(store, federation, server.init())
    require_finite(before, federation.recipe.model.name, federation.recipe.model.dtype)
    state = _rounds(store, federation, broadcasts, state)
    del broadcasts  # those of weights are as large as the model
    after = _evaluated(store, federation, state)
    _guard(store, federation, state.round, after)
    best = best_round(settings, store.evaluations())
    reason = diverged(store.evaluations(), lowers_loss(federation.recipe))
    if settings.stop_when_diverged and reason is not None:
        best = _end_of_divergence(store, server, state.round, best, reason)
    if best is not None:
        state = store.state(server.state, best)
        after = _evaluated(store, federation, state, write=True)
    finished = asdict(federation.evaluator.finish(state, store))
    finished |= {"before": before, "after": after, "gains": gains(before, after), "best": best}
    finished["notes"] = [*federation.notes]
    finished |= {"stopped": store.recall(STOPPED), "diverged": store.recall(DIVERGED) is not None}
    return Result(**finished, reports=store.reports(), peak_memory=peak_memory())


def _opened(store: Store, federation: Federation, broadcasts: Broadcasts[Any]) -> Any:
    """The state that a run goes on with, after checks that it is the same run; a new run begins here."""
    store.require_sound()
    store.require_same(federation.identity)
    if store.forgotten and store.rounds < federation.recipe.training.rounds:
        raise FedKSeedError(
            f"{store.directory} was recomputed without {store.forgotten}, and further rounds could count uploads of "
            "theirs: export its model, and begin a new run from that"
        )
    server = federation.strategy.server
    state = store.state(server.state)
    if state is None:
        store.commit(state := server.init(), None, broadcast=_announced(broadcasts, state))
    if federation.holdings:
        store.remember("clients", federation.holdings)
    store.remember(NOTES, [*federation.notes])
    store.copy_metrics()
    counted = federation.recipe.having(clients={"count": federation.clients or None})
    for _, remark in broken_rules(counted, Where.REMARK):
        federation.progress.note(remark)
    store.remember(REACH, federation.reach)
    if federation.base is not None and 0 not in store.evaluations():
        store.evaluated(0, dict(federation.base))
    return state


def _rounds(store: Store, federation: Federation, broadcasts: Broadcasts[Any], state: Any) -> Any:
    """Do the remaining rounds, each committed before the next, until the last or a reason to stop; the last state."""
    recipe, settings, server = federation.recipe, federation.recipe.evaluation, federation.strategy.server
    rounds: list[tuple[float | None, int]] = [(report["loss"], report["skipped"]) for report in store.reports()]
    last_evaluated = max(store.evaluations(), default=0)
    warned, ended, by_loss = False, None, lowers_loss(recipe)
    while state.round < recipe.training.rounds:
        due, losses = settings.due(state.round), [loss for loss, _ in rounds]
        # A run may have been stopped after an evaluation, and before it was judged.
        if due or state.round == last_evaluated or (by_loss and suspicious(losses, last_evaluated)):
            last_evaluated = state.round
            _guard(store, federation, state.round, _evaluated(store, federation, state))
            ended = exhausted(settings, store.evaluations())
            if ended is None and not warned and (sign := diverged(store.evaluations(), by_loss)) is not None:
                warned = True
                federation.progress.note(f"the run diverges: {sign}; {ADVICE}")
                if settings.stop_when_diverged:
                    return state
        if reason := ended or exhausted_budget(recipe, federation.clients, state.round + 1):
            store.remember(STOPPED, reason)
            federation.progress.note(reason)
            return state
        state, report = federation.round(state, lambda done: store.state(server.state, done), broadcasts)
        report = replace(report, epsilon=spent(recipe, federation.clients, state.round))
        keep = {state.round - back for back in range(2 + federation.reach)}
        if settings.best is not None and (best := best_round(settings, store.evaluations())) is not None:
            keep.add(best)  # without a choice, the evaluations are not read every round
        store.commit(state, report, keep, federation.receipts(), _announced(broadcasts, state))
        federation.progress.round_done(report)
        rounds.append((report.loss, report.skipped))
        if recipe.training.objective == "loss":  # answers may score the same for long
            require_movement(rounds, recipe.training.rounds)
    return state


def _announced(broadcasts: Broadcasts[Any], state: Any) -> bytes:
    """The message that all clients of the next round get; empty where each gets the rounds that it has missed."""
    return b"" if broadcasts.server.remembers else broadcasts.of(state)


def _end_of_divergence(store: Store, server: ServerPart[Any], done: int, best: int | None, reason: str) -> int:
    """Note that a run has diverged; returns the round whose model is kept: the best that there still is."""
    lowest = lowest_round(store.evaluations()) if best is None else best
    try:
        store.state(server.state, lowest)
    except FedKSeedError:  # large states are not kept for long
        lowest = done
    kept = "The base model" if lowest == 0 else f"The model after {lowest} rounds"
    store.remember(DIVERGED, lowest)
    store.remember(STOPPED, f"the run diverged: {reason}. {kept} is kept. {ADVICE.capitalize()}")
    return lowest


def _evaluated(store: Store, federation: Federation, state: Any, write: bool = False) -> Evaluation:
    """The evaluation of a state, computed only once in a run; first, last and tuned model `write` answers."""
    recipe = federation.recipe
    if (table := store.evaluations().get(state.round)) is not None:
        evaluation = Evaluation.of(table)  # whose `empty` has entries where answers were written
        if not write or not recipe.evaluation.written or evaluation.empty:
            return evaluation
    writes = write or state.round in (0, recipe.training.rounds)
    evaluation = federation.evaluator.evaluate(state, f"held-out examples, round {state.round}", writes)
    if evaluation != NOT_EVALUATED:
        store.evaluated(state.round, asdict(evaluation))
    return evaluation


def _guard(store: Store, federation: Federation, done: int, evaluation: Evaluation) -> None:
    """Go back to the last good round where the held-out loss has risen more than `[trust] guard` over its lowest.

    Raises:
        FedKSeedError: it has, and the reports of what was undone are the fact UNDONE.
    """
    limit = federation.recipe.trust.guard
    if limit is None or not evaluation.losses:
        return
    losses = {rounds: float(np.mean(table["losses"])) for rounds, table in store.evaluations().items()}
    loss, lowest = losses[done], float(np.nanmin([*losses.values()]))
    if loss <= lowest + limit:
        return
    good = max(rounds for rounds, earlier in losses.items() if rounds < done and earlier <= lowest + limit)
    undone = [report for report in store.reports() if report["round"] >= good]
    store.remember(UNDONE, [*(store.recall(UNDONE) or []), {"loss": loss, "lowest": lowest, "reports": undone}])
    store.rollback(good)
    clients = sorted({client for report in undone for client in report["clients"]})
    raise FedKSeedError(
        f"after {done} rounds the held-out loss is {loss:.4f}, more than [trust] guard = {limit:g} above its lowest, "
        f"{lowest:.4f}. The run is back at {good} finished rounds. In those undone, clients {clients} took part: look "
        "for one that should not, choose another [trust] rule or a smaller lr in a new run, or go on as it is: "
        f"fedkseed resume {store.directory}"
    )


class Coefficients:
    """The K coefficients of a broadcast, in place of the weights of a party without a model."""

    c: NDArray[np.float32] = np.empty(0, np.float32)

    def load(self, c: NDArray[np.floating]) -> None:
        self.c = np.array(c, np.float32)


@dataclass(frozen=True, slots=True)
class WithoutModel:
    """The evaluator of a server without a model: nothing is scored, and the adapter has no digest of w(c)."""

    recipe: Recipe
    strategy: Strategy[Any]
    basis: Basis | None = None  # for the adapter, where the server has it

    def evaluate(self, state: Any, what: str, write: bool) -> Evaluation:
        return NOT_EVALUATED

    def finish(self, state: Any, store: Store) -> Finished:
        self.adapter(state, self.recipe.model.tuned or ["*"]).save(store.adapter)
        return Finished(store.adapter)

    def adapter(self, state: Any, patterns: Sequence[str]) -> Adapter:
        """The model of a state, without the digest of its weights."""
        weights, run = Coefficients(), self.strategy.run
        self.strategy.load(state, weights)
        origin = provenance(self.recipe, state.round)
        return Adapter(run.pool, weights.c, run.base.hex(), None, tuple(patterns), origin, self.basis)


def provenance(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """The origin of a tuned model, for its adapter file."""
    model, data, algorithm = recipe.model, recipe.data, recipe.training.algorithm
    of_model = {"model": model.name, "dtype": model.dtype, "storage": model.storage}
    of_model |= model.model_dump(include={*BEHAVIOUR}, exclude_none=True)
    wording = data.model_dump(mode="json", include={"template", "separator", "date"}, exclude_none=True)
    return about(recipe, rounds) | of_model | wording | {"algorithm": algorithm, "rounds": rounds, "seed": recipe.seed}


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the memory that the parent had when it started this process
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
