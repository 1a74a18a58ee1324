"""Experiments without whole runs: seconds of syncs, the toy problem of Figure 5, costs of methods.

Each gathers rows of plain numbers, which are kept as JSON and not measured again. Tables and figures are made of them.
What is timed is timed `repeats` times (an option of the experiment), and a table has mean and standard deviation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..directions import FAMILIES, Pool
from ..directions.operations import accumulate_, materialize
from ..planning.compare import measure
from ..randomness import Purpose, generator, pool_key
from . import byte_counts
from .experiments import Experiment, short
from .figures import Draw, legend_beside, line, panels, powers, style
from .results import Cell, ResultTable, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = list[dict[str, Any]]
PAPER = "paper's way, PyTorch"
SLICE = 1 << 20  # weights of one tensor in the paper's way of a sync: see benchmarks/sync.py
SAMPLE = {"gaussian": 16, "rademacher": 128}  # directions that are timed, in families whose sync is linear in them
EVERYWHERE = [family.name for family in FAMILIES.values() if family.factored is None]  # no model's shapes needed
STEP = 1e-6
REPEATS = 5  # of what is timed, unless the experiment says otherwise
VARYING = ("peak_memory", "sync_seconds", "back_seconds", "step_seconds")  # costs that differ from time to time


@dataclass(frozen=True, slots=True)
class Microbenchmark:
    """The functions of an experiment that gather its rows and show them.

    `gather` takes the experiment, paths for its places, and a function that is called with notes on the progress.
    """

    gather: "Callable[[Experiment, Mapping[str, str], Callable[[str], None]], Rows]"
    show: Callable[[Experiment, Rows], tuple[ResultTable, Draw | None]]


# --- seconds of syncs -----------------------------------------------------------------------------


def gather_syncs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> Rows:
    """Seconds to the latest model: by replaying every step (Figure 2), and with K seeds in each family (Figures 2, 8).

    Work that is linear in weights or directions is timed on a part of them and scaled; each row has the size of the
    part.
    """
    options = experiment.options
    weights, device, repeats = options["weights"], options.get("device", "cpu"), options.get("repeats", REPEATS)
    timed = min(weights, options.get("timed", 1 << 24))
    w, out = (torch.full((timed,), 0.02, device=device) for _ in range(2))
    whole = weights / timed

    def paper(size: int) -> tuple[list[float], int]:
        return _scaled(_seconds(lambda: paper_direction(w), device, repeats), size * whole), 1

    def ours(family: str, size: int) -> tuple[list[float], int]:
        seconds, directions = _sync(family, size, w, out, repeats)
        return _scaled(seconds, whole), directions

    ways = {PAPER: paper} | {family: partial(ours, family) for family in EVERYWHERE}
    rows: Rows = []
    for size in options.get("sizes", []):
        for way, run in ways.items():
            seconds, directions = run(size)
            tell(f"K = {size:,}, {way}: {Spread.of(seconds)} s")
            rows.append(
                {"way": way, "K": size, "seconds": seconds, "timed directions": directions, "timed weights": timed}
            )
    linear = {PAPER: 1, **SAMPLE} if "rounds" in options else {}
    one = {way: _scaled(ways[way](few)[0], 1 / few) for way, few in linear.items()}
    for rounds in options.get("rounds", []):
        steps = rounds * options["steps"] * options["clients"]
        for way, seconds in one.items():
            replayed = _scaled(seconds, steps)
            rows.append({"way": f"unlimited, {way}", "total steps": steps, "seconds": replayed, "timed weights": timed})
    return rows


def show_unlimited(experiment: Experiment, rows: Rows) -> tuple[ResultTable, Draw]:
    """Figure 2: seconds of a sync against all steps so far; with K seeds they stop growing after K steps."""
    steps = sorted({row["total steps"] for row in rows if "total steps" in row})
    lines: dict[str, list[float]] = {}
    for row in rows:
        if "total steps" in row:
            lines.setdefault(row["way"], []).append(fmean(row["seconds"]))
    for row in rows:
        if "K" in row:
            lines[f"K = {row['K']:,}, {row['way']}"] = [fmean(row["seconds"]) * min(1, s / row["K"]) for s in steps]

    def draw(figure: "Figure") -> None:
        (axes,) = panels(figure, [f"{experiment.options['weights']:,} weights"], 7.5)
        for number, (label, seconds) in enumerate(lines.items()):
            axes.plot(steps, seconds, label=label, linewidth=1.6, **style(number))
        axes.set(
            xscale="log", yscale="log", xlabel="total steps of all clients so far", ylabel="seconds to the latest model"
        )
        legend_beside(axes)

    return ResultTable([_cells(row) for row in rows], _notes(experiment)), draw


def show_syncs(experiment: Experiment, rows: Rows) -> tuple[ResultTable, Draw]:
    """Figure 8: seconds of a sync against K."""

    def draw(figure: "Figure") -> None:
        (axes,) = panels(figure, [f"{experiment.options['weights']:,} weights"], 7.5)
        for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
            mine = {row["K"]: Spread.of(row["seconds"]) for row in rows if row["way"] == way}
            line(axes, list(mine), [s.mean for s in mine.values()], [s.std for s in mine.values()], way, number)
        axes.set(yscale="log", xlabel="K", ylabel="seconds to the latest model")
        powers(axes, [row["K"] for row in rows])
        legend_beside(axes)

    return ResultTable([_cells(row) for row in rows], _notes(experiment)), draw


def paper_direction(w: Tensor) -> None:
    """Add one direction in the way of the paper's sync: new memory for z, for its multiples and for the result.

    Source: Qin et al., 2024, "Further Optimization on Updating Models", the column "Our Implementation"
    """
    rng = torch.Generator(w.device).manual_seed(1)
    parts = list(w.split(SLICE))
    for i, part in enumerate(parts):
        z = torch.normal(0.0, 1.0, part.shape, generator=rng, device=w.device)
        parts[i] = part - STEP * (1e-3 * z)


def _sync(family: str, size: int, w: Tensor, out: Tensor, repeats: int) -> tuple[list[float], int]:
    """Seconds of Σ_j c_j z_j over these weights, several times, and the number of directions that were timed."""
    pool, device = Pool(1, size, family), w.device.type
    c = np.random.default_rng(1).normal(size=size).astype(np.float32) * np.float32(STEP)
    if pool.transformed:
        return _seconds(lambda: materialize(w, pool, c, out), device, repeats), size
    few = min(SAMPLE[family], size)
    taken = _seconds(lambda: accumulate_(out, pool, np.arange(few), c[:few]), device, repeats)
    return _scaled(taken, size / few), few


def _scaled(seconds: Sequence[float], factor: float) -> list[float]:
    return [one * factor for one in seconds]


def _seconds(job: Callable[[], object], device: str, repeats: int) -> list[float]:
    """The times of several calls of a job, after a first call that compiles."""
    job()
    taken = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        job()
        _wait(device)
        taken.append(time.perf_counter() - begin)
    return taken


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# --- the toy problem of Figure 5 ------------------------------------------------------------------


def gather_toy(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> Rows:
    """Mean absolute coordinate, over d coordinates and all repetitions, of the mean of Γ perturbations drawn from K.

    One coordinate of the mean of Γ perturbations is nearly normal around 0, with a variance of about 1/K + 1/Γ. The
    plain average over coordinates is therefore near 0 for any K; the size of the gap ε of the paper's Lemma 1 is in
    the absolute value. The sum of Γ draws is Σ_j n_j z_j with multinomial counts n: one pass of the library for any Γ.
    """
    options, rows = experiment.options, []
    d = options.get("d", 10_000)
    base, mean = torch.zeros(d), torch.empty(d)
    for family in options.get("families", EVERYWHERE):
        for draws in options["draws"]:
            for size in options["sizes"]:
                found = []
                for repetition in range(options["repetitions"]):
                    pool = Pool(pool_key(repetition), size, family)
                    rng = generator(repetition, Purpose.BATCHES, size, draws)
                    counts = rng.multinomial(draws, np.full(size, 1 / size))
                    materialize(base, pool, counts / draws, mean)
                    found.append(float(mean.abs().mean()))
                std = float(np.std(found, ddof=1)) if len(found) > 1 else None
                rows.append({"family": family, "Γ": draws, "K": size, "mean |mean|": float(np.mean(found)), "std": std})
        tell(f"{family}: done")
    return rows


def show_toy(experiment: Experiment, rows: Rows) -> tuple[ResultTable, Draw]:
    """Figure 5: a panel a family, a line for each Γ; dotted: Γ unrestricted draws, √(2 / πΓ) for the largest Γ."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    most = max(row["Γ"] for row in rows)

    def draw(figure: "Figure") -> None:
        for axes, family in zip(panels(figure, families), families, strict=True):
            mine = [row for row in rows if row["family"] == family]
            for number, draws in enumerate(sorted({row["Γ"] for row in mine})):
                points = [row for row in mine if row["Γ"] == draws]
                means = [row["mean |mean|"] for row in points]
                line(
                    axes, [row["K"] for row in points], means, [row["std"] for row in points], f"Γ = {draws:,}", number
                )
            axes.axhline(
                unrestricted(most), color="black", linewidth=1.2, linestyle=":", label=f"Γ = {most:,}, any seed"
            )
            axes.set(yscale="log", xlabel="K", ylabel="mean absolute value of the mean")
            powers(axes, [row["K"] for row in mine])
            axes.legend()

    count = experiment.options["repetitions"]
    cells = [_cells(row) | {"times any seed": _times_any_seed(row, count)} for row in rows]
    return ResultTable(cells, _notes(experiment)), draw


