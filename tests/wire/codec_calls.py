"""Counts of what the codec encodes and decodes, by kind of record, and of the uploads of weights that are alive."""

from collections import Counter
from dataclasses import replace
from typing import Any
from weakref import finalize

import pytest

from fedkseed.wire import codec
from fedkseed.wire.records import Change


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, type[Any]]]:
    """A counter that from now on counts every call of `encode` and `decode`, whoever calls it."""
    calls = Counter[tuple[str, type[Any]]]()

    def counting(kind: codec.Kind[Any]) -> codec.Kind[Any]:
        def write(message: Any) -> codec.Written:
            calls["encode", kind.record] += 1
            return kind.write(message)

        def read(head: codec.Head, fixed: Any, parts: codec.Parts) -> Any:
            calls["decode", kind.record] += 1
            return kind.read(head, fixed, parts)

        return replace(kind, write=write, read=read)

    for number, kind in [*codec.KINDS.items()]:
        monkeypatch.setitem(codec.KINDS, number, counting(kind))
    return calls


class Alive:
    """A count of the decoded uploads of weights that somebody still holds; `most`: the most at one time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        kind = next(kind for kind in codec.KINDS.values() if kind.record is Change)

        def read(head: codec.Head, fixed: Any, parts: codec.Parts) -> Any:
            change = kind.read(head, fixed, parts)
            self.now += 1
            self.most = max(self.most, self.now)
            finalize(change.values, self._gone)
            return change

        monkeypatch.setitem(codec.KINDS, kind.number, replace(kind, read=read))

    def _gone(self) -> None:
        self.now -= 1
