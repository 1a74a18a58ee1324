"""`tune`: federated tuning of a user's own model in one call."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import FedKSeedError
from ..local.work import LocalWork
from ..report.bars import Bars
from ..round import Report
from ..strategies.kseed import State
from ..weights.adapter import Adapter
from .client_batches import OwnedBatch, batches_of, described
from .judge import PLATEAU, SEARCH, START, UNTIL_FOUND, Judge, searches
from .own_model import Loss, Parties

MetricFunctions: TypeAlias = Mapping[str, Callable[[Any, Any], Any]]  # of a model and a batch, a number

OPTIONS = ("pool", "tuned", "mode", "seed", "basis", "wire")  # that `Parties` takes

OnRound: TypeAlias = Callable[[Report, dict[str, float]], object]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The end of `tune`; the model itself holds the tuned weights."""

    state: State
    reports: list[Report]  # one a round
    adapter: Adapter  # the tuned model, in a file of 4 bytes a direction: adapter.save, fedkseed.apply
    lr: float
    eps: float
    scores: list[dict[str, float]]  # of the base model and after each round: loss and metrics on `held_out`


def tune(
    model: nn.Module, loss: Loss, batches: Any, rounds: int = 20, *,
    steps_of: str = "adam", steps: int = 20, lr: float | str = SEARCH, eps: float | str = SEARCH,
    schedule: str = "linear", probes: int = 1, clip: float = math.inf, size: int | None = None, held_out: Any = None,
    metrics: MetricFunctions | None = None, on_round: OnRound | None = None, **options: Any,
) -> Tuned:  # fmt: skip
    """Tune a model in place on data of several clients, with messages of kilobytes between them and a server.

    Args:
        loss: (model, batch) to a scalar tensor.
        batches: of each client, a list or a DataLoader; they are used by that client's local steps alone. A list of
            batches, or a single DataLoader, is one client.
        steps_of: `adam` or `sgd`, derivatives along all directions; `two points`, forward passes alone.
        steps: local steps of a client in a round.
        lr: as in ordinary training by the same optimiser, or "search": the best of some in short trials.
        eps: the perturbation scale of two points, or "search": the best of a ladder, for 68 forward passes.
        schedule: of lr over the rounds: `linear` (to zero), `cosine` (likewise) or `constant`.
        probes: directions of a two-point step.
        clip: largest |ρ|, a safeguard against a broken loss.
        size: clients that take part in a round; default all.
        held_out: batches on which the model is scored before the first round and after each.
        metrics: by name, functions of (model, batch) to a number, as {"accuracy": accuracy}; means over rows count.
        on_round: called with the report and the scores of each round, in place of the lines that are printed.
        options: further arguments of `Parties`, see OPTIONS: pool, tuned, mode, seed, basis, wire.

    Raises:
        DivergedError: the loss has risen far above the base model's, or is not finite; its `best` is the best model.
        FedKSeedError: an argument is out of range, or no loss is finite. The model is w_0 again after either.

    Example:
        tuned = fedkseed.tune(model, loss, batches, rounds=20)
    """
    if unknown := [name for name in options if name not in OPTIONS]:
        raise FedKSeedError(f"fedkseed.tune has no argument {', '.join(unknown)}; see help(fedkseed.tune)")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise FedKSeedError(
            f"metrics is a {type(metrics).__name__}; give functions by name, as {{'accuracy': accuracy}}"
        )
    if metrics and held_out is None:
        raise FedKSeedError("metrics are computed on held_out: give batches that no client has")
    search_lr, search_eps = searches("lr", lr), searches("eps", eps)
    first_lr = START.get(steps_of, 1.0) if isinstance(lr, str) else lr
    first_eps = UNTIL_FOUND if isinstance(eps, str) else eps
    more = {"schedule": schedule, "probes": probes, "clip": clip}
    local = LocalWork(rounds, steps_of, steps, lr=first_lr, eps=first_eps, **more)
    held_out = None if held_out is None else batches_of(held_out, "held_out")
    parties, reports, scores = Parties(model, loss, batches, local, **options), list[Report](), []

    def score(state: State) -> dict[str, float]:
        if held_out is None:
            return {}
        parties.load(state)
        scores.append(scored(parties, metrics or {}, held_out))
        if on_round is None:
            said = ", ".join(f"{name} {score:.4g}" for name, score in scores[-1].items())
            bars.note(f"held_out after {state.round} rounds: {said}")
        return scores[-1]

    with Bars(rounds) as bars:
        try:
            parties.progress = bars
            parties.cohort(0, size)  # refuses one that can't be drawn
            judge = Judge(parties, first_lr)
            if search_eps and not local.backpropagates:
                judge.search_eps()
            if search_lr:
                judge.search_rate(steps_of, steps, size)
            score(state := parties.strategy.server.init())
            for _ in range(rounds):
                state, report = judge.round(state, size)
                reports.append(report)
                if on_round is None:
                    bars.round_done(report)
                    score(state)
                else:
                    bars.count_round(report.seconds)
                    on_round(report, score(state))
            judge.end(state, rounds * steps, sum(report.skipped for report in reports), held_out is not None)
            settings = parties.strategy.settings.local
            tuned = Tuned(state, reports, parties.finish(state), judge.lr, settings.eps, scores)
        except BaseException:
            parties.release()
            raise
    if scores and (best := min(range(rounds + 1), key=lambda done: scores[done]["loss"])) < rounds:
        lowest, base, last = (scores[done]["loss"] for done in (best, 0, rounds))
        if last - lowest > PLATEAU * abs(base):
            warnings.warn(
                f"the loss on held_out was lowest after {best} rounds, {lowest:.4g}, and is {last:.4g} now: take fewer "
                "rounds or a smaller lr, or more data",
                stacklevel=2,
            )
    return tuned


@torch.no_grad()
def scored(parties: Parties, metrics: MetricFunctions, batches: Sequence[Any]) -> dict[str, float]:
    """The means over the rows of batches of the loss, and of metrics of the model."""
    from transformers.trainer_pt_utils import find_batch_size  # takes seconds to import

    sums, rows = dict.fromkeys(["loss", *metrics], 0.0), 0
    for place in range(len(batches)):
        batch = OwnedBatch.of("held_out", batches, place)
        count = find_batch_size(batch.batch) or 1
        rows += count
        sums["loss"] += count * parties.value(batch)
        for name, metric in metrics.items():
            number = batch.put_through(f"metric {name}", metric, parties.model)
            try:
                sums[name] += count * float(number)
            except (TypeError, ValueError, RuntimeError) as error:
                raise FedKSeedError(f"the metric {name} gave {described(number)}, and must give one number") from error
    return {name: total / rows for name, total in sums.items()}
