"""The transport of a round, to clients behind a carrier: Flower, or plain HTTPS.

A round ends when all clients that can answer have answered, a little after the minimum has, or at its deadline. No
message from the network can break a round: answers that are late, duplicate, broken, refused, or from an unknown node
are reported and left out, and a client that sends them again and again is not asked for a while. An error of the
carrier's does not end a round either, unless it lasts until the deadline.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from ....errors import FedKSeedError
from ....files import read_table, write_table
from ....recipe.schema import NetworkTable
from ....run.progress import Progress
from ....wire.codec import kind_of
from ....wire.records import Lack
from ..carrier import AGAIN, LATE, Arrival, Carrier, Parcel
from ..envelope import LINK, Reply, Status, Task, digest_of, shown
from ..gain import GainSum
from ..signatures import ServerSigning

NUMBERS = "clients.json"  # in a run's directory
POLL = 0.2  # seconds between two looks for answers; 3 in Flower's own loop
LOOK = 1.0  # seconds between two looks at the list of connected clients
TRIES = 3  # number of times that a client is asked in vain before a deadline
PAUSE = 1.0  # seconds after an error of the carrier's
GRACE = 10.0  # seconds at least that the others have after the minimum has answered, see `NetworkTable.grace`
OFFENCES, REST = 3, 10  # answers of a client that can't be used, and the rounds in which it is not asked after them

Check: TypeAlias = Callable[[int, bytes], object]  # raises FedKSeedError if a client's message can't be used
Value = TypeVar("Value")


class ClientNumbers:
    """The map from a carrier's nodes to our numbers of clients, kept in a run's directory.

    Where node keys are registered (`register`), they fix the numbers. Else nodes get numbers as they connect.

    Args:
        count: number of clients; default: the number of registered ones.

    Raises:
        FedKSeedError: there is neither a count nor a registered client, or the two numbers differ.
    """

    def __init__(self, directory: Path, count: int | None) -> None:
        self.path = directory / NUMBERS
        self._known, self._fixed, revoked = _read(self.path)
        registered = len(self._known) if self._fixed else None
        if registered is None and count is None:
            raise FedKSeedError("how many clients are there? Set [clients] count, or register their keys")
        if None not in (registered, count) and registered != count:
            raise FedKSeedError(f"[clients] count says {count}, {registered} clients are registered")
        self.count: int = registered or count or 0
        self.expected = {*range(self.count)} - {*revoked}  # the others have no key any more

    @staticmethod
    def register(directory: Path, nodes: Sequence[int], revoked: Sequence[int] = ()) -> None:
        """Fix the numbers of a run's clients: 0 for the first node.

        Args:
            revoked: clients whose keys were revoked; nobody waits for them.
        """
        _write(directory / NUMBERS, {node: number for number, node in enumerate(nodes)}, True, revoked)

    @staticmethod
    def registered(directory: Path) -> int:
        """Number of clients of a run that are registered."""
        return len(ClientNumbers.nodes(directory))

    @staticmethod
    def nodes(directory: Path) -> dict[int, int]:
        """Client -> node, for the registered clients of a run."""
        known, fixed, _ = _read(directory / NUMBERS)
        return {number: node for node, number in known.items()} if fixed else {}

    def of(self, nodes: Sequence[int]) -> dict[int, int]:
        """Client -> node, for those of the given nodes that have a number or get one now."""
        fresh = [node for node in sorted(nodes) if node not in self._known][: self.count - len(self._known)]
        if fresh and not self._fixed:
            self._known |= {node: number for number, node in enumerate(fresh, len(self._known))}
            _write(self.path, self._known, fixed=False)
        return {self._known[node]: node for node in nodes if node in self._known}


def _read(path: Path) -> tuple[dict[int, int], bool, list[int]]:
    """Node -> client, whether the numbers are fixed, and the clients without a key; empty if there is no file."""
    if not path.exists():
        return {}, False, []
    table = read_table(path)
    return {int(node): number for node, number in table["nodes"].items()}, table["fixed"], table["revoked"]


def _write(path: Path, known: Mapping[int, int], fixed: bool, revoked: Sequence[int] = ()) -> None:
    write_table(path, {"fixed": fixed, "nodes": known, "revoked": list(revoked)})


@dataclass(frozen=True, slots=True)
class Asked:
    """A task that was sent and is not answered yet."""

    client: int
    node: int
    exchange: int  # number of the call of `transport` that sent the task
    round: int
    with_recipe: bool


class RemoteClients:
    """The clients behind a carrier.

    Args:
        recipe: the clients' recipe as TOML; sent to each client once, and again to clients that have lost it.
        minimum: number of connected clients with which the run can begin.
        signing: signs tasks and verifies answers; None: both travel unsigned.
    """

    def __init__(
        self, carrier: Carrier, numbers: ClientNumbers, recipe: bytes, minimum: int, options: NetworkTable,
        progress: Progress, signing: ServerSigning | None = None,
    ) -> None:  # fmt: skip
        self.carrier, self.numbers, self.recipe = carrier, numbers, recipe
        self.options, self.progress = options, progress
        self.digest, self.minimum, self.signing = digest_of(recipe), minimum, signing
        # (since, rounds done) -> the links from the state after `since` rounds on, head and stem; None: none is sent
        self.history: Callable[[int, int], tuple[list[bytes], bytes, bytes]] | None = None
        self._lacks: set[int] = set()  # clients that have answered this exchange by a wish for the whole broadcast
        self._seen: dict[int, int] = {}  # client -> rounds done in the last history that it has followed
        self._heads: dict[int, bytes] = {}  # client -> head of the last history that it was sent
        self.signatures: dict[int, bytes] = {}  # client -> signature of its accepted answer; the caller empties it
        self._asked: dict[str, Asked] = {}  # also tasks of earlier rounds, so that late answers can be reported
        self._holding: set[int] = set()  # clients that have answered, and so hold the recipe
        self._strangers: set[int] = set()  # nodes that are no clients and were reported
        self._online: dict[int, int] = {}
        self._looked = -LOOK
        self._exchange = 0
        self._keeping = False  # whether clients are sent the tuned model, which they keep
        self._measuring = False  # whether they may take a deadline for it, since some measure their gain
        self._took = 0.0  # seconds that the minimum of the last round took
        self._offences = Counter[int]()  # by client: answers that could not be used
        self._silent = Counter[int]()  # by client: rounds in a row without an answer in time
        self._resting: dict[int, int] = {}  # client -> the round in which it is asked again
        self._trouble: dict[str, Exception] = {}  # by kind of the carrier's calls: the error, if the last one failed

    def gather(self) -> None:
        """Wait until all clients are connected; after [network] patience, the minimum of a round is enough.

        Raises:
            FedKSeedError: fewer clients than the minimum are connected.
        """
        end, seen = time.monotonic() + self.options.patience, -1
        while not self.numbers.expected.issubset(online := self.online()):
            if len(online) != seen:
                seen = len(online)
                self._say(f"{seen} of {self.numbers.count} clients are connected; waiting for {self._others(online)}")
                self.progress.clients([*self.numbers.expected.difference(online)], "offline")
                self.progress.clients([*online], "waiting")
            if time.monotonic() >= end:
                if len(online) >= self.minimum:
                    self._say(f"going on without {self._others(online)}")
                    return
                raise FedKSeedError(
                    f"after {self.options.patience:g} s {len(online)} clients are connected, a round needs "
                    f"{self.minimum}: start them, or look at their logs, and start the server again"
                )
            time.sleep(POLL)
        count = self.numbers.count
        self._say(f"all {count} clients are connected" if len(online) == count else f"without {self._others(online)}")

    def online(self) -> dict[int, int]:
        """Client -> node for the connected clients, by a list that is at most `LOOK` seconds old."""
        if time.monotonic() - self._looked >= LOOK:
            nodes = self._tried("list the clients", self.carrier.nodes, [*self._online.values()])
            self._online, self._looked = self.numbers.of(nodes), time.monotonic()
            for node in set(nodes) - set(self._online.values()) - self._strangers:
                self._strangers.add(node)
                self._say(f"node {node} is none of the {self.numbers.count} clients; it is left out")
        return self._online

    def transport(
        self, round_: int, sent: Mapping[int, bytes], minimum: int, check: Check,
        whole: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[int, bytes]]:  # fmt: skip
        """Carry the messages of a round and yield (client, its answer) as answers come.

        Args:
            minimum: number of answers needed, or all if fewer are asked. Connected clients are waited for even if 0.
            check: raises `FedKSeedError` if an answer can't be used.
            whole: by client: the message that a difference in `sent` restores, which is what a client signs.

        Raises:
            FedKSeedError: fewer clients than the minimum have answered after all attempts, or a message is too large.
        """
        self._exchange += 1
        minimum = min(minimum, len(sent))
        done, refused = set[int](), dict[int, str]()
        self._lacks.clear()
        if len(awake := {c: m for c, m in sent.items() if self._resting.get(c, 0) <= round_}) >= max(minimum, 1):
            sent = awake  # else all are needed
        if away := [client for client in sent if client not in self.online()]:
            self._say(f"{self._what(round_)}: offline, left out unless back in time: {_list(away)}")
        self.progress.clients(away, "offline")
        self.progress.clients([client for client in sent if client not in away], "waiting")
        self.progress.begin(f"{self._what(round_)}, {len(sent)} clients", len(sent))
        for attempt in range(self.options.attempts):
            if attempt:
                self._say(
                    f"{self._what(round_)}: {len(done)} of at least {minimum} clients answered in "
                    f"{self.options.deadline:g} s; trying again, {attempt + 1} of {self.options.attempts}"
                )
            for client, outcome in self._attempt(round_, sent, whole or sent, minimum, done, refused):
                message = outcome.message
                try:
                    check(client, message)
                except FedKSeedError as error:
                    refused[client] = str(error)
                    self.progress.clients([client], "refused")
                    self._say(f"{self._what(round_)}: the answer of client {client} is left out: {shown(str(error))}")
                    self._offend(client, round_)
                    continue
                done.add(client)
                self._lacks |= {client} if kind_of(message) is Lack else set()
                self.signatures[client] = outcome.signature
                self.progress.clients([client], "answered")
                self.progress.advance()
                yield client, message
            if len(done - self._lacks) >= minimum or done.issuperset(sent):
                if missing := sorted(set(sent) - done):
                    self._say(f"{self._what(round_)} goes on without {_list(missing)}")
                    late = {*missing} - {*refused}
                    self.progress.clients(late & {*self._online}, "late")
                    self.progress.clients(late - {*self._online}, "offline")
                self._note_silence(round_, {*missing} - {*refused}, done)
                return
        raise self._too_few(round_, minimum, done, refused)

    def hand_out(self, done: int, message: bytes, measuring: bool = False) -> dict[int, GainSum | None]:
        """Send the connected clients the tuned model of a finished run, which each keeps in its directory.

        Nobody is needed: whoever does not answer within the grace of a round, or its deadline where clients measure,
        gets it when the finished run is served again.

        Args:
            done: number of finished rounds.
            message: a broadcast of the model, to a newcomer.
            measuring: whether clients were asked for their gain.

        Returns:
            The clients that have kept it, each with its gain, if it has sent one.
        """

        def check(client: int, reply: bytes) -> None:
            if reply and not measuring:
                raise FedKSeedError(f"it was sent the tuned model, and answers with {len(reply)} bytes, not with none")
            if reply:
                GainSum.decode(reply)

        self._keeping, self._measuring = True, measuring
        try:
            sent = dict.fromkeys(sorted(self.online()), message)
            answers = self.transport(done, sent, 0, check) if sent else ()
            return {client: GainSum.decode(reply) if reply else None for client, reply in answers}
        finally:
            self._keeping = self._measuring = False

    def _what(self, round_: int) -> str:
        """The name of the exchange for people."""
        return "the tuned model" if self._keeping else f"round {round_ + 1}"

    def _attempt(
        self, round_: int, sent: Mapping[int, bytes], whole: Mapping[int, bytes], minimum: int, done: set[int],
        refused: dict[int, str],
    ) -> Iterator[tuple[int, Reply]]:  # fmt: skip
        """Ask the clients of a round that have not answered, and again those that fail, until the deadline.

        The attempt ends before the deadline when no connected client owes an answer, and the others are not needed; or
        a little after the minimum has answered.

        Args:
            done: clients that have answered; the caller adds them.
            refused: client -> reason, for clients that refuse; the caller adds those whose answers can't be used.

        Raises:
            FedKSeedError: the minimum can't be reached any more, since clients refuse or were asked in vain too often.
            Exception: an error of the carrier's that lasts until the deadline.
        """
        begin, enough = time.monotonic(), minimum == 0
        end = begin + self.options.deadline
        tries, asked_at = Counter[int](), dict[int, float]()
        while (now := time.monotonic()) < end:
            if not enough and len(done - self._lacks) >= minimum:  # a wish for the whole broadcast is no answer
                enough, self._took = True, now - begin
            # Where nobody is needed, clients do again what the others have done in the call before.
            grace = self.options.deadline if self._measuring else self.options.grace or max(GRACE, self._took / 2)
            if enough and now - begin >= self._took + grace:
                return
            online = self.online()
            owing = [client for client in sent if client not in done and client not in refused]
            asked_now = {asked.client for asked in self._asked.values() if asked.exchange == self._exchange}
            waiting, ready = asked_now.intersection(owing), []
            for client in owing:
                if client not in online or tries[client] >= TRIES:
                    continue
                if client in waiting:
                    if now - asked_at.get(client, -math.inf) <= self.options.deadline / AGAIN:
                        continue
                    tries[client] += 1
                    self._say(
                        f"{self._what(round_)}: client {client} is silent; it is asked again, a message may be lost"
                    )
                asked_at[client] = now
                ready.append(client)
            tries.update(self._ask({client: online[client] for client in ready}, sent, round_, end - now))
            if not (waiting or ready):
                if len(done - self._lacks) >= minimum or done.issuperset(sent):
                    return
                if all(tries[client] >= TRIES for client in owing):
                    raise self._too_few(round_, minimum, done, refused)
            for client, outcome in self._replies(round_):
                if client in done or client in refused:  # asked twice, although no message was lost
                    continue
                if outcome.status is Status.DONE:
                    outcome = self._proven(client, round_, outcome, sent[client], whole[client])
                if outcome.status is Status.DONE:
                    yield client, outcome
                elif outcome.status is Status.REFUSED:
                    refused[client] = outcome.text
                    self.progress.clients([client], "refused")
                    self._say(f"{self._what(round_)}: client {client} refuses: {outcome.text}")
                elif outcome.status is Status.FAILED:
                    tries[client] += client in self._online  # a client that is offline is asked when it is back
                    self.progress.clients([client], "waiting" if client in self._online else "offline")
                    self._say(f"{self._what(round_)}: client {client} did not answer: {outcome.text}")
            if done.issuperset(sent):
                return
            time.sleep(POLL)
        if self._trouble and len(done - self._lacks) < minimum:
            raise next(iter(self._trouble.values()))  # a new process may help

    def _ask(self, tasks: Mapping[int, int], sent: Mapping[int, bytes], round_: int, seconds: float) -> list[int]:
        """Send clients their tasks; returns the clients whose tasks the carrier did not take.

        Args:
            tasks: client -> node.
        """
        if not tasks or seconds <= 0:
            return []
        asked, parcels = [], []
        known: dict[int, tuple[list[bytes], bytes, bytes]] = {}  # the same for all that have seen as many rounds
        before = {one.client for one in self._asked.values() if one.exchange == self._exchange}
        for client, node in tasks.items():
            new = client not in self._holding
            task = Task(client, seconds, self.digest, self.recipe if new else b"", sent[client], keep=self._keeping)
            if self.history is not None:
                since = 0 if new else self._seen.get(client, -1) + 1
                if since not in known:
                    known[since] = self.history(since, round_)
                links, head, stem = known[since]
                task = replace(task, since=since, links=b"".join(links), head=head, stem=stem)
                self._heads[client] = head
            data = (task if self.signing is None else self.signing.signed(task)).encode()
            if len(data) > (largest := self.carrier.largest):
                raise FedKSeedError(
                    f"{self.carrier.name} takes messages of {largest:,} bytes, this one has {len(data):,}"
                )
            parcels.append(Parcel(node, data, round_, seconds + (0 if client in before else LATE)))
            asked.append(Asked(client, node, self._exchange, round_, new))
        keys = self._tried("send tasks", lambda: self.carrier.send(parcels), None)
        if keys is None:
            return []
        self._asked |= {key: task for key, task in zip(keys, asked, strict=True) if key}
        self.progress.clients([task.client for key, task in zip(keys, asked, strict=True) if key], "training")
        return [task.client for key, task in zip(keys, asked, strict=True) if not key]

    def _replies(self, round_: int) -> Iterator[tuple[int, Reply]]:
        """Replies to the present call of `transport`, with their clients; others are reported and left out."""
        if not self._asked:
            return
        for arrival in self._tried("fetch answers", lambda: self.carrier.arrived(list(self._asked)), []):
            asked = self._asked.pop(arrival.key, None)
            if asked is None:
                self._say("a reply came twice, or to no task; it is left out")
                continue
            outcome = self._read(arrival, asked)
            if outcome.status is Status.DONE:
                self._holding.add(asked.client)
                self._seen[asked.client] = max(asked.round, self._seen.get(asked.client, -1))
            elif outcome.status is Status.UNPREPARED:
                self._holding.discard(asked.client)
                if asked.with_recipe:
                    outcome = Reply(Status.FAILED, text="it says that it has no recipe, and was sent one")
            if asked.exchange != self._exchange:
                if arrival.trouble is None:
                    late = f"the answer of client {asked.client} to round {asked.round + 1} is too late; it is left out"
                    self._say(late)
                continue
            yield asked.client, outcome

    def _read(self, arrival: Arrival, asked: Asked) -> Reply:
        if arrival.gone:  # the list of connected clients may be older, and the client would be asked again at once
            self._online.pop(asked.client, None)
        if arrival.trouble is not None:
            return Reply(Status.FAILED, text=arrival.trouble)
        if arrival.node != asked.node:
            self._offend(asked.client, asked.round)
            return Reply(Status.FAILED, text=f"its reply is by node {arrival.node}, not {asked.node}")
        try:
            if arrival.broken is not None:
                raise FedKSeedError(arrival.broken)
            return Reply.decode(arrival.data)
        except FedKSeedError as error:
            self._offend(asked.client, asked.round)
            return Reply(Status.FAILED, text=f"its reply is broken: {error}")

    def _proven(self, client: int, round_: int, outcome: Reply, sent: bytes, whole: bytes) -> Reply:
        """The answer of a client, or the reason why its signature can't be accepted."""
        if self.signing is not None:
            broadcast = sent if kind_of(outcome.message) is Lack else whole
            try:
                head = self._heads.get(client, bytes(LINK))
                self.signing.require(client, head, broadcast, outcome.message, outcome.signature)
            except FedKSeedError as error:
                self._offend(client, round_)
                return Reply(Status.FAILED, text=str(error))
        return outcome

    def _offend(self, client: int, round_: int) -> None:
        """Count an answer that can't be used; after a few of them, the client is not asked for some rounds."""
        self._offences[client] += 1
        if self._offences[client] % OFFENCES == 0:
            self._rest(client, round_, f"has sent {self._offences[client]} answers that can't be used")

    def _rest(self, client: int, round_: int, why: str) -> None:
        """Leave a client alone for some rounds."""
        self._resting[client] = round_ + 1 + REST
        self._say(f"client {client} {why}; it is not asked in the next {REST} rounds, if there are enough others")

    def _note_silence(self, round_: int, missing: set[int], done: set[int]) -> None:
        """Count the rounds in a row that a connected client let pass; each costs the others a grace."""
        for client in done:
            self._silent.pop(client, None)
        for client in missing.intersection(self._online):
            self._silent[client] += 1
            if self._silent[client] % OFFENCES == 0:
                passed = f"has let {self._silent[client]} rounds in a row pass without an answer in time"
                self._rest(client, round_, passed)

    def _tried(self, what: str, call: Callable[[], Value], otherwise: Value) -> Value:
        """The result of a call of the carrier's; in place of an error, which is reported, another value.

        The first of several errors in a row is reported, and `_attempt` raises those that last.
        """
        try:
            result = call()
        except Exception as error:
            if what not in self._trouble:
                why = f"{type(error).__name__}: {shown(str(error))[:200]}"
                self._say(f"{self.carrier.name} can't {what} ({why}); trying again")
            self._trouble[what] = error
            time.sleep(PAUSE)
            return otherwise
        self._trouble.pop(what, None)
        return result

    def _too_few(self, round_: int, minimum: int, done: set[int], refused: Mapping[int, str]) -> FedKSeedError:
        why = "; ".join(f"client {client}: {shown(text)}" for client, text in sorted(refused.items())[:3])
        return FedKSeedError(
            f"{self._what(round_)}: {len(done)} clients answered, {minimum} are needed"
            + (f" ({why})" if why else "")
            + "; mend the clients, or set [network] minimum, and start the server again: it goes on with this round"
        )

    def _others(self, online: Mapping[int, int]) -> str:
        return _list([number for number in range(self.numbers.count) if number not in online])

    def _say(self, text: str) -> None:
        self.progress.note(text)


def _list(clients: Sequence[int]) -> str:
    return (
        ("client " if len(clients) == 1 else "clients ")
        + ", ".join(map(str, clients[:20]))
        + (f" and {len(clients) - 20} more" if len(clients) > 20 else "")
    )
