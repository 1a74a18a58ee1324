"""Every kind of output that finished runs can be shown by: a table, and the figure that goes with it.

Figures are PNG and SVG, in colours, marks and dashes that can be distinguished with any kind of colour vision.
matplotlib is in the extra `plots`. It is imported in this module alone, and used without its global state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import needs_extra
from ..files import border
from . import tables
from .experiments import short
from .results import MEASURES, ResultTable, RunOutcome, Spread, group, spread
from .tables import Comparison, first_probabilities, gains, mean_or_nan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawFigure: TypeAlias = Callable[["Figure"], None]

# Okabe and Ito's colours; beyond eight lines, dashes and marks distinguish lines of the same colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
MARKS, DASHES = "osD^vP*X", ("-", (0, (5, 2)), (0, (1.5, 1.5)))
WIDTH, HEIGHT = 4.6, 3.5  # of a panel, inches
ENTRIES, COLUMN = 12, 2.4  # of a legend: entries in the height of a panel; inches of a further column
LETTER = 0.07  # inches, of a legend's label
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "fedkseed",
    "figure.constrained_layout.use": True, "legend.frameon": False, "legend.fontsize": 8.5, "lines.markersize": 4,
}  # fmt: skip


def save(draw: DrawFigure, folder: Path) -> None:
    """Draw a figure and write it as figure.png and figure.svg."""
    with needs_extra("figures need", "plots"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    with rc_context(STYLE):
        figure = Figure()
        draw(figure)
        with border(f"can't write the figure to {folder}"):
            figure.savefig(folder / "figure.png", dpi=160, metadata={"Software": None})
            figure.savefig(folder / "figure.svg", metadata={"Date": None})


def panels(figure: "Figure", titles: Sequence[str], width: float = WIDTH) -> "list[Axes]":
    """Axes side by side, two or three in a row, each with a title."""
    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure.set_size_inches(width * columns, HEIGHT * rows)
    every = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(title, loc="left", fontsize=10)
    return every[: len(titles)]


def style(number: int) -> dict[str, Any]:
    """The colour, mark and dashes of line `number` of a panel."""
    turn, colour = divmod(number, len(COLOURS))
    marker, dashes = MARKS[(number + turn) % len(MARKS)], DASHES[turn % len(DASHES)]
    return {"color": COLOURS[colour], "marker": marker, "linestyle": dashes}


def line(
    axes: "Axes", x: Sequence[float], points: Sequence[Spread], label: str, number: int, *, error: str = "std"
) -> None:
    """Draw a line through the means, in a band as wide as the standard deviations or errors if all are known."""
    look, means = style(number), np.array([point.mean for point in points])
    axes.plot(x, means, label=label, linewidth=1.6, **look)
    widths = [point.std if error == "std" else point.error for point in points]
    if None not in widths:
        width = np.array(widths, float)
        axes.fill_between(x, means - width, means + width, color=look["color"], alpha=0.15, linewidth=0)


def legend_beside(axes: "Axes") -> None:
    """Draw a legend to the right of a panel; a wider figure holds further columns, and labels longer than a column."""
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, -(-len(labels) // ENTRIES))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), ncols=columns)
    figure = axes.get_figure(root=True)
    if figure is not None and labels:
        longer = max(0.0, LETTER * max(map(len, labels)) - COLUMN)
        figure.set_figwidth(figure.get_figwidth() + COLUMN * (columns - 1) + longer * columns)


def powers(axes: "Axes", values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with the values themselves as ticks, or every n-th so that there are at most 8."""
    axes.set_xscale("log", base=2)
    shown = sorted(set(values))
    shown = shown[:: -(-len(shown) // 8)]
    axes.set_xticks(shown, [f"{value:,g}" for value in shown])
    axes.minorticks_off()


@dataclass(frozen=True, slots=True)
class RunOutput:
    table: Callable[[Comparison], ResultTable]
    figure: "Callable[[Comparison, Figure], None] | None" = None


def draw_curves(shown: Comparison, figure: "Figure") -> None:
    """A measure drawn against rounds: a line for each value of an axis, a panel for each combination of the others."""
    options, measure = shown.options, shown.options.measure or "loss"
    for axes, runs in _panels(figure, shown, options.line):
        for number, ((value,), same) in enumerate(group(runs, [options.line]).items()):
            points = _spreads(same, measure)
            x = [done * options.steps_of("default") for done in points]
            line(axes, x, [*points.values()], shown.title(options.line, value), number, error=options.error)
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
            line(axes, x, [*points.values()], shown.title("method", method), number, error="standard error")
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
            by_x = sorted(group(same, [x]).items())
            points = {at: point for (at,), few in by_x if (point := spread(few, measure)) is not None}
            line(axes, [*points], [*points.values()], shown.title(along, value), number)
        if options.log:
            powers(axes, shown.experiment.axes[x])
        axes.set(xlabel=options.xlabel or short(x), ylabel=MEASURES[measure].title, ylim=options.limits)
        axes.legend()


def draw_grid(shown: Comparison, figure: "Figure") -> None:
    """A heat map of two axes."""
    x, y = shown.options.x, shown.options.y
    (measure,) = shown.measured([shown.options.measure or "rouge"])
    columns, rows = shown.experiment.axes[x], shown.experiment.axes[y]
    for axes, runs in _panels(figure, shown, x, y):
        cells = {key: spread(same, measure) for key, same in group(runs, [y, x]).items()}
        means = [[mean_or_nan(cells.get((row, column))) for column in columns] for row in rows]
        data, less_is_better = np.asarray(means, float), measure in ("loss", "change")
        axes.imshow(data, cmap="cividis" if less_is_better else "cividis_r", aspect="auto")  # darker is better
        axes.set_xticks(range(len(columns)), [shown.title(x, value) for value in columns])
        axes.set_yticks(range(len(rows)), [shown.title(y, value) for value in rows])
        middle = (np.nanmax(data) + np.nanmin(data)) / 2
        for (i, j), mean in np.ndenumerate(data):
            dark = mean < middle if less_is_better else mean > middle
            axes.text(j, i, f"{mean:.4g}", ha="center", va="center", color="white" if dark else "black")
        axes.spines[:].set_visible(False)
        axes.set(xlabel=short(x), ylabel=short(y))
        axes.set_title(f"{axes.get_title(loc='left')}  {MEASURES[measure].title}".strip(), loc="left", fontsize=10)


def draw_marginal(shown: Comparison, figure: "Figure") -> None:
    """Bars of the gain by a further seed, groups by ranges of K."""
    (measure,), gain_of = shown.measured(["rouge"]), gains(shown)
    others = shown.axes_without(shown.options.x)
    for axes, runs in _panels(figure, shown, shown.options.x, "method"):
        methods, ranges = group(runs, ["method"]), [*next(iter(gain_of.values()))]
        width = 0.8 / len(methods)
        for number, ((method,), same) in enumerate(methods.items()):
            heights = [*gain_of[tuple(same[0].axes[axis] for axis in others)].values()]
            at = np.arange(len(ranges)) + (number - (len(methods) - 1) / 2) * width
            axes.bar(at, heights, width, label=shown.title("method", method), color=COLOURS[number % len(COLOURS)])
        axes.set_xticks(range(len(ranges)), ranges)
        axes.axhline(0, color="black", linewidth=0.8)
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
    return {done: at for done in sorted(runs[0].loss) if (at := spread(runs, measure, done)) is not None}
