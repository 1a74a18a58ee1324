"""The report: one HTML page about one run or several, which fetches nothing; its data is that of the runs' stores.

This module collects the numbers, and the scripts in `assets/` draw them in the browser. The numbers are in one JSON
block, in which `<` is escaped; the scripts put texts into the page as text nodes only, so a category or a name that
looks like HTML stays text. The page's own security policy forbids any other script and any request, but for those of
`fedkseed watch --serve` to its own server.
"""

import base64
import hashlib
import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..errors import FedKSeedError
from ..evaluation.statistics import (
    NOT_EVALUATED,
    Confusion,
    Estimate,
    Evaluation,
    Gain,
    balanced_accuracy,
    counted,
    estimate,
    gains,
    gains_table,
    most_frequent,
    paired_change,
    title_of,
)
from ..files import write_atomically
from ..recipe.algorithms import ALGORITHMS
from ..run.round_metrics import METRICS, values
from ..run.store import GAINS, STOPPED, Store
from ..strategies.kseed import State, importance
from .results import SetScores, set_by_set
from .terminal import finite


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A metric of the model after some rounds."""

    mean: Estimate
    change: Estimate | None  # from the base model, on the same examples
    count: str  # of examples or answers
    choices: "Chosen | None" = None  # of the metric `choice`


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choices of the model after some rounds, and their test against the base model's."""

    balanced: float  # accuracy
    frequent: str  # the most frequent choice
    share: float  # of it
    confusion: Confusion | None
    test: dict[str, float] | None  # fields of `McNemar`, and p


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the model after some rounds."""

    done: int  # rounds
    bytes: int  # sent by then: down and up, all clients
    seconds: float  # of the rounds by then
    clock: float | None  # virtual time; runs of earlier versions have none
    examples: int  # number of examples whose loss was measured
    loss: Estimate
    loss_change: Estimate | None  # from the base model, on the same examples
    rouge: Estimate | None
    rouge_change: Estimate | None
    answers: int  # number of answers generated for Rouge-L
    empty: int  # number of empty ones among them
    others: dict[str, MetricPoint]  # by name: metrics beside loss and Rouge-L; of further sets, these too
    written: list[Any]  # the first answers, for people to read: instruction, true response, the model's


@dataclass(frozen=True, slots=True)
class DirectionCurves:
    """The state of a run of K-seed type: three lists with one number a direction."""

    probabilities: list[float]  # of FedKSeed-Pro's next draw
    counts: list[int]
    coefficients: list[float]


@dataclass(frozen=True, slots=True)
class Holdings:
    """The clients' data and participation: three lists with one entry a client."""

    examples: list[int]
    categories: list[dict[str, int]]
    taken: list[int]  # number of rounds in which a client took part; the page's script reads this name
    too_long: int  # examples left out
    held_out: int
    names: list[str] = field(default_factory=list)  # of the clients, where their data names them


@dataclass(frozen=True, slots=True)
class Account:
    """All numbers and texts of one run on the page."""

    name: str
    algorithm: str
    model: str
    data: str
    planned: int  # rounds
    best: int | None  # rounds of the tuned model, where a validation part chooses them
    stopped: str | None  # the reason, where the run has ended early
    rounds: list[dict[str, Any]]  # of `Report`, the totals `done`, `bytes` and `seconds_total` by then, and metrics
    evaluations: list[Scores]
    against_first: Estimate | None  # held-out loss: change from the first run's latest, on the same examples
    directions: DirectionCurves | None
    clients: Holdings | None
    gains: list[dict[str, Any]]  # of each client whose own rows were measured
    recipe: str


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page about the runs in these directories.

    Raises:
        FedKSeedError: a directory is not that of a run, or the page can't be written.
    """
    if output.is_dir():
        raise FedKSeedError(f"{output} is a directory; name the file to write, as {output / 'report.html'}")
    write_atomically(output, page(runs).encode(), 0o666)


def page(runs: Sequence[Path]) -> str:
    """The page as HTML text."""
    names = names_of(runs)
    return document(", ".join(names), content([Store(directory) for directory in runs], names))


def content(stores: Sequence[Store], names: Sequence[str]) -> str:
    """The page's data as JSON."""
    accounts = [account(store, name, stores[0]) for store, name in zip(stores, names, strict=True)]
    names_of_scores = [name for run in accounts for scores in run.evaluations for name in scores.others]
    scores = {name: -1 if name.endswith(": loss") else 1 for name in names_of_scores}  # the sign of an improvement
    data = {
        "version": __version__,
        "metrics": [{key: getattr(m, key) for key in ("name", "title", "unit", "always")} for m in METRICS],
        "scores": [{"name": name, "title": title_of(name), "good": good} for name, good in scores.items()],
        "titles": {name: title_of(name) for run in accounts for gain in run.gains for name in gain["change"]},
        "runs": [asdict(run) for run in accounts],
        "differences": differences(stores),
    }
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":"))


def document(title: str, data: str, live: bool = False) -> str:
    """The page as HTML text, with its data; `live`: with a script that asks the page's own server for newer data."""
    style = _asset("report.css")
    script = "".join(map(_asset, ["charts.js", "report.js", *(["live.js"] if live else [])]))
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return Template(_asset("report.html")).substitute(
        title=html.escape(title),
        policy=policy + ("; connect-src 'self'" if live else ""),
        style=style,
        data=data.replace("<", "\\u003c"),
        script=script,
    )


