"""Tables and figures of finished runs: one function for every kind of output that an experiment can have."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import FedKSeedError
from ..recipe.algorithms import algorithm_of
from .experiments import Experiment, short
from .figures import Draw, bars, heat, legend_beside, line, panels, powers
from .results import MEASURES, SHARES, Cell, ResultTable, RunOutcome, Spread, group, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Build: TypeAlias = Callable[[Experiment, Sequence[RunOutcome]], tuple[ResultTable, Draw | None]]


def summary(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> ResultTable:
    """A table with a row for every combination of values: losses, other measures and bytes, over seeds.

    With the option `reference = {axis = value}` each row is also compared with the row of that value, and with
    `rival = value` with that one, too: the difference of the changes of loss, paired by seed, and its standard error.
    """
    rows: list[dict[str, Cell]] = []
    compared = _others(experiment, ())  # without the axis of a choice, of which each combination has its own value
    cells, references = group(outcomes, compared), _references(experiment)
    titles = [experiment.title_of(axis, value) for axis, value in references]
    for values, runs in group(outcomes, experiment.axes).items():
        axes = dict(zip(experiment.axes, values, strict=True))
        row: dict[str, Cell] = {short(axis): experiment.title_of(axis, value) for axis, value in axes.items()}
        if (choice := experiment.choice) and choice.axis == "variant":
            row |= _rates(experiment, axes)
        row |= {
            "seeds": len(runs),
            "loss before": spread(runs, "loss", 0),
            "loss after": spread(runs, "loss"),
            "change of loss": spread(runs, "change"),
            "Rouge-L before": spread(runs, "rouge", 0),
            "Rouge-L after": spread(runs, "rouge"),
            **{f"{MEASURES[name][0]} before": spread(runs, name, 0) for name in SHARES},
            **{f"{MEASURES[name][0]} after": spread(runs, name) for name in SHARES},
            "bytes down": max(run.bytes_down for run in runs),
            "bytes up": max(run.bytes_up for run in runs),
            "kB of a run": _kilobytes(runs),
            "seconds": round(fmean(run.seconds for run in runs)),
        }
        for (axis, value), title in zip(references, titles, strict=True):
            if axes[axis] != value:
                others = cells.get(tuple((axes | {axis: value})[a] for a in compared), [])
                row[f"minus {title}"] = _paired(runs, others)
                row[f"Rouge-L minus {title}"] = _paired(runs, others, "rouge")
                for name in SHARES:
                    row[f"{MEASURES[name][0]} minus {title}"] = _paired(runs, others, name)
        rows.append(row)
    optional = (" before", " after", *(f" minus {title}" for title in titles))
    measured = {k for row in rows for k, v in row.items() if v is not None or not k.endswith(optional)}
    rows = [{k: v for k, v in row.items() if k in measured} for row in rows]
    notes = [
        "After ±: the standard deviation over seeds. Bytes down and up: the most of a client and round. kB of a run: "
        "of all its clients and rounds. Seconds: of training a run, of one processor."
    ]
    if "reference" in experiment.options:
        notes.append("A difference is of changes of loss, paired by seed; after its ±: the standard error.")
    return ResultTable(rows, (*notes, *filter(None, [experiment.note])))


def _kilobytes(runs: Sequence[RunOutcome]) -> int | None:
    """Kilobytes (1,000 bytes) that all clients of a run receive and send in all of its rounds, the mean over runs."""
    sent = [sum(run.metrics.get("bytes/all clients", {}).values()) for run in runs]
    return round(fmean(sent) / 1000) if all(sent) else None


def _rates(experiment: Experiment, axes: dict[str, Any]) -> dict[str, Cell]:
    """The learning rate of a combination's recipes, and ε where its methods perturb."""
    tables = experiment.tables(axes)
    algorithm = algorithm_of(tables["training"]["algorithm"])
    of_derivatives = algorithm.pooled and algorithm.differentiates  # which have a rate of their own
    lr, eps = tables["derivatives" if of_derivatives else "training"]["lr"], tables["training"]["eps"]
    return {"η": f"{lr:g}", "ε": None if algorithm.differentiates else f"{eps:g}"}


