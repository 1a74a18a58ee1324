"""Figures as PNG and SVG, in colours, marks and dashes that can be distinguished with any kind of colour vision.

matplotlib is in the extra `plots`. It is imported in this module alone, and used without its global state.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import FedKSeedError
from ..files import border

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DrawFigure: TypeAlias = Callable[["Figure"], None]

# Okabe and Ito's colours; beyond eight lines, dashes and marks distinguish lines of the same colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777")
MARKS, DASHES = "osD^vP*X", ("-", (0, (5, 2)), (0, (1.5, 1.5)))
WIDTH, HEIGHT = 4.6, 3.5  # of a panel, inches
ENTRIES, COLUMN = 12, 2.4  # of a legend: entries in the height of a panel; inches of a further column
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "fedkseed",
    "figure.constrained_layout.use": True, "legend.frameon": False, "legend.fontsize": 8.5, "lines.markersize": 4,
}  # fmt: skip


def save(draw: DrawFigure, folder: Path, stem: str = "figure") -> None:
    """Draw a figure and write it as `stem`.png and `stem`.svg.

    Raises:
        FedKSeedError: matplotlib is missing, or the files can't be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FedKSeedError("figures need the extra `plots`: pip install 'fedkseed[plots]'") from error
    with rc_context(STYLE):
        figure = Figure()
        draw(figure)
        with border(f"can't write the figure to {folder}"):
            figure.savefig(folder / f"{stem}.png", dpi=160, metadata={"Software": None})
            figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})


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
    turn = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[(number + turn) % len(MARKS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def line(
    axes: "Axes", x: Sequence[float], mean: Sequence[float], width: Sequence[float | None], label: str, number: int
) -> None:
    """Draw a line, with a band of `width` above and below it if all widths are known."""
    look = style(number)
    axes.plot(x, mean, label=label, linewidth=1.6, **look)
    if all(w is not None for w in width):
        m, w = np.asarray(mean, float), np.asarray(width, float)
        axes.fill_between(x, m - w, m + w, color=look["color"], alpha=0.15, linewidth=0)


def legend_beside(axes: "Axes") -> None:
    """Draw a legend to the right of a panel; further columns, in a wider figure, hold more entries than its height."""
    columns = -(-len(axes.get_legend_handles_labels()[1]) // ENTRIES)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), ncols=max(1, columns))
    figure = axes.get_figure(root=True)
    if figure is not None and columns > 1:
        figure.set_figwidth(figure.get_figwidth() + COLUMN * (columns - 1))


def powers(axes: "Axes", values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with the values themselves as ticks, or every n-th so that there are at most 8."""
    axes.set_xscale("log", base=2)
    shown = sorted(set(values))
    shown = shown[:: -(-len(shown) // 8)]
    axes.set_xticks(shown, [f"{value:,g}" for value in shown])
    axes.minorticks_off()


def heat(
    axes: "Axes", rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], better: str
) -> None:
    """Draw a grid of numbers, in which darker cells are better.

    Args:
        better: `high` or `low`.
    """
    data = np.asarray(values, float)
    axes.imshow(data, cmap="cividis_r" if better == "high" else "cividis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    middle = (np.nanmax(data) + np.nanmin(data)) / 2
    for (i, j), value in np.ndenumerate(data):
        dark = value > middle if better == "high" else value < middle
        axes.text(j, i, f"{value:.4g}", ha="center", va="center", color="white" if dark else "black")
    axes.spines[:].set_visible(False)


def bars(axes: "Axes", groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw groups of bars side by side, each series in a colour of its own."""
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        at = np.arange(len(groups)) + (number - (len(series) - 1) / 2) * width
        axes.bar(at, values, width, label=label, color=COLOURS[number % len(COLOURS)])
    axes.set_xticks(range(len(groups)), groups)
    axes.axhline(0, color="black", linewidth=0.8)
