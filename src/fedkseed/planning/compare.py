"""Costs of each algorithm to a client: bytes, memory and seconds, measured on messages of the recipe's real size.

The client runs in a process of its own, so that the memory of that process is the client's alone. A client like it has
run there before, so that neither libraries, compiled kernels nor threads count.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..data.federated import ClientShares, share_out
from ..errors import FedKSeedError
from ..files import border
from ..models.load import load_tokenizer
from ..recipe.algorithms import algorithm_of
from ..recipe.rules import checked_algorithm, require_packages
from ..recipe.schema import Recipe
from ..round import Round
from ..run.needed_memory import LIBRARIES, needed_by
from ..run.setup import Stopwatch
from ..run.simulation import Simulation
from ..run.workers import WorkerPool
from ..wire.codec import decode, encode
from .forecast import sample_upload
from .memory import Meter

ROUNDS_AWAY = 10  # rounds that a returning client has missed
STEPS_TIMED = 5  # local steps that are taken to time them
# Settings that are left out for an algorithm that does not read them; without one of [secure] it would not be the same.
SPARED = {"[derivatives]", "[clients] backpropagating", "[directions] shared", "[training] wire", "[training] server"}


@dataclass(frozen=True, slots=True)
class AlgorithmCosts:
    """Costs of one client and round. Bytes are those of encoded messages."""

    algorithm: str
    trainable: int  # weights that are tuned
    bytes_down: int  # to a client that took part in the round before
    bytes_up: int
    bytes_back: int  # down, to a client that comes back after ROUNDS_AWAY rounds
    peak_memory: int  # bytes: the most that its process held, less what a client like it had left there
    predicted_memory: int | None  # bytes of the same, before its model is loaded; None where it can't be predicted
    sync_seconds: float  # of a client that took part in the round before
    back_seconds: float  # of one that comes back after ROUNDS_AWAY rounds
    step_seconds: float  # median


def compare(recipe: Recipe, names: Sequence[str]) -> Iterator[tuple[str, AlgorithmCosts | FedKSeedError]]:
    """Costs of several algorithms on a recipe's model, data and settings, one after the other.

    Yields:
        the name of each algorithm with its costs or, where the recipe can't be run with it, the error; the errors that
        show without a model come first.
    """
    able = []
    for name in names:
        try:
            checked = with_algorithm(recipe, name)
            require_packages(checked, checked_algorithm(checked))
        except FedKSeedError as error:
            yield name, error
        else:
            able.append(name)
    shares = share_out(recipe, load_tokenizer(recipe.model.name))
    for name in able:
        try:
            yield name, measure(recipe, name, shares)
        except FedKSeedError as error:
            yield name, error


def with_algorithm(recipe: Recipe, algorithm: str) -> Recipe:
    """A recipe with another algorithm, without settings of its own algorithm that protect nobody."""
    training = {"algorithm": algorithm, "rounds": ROUNDS_AWAY + 2}
    recipe = recipe.having(training=training, save=False, asynchronous=None)
    for setting in SPARED - {*algorithm_of(algorithm).strategy.reads}:
        name, _, key = setting.partition(" ")
        fields = type(getattr(recipe, table := name.strip("[]"))).model_fields
        recipe = recipe.having(**{table: {k: info.default for k, info in fields.items() if key in ("", k)}})
    return recipe


def measure(recipe: Recipe, algorithm: str, shares: ClientShares | None = None) -> AlgorithmCosts:
    """Costs of one algorithm on a recipe's model, data and settings; refused where the recipe can't be run with it."""
    recipe = with_algorithm(recipe, algorithm)
    shares = shares or share_out(recipe, load_tokenizer(recipe.model.name))
    with border("can't keep broadcasts for the measurement"), TemporaryDirectory() as folder:
        bytes_up = _in_a_process(_serve, recipe, shares, Path(folder))
        return _in_a_process(_take_part, recipe, shares, Path(folder), bytes_up)


def _in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    try:
        with WorkerPool(1) as process:
            return process.submit(function, *arguments).result()
    except BrokenProcessPool as error:
        raise FedKSeedError("the process that measures ended by itself, perhaps for want of memory") from error


def _serve(recipe: Recipe, shares: ClientShares, folder: Path) -> int | None:
    """Write the broadcasts of a server after ROUNDS_AWAY rounds and after one more; returns the bytes of an upload.

    No client trains: uploads hold random numbers in place of training results. None: their size is known by training.
    """
    simulation = Simulation(recipe, shares=shares)
    strategy, state, up = simulation.strategy, simulation.strategy.server.init(), 0
    for round_ in range(ROUNDS_AWAY + 1):
        if round_ == ROUNDS_AWAY:
            (folder / "back").write_bytes(encode(strategy.server.broadcast(state)))
        cohort = simulation.cohort(round_)
        taking_part = cohort if 0 in cohort else [0, *cohort[1:]]
        uploads = [sample_upload(simulation, round_, client) for client in taking_part]
        up = len(encode(uploads[0]))
        state = strategy.aggregate(state, uploads)
    (folder / "next").write_bytes(Round.begin(strategy, state, [0]).whole[0])
    return up if strategy.sized else None


def _take_part(recipe: Recipe, shares: ClientShares, folder: Path, bytes_up: int | None) -> AlgorithmCosts:
    """Costs of client 0, which comes back after ROUNDS_AWAY rounds and takes part in the next round.

    Another one goes before. Without it, 148 or 249 MB counted as FedKSeed's with a model of 0.14 million weights, by
    whether kernels were compiled already, and 14 to 16 MB with it.
    """
    _costs_without_memory(recipe, shares, folder)
    meter, needed = Meter(), needed_by(recipe, shares)
    before = meter.now()
    with meter.watch():
        costs = _costs_without_memory(recipe, shares, folder)
    costs = replace(costs, bytes_up=bytes_up or costs.bytes_up, peak_memory=meter.peak - before)
    return replace(costs, predicted_memory=needed and needed.total - LIBRARIES)


def _costs_without_memory(recipe: Recipe, shares: ClientShares, folder: Path) -> AlgorithmCosts:
    """Costs of client 0 without its memory."""
    short = recipe.having(training={"steps": STEPS_TIMED, "epochs": None}, derivatives={"steps": None})
    simulation = Simulation(short, shares=shares, serves=False)
    strategy, watch = simulation.strategy, Stopwatch()
    client = simulation.client(0, watch)
    sizes, seconds, changes = [], [], {"steps": STEPS_TIMED, "values": np.empty(0, np.float32)}
    for name in ("back", "next"):
        data = (folder / name).read_bytes()
        sizes.append(len(data))
        begin = time.perf_counter()
        message: Any = decode(data, strategy.client.message)
        strategy.client.sync(message, client.weights)
        seconds.append(time.perf_counter() - begin)
        # for training: with few steps, and without weights, which are in the model now
        message = replace(message, **{f.name: changes[f.name] for f in fields(message) if f.name in changes})
        del data
    upload = encode(strategy.client.train(message, client))
    return AlgorithmCosts(
        algorithm=recipe.training.algorithm,
        trainable=client.weights.layout.size,
        bytes_down=sizes[1],
        bytes_up=len(upload),
        bytes_back=sizes[0],
        peak_memory=0,
        predicted_memory=None,
        sync_seconds=seconds[1],
        back_seconds=seconds[0],
        step_seconds=median(watch.steps),
    )
