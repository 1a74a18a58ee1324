"""Run an experiment of the paper and write its table and figure; finished runs are not repeated.

OUTPUT/runs/SCALE/LABEL-seed-SEED-HASH/   a run; the hash is that of its recipe, so that a changed recipe makes another
                                          run, and experiments with an equal recipe share one
OUTPUT/NAME/SCALE/                        table.md, table.csv, figure.png, figure.svg, about.json, by-round.md and
                                          by-round.csv where methods are compared with one of them, and of the runs:
                                          runs.md, runs.csv (a row each), runs.json and rounds.csv (see run_records.py)
"""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import __version__
from ..errors import FedKSeedError
from ..files import border, locked, write_atomically
from ..recipe.algorithms import algorithm_of
from ..recipe.rules import require_packages
from ..recipe.schema import Recipe
from ..report.bars import Bars
from ..round import Report
from ..run.progress import Silent
from ..run.round_metrics import METRICS
from ..run.start_and_resume import resume, start
from ..run.store import STOPPED, Store
from . import run_records, tiny_model
from .experiment_bases import (
    BASIS_PLACE,
    all_places,
    describe_bases,
    make_bases,
    require_basis_of_record,
    tiny_place,
)
from .experiments import Choice, Experiment, Planned, Tree, fingerprint, options_of, short
from .microbenchmarks import MEASURED
from .outputs import OUTPUTS, DrawFigure, save
from .results import COMMITS, MEASURES, SHARES, Cell, ResultTable, RunOutcome, group
from .tables import Comparison, ComparisonOptions, by_round


@dataclass(frozen=True)
class Reproduction:
    """A request for the runs of an experiment, and for its table and figure."""

    experiment: Experiment
    output: Path
    given: Mapping[str, str] = field(default_factory=dict)  # paths for the recipes' `$places`
    only: str = ""  # text that the labels of the runs to do contain
    # (i, n): do only every n-th run from the i-th; who finds all runs finished writes the table and figure
    part: tuple[int, int] = (1, 1)
    records: Path | None = None  # a folder of results, whose runs are not done again
    public: str | None = None  # public instruction data to make the experiment's bases of, where none is given
    command: Sequence[str] = ()  # the command line, for about.json

    @property
    def folder(self) -> Path:
        return self.output / self.experiment.name / self.experiment.scale

    @cached_property
    def recorded(self) -> Mapping[str, RunOutcome]:
        """The runs that are on record, by `run_records.recipe_key`."""
        return {} if self.records is None else run_records.read_all(self.records, self.experiment.scale)


@dataclass(frozen=True, slots=True)
class Job:
    """A planned run with its recipe and directory."""

    planned: Planned
    recipe: Recipe
    directory: Path
    label: str
    recorded: RunOutcome | None = None  # its results, where a run of the same recipe is on record

    @property
    def begun(self) -> bool:
        return (self.directory / "recipe.toml").is_file()

    def outcome(self) -> RunOutcome | None:
        """The results of the run; None while the run is not finished."""
        if not self.begun:
            return self.recorded
        store = Store(self.directory)
        if self.recipe.training.rounds not in store.evaluations() and store.recall(STOPPED) is None:
            return None
        return RunOutcome.read(self.directory, self.planned.axes, self.planned.seed)


class ExperimentProgress(Silent):
    """A watcher with one bar for the rounds of all runs, one for the present activity, and no line a round."""

    def __init__(self, bars: Bars) -> None:
        self.bars, self.begin, self.advance = bars, bars.begin, bars.advance

    def round_done(self, report: Report) -> None:
        self.bars.count_round(report.seconds)


