"""Steps, hours, memory and bytes of every experiment at the paper's scale, of `fedkseed reproduce all --dry-run`.

    python benchmarks/full_scale.py [--seconds-per-step 0.124] > results/full-scale.md

The seconds are those of two forward passes, as of a two-point step; a pass back counts as two more. 0.124 s is such a
step of 128 tokens on LLaMA-3B's shape in bfloat16, streamed, along hadamard directions, on an H100 (results/gpu.md). No
model is loaded; half a minute.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping
from typing import Any

from table import Row, commit, markdown

TEXT = """# What the paper's scale takes

`python benchmarks/full_scale.py --seconds-per-step {step}` at commit {commit}, on a machine without the data: what
`fedkseed reproduce all --scale full --dry-run` says of every experiment. DataJuicer-1.3B and LLaMA-3B on Natural
Instructions and Dolly, with the paper's rounds, steps, clients and seeds; ours beside them at their own length. **No
experiment was run at this scale.** Client steps are those of the longest run, hours of all runs, seeds and searches, by
{step} s for two forward passes, a pass back counted as two more, evaluations not: 0.124 s took a two-point step of 128
tokens on LLaMA-3B's shape in bfloat16, streamed, along hadamard directions, on an H100
([gpu.md](../benchmarks/results/gpu.md)); the experiments have Gaussian ones. Memory is the predicted peak of the
process that runs all clients in turns, libraries with it. {without} measure directions and send nothing.

{table}"""


def between(values: Iterable[float]) -> str:
    """The least and the largest of values, as one where they print alike; whole numbers as such, or from 100 on."""
    ordered = sorted(values)
    low, high = (f"{v:,.0f}" if v >= 100 or v == int(v) else f"{v:,.3g}" for v in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def row(name: str, runs: list[Mapping[str, Any]]) -> Row:
    steps = [run["clients a round"] * run["rounds"] * run["local steps"] for run in runs if run["local steps"]]
    hours = [run["hours, all seeds"] for run in runs]
    sent = [run["bytes of a run"] / 1e6 for run in runs if run["bytes of a run"] is not None]
    return {
        "experiment": f"`{name}`", "methods and settings": len(runs),
        "clients a round": between(run["clients a round"] for run in runs),
        "client steps": f"{max(steps):,}",
        "hours": f"{sum(filter(None, hours)):,.0f}" + (" and more" if None in hours else ""),
        "memory, GB": between(run["memory (GB)"] for run in runs), "MB of a run": between(sent),
    }  # fmt: skip


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--seconds-per-step", default="0.124")
    step = parser.parse_args().seconds_per_step
    asked = ["reproduce", "all", "--scale", "full", "--dry-run", "--seconds-per-step", step, "--json"]
    command = [sys.executable, "-m", "fedkseed", *asked]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603 — this program's own command
    found = {name: experiment["rows"] for name, experiment in json.loads(said).items()}
    without = ", ".join(f"`{name}`" for name, runs in found.items() if not runs)
    table = markdown([row(name, runs) for name, runs in found.items() if runs])
    print(TEXT.format(step=step, commit=commit(), without=without, table=table), end="")


if __name__ == "__main__":
    main()
