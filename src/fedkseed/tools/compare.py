"""What each algorithm costs a client: bytes, memory and seconds, measured on messages of the recipe's real size.

The client is a process of its own, so that its memory can be told: nothing else of the federation is in it.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

import numpy as np

from ..data.federated import Shares, share_out
from ..errors import FedKSeedError
from ..models.load import load_tokenizer
from ..randomness import Purpose, generator
from ..recipe.schema import Recipe
from ..run.loop import peak_memory
from ..run.setup import NEWCOMER, Stopwatch
from ..run.simulation import Simulation
from ..strategies.averaging import Averaging
from ..strategies.checks import NONE
from ..strategies.kseed import KSeed
from ..strategies.replay import Replay
from ..strategy import Client, Strategy
from ..wire.codec import decode, encode
from ..wire.numbers import scalar
from ..wire.records import Broadcast, Change, Upload, Values

AWAY = 10  # rounds that a returning client has missed
STEPS = 5  # local steps that are taken to time them
OnDone: TypeAlias = Callable[[str, FedKSeedError | None], None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one client and round. Bytes are those of encoded messages."""

    algorithm: str
    trainable: int  # weights that are tuned
    bytes_down: int  # to a client that took part in the round before
    bytes_up: int
    bytes_back: int  # down, to a client that comes back after AWAY rounds
    peak_memory: int  # bytes, above what the process had before it loaded the model
    sync_seconds: float  # of a client that took part in the round before
    back_seconds: float  # of one that comes back after AWAY rounds
    step_seconds: float  # median


def compare(recipe: Recipe, names: Sequence[str], on_done: OnDone = lambda name, error: None) -> list[Costs]:
    """Costs of several algorithms on a recipe's model, data and settings, one after the other.

    Args:
        on_done: is told each result, and why an algorithm can't run the recipe.
    """
    shares, found = share_out(recipe, load_tokenizer(recipe.model.name)), []
    for name in names:
        try:
            found.append(measure(recipe, name, shares))
            on_done(name, None)
        except FedKSeedError as error:
            on_done(name, error)
    return found


def measure(recipe: Recipe, algorithm: str, shares: Shares | None = None) -> Costs:
    """Costs of one algorithm on a recipe's model, data and settings.

    Raises:
        FedKSeedError: the recipe can't be run with it.
    """
    training = recipe.training.model_copy(update={"algorithm": algorithm, "rounds": AWAY + 2})
    recipe = recipe.model_copy(update={"training": training, "save": False, "asynchronous": None})
    shares = shares or share_out(recipe, load_tokenizer(recipe.model.name))
    with TemporaryDirectory() as folder:
        bytes_up = _in_a_process(_serve, recipe, shares, Path(folder))
        return _in_a_process(_take_part, recipe, shares, Path(folder), bytes_up)


def _in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def _serve(recipe: Recipe, shares: Shares, folder: Path) -> int | None:
    """Write what a server sends after AWAY rounds and after one more.

    Clients of those rounds answer at once, with random numbers in place of what they would have found.

    Returns:
        Bytes of such an answer; None if its size is only known by training.
    """
    simulation = Simulation(recipe, shares=shares)
    strategy, state, up = simulation.strategy, simulation.strategy.init(), None
    for round_ in range(AWAY + 1):
        if round_ == AWAY:
            (folder / "back").write_bytes(encode(strategy.broadcast(state, [NEWCOMER])[NEWCOMER]))
        cohort = simulation.cohort(round_)
        taking_part = cohort if 0 in cohort else [0, *cohort[1:]]
        uploads = [_random_upload(simulation, strategy, round_, client) for client in taking_part]
        up = len(encode(uploads[0]))
        state = strategy.aggregate(state, uploads)
    (folder / "next").write_bytes(encode(strategy.broadcast(state, [0])[0]))
    return None if isinstance(strategy, Replay) and strategy.kind == "by tensor" else up


def _random_upload(simulation: Simulation, strategy: Strategy, round_: int, client: int) -> Upload | Change:
    run, rng = simulation.run, generator(simulation.recipe.seed, Purpose.BATCHES, round_, client)
    about = (run, round_, client, len(simulation.shares.clients[client]))
    pool, pairs = run.pool, simulation.recipe.training.steps * simulation.recipe.training.probes
    differentiates = simulation.client(client).graph is not None
    if isinstance(strategy, KSeed) and strategy.derivatives is not None and differentiates:
        numbers = strategy.rounded(rng.normal(size=pool.size) * 1e-9)
        return Change(*about, 1.0, 0, numbers, NONE, strategy.wire_of_changes)
    if Upload in strategy.replies:
        wire = strategy.wire if isinstance(strategy, KSeed) else "exact"
        scalars = [scalar(found, math.inf, wire) for found in rng.normal(size=pairs)]
        return Upload(*about, 1.0, np.array(scalars, np.float32), wire)
    if isinstance(strategy, Averaging):
        return Change(*about, 1.0, 0, strategy.start, NONE)
    replay = cast("Replay", strategy)
    if replay.kind == "by tensor":
        counts = np.full(replay.tensors, replay.pool.size, np.uint32)
        return Change(*about, 1.0, 0, rng.normal(size=int(counts.sum())).astype(np.float32) * 1e-9, counts)
    size = replay.pool.size if replay.kind == "projected" else pairs
    return Change(*about, 1.0, 0, rng.normal(size=size).astype(np.float32) * 1e-9, NONE)


def _take_part(recipe: Recipe, shares: Shares, folder: Path, bytes_up: int | None) -> Costs:
    """Be client 0: come back, take part in the next round, and tell what it cost."""
    before = peak_memory()
    few = recipe.training.model_copy(update={"steps": STEPS, "epochs": None})
    as_many = recipe.derivatives.model_copy(update={"steps": None})
    short = recipe.model_copy(update={"training": few, "derivatives": as_many})
    simulation = Simulation(short, shares=shares, serves=False)
    strategy, watch = simulation.strategy, Stopwatch()
    client: Client = simulation.client(0, watch)
    sizes, seconds = [], []
    for name in ("back", "next"):
        data = (folder / name).read_bytes()
        sizes.append(len(data))
        begin = time.perf_counter()
        message = decode(data, strategy.message)
        strategy.sync(message, client.weights)
        seconds.append(time.perf_counter() - begin)
        if isinstance(message, Values):  # the weights are in the model now
            message = replace(message, values=message.values[:0].copy())
        if isinstance(message, Broadcast):  # which tells how many steps to take
            message = replace(message, steps=STEPS)
        del data
    upload = encode(strategy.train(message, client))
    return Costs(
        algorithm=recipe.training.algorithm,
        trainable=client.weights.layout.size,
        bytes_down=sizes[1],
        bytes_up=bytes_up or len(upload),
        bytes_back=sizes[0],
        peak_memory=peak_memory() - before,
        sync_seconds=seconds[1],
        back_seconds=seconds[0],
        step_seconds=median(watch.steps),
    )
