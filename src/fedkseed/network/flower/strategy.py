"""FedKSeed for a Flower project that has its own ServerApp and ClientApp.

The "arrays" of Flower's loop are the server's state: K coefficients, and the statistics of the directions. Saved by an
`evaluate_fn` and passed back as `initial_arrays`, they let a stopped run continue. docs/flower.md has an example.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import islice
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from ...errors import FedKSeedError
from ...local.client import Client
from ...round import Round, answer
from ...run.cohort import cohort
from ...strategy import Strategy
from ..protocol.envelope import Reply, Status, Task
from .messages import packed, unpacked


class FedKSeedStrategy(FlowerStrategy):
    """A strategy of Flower's that runs one of ours.

    Args:
        strategy: one of ours, as `KSeed.make(settings)`; not one of masked uploads, or whose clients remember rounds.
        clients: number of all clients; nodes get numbers in the order of their ids.
        size: number of clients that train in a round; default all.
        seed: seed by which cohorts are drawn.
        seconds: time limit for a client's answer.

    Raises:
        FedKSeedError: the strategy has rounds of two legs, or clients that remember rounds.
    """

    def __init__(
        self, strategy: Strategy, clients: int, size: int | None = None, seed: int = 0, seconds: float = 3600.0
    ) -> None:
        if strategy.second_leg is not None or strategy.server.remembers:
            raise FedKSeedError("give a strategy with one leg a round and clients that remember none")
        self.strategy, self.clients, self.size = strategy, clients, size or clients
        self.seed, self.seconds = seed, seconds
        self._round: Round[Any] | None = None  # begun by `configure_train`, which alone is given the arrays
        self._asked: dict[int, int] = {}  # node -> number

    def initial_arrays(self) -> ArrayRecord:
        """The state before the first round, for `start`."""
        return to_arrays(self.strategy.server.init())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        state = from_arrays(arrays, self.strategy.server.state)
        nodes = sorted(grid.get_node_ids())[: self.clients]
        drawn = cohort(self.seed, state.round, self.clients, self.size)
        self._asked = {nodes[number]: number for number in drawn if number < len(nodes)}
        self._round = Round.begin(self.strategy, state, [*self._asked.values()])
        (sent,) = islice(self._round.exchanges(), 1)
        tasks = []
        for node, number in self._asked.items():
            # No recipe, nor its digest: both sides make the same strategy themselves.
            task = Task(number, self.seconds, bytes(16), b"", sent[number])
            tasks.append(Message(packed(task.encode()), node, MessageType.TRAIN, group_id=str(state.round + 1)))
        return tasks

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The state after the round; unusable answers are logged and left out. None, for no change, if all are."""
        if self._round is None:
            raise FedKSeedError("configure_train() begins a round, and was not called")
        for message in replies:
            number = self._asked.get(message.metadata.src_node_id)
            try:
                if number is None or number in self._round.answered:
                    raise FedKSeedError("it was not asked, or answered already")
                if message.has_error():
                    raise FedKSeedError(f"Flower's error {message.error.code}: {message.error.reason}")
                reply = Reply.decode(unpacked(message))
                if reply.status is not Status.DONE:
                    raise FedKSeedError(reply.text)
                self._round.add_(number, reply.message)
            except FedKSeedError as error:
                log(WARNING, "node %s is left out: %s", message.metadata.src_node_id, error)
        if not self._round.answered:
            return None, None
        after, report = self._round.finish()
        metrics = {"loss": report.loss, "clients": len(report.clients), "skipped": report.skipped}
        return to_arrays(after), MetricRecord(metrics | {"bytes": report.bytes_total})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No messages: models are evaluated on the server, by an `evaluate_fn`."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        name = type(self.strategy.server).__name__
        log(INFO, "\t└──> %s, %d of %d clients in a round", name, self.size, self.clients)


def train(message: Message, strategy: Strategy, client: Callable[[int], Client]) -> Message:
    """A ClientApp's reply to a message of `FedKSeedStrategy`.

    Args:
        strategy: a strategy with the same settings as the server's.
        client: makes the client of a given number, which decides the client's directions and batches.
    """
    try:
        task = Task.decode(unpacked(message))
        reply = Reply(Status.DONE, answer(strategy, task.message, client(task.client)))
    except FedKSeedError as error:
        reply = Reply(Status.REFUSED, text=str(error))
    return Message(packed(reply.encode()), reply_to=message)


def to_arrays(state: Any) -> ArrayRecord:
    """A state as Flower's arrays."""
    return ArrayRecord({f.name: Array(np.atleast_1d(getattr(state, f.name))) for f in fields(state)})


def from_arrays(arrays: ArrayRecord, kind: type[Any]) -> Any:
    """The state in Flower's arrays.

    Args:
        kind: the class of the states, `ServerPart.state`.

    Raises:
        FedKSeedError: the arrays are not those of a state.
    """
    names = {f.name for f in fields(kind)}
    if set(arrays) != names:
        raise FedKSeedError(f"a state has arrays {sorted(names)}, got {sorted(arrays)}; begin with initial_arrays()")
    values = {name: array.numpy() for name, array in arrays.items()}
    return kind(**values | {"round": int(values["round"][0])})