def reproduce(asked: Reproduction) -> Path | None:
    """Carry out the remaining runs of an experiment, then write its table and figure.

    Returns:
        The folder of the table and figure; None while runs of other parts are not finished.
    """
    experiment, output = asked.experiment, asked.output
    wanted = replace(asked, given=all_places(experiment, output, asked.given, asked.public))
    # refused before anything is made, and not after the tenth run
    if (OUTPUTS | MEASURED)[experiment.output].figure is not None and find_spec("matplotlib") is None:
        raise FedKSeedError(f"{experiment.name} draws a figure: pip install 'fedkseed[plots]'; no run was begun")
    for recipe in experiment.recipes(wanted.given, wanted.only):
        require_packages(recipe, algorithm_of(recipe.training.algorithm))
    if experiment.scale == "tiny" and "model" not in asked.given:
        tiny_model.make(tiny_place(output))
    with border(f"can't make {wanted.folder}"):
        wanted.folder.mkdir(parents=True, exist_ok=True)
    if experiment.output in MEASURED:
        return _measure(wanted)
    options_of(ComparisonOptions, experiment)  # an unknown one is refused before the first run
    if BASIS_PLACE not in asked.given:  # a file of the user's is never made, where it is missing
        make_bases(experiment, wanted.given, asked.public)
    trials, best = _search(wanted, experiment.choice) if experiment.choice else ([], [{}])
    jobs = None if best is None else make_jobs(wanted, fixed=best)
    if jobs is None or run(jobs, wanted.part, may_fail=experiment.along_rates) is None:
        return None
    return _write_results(wanted, jobs, trials)


