"""The cohort of each round: which clients take part, with the model of which round, and when in virtual time.

    cohort         the clients that a round draws; over a network, too
    synchronous    a cohort begins together; the server steps when its last client is done
    asynchronous   a client that is done contributes at once, and another begins with the model of that moment;
                   the server steps whenever its buffer is full (FedBuff)

A plan is a function of the recipe alone, so a run that was stopped continues with the same plan.
Nguyen et al., 2022, https://arxiv.org/abs/2106.06639
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

from ..randomness import Purpose, generator
from ..recipe.schema import Recipe
from ..strategies.tree import tree
from ..strategy import Strategy

EACH_ROUND, IN_TURNS = "each round", "in turns"  # [clients] draw


def cohort(seed: int, round_: int, clients: int, count: int, draw: str = EACH_ROUND) -> list[int]:
    """The clients of one round, drawn without replacement, ascending.

    Args:
        draw: from all clients in each round; or IN_TURNS: in `clients // count` rounds no client takes part twice, and
            those that are left over wait for the next turn.
    """
    if draw == IN_TURNS:
        turn, place = divmod(round_, clients // count)
        return sorted(turns(seed, turn, clients)[place * count : (place + 1) * count])
    return sorted(turns(seed, round_, clients)[:count])


def turns(seed: int, round_: int, clients: int) -> list[int]:
    """All clients in the order in which a round draws them."""
    return generator(seed, Purpose.COHORT, round_).permutation(clients).tolist()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the server."""

    begun: dict[int, int]  # client, ascending -> the round whose model it began with
    clock: float  # virtual time of the step; the unit is a local step of a client that is not slow
    given_up: int = 0  # clients stopped since the last step, because they would have been too late


def durations(seed: int, steps: Sequence[int], slow_share: float, slow_factor: float) -> list[float]:
    """Training time of each client in virtual time; `steps` are the clients' numbers of local steps."""
    slow = set(generator(seed, Purpose.SPEED).permutation(len(steps))[: round(slow_share * len(steps))].tolist())
    return [number * (slow_factor if client in slow else 1.0) for client, number in enumerate(steps)]


def synchronous(seed: int, durations: Sequence[float], size: int, draw: str = EACH_ROUND) -> Iterator[Step]:
    """Synchronous rounds with cohorts of `size`; a round takes as long as its slowest client."""
    clock = 0.0
    for round_ in count():
        clients = cohort(seed, round_, len(durations), size, draw)
        clock += max(durations[client] for client in clients)
        yield Step(dict.fromkeys(clients, round_), clock)


def asynchronous(
    seed: int, durations: Sequence[float], buffer: int, concurrency: int, max_staleness: float = math.inf
) -> Iterator[Step]:
    """Asynchronous steps: each takes the first `buffer` contributions that come, while `concurrency` clients train.

    A client that has contributed waits for the step that takes its contribution, so it is never in two steps at once.
    If fewer than `concurrency` clients are left because of that, all of them train. Between two steps, clients are
    drawn in the order of a synchronous round: if all are equally fast, and buffer and concurrency are the size of a
    cohort, the rounds are the synchronous ones. Clients that end at the same moment contribute in the order in which
    they began, before the next clients begin.

    Args:
        buffer, concurrency: at most the number of clients.
        max_staleness: a client is given up, and may be drawn again, as soon as its contribution would be more than
            this number of rounds old.
    """
    training: dict[int, tuple[int, float]] = {}  # client -> the round it began with, the time at which it is done
    waiting: dict[int, int] = {}  # the buffer: client -> the round it began with
    clock, round_, given_up = 0.0, 0, 0
    while True:
        idle = (i for i in turns(seed, round_, len(durations)) if i not in training and i not in waiting)
        for client in islice(idle, concurrency - len(training)):
            training[client] = round_, clock + durations[client]
        clock = min(end for _, end in training.values())
        for client in [client for client, (_, end) in training.items() if end == clock]:
            waiting[client], _ = training.pop(client)
        while len(waiting) >= buffer:
            yield Step({client: waiting.pop(client) for client in sorted(list(waiting)[:buffer])}, clock, given_up)
            round_ += 1
            in_time = {i: begun for i, begun in waiting.items() if round_ - begun <= max_staleness}
            still = {i: task for i, task in training.items() if round_ - task[0] <= max_staleness}
            given_up = len(waiting) + len(training) - len(in_time) - len(still)
            waiting, training = in_time, still


def over_shards(strategy: Strategy[Any], recipe: Recipe) -> Strategy[Any]:
    """The strategy, for a server whose clients are shards if its recipe says so."""
    if (shards := recipe.network.shards) is None:
        return strategy
    count, clients = sum(shards), recipe.clients
    drawn = partial(cohort, recipe.seed, clients=count, count=clients.cohort_of(count), draw=clients.draw)
    return tree(strategy, drawn, recipe.network.members)
