"""A limit on the requests of a key, such as an address or a client; the keys that were seen last are remembered."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

MOST = 1 << 16  # keys that are remembered: whoever makes up keys must not fill the memory


@dataclass(slots=True)
class Quota:
    """The number of requests that a key may send: `burst` at once, and after them `rate` a second."""

    rate: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    _seen: OrderedDict[Hashable, tuple[float, float]] = field(default_factory=OrderedDict)  # requests left, and when

    def takes(self, key: Hashable) -> bool:
        """Count a request of a key, and return whether it is to be answered."""
        now = self.clock()
        left, then = self._seen.pop(key, (self.burst, now))
        left = min(self.burst, left + (now - then) * self.rate)
        self._seen[key] = (max(0.0, left - 1), now)
        if len(self._seen) > MOST:
            self._seen.popitem(last=False)
        return left >= 1
