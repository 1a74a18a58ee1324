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
from dataclasses import asdict
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

from .. import __version__
from ..errors import FedKSeedError
from ..evaluation import statistics as stats
from ..files import write_atomically
from ..recipe.algorithms import ALGORITHMS
from ..run.round_metrics import METRICS, values
from ..run.store import NOTES, STOPPED, Store
from ..strategies.kseed import State, importance
from .results import SetScores, set_by_set
from .terminal import finite
from .verdict import RunVerdict, clients_of, gains_of


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Write the page about the runs in these directories.

    Raises:
        FedKSeedError: a directory is not that of a run, or the page can't be written.
    """
    if output.is_dir():
        raise FedKSeedError(f"{output} is a directory; name the file to write, as {output / 'report.html'}")
    write_atomically(output, page(runs).encode(), 0o666)


def page(runs: Sequence[Path]) -> str:
    """The page as HTML text; runs are called by their directories' names, or by whole paths where names are equal."""
    names = [run.resolve().name for run in runs]
    names = [str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]
    return document(", ".join(names), content([Store(directory) for directory in runs], names))


def content(stores: Sequence[Store], names: Sequence[str]) -> str:
    """The page's data as JSON."""
    accounts = [account(store, name, stores[0]) for store, name in zip(stores, names, strict=True)]
    names_of_scores = [name for run in accounts for scores in run["evaluations"] for name in scores["others"]]
    scores = {name: -1 if name.endswith(": loss") else 1 for name in names_of_scores}  # the sign of an improvement
    data = {
        "version": __version__,
        "metrics": [{key: getattr(m, key) for key in ("name", "title", "unit", "always")} for m in METRICS],
        "scores": [{"name": name, "title": stats.title_of(name), "good": good} for name, good in scores.items()],
        "titles": {name: stats.title_of(name) for run in accounts for gain in run["gains"] for name in gain["change"]},
        "runs": accounts,
        "differences": differences(stores),
    }
    return json.dumps(finite(data), allow_nan=False, separators=(",", ":"))


def document(title: str, data: str, live: bool = False) -> str:
    """The page as HTML text, with its data; `live`: with a script that asks the page's own server for newer data."""

    def hashed(text: str) -> str:  # as a content security policy names a script or style sheet
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = _asset("report.css")
    script = "".join(map(_asset, ["charts.js", "report.js", *(["live.js"] if live else [])]))
    policy = f"default-src 'none'; img-src data:; style-src '{hashed(style)}'; script-src '{hashed(script)}'"
    return Template(_asset("report.html")).substitute(
        title=html.escape(title),
        style=style,
        script=script,
        data=data.replace("<", "\\u003c"),
        policy=policy + ("; connect-src 'self'" if live else ""),
    )


def account(store: Store, name: str, first: Store) -> dict[str, Any]:
    """All numbers and texts of one run on the page; `first` is the run that the others are compared with."""
    recipe, done = store.load_recipe(), rounds(store)
    return {
        "name": name, "verdict": asdict(RunVerdict.of(store)),
        "algorithm": recipe.training.algorithm, "model": recipe.model.name, "data": recipe.data.source,
        "planned": recipe.training.rounds,
        "best": store.tuned,  # rounds of the tuned model, where a validation part chooses them
        "stopped": store.recall(STOPPED),  # the reason, where the run has ended early
        "notes": store.recall(NOTES) or [],  # on its data
        "rounds": done, "evaluations": evaluations(store, done),
        "against_first": None if store is first else against(store, first),
        "directions": directions(store, recipe.training.algorithm), "clients": holdings(store, done),
        "gains": stats.gains_table(gains_of(store)),  # of each client whose own rows were measured
        "recipe": recipe.to_toml(defaults=False), "defaults": store.recipe.read_text(encoding="utf-8"),
    }  # fmt: skip


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


