"""The two figures of the README, from the output of sync.py and memory.py with `--json`.

python benchmarks/plots.py --sync sync.json --memory memory.json [--output docs/figures]
"""

import argparse
import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from memory import BASE, OURS
from sync import COPY, EFFICIENT, PAPER

# Okabe and Ito's colours, which can be distinguished with any colour vision; grey is for the reference.
BLUE, SKY, GREEN, RED, ORANGE, GREY = "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#777777"
LINES = {
    f"{PAPER}": ("the paper's way, PyTorch", RED), f"{EFFICIENT}": ("its more efficient way, PyTorch", ORANGE),
    "gaussian: sync": ("gaussian", GREEN), "rademacher: sync": ("rademacher", SKY),
    "hadamard: sync": ("hadamard", BLUE), "hashed: sync": ("hashed", "black"),
}  # fmt: skip
STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "fedkseed",
    "figure.constrained_layout.use": True,
}  # fmt: skip


def sync(measured: dict[str, Any], axes: Axes) -> None:
    """Draw seconds against K: a line for every family, for both ways of the paper in PyTorch, and for a plain copy."""
    rows = measured["rows"]
    copy = next(row["seconds"] for row in rows if row["what"] == COPY)
    ends: list[tuple[float, str, str]] = [(copy, "a plain copy of the weights", GREY)]
    for what, (label, colour) in LINES.items():
        points = [(row["K"], row["seconds"]) for row in rows if row["what"] == what]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, linewidth=1.8)
        ends.append((points[-1][1], label, colour))
    axes.axhline(copy, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
    sizes = sorted({row["K"] for row in rows if row["what"] in LINES})
    axes.set(xscale="log", yscale="log", xlabel="K, directions that are summed", xlim=(sizes[0] / 1.2, sizes[-1]))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s:g} s" if s < 1e3 else f"{s:,.0f} s"))
    axes.set_title("Time to the latest model", loc="left")
    for (_, label, colour), height in zip(sorted(ends), apart(sorted(end[0] for end in ends)), strict=True):
        axes.text(sizes[-1] * 1.15, height, label, color=colour, va="center")


def apart(heights: Sequence[float], factor: float = 1.9) -> list[float]:
    """Ascending heights of labels on a logarithmic axis, moved up where two labels would touch."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] * factor) if moved else height)
    return moved


def memory(measured: dict[str, Any], axes: Axes) -> None:
    """Draw the GB of every method, the least at the top, with their ratios to inference in 16 bits."""
    rows = sorted((row for row in measured["rows"] if isfinite(row["GB"])), key=lambda row: -row["GB"])
    kinds = {row["method"]: BLUE if row["method"] in OURS else RED for row in rows} | {BASE: GREY}
    types = [row["type"] if row["storage"] == "dense" else f"{row['storage']} in {row['type']}" for row in rows]
    names = [f"{row['method']}, {kind}" for row, kind in zip(rows, types, strict=True)]
    bars = axes.barh(names, [row["GB"] for row in rows], color=[kinds[row["method"]] for row in rows], height=0.7)
    ratios = [f"{row['GB']:.2f} GB, {row['over 16-bit inference']:.2f} ×" for row in rows]
    axes.bar_label(bars, ratios, padding=4, fontsize=8.5)
    axes.set(xlabel="GB", xlim=(0, 1.25 * rows[0]["GB"]))
    axes.tick_params(axis="y", length=0)
    axes.set_title("Peak memory, and times that of 16-bit inference", loc="left")
    for height, (text, colour) in enumerate((("inference", GREY), ("ours", BLUE), ("the peers'", RED))):
        axes.text(0.97, 0.95 - 0.06 * height, text, color=colour, weight="bold", ha="right", transform=axes.transAxes)


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of the README.")
    parser.add_argument("--sync", type=Path, help="file with the output of sync.py --json")
    parser.add_argument("--memory", type=Path, help="file with the output of memory.py --json")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    figures = (("sync", sync, args.sync, (7.5, 4.2)), ("memory", memory, args.memory, (7.5, 5.4)))
    for name, draw, source, size in figures:
        if source is not None:
            with plt.rc_context(STYLE):
                figure, axes = plt.subplots(figsize=size)
                draw(json.loads(source.read_text()), axes)
                figure.savefig(args.output / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
