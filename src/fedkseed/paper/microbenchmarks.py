"""Experiments without whole runs: seconds of syncs, the toy problem of Figure 5, costs of methods.

Each has a record of its table `options`, and gathers rows of plain numbers, which are kept as JSON and not measured
again. What is timed is timed `repeats` times, and a table has mean and standard deviation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from statistics import fmean
from timeit import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..directions import FAMILIES, Pool
from ..directions.operations import accumulate_, materialize
from ..planning.compare import measure
from ..randomness import Purpose, generator, pool_key
from .byte_counts import SEEDS, TABLE_3, TITLES, communication, printed
from .experiments import Experiment, options_of
from .outputs import DrawFigure, legend_beside, line, panels, powers, style
from .results import Cell, ResultTable, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TableRows: TypeAlias = list[dict[str, Any]]
PAPER = "paper's way, PyTorch"
SLICE = 1 << 20  # weights of one tensor in the paper's way of a sync: see benchmarks/sync.py
SAMPLE = {"gaussian": 16, "rademacher": 128}  # directions that are timed, in families whose sync is linear in them
SHAPELESS = tuple(family.name for family in FAMILIES.values() if family.factored is None)  # need no model's shapes
STEP = 1e-6
SECONDS_TO_LATEST = "seconds to the latest model"
VARYING = ("peak_memory", "sync_seconds", "back_seconds", "step_seconds")  # costs that differ from time to time


@dataclass(frozen=True, slots=True)
class Microbenchmark:
    """The functions of an experiment that gather its rows and show them."""

    # of the experiment, paths for its places, and a function that is called with notes on the progress
    gather: "Callable[[Experiment, Mapping[str, str], Callable[[str], None]], TableRows]"
    table: Callable[[Experiment, TableRows], list[dict[str, Cell]]]
    figure: "Callable[[Experiment, TableRows, Figure], None] | None" = None

    def show(self, experiment: Experiment, rows: TableRows) -> tuple[ResultTable, DrawFigure | None]:
        """The table of gathered rows, and the function that draws their figure."""
        table = ResultTable(self.table(experiment, rows), (experiment.note,))
        return table, self.figure and partial(self.figure, experiment, rows)


def spread_cells(experiment: Experiment, rows: TableRows) -> list[dict[str, Cell]]:
    """Rows as they were gathered, with the mean and standard deviation of what was timed several times."""
    return [{name: Spread.of(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows]


@dataclass(frozen=True, slots=True)
class SyncOptions:
    weights: int  # of the model for which seconds are given
    timed: int = 1 << 24  # weights that are timed at most
    device: str = "cpu"
    repeats: int = 5
    sizes: Sequence[int] = ()  # K
    rounds: Sequence[int] = ()  # after which every step is replayed
    steps: int = 0  # local steps of a client in a round
    clients: int = 0  # of a round


def gather_syncs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> TableRows:
    """Seconds to the latest model: by replaying every step (Figure 2), and with K seeds in each family (Figures 2, 8).

    Work that is linear in weights or directions is timed on a part of them and scaled; rows have the size of the part.
    """
    options = options_of(SyncOptions, experiment)
    timed = min(options.weights, options.timed)
    w, out = (torch.full((timed,), 0.02, device=options.device) for _ in range(2))

    def seconds_of(way: str, size: int) -> tuple[list[float], int]:
        """Seconds of a sync Σ_j c_j z_j with K = size, and the number of directions that were timed."""
        pool = None if way == PAPER else Pool(1, size, way)
        c = np.random.default_rng(1).normal(size=size).astype(np.float32) * np.float32(STEP)
        if pool is None:
            few, job = 1, partial(paper_direction, w)
        elif pool.transformed:
            few, job = size, partial(materialize, w, pool, c, out)
        else:
            few = min(SAMPLE[way], size)
            job = partial(accumulate_, out, pool, np.arange(few), c[:few])
        return _scaled(_seconds(job, options.device, options.repeats), size / few * options.weights / timed), few

    rows: TableRows = []
    for size, way in product(options.sizes, (PAPER, *SHAPELESS)):
        seconds, few = seconds_of(way, size)
        tell(f"K = {size:,}, {way}: {Spread.of(seconds)} s")
        rows.append({"way": way, "K": size, "seconds": seconds, "timed directions": few, "timed weights": timed})
    linear = {PAPER: 1, **SAMPLE} if options.rounds else {}
    one_direction = {way: _scaled(seconds_of(way, few)[0], 1 / few) for way, few in linear.items()}
    for rounds, (way, seconds) in product(options.rounds, one_direction.items()):
        steps = rounds * options.steps * options.clients
        replayed = _scaled(seconds, steps)
        rows.append({"way": f"unlimited, {way}", "total steps": steps, "seconds": replayed, "timed weights": timed})
    return rows


def draw_unlimited(experiment: Experiment, rows: TableRows, figure: "Figure") -> None:
    """Figure 2: seconds of a sync against all steps so far; with K seeds they stop growing after K steps."""
    steps = sorted({row["total steps"] for row in rows if "total steps" in row})
    lines, with_seeds = dict[str, list[float]](), dict[str, list[float]]()
    for row in rows:
        seconds = fmean(row["seconds"])
        if "K" in row:
            with_seeds[f"K = {row['K']:,}, {row['way']}"] = [seconds * min(1, s / row["K"]) for s in steps]
        else:
            lines.setdefault(row["way"], []).append(seconds)
    (axes,) = panels(figure, [f"{options_of(SyncOptions, experiment).weights:,} weights"], 7.5)
    for number, (label, seconds) in enumerate((lines | with_seeds).items()):
        axes.plot(steps, seconds, label=label, linewidth=1.6, **style(number))
    axes.set(xscale="log", yscale="log", xlabel="total steps of all clients so far", ylabel=SECONDS_TO_LATEST)
    legend_beside(axes)


def draw_syncs(experiment: Experiment, rows: TableRows, figure: "Figure") -> None:
    """Figure 8: seconds of a sync against K."""
    (axes,) = panels(figure, [f"{options_of(SyncOptions, experiment).weights:,} weights"], 7.5)
    for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        points = {row["K"]: Spread.of(row["seconds"]) for row in rows if row["way"] == way}
        line(axes, [*points], [*points.values()], way, number)
    axes.set(yscale="log", xlabel="K", ylabel=SECONDS_TO_LATEST)
    powers(axes, [row["K"] for row in rows])
    legend_beside(axes)


def paper_direction(w: Tensor) -> None:
    """Add one direction in the way of the paper's sync: new memory for z, for its multiples and for the result.

    Source: Qin et al., 2024, "Further Optimization on Updating Models", the column "Our Implementation"
    """
    rng = torch.Generator(w.device).manual_seed(1)
    parts = list(w.split(SLICE))
    for i, part in enumerate(parts):
        z = torch.normal(0.0, 1.0, part.shape, generator=rng, device=w.device)
        parts[i] = part - STEP * (1e-3 * z)


def _scaled(seconds: Sequence[float], factor: float) -> list[float]:
    return [second * factor for second in seconds]


def _seconds(job: Callable[[], object], device: str, repeats: int) -> list[float]:
    """The times of several calls of a job, after a first call that compiles."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else torch.cpu.synchronize

    def whole_job() -> None:
        job()
        wait()

    whole_job()
    return repeat(whole_job, number=1, repeat=repeats)


