"""Run an experiment of the paper and write its table and figure; finished runs are not repeated.

OUTPUT/runs/SCALE/LABEL-seed-SEED-HASH/   a run; the hash is that of its recipe, so that a changed recipe makes another
                                          run, and experiments with an equal recipe share one
OUTPUT/NAME/SCALE/                        table.md, table.csv, figure.png, figure.svg, about.json, by-round.md and
                                          by-round.csv where methods are compared with one of them, and of the runs:
                                          runs.md, runs.csv (a row each), runs.json and rounds.csv (see records.py)
"""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape as glob_escape
from importlib.metadata import version
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from .. import __version__
from ..errors import FedKSeedError
from ..files import border, locked, write_atomically
from ..recipe.algorithms import packages
from ..recipe.schema import Recipe
from ..report.bars import Bars
from ..round import Report
from ..run.progress import Silent
from ..run.round_metrics import METRICS
from ..run.simulation import resume, start
from ..run.store import STOPPED, Store
from . import bases, tiny_model
from . import run_records as recording
from .experiments import Choice, Experiment, Planned, fingerprint, merge, short
from .figures import save
from .microbenchmarks import MEASURED
from .results import MEASURES, SHARES, ResultTable, RunOutcome
from .tables import RUNS, WITHOUT_FIGURE, by_round


@dataclass(frozen=True, slots=True)
class Job:
    """A planned run with its recipe and directory."""

    planned: Planned
    recipe: Recipe
    directory: Path
    label: str
    recorded: RunOutcome | None = None  # its results, where a run of the same recipe is on record

    def outcome(self) -> RunOutcome | None:
        """The results of the run; None while the run is not finished."""
        if not (self.directory / "recipe.toml").is_file():
            return self.recorded
        store = Store(self.directory)
        if self.recipe.training.rounds not in store.evaluations() and store.recall(STOPPED) is None:
            return None
        return RunOutcome.read(self.directory, self.planned.axes, self.planned.seed)


class ExperimentProgress(Silent):
    """A watcher with one bar for the rounds of all runs, one for the present activity, and no line a round."""

    def __init__(self, bars: Bars) -> None:
        self.bars = bars

    def begin(self, what: str, total: int) -> None:
        self.bars.begin(what, total)

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.bars.advance(count, loss)

    def round_done(self, report: Report) -> None:
        self.bars.count_round(report.seconds)


