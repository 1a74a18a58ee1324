"""START HERE: one round, on the server's side and on a client's.

    run_round                                        answer, on every client
       strategy.broadcast    state -> message
       encode                -> bytes
       transport   ------------------------------->     decode, is it the same run?
                                                        strategy.sync      c -> w(c)
                                                        strategy.train     τ local steps
                   <-------------------------------     encode
       decode      uploads
       strategy.aggregate    state, uploads -> next state

Messages are encoded even when both sides live in one process: the bytes counted are those sent.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from .errors import FedKSeedError
from .messages import Broadcast, Run, Upload
from .strategy import Client, Strategy
from .wire import decode, encode

State = TypeVar("State")

# Sends one message to the clients named and yields (client, its answer) as answers arrive.
Transport: TypeAlias = Callable[[bytes, Sequence[int]], Iterable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Report:
    """What one round was like."""

    round: int
    clients: tuple[int, ...]  # who answered
    bytes_down: int  # to one client
    bytes_up: int  # from one client, the largest
    bytes_total: int  # down and up, of all clients
    loss: float  # mean local loss, weighted like the aggregation
    skipped: int  # probes left out because their loss was not finite
    scalar: float  # mean |ρ|
    seconds: float = 0.0  # from the broadcast to the next state


def run_round(
    strategy: Strategy[State], state: State, cohort: Sequence[int], transport: Transport
) -> tuple[State, Report]:
    """Do one round with the clients of `cohort` and return the state after it.

    Raises:
        FedKSeedError: a reply is broken or is not by a client that was asked; the state is unchanged.
    """
    begin = time.perf_counter()
    message = strategy.broadcast(state)
    data = encode(message)
    replies: dict[int, bytes] = {}
    for client, reply in transport(data, cohort):
        if client in replies:
            raise FedKSeedError(f"client {client} answered twice; keep one of its replies")
        replies[client] = reply
    uploads = [decode(replies[client], Upload) for client in sorted(replies)]
    for client, upload in zip(sorted(replies), uploads, strict=True):
        if upload.client != client or client not in cohort:
            raise FedKSeedError(
                f"a reply of client {client} is signed by client {upload.client}; asked were {list(cohort)}"
            )
    after, report = strategy.aggregate(state, uploads), _report(message, data, uploads, replies)
    return after, replace(report, seconds=time.perf_counter() - begin)


def answer(strategy: Strategy, data: bytes, client: Client) -> bytes:
    """A client's side: bytes of a broadcast in, bytes of an upload out.

    Raises:
        FedKSeedError: the message is broken or for another run; the model is unchanged.
    """
    message = decode(data, Broadcast)
    weights = client.weights
    Run(weights.pool, weights.base_digest).require(message.run)
    strategy.sync(message, client)
    return encode(strategy.train(message, client))


def _report(message: Broadcast, data: bytes, uploads: Sequence[Upload], replies: dict[int, bytes]) -> Report:
    finite = [upload for upload in uploads if upload.scalars.size]
    examples = sum(upload.examples for upload in finite)
    sizes = [abs(upload.scalars).mean() for upload in finite]
    return Report(
        round=message.round,
        clients=tuple(sorted(replies)),
        bytes_down=len(data),
        bytes_up=max(map(len, replies.values())),
        bytes_total=len(replies) * len(data) + sum(map(len, replies.values())),
        loss=sum(upload.loss * upload.examples for upload in finite) / examples if finite else math.nan,
        skipped=len(uploads) * message.steps * message.probes - sum(upload.scalars.size for upload in uploads),
        scalar=float(sum(sizes) / len(sizes)) if sizes else 0.0,
    )
