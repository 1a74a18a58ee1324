"""A recorded run of each experiment, done again and compared with its record number by number.

    python benchmarks/again.py results/goals/stories … [--run NAME] [--model FOLDER] [--basis FILE]
        [--natural-instructions FOLDER] [--json]

A folder holds runs.json and rounds.csv, as `fedkseed reproduce` writes them. Of its runs the one is taken that took the
least time, of those whose name contains NAME and whose paths are given. Its recipe is run with the code and libraries
that are here. Compared are all that the record has of every round: losses and metrics of evaluations, local losses,
scalars, bytes, cohorts; and the digests of directions, base model and data. Seconds are not. Of each kind that differs
the row says how many do, and by how much at most. The exit status is 1 if a number differs.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedkseed.errors import FedKSeedError
from fedkseed.paper.experiments import Planned
from fedkseed.paper.results import RunOutcome
from fedkseed.paper.run_records import RUNS_FILE, read_records
from fedkseed.run.start_and_resume import start
from table import Row, new_parser, show

PLACES = ("model", "basis", "natural-instructions", "dolly")
AFTER = " after "


def again(folder: Path, name: str, places: Mapping[str, str]) -> Row:
    """Run a recorded run again; the row tells how many numbers were compared, and for each kind how far they differ."""
    recorded = {outcome.directory.name: outcome for outcome in read_records(folder)}
    trees = {tree["run"]: tree["recipe"] for tree in json.loads((folder / RUNS_FILE).read_text())["runs"]}
    lacking = {
        run: {f"${place}" for place in PLACES if place not in places and f'"${place}' in json.dumps(trees[run])}
        for run in recorded
        if name in run
    }
    if not lacking:
        raise FedKSeedError(f"{folder} has no run whose name contains {name!r}; there are {', '.join(recorded)}")
    run = min(lacking, key=lambda one: (len(lacking[one]), recorded[one].seconds))
    record = recorded[run]
    with TemporaryDirectory() as scratch:
        start(Planned(record.axes, record.seed, trees[run]).recipe(places), Path(scratch) / "run")
        found = RunOutcome.read(Path(scratch) / "run", record.axes, record.seed)
    theirs, mine = dict(numbers(record)), dict(numbers(found))
    differ = [key for key, value in theirs.items() if mine.get(key) != value]
    return {
        "experiment": f"{folder.parent.name} ({folder.name})", "run": run, "rounds": record.rounds,
        "numbers": len(theirs), "differ": len(differ), "in": "; ".join(kinds(theirs, mine, differ)),
        "seconds": found.seconds, "seconds on record": record.seconds,
    }  # fmt: skip


def kinds(theirs: Mapping[str, Any], mine: Mapping[str, Any], differ: Sequence[str]) -> Iterator[str]:
    """A phrase for each kind of numbers that differ: how many do, by what part of themselves at most, and the first."""
    groups: dict[str, list[str]] = {}
    for key in differ:
        groups.setdefault(key.partition(AFTER)[0], []).append(key)
    for kind, keys in groups.items():
        of = sum(key.partition(AFTER)[0] == kind for key in theirs)
        pairs = [(theirs[key], mine.get(key)) for key in keys]
        parts = [abs(1 - here / there) for there, here in pairs if there and isinstance(here, int | float)]
        most = f", by at most {max(parts):.0e} of it" if len(parts) == len(pairs) else ""
        yield f"{kind}: {len(keys)} of {of}{most}, {keys[0]}: {pairs[0][0]} on record, {pairs[0][1]} now"


def numbers(outcome: RunOutcome) -> Iterator[tuple[str, Any]]:
    """All that a run's record says of its result: names and values."""
    yield "bytes down", outcome.bytes_down
    yield "bytes up", outcome.bytes_up
    yield from (outcome.digests or {}).items()
    by_round = {"loss": outcome.loss, "rouge": outcome.rouge, "virtual time": outcome.virtual}
    by_round |= {f"held-out {metric}": found for metric, found in outcome.scores.items()}
    by_round |= {metric: found for metric, found in outcome.metrics.items() if "seconds" not in metric}
    for metric, found in by_round.items():
        yield from ((f"{metric}{AFTER}{done}", value) for done, value in found.items() if not isnan(value))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--run", default="", help="part of the name of the run; default: the one that took least time")
    for place in PLACES:
        parser.add_argument(f"--{place}", help=f"what stands in recorded recipes as ${place}")
    options = vars(parser.parse_args())
    places = {place: value for place in PLACES if (value := options[place.replace("-", "_")]) is not None}
    rows: list[Row] = []
    for folder in options["folders"]:
        rows.append(again(folder, options["run"], places))
        if os.isatty(2):
            print(f"{folder}: {rows[-1]['differ']} of {rows[-1]['numbers']} differ", file=sys.stderr)
    show("recorded runs, done again", rows, as_json=options["json"])
    sys.exit(any(row["differ"] for row in rows))


if __name__ == "__main__":
    main()
