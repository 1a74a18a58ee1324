"""Weights w(c) made when an operation asks for them: tuning with the memory of inference."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..directions import Pool
from ..directions.operations import DirectionSum, Piece
from ..errors import FedKSeedError
from .base import NO_TERMS, Pooled
from .layout import Layout, TensorEntry, digest
from .lazy import Lazy, Workspace
from .side_by_side import SideBySide, Value


class Unwritten(Pooled):
    """Weights w(c) of a model whose memory stays w_0: the model gets lazy tensors in place of its own.

    The points of a step run side by side, operation by operation, so that w_0 is read once.

    Attributes:
        sum: Σ_j c_j z_j, which tuned values are made with.
        made: the number of weights that were made.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sum = DirectionSum(pool, *NO_TERMS)
        self.made = 0
        self._installed = False
        self._workspace = Workspace()
        self.side_by_side = SideBySide()
        self._lazy = [Lazy(TunedSource(entry, self), self._workspace) for entry in layout.tuned]
        self._places = [entry.places for entry in layout.tuned]
        self._original = [[module._parameters[name] for module, name in places] for places in self._places]

    def both(self, direction: int, eps: float, loss: Callable[[], Value]) -> tuple[Value, Value]:
        above, below = self.points([self._shifted(direction, eps), self._shifted(direction, -eps)], loss)
        return above, below

    @abstractmethod
    def points(self, coefficients: Sequence[NDArray[np.float32]], loss: Callable[[], Value]) -> list[Value]:
        """The losses L(w(c)) at several c on one batch, with one reading of w_0."""

    def restore(self) -> None:
        self.c[:] = 0
        self._installed = False
        self._put_back(range(len(self._places)))

    def keep(self) -> None:
        """Write w(c) over w_0 where the model's memory can hold it, and let go of the model.

        Quantised tensors stay lazy.
        """
        tuned = self.layout.tuned
        dense = [k for k, entry in enumerate(tuned) if not isinstance(entry.tensor, Lazy)]
        self.sum.combine([Piece(tuned[k].number, tuned[k].tensor, tuned[k].tensor) for k in dense])
        self._put_back(dense)

    def digest(self) -> bytes:
        if not self._installed:
            return super().digest()
        lazy = {entry.name: tensor for entry, tensor in zip(self.layout.tuned, self._lazy, strict=True)}
        return digest([replace(entry, tensor=lazy.get(entry.name, entry.tensor)) for entry in self.layout.entries])

    def _install(self) -> None:
        """Give the model its lazy tensors, unless it has them."""
        if self._installed:
            return
        self._installed = True
        for places, lazy in zip(self._places, self._lazy, strict=True):
            for module, name in places:
                setattr(module, name, lazy)

    def _put_back(self, tensors: Iterable[int]) -> None:
        """Give the model its own tensors back, of these places among the tuned ones."""
        for k in tensors:
            for (module, name), original in zip(self._places[k], self._original[k], strict=True):
                setattr(module, name, original)


class Streamed(Unwritten):
    """Weights w(c) made from w_0 when an operation asks for them, and dropped after it: memory of inference.

    Needs room for w_0, 4 MiB of a matrix and the activations. w_0 is the model's own memory, and may
    be a memory-mapped file or quantised. Exact, no drift; no weight is ever written.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self._workspace.before_operation = self._change_places

    def shift(self, direction: int, eps: float) -> None:
        self._install()
        self.sum = DirectionSum.over(self.pool, self._shifted(direction, eps))

    def settle(self) -> None:
        self._install()
        self.sum = DirectionSum(self.pool, *self.pool.dense(self.c))

    def points(self, coefficients: Sequence[NDArray[np.float32]], loss: Callable[[], Value]) -> list[Value]:
        self._install()
        sums = [DirectionSum.over(self.pool, c) for c in coefficients]
        return self.side_by_side.run(loss, sums, partial(setattr, self, "sum"))

    def _change_places(self) -> None:
        """Let the other points of a step catch up before an operation on lazy tensors.

        The last operation makes the logits, which are large. The points do not change places after it, so that only
        one set of logits exists at a time.
        """
        if self.side_by_side.caller is not None:
            if torch.is_autocast_enabled(self.layout.tuned[0].tensor.device.type):
                raise FedKSeedError("a loss can't use autocast while weights are streamed: hold the model in the type")
            self.side_by_side.ask()

    @contextmanager
    def _trainable(self, on_gradient: Callable[[int, int, Tensor], None]) -> Iterator[None]:
        self._install()
        numbers = {id(lazy): entry.number for lazy, entry in zip(self._lazy, self.layout.tuned, strict=True)}
        self._workspace.on_gradient = lambda lazy, start, part: on_gradient(numbers[id(lazy)], start, part)
        try:
            yield
        finally:
            self._workspace.on_gradient = None


class TunedSource:
    """The `TensorSource` of one tensor's tuned values."""

    def __init__(self, entry: TensorEntry, weights: Unwritten) -> None:
        self.entry, self.weights = entry, weights
        self.shape, self.dtype, self.device = entry.tensor.shape, entry.tensor.dtype, entry.tensor.device

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        number, base = self.entry.number, self.entry.tensor
        if isinstance(base, Lazy):
            base.source.read(parts)
            pieces = [Piece(number, out, out, start) for start, out in parts]
        else:
            flat = base.view(-1)
            pieces = [Piece(number, flat[p : p + out.numel()].view(out.shape), out, p) for p, out in parts]
        self.weights.sum.combine(pieces)
        self.weights.made += sum(out.numel() for _, out in parts)
