"""A shard: a server of some clients, and itself a client of another server, to which it hands up their uploads' sum.

    root  ── task ──>  HttpsClient, TaskHandler      connected and verified as any client of the root (join.py)
                       Shard.answer                  who of the round's cohort is a client of this shard?
                       RemoteClients ──────────────> the same broadcast to these, which know it as their server
    root <── Subtotal ─┘                         <── uploads

It needs no model, no data and no recipe: each task brings the recipe, which is passed on as it came, with the links of
the run's log. docs/operations.md says how a tree is brought up.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ...errors import FedKSeedError
from ...recipe.reading import parse, tables
from ...recipe.rules import LARGEST_SHARD_UPLOAD, Where, checked_algorithm, require_legal
from ...recipe.schema import NetworkTable, Recipe
from ...run import digest_chain as chain
from ...run.cohort import cohort
from ...run.progress import Progress
from ...strategies.kseed import KSeed
from ...strategies.tree import ShardAggregator
from ...wire.codec import decode, encode
from ...wire.delta import lack, restore
from ...wire.records import Broadcast, Run, Subtotal
from ..protocol.addresses import host_of
from ..protocol.carrier import Carrier
from ..protocol.client.task_handler import AbandonedError, Bound, LaterError, OnStep, TaskHandler, code_alone
from ..protocol.client.worker_process import GiveUp
from ..protocol.envelope import LINK, Code, RefusedError, Reply, Status, Task, refusing
from ..protocol.networked_recipe import ENVELOPE
from ..protocol.run_history import RunHistory
from ..protocol.server.client_numbers import ClientNumbers
from ..protocol.server.clients import RemoteClients
from ..protocol.signatures import Audiences, ClientSigning, ServerSigning, certificate, private_key
from .connections import Connections
from .join import HttpsClient
from .registered_keys import CHECKED_EVERY, FOLDER, RegisteredKeys, RekeyedError, keys_of_shard
from .server import Address, alone_in, listening

SHARE = 0.8  # of a task's seconds that the clients of a shard have: its sum must still come in time
LARGEST = ENVELOPE + 8 * LARGEST_SHARD_UPLOAD  # bytes of the largest reply

Answers = TypeVar("Answers")


def run(
    directory: Path, keys: Path, address: Address, progress: Progress, *,
    url: str, ca: Path, key: Path, first: int, patience: float,
) -> None:  # fmt: skip
    """Serve a shard's clients until the run is over.

    Args:
        keys: directory made by `fedkseed certs`, with the public keys of this shard's clients.
        url, ca, key: of the root, of its authority, and this shard's private key, whose public one the root has.
        first: number in the run of the first of them.
        patience: seconds for all of them to connect, before this shard connects to the root.

    Raises:
        FedKSeedError: a file can't be read, the port is taken, or another process works in the directory.
    """
    with alone_in(directory, keys, f"another shard works in {directory}; stop it first", progress):
        registered = keys_of_shard(directory, keys, first, progress)
        connections = Connections(Audiences.of(keys), (), has_key=registered.has)
        registered.take_up(connections)
        check_keys = partial(registered.stop_if_changed, connections)
        clients = ShardClients(first, registered, connections, progress, check_keys)
        signing = ClientSigning(private_key(key), certificate(ca), RunHistory(directory), host_of(url))
        # Whoever was away when the tuned model was handed out gets it when the root serves the finished run again.
        disclose = partial(code_alone, note=progress.note)
        worker = TaskHandler(partial(Shard, clients=clients), signing, disclose, lambda task: not task.keep)
        client_of_root = HttpsClient(directory, url, ca, key, ShardTasks(worker, check_keys))
        client_of_root.require_reachable()
        with listening(connections, address, LARGEST, keys, directory):
            progress.note(f"clients from number {first} on connect to port {address.port} of {address.host}")
            clients.wait_for_all(patience)
            client_of_root.serve(progress.note)


@dataclass(slots=True)
class ShardTasks:
    """The tasks of the root, answered one after the other; the clients' keys are looked at in between."""

    worker: TaskHandler
    check_keys: Callable[[], object] = lambda: None  # takes up keys that have changed, and may raise `RekeyedError`
    kept: str = "the clients were sent its model"
    # A task that was given up may still be at its end when the next one comes.
    _answering: threading.Lock = field(default_factory=threading.Lock)
    _closed: threading.Event = field(default_factory=threading.Event)

    def open(self) -> None:
        threading.Thread(target=self._look_at_keys, daemon=True).start()

    def reply(self, task: bytes, begun: Callable[[GiveUp], object]) -> bytes:
        given_up = threading.Event()
        begun(given_up.set)
        try:
            with self._answering:
                return self.worker.reply(task, given_up.is_set).encode()
        except AbandonedError:
            return Reply(Status.FAILED, text=Code.WORKER).encode()

    def reason(self) -> str:
        return "a line above says why"

    def finish(self) -> None: ...

    def close(self) -> None:
        self._closed.set()  # the clients' connections end by themselves

    def _look_at_keys(self) -> None:
        while not self._closed.wait(CHECKED_EVERY):
            if self._answering.acquire(blocking=False):  # else the round looks
                try:
                    self.check_keys()
                except RekeyedError:
                    pass  # the next task has them
                finally:
                    self._answering.release()


