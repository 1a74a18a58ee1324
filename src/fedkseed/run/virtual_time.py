"""Who takes part in which server step, and when, in virtual time.

    synchronous    a cohort begins together; the server steps when the last of it is done
    asynchronous   whoever is done hands in and another client begins at once, with the model of that moment;
                   the server steps whenever its buffer is full (FedBuff)

No training result enters, so a plan is a pure function of the recipe: a run that was stopped goes on with it.

Nguyen et al., 2022, https://arxiv.org/abs/2106.06639
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from ..randomness import Purpose, cohort, generator, turns


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the server."""

    begun: dict[int, int]  # client, ascending -> the round whose model it began with
    clock: float  # when; the unit is a local step of a client that is not slow
    given_up: int = 0  # clients told to stop since the last step: they would have been too late


def durations(seed: int, steps: Sequence[int], slow_share: float, slow_factor: float) -> list[float]:
    """How long each client trains; `steps` are its local steps."""
    slow = set(generator(seed, Purpose.SPEED).permutation(len(steps))[: round(slow_share * len(steps))].tolist())
    return [number * (slow_factor if client in slow else 1.0) for client, number in enumerate(steps)]


def synchronous(seed: int, durations: Sequence[float], size: int) -> Iterator[Step]:
    """Rounds with cohorts of `size`, each as long as its slowest client takes."""
    clock = 0.0
    for round_ in count():
        clients = cohort(seed, round_, len(durations), size)
        clock += max(durations[client] for client in clients)
        yield Step(dict.fromkeys(clients, round_), clock)


def asynchronous(
    seed: int, durations: Sequence[float], buffer: int, concurrency: int, max_staleness: float = math.inf
) -> Iterator[Step]:
    """Steps with the first `buffer` contributions that come, while `concurrency` clients train.

    A client that has handed in waits for the step that takes its contribution: it is never in flight twice. Where so
    many wait that fewer than `concurrency` are left, all that are left train. Between two steps, clients are drawn
    in the order of a synchronous round; if all are equally fast, and buffer and concurrency are a cohort, so are the
    rounds. Those who end at the same moment hand in, in the order in which they began, before the next begin.

    Args:
        buffer, concurrency: at most as many as there are clients.
        max_staleness: a client is given up, and free again, as soon as it can't be in a step so soon after its model's.
    """
    training: dict[int, tuple[int, float]] = {}  # client -> the round it began with, when it will be done
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
