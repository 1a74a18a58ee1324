"""Limits of what a client may ask of the SuperLink: requests, and addresses from which one key is used.

Both take a key, such as a client's public key, and remember the keys that were seen last.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST = 1 << 16  # keys that are remembered: whoever makes up keys must not fill the memory
RATE, BURST = 10.0, 100.0  # requests; a client sends 0.4 a second and 13 more in a round (docs/scaling.md)
TOGETHER = 60.0  # seconds within which a key that goes from one address to another and back is in use at both

Clock = Callable[[], float]
Value = TypeVar("Value")


class Recent(OrderedDict[Hashable, Value], Generic[Value]):
    """A dictionary of the `MOST` keys that were set last."""

    def __setitem__(self, key: Hashable, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MOST:
            self.popitem(last=False)


@dataclass(slots=True)
class Quota:
    """The number of requests that a key may send: `burst` at once, and after them `rate` a second."""

    rate: float = RATE
    burst: float = BURST
    clock: Clock = time.monotonic
    _left: Recent[tuple[float, float]] = field(default_factory=Recent)

    def takes(self, key: Hashable) -> bool:
        """Count a request of a key, and return whether it is to be answered."""
        now = self.clock()
        left, then = self._left.get(key, (self.burst, now))
        left = min(self.burst, left + (now - then) * self.rate)
        self._left[key] = (max(0.0, left - 1), now)
        return left >= 1


@dataclass(slots=True)
class ClientAddresses:
    """The addresses from which keys are used. A client that moves has one after the other, a thief and an owner two."""

    clock: Clock = time.monotonic
    _seen: Recent[dict[str, float]] = field(default_factory=Recent)  # address -> the last use, oldest first

    def other(self, key: Hashable, address: str) -> str | None:
        """Note the use of a key; returns another address if the key was used there since it was last used here."""
        now = self.clock()
        seen = {where: when for where, when in self._seen.get(key, {}).items() if now - when < TOGETHER}
        last = next(reversed(seen), address)
        self._seen[key] = {**{where: when for where, when in seen.items() if where != address}, address: now}
        return last if address in seen and last != address else None
