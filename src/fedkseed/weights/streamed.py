"""Weights w(c) made when an operation asks for them: tuning with the memory of inference."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray
from torch import Tensor

from ..directions import Pool
from ..directions.operations import DirectionSum, Piece
from ..errors import FedKSeedError
from .base import NOTHING, Pooled, Value
from .layout import Layout, TensorEntry, digest
from .lazy import Lazy, Workspace

TURN = object()  # what a point hands over when it is the other's turn; else its loss


def _point() -> greenlet:
    """A greenlet that calls the functions which the present one sends it, one after another, and sends their values."""
    here = getcurrent()

    def serve() -> None:
        value = None
        while True:
            loss = here.switch(value)
            value = loss()
            del loss  # or it would keep its batch until the next step

    point = greenlet(serve)
    point.switch()  # to where it waits: a first function, as an argument of `serve`, would be kept for good
    return point


class Streamed(Pooled):
    """Weights w(c) made from w_0 when an operation asks for them, and dropped after it: memory of inference.

    Needs room for w_0, 4 MiB of a matrix and the activations. w_0 is the model's own memory, and may
    be a memory-mapped file or quantised. The two points of a step run side by side, operation by
    operation, so that w_0 is read once. Exact, no drift; no weight is ever written.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sum = DirectionSum(pool, *NOTHING)
        self.made = 0  # weights
        self._installed = False
        self._workspace = Workspace()
        self._points: list[greenlet] = []  # of the last step: to make them takes longer than a quick loss
        self._lazy = [Lazy(TunedTensor(entry, self), self._workspace) for entry in layout.tuned]
        self._places = [entry.places for entry in layout.tuned]
        self._original = [[module._parameters[name] for module, name in places] for places in self._places]

    @property
    def passes(self) -> float:
        return self.made / self.layout.size

    def load(self, c: NDArray[np.floating]) -> None:
        self.c = self._coefficients(c)
        self.settle()

    def shift(self, direction: int, eps: float) -> None:
        self._install()
        self.sum = self._shifted(direction, eps)

    def move(self, direction: int, step: float) -> None:
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        self._install()
        self.sum = DirectionSum(self.pool, *self.pool.dense(self.c))

    def restore(self) -> None:
        self.c[:] = 0
        self._installed = False
        for places, originals in zip(self._places, self._original, strict=True):
            for (module, name), original in zip(places, originals, strict=True):
                setattr(module, name, original)

    def both(self, direction: int, eps: float, loss: Callable[[], Value]) -> tuple[Value, Value]:
        self._install()
        sums = [self._shifted(direction, sign * eps) for sign in (1, -1)]
        # Two calls of `loss` in one thread that change places before each operation on lazy tensors. The
        # last operation makes the logits, which are large: the calls do not change places after it, so that
        # only one set of logits exists at a time.
        here = getcurrent()
        if not self._points or any(point.dead or point.parent is not here for point in self._points):
            self._points = [_point(), _point()]

        def turn() -> None:
            if any(torch.is_autocast_enabled(entry.tensor.device.type) for entry in self.layout.tuned[:1]):
                raise FedKSeedError("a loss can't use autocast while weights are streamed: hold the model in the type")
            here.switch(TURN)

        self._workspace.turn = turn
        values: list[Any] = [TURN, TURN]
        with torch.inference_mode():  # around both: each would leave it in the other's turn
            try:
                while any(value is TURN for value in values):
                    for k, point in enumerate(self._points):
                        if values[k] is TURN:
                            self.sum = sums[k]
                            values[k] = point.switch(loss)  # which means nothing to one that goes on
            finally:
                self._workspace.turn = lambda: None
                for point, value in zip(self._points, values, strict=True):
                    if value is TURN and not point.dead:
                        point.throw()  # ends it, with its `finally` blocks
        return values[0], values[1]

    @contextmanager
    def _leaves(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        self._install()
        made: dict[int, Tensor] = {}  # tied tensors: one gradient for all their uses

        def leaf(lazy: Lazy) -> Tensor:
            number = numbers[id(lazy)]
            if number not in made:
                tensor = lazy.whole().requires_grad_(True)
                tensor.register_post_accumulate_grad_hook(partial(take, number))
                if number not in tied:
                    return tensor
                made[number] = tensor
            return made[number]

        numbers = {id(lazy): entry.number for lazy, entry in zip(self._lazy, self.layout.tuned, strict=True)}
        tied = {entry.number for entry in self.layout.tuned if len(entry.places) > 1}
        self._workspace.leaf = leaf
        try:
            yield
        finally:
            self._workspace.leaf = None

    def keep(self) -> None:
        """Write w(c) over w_0 where the model's memory can hold it, and let go of the model.

        Quantised tensors stay lazy.
        """
        dense = [entry for entry in self.layout.tuned if not isinstance(entry.tensor, Lazy)]
        self.sum.combine([Piece(entry.number, entry.tensor, entry.tensor) for entry in dense])
        for entry, places, originals in zip(self.layout.tuned, self._places, self._original, strict=True):
            if not isinstance(entry.tensor, Lazy):
                for (module, name), original in zip(places, originals, strict=True):
                    setattr(module, name, original)

    def digest(self) -> bytes:
        if not self._installed:
            return super().digest()
        lazy = {entry.name: tensor for entry, tensor in zip(self.layout.tuned, self._lazy, strict=True)}
        return digest([replace(entry, tensor=lazy.get(entry.name, entry.tensor)) for entry in self.layout.entries])

    def _install(self) -> None:
        if self._installed:
            return
        self._installed = True
        for places, lazy in zip(self._places, self._lazy, strict=True):
            for module, name in places:
                setattr(module, name, lazy)


class TunedTensor:
    """The `Source` of one tensor's tuned values."""

    def __init__(self, entry: TensorEntry, weights: Streamed) -> None:
        self.entry, self.weights = entry, weights
        self.shape, self.dtype, self.device = entry.tensor.shape, entry.tensor.dtype, entry.tensor.device

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        base = self.entry.tensor
        if isinstance(base, Lazy):
            base.source.read(parts)
            pieces = [Piece(self.entry.number, out, out, start) for start, out in parts]
        else:
            flat = base.view(-1)
            pieces = [
                Piece(self.entry.number, flat[start : start + out.numel()].view(out.shape), out, start)
                for start, out in parts
            ]
        self.weights.sum.combine(pieces)
        self.weights.made += sum(out.numel() for _, out in parts)
