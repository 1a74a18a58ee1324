"""A shard: a server of some clients that is a client of another server, to which it hands up the sum of their uploads.

    root  ── task ──>  Attendance, Worker     connected and verified as any client of the root (join.py)
                       Shard.answer           the same broadcast to those of its clients that the round has drawn
                       Watching, Remote ──>   clients, which know it as their server
    root <── Subtotal ─┘            <── uploads

It needs no model, no data and no recipe: each task brings the recipe, which is passed on as it came, with the links of
the run's log. docs/scaling.md says how a tree is brought up.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...errors import FedKSeedError
from ...files import border, exclusive, read_table, write_table
from ...recipe.algorithms import Algorithm, chosen
from ...recipe.reading import parse, tables
from ...recipe.schema import NetworkTable
from ...round import decoded
from ...run import digest_chain as chain
from ...run.cohort import cohort
from ...run.progress import Progress
from ...strategies.kseed import KSeed
from ...strategies.tree import Tree
from ...wire.codec import decode, encode
from ...wire.delta import lack, restore
from ...wire.records import Broadcast, Run
from ..protocol import certs
from ..protocol.carrier import Arrival, Carrier, Parcel
from ..protocol.client.answering import AbandonedError, LaterError, Worker
from ..protocol.client.relay import GiveUp
from ..protocol.envelope import LINK, Code, RefusedError, Reply, Status, Task, refusing
from ..protocol.history import RunHistory
from ..protocol.networked_recipe import ENVELOPE, MOST_OF_A_SHARD, require_networked
from ..protocol.server.client_numbers import ClientNumbers
from ..protocol.server.clients import RemoteClients
from ..protocol.signatures import ClientSigning, ServerSigning, certificate, private_key
from .join import HttpsClient
from .server import FOLDER, KEYS, Address, Registry, RekeyedError, Watching, listening

SHARE = 0.8  # of a task's seconds that the clients of a shard have: its sum must still come in time
LARGEST = ENVELOPE + 8 * MOST_OF_A_SHARD  # bytes of the largest reply
FIRST = "shard.json"  # in the directory of a shard
LOOK = 0.5  # seconds between two looks at who is connected, before the first round

Found = TypeVar("Found")


class LeftError(BaseException):
    """The end of a round for whose sum the root no longer waits; no error of the carrier's, see `RemoteClients`."""


class ShardKeys(Registry):
    """The keys of a shard's clients, whose numbers begin somewhere in the run's. Clients may come and go at any time.

    Args:
        first: number in the run of the client whose key is client-0.pub.

    Raises:
        FedKSeedError: the directory is of a shard whose numbers begin elsewhere.
    """

    def __init__(self, directory: Path, keys: Path, progress: Progress, first: int) -> None:
        super().__init__(directory, keys, progress)
        self.first, path = first, directory / FIRST
        if path.exists() and (known := read_table(path)) != {"first": first}:
            raise FedKSeedError(
                f"{directory} is of a shard that began with {known}, not with --first {first}: give this one a --state "
                "of its own"
            )
        write_table(path, {"first": first})

    def _paths(self) -> list[Path]:
        numbers = []
        for path in self.keys.glob("client-*.pub"):
            if (found := re.fullmatch(r"client-(0|[1-9][0-9]{0,8})\.pub", path.name)) is None:
                raise FedKSeedError(f"{path} is no name of a client's key: client-0.pub is, and those after it")
            numbers.append(int(found[1]))
        if not numbers:
            raise FedKSeedError(f"{self.keys} has no public key of a client; `fedkseed certs add` registers one")
        most = max(
            max(numbers) + 1, ClientNumbers.registered(self.directory) - self.first
        )  # a former one keeps its place
        return [self.keys / f"client-{number}.pub" for number in range(most)]


class Hurried:
    """A carrier that looks, each time that it is asked for clients or answers, whether anybody waits for them.

    Args:
        look: raises AbandonedError if nobody does.
    """

    def __init__(self, inner: Carrier, look: Callable[[], object]) -> None:
        self.inner, self.look = inner, look
        self.name, self.largest = inner.name, inner.largest

    def nodes(self) -> list[int]:
        self._require()
        return self.inner.nodes()

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        return self.inner.send(parcels)

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        self._require()
        return self.inner.arrived(keys)

    def _require(self) -> None:
        try:
            self.look()
        except AbandonedError:
            raise LeftError from None


