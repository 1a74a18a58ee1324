"""Every kind of output that finished runs can be shown by: a table, and the figure that goes with it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import tables
from .experiments import short
from .figures import bars, heat, legend_beside, line, panels, powers
from .results import MEASURES, ResultTable, RunOutcome, Spread, group, spread
from .tables import Comparison, first_probabilities, gains, mean_or_nan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class RunOutput:
    """The functions that make one kind of table and draw its figure."""

    table: Callable[[Comparison], ResultTable]
    figure: "Callable[[Comparison, Figure], None] | None" = None


def draw_curves(shown: Comparison, figure: "Figure") -> None:
    """A measure drawn against rounds: a line for each value of an axis, a panel for each combination of the others."""
    options, measure = shown.options, shown.options.measure or "loss"
    for axes, runs in _panels(figure, shown, options.line):
        for number, ((value,), same) in enumerate(group(runs, [options.line]).items()):
            points = _spreads(same, measure)
            x = [done * options.steps_of("default") for done in points]
            _draw_line(axes, x, [*points.values()], shown.title(options.line, value), number, error=options.error)
        axes.set(xlabel=options.xlabel or "rounds", ylabel=MEASURES[measure].title)
        if len(shown.experiment.axes[options.line]) > 5:
            legend_beside(axes)
        else:
            axes.legend()


def draw_speed(shown: Comparison, figure: "Figure") -> None:
    """The change of loss drawn against time, a line for each method."""
    for axes, runs in _panels(figure, shown, "method"):
        for number, ((method,), same) in enumerate(group(runs, ["method"]).items()):
            points = _spreads(same, "change")
            x = [float(np.mean([run.clock[done] for run in same])) for done in points]
            _draw_line(axes, x, [*points.values()], shown.title("method", method), number, error="standard error")
        time = "virtual time" if shown.options.clock == "virtual" else "seconds of rounds"
        axes.set(xlabel=time, ylabel=MEASURES["change"].title, xscale="symlog")
        legend_beside(axes)


def draw_along_axis(shown: Comparison, figure: "Figure") -> None:
    """Measures after the last round drawn against the values of an axis: a line a method, mean ± standard deviation."""
    options, x, along = shown.options, shown.options.x, shown.options.line
    panel_axes, measures = shown.axes_without(x, along), shown.measured(shown.options.measures)
    groups = [(values, runs, measure) for values, runs in shown.by(*panel_axes).items() for measure in measures]
    every = panels(figure, [shown.panel_title(panel_axes, values) for values, _, _ in groups])
    for axes, (_, runs, measure) in zip(every, groups, strict=True):
        for number, ((value,), same) in enumerate(group(runs, [along]).items()):
            spreads = {at: spread(few, measure) for (at,), few in group(same, [x]).items()}
            points = {at: point for at, point in sorted(spreads.items()) if point is not None}
            _draw_line(axes, [*points], [*points.values()], shown.title(along, value), number)
        if options.log:
            powers(axes, shown.experiment.axes[x])
        axes.set(xlabel=options.xlabel or short(x), ylabel=MEASURES[measure].title)
        axes.set_ylim(options.limits)
        axes.legend()


def draw_grid(shown: Comparison, figure: "Figure") -> None:
    """A heat map of two axes."""
    x, y = shown.options.x, shown.options.y
    (measure,) = shown.measured([shown.options.measure or "rouge"])
    columns, rows = shown.experiment.axes[x], shown.experiment.axes[y]
    for axes, runs in _panels(figure, shown, x, y):
        cells = {key: spread(same, measure) for key, same in group(runs, [y, x]).items()}
        means = [[mean_or_nan(cells.get((row, column))) for column in columns] for row in rows]
        names = [[shown.title(axis, value) for value in values] for axis, values in ((y, rows), (x, columns))]
        heat(axes, names[0], names[1], means, "low" if measure in ("loss", "change") else "high")
        axes.set(xlabel=short(x), ylabel=short(y))
        axes.set_title(f"{axes.get_title(loc='left')}  {MEASURES[measure].title}".strip(), loc="left", fontsize=10)


def draw_marginal(shown: Comparison, figure: "Figure") -> None:
    """Bars of the gain by a further seed, groups by ranges of K."""
    (measure,), gain_of = shown.measured(["rouge"]), gains(shown)
    others = shown.axes_without(shown.options.x)
    for axes, runs in _panels(figure, shown, shown.options.x, "method"):
        series = {
            shown.title("method", method): list(gain_of[tuple(same[0].axes[axis] for axis in others)].values())
            for (method,), same in group(runs, ["method"]).items()
        }
        bars(axes, list(next(iter(gain_of.values()))), series)
        axes.set(xlabel="range of K", ylabel=f"gain a seed, {MEASURES[measure].title}")
        axes.tick_params(axis="x", rotation=20)
        axes.legend()


def draw_probabilities(shown: Comparison, figure: "Figure") -> None:
    """A dot for each direction's probability, a panel for each run of the first seed."""
    runs = first_probabilities(shown)
    every = panels(figure, [shown.experiment.label(run.axes) for run, _ in runs])
    for axes, (run, p) in zip(every, runs, strict=True):
        axes.plot(np.arange(p.size), p, ".", markersize=2, color="#0072B2")
        axes.axhline(1 / p.size, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label="1/K")
        axes.set(xlabel="direction", ylabel="probability", ylim=(0, None))
        axes.legend(title=f"seed {run.seed}")


OUTPUTS = {
    "curves": RunOutput(tables.summary, draw_curves),
    "against": RunOutput(tables.along_axis, draw_along_axis),
    "grid": RunOutput(tables.summary, draw_grid),
    "scores": RunOutput(tables.scores),
    "marginal": RunOutput(tables.marginal, draw_marginal),
    "probabilities": RunOutput(tables.probabilities, draw_probabilities),
    "speed": RunOutput(tables.speed, draw_speed),
}


def _panels(figure: "Figure", shown: Comparison, *within: str) -> "Iterator[tuple[Axes, list[RunOutcome]]]":
    """The panels of a figure with their runs: one for each combination of values of the axes not in `within`."""
    axes = shown.axes_without(*within)
    groups = shown.by(*axes)
    return zip(panels(figure, [shown.panel_title(axes, values) for values in groups]), groups.values(), strict=True)


def _spreads(runs: Sequence[RunOutcome], measure: str) -> dict[int, Spread]:
    """A measure over seeds after each number of rounds for which all runs have it."""
    spreads = {done: spread(runs, measure, done) for done in sorted(runs[0].loss)}
    return {done: point for done, point in spreads.items() if point is not None}


def _draw_line(
    axes: "Axes", x: Sequence[float], points: Sequence[Spread], label: str, number: int, *, error: str = "std"
) -> None:
    widths = [point.std if error == "std" else point.error for point in points]
    line(axes, x, [point.mean for point in points], widths, label, number)
