"""The connections of a server's clients: who is connected, who has which task, which replies have come.

A `Carrier` for the thread of the rounds, and a few methods for the thread of the requests, with one lock in between.
None of it is on disk: a server that is started again asks again, and a client's worker answers the same task at once.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from ...errors import FedKSeedError
from ..limits import Quota, RequestError
from ..protocol.carrier import MAX_MESSAGE, Arrival, Parcel
from ..protocol.signatures import Audiences, client_statement, fingerprint, verify
from .task_files import KEY, Stub

AWAY = 40.0  # seconds after its last request for which a client counts as connected; one that trains asks every 15
SIGNED = 128  # bytes before the name in the proof of a client's key, see `Connections.session`
PROOF = SIGNED + 253  # bytes of a proof at most: a name of DNS has no more characters
FRESH = 60.0  # seconds for which a challenge can be answered
CHECKS, SEPARATOR = 512, ", "  # bytes of the names of failed checks, and what stands between them
AT_ONCE = 1 << 26  # bytes of replies that the rounds take at once: uploads of all weights wait on disk, one by one


FAILED = re.compile(rb"([a-z]{1,20}(, [a-z]{1,20})*)?")


def copied(keys: Path | str, number: int | str) -> str:
    """The remedy for a client's key that is in two hands."""
    return (
        f"somebody has a copy of the key: the server's owner takes it out (`fedkseed certs revoke {keys} {number}`), "
        "the client makes another (`fedkseed certs request --key NEW`), and the server's owner takes it in (`fedkseed "
        f"certs add {keys} NEW.pub`)"
    )


@dataclass(frozen=True, slots=True)
class OfferedTask:
    """A task that was sent to a client and is not answered."""

    client: int
    key: bytes
    stub: bytes
    end: float  # time after which it need not be answered


@dataclass(slots=True)
class ConnectedClient:
    """A client whose key is registered."""

    number: int
    name: bytes  # fingerprint of its key
    key: EllipticCurvePublicKey
    token: str = ""  # of its session; empty: it has none
    dialled: str = ""  # the name by which it has dialled the server in its last session
    reported: bool = False  # whether it has sent in its session what its checks have found
    last_request: float = float("-inf")
    wake: Callable[[], object] | None = None  # lets its request that waits for a task look again
    task: OfferedTask | None = None  # the last one

    def wake_up(self) -> None:
        if self.wake is not None:
            with suppress(RuntimeError):  # the loop of the requests has ended meanwhile
                self.wake()