def reproduce(
    experiment: Experiment,
    output: Path,
    given: Mapping[str, str],
    *,
    only: str = "",
    part: tuple[int, int] = (1, 1),
    records: Path | None = None,
    public: str | None = None,
    command: Sequence[str] = (),
) -> Path | None:
    """Carry out the remaining runs of an experiment, then write its table and figure.

    Args:
        given: paths for the recipes' `$places`.
        only: text that the labels of the runs to do contain.
        part: (i, n): do only every n-th run from the i-th, so that n processes can share the work; the table and
            figure are written by the call that finds all runs finished.
        records: a folder of results; runs that one of its experiments has records of are not done again.
        public: public instruction data to make the experiment's bases of, where none is given.
        command: the command line, for about.json.

    Returns:
        The folder of the table and figure; None while runs of other parts are not finished.

    Raises:
        FedKSeedError: a recipe can't be run, or a path is not given.
    """
    own = bases.PLACE in given  # a file of the user's is never made, where it is missing
    given = bases.placed(experiment, output, with_tiny(experiment.scale, output, given), public)
    _require_packages(experiment, given)
    folder = output / experiment.name / experiment.scale
    with border(f"can't make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    if experiment.output in MEASURED:
        return _measure(experiment, folder, given, command)
    if not own:
        bases.make(experiment, given, public)
    known = {} if records is None else recording.found(records, experiment.scale)
    choice, trials = experiment.choice, list[Job]()
    jobs: list[Job] | None
    if choice is None:
        jobs = _jobs(experiment, output, given, only, records=known)
    else:
        jobs, trials = _choose(experiment, choice, output, given, only, part, known)
    if jobs is None or run(jobs, part, trials=experiment.along_rates) is None:
        return None
    if experiment.output == "speed":  # the one table with a column for it
        done = (job for job in jobs if job.recorded is None)
        recording.note_memory((Store(job.directory), job.planned.axes, job.recipe) for job in done)
    finished = [(job, outcome) for job in jobs if (outcome := job.outcome()) is not None]
    if not finished:
        raise FedKSeedError(f"all runs of {experiment.name} ended with an error; see the lines above")
    outcomes = [outcome for _, outcome in finished]
    if experiment.output == "probabilities":
        outcomes = [recording.with_probabilities(outcome) for outcome in outcomes]
    recorded = list(zip(outcomes, (job.planned.table for job, _ in finished), strict=True))
    recording.require_one_model(recorded)
    table, draw = RUNS[experiment.output](experiment, outcomes)
    made_of = list(bases.described([job.recipe for job, _ in finished]))
    _write(experiment, folder, table, command, [outcome.directory.name for outcome in outcomes], made_of=made_of)
    _write_by_round(experiment, folder, outcomes)
    _runs(experiment, outcomes).write(folder, f"Runs of {experiment.name}", "runs")
    tried = [(outcome, job.planned.table) for job in trials if (outcome := job.outcome()) is not None]
    recording.keep(folder, recorded, tried)
    if draw is not None:
        save(draw, folder)
    return folder


def _require_packages(experiment: Experiment, given: Mapping[str, str]) -> None:
    """Refuse before the first run what would be refused after it, or after the tenth, for want of a package.

    Raises:
        FedKSeedError: one is not installed.
    """
    needed = {} if experiment.output in WITHOUT_FIGURE else {"matplotlib": "plots"}
    for planned in [] if experiment.output in MEASURED else experiment.plan([0]):
        needed |= packages(planned.recipe(given))
    for package, extra in needed.items():
        if find_spec(package) is None:
            raise FedKSeedError(
                f"{experiment.name} needs the package {package}: pip install 'fedkseed[{extra}]'; no run was begun"
            )


def redraw(experiment: Experiment, output: Path) -> Path:
    """Make an experiment's table and figure again from the records of its runs; about.json stays.

    Raises:
        FedKSeedError: the folder has no records, or the experiment's output is not made of what they hold.
    """
    folder = output / experiment.name / experiment.scale
    if experiment.output in MEASURED:
        raise FedKSeedError(f"{experiment.name} is measured, not run: it has no records of runs")
    outcomes = recording.kept(folder)
    table, draw = RUNS[experiment.output](experiment, outcomes)
    table.write(folder, f"{experiment.item}: {experiment.title}")
    _write_by_round(experiment, folder, outcomes)
    if draw is not None:
        save(draw, folder)
    return folder


def _write_by_round(experiment: Experiment, folder: Path, outcomes: Sequence[RunOutcome]) -> None:
    if (table := by_round(experiment, outcomes)) is not None:
        table.write(folder, f"{experiment.item}: {experiment.title}, by round", "by-round")


def with_tiny(scale: str, output: Path, given: Mapping[str, str]) -> Mapping[str, str]:
    """The paths given, and for the scale `tiny` also the path of its model, which is made if it is missing."""
    return (
        given
        if scale != "tiny" or "model" in given
        else {**given, "model": str(tiny_model.make(output / "models" / "tiny"))}
    )


def parts(text: str) -> tuple[int, int]:
    """The numbers (i, n) of a part written as I/N.

    Raises:
        FedKSeedError: the text has another form, or I is not from 1 to N.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise FedKSeedError(f"a part is written 1/4, 2/4, 3/4 or 4/4, got {text!r}")
    return int(found[1]), int(found[2])


def run(jobs: Sequence[Job], part: tuple[int, int] = (1, 1), *, trials: bool = False) -> list[RunOutcome] | None:
    """Finish the runs of a part, one by one.

    Args:
        trials: whether a run that began may fail: one whose rate is too high diverges.

    Returns:
        The results of all runs that did not fail; None if other parts have some left.
    """
    failed = set[Path]()
    mine = [job for number, job in enumerate(jobs) if number % part[1] == part[0] - 1]
    left = [job for job in mine if job.outcome() is None]
    with Bars(sum(job.recipe.training.rounds for job in left) or 1) as bars:
        for number, job in enumerate(left, 1):
            try:
                if (job.directory / "recipe.toml").is_file():
                    done = len(Store(job.directory).reports())
                    bars.bars.update(bars.rounds, advance=done)
                    resume(job.directory, ExperimentProgress(bars))
                else:
                    others = job.directory.parent.glob(f"*-seed-{job.planned.seed}-*")
                    start(_whole(job.recipe), job.directory, ExperimentProgress(bars), earlier=sorted(others))
            except FedKSeedError as error:
                begun = (job.directory / "recipe.toml").is_file()
                if not trials or not begun or locked(job.directory / "lock"):  # by another process, which may finish it
                    raise
                failed.add(job.directory)
                bars.note(f"{number:3} of {len(left)}   {job.label}, seed {job.planned.seed}: {error}")
                continue
            recording.note_commit(Store(job.directory))
            outcome = job.outcome()
            if outcome is None:
                raise FedKSeedError(f"{job.directory} ended without a result; remove it and try again")
            bars.note(
                f"{number:3} of {len(left)}   {job.label}, seed {job.planned.seed}: held-out loss "
                f"{outcome.loss[0]:.4f} → {outcome.loss[outcome.rounds]:.4f}, {outcome.seconds:.0f} s"
            )
    found = [job.outcome() for job in jobs if job.directory not in failed]
    known = [outcome for outcome in found if outcome is not None]
    return known if len(known) == len(found) else None


def _whole(recipe: Recipe) -> Recipe:
    """The recipe of a run that does all its rounds: a table compares equal numbers of them, diverged runs included."""
    return recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"stop_when_diverged": False})})


def _jobs(
    experiment: Experiment, output: Path, given: Mapping[str, str], only: str,
    seeds: Sequence[int] | None = None, fixed: Sequence[Mapping[str, Any]] = ({},),
    records: Mapping[str, RunOutcome] | None = None, over: Mapping[str, Any] = MappingProxyType({}),
) -> list[Job]:  # fmt: skip
    jobs = []
    for planned in (p for axes in fixed for p in experiment.plan(seeds, axes)):
        planned = replace(planned, table=merge(planned.table, over))
        label = experiment.label(planned.axes)
        if only.lower() not in label.lower():
            continue
        recipe = planned.recipe(given)
        name = re.sub(r"[^\w.]+", "-", label).strip("-").lower()[:80]
        folder, end = output / "runs" / experiment.scale, f"-seed-{planned.seed}-{fingerprint(recipe)}"
        known = sorted(folder.glob(f"*{glob_escape(end)}"))  # another experiment may have labelled the run otherwise
        recorded = (records or {}).get(recording.name_of(planned.table))
        if recorded is not None:  # maybe of an experiment with other axes
            bases.require_same(recipe, recorded)
            recorded = replace(recorded, axes=planned.axes)
        jobs.append(Job(planned, recipe, known[0] if known else folder / f"{name}{end}", label, recorded))
    if not jobs:
        raise FedKSeedError(f"{experiment.name} has no run whose label holds {only!r}")
    return jobs


def _choose(
    experiment: Experiment, choice: Choice, output: Path, given: Mapping[str, str], only: str,
    part: tuple[int, int], records: Mapping[str, RunOutcome] | None = None,
) -> tuple[list[Job] | None, list[Job]]:  # fmt: skip
    """The jobs with the best value of the chosen axis, and its trials; None if other parts have trials left.

    A value is out if one of its trials failed, or ended with a loss that is no number.

    Raises:
        FedKSeedError: all values of a combination are out.
    """
    others = [axis for axis in experiment.axes if axis != choice.axis]
    seeds = range(experiment.seeds, experiment.seeds + choice.seeds)
    jobs = _jobs(experiment, output, given, only, seeds, records=records, over=choice.recipe)
    trials = run(jobs, part, trials=True)
    if trials is None:
        return None, []
    losses: dict[tuple[Any, ...], dict[Any, list[float]]] = {}
    least: dict[tuple[Any, ...], Any] = {}
    for o in trials:
        of = losses.setdefault(tuple(o.axes[a] for a in others), {})
        of.setdefault(o.axes[choice.axis], []).append(o.loss[o.rounds] - o.loss[0])
    for job in jobs:
        values = tuple(job.planned.axes[a] for a in others)
        found = {
            value: fmean(changes)
            for value, changes in losses.get(values, {}).items()
            if len(changes) == choice.seeds and isfinite(sum(changes))
        }
        if not found:
            raise FedKSeedError(f"{job.label}: no value of {choice.axis} ended with a loss; give it smaller ones")
        least[values] = min(found, key=lambda value: found[value])
    best = [{**dict(zip(others, values, strict=True)), choice.axis: value} for values, value in least.items()]
    return _jobs(experiment, output, given, only, fixed=best, records=records), jobs


def _measure(experiment: Experiment, folder: Path, given: Mapping[str, str], command: Sequence[str]) -> Path:
    """Write the table and figure of a microbenchmark, with rows measured earlier if they had the same options."""
    kind, file = MEASURED[experiment.output], folder / "measured.json"
    of = json.loads(json.dumps([experiment.options, [p.table for p in experiment.plan([0])]]))
    known = json.loads(file.read_text()) if file.is_file() else {}
    if known.get("of") != of or "commit" not in known:  # older files have one time of each
        with Bars(1) as bars:
            known = {"of": of, "commit": recording.commit(), "rows": kind.gather(experiment, given, bars.note)}
        write_atomically(file, json.dumps(known, ensure_ascii=False, indent=1).encode(), 0o666)
    table, draw = kind.show(experiment, known["rows"])
    _write(experiment, folder, table, command, [], commit=known.get("commit"))
    if draw is not None:
        save(draw, folder)
    return folder


def _write(
    experiment: Experiment, folder: Path, table: ResultTable, command: Sequence[str], runs: Sequence[str], *,
    commit: str | None = None, made_of: Sequence[Mapping[str, Any]] = (),
) -> None:  # fmt: skip
    table.write(folder, f"{experiment.item}: {experiment.title}")
    about = {
        "experiment": experiment.name,
        "item": experiment.item,
        "scale": experiment.scale,
        "seeds": experiment.seeds,
        "command": " ".join(Path(word).name if Path(word).is_absolute() else word for word in command),
        "commit": commit or recording.commit(),
        "versions": {
            "fedkseed": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "numba", "numpy")},
        },
        "machine": platform.machine(),
        **({"bases": list(made_of)} if made_of else {}),
        "runs": list(runs),
    }
    write_atomically(folder / "about.json", json.dumps(about, indent=1, ensure_ascii=False).encode(), 0o666)


def _runs(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> ResultTable:
    """A table with one row a run."""
    return ResultTable(
        [
            {
                **{short(axis): experiment.title_of(axis, value) for axis, value in o.axes.items()},
                "seed": o.seed,
                "loss before": o.loss[0],
                "loss after": o.loss[o.rounds],
                "Rouge-L before": o.rouge.get(0),
                "Rouge-L after": o.rouge.get(o.rounds),
                **_shares(o),
                "bytes down": o.bytes_down,
                "bytes up": o.bytes_up,
                "seconds": o.seconds,
                **_most(o),
                "run": o.directory.name,
            }
            for o in outcomes
        ]
    )


def _shares(outcome: RunOutcome) -> dict[str, float]:
    """The measures in percent that were taken, before and after."""
    at = {"before": 0, "after": outcome.rounds}
    found = {f"{MEASURES[n][0]} {when}": MEASURES[n][1](outcome, done) for n in SHARES for when, done in at.items()}
    return {title: value for title, value in found.items() if value is not None}


def _most(outcome: RunOutcome) -> dict[str, float]:
    """The largest value of every metric that is not always shown, where a round has one that is not zero."""
    found = {metric.title: outcome.metrics.get(metric.name, {}).values() for metric in METRICS if not metric.always}
    return {f"{title}, most": max(values) for title, values in found.items() if any(values)}
