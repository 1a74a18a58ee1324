"""What the benchmarks share: a timer, a description of the machine, and a table."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import numba
import torch
from rich.console import Console
from rich.table import Table

Row: TypeAlias = dict[str, str | float]  # column -> cell; the first cell says what the row is


def best_of(repeats: int, jobs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each job: the least of several rounds over all jobs.

    The jobs take turns, so that a slow minute of a shared machine meets them all alike.
    """
    seconds = dict.fromkeys(jobs, inf)
    for _ in range(repeats):
        for name, job in jobs.items():
            begin = perf_counter()
            job()
            seconds[name] = min(seconds[name], perf_counter() - begin)
    return seconds


def machine() -> Row:
    """What the numbers depend on; the load is that of the last minute, before or beside the benchmark."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def show(title: str, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows, all of the same columns, with the machine they were measured on."""
    if as_json:
        print(json.dumps({"title": title, "machine": machine(), "rows": rows}, indent=2))
        return
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    table = Table(title=title, caption=about)
    for column in rows[0]:
        table.add_column(column, justify="right" if isinstance(rows[0][column], float) else "left")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console().print(table)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
