"""Finished runs with the options to show them, and their tables: one function for each kind."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, product
from operator import attrgetter
from statistics import fmean
from typing import Any

import numpy as np

from ..errors import FedKSeedError
from ..recipe.algorithms import algorithm_of
from .experiments import Experiment, Tree, options_of, short
from .results import MEASURES, SHARES, Cell, ResultTable, RunOutcome, Spread, group, spread

Row = dict[str, Cell]
SETTINGS = ("directions", "type", "client steps")  # columns of tables where rows differ, else a sentence
BYTES = (
    "Bytes down and up: the most of a client and round. "
    "kB of a run: of all its clients and rounds, with a basis to each client."
)


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """The table `options` of an experiment with runs. Each output reads those of its rows that it shows."""

    reference: Tree = field(default_factory=dict)  # axis -> the value with which all others of the axis are compared
    rival: Any = None  # a second such value
    line: str = "method"  # the axis with a line for each of its values
    x: str = ""  # the axis along which a figure is drawn
    y: str = ""  # the axis upwards, of a grid
    measure: str = ""  # a key of results.MEASURES; of a figure with one
    measures: Sequence[str] = ("rouge", "loss")  # of a figure with a panel for each
    error: str = "std"  # what a band along a line is: "std", or "standard error"
    xlabel: str = ""
    log: bool = False  # whether x is logarithmic
    limits: Sequence[float] | None = None  # least and largest number upwards, of a figure along x
    clock: str = "processor"  # or "virtual", see run/cohort.py
    steps: int = 0  # local steps after which methods are compared
    steps_a_round: int | Mapping[str, int] = 1  # local steps of a round, by method where they differ

    def steps_of(self, method: str) -> int:
        """Local steps of a round with a method."""
        steps = self.steps_a_round
        return steps if isinstance(steps, int) else steps.get(method, steps["default"])


@dataclass(frozen=True)
class Comparison:
    """Finished runs of an experiment, and how they are to be shown."""

    experiment: Experiment
    options: ComparisonOptions
    outcomes: Sequence[RunOutcome]

    @classmethod
    def of(cls, experiment: Experiment, outcomes: Sequence[RunOutcome]) -> "Comparison":
        options = options_of(ComparisonOptions, experiment)
        if options.clock == "virtual":
            outcomes = [replace(outcome, clock=outcome.virtual) for outcome in outcomes]
        return cls(experiment, options, outcomes)

    def client_steps(self, run: RunOutcome) -> Mapping[int, int]:
        """Local steps of all clients by finished rounds; empty for an older record of a run by epochs."""
        work, clients = self._local_work(run.axes), run.metrics.get("clients", {})
        if run.steps or work.get("epochs"):
            return run.steps
        return {0: 0} | dict(zip(clients, accumulate(int(n) * work["steps"] for n in clients.values()), strict=True))

    def _local_work(self, axes: Tree) -> Tree:
        """The table of a recipe that says the local steps of its clients."""
        table = self.experiment.table(axes)
        algorithm = algorithm_of(table["training"]["algorithm"])
        derives = algorithm.pooled and algorithm.differentiates
        return table["training"] | (table.get("derivatives", {}) if derives else {})

    def axes_without(self, *axes: str) -> list[str]:
        """The axes of the experiment without those named, and without the one whose best value was searched."""
        searched = self.experiment.choice
        return [a for a in self.experiment.axes if a not in axes and (searched is None or a != searched.axis)]

    def by(self, *axes: str) -> dict[tuple[Any, ...], list[RunOutcome]]:
        """All runs, grouped by their values on some axes."""
        return group(self.outcomes, axes)

    @cached_property
    def references(self) -> list[tuple[str, Any]]:
        """Axes and the values on them with which others are compared: the reference, and the rival on its axis."""
        pairs = [(a, value) for a, first in self.options.reference.items() for value in (first, self.options.rival)]
        return list(dict.fromkeys(pair for pair in pairs if pair[1] is not None))

    def title(self, axis: str, value: Any) -> str:
        return self.experiment.title_of(axis, value)

    def titles(self, axes: Sequence[str], values: Iterable[Any]) -> dict[str, str]:
        """The names of values, by the short names of their axes."""
        return {short(axis): self.title(axis, value) for axis, value in zip(axes, values, strict=True)}

    def panel_title(self, axes: Sequence[str], values: Sequence[Any]) -> str:
        """The title of a panel: its values on those axes that have several."""
        return ", ".join(
            self.title(axis, value) if axis in ("model", "dataset", "method") else f"{short(axis)} = {value}"
            for axis, value in zip(axes, values, strict=True)
            if len(self.experiment.axes[axis]) > 1
        )

    def measured(self, measures: Sequence[str]) -> list[str]:
        """Those measures that all runs have; the loss if there are none, as without generated answers."""
        return [name for name in measures if spread(self.outcomes, name) is not None] or ["loss"]


def summary(shown: Comparison) -> ResultTable:
    """A row for every combination of values: losses, other measures, bytes, differences to the reference and rival."""
    compared = shown.axes_without()  # without the axis of a choice, of which each combination has its own value
    cells = shown.by(*compared)
    rows: list[Row] = []
    for values, runs in shown.by(*shown.experiment.axes).items():
        axes = dict(zip(shown.experiment.axes, values, strict=True))
        row = _summary_row(shown, axes, runs)
        for axis, value in shown.references:
            if axes[axis] != value:
                others = cells.get(tuple((axes | {axis: value})[a] for a in compared), [])
                title = shown.title(axis, value)
                names = {"change": f"minus {title}", "rouge": f"Rouge-L minus {title}"}
                names |= {name: f"{MEASURES[name].title} minus {title}" for name in SHARES}
                row |= {column: _paired(runs, others, measure) for measure, column in names.items()}
        rows.append(row)
    optional = (" before", " after", *(f" minus {shown.title(axis, value)}" for axis, value in shown.references))
    columns = {name for row in rows for name, cell in row.items() if cell is not None or not name.endswith(optional)}
    note = f"After ±: the standard deviation over seeds. {BYTES} Seconds: of training a run, of one processor."
    paired = "A difference is of changes of loss, paired by seed; after its ±: the standard error."
    rows = [{name: cell for name, cell in row.items() if name in columns} for row in rows]
    rows, of_all = _with_settings_apart(rows)
    return ResultTable(rows, (note, of_all, paired if shown.options.reference else "", shown.experiment.note))


def _with_settings_apart(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """The rows without those settings that all of them share, and a sentence that says these."""
    found = {name: {row[name] for row in rows if name in row} for name in SETTINGS}
    alike = {name: values.pop() for name, values in found.items() if len(values) == 1 and None not in values}
    sentence = f"Of all rows: {'; '.join(f'{name} {value}' for name, value in alike.items())}." if alike else ""
    return [{name: cell for name, cell in row.items() if name not in alike} for row in rows], sentence


def _settings(shown: Comparison, runs: Sequence[RunOutcome]) -> Row:
    """Settings of runs that a comparison needs: directions, the model's type, steps of all clients in a run."""
    table = shown.experiment.table(runs[0].axes)
    algorithm, directions = algorithm_of(table["training"]["algorithm"]), table.get("directions", {})
    family = "none" if algorithm.backpropagates and not algorithm.pooled else directions.get("family", "hadamard")
    counts = [max(shown.client_steps(run).values(), default=None) for run in runs]
    steps = None if None in counts else f"{round(fmean(n for n in counts if n is not None)):,}"
    return dict(zip(SETTINGS, (family, table.get("model", {}).get("dtype", "float32"), steps), strict=True))