def evaluations(store: Store, done: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All evaluations of a run, each with its changes from that of the base model."""
    by_rounds = {after: stats.Evaluation.of(table) for after, table in store.evaluations().items()}
    base = by_rounds.get(0, stats.NOT_EVALUATED)
    totals = {r["done"]: {key: r.get(key) for key in ("bytes", "seconds_total", "clock")} for r in done}
    totals[0] = {"bytes": 0, "seconds_total": 0.0, "clock": 0.0}
    return [
        {"done": after, **totals[after], **_scores(set_by_set(base if after else stats.NOT_EVALUATED, evaluation))}
        for after, evaluation in by_rounds.items()
        if after in totals
    ]


def _scores(sets: Sequence[SetScores]) -> dict[str, Any]:
    """The scores of the model after some rounds: loss and Rouge-L of the first set, and all others by name."""
    evaluation, changes = sets[0].after, sets[0].changes
    return {
        "examples": len(evaluation.losses),
        "loss": stats.estimate(evaluation.losses),
        "loss_change": changes.get("loss"),
        "rouge": stats.estimate(evaluation.rouge) if evaluation.rouge else None,
        "rouge_change": changes.get("rouge"),
        "answers": len(evaluation.empty),  # that were generated for Rouge-L
        "empty": sum(evaluation.empty),  # ones among them
        "others": {
            scores.name(metric): {
                "mean": stats.estimate(numbers),
                "change": scores.changes.get(metric),
                "count": stats.counted(metric, len(numbers)),
                "choices": _chosen(scores) if metric == "choice" else None,
            }
            for scores in sets
            for metric, numbers in scores.after.measures.items()
            if scores.set or metric not in ("loss", "rouge")
        },
        "written": evaluation.answers,  # the first ones, for people to read
    }


def _chosen(scores: SetScores) -> dict[str, Any] | None:
    """The choices of a model, and their test against the base model's."""
    choices, test = scores.after.choices, scores.test
    if not choices:
        return None
    label, share = stats.most_frequent(choices)
    return {
        "balanced": stats.balanced_accuracy(choices),
        "frequent": label,
        "share": share,
        "confusion": stats.Confusion.of(choices),
        "test": test and asdict(test) | {"p": test.p},
    }


def against(store: Store, first: Store) -> stats.Estimate | None:
    """Difference of the latest held-out loss from the first run's, if both were measured on the same examples."""
    scores, scores_of_first = store.evaluations(), first.evaluations()
    data, data_of_first = ((of.recall("identity") or {}).get("data of digest") for of in (store, first))
    if not (scores and scores_of_first) or data is None or data != data_of_first:
        return None
    last, last_of_first = (stats.Evaluation.of(of[max(of)]) for of in (scores, scores_of_first))
    return last.changes(last_of_first).get("loss")


def directions(store: Store, algorithm: str) -> dict[str, list[float]] | None:
    """The numbers of a K-seed run's latest state for each direction, to six digits; None before the first draw."""
    pooled = algorithm in ALGORITHMS and ALGORITHMS[algorithm].pooled
    state = store.state(State) if pooled else None
    if state is None or not state.counts.any():
        return None
    numbers = {"probabilities": importance(state), "coefficients": state.coefficients}
    digits = {name: [float(f"{number:.6g}") for number in array] for name, array in numbers.items()}
    return {"counts": state.counts.tolist(), **digits}


def holdings(store: Store, done: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The clients' data where it is known here, and the number of rounds in which each took part."""
    clients, rounds_of = store.recall("clients"), Counter(client for r in done for client in r["clients"])
    if not (clients or done):
        return None
    return {"names": [], **(clients or {}), "taken": [rounds_of[k] for k in range(clients_of(store))]}


def differences(stores: Sequence[Store]) -> dict[str, list[Any]]:
    """The keys in which the recipes differ, with the value of each run."""
    tables = [_flat(store.load_recipe().model_dump()) for store in stores]
    values = {key: [table.get(key) for table in tables] for key in dict.fromkeys(k for t in tables for k in t)}
    return {key: value for key, value in values.items() if any(v != value[0] for v in value)}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _asset(name: str) -> str:
    return (files("fedkseed.report") / "assets" / name).read_text(encoding="utf-8")
