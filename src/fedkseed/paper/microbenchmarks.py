"""Experiments without whole runs: seconds of syncs, the toy problem of Figure 5, costs of methods.

Each gathers rows of plain numbers, which are kept as JSON and not measured again. Tables and figures are made of them.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..directions import FAMILIES, Pool
from ..directions.operations import accumulate_, materialize
from ..randomness import Purpose, generator, pool_key
from ..tools.compare import measure
from . import byte_counts
from .experiments import Experiment, short
from .figures import Draw, legend_beside, line, panels, powers, style
from .results import Cell, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows: TypeAlias = list[dict[str, Any]]
PAPER = "paper's way, PyTorch"
SLICE = 1 << 20  # weights of one tensor in the paper's way of a sync: see benchmarks/sync.py
SAMPLE = {"gaussian": 16, "rademacher": 128}  # directions that are timed, in families whose sync is linear in them
EVERYWHERE = [family.name for family in FAMILIES.values() if family.factored is None]  # no model's shapes needed
STEP = 1e-6


@dataclass(frozen=True, slots=True)
class Measured:
    """The functions of an experiment that gather its rows and show them.

    `gather` takes the experiment, paths for its places, and a function that is called with notes on the progress.
    """

    gather: "Callable[[Experiment, Mapping[str, str], Callable[[str], None]], Rows]"
    show: Callable[[Experiment, Rows], tuple[Table, Draw | None]]


# --- seconds of syncs -----------------------------------------------------------------------------


def gather_syncs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> Rows:
    """Seconds to the latest model: by replaying every step (Figure 2), and with K seeds in each family (Figures 2, 8).

    Work that is linear in weights or directions is timed on a part of them and scaled; each row has the size of the
    part.
    """
    options = experiment.options
    weights, device = options["weights"], options.get("device", "cpu")
    timed = min(weights, options.get("timed", 1 << 24))
    w, out = (torch.full((timed,), 0.02, device=device) for _ in range(2))
    one_paper = _seconds(lambda: paper_direction(w), device) * weights / timed
    tell(f"{PAPER}: {one_paper:.3g} s a direction")
    rows: Rows = []
    ways: dict[str, Callable[[int], tuple[float, int]]] = {PAPER: lambda size: (one_paper * size, 1)}
    for family in EVERYWHERE:
        ways[family] = lambda size, family=family: _sync(family, size, w, out, weights / timed)
    for size in options.get("sizes", []):
        for way, run in ways.items():
            seconds, directions = run(size)
            tell(f"K = {size:,}, {way}: {seconds:.3g} s")
            rows.append(
                {"way": way, "K": size, "seconds": seconds, "timed directions": directions, "timed weights": timed}
            )
    one = {PAPER: one_paper} | {f: ways[f](SAMPLE[f])[0] / SAMPLE[f] for f in SAMPLE} if "rounds" in options else {}
    for rounds in options.get("rounds", []):
        steps = rounds * options["steps"] * options["clients"]
        for way, seconds in one.items():
            rows.append(
                {"way": f"unlimited, {way}", "total steps": steps, "seconds": seconds * steps, "timed weights": timed}
            )
    return rows


def show_unlimited(experiment: Experiment, rows: Rows) -> tuple[Table, Draw]:
    """Figure 2: seconds of a sync against all steps so far; with K seeds they stop growing after K steps."""
    steps = sorted({row["total steps"] for row in rows if "total steps" in row})
    lines: dict[str, list[float]] = {}
    for row in rows:
        if "total steps" in row:
            lines.setdefault(row["way"], []).append(row["seconds"])
    for row in rows:
        if "K" in row:
            lines[f"K = {row['K']:,}, {row['way']}"] = [row["seconds"] * min(1, s / row["K"]) for s in steps]

    def draw(figure: "Figure") -> None:
        (axes,) = panels(figure, [f"{experiment.options['weights']:,} weights"], 7.5)
        for number, (label, seconds) in enumerate(lines.items()):
            axes.plot(steps, seconds, label=label, linewidth=1.6, **style(number))
        axes.set(
            xscale="log", yscale="log", xlabel="total steps of all clients so far", ylabel="seconds to the latest model"
        )
        legend_beside(axes)

    return Table([_cells(row) for row in rows], _notes(experiment)), draw


def show_syncs(experiment: Experiment, rows: Rows) -> tuple[Table, Draw]:
    """Figure 8: seconds of a sync against K."""

    def draw(figure: "Figure") -> None:
        (axes,) = panels(figure, [f"{experiment.options['weights']:,} weights"], 7.5)
        for number, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
            points = [(row["K"], row["seconds"]) for row in rows if row["way"] == way]
            axes.plot(*zip(*points, strict=True), label=way, linewidth=1.6, **style(number))
        axes.set(yscale="log", xlabel="K", ylabel="seconds to the latest model")
        powers(axes, [row["K"] for row in rows])
        legend_beside(axes)

    return Table([_cells(row) for row in rows], _notes(experiment)), draw


def paper_direction(w: Tensor) -> None:
    """Add one direction in the way of the paper's sync: new memory for z, for its multiples and for the result.

    Source: Qin et al., 2024, "Further Optimization on Updating Models", the column "Our Implementation"
    """
    rng = torch.Generator(w.device).manual_seed(1)
    parts = list(w.split(SLICE))
    for i, part in enumerate(parts):
        z = torch.normal(0.0, 1.0, part.shape, generator=rng, device=w.device)
        parts[i] = part - STEP * (1e-3 * z)


def _sync(family: str, size: int, w: Tensor, out: Tensor, scale: float) -> tuple[float, int]:
    """Seconds of Σ_j c_j z_j over `scale` times these weights, and the number of directions that were timed."""
    pool = Pool(1, size, family)
    c = np.random.default_rng(1).normal(size=size).astype(np.float32) * np.float32(STEP)
    if pool.transformed:
        return _seconds(lambda: materialize(w, pool, c, out), w.device.type) * scale, size
    few = min(SAMPLE[family], size)
    return _seconds(lambda: accumulate_(out, pool, np.arange(few), c[:few]), w.device.type) * scale * size / few, few


def _seconds(job: Callable[[], object], device: str, repeats: int = 3) -> float:
    """The least time of several calls of a job, after a first call that compiles."""
    job()
    taken = []
    for _ in range(repeats):
        _wait(device)
        begin = time.perf_counter()
        job()
        _wait(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)


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


def show_toy(experiment: Experiment, rows: Rows) -> tuple[Table, Draw]:
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

    return Table([_cells(row) for row in rows], _notes(experiment)), draw


def unrestricted(draws: int) -> float:
    """Mean absolute coordinate of the mean of Γ new normal perturbations: E|x| of x ~ N(0, 1/Γ)."""
    return float(np.sqrt(2 / (np.pi * draws)))


# --- costs ----------------------------------------------------------------------------------------


class Costs(Protocol):
    """The results of `fedkseed.tools.compare.measure` that are shown here."""

    bytes_down: int
    bytes_up: int
    trainable: int
    peak_memory: int
    sync_seconds: float
    step_seconds: float


def gather_costs(experiment: Experiment, places: Mapping[str, str], tell: Callable[[str], None]) -> Rows:
    """Costs of every method with each model, measured one after the other."""
    rows: Rows = []
    for planned in experiment.plan(seeds=[0]):
        algorithm = planned.table["training"]["algorithm"]
        tell(f"measuring {experiment.label(planned.axes)}")
        rows.append({**planned.axes, **asdict(measure(planned.recipe(places), algorithm))})
    return rows


def show_complexity(experiment: Experiment, rows: Rows) -> tuple[Table, None]:
    """Table 1: orders of growth as the paper gives them, beside costs measured here."""
    table: list[dict[str, Cell]] = []
    for row in rows:
        orders_of = experiment.options["complexity"].get(row["method"])
        if orders_of is not None:
            orders = dict(zip(("communication", "memory", "computation"), orders_of, strict=True))
            approach = experiment.title_of("method", row["method"])
            table.append({"approach": approach, **orders, **_costs(experiment, row)})
    return Table(table, _notes(experiment)), None


def show_overhead(experiment: Experiment, rows: Rows) -> tuple[Table, None]:
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
    return Table(table, _notes(experiment)), None


def show_steps(experiment: Experiment, rows: Rows) -> tuple[Table, Draw]:
    """Figure 14: seconds of a local step against trainable weights."""
    models = list(dict.fromkeys(row["model"] for row in rows))

    def draw(figure: "Figure") -> None:
        for axes, model in zip(panels(figure, models), models, strict=True):
            for number, row in enumerate(r for r in rows if r["model"] == model):
                look = {**style(number), "linestyle": "none", "markersize": 8}
                axes.plot(
                    [row["trainable"]],
                    [row["step_seconds"]],
                    label=experiment.title_of("method", row["method"]),
                    **look,
                )
            axes.set(xscale="log", xlabel="trainable weights", ylabel="seconds a local step", ylim=(0, None))
            legend_beside(axes)

    named = [{"model": row["model"], "approach": experiment.title_of("method", row["method"])} for row in rows]
    return Table([n | _costs(experiment, r) for n, r in zip(named, rows, strict=True)], _notes(experiment)), draw


def _costs(experiment: Experiment, row: Mapping[str, Any]) -> dict[str, Cell]:
    """The measured costs of a row as cells; "back" is for a client that has missed `compare.AWAY` rounds."""
    return {
        "trainable": row["trainable"],
        "bytes down": row["bytes_down"],
        "bytes up": row["bytes_up"],
        "bytes down, back": row["bytes_back"],
        "peak memory (MB)": row["peak_memory"] / 1e6,
        "sync (s)": row["sync_seconds"],
        "sync, back (s)": row["back_seconds"],
        "a step (s)": row["step_seconds"],
    }


def _cells(row: Mapping[str, Any]) -> dict[str, Cell]:
    return {short(name): value for name, value in row.items()}


def _notes(experiment: Experiment) -> tuple[str, ...]:
    return (experiment.note,) if experiment.note else ()


MEASURED = {
    "unlimited": Measured(gather_syncs, show_unlimited),
    "syncs": Measured(gather_syncs, show_syncs),
    "toy": Measured(gather_toy, show_toy),
    "complexity": Measured(gather_costs, show_complexity),
    "overhead": Measured(gather_costs, show_overhead),
    "steps": Measured(gather_costs, show_steps),
}
