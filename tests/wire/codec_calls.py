"""Counts of what the codec encodes and decodes, by kind of record."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedkseed.wire import codec


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
