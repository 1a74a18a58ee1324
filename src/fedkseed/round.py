"""START HERE: one round, on the server's side and on a client's.

    run_round                                        answer, on every client
       strategy.broadcast    state -> message
       encode, shorten       -> bytes
       transport   ------------------------------->     restore, if the message is a difference to a kept one
                                                        decode, check that the run is the same
                                                        strategy.sync      c -> w(c)
                                                        strategy.train     τ local steps
                   <-------------------------------     encode
       decode      uploads
                  (a second leg, where uploads are masked: strategy.requests, respond, combined)
       strategy.aggregate    state, uploads -> next state

    the cohort of a round        run/cohort.py, drawn by the caller
    transport                    run/simulation.py: one process; network/protocol/server/clients.py: a network
    the local steps              strategies/kseed.py, then local/zeroth_order.py or local/derivatives.py
    the next state is committed  run/loop.py

Messages are encoded even when server and clients share one process, so that the bytes counted are those that a network
would carry.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol, TypeAlias, TypeVar

from .errors import FedKSeedError
from .local.client import Client
from .strategies.noised import Noised
from .strategy import Strategy, TwoLegs
from .wire.codec import decode, encode, kind_of
from .wire.delta import shorten
from .wire.records import Change, History, Lack, Run, Subtotal, Upload


class RoundState(Protocol):
    """The part of a state that a round reads, whatever the strategy."""

    @property
    def round(self) -> int: ...  # number of rounds done


State = TypeVar("State", bound=RoundState)

# Sends each client its message and yields (client, its answer) as answers arrive.
Transport: TypeAlias = Callable[[Mapping[int, bytes]], Iterable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements of one round."""

    round: int
    clients: tuple[int, ...]  # those that answered
    bytes_down: int  # the most that one client was sent
    bytes_up: int  # the most that one client sent
    bytes_total: int  # down and up, of all clients
    loss: float  # median over the clients of their mean local loss: one client can't make it what it likes
    skipped: int  # probes left out because their loss was not finite, or because a difference of 0 has no sign
    scalar: float | None  # mean |ρ|; None where clients send something else
    seconds: float = 0.0  # from the broadcast to the next state
    cpu_seconds: float | None = None  # of this process in that time, with the clients that run in it
    total_down: int = 0  # bytes sent to all clients
    replayed: int = 0  # coefficients replayed by the client that was away longest
    staleness: tuple[int, ...] = ()  # of each client: rounds since the one that it began with
    given_up: int = 0  # clients whose uploads would have come too late
    clock: float | None = None  # virtual time of the next state, see run/cohort.py
    epsilon: float | None = None  # spent so far, at most, for one client; None where sums have no noise


def run_round(
    strategy: Strategy[State],
    state: State,
    cohort: Sequence[int],
    transport: Transport,
    earlier: Mapping[int, State] | None = None,
    kept: Mapping[int, bytes] | None = None,
) -> tuple[State, Report]:
    """Do one round with the clients of `cohort` and return the state after it.

    Args:
        earlier: by client, where rounds are asynchronous: the state with which a client of the cohort began, if it
            began in an earlier round.
        kept: by client: the message of an earlier round that it still holds. It is sent the difference, if that is
            shorter, and then the whole message if it answers with a `Lack`.

    Raises:
        FedKSeedError: a reply is broken or comes from a client that was not asked; the state is unchanged.
    """
    begin, computed = time.perf_counter(), time.process_time()
    earlier, kept = earlier or {}, kept or {}
    messages = dict(strategy.broadcast(state, [client for client in cohort if client not in earlier]))
    for client, began in earlier.items():
        messages |= strategy.broadcast(began, [client])
    distinct = {id(message): message for message in messages.values()}  # one object is encoded once
    encoded = {key: encode(message) for key, message in distinct.items()}
    whole = {client: encoded[id(message)] for client, message in messages.items()}
    replies, down, up = _exchange(transport, whole, kept)
    uploads = decoded(replies, strategy.replies, messages)
    counted = uploads
    if isinstance(strategy, TwoLegs):
        requests = strategy.requests(messages, uploads)
        sent = {client: encode(request) for client, request in requests.items()}
        answers = _ask(transport, sent)
        counted = [strategy.combined(messages, uploads, decoded(answers, (strategy.answer,), requests))]
        down = {client: size + len(sent.get(client, b"")) for client, size in down.items()}
        up = {client: size + len(answers.get(client, b"")) for client, size in up.items()}
    after = strategy.aggregate(state, counted, {began.round: began for began in earlier.values()})
    # Masked uploads say nothing of these, and what has no noise must not be in a private run's report.
    private = isinstance(strategy, Noised)
    clear = [upload for upload in uploads if isinstance(upload, Upload | Change | Subtotal) and not private]
    losses = [upload.loss for upload in clear if math.isfinite(upload.loss)]
    found = [upload.scalars[upload.found] for upload in clear if isinstance(upload, Upload) and upload.found.any()]
    sizes = [abs(scalars).mean() for scalars in found]
    report = Report(
        round=state.round,
        clients=_answered(uploads),
        bytes_down=max(down.values()),
        bytes_up=max(up.values()),
        bytes_total=sum(down[client] + up[client] for client in replies),
        loss=median(losses) if losses else math.nan,
        skipped=sum(upload.skipped for upload in clear),
        scalar=float(sum(sizes) / len(sizes)) if sizes else None,
        seconds=time.perf_counter() - begin,
        cpu_seconds=time.process_time() - computed,
        total_down=sum(down[client] for client in replies),
        staleness=tuple(state.round - upload.round for upload in uploads),
        replayed=max((m.coefficients.size for m in messages.values() if isinstance(m, History)), default=0),
    )
    return after, report


