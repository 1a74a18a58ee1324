"""Records of an experiment's runs, kept in its folder, of which its table and figure can be drawn again.

Runs that are recorded need not be done again when an experiment gets another method or another data set: `found`.

runs.json    a run each: axes, seed, recipe, commits of the code, digests of directions, model and data
rounds.csv   a row for each run and number of finished rounds: losses, Rouge-L, seconds and every metric
"""

import csv
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..files import border, write_atomically
from ..planning.compare import measure
from ..recipe.schema import Recipe
from ..run.store import Store
from ..strategies.kseed import State, importance
from .results import COMMITS, MEMORY, RunOutcome

RUNS, ROUNDS = "runs.json", "rounds.csv"
# Columns of rounds.csv beside the metrics: fields of `RunOutcome` that are dictionaries by the number of rounds.
COLUMNS = ("loss", "rouge", "clock", "virtual")
MODEL = "a base model of digest"
# Digests that two runs share if they share these tables of their recipes, and the seed.
DIGESTED = {MODEL: ("model",), "data of digest": ("model", "data", "clients")}
DRAWN = ("probabilities", "never_drawn")  # fields of runs of FedKSeed-Pro, where an experiment shows them
HELD_OUT = "held-out/"  # begins the columns of metrics of evaluations


def note_commit(store: Store) -> None:
    """Write into a run's store which commit of the code has worked on it."""
    known = store.recall(COMMITS) or []
    if (found := commit()) not in known:
        store.remember(COMMITS, [*known, found])


def note_memory(jobs: Iterable[tuple[Store, Mapping[str, Any], Recipe]]) -> None:
    """Write into each run's store which memory a client needs, measured once for runs that differ by the seed alone.

    Args:
        jobs: of each run its store, its axes and its recipe.
    """
    measured: dict[str, int] = {}
    for store, axes, recipe in jobs:
        key = json.dumps(axes, sort_keys=True)
        known = store.recall(MEMORY) or measured.get(key) or measure(recipe, recipe.training.algorithm).peak_memory
        measured.setdefault(key, known)
        store.remember(MEMORY, known)


def with_probabilities(outcome: RunOutcome) -> RunOutcome:
    """The outcome with the probabilities of its run's directions, which its server's state has.

    Raises:
        FedKSeedError: the run has no such state, as one that its records alone are left of.
    """
    if outcome.probabilities is not None:
        return outcome
    state = Store(outcome.directory).state(State)
    if state is None:
        raise FedKSeedError(f"{outcome.directory} has no state")
    never = int((state.counts == 0).sum())
    return replace(outcome, probabilities=importance(state).tolist(), never_drawn=never)


def commit() -> str | None:
    """The git commit of the code; None outside a git checkout."""
    try:
        here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603 — fixed words
    except (OSError, subprocess.SubprocessError):
        return None


Recorded = tuple[RunOutcome, Mapping[str, Any]]  # a run, and its recipe as planned, where paths are names like $model