def parts(text: str) -> tuple[int, int]:
    """The numbers (i, n) of a part written as I/N; FedKSeedError where the text is none, or I not from 1 to N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise FedKSeedError(f"a part is written 1/4, 2/4, 3/4 or 4/4, got {text!r}")
    return int(match[1]), int(match[2])


def make_jobs(
    wanted: Reproduction,
    *,
    seeds: Sequence[int] | None = None,
    fixed: Sequence[Tree] = ({},),
    trial_of: Choice | None = None,
) -> list[Job]:
    """The runs of an experiment that agree with a combination of `fixed`, or their trials for a choice."""
    jobs, folder = [], wanted.output / "runs" / wanted.experiment.scale
    for planned in (run for axes in fixed for run in wanted.experiment.plan(seeds, axes)):
        if trial_of is not None:
            planned = replace(planned, table=trial_of.trial(planned.table))
        label = wanted.experiment.label(planned.axes)
        if wanted.experiment.holds(wanted.only, planned.axes):
            recipe = planned.recipe(wanted.given)
            if (outcome := wanted.recorded.get(run_records.recipe_key(planned.table))) is not None:
                require_basis_of_record(recipe, outcome)
                outcome = replace(outcome, axes=planned.axes)
            # the directory of one of the same recipe, which another experiment may have named, or a new one
            end = f"-seed-{planned.seed}-{fingerprint(recipe)}"
            name = re.sub(r"[^\w.]+", "-", label).strip("-").lower()[:80]
            directory = min(folder.glob(f"*{end}"), default=folder / f"{name}{end}")
            jobs.append(Job(planned, recipe, directory, label, outcome))
    if not jobs:
        raise FedKSeedError(f"{wanted.experiment.name} has no run whose label holds {wanted.only!r}")
    return jobs


def run(jobs: Sequence[Job], part: tuple[int, int] = (1, 1), *, may_fail: bool = False) -> list[RunOutcome] | None:
    """Finish the runs of a part, one by one.

    Args:
        may_fail: whether a run that began may fail: one whose rate is too high diverges.

    Returns:
        The results of all runs that did not fail; None if other parts have not finished theirs.
    """
    failed = set[Path]()
    todo = [job for job in jobs[part[0] - 1 :: part[1]] if job.outcome() is None]
    with Bars(sum(job.recipe.training.rounds for job in todo) or 1) as bars:
        for number, job in enumerate(todo, 1):
            try:
                _finish(job, bars)
            except FedKSeedError as error:
                # one whose rate is too high diverges; one that another process works on did not fail: it may finish it
                if not may_fail or not job.begun or locked(job.directory / "lock"):
                    raise
                failed.add(job.directory)
                ended = f"{error}"
            else:
                if (outcome := job.outcome()) is None:
                    raise FedKSeedError(f"{job.directory} ended without a result; remove it and try again")
                before, after = outcome.loss[0], outcome.loss[outcome.rounds]
                ended = f"held-out loss {before:.4f} → {after:.4f}, {outcome.seconds:.0f} s"
            bars.note(f"{number:3} of {len(todo)}   {job.label}, seed {job.planned.seed}: {ended}")
    outcomes = [job.outcome() for job in jobs if job.directory not in failed]
    finished = [outcome for outcome in outcomes if outcome is not None]
    return finished if len(finished) == len(outcomes) else None


def _finish(job: Job, bars: Bars) -> None:
    """Start or resume a run, and carry it to its end."""
    if job.begun:
        bars.bars.update(bars.rounds, advance=len(Store(job.directory).reports()))
        resume(job.directory, ExperimentProgress(bars))
    else:
        # a run does all its rounds: a table compares equal numbers of them, diverged runs included
        recipe = job.recipe.having(evaluation={"stop_when_diverged": False})
        others = sorted(job.directory.parent.glob(f"*-seed-{job.planned.seed}-*"))
        start(recipe, job.directory, ExperimentProgress(bars), earlier=others)
    store, commit = Store(job.directory), run_records.commit()
    if commit not in (commits := store.recall(COMMITS) or []):
        store.remember(COMMITS, [*commits, commit])


def _search(wanted: Reproduction, choice: Choice) -> tuple[list[Job], list[Tree] | None]:
    """The trials of a search, and each combination of axes with its best value; None if other parts have trials to do.

    A value is out if one of its trials failed, or ended with a loss that is no number; FedKSeedError where all are.
    """
    experiment = wanted.experiment
    others = [axis for axis in experiment.axes if axis != choice.axis]
    jobs = make_jobs(wanted, seeds=range(experiment.seeds, experiment.seeds + choice.seeds), trial_of=choice)
    outcomes = run(jobs, wanted.part, may_fail=True)
    if outcomes is None:
        return jobs, None
    by_others, best = group(outcomes, others), dict[tuple[Any, ...], Tree]()
    for job in jobs:
        values = tuple(job.planned.axes[axis] for axis in others)
        by_value = group(by_others.get(values, ()), [choice.axis])
        losses = {value: [trial.searched_loss for trial in trials] for (value,), trials in by_value.items()}
        changes = {value: [after - before for before, after in pairs] for value, pairs in losses.items()}
        sound = {value: c for value, c in changes.items() if len(c) == choice.seeds and isfinite(sum(c))}
        if not sound:
            raise FedKSeedError(f"{job.label}: no value of {choice.axis} ended with a loss; give it smaller ones")
        best[values] = {**job.planned.axes, choice.axis: min(sound, key=lambda value: fmean(sound[value]))}
    return jobs, [*best.values()]


def _write_results(wanted: Reproduction, jobs: Sequence[Job], trials: Sequence[Job]) -> Path:
    """Write tables, figure and records of finished runs."""
    experiment = wanted.experiment
    if experiment.output == "speed":  # the one table with a column for it
        measured = (job for job in jobs if job.recorded is None)
        run_records.note_memory((Store(job.directory), job.planned.axes, job.recipe) for job in measured)
    finished = [(outcome, job) for job in jobs if (outcome := job.outcome()) is not None]
    if not finished:
        raise FedKSeedError(f"all runs of {experiment.name} ended with an error; see the lines above")
    if experiment.output == "probabilities":
        finished = [(run_records.with_probabilities(outcome), job) for outcome, job in finished]
    recorded = [(outcome, job.planned.table) for outcome, job in finished]
    run_records.require_one_model(recorded)
    outcomes = [outcome for outcome, _ in recorded]
    bases = list(describe_bases([job.recipe for _, job in finished]))
    about: dict[str, Any] = {"bases": bases} if bases else {}
    _write_about(wanted, **about, runs=[outcome.directory.name for outcome in outcomes])
    runs = ResultTable([_run_row(experiment, outcome) for outcome in outcomes])
    runs.write(wanted.folder, f"Runs of {experiment.name}", "runs")
    searched = [(outcome, job.planned.table) for job in trials if (outcome := job.outcome()) is not None]
    run_records.write_records(wanted.folder, recorded, searched)
    return _write_outcomes(wanted, outcomes)


def redraw(experiment: Experiment, output: Path) -> Path:
    """Make an experiment's table and figure again from the records of its runs, which have to be there."""
    if experiment.output in MEASURED:
        raise FedKSeedError(f"{experiment.name} is measured, not run: it has no records of runs")
    wanted = Reproduction(experiment, output)
    return _write_outcomes(wanted, run_records.read_records(wanted.folder))