def _summary_row(shown: Comparison, axes: dict[str, Any], runs: Sequence[RunOutcome]) -> Row:
    """The cells of one combination of values, without comparisons."""
    choice = shown.experiment.choice
    return {
        **shown.titles([*axes], axes.values()),
        **(_rates(shown.experiment, axes) if choice and choice.axis == "variant" else {}), **_settings(shown, runs),
        "seeds": len(runs), "loss before": spread(runs, "loss", 0), "loss after": spread(runs, "loss"),
        "change of loss": spread(runs, "change"),
        "Rouge-L before": spread(runs, "rouge", 0), "Rouge-L after": spread(runs, "rouge"),
        **{f"{MEASURES[name].title} before": spread(runs, name, 0) for name in SHARES},
        **{f"{MEASURES[name].title} after": spread(runs, name) for name in SHARES}, **_traffic(runs),
        "seconds": _seconds(runs),
    }  # fmt: skip


def _seconds(runs: Sequence[RunOutcome]) -> int:
    return round(fmean(run.seconds for run in runs))


def _rates(experiment: Experiment, axes: dict[str, Any]) -> Row:
    """The learning rate of a combination's recipes, and ε where its methods perturb."""
    recipe = experiment.table(axes)
    algorithm = algorithm_of(recipe["training"]["algorithm"])
    derivatives = algorithm.pooled and algorithm.differentiates  # such a method has a rate of its own
    lr, eps = recipe["derivatives" if derivatives else "training"]["lr"], recipe["training"]["eps"]
    return {"η": f"{lr:g}", "ε": None if algorithm.differentiates else f"{eps:g}"}


