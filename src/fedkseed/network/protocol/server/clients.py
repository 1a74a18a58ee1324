"""The transport of a round, to clients behind a carrier.

A round ends when all clients that can answer have answered, a little after the minimum has, or at its deadline. No
message from the network can break a round: answers that are late, duplicate, broken, refused, or from an unknown node
are reported and left out, and a client that sends them again and again is not asked for a while. An error of the
carrier's does not end a round either, unless it lasts until the deadline.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import TypeAlias, TypeVar

from ....errors import FedKSeedError
from ....recipe.schema import NetworkTable
from ....run.progress import Progress
from ....wire.codec import kind_of
from ....wire.records import Lack
from ..carrier import AGAIN, LATE, Arrival, Carrier, Parcel, RoundStoppedError
from ..client_gain import GainSum
from ..envelope import LINK, MAX_CERTIFICATE, Reply, Status, Task, printable, recipe_digest
from ..signatures import ServerSigning
from .client_numbers import ClientNumbers

POLL = 0.2  # seconds between two looks for answers
LOOK = 1.0  # seconds between two looks at the list of connected clients
TRIES = 3  # number of times that a client is asked in vain before a deadline
PAUSE = 1.0  # seconds after an error of the carrier's
# Seconds at least that the others have after the minimum has answered, see `NetworkTable.grace`; and those of them that
# are connected and have to load the model first, which took 30 s of one core for SmolLM2-135M.
GRACE, STARTING = 10.0, 60.0
OFFENCES, REST = 3, 10  # answers of a client that can't be used, and the rounds in which it is not asked after them

Take: TypeAlias = Callable[[int, bytes], object]  # adds a client's message; a FedKSeedError if it can't be used
# (since, rounds done) -> the links from the state after `since` rounds on, head and stem
LinksSince: TypeAlias = Callable[[int, int], tuple[list[bytes], bytes, bytes]]
Answer = TypeVar("Answer")


@dataclass(slots=True)
class RemoteClient:
    """A client as the server remembers it from round to round."""

    has_recipe: bool = False
    followed: int = -1  # rounds done in the last history that it has followed
    head: bytes = bytes(LINK)  # of the last history that it was sent
    dialled: str = ""  # the name by which it had dialled the server when it was last sent a task
    unusable: int = 0  # its answers that could not be used
    silent: int = 0  # rounds in a row without an answer in time
    rests_until: int = 0  # the round in which it is asked again


@dataclass(slots=True)
class Exchange:
    """Messages to some clients, and who has answered."""

    round: int
    sent: Mapping[int, bytes]
    # By client: the broadcast that it signs, another than in `sent` where that is a difference.
    signed: Mapping[int, bytes]
    minimum: int  # number of answers needed; connected clients are waited for even if it is 0
    keep: bool = False  # whether clients are sent the tuned model, which they keep
    unhurried: bool = False  # whether they may take a deadline for it: some measure their gain, or load the model first
    answered: set[int] = field(default_factory=set)
    lacking: set[int] = field(default_factory=set)  # those whose answer is a wish for the whole broadcast
    refused: dict[int, str] = field(default_factory=dict)  # client -> reason, also where an answer can't be used
    number: int = field(default_factory=count().__next__)  # no other exchange of this process has it

    def __str__(self) -> str:
        return "the tuned model" if self.keep else f"round {self.round + 1}"

    @property
    def enough(self) -> bool:
        return len(self.answered - self.lacking) >= self.minimum

    @property
    def complete(self) -> bool:
        return self.answered.issuperset(self.sent)

    def owes(self, client: int) -> bool:
        return client not in self.answered and client not in self.refused


@dataclass(slots=True)
class Attempt:
    """The time from asking the clients of an exchange to a deadline."""

    begin: float
    end: float
    enough: bool  # whether the minimum was seen to have answered
    tries: Counter[int] = field(default_factory=Counter)  # by client: tasks in vain
    asked_at: dict[int, float] = field(default_factory=dict)  # by client


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that was sent and is not answered yet."""

    client: int
    node: int
    exchange: int  # its number
    round: int
    with_recipe: bool
    end: float  # time after which neither an answer nor the carrier's reason for none can come