def _times_any_seed(row: Mapping[str, Any], count: int) -> str:
    """The mean over that of Γ unrestricted draws, and its standard error."""
    ratio, scale = row["mean |mean|"] / unrestricted(row["Γ"]), unrestricted(row["Γ"]) * count**0.5
    return f"{ratio:.3f}" + ("" if row["std"] is None else f" ± {row['std'] / scale:.3f}")


def unrestricted(draws: int) -> float:
    """Mean absolute coordinate of the mean of Γ new normal perturbations: E|x| of x ~ N(0, 1/Γ)."""
    return float(np.sqrt(2 / (np.pi * draws)))


# --- costs ----------------------------------------------------------------------------------------


class MeasuredCosts(Protocol):
    """The results of `fedkseed.planning.compare.measure` that are shown here."""

    bytes_down: int
    bytes_up: int
    trainable: int
    peak_memory: int
    sync_seconds: float
    step_seconds: float


def gather_costs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> Rows:
    """Costs of every method with each model, measured one after the other, and in turns where they are repeated."""
    plan, found = experiment.plan(seeds=[0]), list[list[dict[str, Any]]]()
    for repeat in range(experiment.options.get("repeats", 1)):
        found.append([])
        for planned in plan:
            tell(f"measuring {experiment.label(planned.axes)}" + (f", time {repeat + 1}" if repeat else ""))
            algorithm = planned.table["training"]["algorithm"]
            found[-1].append(asdict(measure(planned.recipe(places), algorithm)))
    rows: Rows = []
    for planned, *times in zip(plan, *found, strict=True):
        rows.append({**planned.axes, **times[0], **{name: [one[name] for one in times] for name in VARYING}})
    return rows


