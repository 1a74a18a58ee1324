"""Dry runs: sizes, bytes, passes, memory and a rough time of an experiment's runs, without loading weights.

Bytes of FedKSeed are lengths of encoded messages; those of the other methods are arithmetic, without headers.
"""

from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from timeit import repeat

import numpy as np
import torch

from ..data.held_out import separate_categories
from ..data.split import divide, read_source
from ..errors import FedKSeedError
from ..models.sizes import Architecture
from ..recipe.algorithms import algorithm_of
from ..recipe.schema import Recipe
from ..run.needed_memory import GB, Rows, predict
from ..wire.codec import encode
from ..wire.records import Run
from .byte_counts import architecture
from .experiments import Experiment, Planned
from .results import Cell, ResultTable

PAIR, SCALAR = 8, 4  # bytes: a seed and a coefficient; a coefficient
TOKENS = 64  # of the products by which a machine is timed
TASKS = 738  # clients of Natural Instructions, each with a task of its own


def estimate(
    experiment: Experiment, given: Mapping[str, str], only: str = "", seconds: float | None = None
) -> ResultTable:
    """A table of an experiment's estimated costs, one row for every combination of its axes' values.

    Args:
        given: paths for the recipes' `$places`; the config of a model that is not one of the paper's is read.
        only: text that the label of a row must contain.
        seconds: time of a local step of two forward passes; None: by the time of a layer's product on this machine.
    """
    if "method" not in experiment.axes:
        return ResultTable([], (f"{experiment.name} has no runs: it measures directions, and nothing is sent.",))
    sizes_of, speed_of = cache(architecture), cache(_speed)  # rows share a model
    speeds = list[float]()
    places = {name: name for name in ("dolly", "natural-instructions", "basis")} | dict(given)  # counts need no data
    rows: list[dict[str, Cell]] = []
    for planned in experiment.plan(seeds=[0]):
        if experiment.holds(only, planned.axes):
            recipe = planned.recipe(places)
            sizes = sizes_of(recipe.model.name)
            speeds.append(inf if seconds is not None else speed_of(sizes))
            rows.append(_row(experiment, planned, recipe, sizes, seconds, speeds[-1]))
    hours = sum(row["hours, all seeds"] for row in rows if isinstance(row["hours, all seeds"], float))
    slowest = min(speeds, default=inf) / 1e9
    machine = f"this machine's {slowest:,.0f} GFLOP/s in a layer's product with {TOKENS} tokens, in float32"
    notes = (
        f"All together about {hours:,.1f} hours by {machine if seconds is None else f'{seconds:g} s a step'}; "
        "evaluations and generation not counted.",
        "A forward pass counts 2 operations a weight and token of the longest examples allowed, a backward pass 4; "
        "the layers before the last ones, which a row runs through once, are not counted. –: epochs of data not here.",
        "Memory is that of the process that runs all clients in turns, of its libraries, the model and rows of as many "
        "tokens as are allowed: docs/engine.md.",
    )
    return ResultTable(rows, notes)