class Shard:
    """The clients of a shard as one party, which follows a recipe of the root's.

    Args:
        recipe: as the root sends it, and as the clients get it.
        hub: the clients' connections.
        part: the clients' keys, in whose directory their numbers are.
    """

    def __init__(self, recipe: bytes, hub: Carrier, part: ShardKeys, progress: Progress) -> None:
        self.text, self.hub, self.part, self.progress = recipe, hub, part, progress
        with refusing(Code.RECIPE):
            self.recipe = parse(tables(recipe))
            require_networked(self.recipe)
            if self.recipe.network.shards is None:
                raise FedKSeedError("the server above has no [network] shards in its recipe: it takes clients alone")
            self.algorithm: Algorithm = chosen(self.recipe)
        self._strategy: KSeed | None = None
        self._links: list[bytes] = []  # of the run's log, from the first
        self._kept: bytes | None = None  # the last broadcast, to which the next may come as a difference
        self._remote: tuple[tuple[bytes, int], RemoteClients] | None = (
            None  # with the nonce of its run and the clients' keys
        )

    def answer(
        self, task: Task, on_step: Callable[[float], None], bound: Callable[[bytes], None]
    ) -> tuple[bytes, bytes]:
        """The broadcast of a task, whole where it can be restored, and the subtotal of the clients that were drawn.

        Raises:
            FedKSeedError: the task can't be followed, or too few of the clients have answered.
        """
        end = time.monotonic() + SHARE * task.seconds
        self._follow(task)
        if task.keep:
            kept = self._with_clients(task, end, on_step, lambda remote: remote.hand_out(task.done, task.message))
            self.progress.note(f"the run has ended; {len(kept)} clients have kept the tuned model")
            return task.message, b""
        whole = restore(task.message, self._kept)
        if whole is None:
            return task.message, lack(task.message, task.client)
        message = decode(whole, Broadcast)
        bound(chain.digest(whole))
        if task.done != message.round:
            raise FedKSeedError(
                f"the message is of round {message.round}, the history of its task has {task.done} rounds"
            )
        self._kept, strategy, count = whole, self._made(message.run), sum(self.recipe.network.shards or ())
        drawn = cohort(self.recipe.seed, message.round, count, self.recipe.clients.cohort_of(count),
                       self.recipe.clients.draw)  # fmt: skip

        def require(client: int, reply: bytes) -> None:
            uploads = decoded({client: reply}, strategy.replies, {client: message})
            strategy.subtotal(message, task.client, uploads, len(drawn))

        own = self.recipe.network.members(task.client)

        def gather(remote: RemoteClients) -> dict[int, bytes]:
            mine = [client for client in drawn if client in own and client in remote.numbers.expected]
            if not mine:
                return {}
            return dict(remote.transport(message.round, dict.fromkeys(mine, whole), (len(mine) + 1) // 2, require))

        replies = self._with_clients(task, end, on_step, gather)
        uploads = decoded(replies, strategy.replies, dict.fromkeys(replies, message))
        self.progress.note(f"round {message.round + 1}: the sum of {len(replies)} clients")
        return whole, encode(strategy.subtotal(message, task.client, uploads, len(drawn)))

    def afterwards(self) -> None:
        """Nothing is left to do."""

    def _follow(self, task: Task) -> None:
        """Keep the links of a task, whose history was checked, for the clients."""
        own, known = self.recipe.network.members(task.client), len(self.part.lines)
        if self.part.first != own.start:
            raise RefusedError(
                Code.RECIPE,
                f"by [network] shards the clients of shard {task.client} are {own.start} to {own.stop - 1}, and this "
                f"one began with --first {self.part.first}",
            )
        if known > own.stop:
            self.progress.note(f"{known - own.stop} clients are more than [network] shards gives this shard; left out")
        if task.since > len(self._links):
            raise FedKSeedError(f"a task has links from {task.since} on, and this shard has {len(self._links)}")
        links = [task.links[at : at + LINK] for at in range(0, len(task.links), LINK)]
        self._links[task.since :] = links

    def _made(self, run: Run) -> KSeed:
        """The strategy of the recipe, for the base model of a broadcast."""
        if self._strategy is None or self._strategy.run != run:
            made = self.algorithm.make(self.recipe, Run(self.algorithm.pool(self.recipe), run.base))
            self._strategy = Tree.make(made, range, range).inner  # which refuses what has no subtotal
        self._strategy.run.require(run)
        return self._strategy

    def _with_clients(
        self, task: Task, end: float, on_step: Callable[[float], None], ask: Callable[[RemoteClients], Found]
    ) -> Found:
        """The clients' answers to a task; they are asked again if their keys change meanwhile.

        Args:
            end: time after which answers are of no use.

        Raises:
            LaterError: too few have answered: they may another time.
        """
        while True:
            try:
                return ask(self._clients(task, end, on_step))
            except RekeyedError:
                self.progress.note("clients have other keys; they are asked again")
            except LeftError:
                raise AbandonedError from None
            except FedKSeedError as error:
                raise LaterError(str(error)) from error

    def _clients(self, task: Task, end: float, on_step: Callable[[float], None]) -> RemoteClients:
        """The clients behind the hub, for one task; all that are connected are waited for until its end."""
        left = max(1.0, end - time.monotonic())
        network, of = NetworkTable(deadline=left, grace=left, attempts=1), (task.nonce, self.part.times)
        if self._remote is None or self._remote[0] != of:
            folder = self.part.directory
            signing = ServerSigning.read(folder / FOLDER, task.nonce)
            self._remote = (
                of,
                RemoteClients(self.hub, ClientNumbers(folder, None), self.text, 1, network, self.progress, signing),
            )
        remote = self._remote[1]
        remote.carrier, remote.options = Hurried(self.hub, partial(on_step, 0.0)), network
        remote.history = lambda since, done: (self._links[since : done + 1], task.head, task.stem)
        return remote


class ShardDesk:
    """A desk whose tasks the clients of a shard answer, one after the other.

    Args:
        hub: whose keys are looked at between tasks, too.
        log: place of the reasons for which a task was not answered, for people.
    """

    kept = "the clients were sent its model"

    def __init__(self, worker: Worker, hub: Watching | None = None, log: Path | str = "a line above") -> None:
        self.worker, self.hub, self.log = worker, hub, log
        self._one = threading.Lock()  # a task that was given up may still be at its end when the next one comes
        self._closed = threading.Event()

    def open(self) -> None:
        """Look at the clients' keys from now on."""
        if self.hub is not None:
            threading.Thread(target=self._watch, args=(self.hub,), daemon=True).start()

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        left = threading.Event()
        begun(left.set)
        try:
            with self._one:
                return self.worker.reply(task, left.is_set).encode()
        except AbandonedError:
            return Reply(Status.FAILED, text=Code.WORKER).encode()

    def close(self) -> None:
        """End the look at keys; the clients' connections end by themselves."""
        self._closed.set()

    def _watch(self, hub: Watching) -> None:
        while not self._closed.wait(KEYS):
            if self._one.acquire(blocking=False):  # else the round looks
                try:
                    hub.look()
                except RekeyedError:
                    pass  # the next task has them
                finally:
                    self._one.release()


def run(directory: Path, url: str, ca: Path, key: Path, keys: Path, address: Address, first: int, patience: float,
        progress: Progress) -> None:  # fmt: skip
    """Serve a shard's clients until stopped.

    Args:
        url, ca, key: of the root, of its authority, and this shard's key, which is registered there.
        keys: directory made by `fedkseed certs`, with the public keys of this shard's clients.
        first: number in the run of the first of them.
        patience: seconds for all of them to connect, before this shard connects to the root.

    Raises:
        FedKSeedError: a file can't be read, the port is taken, or another process works in the directory.
    """
    if warning := certs.check(keys):
        progress.note(warning)
    with border(f"can't make {directory / FOLDER}"):
        (directory / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(directory / FOLDER / "server.lock", f"another shard works in {directory}; stop it first"):
        part = ShardKeys(directory, keys, progress, first)
        hub = Watching(part)
        hub.renew()
        signing = ClientSigning(private_key(key), certificate(ca), RunHistory(directory))
        # Whoever was away when the tuned model was handed out gets it when the root serves the finished run again.
        worker = Worker(
            lambda recipe: Shard(recipe, hub, part, progress),
            signing,
            partial(_noted, progress),
            lambda task: not task.keep,
        )
        attendance = HttpsClient(directory, url, ca, key, ShardDesk(worker, hub))
        with listening(hub, address, LARGEST, keys):
            progress.note(f"clients from number {first} on connect to port {address.port} of {address.host}")
            _gather(hub, directory, patience, progress)
            attendance.serve(progress.note)


def _noted(progress: Progress, code: Code, text: str) -> str:
    """The code of a refusal, which is all that the root gets to know; the text is for this shard's operator."""
    progress.note(f"no answer ({code}): {text}")
    return str(code)


def _gather(hub: Watching, directory: Path, patience: float, progress: Progress) -> None:
    """Wait until all clients are connected, or for some seconds."""
    end, known = time.monotonic() + patience, -1
    while time.monotonic() < end:
        try:
            online, expected = {*hub.nodes()}, ClientNumbers(directory, None).expected
        except RekeyedError:
            continue
        if expected <= online:
            return
        if len(online) != known:
            progress.note(f"{len(online)} of {len(expected)} clients are connected")
        known = len(online)
        time.sleep(LOOK)