@dataclass(frozen=True, slots=True)
class ShardClients:
    """The clients of a shard, whatever the recipe."""

    first: int  # number in the run of the first of them
    keys: RegisteredKeys
    carrier: Carrier
    progress: Progress
    check_keys: Callable[[], object] = lambda: None

    def wait_for_all(self, patience: float) -> None:
        """Wait until all clients are connected, or for some seconds."""
        end = time.monotonic() + patience
        while (remaining := end - time.monotonic()) > 0:
            remote = self.remote(b"", NetworkTable(patience=remaining), interrupt=self.check_keys)
            with suppress(RekeyedError):  # then others are waited for
                remote.wait_for(remote.numbers.expected)
                return

    def remote(self, recipe: bytes, options: NetworkTable, **more: Any) -> RemoteClients:
        """The clients, as a server of a recipe has them."""
        return RemoteClients(
            self.carrier, ClientNumbers(self.keys.directory, None), recipe, 1, options, self.progress, **more
        )


class Shard:
    """The clients of a shard as one party, which follows a recipe, as the root sends it and as the clients get it."""

    def __init__(self, text: bytes, clients: ShardClients) -> None:
        self.text, self.clients = text, clients
        with refusing(Code.RECIPE):
            self.recipe: Recipe = parse(tables(text))
            require_legal(self.recipe, Where.NETWORK)
            if self.recipe.network.shards is None:
                raise FedKSeedError("the server above has no [network] shards in its recipe: it takes clients alone")
            self.algorithm = checked_algorithm(self.recipe)
        self._aggregator: ShardAggregator | None = None
        self._links: list[bytes] = []  # of the run's log, from the first
        self._last_broadcast: bytes | None = None  # the next may come as a difference to it
        # The last one, by the nonce of the run and the number of the keys' registration.
        self._remotes: dict[tuple[bytes, int], RemoteClients] = {}

    def answer(self, task: Task, on_step: OnStep, bound: Bound) -> tuple[bytes, bytes]:
        """The broadcast of a task, whole where it can be restored, and the subtotal of the clients that were drawn.

        Raises:
            FedKSeedError: the task can't be followed, or too few of the clients have answered.
        """
        end, note = time.monotonic() + SHARE * task.seconds, self.clients.progress.note
        self._follow(task)
        still_awaited = partial(on_step, 0.0)
        if task.keep:
            kept = self._asked(task, end, still_awaited, lambda remote: remote.hand_out(task.done, task.message))
            note(f"the run has ended; {len(kept)} clients have kept the tuned model")
            return task.message, b""
        encoded = restore(task.message, self._last_broadcast)
        if encoded is None:
            return task.message, lack(task.message, task.client)
        broadcast = decode(encoded, Broadcast)
        bound(chain.digest(encoded))
        if task.done != broadcast.round:
            raise FedKSeedError(f"the message is of round {broadcast.round}, its task's history has {task.done} rounds")
        self._last_broadcast = encoded
        clients, count = self.recipe.clients, sum(self.recipe.network.shards or ())
        drawn = cohort(self.recipe.seed, broadcast.round, count, clients.cohort_of(count), clients.draw)
        if self._aggregator is None or self._aggregator.server.settings.run != broadcast.run:
            strategy = self.algorithm.make(self.recipe, Run(self.algorithm.pool(self.recipe), broadcast.run.base))
            self._aggregator = ShardAggregator(cast("KSeed", strategy.server))  # by the rules of a recipe with shards
        self._aggregator.server.settings.run.require(broadcast.run)
        subtotal_of = partial(self._subtotal, task.client, drawn, broadcast, encoded)
        subtotal = self._asked(task, end, still_awaited, subtotal_of)
        note(f"round {broadcast.round + 1}: the sum of {subtotal.clients.size} clients")
        return encoded, encode(subtotal)

    def afterwards(self) -> None: ...

    def _follow(self, task: Task) -> None:
        """Keep the links of a task, whose history was checked, for the clients."""
        first, registered = self.clients.first, len(self.clients.keys.lines)
        members = self.recipe.network.members(task.client)
        if first != members.start:
            raise RefusedError(
                Code.RECIPE,
                f"by [network] shards the clients of shard {task.client} are {members.start} to {members.stop - 1}, "
                f"and this one began with --first {first}",
            )
        if registered > members.stop:
            self.clients.progress.note(f"{registered - members.stop} clients beyond [network] shards are left out")
        if task.since > len(self._links):
            raise FedKSeedError(f"a task has links from {task.since} on, and this shard has {len(self._links)}")
        self._links[task.since :] = [task.links[at : at + LINK] for at in range(0, len(task.links), LINK)]

    def _subtotal(
        self, shard: int, drawn: list[int], broadcast: Broadcast, encoded: bytes, remote: RemoteClients
    ) -> Subtotal:
        """The sum of the uploads of those clients of the shard that were drawn, of all shards', and have a key."""
        members, aggregator = self.recipe.network.members(shard), cast(ShardAggregator, self._aggregator)
        accumulator = aggregator.start(broadcast, drawn)

        def add(client: int, reply: bytes) -> None:
            upload: Any = decode(reply, *aggregator.server.replies)
            if upload.client != client:
                raise FedKSeedError(f"a reply of client {client} is signed by client {upload.client}")
            aggregator.add_(accumulator, upload)

        asked = [client for client in drawn if client in members and client in remote.numbers.expected]
        if asked:
            sent, minimum = dict.fromkeys(asked, encoded), (len(asked) + 1) // 2
            for _ in remote.transport(broadcast.round, sent, minimum, add):
                pass  # `add` has it
        return aggregator.finish(accumulator, shard)

    def _asked(
        self, task: Task, end: float, still_awaited: Callable[[], None], ask: Callable[[RemoteClients], Answers]
    ) -> Answers:
        """The clients' answers to a task until `end`; they are asked again if their keys change meanwhile.

        `still_awaited` raises `AbandonedError` if the root does not wait for an answer any more.
        """
        keys = self.clients.keys
        while True:
            try:
                of = task.nonce, keys.registrations
                if of not in self._remotes:  # else they are the same as for the last task
                    signing = ServerSigning.read(keys.directory / FOLDER, task.nonce)
                    self._remotes = {of: self.clients.remote(self.text, NetworkTable(), signing=signing)}
                remote = self._remotes[of]
                remote.history = lambda since, done: (self._links[since : done + 1], task.head, task.stem)
                seconds = max(1.0, end - time.monotonic())  # all that are connected are waited for until the end
                remote.options = NetworkTable(deadline=seconds, grace=seconds, attempts=1)
                remote.interrupt = lambda: (self.clients.check_keys(), still_awaited())
                return ask(remote)
            except RekeyedError:
                self.clients.progress.note("clients have other keys; they are asked again")
            except FedKSeedError as error:  # as where too few have answered: they may another time
                raise LaterError(str(error)) from error