def _speed(sizes: Architecture) -> float:
    """Floating-point operations a second of a product of such a model's layers, in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.ones(TOKENS, sizes.hidden, device=device), torch.ones(sizes.hidden, sizes.intermediate, device=device)
    return 2 * TOKENS * w.numel() / min(repeat(lambda: (x @ w).sum().item(), number=1, repeat=5))


def _row(
    experiment: Experiment, planned: Planned, recipe: Recipe, sizes: Architecture, seconds: float | None, speed: float
) -> dict[str, Cell]:
    training, clients, algorithm = recipe.training, recipe.clients, algorithm_of(recipe.training.algorithm)
    work = algorithm.work(recipe)
    rounds, examples = training.rounds, work.epochs and _examples(experiment, planned, recipe)
    steps = work.steps if work.epochs is None else examples and work.count(examples)
    cohort = clients.cohort_of(clients.count or TASKS)
    # a step with derivatives is one forward pass, one with two points is two for each direction
    every = steps and rounds * cohort * steps
    forward = every and every * (1 if algorithm.differentiates else 2 * training.probes)
    backward = every if algorithm.backpropagates else 0
    tokens, last = recipe.data.max_tokens, recipe.model.last_layers
    used = sizes.weights if last is None else last * sizes.layer + sizes.output  # by a pass
    operations = 2 * sizes.weights * tokens * training.batch_size
    pass_seconds = (seconds / 2 if seconds is not None else operations / speed) * used / sizes.weights
    runs: float = experiment.seeds
    if choice := experiment.choice:  # the rows of a search share the runs of its best value
        others = {axis: value for axis, value in planned.axes.items() if axis != choice.axis}
        shorter = choice.times.get("training", {}).get("rounds", 1)
        runs = experiment.seeds / len(experiment.plan([0], others)) + shorter * choice.seeds
    hours = forward and (forward + 2 * (backward or 0)) * pass_seconds * runs / 3600
    tuned = sizes.tuned(algorithm.tuned, recipe.peft, last)
    down, up = _bytes_of(recipe, sizes, tuned, cohort)
    basis = recipe.directions.basis and Path(recipe.directions.basis)
    once = basis.stat().st_size * (clients.count or TASKS) if basis and basis.is_file() else 0
    examined = Rows(recipe.evaluation.max_tokens or tokens, tokens)
    memory = predict(recipe, sizes, Rows(tokens, tokens, tokens), examined, cohort)
    return {
        "run": experiment.label(planned.axes), "weights": sizes.weights, "trainable": tuned,
        "clients a round": cohort, "rounds": rounds, "local steps": steps, "bytes down": down, "bytes up": up,
        "bytes of a run": None if down is None or up is None else (down + up) * cohort * rounds + once,
        "forward passes": forward, "backward passes": backward, "seeds": experiment.seeds,
        "hours, all seeds": hours, "memory (GB)": memory.total / GB,
    }  # fmt: skip


def _examples(experiment: Experiment, planned: Planned, recipe: Recipe) -> int | None:
    """The mean number of a client's training examples: the experiment's own, or that of its data; None: not here."""
    if (known := experiment.examples.get(planned.axes.get("dataset", ""))) is not None:
        return known
    try:
        source = read_source(recipe)
    except FedKSeedError:
        return None
    _, training = separate_categories(source.training, recipe)
    shares, _ = divide(training, [row.owner for row in training], source.owners, recipe)
    return round(sum(map(len, shares)) / len(shares))


def _bytes_of(recipe: Recipe, sizes: Architecture, tuned: int, cohort: int) -> tuple[int | None, int | None]:
    """Bytes of a client in a round, down and up; down in the last round, for one that has missed all others."""
    training, directions, method = recipe.training, recipe.directions, recipe.training.algorithm
    pairs, algorithm = training.steps * training.probes, algorithm_of(method)
    if algorithm.pooled:
        digest = {"basis_digest": "0" * 64} if directions.informed else {}  # of any basis: a message has as many bytes
        recipe = recipe.having(directions=digest, secure=None, privacy=None)
        strategy = algorithm.make(recipe, Run(algorithm.pool(recipe), bytes(32)))
        down = strategy.server.broadcast(strategy.server.init())
        up = strategy.client.example(0, 0, 1, algorithm.differentiates, np.random.default_rng(0))
        return len(encode(down)), len(encode(up))
    match method:
        case "unlimited-seeds":
            return (training.rounds - 1) * cohort * pairs * PAIR, pairs * SCALAR
        case "uplink-seeds":
            return 4 * sizes.weights, pairs * SCALAR
        case "decomfl" | "evofed":
            numbers = pairs if method == "decomfl" else directions.size  # of a round
            return (training.rounds - 1) * numbers * SCALAR, numbers * SCALAR
        case "ferret":  # chooses the number of coefficients of each tensor during training
            return None, None
        case _:
            return 4 * tuned, 4 * tuned
