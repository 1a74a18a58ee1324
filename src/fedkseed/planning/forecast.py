"""The costs of a run before it is begun: from its data, its messages and a few measured local steps."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from ..data.federated import ClientShares
from ..local.client import Client
from ..randomness import Purpose, generator
from ..round import Round, answer
from ..run.eps_ladder import Clock
from ..run.loop import peak_memory
from ..run.setup import Stopwatch
from ..run.simulation import Simulation
from ..strategy import Strategy
from ..wire.codec import encode

STEPS_MEASURED = 2  # local steps that are measured, after a first, which has the sync and compiles kernels


@dataclass(frozen=True, slots=True)
class Forecast:
    """The size of a run and its costs, as far as a few steps show them."""

    algorithm: str
    weights: int  # that are tuned
    clients: int
    examples: tuple[int, ...]  # of a client: the fewest, the median, the most
    tokens: int  # of all training examples
    held_out: int
    too_long: int  # examples left out
    rounds: int
    cohort: int
    steps: tuple[int, int]  # local steps of a client and round: the fewest, the most
    bytes_down: int  # to a client and round, at most
    bytes_up: int
    predicted_memory: int | None  # bytes, of a run with all its clients; None where it can't be predicted
    peak_memory: int  # bytes, of this process with the model loaded and steps of the slowest client taken
    slowest: str  # the client with the longest examples, by name
    step_seconds: float  # of that client
    quickest_seconds: float  # of a step of the client with the shortest examples
    evaluations: int
    evaluation_seconds: float  # of one evaluation; written answers are not counted
    bytes_of_a_run: int  # between server and clients
    seconds: float  # of a run, with one client at a time
    notes: tuple[str, ...]  # what was said of the data


def forecast(simulation: Simulation, until: float = math.inf, clock: Clock = time.monotonic) -> Forecast:
    """The costs of a run by its simulation, which is then as it was.

    A few local steps of the slowest and the quickest client are measured, the rest is counted. Memory is that of a run
    in this process; on a GPU it is the part outside of the GPU.

    Args:
        until: time, by `clock`, after which no further step is begun; the slowest client's first then stands for all.
    """
    recipe, shares = simulation.recipe, simulation.shares
    cohort = simulation.cohort(0)
    down, up = _bytes(simulation, cohort)
    evaluation_seconds = _evaluation_seconds(simulation)
    lengths = [fmean(len(example.tokens) for example in share) for share in shares.clients]
    slowest, quickest = lengths.index(max(lengths)), lengths.index(min(lengths))
    most = least = _step_seconds(simulation, slowest, until, clock)
    if lengths[quickest] < lengths[slowest] and clock() < until:
        least = min(most, _step_seconds(simulation, quickest, until, clock))
    # a step of a client between them: by the length of its examples
    seconds = np.interp(lengths, [lengths[quickest], lengths[slowest]], [least, most])
    counts = [simulation.steps(number) for number in range(len(lengths))]
    a_turn = float(np.mean(seconds * counts))
    sizes, steps = sorted(len(share) for share in shares.clients), (min(counts), max(counts))
    evaluations = 2 + sum(map(recipe.evaluation.due, range(1, recipe.training.rounds)))
    turns = recipe.training.rounds * len(cohort)  # of clients, in all rounds
    return Forecast(
        algorithm=recipe.training.algorithm,
        weights=simulation.setup.weights.layout.size,
        clients=len(sizes),
        examples=(sizes[0], int(median(sizes)), sizes[-1]),
        tokens=sum(len(example.tokens) for share in shares.clients for example in share),
        held_out=_held_out_examples(shares),
        too_long=shares.too_long,
        rounds=recipe.training.rounds,
        cohort=len(cohort),
        steps=steps,
        bytes_down=down,
        bytes_up=up,
        predicted_memory=simulation.needed and simulation.needed.total,
        peak_memory=peak_memory(),
        slowest=shares.name(slowest),
        step_seconds=most,
        quickest_seconds=least,
        evaluations=evaluations,
        evaluation_seconds=evaluation_seconds,
        bytes_of_a_run=turns * (down + up),
        seconds=turns * a_turn + evaluations * evaluation_seconds,
        notes=tuple(shares.notes),
    )


def _bytes(simulation: Simulation, cohort: Sequence[int]) -> tuple[int, int]:
    """The encoded sizes of a broadcast and of an upload in the second round; random numbers replace trained ones."""
    strategy = simulation.strategy
    state = strategy.server.init()
    uploads = [sample_upload(simulation, 0, number) for number in cohort]
    up = max(len(encode(upload)) for upload in uploads)
    if simulation.recipe.secure is None and simulation.recipe.asynchronous is None:
        state = strategy.aggregate(state, uploads)
        return len(encode(strategy.server.broadcast(state))), up
    return max(map(len, Round.begin(strategy, state, cohort).whole.values())), up


def sample_upload(simulation: Simulation, round_: int, number: int) -> Any:
    """An upload of a client's real size, with random numbers in place of training results."""
    client, rng = simulation.client(number), generator(simulation.recipe.seed, Purpose.BATCHES, round_, number)
    return simulation.strategy.client.example(round_, number, client.examples, client.graph is not None, rng)


def _step_seconds(simulation: Simulation, number: int, until: float, clock: Clock) -> float:
    cohort = simulation.cohort(0)
    members = cohort if number in cohort else [number, *cohort[1:]]
    simulation.progress.begin(f"a few steps of {simulation.shares.name(number)}", STEPS_MEASURED + 1)
    return step_seconds(simulation.strategy, members, partial(simulation.client, number), until, clock)


def step_seconds(
    strategy: Strategy[Any], members: Sequence[int], client_with: Callable[[Stopwatch], Client[Any]],
    until: float = math.inf, clock: Clock = time.monotonic,
) -> float:  # fmt: skip
    """The median time of a local step after the first; a single one is measured with the sync before it.

    Args:
        members: of the first round; `client_with` returns one of them, whose steps a stopwatch takes.
    """
    client = client_with(watch := _FewSteps(until=until, clock=clock))
    message = Round.begin(strategy, strategy.server.init(), members).whole[client.number]
    begin = time.perf_counter()
    with suppress(_EnoughStepsError):
        answer(strategy, message, client)
    return median(watch.steps) if watch.steps else time.perf_counter() - begin


class _EnoughStepsError(Exception):
    """The end of a client's steps, once enough are measured."""


@dataclass(kw_only=True)
class _FewSteps(Stopwatch):
    """A stopwatch that ends what it measures, after some steps or at a point of time."""

    until: float
    clock: Clock

    def tick(self) -> None:
        super().tick()
        if len(self.steps) >= STEPS_MEASURED or self.clock() >= self.until:
            raise _EnoughStepsError


def _evaluation_seconds(simulation: Simulation) -> float:
    """The time of one evaluation, from that of one batch of held-out examples."""
    setup, shares = simulation.setup, simulation.shares
    batch = shares.held_out[: simulation.recipe.evaluation.batch_size]
    if not batch:
        return 0.0
    setup.load(simulation.strategy.server.init())
    begin = time.perf_counter()
    setup.score(batch, "held-out examples", False, simulation.metrics)
    return (time.perf_counter() - begin) * _held_out_examples(shares) / len(batch)


def _held_out_examples(shares: ClientShares) -> int:
    return len(shares.held_out) + sum(len(held_out.examples) for held_out in shares.sets.values())