def account(store: Store, name: str, first: Store) -> Account:
    """The numbers of one run; `first` is the run that the others are compared with."""
    recipe, done = store.load_recipe(), rounds(store)
    return Account(
        name=name,
        algorithm=recipe.training.algorithm,
        model=recipe.model.name,
        data=recipe.data.source,
        planned=recipe.training.rounds,
        best=store.tuned,
        stopped=store.recall(STOPPED),
        rounds=done,
        evaluations=evaluations(store, done),
        against_first=None if store is first else against(store, first),
        directions=directions(kseed_state(store, recipe.training.algorithm)),
        clients=holdings(store, done),
        gains=gains_table(gains_of(store)),
        recipe=store.recipe.read_text(encoding="utf-8"),
    )


def rounds(store: Store) -> list[dict[str, Any]]:
    """The reports, each with the totals after it, and the value and the text of every metric by name."""
    reports = store.reports()
    sent = accumulate(report["bytes_total"] for report in reports)
    seconds = accumulate(report.get("seconds", 0.0) for report in reports)
    return [
        {
            **report,
            "done": report["round"] + 1,
            "bytes": total,
            "seconds_total": elapsed,
            "metrics": values(report),
            "texts": {metric.name: metric.text(report) for metric in METRICS},
        }
        for report, total, elapsed in zip(reports, sent, seconds, strict=True)
    ]


def evaluations(store: Store, done: Sequence[dict[str, Any]]) -> list[Scores]:
    """All evaluations of a run, each with its changes from that of the base model."""
    by_rounds = {after: Evaluation.of(table) for after, table in store.evaluations().items()}
    base = by_rounds.get(0, NOT_EVALUATED)
    totals = {0: (0, 0.0, 0.0)} | {r["done"]: (r["bytes"], r["seconds_total"], r.get("clock")) for r in done}
    return [
        _scores(after, totals[after], set_by_set(base if after else NOT_EVALUATED, evaluation))
        for after, evaluation in by_rounds.items()
        if after in totals
    ]


def _scores(done: int, totals: tuple[int, float, float | None], sets: Sequence[SetScores]) -> Scores:
    first, (bytes_, seconds, clock) = sets[0], totals
    evaluation, changes = first.after, first.changes
    return Scores(
        done=done,
        bytes=bytes_,
        seconds=seconds,
        clock=clock,
        examples=len(evaluation.losses),
        loss=estimate(evaluation.losses),
        loss_change=changes.get("loss"),
        rouge=estimate(evaluation.rouge) if evaluation.rouge else None,
        rouge_change=changes.get("rouge"),
        answers=len(evaluation.empty),
        empty=sum(evaluation.empty),
        others={
            scores.name(metric): MetricPoint(
                estimate(numbers),
                scores.changes.get(metric),
                counted(metric, len(numbers)),
                _chosen(scores) if metric == "choice" else None,
            )
            for scores in sets
            for metric, numbers in scores.after.measures.items()
            if scores.set or metric not in ("loss", "rouge")
        },
        written=evaluation.answers,
    )


def _chosen(scores: SetScores) -> Chosen | None:
    choices, test = scores.after.choices, scores.test
    if not choices:
        return None
    return Chosen(
        balanced_accuracy(choices),
        *most_frequent(choices),
        Confusion.of(choices),
        test and asdict(test) | {"p": test.p},
    )


def against(store: Store, first: Store) -> Estimate | None:
    """Difference of the latest held-out loss from the first run's, if both were measured on the same examples."""
    scores, scores_of_first = store.evaluations(), first.evaluations()
    data, data_of_first = ((of.recall("identity") or {}).get("data of digest") for of in (store, first))
    if not (scores and scores_of_first) or data is None or data != data_of_first:
        return None
    losses, before = scores[max(scores)]["losses"], scores_of_first[max(scores_of_first)]["losses"]
    return paired_change(before, losses) if before and len(before) == len(losses) else None


def kseed_state(store: Store, algorithm: str, done: int | None = None) -> State | None:
    """The state of a K-seed run after some rounds, or the latest; None for algorithms with other states."""
    return store.state(State, done) if algorithm in ALGORITHMS and ALGORITHMS[algorithm].pooled else None


def directions(state: State | None) -> DirectionCurves | None:
    """The state's numbers for each direction, to six digits; None before the first draw."""
    if state is None or not state.counts.any():
        return None
    return DirectionCurves(_digits(importance(state)), state.counts.tolist(), _digits(state.coefficients))


def holdings(store: Store, done: Sequence[dict[str, Any]]) -> Holdings | None:
    """The clients' data and their participation."""
    clients = store.recall("clients")
    if clients is None:
        return None
    rounds_of = Counter(client for r in done for client in r["clients"])
    return Holdings(**clients, taken=[rounds_of[client] for client in range(len(clients["examples"]))])


def gains_of(store: Store) -> list[Gain]:
    """The gain of each client by the tuned model, or by that of the latest evaluation; those that clients have sent."""
    if (sent := store.recall(GAINS)) is not None:
        return [Gain.of(table) for table in sent]
    by_rounds = store.evaluations()
    if 0 not in by_rounds:
        return []
    tuned = store.tuned if store.tuned in by_rounds else max(by_rounds)
    return gains(Evaluation.of(by_rounds[0]), Evaluation.of(by_rounds[tuned])) if tuned else []


def differences(stores: Sequence[Store]) -> dict[str, list[Any]]:
    """The keys in which the recipes differ, with the value of each run."""
    tables = [_flat(store.load_recipe().model_dump()) for store in stores]
    values = {key: [table.get(key) for table in tables] for key in dict.fromkeys(k for t in tables for k in t)}
    return {key: value for key, value in values.items() if any(v != value[0] for v in value)}


def names_of(runs: Sequence[Path]) -> list[str]:
    """The directories' names, or whole paths where names are equal."""
    names = [run.resolve().name for run in runs]
    return [str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _digits(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _asset(name: str) -> str:
    return (files("fedkseed.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a content security policy names a script or style sheet."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
