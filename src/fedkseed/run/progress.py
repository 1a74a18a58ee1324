"""Watchers of a run's progress."""

from collections.abc import Collection
from typing import Literal, Protocol, TypeAlias

from ..round import Report

# Of a client in a round. Waiting: it is connected, or its turn will come. Late: the round went on without its answer.
Standing: TypeAlias = Literal["training", "waiting", "answered", "late", "refused", "offline"]


class Progress(Protocol):
    """The calls that a run makes to its watcher while it works."""

    def note(self, text: str) -> None: ...
    def begin(self, what: str, total: int) -> None: ...
    def advance(self, count: int = 1, loss: float | None = None) -> None: ...
    def clients(self, numbers: Collection[int], standing: Standing) -> None: ...
    def round_done(self, report: Report) -> None: ...


class Silent:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...
    def begin(self, what: str, total: int) -> None: ...
    def advance(self, count: int = 1, loss: float | None = None) -> None: ...
    def clients(self, numbers: Collection[int], standing: Standing) -> None: ...
    def round_done(self, report: Report) -> None: ...


class Passing:
    """A watcher that passes all calls on to another."""

    def __init__(self, inner: Progress) -> None:
        self.inner = inner

    def note(self, text: str) -> None:
        self.inner.note(text)

    def begin(self, what: str, total: int) -> None:
        self.inner.begin(what, total)

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self.inner.advance(count, loss)

    def clients(self, numbers: Collection[int], standing: Standing) -> None:
        self.inner.clients(numbers, standing)

    def round_done(self, report: Report) -> None:
        self.inner.round_done(report)
