"""START HERE: one round, on the server's side and on a client's.

    run_round, or a network's own loop over a Round      answer, on every client
       server.broadcast      state -> message
       encode, shorten       -> bytes
       transport   ------------------------------->     restore, if the message is a difference to a kept one
                                                        decode, check that the run is the same
                                                        client.sync        c -> w(c)
                                                        client.train       τ local steps
                   <-------------------------------     encode
       decode, check
       aggregator.add_       upload by upload, as they come
                  (a second leg, where uploads are masked: strategy.second_leg)
       aggregator.finish     -> next state

    the parts of a strategy      strategy.py: server, aggregator, client
    the cohort of a round        run/cohort.py, drawn by the caller
    transport                    run/simulation.py: one process; network/protocol/server/clients.py: a network
    the local steps              strategies/kseed_client.py, then local/zeroth_order.py or local/derivatives.py
    the next state is committed  run/loop.py

Messages are encoded even when server and clients share one process, so that the bytes counted are those that a network
would carry. Each broadcast is encoded once (`Broadcasts`), and each upload is decoded once (`Round.add_`).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Generic, TypeAlias, TypeVar

from .errors import FedKSeedError
from .local.client import Client, return_freed
from .strategy import NO_STATES, ServerPart, Strategy
from .wire.codec import decode, encode, kind_of
from .wire.delta import shorten
from .wire.records import Change, History, Lack, Run, Subtotal, Upload

State = TypeVar("State", bound=Any)  # a dataclass of `round`, the number of rounds done, and arrays

# Sends each client its message and yields (client, its answer) as answers arrive.
Transport: TypeAlias = Callable[[Mapping[int, bytes]], Iterable[tuple[int, bytes]]]

SPARE = 1 << 28  # bytes that a client which takes derivatives may leave freed to the C library


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
    cpu_seconds: float | None = None  # in that time, of this process and its workers
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
    began: Mapping[int, State] = NO_STATES,
    kept: Mapping[int, bytes] | None = None,
    broadcasts: "Broadcasts[State] | None" = None,
) -> tuple[State, Report]:
    """Do one round with the clients of `cohort` and return the state after it; for the arguments see `Round.begin`.

    Raises:
        FedKSeedError: a reply can't be used, or comes from a client that was not asked; the state is unchanged.
    """
    round_ = Round.begin(strategy, state, cohort, began, kept, broadcasts)
    for messages in round_.exchanges():
        for client, reply in transport(messages):
            round_.add_(client, reply)
            del reply  # it can be all weights, and the next client trains meanwhile
    return round_.finish()


class Broadcasts(Generic[State]):
    """The encoded broadcasts of a run's last states, each encoded once: for its chain, for clients, for differences."""

    def __init__(self, server: ServerPart[State], most: int = 1) -> None:
        self.server, self.most = server, most
        self._encoded: dict[int, bytes] = {}  # by the number of rounds done

    def of(self, state: State) -> bytes:
        """The broadcast of a state of this run."""
        return self.after(state.round, lambda done: state)

    def after(self, done: int, state_after: Callable[[int], State]) -> bytes:
        """The broadcast of the state after a number of rounds, which is asked for where its broadcast is not kept."""
        if done not in self._encoded:
            while len(self._encoded) >= self.most:  # before another is made: it can be all weights
                del self._encoded[min(self._encoded)]
            self._encoded[done] = encode(self.server.broadcast(state_after(done)))
        return self._encoded[done]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one upload that a report is made of; masked or private uploads have none."""

    clients: list[int]  # itself, or those in its subtotal
    loss: float = math.nan
    skipped: int = 0
    scalar: float | None = None  # mean |ρ|


@dataclass(slots=True)
class Round(Generic[State]):
    """A round on its server: what is sent, and the sum of what has come so far."""

    strategy: Strategy[State]
    state: State
    whole: dict[int, bytes]  # the message to each client, of the present leg
    kept: Mapping[int, bytes]  # client -> the message of an earlier round that it still holds
    asked_round: Mapping[int, int]  # client -> the round of its message
    replayed: int
    accumulator: Any
    replies: tuple[type[Any], ...]
    add_reply_: Callable[[Any, Any], None]
    begun_at: tuple[float, float]  # seconds on the clock, and of this process
    sent: dict[int, bytes] = field(default_factory=dict)  # the messages of the present exchange
    awaited: set[int] = field(default_factory=set)  # the clients of the present exchange that have not answered
    answered: set[int] = field(default_factory=set)  # the clients whose answers were added in the present leg
    lacking: list[int] = field(default_factory=list)  # the clients that can't restore the difference they were sent
    down: dict[int, int] = field(default_factory=dict)  # bytes sent to each client
    up: dict[int, int] = field(default_factory=dict)  # bytes received from each
    measured: dict[int, Measured] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        strategy: Strategy[State],
        state: State,
        cohort: Sequence[int],
        began: Mapping[int, State] = NO_STATES,
        kept: Mapping[int, bytes] | None = None,
        broadcasts: Broadcasts[State] | None = None,
    ) -> "Round[State]":
        """A round with the clients of `cohort`.

        Args:
            began: by client, where rounds are asynchronous: the state with which a client of the cohort began, if it
                began in an earlier round.
            kept: by client: the message of an earlier round that it still holds. It is sent the difference, if that is
                shorter, and then the whole message if it answers with a `Lack`.
            broadcasts: those of the run, where some are encoded already.
        """
        clock = time.perf_counter(), time.process_time()
        broadcasts = broadcasts or Broadcasts(strategy.server, 1 + len(began))
        if strategy.addressed is None:
            addressed = dict.fromkeys(cohort)
            whole = {client: broadcasts.of(began.get(client, state)) for client in cohort}
        else:
            addressed = dict(strategy.addressed(state, cohort, lambda: broadcasts.of(state)))
            distinct = {id(message): message for message in addressed.values()}  # one object is encoded once
            encoded = {key: encode(message) for key, message in distinct.items()}
            whole = {client: encoded[id(message)] for client, message in addressed.items()}
        histories = [message for message in addressed.values() if isinstance(message, History)]
        aggregator = strategy.aggregator
        return cls(
            strategy, state, whole, kept or {},
            asked_round={client: began.get(client, state).round for client in whole},
            replayed=max((history.coefficients.size for history in histories), default=0),
            accumulator=aggregator.start(state, addressed, {other.round: other for other in began.values()}),
            replies=aggregator.replies, add_reply_=aggregator.add_, begun_at=clock,
        )  # fmt: skip

    def exchanges(self) -> Iterator[dict[int, bytes]]:
        """The messages of the round, exchange after exchange: after each, `add_` takes the answers."""
        shorter, kept = cache(shorten), self.kept  # one difference for all that have kept the same message
        yield self._sending({n: shorter(data, kept[n]) if n in kept else data for n, data in self.whole.items()})
        if self.lacking:
            yield self._sending({client: self.whole[client] for client in self.lacking})
        if (second := self.strategy.second_leg) is not None:
            requests = second.requests(self.accumulator)
            self.whole = {client: encode(request) for client, request in requests.items()}
            self.replies, self.add_reply_, self.answered = (second.answer,), second.add_, set()
            yield self._sending(self.whole)

    def _sending(self, messages: dict[int, bytes]) -> dict[int, bytes]:
        self.sent, self.awaited = messages, {*messages}
        for client, data in messages.items():
            self.down[client] = self.down.get(client, 0) + len(data)
        return messages

    def add_(self, client: int, reply: bytes) -> None:
        """Decode a client's answer, and add it to the sum; if it is refused, the round is as it was and can go on."""
        if client not in self.sent:
            raise FedKSeedError(f"client {client} answered, but only {sorted(self.sent)} were asked")
        if client not in self.awaited:
            raise FedKSeedError(f"client {client} answered twice; keep one of its replies")
        if kind_of(reply) is Lack and self.sent[client] is not self.whole[client]:
            decode(reply, Lack)
            self.lacking.append(client)
        else:
            record: Any = decode(reply, *self.replies)
            if record.client != client:
                raise FedKSeedError(f"a reply of client {client} is signed by client {record.client}")
            if record.round != (asked := self.asked_round[client]):  # the round decides how much the reply counts
                raise FedKSeedError(f"client {client} was sent round {asked} and answered round {record.round}")
            self.add_reply_(self.accumulator, record)
            self.answered.add(client)
            if client not in self.measured:  # in the first leg
                self.measured[client] = self._measured(record)
        self.awaited.remove(client)
        self.up[client] = self.up.get(client, 0) + len(reply)

    def _measured(self, upload: Any) -> Measured:
        clients = upload.clients.tolist() if isinstance(upload, Subtotal) else [upload.client]
        if self.strategy.private or not isinstance(upload, Upload | Change | Subtotal):
            return Measured(clients)
        scalar = None
        if isinstance(upload, Upload) and upload.found.any():
            scalar = abs(upload.scalars[upload.found]).mean()
        return Measured(clients, upload.loss, upload.skipped, scalar)

    def finish(self) -> tuple[State, Report]:
        """The state after the round, and the round's report."""
        after = self.strategy.aggregator.finish(self.accumulator)
        uploads = [self.measured[client] for client in sorted(self.measured)]  # float sums need one order
        losses = [upload.loss for upload in uploads if math.isfinite(upload.loss)]
        scalars = [upload.scalar for upload in uploads if upload.scalar is not None]
        down = sum(self.down[client] for client in self.measured)
        clients = tuple(sorted(client for upload in uploads for client in upload.clients))
        total = down + sum(self.up[client] for client in self.measured)
        return after, Report(
            round=self.state.round,
            clients=clients,
            bytes_down=max(self.down.values()),
            bytes_up=max(self.up.values()),
            bytes_total=total,
            loss=median(losses) if losses else math.nan,
            skipped=sum(upload.skipped for upload in uploads),
            scalar=float(sum(scalars) / len(scalars)) if scalars else None,
            seconds=time.perf_counter() - self.begun_at[0],
            cpu_seconds=time.process_time() - self.begun_at[1],
            total_down=down,
            replayed=self.replayed,
            staleness=tuple(self.state.round - self.asked_round[client] for client in sorted(self.measured)),
        )