def _paired(runs: Sequence[RunOutcome], others: Sequence[RunOutcome], measure: str = "change") -> str | None:
    """Mean difference of a measure at the ends, paired by seed, and its standard error; None if it is not measured."""
    of = MEASURES[measure][1]
    theirs = {run.seed: of(run, run.rounds) for run in others}
    pairs = [(of(run, run.rounds), theirs.get(run.seed)) for run in runs]
    differences = [own - other for own, other in pairs if own is not None and other is not None]
    if not differences:
        return None
    found, digits = Spread.of(differences), 4 if measure == "change" else 1
    return f"{found.mean:+.{digits}f}" + ("" if found.error is None else f" ± {found.error:.{digits}f}")


def _references(experiment: Experiment) -> list[tuple[str, Any]]:
    """Axes and their values with which others are compared: the reference, and the rival on the same axis."""
    reference, rival = experiment.options.get("reference", {}), experiment.options.get("rival")
    pairs = [(axis, other) for axis, value in reference.items() for other in (value, rival) if other is not None]
    return list(dict.fromkeys(pairs))


def by_round(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> ResultTable | None:
    """A table of changes of loss after each round that several lines evaluated, with differences to two of them.

    These two are the reference and the rival. A last row has the changes from the middle one to the last of the rounds
    that all evaluated: what a second half gains. Differences are paired by seed. None for an experiment that has no
    reference.
    """
    rows: list[dict[str, Cell]] = []
    for axis in experiment.options.get("reference", {}):
        others = _others(experiment, (axis,))
        rivals = [experiment.title_of(axis, value) for a, value in reversed(_references(experiment)) if a == axis]
        for values, runs in group(outcomes, others).items():
            lines = {experiment.title_of(axis, own): same for (own,), same in group(runs, [axis]).items()}
            named: dict[str, Cell] = {
                short(a): experiment.title_of(a, v)
                for a, v in zip(others, values, strict=True)
                if len(experiment.axes[a]) > 1
            }
            seen = {title: set.intersection(*({*run.loss} for run in same)) for title, same in lines.items()}
            several = sorted(done for done, count in Counter(chain(*seen.values())).items() if done and count > 1)
            of_all = sorted(set.intersection(*seen.values()) - {0})
            halves = [(of_all[len(of_all) // 2 - 1], of_all[-1])] if len(of_all) > 1 else []
            for start, end in [*((0, done) for done in several), *halves]:
                changes = {
                    title: {run.seed: run.loss[end] - run.loss[start] for run in same}
                    for title, same in lines.items()
                    if {start, end} <= seen[title]
                }
                row = named | {"rounds": f"{start} to {end}" if start else end}
                row |= {title: _error([*own.values()]) for title, own in changes.items()}
                for other, theirs in ((title, changes[title]) for title in rivals if title in changes):
                    row |= {
                        f"{title} minus {other}": _error([own[s] - theirs[s] for s in own if s in theirs])
                        for title, own in changes.items()
                        if title != other and f"{other} minus {title}" not in row
                    }
                rows.append(row)
    note = "Changes of held-out loss, mean ± standard error over seeds; a difference is paired by seed."
    return ResultTable(rows, (note,)) if rows else None


def curves(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """A measure drawn against rounds: a line for each value of an axis, a panel for each combination of the others."""
    along = experiment.options.get("line", "method")
    measure, error = experiment.options.get("measure", "loss"), experiment.options.get("error", "std")

    def draw(figure: "Figure") -> None:
        for axes, runs in _panels(figure, experiment, outcomes, (along,)):
            for number, ((value,), same) in enumerate(group(runs, [along]).items()):
                done = [d for d in sorted(same[0].loss) if spread(same, measure, d) is not None]
                found = [s for d in done if (s := spread(same, measure, d)) is not None]
                x = [d * experiment.options.get("steps a round", 1) for d in done]
                widths = [s.std if error == "std" else s.error for s in found]
                line(axes, x, [s.mean for s in found], widths, experiment.title_of(along, value), number)
            axes.set(xlabel=experiment.options.get("xlabel", "rounds"), ylabel=MEASURES[measure][0])
            if len(experiment.axes[along]) > 5:
                legend_beside(axes)
            else:
                axes.legend()

    return summary(experiment, outcomes), draw


def speed(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """Speed of each method beside a reference: by the clock, by local steps, by bytes and in memory.

    A run is compared with the reference's run of the same seed: with its whole time, and its last change of loss.
    """
    if virtual := experiment.options.get("clock") == "virtual":
        outcomes = [replace(outcome, clock=outcome.virtual) for outcome in outcomes]
    reference, per_round = experiment.options["reference"]["method"], experiment.options["steps a round"]
    theirs = {run.seed: run for run in outcomes if run.axes["method"] == reference}
    rows: list[dict[str, Cell]] = []
    for (method,), runs in group(outcomes, ["method"]).items():
        row: dict[str, Cell] = {"method": experiment.title_of("method", method), "seeds": len(runs)}
        if choice := experiment.choice:
            row[short(choice.axis)] = ", ".join(
                {experiment.title_of(choice.axis, run.axes[choice.axis]) for run in runs}
            )
        pairs = [(run, theirs[run.seed]) for run in runs if run.seed in theirs]
        for part in (100, 5, 1):
            name = f"in 1/{part} of the time" if part > 1 else "in the same time"
            row[name] = _error([run.change(run.within(other.seconds / part)) for run, other in pairs])
        rounds = experiment.options["steps"] // per_round.get(method, per_round["default"])
        row[f"after {experiment.options['steps']:,} steps"] = _error([run.change(rounds) for run in runs])
        row["at its end"] = _error([run.change(run.rounds) for run in runs])
        row["minus the reference"] = _error([r.change(r.rounds) - o.change(o.rounds) for r, o in pairs if r is not o])
        if rival := experiment.options.get("rival"):  # a method whose whole time is also compared with
            others = {run.seed: run for run in outcomes if run.axes["method"] == rival}
            beside = [(run.change(run.within(o.seconds)), o) for run in runs if (o := others.get(run.seed))]
            title = experiment.title_of("method", rival)
            row[f"in the time of {title}"] = _error([found for found, _ in beside])
            row[f"minus {title} then"] = (
                None if method == rival else _error([found - other.change(other.rounds) for found, other in beside])
            )
        needed = [run.reached(other.change(other.rounds)) for run, other in pairs]
        times = [other.seconds / t for t, (_, other) in zip(needed, pairs, strict=True) if t]
        row["times as fast"] = None if not times or len(times) < len(pairs) else f"{min(times):.3g} to {max(times):.3g}"
        row["units of time" if virtual else "seconds"] = float(np.mean([run.seconds for run in runs]))
        row |= {"bytes down": max(run.bytes_down for run in runs), "bytes up": max(run.bytes_up for run in runs)}
        row["memory (MB)"] = None if (most := _most_memory(runs)) is None else most // 1_000_000
        rows.append(row)
    notes = (
        "Changes of held-out loss, mean ± standard error over seeds. Time: that of the reference's rounds, same seed.",
        "Times as fast: its whole time over the time in which a method first had the reference's last loss.",
        "Memory: the most that a client held in a process of its own, less what a client like it had left there.",
    )

    def draw(figure: "Figure") -> None:
        for axes, runs in _panels(figure, experiment, outcomes, ("method",)):
            for number, ((method,), same) in enumerate(group(runs, ["method"]).items()):
                done = [d for d in sorted(same[0].loss) if spread(same, "change", d) is not None]
                found = [s for d in done if (s := spread(same, "change", d)) is not None]
                x = [float(np.mean([run.clock[d] for run in same])) for d in done]
                name = experiment.title_of("method", method)
                line(axes, x, [s.mean for s in found], [s.error for s in found], name, number)
            axes.set(
                xlabel="virtual time" if virtual else "seconds of rounds", ylabel=MEASURES["change"][0], xscale="symlog"
            )
            legend_beside(axes)

    return ResultTable(rows, (*notes, *filter(None, [experiment.note]))), draw


def _most_memory(runs: Sequence[RunOutcome]) -> int | None:
    """Bytes of a client, the most of several runs; None if one was not measured."""
    found = [run.memory for run in runs if run.memory is not None]
    return max(found) if found and len(found) == len(runs) else None


def _error(values: Sequence[float]) -> str | None:
    """Mean and standard error as text."""
    if not values:
        return None
    found = Spread.of(values)
    return f"{found.mean:+.3f}" + ("" if found.error is None else f" ± {found.error:.3f}")


def against(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """Measures after the last round drawn against the values of an axis: a line a method, mean ± standard deviation.

    Where the axis is the learning rate, a note names the runs that ended with an error or were not asked for.
    """
    x, along = experiment.options["x"], experiment.options.get("line", "method")
    measures = _measured(experiment.options.get("measures", ["rouge", "loss"]), outcomes)

    def draw(figure: "Figure") -> None:
        groups = group(outcomes, _others(experiment, (x, along)))
        pairs = [(values, runs, measure) for values, runs in groups.items() for measure in measures]
        for axes, (_, runs, measure) in zip(
            panels(figure, [_title(experiment, (x, along), values) for values, _, _ in pairs]), pairs, strict=True
        ):
            for number, ((value,), same) in enumerate(group(runs, [along]).items()):
                points = {at: spread(few, measure) for (at,), few in group(same, [x]).items()}
                known = {at: s for at, s in sorted(points.items()) if s is not None}
                widths = [s.std for s in known.values()]
                line(
                    axes,
                    list(known),
                    [s.mean for s in known.values()],
                    widths,
                    experiment.title_of(along, value),
                    number,
                )
            if experiment.options.get("log", False):
                powers(axes, experiment.axes[x])
            axes.set(xlabel=experiment.options.get("xlabel", short(x)), ylabel=MEASURES[measure][0])
            axes.set_ylim(experiment.options.get("limits"))
            axes.legend()

    table, known = summary(experiment, outcomes), [(outcome.axes, outcome.seed) for outcome in outcomes]
    planned = experiment.plan() if experiment.along_rates else []
    without = [f"{experiment.label(p.axes)}, seed {p.seed}" for p in planned if (p.axes, p.seed) not in known]
    return replace(table, notes=(*table.notes, f"No result: {'; '.join(without)}.")) if without else table, draw


def grid(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """A heat map of two axes."""
    x, y = experiment.options["x"], experiment.options["y"]
    (measure,) = _measured([experiment.options.get("measure", "rouge")], outcomes)

    def draw(figure: "Figure") -> None:
        for axes, runs in _panels(figure, experiment, outcomes, (x, y)):
            means = {key: spread(same, measure) for key, same in group(runs, [y, x]).items()}
            rows = [[_mean(means.get((b, a))) for a in experiment.axes[x]] for b in experiment.axes[y]]
            names = [[experiment.title_of(axis, value) for value in experiment.axes[axis]] for axis in (y, x)]
            heat(axes, names[0], names[1], rows, "low" if measure in ("loss", "change") else "high")
            axes.set(xlabel=short(x), ylabel=short(y))
            axes.set_title(f"{axes.get_title(loc='left')}  {MEASURES[measure][0]}".strip(), loc="left", fontsize=10)

    return summary(experiment, outcomes), draw


def scores(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, None]:
    """Rouge-L after the last round, mean ± standard deviation: a row a method, a column a data set and model.

    Beside each, differences to the methods that the experiment compares with, paired by seed, ± standard error.
    """
    wide = _others(experiment, ("method",))
    references = [(value, experiment.title_of(axis, value)) for axis, value in _references(experiment)]
    cells = group(outcomes, ("method", *wide))
    rows: list[dict[str, Cell]] = []
    for (method,), runs in group(outcomes, ["method"]).items():
        row: dict[str, Cell] = {"approach": experiment.title_of("method", method)}
        for values, same in group(runs, wide).items():
            name = _title(experiment, ("method",), values) or "Rouge-L (%)"
            row[name] = spread(same, "rouge")
            for value, title in references:
                others = cells.get((value, *values), [])
                row[f"{name} minus {title}"] = None if method == value else _paired(same, others, "rouge")
        rows.append(row)
    base: dict[str, Cell] = {"approach": "no tuning"}
    for values, same in group(outcomes, wide).items():
        base[_title(experiment, ("method",), values) or "Rouge-L (%)"] = _once(same)
    notes = ["Rouge-L (%) after the last round, mean ± standard deviation over seeds."]
    if references:
        notes.append("A difference is paired by seed; after its ±: the standard error.")
    return ResultTable([base, *rows], (*notes, *filter(None, [experiment.note]))), None


def marginal(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """Gain in Rouge-L by each further seed of a range of K, (R(K') − R(K)) / (K' − K), from the runs of Figure 7."""
    x = experiment.options["x"]
    (measure,) = _measured(["rouge"], outcomes)
    others = _others(experiment, (x,))
    rows: list[dict[str, Cell]] = []
    gains: dict[tuple[Any, ...], dict[str, float]] = {}
    for values, runs in group(outcomes, others).items():
        means = {k: _mean(spread(same, measure)) for (k,), same in sorted(group(runs, [x]).items())}
        gains[values] = {
            f"[{a:,}, {b:,})": (means[b] - means[a]) / (b - a) * (-1 if measure == "loss" else 1)
            for a, b in pairwise(means)
        }
        for reach, gain in gains[values].items():
            named = {short(a): experiment.title_of(a, v) for a, v in zip(others, values, strict=True)}
            rows.append({**named, "range of K": reach, "gain a seed": gain})

    def draw(figure: "Figure") -> None:
        wide = [axis for axis in others if axis != "method"]
        for axes, runs in _panels(figure, experiment, outcomes, (x, "method")):
            at = {axis: runs[0].axes[axis] for axis in wide}
            series = {
                experiment.title_of("method", m): list(gains[tuple((at | {"method": m})[a] for a in others)].values())
                for (m,) in group(runs, ["method"])
            }
            bars(axes, list(next(iter(gains.values()))), series)
            axes.set(xlabel="range of K", ylabel=f"gain a seed, {MEASURES[measure][0]}")
            axes.tick_params(axis="x", rotation=20)
            axes.legend()

    return ResultTable(rows, tuple(filter(None, [experiment.note]))), draw


def probabilities(experiment: Experiment, outcomes: Sequence[RunOutcome]) -> tuple[ResultTable, Draw]:
    """The probabilities of FedKSeed-Pro's directions after the last round, for the first seed."""
    rows: list[dict[str, Cell]] = []
    found: list[np.ndarray] = []
    first = [run for run in outcomes if run.seed == min(o.seed for o in outcomes)]
    for run in first:
        if run.probabilities is None:
            raise FedKSeedError(f"{run.directory.name} has no record of its directions' probabilities; run it again")
        p = np.array(run.probabilities)
        found.append(p)
        rows.append(
            {
                "run": experiment.label(run.axes),
                "K": p.size,
                "least, times 1/K": float(p.min() * p.size),
                "median, times 1/K": float(np.median(p) * p.size),
                "most, times 1/K": float(p.max() * p.size),
                "most over least": float(p.max() / p.min()),
                "share of the likeliest tenth": float(np.sort(p)[-max(1, p.size // 10) :].sum()),
                "never drawn": run.never_drawn,
            }
        )

    def draw(figure: "Figure") -> None:
        for axes, run, p in zip(panels(figure, [experiment.label(r.axes) for r in first]), first, found, strict=True):
            axes.plot(np.arange(p.size), p, ".", markersize=2, color="#0072B2")
            axes.axhline(1 / p.size, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label="1/K")
            axes.set(xlabel="direction", ylabel="probability", ylim=(0, None))
            axes.legend(title=f"seed {run.seed}")

    return ResultTable(rows, tuple(filter(None, [experiment.note]))), draw


WITHOUT_FIGURE = ("scores", "complexity", "overhead")  # outputs that are a table alone
RUNS: dict[str, Build] = {
    "curves": curves, "against": against, "grid": grid, "scores": scores,
    "marginal": marginal, "probabilities": probabilities, "speed": speed,
}  # fmt: skip


def _measured(wanted: Sequence[str], outcomes: Sequence[RunOutcome]) -> list[str]:
    """The wanted measures that all runs have; the loss if there are none, as without generated answers."""
    return [name for name in wanted if spread(outcomes, name) is not None] or ["loss"]


def _others(experiment: Experiment, without: Sequence[str]) -> list[str]:
    """The axes of an experiment without those given, and without the axis of its choice."""
    chosen = [experiment.choice.axis] if experiment.choice else []
    return [axis for axis in experiment.axes if axis not in (*without, *chosen)]


def _title(experiment: Experiment, without: Sequence[str], values: Sequence[Any]) -> str:
    """The title of a panel: its values on those axes on which panels differ."""
    axes = zip(_others(experiment, without), values, strict=True)
    return ", ".join(
        f"{experiment.title_of(axis, v)}" if axis in ("model", "dataset", "method") else f"{short(axis)} = {v}"
        for axis, v in axes
        if len(experiment.axes[axis]) > 1
    )


def _panels(
    figure: "Figure", experiment: Experiment, outcomes: Sequence[RunOutcome], within: Sequence[str]
) -> "list[tuple[Any, list[RunOutcome]]]":
    """The panels of a figure with their runs: one for each combination of values of the axes not in `within`."""
    groups = group(outcomes, _others(experiment, within))
    titles = [_title(experiment, within, values) for values in groups]
    return list(zip(panels(figure, titles), groups.values(), strict=True))


def _mean(found: Spread | None) -> float:
    return float("nan") if found is None else found.mean


def _once(outcomes: Sequence[RunOutcome]) -> Spread | None:
    """The base model's Rouge-L, which does not depend on the method: each seed counts once."""
    return spread(list({run.seed: run for run in outcomes}.values()), "rouge", 0)
