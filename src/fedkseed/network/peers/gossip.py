"""Gossip: new uploads are pushed to a few peers at once, and stores are compared with one peer after the other.

A comparison mends whatever pushing has missed: it ends with two equal stores, whoever was away, and however long. It
costs two digests where stores are equal. Comparisons are frequent while there is news, and rare while there is none.
"""

import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import httpx

from ...errors import FedKSeedError
from ...randomness import Purpose, generator
from ..http_client import DONE, BoundedClient
from ..https.unreachable import reason_of
from ..https.way_out import proxy_at
from ..protocol.envelope import printable
from ..protocol.signatures import fingerprint
from . import tls
from .app import BATCH, path_of
from .merge_rule import MAX_PER_ROUND, MergeRule
from .roster import PeerAddresses
from .signed_upload import DIGEST, cut, framed, unframed
from .store import UploadStore

FANOUT = 3  # peers that an own upload is pushed to
TIMEOUT = 10.0  # seconds between two signs of life of a peer
LONGEST = 30.0  # seconds of an answer
MAX_NOTES = 3  # lines about a peer that fails, until it is back
MAX_ANSWER = 1 << 20  # bytes of an answer without entries: 1,000 rounds of digests have 32 KB

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ComparisonPace:
    """Seconds between two comparisons: `quick` after news, then twice as long each time up to `slow`."""

    quick: float
    slow: float

    @classmethod
    def of(cls, seconds: float) -> "ComparisonPace":
        """The pace of rounds of some seconds: an upload has to be everywhere well before the next round opens."""
        return cls(min(2.0, seconds / 50), min(60.0, seconds / 8))


class PeerRequests:
    """The requests to other peers, see app.py; an entry has at most `largest` bytes."""

    def __init__(self, rule: MergeRule, addresses: PeerAddresses, context: ssl.SSLContext, largest: int) -> None:
        self.addresses, self.largest, self.path = addresses, largest, path_of(rule.run)
        self.fingerprints = [fingerprint(key) for key in rule.keys]
        self.http = BoundedClient(context, TIMEOUT)

    def digests(self, number: int, digest: bytes) -> list[bytes] | None:
        """The digest of each round of a peer's set; None if that of its whole set is the given one."""
        data = self._ask(number, "GET", f"/set?digest={digest.hex()}", MAX_ANSWER)
        if data is None:
            return None
        if len(data) % DIGEST:
            raise FedKSeedError(f"digests of rounds have {DIGEST} bytes each, got {len(data)}")
        return cut(data)

    def names(self, number: int, rounds: Sequence[int]) -> Iterator[list[bytes]]:
        """The names of a peer's entries in each of some rounds."""
        most = len(rounds) * (4 + MAX_PER_ROUND * len(self.fingerprints) * DIGEST)
        data, at = self._ask(number, "GET", f"/names?rounds={','.join(map(str, rounds))}", most) or b"", 0
        for _ in rounds:
            count = int.from_bytes(data[at : at + 4], "little")
            end = at + 4 + count * DIGEST
            if end > len(data):
                raise FedKSeedError("a peer's list of names is cut short")
            yield cut(data[at + 4 : end])
            at = end

    def want(self, number: int, names: Sequence[bytes]) -> list[bytes]:
        """A peer's entries of at most `BATCH` names."""
        data = self._ask(number, "POST", "/want", BATCH * (self.largest + 4), b"".join(names))
        return unframed(data or b"", BATCH)

    def give(self, number: int, entries: list[bytes]) -> None:
        """Send at most `BATCH` entries to a peer."""
        if entries:
            self._ask(number, "POST", "/give", MAX_ANSWER, framed(entries))

    def _ask(self, number: int, method: str, path: str, most: int, body: bytes = b"") -> bytes | None:
        """The body of a peer's answer, of at most `most` bytes; None for one without."""
        if (address := self.addresses.current().get(number)) is None:
            raise FedKSeedError("it has no address any more")

        def check(connection: object) -> None:
            if tls.fingerprint_shown(connection) != self.fingerprints[number]:
                raise FedKSeedError(f"{address} shows the key of somebody else; compare the peers' files")

        timed = {"seconds": LONGEST, "check": check}  # this thread asks one peer after the other
        answer = self.http.ask(method, f"{address}{self.path}{path}", most, content=body or None, **timed)
        if answer.status not in DONE:
            raise FedKSeedError(f"{answer.status} {answer.text[:300]}")
        return None if answer.status == 204 else answer.body


