"""The server's side of the connections: who is connected, who has which task, which replies have come.

A `Carrier` for the thread of the rounds, and a few methods for that of the requests; one lock is between them. Nothing
of it is on disk: a server that is started again asks again, and a client's worker answers the same task at once.
"""

import asyncio
import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from ...errors import FedKSeedError
from ..protocol.carrier import MAX_MESSAGE, Arrival, Parcel
from ..protocol.server.request_limits import Quota
from ..protocol.signatures import fingerprint, verify
from .task_files import KEY, Stub

HELLO = b"fedkseed, version 2: a client proves its key to a server over HTTPS\n"
AWAY = 40.0  # seconds after its last request for which a client counts as connected; one that trains asks every 15
PROOF = 128  # bytes with which a client proves its key, see `Connections.session`
FRESH = 60.0  # seconds for which a challenge can be answered


class RequestError(FedKSeedError):
    """A request that is not answered, with its status of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class ConnectedClient:
    """A client, as requests know it."""

    key: EllipticCurvePublicKey
    token: str | None = None  # of its session
    seen: float = float("-inf")  # time of its last request
    waiting: asyncio.Event | None = None  # of its request that waits for a task
    task: tuple[bytes, bytes, float] | None = None  # key, stub and time of its end: sent, and not answered


class Connections:
    """The clients of a federation over HTTPS; a client's node is its number.

    Args:
        keys: public keys of clients 0, 1, …; None for one without.
    """

    name, largest = "HTTPS", MAX_MESSAGE

    def __init__(
        self, keys: Sequence[EllipticCurvePublicKey | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self.notices = deque[str](maxlen=100)  # for whoever runs the server
        self._secret, self._answered = secrets.token_bytes(32), OrderedDict[bytes, float]()  # used challenges
        self._seats: dict[int, ConnectedClient] = {}
        self._numbers: dict[bytes, int] = {}  # fingerprint of a key -> client
        self._sessions: dict[str, int] = {}  # token -> client
        self._files: dict[bytes, tuple[bytes, float]] = {}  # digest -> bytes, time of its end
        self._owners: dict[str, tuple[int, float]] = {}  # key of a task -> client, time of its end
        self._arrivals: dict[str, Arrival] = {}
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None  # of the requests
        self._quota = Quota(1 / 60, 10)  # new sessions of one key: more say that it is in two hands
        self.take(keys)

    def take(self, keys: Sequence[EllipticCurvePublicKey | None]) -> None:
        """Take the clients' keys as they are now; whose key has changed or is gone is refused from now on."""
        with self._lock:
            now = {number: key for number, key in enumerate(keys) if key is not None}
            known = {number: fingerprint(seat.key) for number, seat in self._seats.items()}
            self._numbers = {fingerprint(key): number for number, key in now.items()}
            for number in known:
                if self._numbers.get(known[number]) != number:
                    seat = self._seats.pop(number)
                    self._sessions.pop(seat.token or "", None)
                    self._wake(seat)
            for number, key in now.items():
                self._seats.setdefault(number, ConnectedClient(key))

    def close(self) -> None:
        """End all requests that wait: the server is about to end."""
        with self._lock:
            self._closed = True
            for seat in self._seats.values():
                self._wake(seat)

    # For the thread of the rounds.

    def nodes(self) -> list[int]:
        """The clients that wait for a task, or made a request just now."""
        with self._lock:
            now = self._clock()
            return [n for n, seat in self._seats.items() if seat.waiting is not None or now - seat.seen < AWAY]

    def send(self, parcels: Sequence[Parcel]) -> list[str | None]:
        """Offer tasks to clients; of several for one client the last counts."""
        files: dict[int, tuple[Stub, Mapping[bytes, bytes]]] = {}
        keys: list[str | None] = []
        for place, parcel in enumerate(parcels):  # outside of the lock: digests of large messages take time
            files[place] = Stub.of(secrets.token_bytes(KEY), parcel.data)
        with self._lock:
            now = self._clock()
            self._files = {name: known for name, known in self._files.items() if known[1] > now}
            self._owners = {key: known for key, known in self._owners.items() if known[1] > now}
            for place, parcel in enumerate(parcels):
                stub, parts = files[place]
                seat, end = self._seats.get(parcel.node), now + parcel.seconds
                if seat is None:
                    keys.append(None)
                    continue
                for name, data in parts.items():
                    last = self._files.get(name, (data, end))
                    self._files[name] = (last[0], max(last[1], end))
                seat.task = stub.key, stub.encode(), end
                self._owners[stub.key.hex()] = parcel.node, end
                keys.append(stub.key.hex())
                self._wake(seat)
        return keys

    def arrived(self, keys: Collection[str]) -> list[Arrival]:
        with self._lock:
            return [self._arrivals.pop(key) for key in keys if key in self._arrivals]

    # For the thread of the requests.

    def challenge(self) -> bytes:
        """Bytes for a client to sign, which this server knows again without keeping them."""
        head = int(self._clock() * 1000).to_bytes(8, "big") + secrets.token_bytes(8)
        return head + hmac.digest(self._secret, head, hashlib.sha256)[:16]

    def session(self, proof: bytes) -> tuple[int, str]:
        """The number of the client that has signed a challenge, and the token of its new session.

        Args:
            proof: the challenge (32 bytes), the fingerprint of the client's key (32), its signature of `HELLO` and both
                (64).

        Raises:
            RequestError: the challenge is not of this server, old or used; the key is not registered; the signature
                is wrong; or the client has begun too many sessions.
        """
        challenge, name, signature = proof[:32], proof[32:64], proof[64:]
        head = challenge[:16]
        age = self._clock() - int.from_bytes(head[:8], "big") / 1000
        known = hmac.compare_digest(hmac.digest(self._secret, head, hashlib.sha256)[:16], challenge[16:])
        if len(proof) != PROOF or not known or not 0 <= age + 0.001 < FRESH:
            raise RequestError(401, "this is no challenge of this server's, or an old one: ask for another")
        with self._lock:
            number = self._numbers.get(name)
            seat = None if number is None else self._seats[number]
        if number is None or seat is None or not verify(seat.key, HELLO + challenge + name, signature):
            raise RequestError(403, "the key is not registered, or has not signed the challenge")
        with self._lock:
            now = self._clock()
            while self._answered and now - next(iter(self._answered.values())) >= FRESH:
                self._answered.popitem(last=False)
            if challenge in self._answered:
                raise RequestError(401, "this challenge was answered before: ask for another")
            self._answered[challenge] = now
            if not self._quota.takes(number):
                self.notices.append(f"client {number} begins session after session: somebody else may have its key")
                raise RequestError(429, "too many sessions of this key: wait a minute")
            self._sessions.pop(seat.token or "", None)  # of a process that was killed, or is another's
            self._wake(seat)
            seat.token, seat.seen = secrets.token_urlsafe(16), now
            self._sessions[seat.token] = number
            return number, seat.token

    def client(self, token: str) -> int:
        """The client whose session a token is of.

        Raises:
            RequestError: there is none (any more).
        """
        with self._lock:
            number = self._sessions.get(token)
            if number is None:
                raise RequestError(401, "no session has this token: begin another")
            self._seats[number].seen = self._clock()
            return number

    async def next(self, token: str, after: bytes, seconds: float) -> bytes | None:
        """The stub of the client's task, once there is one; None if there was none for some seconds.

        Args:
            after: key of the task that the client has already; empty: none.

        Raises:
            RequestError: the session has ended.
        """
        number, self._loop = self.client(token), asyncio.get_running_loop()
        end, mine = self._clock() + seconds, asyncio.Event()
        try:
            while True:
                with self._lock:
                    if self._closed:
                        raise RequestError(503, "the server is about to end")
                    seat = self._seats.get(number)
                    if seat is None or seat.token != token:
                        raise RequestError(401, "the session has ended: begin another")
                    now = self._clock()
                    seat.seen = now
                    if seat.task is not None and seat.task[2] <= now:
                        seat.task = None
                    if seat.task is not None and seat.task[0] != after:
                        return seat.task[1]
                    if now >= end:
                        return None
                    mine.clear()
                    seat.waiting = mine
                try:
                    await asyncio.wait_for(mine.wait(), max(0.0, end - now))
                except TimeoutError:
                    continue
        finally:
            with self._lock:
                seat = self._seats.get(number)
                if seat is not None and seat.waiting is mine:
                    seat.waiting = None

    def answer(self, token: str, key: bytes, data: bytes) -> None:
        """Take a client's reply to a task; a second one is not taken.

        Raises:
            RequestError: the session has ended, or the task is another client's, or over.
        """
        number = self.client(token)
        with self._lock:
            if self._owners.get(key.hex(), (None, 0.0))[0] != number:
                raise RequestError(410, "no client waits for this answer: the task is over, or another client's")
            del self._owners[key.hex()]
            seat = self._seats[number]
            if seat.task is not None and seat.task[0] == key:
                seat.task = None
            self._arrivals[key.hex()] = Arrival(key.hex(), number, data)

    def file(self, name: bytes) -> bytes:
        """The file of a digest.

        Raises:
            RequestError: there is none (any more).
        """
        with self._lock:
            found = self._files.get(name)
        if found is None:
            raise RequestError(404, "no task needs a file of this digest")
        return found[0]

    def _wake(self, seat: ConnectedClient) -> None:
        """Let the client's request look again; called with the lock held."""
        waiting, loop = seat.waiting, self._loop
        if waiting is not None and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(waiting.set)
