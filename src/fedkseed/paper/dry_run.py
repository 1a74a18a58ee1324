"""Dry runs: sizes, bytes, passes and a rough time of an experiment's runs, without loading weights.

Bytes of FedKSeed are lengths of encoded messages; those of the other methods are arithmetic, without headers.
"""

from collections.abc import Mapping
from functools import cache
from math import inf
from timeit import repeat

import numpy as np
import torch

from ..directions import FAMILIES, Pool
from ..recipe.algorithms import ALGORITHMS
from ..strategies.checks import NONE
from ..wire.codec import encode
from ..wire.numbers import rounded
from ..wire.records import Broadcast, Change, Run, Upload
from .byte_counts import Architecture, architecture, trainable
from .experiments import Experiment, Planned, Tree, filled
from .results import Cell, ResultTable

PAIR, SCALAR = 8, 4  # bytes: a seed and a coefficient; a coefficient


def estimate(
    experiment: Experiment, given: Mapping[str, str], only: str = "", seconds: float | None = None
) -> ResultTable:
    """A table of an experiment's estimated costs, one row for every combination of its axes' values.

    Args:
        given: paths for the recipes' `$places`; the config of a model that is not one of the paper's is read.
        only: text that the label of a row must contain.
        seconds: time of a local step of two forward passes; None: estimated from the measured speed of this machine.
    """
    if "method" not in experiment.axes:
        return ResultTable([], (f"{experiment.name} has no runs: it measures directions, and nothing is sent.",))
    speed = inf  # floating-point operations a second, of a float32 matrix product
    if seconds is None:
        a = torch.ones(1024, 1024, device="cuda" if torch.cuda.is_available() else "cpu")
        speed = 2 * 1024**3 / min(repeat(lambda: (a @ a).sum().item(), number=1, repeat=5))
    sizes_of = cache(architecture)  # a config of GGUF takes seconds to read, and rows share a model
    rows: list[dict[str, Cell]] = []
    for planned in experiment.plan(seeds=[0]):
        if only.lower() in experiment.label(planned.axes).lower():
            sizes = sizes_of(filled(planned.table["model"]["name"], given))
            rows.append(_row(experiment, planned, sizes, seconds, speed))
    hours = sum(row["hours, all seeds"] for row in rows if isinstance(row["hours, all seeds"], float))
    machine = f"this machine's {speed / 1e9:,.0f} GFLOP/s in float32"
    notes = (
        f"All together about {hours:,.1f} hours by {machine if seconds is None else f'{seconds:g} s a step'}; "
        "evaluations and generation not counted.",
        "A forward pass counts 2 operations a weight and token of the longest examples allowed, a backward pass 4; "
        "the layers before the last ones, which a row runs through once, are not counted.",
    )
    return ResultTable(rows, notes)


def _row(
    experiment: Experiment, planned: Planned, sizes: Architecture, seconds: float | None, speed: float
) -> dict[str, Cell]:
    table, training, clients = planned.table, planned.table["training"], planned.table["clients"]
    method, rounds, steps = training["algorithm"], training["rounds"], training.get("steps", 200)
    if training.get("epochs"):
        examples = experiment.examples.get(planned.axes.get("dataset", ""), 0)
        steps = max(1, examples // training.get("batch_size", 1)) * training["epochs"]
    count = clients.get("count") or (738 if clients.get("split") == "tasks" else 200)  # tasks of the paper
    cohort = max(1, int(clients["active"] * count)) if "active" in clients else clients.get("cohort", 10)
    backpropagates = method in ALGORITHMS and ALGORITHMS[method].backpropagates
    # a step with derivatives is one forward pass, one with two points is two for each direction
    once = backpropagates or method == "fedkseed-plus"
    forward = rounds * cohort * steps * (1 if once else 2 * training.get("probes", 1))
    backward = rounds * cohort * steps if backpropagates else 0
    tokens = table.get("data", {}).get("max_tokens", 1024) * training.get("batch_size", 1)
    last = table["model"].get("last_layers")
    used = sizes.weights if last is None else last * sizes.layer + sizes.output  # by a pass
    pass_seconds = (seconds / 2 if seconds is not None else 2 * sizes.weights * tokens / speed) * used / sizes.weights
    runs: float = experiment.seeds
    if choice := experiment.choice:  # the rows of a search share the runs of its best value
        others = {axis: value for axis, value in planned.axes.items() if axis != choice.axis}
        shorter = choice.times.get("training", {}).get("rounds", 1)
        runs = experiment.seeds / len(experiment.plan([0], others)) + shorter * choice.seeds
    down, up = _bytes_of(method, sizes, table, cohort)
    return {
        "run": experiment.label(planned.axes), "weights": sizes.weights, "trainable": trainable(method, sizes, last),
        "clients a round": cohort, "rounds": rounds, "local steps": steps, "bytes down": down, "bytes up": up,
        "bytes of a run": None if down is None or up is None else (down + up) * cohort * rounds,
        "forward passes": forward, "backward passes": backward, "seeds": experiment.seeds,
        "hours, all seeds": (forward + 2 * backward) * pass_seconds * runs / 3600,
    }  # fmt: skip


def _bytes_of(method: str, sizes: Architecture, table: Tree, cohort: int) -> tuple[int | None, int | None]:
    """Bytes of a client in a round, down and up; down in the last round, for one that has missed all others."""
    training, directions = table["training"], table.get("directions", {})
    pairs, size = training.get("steps", 200) * training.get("probes", 1), directions.get("size", 4096)
    zeros, wire = np.zeros(size, np.float32), training.get("wire", "compact")
    match method:
        case "fedkseed" | "fedkseed-pro":
            family = directions.get("family", "hadamard")
            run = Run(Pool(0, size, family, bytes(32 * FAMILIES[family].informed)), bytes(32))
            p = rounded(np.ones(size), wire) if method == "fedkseed-pro" else None
            down = Broadcast(run, 0, 1e-6, 1e-3, pairs, inf, zeros, probabilities=p, wire=wire)
            return len(encode(down)), len(encode(Upload(run, 0, 0, 1, 0.0, np.ones(pairs, np.float32), wire)))
        case "fedkseed-plus" | "fedkseed-backprop":
            run, wire = Run(Pool(0, size), bytes(32)), "exact" if wire == "exact" else "compact"
            down = Broadcast(run, 0, 1e-6, 1e-3, 1, inf, zeros, wire=wire)
            return len(encode(down)), len(encode(Change(run, 0, 0, 1, 0, 0, zeros, NONE, wire)))
        case "unlimited-seeds":
            return (training["rounds"] - 1) * cohort * pairs * PAIR, pairs * SCALAR
        case "uplink-seeds":
            return 4 * sizes.weights, pairs * SCALAR
        case "decomfl" | "evofed":
            numbers = pairs if method == "decomfl" else size  # of a round
            return (training["rounds"] - 1) * numbers * SCALAR, numbers * SCALAR
        case "ferret":  # chooses the number of coefficients of each tensor during training
            return None, None
        case _:
            size = 4 * trainable(method, sizes, table["model"].get("last_layers"))
            return size, size