class Connections:
    """The clients of a federation over HTTPS; a client's node is its number.

    Args:
        audiences: those for which clients may sign.
        keys: public keys of clients 0, 1, …; None for one without.
        has_key: whether a client's key is still the registered one.
    """

    name, largest = "HTTPS", MAX_MESSAGE

    def __init__(
        self, audiences: Audiences, keys: Sequence[EllipticCurvePublicKey | None],
        clock: Callable[[], float] = time.monotonic, has_key: Callable[[int], bool] = lambda client: True,
    ) -> None:  # fmt: skip
        self.audiences = audiences
        # For whoever runs the server: a client, what it does, and whether its key seems to be in two hands.
        self.notices = deque[tuple[int, str, bool]](maxlen=100)
        self._lock, self._clock, self._has_key = threading.Lock(), clock, has_key
        self._closed: tuple[int, str] | None = None  # the status and the text for those who still wait
        self._clients: dict[int, ConnectedClient] = {}
        self._numbers: dict[bytes, int] = {}  # fingerprint of a key -> client
        self._sessions: dict[str, ConnectedClient] = {}  # by token
        self._secret = secrets.token_bytes(32)  # of its challenges
        self._replaced = deque[tuple[str, int]](maxlen=100)  # tokens that another session has ended, and their clients
        self._signed = OrderedDict[bytes, float]()  # challenge -> time of its answer
        self._session_quota = Quota(1 / 60, 10)  # of one key: more say that it is in two hands
        self._tasks: dict[str, OfferedTask] = {}  # by key
        self._files: dict[bytes, tuple[bytes, float]] = {}  # digest -> bytes, and the end of its last task
        self._arrivals: dict[str, tuple[Arrival, bytes | SpooledTemporaryFile[bytes]]] = {}  # with what was sent
        self.take(keys)

    def take(self, keys: Sequence[EllipticCurvePublicKey | None]) -> None:
        """Take the clients' keys as they are now; whose key has changed or is gone is refused from now on.

        The rounds begin again: no task of before is owed, and nobody would ask for its answer.
        """
        with self._lock:
            self._drop_arrivals()
            self._tasks = {}
            registered = {(n, fingerprint(key)): key for n, key in enumerate(keys) if key is not None}
            for number, client in [*self._clients.items()]:
                if (number, client.name) not in registered:
                    self._end_session(self._clients.pop(number))
            for (number, name), key in registered.items():
                self._clients.setdefault(number, ConnectedClient(number, name, key))
            for client in self._clients.values():
                client.task = None
            self._numbers = {name: number for number, name in registered}

    def close(self, run_is_over: bool = False) -> None:
        """End all requests that wait: the server is about to end, and may be started again, but after the run's end."""
        with self._lock:
            if self._closed is None:
                self._closed = (410, "the run is over") if run_is_over else (503, "the server is about to end")
            for client in self._clients.values():
                client.wake_up()
            self._drop_arrivals()

    def _drop_arrivals(self) -> None:
        for _, data in self._arrivals.values():
            if not isinstance(data, bytes):
                data.close()
        self._arrivals = {}

    # For the thread of the rounds.

    def nodes(self) -> list[int]:
        """The clients that wait for a task, or made a request just now."""
        with self._lock:
            begin = self._clock() - AWAY
            return [n for n, client in self._clients.items() if client.wake or client.last_request > begin]

    def dialled(self, node: int) -> str:
        with self._lock:
            return self._clients[node].dialled if node in self._clients else ""

    def send(self, parcels: Iterable[Parcel]) -> list[str | None]:
        """Offer tasks to clients; of several for one client the last counts."""
        with self._lock:
            now, keys = self._clock(), list[str | None]()
            self._files = {digest: entry for digest, entry in self._files.items() if entry[1] > now}
            self._tasks = {key: task for key, task in self._tasks.items() if task.end > now}
        for parcel in parcels:
            stub, files = Stub.of(secrets.token_bytes(KEY), parcel.data)  # no lock: digests of large messages take time
            with self._lock:
                client, end, key = self._clients.get(parcel.node), now + parcel.seconds, stub.key.hex()
                keys.append(None if client is None else key)
                if client is not None:
                    for digest, data in files.items():
                        kept, earlier_end = self._files.get(digest, (data, end))
                        self._files[digest] = kept, max(earlier_end, end)
                    client.task = self._tasks[key] = OfferedTask(client.number, stub.key, stub.encode(), end)
                    client.wake_up()
            del parcel, files  # of a broadcast of all weights one copy is enough
        return keys

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        """Replies that have come, at most `AT_ONCE` bytes of them, or one."""
        with self._lock:
            come, room = list[tuple[Arrival, bytes | SpooledTemporaryFile[bytes]]](), AT_ONCE
            for key in keys:
                if key in self._arrivals and room > 0:
                    come.append(self._arrivals.pop(key))
                    room -= len(come[-1][1]) if isinstance(come[-1][1], bytes) else come[-1][1].tell()
        return [replace(arrival, data=data if isinstance(data, bytes) else whole(data)) for arrival, data in come]

    # For the thread of the requests, in the order in which a client makes them.

    def challenge(self) -> bytes:
        """32 bytes for a client to sign, soon and once; this server knows them again without keeping them."""
        head = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(8)
        return head + self._tag(head)

    def _tag(self, head: bytes) -> bytes:
        return hmac.digest(self._secret, head, hashlib.sha256)[:16]

    def session(self, proof: bytes) -> tuple[int, str]:
        """The number of the client that has signed a challenge, and the token of its new session.

        Args:
            proof: see `proof_of`.

        Raises:
            RequestError: the challenge is not of this server, old or used; the server has another name; the key is not
                registered; the signature is wrong; or the client has begun too many sessions.
        """
        if len(proof) == SIGNED:
            raise RequestError(400, "this client signs as version 2 of the session does; install this server's release")
        challenge, name, signature = proof[:32], proof[32:64], proof[64:SIGNED]
        age = self._clock() - int.from_bytes(challenge[:8], "big") / 1000
        own = len(proof) > SIGNED and hmac.compare_digest(self._tag(challenge[:16]), challenge[16:])
        if not own or not 0 <= age + 0.001 < FRESH:
            raise RequestError(401, "this is no challenge of this server's, or an old one: ask for another")
        dialled = proof[SIGNED:].decode(errors="replace")
        try:
            statement = client_statement(self.audiences.dialled(dialled), challenge, name)
        except FedKSeedError as error:
            raise RequestError(421, str(error)) from error
        with self._lock:
            client = self._clients.get(self._numbers.get(name, -1))
        # Outside of the lock: a signature takes time.
        if client is None or not verify(client.key, statement, signature):
            raise RequestError(403, "the key is not registered, or has not signed the challenge")
        with self._lock:
            now = self._clock()
            self._require_key(client)
            while self._signed and now - next(iter(self._signed.values())) >= FRESH:
                self._signed.popitem(last=False)
            if challenge in self._signed:
                raise RequestError(401, "this challenge was answered before: ask for another")
            self._signed[challenge] = now
            if not self._session_quota.takes(client.number):
                self.notices.append((client.number, "begins session after session", True))
                raise RequestError(429, "too many sessions of this key: wait a minute")
            if client.token:
                self._replaced.append((client.token, client.number))
            if (task := client.task) is not None and self._tasks.pop(task.key.hex(), None) is not None:
                again = Arrival(task.key.hex(), client.number, trouble="it has connected again")
                self._arrivals[again.key], client.task = (again, b""), None
            elif client.token:
                self.notices.append((client.number, "has connected again", client.wake is not None))
            self._end_session(client)  # of a process that was killed, or is another's
            client.reported, client.dialled = False, dialled
            client.token = secrets.token_urlsafe(16)  # it waits for tasks once it asks for one
            self._sessions[client.token] = client
            return client.number, client.token

    def client(self, token: str) -> ConnectedClient:
        """The client whose session a token is of.

        Raises:
            RequestError: there is none (any more).
        """
        with self._lock:
            client = self._sessions.get(token)
            if client is None:
                if (number := dict(self._replaced).get(token)) is not None:  # whoever began it is still there
                    self.notices.append((number, "is in two processes at once", True))
                raise self._ended(token)
            client.last_request = self._clock()
            self._require_key(client)
            return client

    async def next(self, token: str, after: bytes, seconds: float) -> bytes | None:
        """The stub of the client's task, once there is one; None if there was none for some seconds.

        Args:
            after: key of the task that the client has already; empty: none.

        Raises:
            RequestError: the session has ended.
        """
        client, end, news = self.client(token), self._clock() + seconds, asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        try:
            while True:
                with self._lock:
                    if self._closed is not None:
                        raise RequestError(*self._closed)
                    now = self._clock()
                    if client.token != token:
                        raise self._ended(token)
                    client.last_request = now
                    if client.task is not None and client.task.end > now and client.task.key != after:
                        return client.task.stub
                    if now >= end:
                        return None
                    news.clear()
                    client.wake = wake
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), max(0.0, end - now))
        finally:
            with self._lock:
                if client.wake is wake:
                    client.wake = None

    def file(self, digest: bytes) -> bytes:
        """The file of a digest.

        Raises:
            RequestError: there is none (any more).
        """
        with self._lock:
            if digest not in self._files:
                raise RequestError(404, "no task needs a file of this digest")
            return self._files[digest][0]

    def owed(self, token: str, key: bytes) -> OfferedTask:
        """The task to which a client owes a reply.

        Raises:
            RequestError: the session has ended, or the task is another client's, or over.
        """
        client = self.client(token)
        with self._lock:
            task = self._tasks.get(key.hex())
            if task is None or task.client != client.number:
                raise RequestError(410, "no client waits for this answer: the task is over, or another client's")
            return task

    def answer(self, token: str, key: bytes, data: "bytes | SpooledTemporaryFile[bytes]") -> None:
        """Take a client's reply to a task, or its file, which is then this object's; a second one is not taken.

        Raises:
            RequestError: the session has ended, or the task is another client's, or over.
        """
        task, client = self.owed(token, key), self.client(token)
        with self._lock:
            if self._tasks.pop(key.hex(), None) is not task:
                raise RequestError(410, "another request has brought this answer")
            if client.task is task:
                client.task = None
            self._arrivals[key.hex()] = Arrival(key.hex(), client.number), data

    def checked(self, token: str, failed: bytes) -> None:
        """Take what the checks of `fedkseed doctor` have found on a client's machine, once a session.

        Args:
            failed: names of the checks that fail, between them `SEPARATOR`; empty: all pass.

        Raises:
            RequestError: the session has ended or has sent it before, or these are no names.
        """
        if not FAILED.fullmatch(failed):
            raise RequestError(400, "failed checks are words of lower-case letters, and a comma and a space in between")
        client = self.client(token)
        with self._lock:
            if client.reported:
                raise RequestError(409, "this session has sent what its checks have found: begin another")
            client.reported = True
        said = f"failed checks of its machine: {failed.decode()}" if failed else "passed all checks of its machine"
        self.notices.append((client.number, f"has {said}", False))

    def _ended(self, token: str) -> RequestError:
        """The refusal of a session that has ended."""
        if token in dict(self._replaced):
            return RequestError(409, "another session of this key has begun")
        return RequestError(401, "no session has this token: begin another")

    def _require_key(self, client: ConnectedClient) -> None:
        if self._clients.get(client.number) is not client or not self._has_key(client.number):
            raise RequestError(403, "the key is not registered any more")

    def _end_session(self, client: ConnectedClient) -> None:
        """Let the client's token be worth nothing any more; called with the lock held."""
        self._sessions.pop(client.token, None)
        client.token = ""
        client.wake_up()


def whole(body: "SpooledTemporaryFile[bytes]") -> bytes:
    """All that was written to a file, which is closed."""
    with body:
        body.seek(0)
        return body.read()
