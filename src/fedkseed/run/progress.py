"""Watchers of a run's progress, and the time that it still needs."""

import time
from collections import deque
from collections.abc import Collection
from statistics import fmean
from typing import Literal, TypeAlias

from ..round import Report

# Of a client in a round. Waiting: it is connected, or its turn will come. Late: the round went on without its answer.
Standing: TypeAlias = Literal["training", "waiting", "answered", "late", "refused", "offline"]
ROUNDS = 20  # the last ones, whose mean is the pace: more than the rounds between two evaluations, mostly


class Progress:
    """The calls that a run makes to its watcher while it works."""

    def note(self, text: str) -> None: ...
    def begin(self, what: str, total: int) -> None: ...
    def advance(self, count: int = 1, loss: float | None = None) -> None: ...
    def clients(self, numbers: Collection[int], standing: Standing) -> None: ...
    def round_done(self, report: Report) -> None: ...


class Silent(Progress):
    """A watcher that shows nothing."""


class RoundPace:
    """The seconds from one round to the next, evaluations and waits included."""

    def __init__(self) -> None:
        self.since = time.time()  # when the last round ended
        self._took = deque[float](maxlen=ROUNDS)

    @property
    def seconds(self) -> float | None:
        """The pace; None before the first round."""
        return fmean(self._took) if self._took else None

    def round_done(self, seconds: float) -> None:
        """Count a round, which took `seconds` by itself.

        That is all that counts of the first one: before it, a base model is evaluated, or clients are waited for.
        """
        now = time.time()
        self._took.append(now - self.since if self._took else seconds)
        self.since = now

    def end(self, rounds: int) -> float | None:
        """The time at which this number of further rounds will be done; None before the first round."""
        return None if self.seconds is None else self.since + self.seconds * rounds


def duration(seconds: float) -> str:
    """A time in words: 12 s, 3 min 20 s, 5 h 7 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