@dataclass(slots=True)
class RemoteClients:
    """The clients behind a carrier."""

    carrier: Carrier
    numbers: ClientNumbers
    recipe: bytes  # TOML; sent to each client once, and again to clients that have lost it
    minimum: int  # number of connected clients with which the run can begin
    options: NetworkTable
    progress: Progress
    signing: ServerSigning | None = None  # None: tasks and answers travel unsigned
    history: LinksSince | None = None  # the links of the run's log, for each task; None: none is sent
    interrupt: Callable[[], object] = lambda: None  # before each call of the carrier; may raise a RoundStoppedError
    signatures: dict[int, bytes] = field(default_factory=dict)  # of accepted answers; the caller empties it
    _clients: defaultdict[int, RemoteClient] = field(default_factory=lambda: defaultdict(RemoteClient))
    _tasks: dict[str, OpenTask] = field(default_factory=dict)  # also of earlier rounds: late answers are reported
    _online: dict[int, int] = field(default_factory=dict)  # client -> node
    _looked: float = -math.inf  # time at which `_online` was asked for
    _strangers: set[int] = field(default_factory=set)  # nodes that are no clients and were reported
    _took: float = 0.0  # seconds that the minimum of the last round took
    _longest: float = 0.0  # the most that one took: the first has loaded the model
    _trouble: dict[str, Exception] = field(default_factory=dict)  # by kind of call: its error, if the last one failed

    def gather(self) -> None:
        """Wait until all clients are connected; after [network] patience, the minimum of a round is enough.

        Raises:
            FedKSeedError: fewer clients than the minimum are connected, or one of [network] required is not.
        """
        expected, total, required = self.numbers.expected, self.numbers.count, {*self.options.required}
        if strangers := sorted(required - expected):
            raise FedKSeedError(f"[network] required names {strangers}, and no such client of {total} has a key")
        online = self.wait_for(expected)
        if away := sorted(required - online.keys()):
            raise FedKSeedError(
                f"after {self.options.patience:g} s [network] required still lacks {self.named(*away)}: start them, or "
                "look at their logs, and start the server again"
            )
        if not expected.issubset(online) and len(online) < self.minimum:
            raise FedKSeedError(
                f"after {self.options.patience:g} s {len(online)} clients are connected, a round needs {self.minimum}: "
                "start them, or look at their logs, and start the server again"
            )
        everybody, others = len(online) == total, self.named(*sorted({*range(total)} - {*online}))
        going_on = "" if expected.issubset(online) else "going on "
        self.progress.note(f"all {total} clients are connected" if everybody else f"{going_on}without {others}")

    def wait_for(self, clients: Set[int]) -> dict[int, int]:
        """Wait until some clients are connected, for [network] patience at most; returns who is, as `online` does."""
        end, seen = time.monotonic() + self.options.patience, -1
        while not clients <= (online := self.online()).keys() and time.monotonic() < end:
            if len(online) != seen:
                seen, away = len(online), sorted(clients - online.keys())
                they = f"{seen} of {len(self.numbers.expected)} clients are connected"
                self.progress.note(f"{they}; waiting for {self.named(*away)}")
                self.progress.clients(away, "offline")
                self.progress.clients([*online], "waiting")
            time.sleep(POLL)
        return online

    def online(self) -> dict[int, int]:
        """Client -> node for the connected clients, by a list that is at most `LOOK` seconds old."""
        if time.monotonic() - self._looked >= LOOK:
            nodes = self._tried("list the clients", self.carrier.nodes, [*self._online.values()])
            before, self._online, self._looked = self._online, self.numbers.clients_at(nodes), time.monotonic()
            for clients, news in ((self._online.keys() - before, ""), (before.keys() - self._online, "not ")):
                if clients:
                    self.progress.note(f"{news}connected: {self.named(*sorted(clients))}")
            for node in set(nodes) - set(self._online.values()) - self._strangers:
                self._strangers.add(node)
                self.progress.note(f"node {node} is none of the {self.numbers.count} clients; it is left out")
        return self._online

    def transport(
        self, round_: int, sent: Mapping[int, bytes], minimum: int, take: Take,
        whole: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[int, bytes]]:  # fmt: skip
        """Carry the messages of a round and yield (client, its answer) as answers come.

        Args:
            minimum: number of answers needed, or all if fewer are asked. Connected clients are waited for even if 0.
            take: adds an answer to the round; raises `FedKSeedError` if it can't be used.
            whole: by client: the message that a difference in `sent` restores, which is what a client signs.

        Raises:
            FedKSeedError: fewer clients than the minimum have answered after all attempts, or a message is too large.
        """
        minimum = min(minimum, len(sent))
        return self._exchange(Exchange(round_, self._awake(round_, sent, minimum), whole or sent, minimum), take)

    def _awake(self, round_: int, sent: Mapping[int, bytes], minimum: int = 0) -> Mapping[int, bytes]:
        """The messages to clients that do not rest; all messages where too few are left."""
        awake = {client: data for client, data in sent.items() if self._clients[client].rests_until <= round_}
        return awake if len(awake) >= max(minimum, 1) else sent

    def hand_out(
        self, done: int, message: bytes, measuring: bool = False, unhurried: bool = False
    ) -> dict[int, GainSum | None]:
        """Send the connected clients the tuned model of a finished run, which each keeps in its directory.

        Nobody is needed: whoever does not answer within the grace of a round, or its deadline where clients measure or
        are given that time, gets it when the finished run is served again.

        Args:
            done: number of finished rounds.
            message: a broadcast of the model, to a newcomer.
            measuring: whether clients were asked for their gain.
            unhurried: whether they may have to load the model for it.

        Returns:
            The clients that have kept it, each with its gain, if it has sent one.
        """

        def take(client: int, reply: bytes) -> None:
            if reply and not measuring:
                raise FedKSeedError(f"it was sent the tuned model, and answers with {len(reply)} bytes, not with none")
            if reply:
                GainSum.decode(reply)

        sent = self._awake(done, dict.fromkeys(sorted(self.online()), message))
        exchange = Exchange(done, sent, sent, 0, keep=True, unhurried=measuring or unhurried)
        answers = self._exchange(exchange, take) if sent else ()
        return {client: GainSum.decode(reply) if reply else None for client, reply in answers}

    def _exchange(self, exchange: Exchange, take: Take) -> Iterator[tuple[int, bytes]]:
        """Attempt an exchange until enough have answered, and yield the answers that can be used."""
        sent, attempts = exchange.sent, self.options.attempts
        if away := [client for client in sent if client not in self.online()]:
            self.progress.note(f"{exchange}: offline, left out unless back in time: {self.named(*away)}")
        self.progress.clients(away, "offline")
        self.progress.clients([client for client in sent if client not in away], "waiting")
        self.progress.begin(f"{exchange}, {len(sent)} clients", len(sent))
        for attempt in range(attempts):
            if attempt:
                self.progress.note(
                    f"{exchange}: {len(exchange.answered)} of at least {exchange.minimum} clients answered in "
                    f"{self.options.deadline:g} s; trying again, {attempt + 1} of {attempts}"
                )
            for client, reply in self._attempt(exchange):
                if self._accepts(exchange, client, reply, take):
                    yield client, reply.message
            if exchange.enough or exchange.complete:
                self._note_missing(exchange)
                return
        raise self._too_few(exchange)

    def _attempt(self, exchange: Exchange) -> Iterator[tuple[int, Reply]]:
        """Ask the clients that owe an answer, and again those that fail, until the deadline.

        The attempt ends before the deadline when no connected client owes an answer, and the others are not needed; or
        a little after the minimum has answered; or with an error when the minimum can't be reached any more. The caller
        adds to `exchange.answered` and `exchange.refused`. An error of the carrier's that lasts is raised in the end.
        """
        now = time.monotonic()
        attempt = Attempt(now, now + self.options.deadline, exchange.minimum == 0)
        while (now := time.monotonic()) < attempt.end:
            if self._grace_is_over(exchange, attempt, now):
                return
            owing = [client for client in exchange.sent if exchange.owes(client)]
            waiting = {task.client for task in self._tasks.values() if task.exchange == exchange.number} & {*owing}
            if ready := self._ready(exchange, attempt, owing, waiting, now):
                self._ask(exchange, attempt, ready, waiting, now)
            if not (waiting or ready):
                if exchange.enough or exchange.complete:
                    return
                if all(attempt.tries[client] >= TRIES for client in owing):
                    raise self._too_few(exchange)
            for client, reply in self._replies(exchange):
                if exchange.owes(client):  # else asked twice, although no message was lost
                    proven = self._proven(exchange, client, reply)
                    if proven.status is Status.DONE:
                        yield client, proven
                    else:
                        self._note_no_answer(exchange, attempt, client, proven)
            if exchange.complete:
                return
            time.sleep(POLL)
        if self._trouble and not exchange.enough:
            raise next(iter(self._trouble.values()))  # a new process may help

    def _grace_is_over(self, exchange: Exchange, attempt: Attempt, now: float) -> bool:
        """Whether the minimum has answered so long ago that the others are not waited for any more."""
        if not attempt.enough and exchange.enough:
            attempt.enough, self._took = True, now - attempt.begin
            self._longest = max(self._longest, self._took)
        starting = any(exchange.owes(k) and not self._clients[k].has_recipe for k in self._online if k in exchange.sent)
        usual = max(STARTING, 2 * self._longest) if starting else max(GRACE, self._took / 2)
        grace = self.options.deadline if exchange.unhurried else self.options.grace or usual
        # With a minimum of 0, `_took` is still that of the exchange before: about as long is expected again.
        return attempt.enough and now - attempt.begin >= self._took + grace

    def _ready(self, exchange: Exchange, attempt: Attempt, owes: list[int], waiting: set[int], now: float) -> list[int]:
        """The connected clients to ask now: not yet asked, or in vain, or so long ago that a message may be lost."""
        online, ready = self.online(), []
        for client in owes:
            if client not in online or attempt.tries[client] >= TRIES:
                continue
            if client in waiting:
                if now - attempt.asked_at.get(client, -math.inf) <= self.options.deadline / AGAIN:
                    continue
                attempt.tries[client] += 1
                self.progress.note(f"{exchange}: {self.named(client)} is silent; it is asked again, in case of a loss")
            attempt.asked_at[client] = now
            ready.append(client)
        return ready

    def _ask(self, exchange: Exchange, attempt: Attempt, clients: Sequence[int], waiting: set[int], now: float) -> None:
        """Send clients their tasks; one that the carrier does not take was in vain."""
        seconds, end = attempt.end - now, attempt.end + 2 * LATE
        history = None if self.history is None else cache(self.history)  # the same for all that have followed as far
        tasks, beside = [], len(self.recipe) + MAX_CERTIFICATE + LINK * (exchange.round + 1)  # bytes, at most
        for client in clients:
            if (size := len(exchange.sent[client]) + beside) > (largest := self.carrier.largest):
                raise FedKSeedError(f"{self.carrier.name} takes messages of {largest:,} bytes, not of up to {size:,}")
            with_recipe = not self._clients[client].has_recipe
            tasks.append(OpenTask(client, self._online[client], exchange.number, exchange.round, with_recipe, end))
        parcels = (
            Parcel(
                task.node, self._task(exchange, task.client, seconds, history).encode(), exchange.round,
                seconds + (0 if task.client in waiting else LATE),
            )
            for task in tasks
        )  # fmt: skip
        keys = self._tried("send tasks", lambda: self.carrier.send(parcels), None)
        if keys is not None:
            pairs = [*zip(keys, tasks, strict=True)]
            self._tasks |= {key: task for key, task in pairs if key}
            self.progress.clients([task.client for key, task in pairs if key], "training")
            attempt.tries.update(task.client for key, task in pairs if not key)

    def _task(self, exchange: Exchange, client: int, seconds: float, history: LinksSince | None) -> Task:
        remembered = self._clients[client]
        recipe = b"" if remembered.has_recipe else self.recipe
        task = Task(client, seconds, recipe_digest(self.recipe), recipe, exchange.sent[client], keep=exchange.keep)
        if history is not None:
            since = remembered.followed + 1 if remembered.has_recipe else 0
            links, remembered.head, stem = history(since, exchange.round)
            task = replace(task, since=since, links=b"".join(links), head=remembered.head, stem=stem)
        remembered.dialled = self.carrier.dialled(self._online[client])
        return task if self.signing is None else self.signing.signed(task, remembered.dialled)

    def _replies(self, exchange: Exchange) -> Iterator[tuple[int, Reply]]:
        """Replies to tasks of an exchange, with their clients; others are reported and left out."""
        if not self._tasks:
            return
        for arrival in self._tried("fetch answers", lambda: self.carrier.arrived(list(self._tasks)), []):
            task = self._tasks.pop(arrival.key, None)
            if task is None:
                self.progress.note("a reply came twice, or to no task; it is left out")
                continue
            reply, remembered = self._read(arrival, task), self._clients[task.client]
            if reply.status is Status.DONE:
                remembered.has_recipe, remembered.followed = True, max(task.round, remembered.followed)
            elif reply.status is Status.UNPREPARED:
                remembered.has_recipe = False
                if task.with_recipe:
                    reply = Reply(Status.FAILED, text="it says that it has no recipe, and was sent one")
            if task.exchange == exchange.number:
                yield task.client, reply
            elif arrival.trouble is None:
                self.progress.note(f"the answer of {self.named(task.client)} to round {task.round + 1} is too late")
        now = time.monotonic()  # only now: a late reply that was not fetched would stay with the carrier
        self._tasks = {key: task for key, task in self._tasks.items() if task.end > now}

    def _read(self, arrival: Arrival, task: OpenTask) -> Reply:
        if arrival.gone:  # the list of connected clients may be older, and the client would be asked again at once
            self._online.pop(task.client, None)
        if arrival.trouble is not None:
            self._clients[task.client].has_recipe = False  # it may have been started again, and loads the model then
            return Reply(Status.FAILED, text=arrival.trouble)
        try:
            if arrival.node != task.node:
                raise FedKSeedError(f"it is by node {arrival.node}, not {task.node}")
            if arrival.broken is not None:
                raise FedKSeedError(arrival.broken)
            return Reply.decode(arrival.data)
        except FedKSeedError as error:
            self._note_unusable(task.client, task.round)
            return Reply(Status.FAILED, text=f"its reply is broken: {error}")

    def _proven(self, exchange: Exchange, client: int, reply: Reply) -> Reply:
        """The reply of a client; in place of an answer whose signature is not its own, the reason."""
        if self.signing is not None and reply.status is Status.DONE:
            broadcast = (exchange.sent if kind_of(reply.message) is Lack else exchange.signed)[client]
            try:
                of = self._clients[client]
                self.signing.require(client, of.head, broadcast, reply.message, reply.signature, of.dialled)
            except FedKSeedError as error:
                self._note_unusable(client, exchange.round)
                return Reply(Status.FAILED, text=str(error))
        return reply

    def _accepts(self, exchange: Exchange, client: int, reply: Reply, take: Take) -> bool:
        """Take an answer that can be used, or note why it is left out; returns whether it was taken."""
        try:
            take(client, reply.message)
        except FedKSeedError as error:
            exchange.refused[client] = str(error)
            self.progress.clients([client], "refused")
            self.progress.note(f"{exchange}: the answer of {self.named(client)} is left out: {printable(str(error))}")
            self._note_unusable(client, exchange.round)
            return False
        exchange.answered.add(client)
        if kind_of(reply.message) is Lack:
            exchange.lacking.add(client)
        self.signatures[client] = reply.signature
        self.progress.clients([client], "answered")
        self.progress.advance()
        return True

    def _note_no_answer(self, exchange: Exchange, attempt: Attempt, client: int, reply: Reply) -> None:
        """Note a reply that is no answer; a client without the recipe is asked again without a word."""
        if reply.status is Status.REFUSED:
            exchange.refused[client] = reply.text
            self.progress.clients([client], "refused")
            self.progress.note(f"{exchange}: {self.named(client)} refuses: {reply.text}")
        elif reply.status is Status.FAILED:
            online = client in self._online
            attempt.tries[client] += online  # a client that is offline is asked when it is back
            self.progress.clients([client], "waiting" if online else "offline")
            self.progress.note(f"{exchange}: {self.named(client)} did not answer: {reply.text}")

    def _note_missing(self, exchange: Exchange) -> None:
        """Note who has not answered. A connected client that lets rounds in a row pass costs the others a grace."""
        if missing := sorted(exchange.sent.keys() - exchange.answered):
            self.progress.note(f"{exchange} goes on without {self.named(*missing)}")
        silent = [client for client in missing if client not in exchange.refused]
        late = [client for client in silent if client in self._online]
        self.progress.clients(late, "late")
        self.progress.clients([client for client in silent if client not in self._online], "offline")
        for client in exchange.answered:
            self._clients[client].silent = 0
        for client in late:
            self._clients[client].silent = times = self._clients[client].silent + 1
            passed = f"let {times} rounds in a row pass without an answer in time"
            self._note_offence(client, exchange.round, times, passed)

    def _note_unusable(self, client: int, round_: int) -> None:
        self._clients[client].unusable = times = self._clients[client].unusable + 1
        self._note_offence(client, round_, times, f"sent {times} answers that can't be used")

    def _note_offence(self, client: int, round_: int, times: int, what: str) -> None:
        """After a few offences of a client's, let it rest: it is not asked for some rounds."""
        if times % OFFENCES == 0:
            self._clients[client].rests_until = round_ + 1 + REST
            self.progress.note(f"{self.named(client)} has {what}; it rests for {REST} rounds, if others are enough")

    def _tried(self, what: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer to a call of the carrier's; in place of an error, which is reported, `otherwise`.

        The first of several errors in a row is reported, and `_attempt` raises those that last.
        """
        try:
            self.interrupt()
            answer = call()
        except RoundStoppedError:
            raise
        except Exception as error:
            if what not in self._trouble:
                why = f"{type(error).__name__}: {printable(str(error))[:200]}"
                self.progress.note(f"{self.carrier.name} can't {what} ({why}); trying again")
            self._trouble[what] = error
            time.sleep(PAUSE)
            return otherwise
        self._trouble.pop(what, None)
        return answer

    def _too_few(self, exchange: Exchange) -> FedKSeedError:
        why = "; ".join(f"{self.named(k)}: {printable(text)}" for k, text in sorted(exchange.refused.items())[:3])
        return FedKSeedError(
            f"{exchange}: {len(exchange.answered)} clients answered, {exchange.minimum} are needed"
            + (f" ({why})" if why else "")
            + "; mend the clients, or set [network] minimum, and start the server again: it goes on with this round"
        )

    def named(self, *clients: int) -> str:
        """Clients by their numbers, each with the name of its key where that is known."""
        names = self.signing.names if self.signing is not None else {}
        shown = ", ".join(f"{client} ({names[client]})" if client in names else f"{client}" for client in clients[:20])
        more = f" and {len(clients) - 20} more" if len(clients) > 20 else ""
        return f"client{'s' * (len(clients) != 1)} {shown}{more}"
