"""Records of an experiment's runs, kept in its folder, of which its table and figure can be drawn again.

runs.json    a run each: axes, seed, recipe, commits of the code, digests of directions, model and data
rounds.csv   a row for each run and number of finished rounds: losses, Rouge-L, seconds and every metric
"""

import csv
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import FedKSeedError
from ..files import border, write_atomically
from ..planning.compare import measure
from ..recipe.schema import Recipe
from ..run.store import Store
from ..strategies.kseed import State, importance
from .results import MEMORY, RunOutcome, csv_of

RUNS_FILE, ROUNDS_FILE = "runs.json", "rounds.csv"
# Fields of `RunOutcome` in runs.json, and those in rounds.csv beside the metrics, by the number of rounds.
RUN_FIELDS = ("axes", "seed", "commits", "digests", "bytes_down", "bytes_up", "memory")
SERIES = ("loss", "rouge", "clock", "virtual", "steps")
MODEL = "a base model of digest"
# Digests that two runs share if they share these tables of their recipes, and the seed.
DIGESTED = {MODEL: ("model",), "data of digest": ("model", "data", "clients")}
PRO_FIELDS = ("probabilities", "never_drawn")  # of runs of FedKSeed-Pro, where an experiment shows them
HELD_OUT = "held-out/"  # the columns of evaluations' metrics begin with it


def note_memory(jobs: Iterable[tuple[Store, Mapping[str, Any], Recipe]]) -> None:
    """Write into each run's store which memory a client needs, measured once for runs that differ by the seed alone.

    Args:
        jobs: of each run its store, its axes and its recipe.
    """
    measured: dict[str, int] = {}  # axes -> bytes
    for store, axes, recipe in jobs:
        key = json.dumps(axes, sort_keys=True)
        memory = store.recall(MEMORY) or measured.get(key) or measure(recipe, recipe.training.algorithm).peak_memory
        measured.setdefault(key, memory)
        store.remember(MEMORY, memory)


def with_probabilities(outcome: RunOutcome) -> RunOutcome:
    """The outcome with the probabilities of its run's directions; FedKSeedError where its store has no state."""
    if outcome.probabilities is not None:
        return outcome
    if (state := Store(outcome.directory).state(State)) is None:
        raise FedKSeedError(f"{outcome.directory} has no state")
    return replace(outcome, probabilities=importance(state).tolist(), never_drawn=int((state.counts == 0).sum()))


def commit() -> str | None:
    """The git commit of the code; None outside a git checkout."""
    try:
        here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603 — fixed words
    except (OSError, subprocess.SubprocessError):
        return None


# A run, and its recipe as planned, where paths are names like $model.
Recorded: TypeAlias = tuple[RunOutcome, Mapping[str, Any]]


def write_records(folder: Path, outcomes: Iterable[Recorded], trials: Iterable[Recorded] = ()) -> None:
    """Write the records of finished runs.

    Args:
        trials: runs of a search whose best value the others use; their losses alone are kept.
    """
    runs, rounds = [], list[dict[str, Any]]()
    for outcome, recipe in outcomes:
        run = {"run": outcome.directory.name, **{name: getattr(outcome, name) for name in RUN_FIELDS}, "recipe": recipe}
        run |= {"once": outcome.once}
        runs.append(run | {name: v for name in PRO_FIELDS if (v := getattr(outcome, name)) is not None})
        columns = {name: getattr(outcome, name) for name in SERIES}
        columns |= {f"{HELD_OUT}{name}": series for name, series in outcome.scores.items()} | outcome.metrics
        for done in sorted(outcome.clock):
            numbers = {name: series.get(done) for name, series in columns.items()}
            rounds.append({"run": outcome.directory.name, "done": done, **numbers})
    ends = [(outcome, outcome.searched_loss, recipe) for outcome, recipe in trials]
    searched = [{"axes": o.axes, "seed": o.seed, "loss": loss, "recipe": recipe} for o, loss, recipe in ends]
    text = json.dumps({"runs": runs, "searched": searched}, indent=1, ensure_ascii=False)
    write_atomically(folder / RUNS_FILE, text.encode(), 0o666)
    write_atomically(folder / ROUNDS_FILE, csv_of(rounds).encode(), 0o666)