def _traffic(runs: Sequence[RunOutcome]) -> Row:
    rounds = [sum(run.metrics.get("bytes/all clients", {}).values()) for run in runs]
    sent = [n + run.once for n, run in zip(rounds, runs, strict=True) if n and run.once is not None]
    return {
        "bytes down": max(run.bytes_down for run in runs), "bytes up": max(run.bytes_up for run in runs),
        "kB of a run": round(fmean(sent) / 1000) if len(sent) == len(runs) else None,
    }  # fmt: skip


def _paired(runs: Sequence[RunOutcome], others: Sequence[RunOutcome], measure: str) -> str | None:
    """Mean difference of a measure at the ends, paired by seed, and its standard error; None if it is not measured."""
    pairs = [map(MEASURES[measure].after, pair) for pair in _same_seed(runs, others)]
    differences = [mine - other for mine, other in pairs if mine is not None and other is not None]
    return _signed(differences, 4 if measure == "change" else 1)


def _signed(values: Sequence[float], digits: int = 3) -> str | None:
    """Mean and standard error as text, with the mean's sign; None if there are no values."""
    if not values:
        return None
    over_seeds = Spread.of(values)
    return f"{over_seeds.mean:+.{digits}f}" + ("" if (e := over_seeds.error) is None else f" ± {e:.{digits}f}")


def by_round(shown: Comparison) -> ResultTable | None:
    """A table of changes of loss after each round that several lines evaluated; None without a reference.

    Beside them stand differences to the reference and the rival. A further row has the changes from the middle one to
    the last of the rounds that all evaluated: what a second half gains. The last have methods in equal time, and after
    as many client steps where these differ, beside the rival, or the reference where there is none. Where runs have a
    share, such as an accuracy, the same rows of it follow: the share after a round.
    """
    rows: list[Row] = []
    shares = [name for name in SHARES if spread(shown.outcomes, name) is not None][-1:]
    for axis in shown.options.reference:
        panel_axes = shown.axes_without(axis)
        rivals = [shown.title(axis, value) for a, value in reversed(shown.references) if a == axis]
        for (values, runs), measure in product(shown.by(*panel_axes).items(), ["change", *shares]):
            lines = {shown.title(axis, value): same for (value,), same in group(runs, [axis]).items()}
            several = {a: v for a, v in zip(panel_axes, values, strict=True) if len(shown.experiment.axes[a]) > 1}
            named: Row = {**shown.titles([*several], several.values())}
            if shares:
                named["measure"] = MEASURES[measure].title
            rows += [{**named, **_span_row(lines, rivals, measure, *span)} for span in _spans(lines, measure)]
            if axis == "method" and rivals[0] in lines:
                rows += [{**named, **row} for row in _alike_rows(shown, lines, rivals[0], measure)]
    note = "Changes of held-out loss, mean ± standard error over seeds; a difference is paired by seed."
    if shares:
        note += " Of a share, itself after a round and its change between two; differences in points."
    if "method" in shown.options.reference:
        note += (
            " In the time or steps of another: at the last look within those of its run of the same seed, which may be "
            "much earlier; –: a seed had no look by then."
        )
    return ResultTable(rows, (note,)) if rows else None