def _measure(wanted: Reproduction) -> Path:
    """Write the table and figure of a microbenchmark, with rows measured earlier if they had the same options."""
    experiment, file = wanted.experiment, wanted.folder / "measured.json"
    kind = MEASURED[experiment.output]
    settings = json.loads(json.dumps([experiment.options, [planned.table for planned in experiment.plan([0])]]))
    measured = json.loads(file.read_text()) if file.is_file() else {}
    if measured.get("of") != settings or "commit" not in measured:  # older files have one time of each
        with Bars(1) as bars:
            rows = kind.gather(experiment, wanted.given, bars.note)
        measured = {"of": settings, "commit": run_records.commit(), "rows": rows}
        write_atomically(file, json.dumps(measured, ensure_ascii=False, indent=1).encode(), 0o666)
    _write_about(wanted, measured["commit"], runs=[])
    return _write_table_and_figure(wanted, *kind.show(experiment, measured["rows"]))


def _write_outcomes(wanted: Reproduction, outcomes: Sequence[RunOutcome]) -> Path:
    """Write the tables and the figure of runs."""
    experiment = wanted.experiment
    shown, output = Comparison.of(experiment, outcomes), OUTPUTS[experiment.output]
    if (table := by_round(shown)) is not None:
        table.write(wanted.folder, f"{experiment.item}: {experiment.title}, by round", "by-round")
    return _write_table_and_figure(wanted, output.table(shown), output.figure and partial(output.figure, shown))


def _write_table_and_figure(wanted: Reproduction, table: ResultTable, draw: DrawFigure | None) -> Path:
    table.write(wanted.folder, f"{wanted.experiment.item}: {wanted.experiment.title}")
    if draw is not None:
        save(draw, wanted.folder)
    return wanted.folder


def _write_about(wanted: Reproduction, commit: str | None = None, **more: Any) -> None:
    """Write how the results were made: about.json."""
    experiment = wanted.experiment
    versions = {name: version(name) for name in ("torch", "transformers", "numba", "numpy")}
    about = {
        "experiment": experiment.name, "item": experiment.item, "scale": experiment.scale, "seeds": experiment.seeds,
        "command": " ".join(Path(word).name if Path(word).is_absolute() else word for word in wanted.command),
        "commit": commit or run_records.commit(),
        "versions": {"fedkseed": __version__, "python": platform.python_version(), **versions},
        "machine": platform.machine(), **more,
    }  # fmt: skip
    write_atomically(wanted.folder / "about.json", json.dumps(about, indent=1, ensure_ascii=False).encode(), 0o666)


def _run_row(experiment: Experiment, outcome: RunOutcome) -> dict[str, Cell]:
    """A run's row in runs.csv."""
    rouge, shares = MEASURES["rouge"], [MEASURES[name] for name in SHARES]
    ends = {"before": 0, "after": outcome.rounds}
    percents = {f"{m.title} {when}": m.after(outcome, done) for m in shares for when, done in ends.items()}
    # the largest value of every metric that is not always shown, where a round has one that is not zero
    rare = {metric.title: outcome.metrics.get(metric.name, {}).values() for metric in METRICS if not metric.always}
    return {
        **{short(axis): experiment.title_of(axis, value) for axis, value in outcome.axes.items()},
        "seed": outcome.seed,
        "loss before": outcome.loss[0], "loss after": outcome.loss[outcome.rounds],
        "Rouge-L before": rouge.after(outcome, 0), "Rouge-L after": rouge.after(outcome),
        **{title: value for title, value in percents.items() if value is not None},
        "bytes down": outcome.bytes_down, "bytes up": outcome.bytes_up, "seconds": outcome.seconds,
        **{f"{title}, most": max(values) for title, values in rare.items() if any(values)},
        "run": outcome.directory.name,
    }  # fmt: skip
