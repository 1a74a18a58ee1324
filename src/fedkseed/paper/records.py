"""Records of an experiment's runs, kept in its folder, of which its table and figure can be drawn again.

runs.json    a run each: axes, seed, recipe, commits of the code, digests of directions, model and data
rounds.csv   a row for each run and number of finished rounds: losses, Rouge-L, seconds and every metric
"""

import csv
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import FedKSeedError
from ..files import border, write_atomically
from ..recipe.schema import Recipe
from ..run.store import Store
from ..tools.compare import measure
from .results import MEMORY, Outcome

RUNS, ROUNDS = "runs.json", "rounds.csv"
COMMITS = "commits"  # the fact of a run's store with the commits of the code that worked on it
# Columns of rounds.csv beside the metrics: fields of `Outcome` that are dictionaries by the number of rounds.
COLUMNS = ("loss", "rouge", "clock", "virtual")
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


def commit() -> str | None:
    """The git commit of the code; None outside a git checkout."""
    try:
        here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        return subprocess.run(here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()  # noqa: S603 — fixed words
    except (OSError, subprocess.SubprocessError):
        return None


def keep(folder: Path, outcomes: Iterable[tuple[Outcome, Mapping[str, Any]]], trials: Iterable[Outcome] = ()) -> None:
    """Write the records of finished runs.

    Args:
        outcomes: with the recipe of each as the experiment plans it, in which paths are names like $model.
        trials: runs of a search whose best value the others use; their losses alone are kept.
    """
    made, rounds = [], list[dict[str, Any]]()
    for outcome, recipe in outcomes:
        store = Store(outcome.directory)
        made.append(
            {
                "run": outcome.directory.name,
                "axes": outcome.axes,
                "seed": outcome.seed,
                "commits": store.recall(COMMITS),
                "digests": store.recall("identity"),
                "bytes_down": outcome.bytes_down,
                "bytes_up": outcome.bytes_up,
                "memory": outcome.memory,
                "recipe": recipe,
            }
        )
        for done in sorted(outcome.clock):
            row: dict[str, Any] = {"run": outcome.directory.name, "done": done}
            row |= {name: getattr(outcome, name).get(done) for name in COLUMNS}
            row |= {f"{HELD_OUT}{name}": found.get(done) for name, found in outcome.scores.items()}
            rounds.append(row | {name: found.get(done) for name, found in outcome.metrics.items()})
    searched = [{"axes": o.axes, "seed": o.seed, "loss": [o.loss[0], o.loss[o.rounds]]} for o in trials]
    text = json.dumps({"runs": made, "searched": searched}, indent=1, ensure_ascii=False)
    write_atomically(folder / RUNS, text.encode(), 0o666)
    lines = StringIO()
    writer = csv.DictWriter(lines, list(dict.fromkeys(name for row in rounds for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rounds)
    write_atomically(folder / ROUNDS, lines.getvalue().encode(), 0o666)


def kept(folder: Path) -> list[Outcome]:
    """The runs of which an experiment's folder has records.

    Raises:
        FedKSeedError: there are none, or they are damaged.
    """
    with border(f"{folder} has no records to draw from ({RUNS} and {ROUNDS})"):
        runs = json.loads((folder / RUNS).read_text())["runs"]
        rows = list(csv.DictReader((folder / ROUNDS).read_text().splitlines()))
    try:
        return [_outcome(folder, run, [row for row in rows if row["run"] == run["run"]]) for run in runs]
    except (LookupError, TypeError, ValueError) as damage:
        raise FedKSeedError(f"the records in {folder} are damaged: {damage!r}") from None


def _outcome(folder: Path, run: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Outcome:
    def column(name: str) -> dict[int, float]:
        return {int(row["done"]): float(row[name]) for row in rows if row[name]}

    others = [name for name in rows[0] if name not in ("run", "done", *COLUMNS)]
    return Outcome(
        axes=run["axes"],
        seed=run["seed"],
        bytes_down=run["bytes_down"],
        bytes_up=run["bytes_up"],
        memory=run["memory"],
        directory=folder / run["run"],  # of which only the name is there
        metrics={name: column(name) for name in others if not name.startswith(HELD_OUT)},
        scores={name.removeprefix(HELD_OUT): column(name) for name in others if name.startswith(HELD_OUT)},
        loss=column("loss"),
        rouge=column("rouge"),
        clock=column("clock"),
        virtual=column("virtual"),
    )
