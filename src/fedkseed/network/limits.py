"""The limits of what others may send, keep open and cost, in one place for all servers and clients of the network.

None is left to a library. http_server.py holds requests to them, http_client.py answers; docs/security.md lists them.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from ..errors import FedKSeedError

HEADER_BYTES = 1 << 14  # of a request; `join` sends 200, a browser 1,000
HEADER_SECONDS = 10.0  # for TLS to begin, and again until a header is whole
PATIENCE = 10.0  # seconds between two parts of a body, and for the whole, which has more by its size:
SLOWEST = 1000.0  # bytes a second that a body has at least; a modem of 1995 has 3,500
KEEP_ALIVE = 300  # seconds for which a connection without a request is kept; a request waits up to 240
LINGER = 3.0  # seconds for which a request is read after its answer; else its sender may not see the answer
CONNECTIONS = 32  # of one client or peer; a browser opens 6
WRITES = 1 << 15  # bytes of an answer that wait for its reader
PENALTY = 1.0  # seconds until a stranger beyond its quota is refused
REFUSAL = 4096  # bytes of a refusal's text, and of the answer that begins a session
MOST_KEYS = 1 << 16  # that a quota remembers: whoever makes up keys must not fill the memory
WORK, BURST = 0.05, 2.0  # seconds of the processor in each that a client or peer costs at most; and at once
REQUEST = 0.001  # seconds of the processor for what any request costs beside its work


class RequestError(FedKSeedError):
    """A request that is not answered, with its status of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Quota:
    """The cost that a key, such as an address or a client, may have: `burst` at once, and then `rate` a second.

    It counts requests (`takes`) or seconds of the processor (`charge`); the keys that were seen last are remembered.
    """

    rate: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _seen: OrderedDict[Hashable, tuple[float, float]] = field(default_factory=OrderedDict)  # what is left, and when

    def takes(self, key: Hashable) -> bool:
        """Count a request of a key, and return whether it is to be answered."""
        answered = self._left(key) >= 1
        self.charge(key, float(answered))
        return answered

    def wait(self, key: Hashable) -> float:
        """Seconds until a key has paid off what it has cost beyond its quota."""
        return max(0.0, -self._left(key) / self.rate)

    def charge(self, key: Hashable, cost: float) -> None:
        left = self._left(key)
        self._seen.pop(key, None)
        self._seen[key] = (left - cost, self.clock())
        if len(self._seen) > MOST_KEYS:
            self._seen.popitem(last=False)

    def _left(self, key: Hashable) -> float:
        left, then = self._seen.get(key, (self.burst, 0.0))
        return min(self.burst, left + (self.clock() - then) * self.rate)