@dataclass(frozen=True, slots=True)
class ToyOptions:
    draws: Sequence[int]  # Γ
    sizes: Sequence[int]  # K
    repetitions: int
    d: int = 10_000
    families: Sequence[str] = SHAPELESS


def gather_toy(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> TableRows:
    """Mean absolute coordinate, over d coordinates and all repetitions, of the mean of Γ perturbations drawn from K.

    One coordinate of the mean of Γ perturbations is nearly normal around 0, with a variance of about 1/K + 1/Γ. The
    plain average over coordinates is therefore near 0 for any K; the size of the gap ε of the paper's Lemma 1 is in
    the absolute value. The sum of Γ draws is Σ_j n_j z_j with multinomial counts n: one pass of the library for any Γ.
    """
    options = options_of(ToyOptions, experiment)
    base, mean = torch.zeros(options.d), torch.empty(options.d)
    rows: TableRows = []
    for family in options.families:
        for draws, size in product(options.draws, options.sizes):
            means: list[float] = []
            for repetition in range(options.repetitions):
                counts = generator(repetition, Purpose.BATCHES, size, draws).multinomial(draws, np.full(size, 1 / size))
                materialize(base, Pool(pool_key(repetition), size, family), counts / draws, mean)
                means.append(float(mean.abs().mean()))
            std = float(np.std(means, ddof=1)) if len(means) > 1 else None
            rows.append({"family": family, "Γ": draws, "K": size, "mean |mean|": float(np.mean(means)), "std": std})
        tell(f"{family}: done")
    return rows


def toy_cells(experiment: Experiment, rows: TableRows) -> list[dict[str, Cell]]:
    """The gathered rows, and how much larger each mean is than that of directions from fresh seeds."""
    cells, root = spread_cells(experiment, rows), options_of(ToyOptions, experiment).repetitions ** 0.5
    for cell, row in zip(cells, rows, strict=True):
        fresh = unrestricted(row["Γ"])
        error = "" if row["std"] is None else f" ± {row['std'] / (fresh * root):.3f}"
        cell["times any seed"] = f"{row['mean |mean|'] / fresh:.3f}{error}"
    return cells


def draw_toy(experiment: Experiment, rows: TableRows, figure: "Figure") -> None:
    """Figure 5: a panel a family, a line for each Γ; dotted: Γ unrestricted draws, √(2 / πΓ) for the largest Γ."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    most = max(row["Γ"] for row in rows)
    for axes, family in zip(panels(figure, families), families, strict=True):
        of_family = [row for row in rows if row["family"] == family]
        for number, draws in enumerate(sorted({row["Γ"] for row in of_family})):
            points = {r["K"]: Spread(r["mean |mean|"], r["std"], 1) for r in of_family if r["Γ"] == draws}
            line(axes, [*points], [*points.values()], f"Γ = {draws:,}", number)
        axes.axhline(unrestricted(most), color="black", linewidth=1.2, linestyle=":", label=f"Γ = {most:,}, any seed")
        axes.set(yscale="log", xlabel="K", ylabel="mean absolute value of the mean")
        powers(axes, [row["K"] for row in of_family])
        axes.legend()


def unrestricted(draws: int) -> float:
    """Mean absolute coordinate of the mean of Γ new normal perturbations: E|x| of x ~ N(0, 1/Γ)."""
    return float(np.sqrt(2 / (np.pi * draws)))


@dataclass(frozen=True, slots=True)
class CostOptions:
    repeats: int = 1
    complexity: Mapping[str, Sequence[str]] = field(default_factory=dict)  # method -> the paper's three orders


def gather_costs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> TableRows:
    """Costs of every method with each model, measured one after the other, and in turns where they are repeated."""
    plan = experiment.plan(seeds=[0])
    costs: list[list[dict[str, Any]]] = [[] for _ in plan]  # of each planned run, those of every repetition
    turns = range(options_of(CostOptions, experiment).repeats)
    for turn, (planned, repetitions) in product(turns, zip(plan, costs, strict=True)):
        tell(f"measuring {experiment.label(planned.axes)}" + (f", time {turn + 1}" if turn else ""))
        repetitions.append(asdict(measure(planned.recipe(places), planned.table["training"]["algorithm"])))
    return [
        {**planned.axes, **times[0], **{name: [cost[name] for cost in times] for name in VARYING}}
        for planned, times in zip(plan, costs, strict=True)
    ]


def complexity_cells(experiment: Experiment, rows: TableRows) -> list[dict[str, Cell]]:
    """Table 1: orders of growth as the paper gives them, beside costs measured here."""
    orders, table = options_of(CostOptions, experiment).complexity, list[dict[str, Cell]]()
    for row in (row for row in rows if row["method"] in orders):
        growth = dict(zip(("communication", "memory", "computation"), orders[row["method"]], strict=True))
        table.append({"approach": experiment.title_of("method", row["method"]), **growth, **_costs(row)})
    return table


def overhead_cells(experiment: Experiment, rows: TableRows) -> list[dict[str, Cell]]:
    """Table 3: the paper's cells, the same by the arithmetic of `byte_counts`, and costs measured here."""
    measured = {row["method"]: row for row in rows}
    table: list[dict[str, Cell]] = []
    for method in experiment.axes["method"]:
        row: dict[str, Cell] = {"approach": experiment.title_of("method", method)}
        for (title, sizes), (sent, memory) in zip(TITLES.items(), TABLE_3.get(method, ()), strict=False):
            computed = printed(communication(method, sizes, SEEDS[title].get(method, 0)))
            row |= {f"{title}: paper": sent, f"{title}: computed": computed, f"{title}: memory, paper": memory}
        table.append(row | (_costs(measured[method]) if method in measured else {}))
    return table


def step_cells(experiment: Experiment, rows: TableRows) -> list[dict[str, Cell]]:
    """The measured costs of each model and method."""
    title_of = partial(experiment.title_of, "method")
    return [{"model": row["model"], "approach": title_of(row["method"]), **_costs(row)} for row in rows]


def draw_steps(experiment: Experiment, rows: TableRows, figure: "Figure") -> None:
    """Figure 14: seconds of a local step against trainable weights."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, model in zip(panels(figure, models), models, strict=True):
        for number, row in enumerate(r for r in rows if r["model"] == model):
            look, seconds = {**style(number), "linestyle": "none", "markersize": 8}, Spread.of(row["step_seconds"])
            label = experiment.title_of("method", row["method"])
            axes.errorbar([row["trainable"]], [seconds.mean], [seconds.std or 0], label=label, **look)
        axes.set(xscale="log", xlabel="trainable weights", ylabel="seconds a local step", ylim=(0, None))
        legend_beside(axes)


def _costs(row: Mapping[str, Any]) -> dict[str, Cell]:
    """The measured costs of a row as cells; "back" is for a client that has missed `compare.ROUNDS_AWAY` rounds."""
    return {
        "trainable": row["trainable"], "bytes down": row["bytes_down"], "bytes up": row["bytes_up"],
        "bytes down, back": row["bytes_back"], "memory (MB)": Spread.of(_scaled(row["peak_memory"], 1e-6)),
        "sync (ms)": Spread.of(_scaled(row["sync_seconds"], 1e3)),
        "sync, back (ms)": Spread.of(_scaled(row["back_seconds"], 1e3)), "a step (s)": Spread.of(row["step_seconds"]),
    }  # fmt: skip


MEASURED = {
    "unlimited": Microbenchmark(gather_syncs, spread_cells, draw_unlimited),
    "syncs": Microbenchmark(gather_syncs, spread_cells, draw_syncs),
    "toy": Microbenchmark(gather_toy, toy_cells, draw_toy),
    "complexity": Microbenchmark(gather_costs, complexity_cells),
    "overhead": Microbenchmark(gather_costs, overhead_cells),
    "steps": Microbenchmark(gather_costs, step_cells, draw_steps),
}