def _batches(items: list[Item]) -> list[list[Item]]:
    return [items[first : first + BATCH] for first in range(0, len(items), BATCH)]


@dataclass(slots=True)
class PeerStanding:
    """The standing of another peer."""

    failures: int = 0  # in a row
    again: float = 0.0  # the time until which it is left alone after them
    notes: set[str] = field(default_factory=set)  # what was said of it, each once


@dataclass(slots=True)
class Gossip:
    """A peer's conversation with the others, on a thread of its own."""

    store: UploadStore
    requests: PeerRequests
    number: int  # this peer's
    open_round: Callable[[], int]
    seed: int  # of the choice of peers
    pace: ComparisonPace
    say: Callable[[str], object]  # is given lines for the peer's owner
    standings: dict[int, PeerStanding] = field(default_factory=partial(defaultdict, PeerStanding))
    _pushes: deque[bytes] = field(default_factory=deque)
    _news: threading.Event = field(default_factory=threading.Event)
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _draws: int = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(LONGEST)
        self.requests.http.close()

    def push(self, name: bytes) -> None:
        """Push an entry to a few peers, soon."""
        self._pushes.append(name)
        self._news.set()

    def heard(self) -> None:
        """Compare soon: another peer has given something new."""
        self._news.set()

    def meet_all(self) -> int:
        """Compare with each peer once; returns the number of those that answered."""
        return sum(self._with(number, self.compare) for number in self._others())

    def _run(self) -> None:
        pause = self.pace.quick
        while not self._closed.is_set():
            news = self._news.wait(pause)
            self._news.clear()
            while self._pushes and not self._closed.is_set():
                name = self._pushes.popleft()
                for number in self._drawn(FANOUT):
                    self._with(number, lambda peer, name=name: self.requests.give(peer, self.store.data([name])))
            if news:
                self._closed.wait(self.pace.quick)  # what comes together is compared together
            before = self.store.changed
            for number in self._drawn(1):
                self._with(number, self.compare)
            pause = self.pace.quick if news or self.store.changed != before else min(2 * pause, self.pace.slow)

    def _others(self) -> list[int]:
        """The peers that can be dialled and have not just failed."""
        now, addresses = time.monotonic(), self.requests.addresses.current()
        return [number for number in addresses if number != self.number and self.standings[number].again <= now]

    def _drawn(self, count: int) -> list[int]:
        others, self._draws = self._others(), self._draws + 1
        rng = generator(self.seed, Purpose.GOSSIP, self.number, self._draws)
        return [others[k] for k in rng.permutation(len(others))[:count]]

    def compare(self, number: int) -> None:
        """Make a peer's store and this one equal: digests of rounds, names where they differ, what one side lacks."""
        store, requests = self.store, self.requests
        if (theirs := requests.digests(number, store.digest())) is None:
            return
        pairs = enumerate(zip_longest(theirs, store.digests()))
        for rounds in _batches([k for k, (one, other) in pairs if one != other and k < store.rule.rounds]):
            for round_, names in zip(rounds, requests.names(number, rounds), strict=True):
                here = store.names(round_)
                for lacking in _batches([name for name in names if name not in here]):
                    _, refused = store.add(requests.want(number, lacking), self.open_round())
                    if refused:
                        raise FedKSeedError(refused[0])
                for lacking in _batches([name for name in here if name not in names]):
                    requests.give(number, store.data(lacking))

    def _with(self, number: int, act: Callable[[int], object]) -> bool:
        """Do something with a peer; one that fails is left alone for a while."""
        standing = self.standings[number]
        try:
            act(number)
        except Exception as error:  # of whatever the other side sends: the thread must not end
            standing.failures += 1
            wait = self.pace.quick * 2 ** min(standing.failures, 6)
            standing.again = time.monotonic() + min(wait, self.pace.slow)
            if isinstance(error, httpx.TransportError):
                address = self.requests.addresses.current().get(number, "")
                text = f"is away: {reason_of(error, address, proxy_at(address)).text}"
            else:
                text = f"refuses or errs: {printable(str(error))[:300]}"
            if text not in standing.notes and len(standing.notes) < MAX_NOTES and not self._closed.is_set():
                standing.notes.add(text)
                self.say(f"peer {number} {text}")
            return False
        if standing.failures and standing.notes:
            self.say(f"peer {number} is back")
        self.standings[number] = PeerStanding()
        return True