def read_records(folder: Path) -> list[RunOutcome]:
    """The runs of which an experiment's folder has records; FedKSeedError where it has none, or they are damaged."""
    return [outcome for _, outcome in _read(folder)[0]]


def read_all(results: Path, scale: str) -> dict[str, RunOutcome]:
    """The runs and trials of all experiments at a scale that a folder of results has records of, by `recipe_key`."""
    recorded: dict[str, RunOutcome] = {}
    for folder in sorted(path.parent for path in results.glob(f"*/{scale}/{RUNS_FILE}")):
        runs, trials = _read(folder)
        recorded = dict(trials) | recorded | dict(runs)
    if not recorded:
        raise FedKSeedError(f"{results} has no records of runs at the scale {scale} (*/{scale}/{RUNS_FILE})")
    return recorded


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """A name that two runs share if one can stand for the other: their planned recipe as text, seed included."""
    return json.dumps(recipe, sort_keys=True)


def require_one_model(outcomes: Sequence[Recorded]) -> None:
    """Refuse to compare runs with unlike digests of base models or data, where their recipes are alike there."""
    for what, parts in DIGESTED.items():
        first: dict[str, RunOutcome] = {}
        for outcome, recipe in outcomes:
            like = json.dumps([outcome.seed, *(recipe.get(part) for part in parts)], sort_keys=True)
            if what == MODEL:
                like += recipe["training"]["algorithm"]  # an adapter's weights are part of its base model
            other = first.setdefault(like, outcome)
            mine, theirs = ((o.digests or {}).get(what) for o in (outcome, other))
            if mine is not None and theirs is not None and mine != theirs:
                raise FedKSeedError(
                    f"{outcome.directory.name} has {what} {mine}, {other.directory.name} {theirs}: runs of one "
                    "experiment need the same; give the model and data that the records were made with"
                )


def _read(folder: Path) -> tuple[list[tuple[str, RunOutcome]], list[tuple[str, RunOutcome]]]:
    """The runs and the trials of which an experiment's folder has records, each with its `recipe_key`."""
    with border(f"{folder} has no records to draw from ({RUNS_FILE} and {ROUNDS_FILE})"):
        texts = [(folder / name).read_text() for name in (RUNS_FILE, ROUNDS_FILE)]
    runs, trials = [], []
    try:
        tree, rows = json.loads(texts[0]), list(csv.DictReader(texts[1].splitlines()))
        for run in tree["runs"]:
            of_run = [row for row in rows if row["run"] == run["run"]]
            runs.append((recipe_key(run["recipe"]), _run_of(folder, run, of_run)))
        for trial in tree["searched"]:
            if recipe := trial.get("recipe"):  # older records have none, and can't be matched
                before, after = trial["loss"]
                loss: dict[int, float] = {0: before, recipe["training"]["rounds"]: after}
                other: Any = {"rouge": {}, "clock": {}, "virtual": {}, "bytes_down": 0, "bytes_up": 0, "memory": None}
                outcome = RunOutcome(trial["axes"], trial["seed"], loss, directory=folder / "trial", **other)
                trials.append((recipe_key(recipe), outcome))
    except (LookupError, TypeError, ValueError) as damage:
        raise FedKSeedError(f"the records in {folder} are damaged: {damage!r}") from None
    return runs, trials


def _run_of(folder: Path, run: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> RunOutcome:
    def column(name: str) -> dict[int, float]:
        numbers = {int(row["done"]): row[name] for row in rows if row.get(name)}  # older records lack some
        # a count stays one, so that it is written as it was read
        return {done: int(text) if text.isdigit() else float(text) for done, text in numbers.items()}

    metrics = [name for name in rows[0] if name not in ("run", "done", *SERIES)]
    return RunOutcome(
        directory=folder / run["run"],  # of which only the name is there
        **{name: column(name) for name in SERIES},
        metrics={name: column(name) for name in metrics if not name.startswith(HELD_OUT)},
        scores={name.removeprefix(HELD_OUT): column(name) for name in metrics if name.startswith(HELD_OUT)},
        **{name: run[name] for name in RUN_FIELDS},
        once=run.get("once", None if "basis" in run["recipe"].get("directions", {}) else 0),  # older ones have none
        **{name: run[name] for name in PRO_FIELDS if name in run},
    )
