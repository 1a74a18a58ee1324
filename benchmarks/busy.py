"""Seconds of a two-point step beside other work, with OpenMP's threads that sleep while they wait, and that spin.

    python benchmarks/busy.py [--model MODEL] [--busy 2] [--steps 5] [--json]

`fedkseed` lets them sleep (OMP_WAIT_POLICY=PASSIVE), unless the environment says otherwise; a program that imports
fedkseed spins, as PyTorch does. Each row has a process of its own, with as many threads as cores, on a batch of 4 x 54
tokens. A fair share beside n busy processes is 1 + n / cores times the step alone.
"""

import json
import os
import subprocess
import sys
from time import perf_counter

import torch

from fedkseed import Pool
from fedkseed.data.batches import Batch
from fedkseed.models.load import load_model
from fedkseed.models.loss import batch_loss
from fedkseed.weights.modes import hold
from table import MODEL, Row, commit, new_parser, show

POLICIES = {"sleep, as fedkseed does": "PASSIVE", "spin, PyTorch's default": "ACTIVE"}
SPIN = [sys.executable, "-c", "while True: pass"]


def measure(model_name: str, busy: int, steps: int) -> list[float]:
    """Seconds of a step alone, beside busy processes, and alone again."""
    model = load_model(model_name)
    weights, tokens = hold(model, Pool(7, 4096)), torch.randint(0, 1000, (4, 54))
    batch = Batch(tokens, torch.ones_like(tokens), tokens)

    def step(j: int) -> None:
        weights.both(j, 1e-3, lambda: batch_loss(model, batch))
        weights.move(j, 1e-9)

    def seconds() -> float:
        begin = perf_counter()
        for j in range(steps):
            step(j)
        return (perf_counter() - begin) / steps

    step(0)
    alone = seconds()
    others = [subprocess.Popen(SPIN) for _ in range(busy)]  # noqa: S603 — fixed words
    try:
        beside = seconds()
    finally:
        for other in others:
            other.kill()
            other.wait()
    return [alone, beside, seconds()]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--busy", type=int, default=2, help="busy processes")
    parser.add_argument("--steps", type=int, default=5, help="steps whose mean is shown")
    parser.add_argument("--one", action="store_true", help="measure in this process, and print numbers")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.model, given.busy, given.steps)))
        return
    rows: list[Row] = []
    fair = 1 + given.busy / (os.cpu_count() or 1)
    command = [sys.executable, __file__, "--one", "--model", given.model]
    command += ["--busy", str(given.busy), "--steps", str(given.steps)]
    for name, policy in POLICIES.items():
        environment = {**os.environ, "OMP_WAIT_POLICY": policy}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)  # noqa: S603 — fixed words
        before, beside, after = json.loads(done.stdout)
        alone = min(before, after)
        row: Row = {"threads that wait": name, "alone (s)": alone, f"beside {given.busy} busy (s)": beside}
        rows.append(row | {"of the fair share": beside / (fair * alone)})
    show(
        f"A two-point step, {given.model}, 4 x 54 tokens, float32", rows, as_json=given.json, notes={"commit": commit()}
    )


if __name__ == "__main__":
    main()
