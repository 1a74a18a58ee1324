"""Dry runs: sizes, bytes, passes and a rough time of an experiment's runs, without loading weights.

Bytes of FedKSeed are lengths of encoded messages; those of the other methods are arithmetic, without headers.
"""

import time
from collections.abc import Mapping
from functools import cache
from math import inf
from typing import Any

import numpy as np
import torch

from ..directions import FAMILIES, Pool
from ..recipe.algorithms import ALGORITHMS
from ..strategies.checks import NONE
from ..wire.codec import encode
from ..wire.numbers import rounded
from ..wire.records import Broadcast, Change, Run, Upload
from .byte_counts import Architecture, architecture, trainable
from .experiments import Experiment, Planned, Tree
from .results import Cell, ResultTable

BACKPROPAGATING = {name for name, algorithm in ALGORITHMS.items() if algorithm.backpropagates}
PAIR = 8  # bytes: a seed and a coefficient
SCALAR = 4  # bytes


def estimate(
    experiment: Experiment, given: Mapping[str, str], only: str = "", seconds: float | None = None
) -> ResultTable:
    """A table of an experiment's estimated costs, one row for every combination of its axes' values.

    Args:
        given: paths for the recipes' `$places`; the config of a model that is not one of the paper's is read.
        only: text that the label of a row must contain.
        seconds: time of a local step of two forward passes; None: estimated from the measured speed of this machine.
    """
    speed = None if seconds is not None else _flops()
    sizes = cache(architecture)  # a config of GGUF takes seconds to read, and rows share a model
    rows = [
        _row(experiment, planned, sizes(_name(planned.table["model"]["name"], given)), seconds, speed)
        for planned in experiment.plan(seeds=[0])
        if only.lower() in experiment.label(planned.axes).lower()
    ]
    hours = sum(row["hours, all seeds"] for row in rows if isinstance(row["hours, all seeds"], float))
    of = (
        f"{seconds:g} s a step"
        if seconds is not None
        else f"this machine's {(speed or 0) / 1e9:,.0f} GFLOP/s in float32"
    )
    notes = [
        f"All together about {hours:,.1f} hours by {of}; evaluations and generation not counted.",
        "A forward pass counts 2 operations a weight and token of the longest examples allowed, a backward pass 4.",
    ]
    return ResultTable(rows, tuple(notes))


def _row(
    experiment: Experiment, planned: Planned, of: Architecture, seconds: float | None, speed: float | None
) -> dict[str, Cell]:
    table = planned.table
    training = table["training"]
    method = training["algorithm"]
    cohort, rounds = _cohort(table), training["rounds"]
    steps = training.get("steps", 200)
    if training.get("epochs"):
        examples = experiment.examples.get(planned.axes.get("dataset", ""), 0)
        steps = max(1, examples // training.get("batch_size", 1)) * training["epochs"]
    down, up = bytes_of(method, of, table, cohort)
    once = method in BACKPROPAGATING or method == "fedkseed-plus"  # one forward pass a step, instead of two a direction
    forward = rounds * cohort * steps * (1 if once else 2 * training.get("probes", 1))
    backward = rounds * cohort * steps if method in BACKPROPAGATING else 0
    if seconds is not None:
        took = (forward + 2 * backward) * seconds / 2
    else:
        tokens = table["data"].get("max_tokens", 1024) if "data" in table else 1024
        took = (forward + 2 * backward) * 2 * of.weights * tokens * training.get("batch_size", 1) / (speed or inf)
    runs: float = experiment.seeds
    if choice := experiment.choice:  # the rows of a search share the runs of its best value
        others = {axis: value for axis, value in planned.axes.items() if axis != choice.axis}
        runs = experiment.seeds / len(experiment.plan([0], others)) + choice.seeds
    known = down is not None and up is not None
    return {
        "run": experiment.label(planned.axes),
        "weights": of.weights,
        "trainable": trainable(method, of),
        "clients a round": cohort,
        "rounds": rounds,
        "local steps": steps,
        "bytes down": down,
        "bytes up": up,
        "bytes of a run": (down + up) * cohort * rounds if down is not None and up is not None and known else None,
        "forward passes": forward,
        "backward passes": backward,
        "seeds": experiment.seeds,
        "hours, all seeds": took * runs / 3600,
    }


def bytes_of(method: str, of: Architecture, table: Tree, cohort: int) -> tuple[int | None, int | None]:
    """Bytes of a client in a round, down and up.

    Where bytes down grow with the rounds that a client has missed, they are those of the last round for a client that
    has missed all others.
    """
    training, size = table["training"], table.get("directions", {}).get("size", 4096)
    pairs = training.get("steps", 200) * training.get("probes", 1)
    match method:
        case "fedkseed" | "fedkseed-pro":
            family = table.get("directions", {}).get("family", "hadamard")
            importance, wire = method == "fedkseed-pro", training.get("wire", "compact")
            return encoded(size, pairs, family, importance=importance, wire=wire)
        case "fedkseed-plus" | "fedkseed-backprop":
            wire = "exact" if training.get("wire") == "exact" else "compact"
            run, zeros = Run(Pool(0, size), bytes(32)), np.zeros(size, np.float32)
            down, up = (
                Broadcast(run, 0, 1e-6, 1e-3, 1, inf, zeros, wire=wire),
                Change(run, 0, 0, 1, 0, 0, zeros, NONE, wire),
            )
            return len(encode(down)), len(encode(up))
        case "unlimited-seeds":
            return (training["rounds"] - 1) * cohort * pairs * PAIR, pairs * SCALAR
        case "uplink-seeds":
            return 4 * of.weights, pairs * SCALAR
        case "decomfl":
            return (training["rounds"] - 1) * pairs * SCALAR, pairs * SCALAR
        case "evofed":
            return (training["rounds"] - 1) * size * 4, size * 4
        case "ferret":  # chooses the number of coefficients of each tensor during training
            return None, None
        case _:
            return 4 * trainable(method, of), 4 * trainable(method, of)


def encoded(size: int, pairs: int, family: str, *, importance: bool, wire: str) -> tuple[int, int]:
    """Lengths in bytes of FedKSeed's encoded broadcast and upload."""
    run = Run(Pool(0, size, family, bytes(32 * FAMILIES[family].informed)), bytes(32))
    zeros, p = np.zeros(size, np.float32), rounded(np.ones(size), wire) if importance else None
    down = Broadcast(run, 0, 1e-6, 1e-3, pairs, inf, zeros, probabilities=p, wire=wire)
    up = Upload(run, 0, 0, 1, 0.0, np.ones(pairs, np.float32), wire)
    return len(encode(down)), len(encode(up))


def _cohort(table: Tree) -> int:
    clients = table["clients"]
    count = clients.get("count") or (738 if clients.get("split") == "tasks" else 200)  # tasks of the paper
    return max(1, int(clients["active"] * count)) if "active" in clients else clients.get("cohort", 10)


def _name(name: Any, given: Mapping[str, str]) -> str:
    return given.get(name[1:], name) if name.startswith("$") else name


def _flops(size: int = 1024) -> float:
    """Floating-point operations a second of a float32 matrix product, on a GPU if there is one, else the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.ones(size, size, device=device)
    best = inf
    for _ in range(5):
        begin = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