Decode: TypeAlias = Callable[..., Any]  # as `decode`


def decode_once() -> Decode:
    """Make a `decode` that checks and decodes the same object of bytes once, if that comes several times in a row."""
    last: list[Any] = [None, None]  # the bytes, which it keeps so that no others can take their place; the record

    def read(data: bytes, *kinds: type[Any]) -> Any:
        if data is not last[0]:
            last[:] = data, decode(data, *kinds)
        return last[1]

    return read


def answer(strategy: Strategy, data: bytes, client: Client, read: Decode = decode) -> bytes:
    """A client's side of a round: takes the bytes of a broadcast and returns those of an upload.

    A client that keeps messages calls `restore` before.

    Args:
        read: `decode`, or what `decode_once` has made, for several clients of one process.

    Raises:
        FedKSeedError: the message is broken or for another run; the model is unchanged.
    """
    weights, second = client.weights, strategy.second_leg
    run = Run(weights.pool, weights.base_digest)
    if second is not None and kind_of(data) is second.request:
        request = read(data, second.request)
        run.require(request.run)
        return encode(second.respond(request, client))
    message = read(data, strategy.client.message)
    run.require(message.run)
    strategy.client.sync(message, weights)
    upload = strategy.client.train(message, client)
    if client.graph is not None:  # activations of whole batches
        return_freed(SPARE)
    return encode(upload)