def keep(folder: Path, outcomes: Iterable[Recorded], trials: Iterable[Recorded] = ()) -> None:
    """Write the records of finished runs.

    Args:
        trials: runs of a search whose best value the others use; their losses alone are kept.
    """
    made, rounds = [], list[dict[str, Any]]()
    for outcome, recipe in outcomes:
        made.append(
            {
                "run": outcome.directory.name,
                "axes": outcome.axes,
                "seed": outcome.seed,
                "commits": outcome.commits,
                "digests": outcome.digests,
                "bytes_down": outcome.bytes_down,
                "bytes_up": outcome.bytes_up,
                "memory": outcome.memory,
                "recipe": recipe,
            }
            | {name: found for name in DRAWN if (found := getattr(outcome, name)) is not None}
        )
        for done in sorted(outcome.clock):
            row: dict[str, Any] = {"run": outcome.directory.name, "done": done}
            row |= {name: getattr(outcome, name).get(done) for name in COLUMNS}
            row |= {f"{HELD_OUT}{name}": found.get(done) for name, found in outcome.scores.items()}
            rounds.append(row | {name: found.get(done) for name, found in outcome.metrics.items()})
    searched = [
        {"axes": o.axes, "seed": o.seed, "loss": [o.loss[0], o.loss[o.rounds]], "recipe": recipe}
        for o, recipe in trials
    ]
    text = json.dumps({"runs": made, "searched": searched}, indent=1, ensure_ascii=False)
    write_atomically(folder / RUNS, text.encode(), 0o666)
    lines = StringIO()
    writer = csv.DictWriter(lines, list(dict.fromkeys(name for row in rounds for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rounds)
    write_atomically(folder / ROUNDS, lines.getvalue().encode(), 0o666)


def kept(folder: Path) -> list[RunOutcome]:
    """The runs of which an experiment's folder has records.

    Raises:
        FedKSeedError: there are none, or they are damaged.
    """
    with border(f"{folder} has no records to draw from ({RUNS} and {ROUNDS})"):
        runs = json.loads((folder / RUNS).read_text())["runs"]
        rows = list(csv.DictReader((folder / ROUNDS).read_text().splitlines()))
    with _undamaged(folder):
        return [_outcome(folder, run, [row for row in rows if row["run"] == run["run"]]) for run in runs]


def found(results: Path, scale: str) -> dict[str, RunOutcome]:
    """The runs and trials of all experiments at a scale that a folder of results has records of, by `name_of`.

    Raises:
        FedKSeedError: there are none, or some are damaged.
    """
    known: dict[str, RunOutcome] = {}
    for folder in sorted(path.parent for path in results.glob(f"*/{scale}/{RUNS}")):
        outcomes = kept(folder)
        tree = json.loads((folder / RUNS).read_text())
        with _undamaged(folder):
            known |= {name_of(run["recipe"]): outcome for run, outcome in zip(tree["runs"], outcomes, strict=True)}
            for trial in tree["searched"]:
                if recipe := trial.get("recipe"):  # older records have none, and can't be matched
                    known.setdefault(name_of(recipe), _trial(folder, trial, recipe["training"]["rounds"]))
    if not known:
        raise FedKSeedError(f"{results} has no records of runs at the scale {scale} (*/{scale}/{RUNS})")
    return known


def name_of(recipe: Mapping[str, Any]) -> str:
    """A name that two runs share if one can stand for the other: their planned recipe as text, seed included."""
    return json.dumps(recipe, sort_keys=True)


def require_one_model(outcomes: Sequence[Recorded]) -> None:
    """Refuse to compare runs that began at unlike base models or had unlike data, where their recipes are alike there.

    Raises:
        FedKSeedError: digests differ.
    """
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


@contextmanager
def _undamaged(folder: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as damage:
        raise FedKSeedError(f"the records in {folder} are damaged: {damage!r}") from None


def _trial(folder: Path, trial: Mapping[str, Any], rounds: int) -> RunOutcome:
    before, after = trial["loss"]
    return RunOutcome(
        axes=trial["axes"], seed=trial["seed"], loss={0: before, rounds: after}, rouge={}, bytes_down=0, bytes_up=0,
        clock={}, virtual={}, memory=None, directory=folder / "trial",
    )  # fmt: skip


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)  # a count stays one, so that it is written as it was read


def _outcome(folder: Path, run: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> RunOutcome:
    def column(name: str) -> dict[int, float]:
        return {int(row["done"]): _number(row[name]) for row in rows if row[name]}

    others = [name for name in rows[0] if name not in ("run", "done", *COLUMNS)]
    return RunOutcome(
        axes=run["axes"],
        seed=run["seed"],
        bytes_down=run["bytes_down"],
        bytes_up=run["bytes_up"],
        memory=run["memory"],
        directory=folder / run["run"],  # of which only the name is there
        commits=run["commits"],
        digests=run["digests"],
        **{name: run[name] for name in DRAWN if name in run},
        metrics={name: column(name) for name in others if not name.startswith(HELD_OUT)},
        scores={name.removeprefix(HELD_OUT): column(name) for name in others if name.startswith(HELD_OUT)},
        loss=column("loss"),
        rouge=column("rouge"),
        clock=column("clock"),
        virtual=column("virtual"),
    )
