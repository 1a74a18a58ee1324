"""Gossip: new uploads are pushed to a few peers at once, and copies are compared with one peer after the other.

A comparison mends whatever pushing has missed: it ends with two equal copies, whoever was away, and however long. It
costs two digests where copies are equal. Comparisons are frequent while there is news, and rare while there is none.
"""

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx

from ...errors import FedKSeedError
from ...randomness import Purpose, generator
from ..https.endpoints import http_client
from ..protocol.envelope import printable as printable
from ..protocol.signatures import fingerprint
from . import tls
from .app import BATCH, path_of
from .merge_rule import KEPT
from .roster import PeerAddresses
from .signed_upload import DIGEST, framed, unframed
from .store import UploadStore

FANOUT = 3  # peers that an own upload is pushed to
TIMEOUT = 10.0  # seconds between two signs of life of a peer
LONGEST = 30.0  # seconds of an answer
SAID = 3  # lines about a peer that fails, until it is back
MOST = 1 << 20  # bytes of an answer without entries: 1,000 rounds of digests have 32 KB


@dataclass(frozen=True, slots=True)
class ComparisonPace:
    """Seconds between two comparisons: `quick` after news, then twice as long each time up to `slow`."""

    quick: float
    slow: float

    @classmethod
    def of(cls, seconds: float) -> "ComparisonPace":
        """The pace of rounds of some seconds: an upload has to be everywhere well before the next round opens."""
        return cls(min(2.0, seconds / 50), min(60.0, seconds / 8))


@dataclass(slots=True)
class Standing:
    """The standing of another peer: failures in a row, and the time until which it is left alone after them."""

    failures: int = 0
    again: float = 0.0
    notes: set[str] = field(default_factory=set)  # what was said of it, each once