def _answered(uploads: Sequence[Any]) -> tuple[int, ...]:
    """The clients whose uploads have come, by themselves or in subtotals."""
    numbers = (one.clients.tolist() if isinstance(one, Subtotal) else [one.client] for one in uploads)
    return tuple(sorted(number for some in numbers for number in some))


def decoded(data: Mapping[int, bytes], kinds: tuple[type[Any], ...], asked: Mapping[int, Any]) -> list[Any]:
    """The replies to a leg's messages, in the order of their clients.

    Raises:
        FedKSeedError: one is broken, or was asked of another client or for another round.
    """
    records: list[Any] = [decode(data[client], *kinds) for client in sorted(data)]
    for client, record in zip(sorted(data), records, strict=True):
        if record.client != client or client not in asked:
            raise FedKSeedError(
                f"a reply of client {client} is signed by client {record.client}; asked were {sorted(asked)}"
            )
        if record.round != asked[client].round:  # the round decides how much the reply counts
            raise FedKSeedError(
                f"client {client} was sent round {asked[client].round} and answered round {record.round}"
            )
    return records


def _exchange(
    transport: Transport, whole: Mapping[int, bytes], kept: Mapping[int, bytes]
) -> tuple[dict[int, bytes], dict[int, int], dict[int, int]]:
    """Send each client its message, as a difference where that is shorter, and again whole to clients that need it.

    Returns:
        The replies, the bytes sent to each client and the bytes received from it, by client.
    """
    pairs = {(whole[client], kept[client]) for client in whole.keys() & kept.keys()}
    shorter = {pair: shorten(*pair) for pair in pairs}  # one difference for all clients that have kept the same message
    sent = {client: shorter[data, kept[client]] if client in kept else data for client, data in whole.items()}
    replies = _ask(transport, sent)
    shortened = {client for client in sent if sent[client] is not whole[client]}
    again = [client for client, reply in replies.items() if kind_of(reply) is Lack and client in shortened]
    down, up = ({client: len(data) for client, data in both.items()} for both in (sent, replies))
    for client in again:
        decode(replies.pop(client), Lack)
    for client, reply in _ask(transport, {client: whole[client] for client in again}).items() if again else ():
        if client not in again:
            raise FedKSeedError(f"client {client} answered, but only {again} were asked")
        replies[client] = reply
        down[client] += len(whole[client])
        up[client] += len(reply)
    return replies, down, up


def _ask(transport: Transport, messages: Mapping[int, bytes]) -> dict[int, bytes]:
    replies: dict[int, bytes] = {}
    for client, reply in transport(messages):
        if client in replies:
            raise FedKSeedError(f"client {client} answered twice; keep one of its replies")
        replies[client] = reply
    return replies


Decode: TypeAlias = Callable[..., Any]  # as `decode`


def decode_once() -> Decode:
    """Make a `decode` that returns the same record for the same object of bytes, if that comes several times in a row.

    A broadcast to clients that live in one process is so checked and decoded once.
    """
    seen: list[Any] = [None, None]  # the last bytes, which it keeps so that no others can take their place; the record

    def read(data: bytes, *kinds: type[Any]) -> Any:
        if data is not seen[0]:
            seen[:] = data, decode(data, *kinds)
        return seen[1]

    return read


def answer(strategy: Strategy, data: bytes, client: Client, read: Decode = decode) -> bytes:
    """A client's side of a round: takes the bytes of a broadcast and returns those of an upload.

    A client that keeps messages calls `restore` before.

    Args:
        read: `decode`, or what `decode_once` has made, for several clients of one process.

    Raises:
        FedKSeedError: the message is broken or for another run; the model is unchanged.
    """
    weights = client.weights
    known = Run(weights.pool, weights.base_digest)
    if isinstance(strategy, TwoLegs) and kind_of(data) is strategy.request:
        request = read(data, strategy.request)
        known.require(request.run)
        return encode(strategy.respond(request, client))
    message = read(data, strategy.message)
    known.require(message.run)
    strategy.sync(message, weights)
    return encode(strategy.train(message, client))