def show_complexity(experiment: Experiment, rows: Rows) -> tuple[ResultTable, None]:
    """Table 1: orders of growth as the paper gives them, beside costs measured here."""
    table: list[dict[str, Cell]] = []
    for row in rows:
        orders_of = experiment.options["complexity"].get(row["method"])
        if orders_of is not None:
            orders = dict(zip(("communication", "memory", "computation"), orders_of, strict=True))
            approach = experiment.title_of("method", row["method"])
            table.append({"approach": approach, **orders, **_costs(experiment, row)})
    return ResultTable(table, _notes(experiment)), None


def show_overhead(experiment: Experiment, rows: Rows) -> tuple[ResultTable, None]:
    """Table 3: the paper's cells, the same by the arithmetic of `byte_counts`, and costs measured here."""
    measured = {row["method"]: row for row in rows}
    table: list[dict[str, Cell]] = []
    for method in experiment.axes["method"]:
        row: dict[str, Cell] = {"approach": experiment.title_of("method", method)}
        cells = byte_counts.TABLE_3.get(method, (None, None))
        for (title, of), cell in zip(byte_counts.TITLES.items(), cells, strict=True):
            if cell is not None:
                bytes_ = byte_counts.communication(method, of, byte_counts.SEEDS[title].get(method, 0))
                row |= {
                    f"{title}: paper": cell[0],
                    f"{title}: computed": byte_counts.printed(bytes_),
                    f"{title}: memory, paper": cell[1],
                }
        table.append(row | (_costs(experiment, measured[method]) if method in measured else {}))
    return ResultTable(table, _notes(experiment)), None