class Gossip:
    """A peer as a client of the others.

    Args:
        number: its own.
        open_: returns the round that is open.
        seed: of the choice of peers.
        largest: bytes of the largest entry.
        say: is given lines for the peer's owner.
    """

    def __init__(
        self, copy: UploadStore, number: int, addresses: PeerAddresses, context: ssl.SSLContext,
        open_: Callable[[], int], seed: int, largest: int, pace: ComparisonPace, say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.copy, self.number, self.addresses, self.open = copy, number, addresses, open_
        self.seed, self.largest, self.pace, self.say = seed, largest, pace, say
        self.keys = [fingerprint(key) for key in copy.rule.keys]
        self.path = path_of(copy.rule.run)
        self._pushes, self._news, self._end, self._draws = deque[bytes](), threading.Event(), threading.Event(), 0
        self._standing = {k: Standing() for k in range(len(self.keys))}
        self._http = http_client(context, TIMEOUT)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to gossip, on a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(LONGEST)
        self._http.close()

    def push(self, name: bytes) -> None:
        """Push an entry to a few peers, soon."""
        self._pushes.append(name)
        self._news.set()

    def heard(self) -> None:
        """Compare soon: another peer has given something new."""
        self._news.set()

    def meet_all(self) -> int:
        """Compare with each peer once; returns the number of those that answered."""
        return sum(self._with(number, self._compare) for number in self._others())

    def _run(self) -> None:
        pause = self.pace.quick
        while not self._end.is_set():
            news = self._news.wait(pause)
            self._news.clear()
            while self._pushes and not self._end.is_set():
                name = self._pushes.popleft()
                for number in self._drawn(FANOUT):
                    self._with(number, partial(self._give, names=[name]))
            if news:
                self._end.wait(self.pace.quick)  # what comes together is compared together
            before = self.copy.changed
            for number in self._drawn(1):
                self._with(number, self._compare)
            pause = self.pace.quick if news or self.copy.changed != before else min(2 * pause, self.pace.slow)

    def _others(self) -> list[int]:
        """The peers that can be dialled and have not just failed."""
        now = time.monotonic()
        return [k for k in self.addresses.now() if k != self.number and self._standing[k].again <= now]

    def _drawn(self, count: int) -> list[int]:
        others, self._draws = self._others(), self._draws + 1
        rng = generator(self.seed, Purpose.GOSSIP, self.number, self._draws)
        return [others[k] for k in rng.permutation(len(others))[:count]]

    def _with(self, number: int, act: Callable[[int], object]) -> bool:
        """Do something with a peer; one that fails is left alone for a while."""
        standing = self._standing[number]
        try:
            act(number)
        except Exception as error:  # of whatever the other side sends: the thread must not end
            standing.failures += 1
            wait = self.pace.quick * 2 ** min(standing.failures, 6)
            standing.again = time.monotonic() + min(wait, self.pace.slow)
            away = isinstance(error, httpx.TransportError)
            text = "is away" if away else f"refuses or errs: {printable(str(error))[:300]}"
            if text not in standing.notes and len(standing.notes) < SAID and not self._end.is_set():
                standing.notes.add(text)
                self.say(f"peer {number} {text}")
            return False
        if standing.failures and standing.notes:
            self.say(f"peer {number} is back")
        self._standing[number] = Standing()
        return True

    def _compare(self, number: int) -> None:
        """Make two copies one: digests of rounds, names where they differ, and the entries that one side lacks."""
        theirs = self._ask(number, "GET", f"/set?digest={self.copy.digest().hex()}", MOST)
        if theirs is None:
            return
        if len(theirs) % DIGEST:
            raise FedKSeedError(f"digests of rounds have {DIGEST} bytes each, got {len(theirs)}")
        mine = b"".join(self.copy.digests())
        ends = range(0, max(len(mine), len(theirs)), DIGEST)
        rounds = [at // DIGEST for at in ends if mine[at : at + DIGEST] != theirs[at : at + DIGEST]]
        rounds = [round_ for round_ in rounds if round_ < self.copy.rule.rounds]
        for first in range(0, len(rounds), BATCH):
            part = rounds[first : first + BATCH]
            for round_, names in zip(part, self._names(number, part), strict=True):
                own = self.copy.names(round_)
                self._take(number, [name for name in names if name not in own])
                self._give(number, [name for name in own if name not in names])

    def _names(self, number: int, rounds: Sequence[int]) -> Iterator[list[bytes]]:
        """The names of a peer's entries in each of some rounds."""
        most = len(rounds) * (4 + KEPT * len(self.keys) * DIGEST)
        data, at = self._ask(number, "GET", f"/names?rounds={','.join(map(str, rounds))}", most) or b"", 0
        for _ in rounds:
            count = int.from_bytes(data[at : at + 4], "little")
            end = at + 4 + count * DIGEST
            if end > len(data):
                raise FedKSeedError("a peer's list of names is cut short")
            yield [data[k : k + DIGEST] for k in range(at + 4, end, DIGEST)]
            at = end

    def _take(self, number: int, names: Sequence[bytes]) -> None:
        """Get entries from a peer."""
        for first in range(0, len(names), BATCH):
            body = b"".join(names[first : first + BATCH])
            data = self._ask(number, "POST", "/want", BATCH * (self.largest + 4), body)
            _, refused = self.copy.add(unframed(data or b"", BATCH), self.open())
            if refused:
                raise FedKSeedError(refused[0])

    def _give(self, number: int, names: Sequence[bytes]) -> None:
        """Send entries to a peer."""
        for first in range(0, len(names), BATCH):
            body = framed(self.copy.data(names[first : first + BATCH]))
            if body:
                self._ask(number, "POST", "/give", MOST, body)

    def _ask(self, number: int, method: str, path: str, most: int, body: bytes = b"") -> bytes | None:
        """The body of a peer's answer; None for one without.

        Raises:
            FedKSeedError: the peer shows another key, refuses, or sends more bytes than `most` or for too long.
        """
        address, end, data = self.addresses.now().get(number), time.monotonic() + LONGEST, bytearray()
        if address is None:
            raise FedKSeedError("it has no address any more")
        with self._http.stream(method, f"{address}{self.path}{path}", content=body or None) as answer:
            if tls.shown(answer.extensions["network_stream"].get_extra_info("socket")) != self.keys[number]:
                raise FedKSeedError(f"{address} shows the key of somebody else; compare the peers' files")
            for part in answer.iter_bytes():
                data += part
                if len(data) > most or time.monotonic() > end:
                    raise FedKSeedError(f"its answer has more than {most:,} bytes, or took more than {LONGEST:g} s")
            if answer.status_code not in (200, 204):
                raise FedKSeedError(f"{answer.status_code} {bytes(data[:300]).decode(errors='replace')}")
        return None if answer.status_code == 204 else bytes(data)