def _evaluated(runs: Sequence[RunOutcome], measure: str) -> set[int]:
    """The numbers of finished rounds after which all these runs have a measure."""
    return set.intersection(*({*MEASURES[measure].series(run)} for run in runs))


def _spans(lines: Mapping[str, Sequence[RunOutcome]], measure: str) -> list[tuple[int, int]]:
    """From the base model to each round that several lines evaluated, and the second half of those that all did."""
    evaluated = [_evaluated(runs, measure) for runs in lines.values()]
    several = sorted(done for done, count in Counter(chain(*evaluated)).items() if done and count > 1)
    common = sorted(set.intersection(*evaluated) - {0})
    half = [(common[len(common) // 2 - 1], common[-1])] if len(common) > 1 else []
    return [*((0, done) for done in several), *half]


def _span_row(
    lines: Mapping[str, Sequence[RunOutcome]], rivals: Sequence[str], measure: str, start: int, end: int
) -> Row:
    """Each line's measure after a round, or its change since an earlier one, and what it is less than the rivals'."""
    at = MEASURES[measure].at
    numbers = {
        title: {run.seed: at(run, end) - (at(run, start) if start else 0) for run in runs}
        for title, runs in lines.items()
        if {start, end} <= _evaluated(runs, measure)
    }
    row: Row = {"rounds": f"{start} to {end}" if start else end}
    row |= {title: _mean(measure, [*mine.values()], start == 0) for title, mine in numbers.items()}
    for rival in (title for title in rivals if title in numbers):
        theirs = numbers[rival]
        row |= {
            f"{title} minus {rival}": _mean(measure, [mine[seed] - theirs[seed] for seed in mine if seed in theirs])
            for title, mine in numbers.items()
            if title != rival and f"{rival} minus {title}" not in row
        }
    return row


def _alike_rows(
    shown: Comparison, lines: Mapping[str, Sequence[RunOutcome]], rival: str, measure: str
) -> Iterator[Row]:
    """Each line's measure in the rival's time, and after as many steps of all clients as the rival's, if these differ.

    It is the one at the last look by then; beside it stands what it is less than the rival's last. A line has none
    where one of its runs was not looked at by then.
    """
    pairs = {title: _same_seed(runs, lines[rival]) for title, runs in lines.items()}
    totals = [[max(shown.client_steps(run).values(), default=None) for run in pair] for pair in chain(*pairs.values())]
    yield _alike_row(pairs, rival, measure, "time", attrgetter("clock"))
    if any(mine != theirs for mine, theirs in totals) and None not in chain(*totals):
        yield _alike_row(pairs, rival, measure, "client steps", shown.client_steps)


def _alike_row(
    pairs: Mapping[str, Sequence[tuple[RunOutcome, RunOutcome]]],
    rival: str,
    measure: str,
    what: str,
    spent: Callable[[RunOutcome], Mapping[int, float]],
) -> Row:
    kind = MEASURES[measure]
    row: Row = {"rounds": f"in the {what} of {rival}"}
    for title, runs in pairs.items():
        looks = [(run, run.within(spent(other)[other.rounds], spent(run)), other) for run, other in runs]
        if all(done and done in kind.series(run) for run, done, _ in looks):
            row[title] = _mean(measure, [kind.at(run, done) for run, done, _ in looks], True)
            if title != rival:
                less = [kind.at(run, done) - kind.at(other, other.rounds) for run, done, other in looks]
                row[f"{title} minus {rival}"] = _mean(measure, less)
    return row


def _mean(measure: str, values: Sequence[float], of_share: bool = False) -> str | None:
    """Mean and standard error as text; without a sign where it is a share itself, no change or difference."""
    text = _signed(values, 3 if MEASURES[measure].change else 1)
    return text.removeprefix("+") if text and of_share and not MEASURES[measure].change else text


def along_axis(shown: Comparison) -> ResultTable:
    """The summary; along learning rates, a note names the runs that ended with an error, or were not asked for."""
    table, experiment = summary(shown), shown.experiment
    finished = [(outcome.axes, outcome.seed) for outcome in shown.outcomes]
    planned = [run for run in experiment.plan() if (run.axes, run.seed) not in finished]
    missing = "; ".join(f"{experiment.label(run.axes)}, seed {run.seed}" for run in planned)
    if not (experiment.along_rates and missing):
        return table
    return replace(table, notes=(*table.notes, f"No result: {missing}."))


def speed(shown: Comparison) -> ResultTable:
    """Speed of each method beside the reference's run of the same seed: by the clock, local steps, bytes and memory."""
    notes = (
        "Changes of held-out loss, mean ± standard error over seeds. Time: that of the reference's rounds, same seed.",
        "Times as fast: its whole time over the time in which a method first had the reference's last loss.",
        "Memory: the most that a client held in a process of its own, less what a client like it had left there.",
        BYTES,
    )
    rows = [_speed_row(shown, method, runs) for (method,), runs in shown.by("method").items()]
    rows, of_all = _with_settings_apart(rows)
    return ResultTable(rows, (*notes, of_all, shown.experiment.note))


def _speed_row(shown: Comparison, method: str, runs: Sequence[RunOutcome]) -> Row:
    options, choice, by_method = shown.options, shown.experiment.choice, shown.by("method")
    row: Row = {"method": shown.title("method", method), "seeds": len(runs), **_settings(shown, runs)}
    if choice:
        row[short(choice.axis)] = ", ".join({shown.title(choice.axis, run.axes[choice.axis]) for run in runs})
    pairs = _same_seed(runs, by_method.get((options.reference["method"],), []))
    for part in (100, 5, 1):
        name = f"in 1/{part} of the time" if part > 1 else "in the same time"
        row[name] = _signed([run.change(run.within(other.seconds / part)) for run, other in pairs])
    rounds = options.steps // options.steps_of(method)
    row[f"after {options.steps:,} steps"] = _signed([run.change(rounds) for run in runs])
    row["at its end"] = _signed([run.last_change for run in runs])
    row["minus the reference"] = _signed([run.last_change - o.last_change for run, o in pairs if run is not o])
    if options.rival:
        title, beside = shown.title("method", options.rival), _same_seed(runs, by_method.get((options.rival,), []))
        changes = [run.change(run.within(other.seconds)) for run, other in beside]
        differences = [change - other.last_change for change, (_, other) in zip(changes, beside, strict=True)]
        row[f"in the time of {title}"] = _signed(changes)
        row[f"minus {title} then"] = None if method == options.rival else _signed(differences)
    times = [(other.seconds, run.reached(other.last_change)) for run, other in pairs]
    factors = [theirs / mine for theirs, mine in times if mine]
    fast = factors and len(factors) == len(pairs)
    row["times as fast"] = f"{min(factors):.3g} to {max(factors):.3g}" if fast else None
    row["units of time" if options.clock == "virtual" else "seconds"] = float(np.mean([run.seconds for run in runs]))
    row |= _traffic(runs)
    memory = [run.memory for run in runs if run.memory is not None]
    row["memory (MB)"] = max(memory) // 1_000_000 if len(memory) == len(runs) else None
    return row


def _same_seed(runs: Sequence[RunOutcome], others: Sequence[RunOutcome]) -> list[tuple[RunOutcome, RunOutcome]]:
    """Each run with the other one of its seed, where there is one."""
    theirs = {run.seed: run for run in others}
    return [(run, theirs[run.seed]) for run in runs if run.seed in theirs]


def scores(shown: Comparison) -> ResultTable:
    """Rouge-L after the last round, mean ± standard deviation: a row a method, a column a data set and model.

    Beside each, differences to the methods that the experiment compares with, paired by seed, ± standard error.
    """
    wide = shown.axes_without("method")
    cells, panels = shown.by("method", *wide), shown.by(*wide)
    columns = {values: shown.panel_title(wide, values) or "Rouge-L (%)" for values in panels}
    # each seed counts once for the base model, whose score does not depend on the method
    once = {values: {run.seed: run for run in same}.values() for values, same in panels.items()}
    rows: list[Row] = [{"approach": "no tuning", **{columns[v]: spread(runs, "rouge", 0) for v, runs in once.items()}}]
    for (method,), runs in shown.by("method").items():
        row: Row = {"approach": shown.title("method", method), **_settings(shown, runs)}
        for values, same in group(runs, wide).items():
            row[columns[values]] = spread(same, "rouge")
            for axis, value in shown.references:
                others, name = cells.get((value, *values), []), f"{columns[values]} minus {shown.title(axis, value)}"
                row[name] = None if method == value else _paired(same, others, "rouge")
        rows.append(row | {"seconds": _seconds(runs)})
    paired = "A difference is paired by seed; after its ±: the standard error." if shown.references else ""
    note = "Rouge-L (%) after the last round, mean ± standard deviation over seeds. Seconds: of training a run."
    rows, of_all = _with_settings_apart(rows)
    return ResultTable(rows, (note, of_all, paired, shown.experiment.note))


def marginal(shown: Comparison) -> ResultTable:
    """The gain by each further seed of a range of K: see `gains`."""
    axes = shown.axes_without(shown.options.x)
    runs = shown.by(*axes)
    rows: list[Row] = [
        {
            **shown.titles(axes, values),
            **_settings(shown, runs[values]),
            "range of K": reach,
            "gain a seed": gain,
            "seconds": _seconds(runs[values]),
        }
        for values, ranges in gains(shown).items()
        for reach, gain in ranges.items()
    ]
    rows, of_all = _with_settings_apart(rows)
    return ResultTable(rows, (of_all, shown.experiment.note))


def gains(shown: Comparison) -> dict[tuple[Any, ...], dict[str, float]]:
    """The gain by each further seed, (R(K') − R(K)) / (K' − K): values on the other axes -> range of K -> gain.

    It is one in Rouge-L, or in the loss where there are no answers.
    """
    x = shown.options.x
    (measure,) = shown.measured(["rouge"])
    sign, ranges = -1 if measure == "loss" else 1, {}
    for values, runs in shown.by(*shown.axes_without(x)).items():
        means = {k: mean_or_nan(spread(same, measure)) for (k,), same in sorted(group(runs, [x]).items())}
        ranges[values] = {f"[{a:,}, {b:,})": (means[b] - means[a]) / (b - a) * sign for a, b in pairwise(means)}
    return ranges


def mean_or_nan(of: Spread | None) -> float:
    return float("nan") if of is None else of.mean


def probabilities(shown: Comparison) -> ResultTable:
    """The probabilities of FedKSeed-Pro's directions after the last round, for the first seed."""
    rows: list[Row] = []
    for run, p in first_probabilities(shown):
        row: Row = {"run": shown.experiment.label(run.axes), **_settings(shown, [run]), "K": p.size}
        named = {"least": p.min(), "median": np.median(p), "most": p.max()}
        row |= {f"{name}, times 1/K": float(value * p.size) for name, value in named.items()}
        tenth = float(np.sort(p)[-max(1, p.size // 10) :].sum())
        row |= {"most over least": float(p.max() / p.min()), "share of the likeliest tenth": tenth}
        rows.append(row | {"never drawn": run.never_drawn, "seconds": round(run.seconds)})
    rows, of_all = _with_settings_apart(rows)
    return ResultTable(rows, (of_all, shown.experiment.note))


def first_probabilities(shown: Comparison) -> list[tuple[RunOutcome, np.ndarray]]:
    """The runs of the first seed with the probabilities of their directions, (K,); FedKSeedError without a record."""
    first = min(run.seed for run in shown.outcomes)
    runs = [run for run in shown.outcomes if run.seed == first]
    for run in runs:
        if run.probabilities is None:
            raise FedKSeedError(f"{run.directory.name} has no record of its directions' probabilities; run it again")
    return [(run, np.array(run.probabilities)) for run in runs]