def show_steps(experiment: Experiment, rows: Rows) -> tuple[ResultTable, Draw]:
    """Figure 14: seconds of a local step against trainable weights."""
    models = list(dict.fromkeys(row["model"] for row in rows))

    def draw(figure: "Figure") -> None:
        for axes, model in zip(panels(figure, models), models, strict=True):
            for number, row in enumerate(r for r in rows if r["model"] == model):
                look = {**style(number), "linestyle": "none", "markersize": 8}
                seconds, label = Spread.of(row["step_seconds"]), experiment.title_of("method", row["method"])
                axes.errorbar([row["trainable"]], [seconds.mean], [seconds.std or 0], label=label, **look)
            axes.set(xscale="log", xlabel="trainable weights", ylabel="seconds a local step", ylim=(0, None))
            legend_beside(axes)

    named = [{"model": row["model"], "approach": experiment.title_of("method", row["method"])} for row in rows]
    return ResultTable([n | _costs(experiment, r) for n, r in zip(named, rows, strict=True)], _notes(experiment)), draw


def _costs(experiment: Experiment, row: Mapping[str, Any]) -> dict[str, Cell]:
    """The measured costs of a row as cells; "back" is for a client that has missed `compare.AWAY` rounds."""
    return {
        "trainable": row["trainable"],
        "bytes down": row["bytes_down"],
        "bytes up": row["bytes_up"],
        "bytes down, back": row["bytes_back"],
        "memory (MB)": Spread.of(_scaled(row["peak_memory"], 1e-6)),
        "sync (ms)": Spread.of(_scaled(row["sync_seconds"], 1e3)),
        "sync, back (ms)": Spread.of(_scaled(row["back_seconds"], 1e3)),
        "a step (s)": Spread.of(row["step_seconds"]),
    }


def _cells(row: Mapping[str, Any]) -> dict[str, Cell]:
    return {short(name): Spread.of(value) if isinstance(value, list) else value for name, value in row.items()}


def _notes(experiment: Experiment) -> tuple[str, ...]:
    return (experiment.note,) if experiment.note else ()


MEASURED = {
    "unlimited": Microbenchmark(gather_syncs, show_unlimited),
    "syncs": Microbenchmark(gather_syncs, show_syncs),
    "toy": Microbenchmark(gather_toy, show_toy),
    "complexity": Microbenchmark(gather_costs, show_complexity),
    "overhead": Microbenchmark(gather_costs, show_overhead),
    "steps": Microbenchmark(gather_costs, show_steps),
}
