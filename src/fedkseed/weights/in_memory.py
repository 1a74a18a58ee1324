"""Weights w(c) written into the model's own memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..directions import Pool
from ..directions.operations import DirectionSum, Piece
from ..errors import FedKSeedError
from .base import NO_TERMS, Pooled
from .layout import Layout
from .lazy import Lazy


class Written(Pooled):
    """Weights w(c) written into the model's own memory; `base` keeps w_0."""

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        if any(isinstance(entry.tensor, Lazy) for entry in layout.tuned):
            raise FedKSeedError("a quantised model can't be written to; hold it in mode 'streamed'")
        self.base = [entry.tensor.clone() for entry in layout.tuned]

    def restore(self) -> None:
        self.c[:] = 0
        for entry, base in zip(self.layout.tuned, self.base, strict=True):
            entry.tensor.copy_(base)

    def keep(self) -> None:
        """Nothing to do: w(c) is in the model's own memory."""

    @contextmanager
    def _trainable(self, on_gradient: Callable[[int, int, Tensor], None]) -> Iterator[None]:
        parameters = {
            id(parameter): (parameter, entry.number)
            for entry in self.layout.tuned
            for module, name in entry.places
            if (parameter := module._parameters[name]) is not None
        }
        hooks = []

        def use(number: int, parameter: Tensor) -> None:
            if parameter.grad is not None:
                on_gradient(number, 0, parameter.grad.contiguous())
                parameter.grad = None

        try:
            for parameter, number in parameters.values():
                parameter.requires_grad_(True)
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(use, number)))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, _ in parameters.values():
                parameter.requires_grad_(False)
                parameter.grad = None

    def _write(self, total: DirectionSum, addends: list[Tensor] | None = None) -> None:
        rows = zip(self.layout.tuned, self.base, addends or [None] * len(self.base), strict=True)
        total.combine([Piece(entry.number, base, entry.tensor, 0, addend) for entry, base, addend in rows])


class Materialized(Written):
    """Weights w(c) written anew from w_0 for every point: exact, no drift, memory w_0 and w.

    One pass costs O(d log K) or O(d) for the transformed families, O(K d) for the others.
    """

    def shift(self, direction: int, eps: float) -> None:
        self._write(DirectionSum.over(self.pool, self._shifted(direction, eps)))

    def settle(self) -> None:
        self._write(DirectionSum(self.pool, *self.pool.dense(self.c)))


class InPlace(Written):
    """Weights w(c) from a running float32 sum s = Σ_j c_j z_j: O(d) a step in every family.

    Perturbations are added to s on the way to the model and never stored, so they leave no
    rounding behind (editing 16-bit weights and undoing the edit drifts by more than the updates);
    only true steps change s. They round s in an order of their own, some 1e-8 away from the sum in
    ascending j; `settle` makes s anew from c, so that a client ends with w(c) bit for bit. It
    costs what a sync costs, O(K d). Memory: w_0, w and 4 bytes a weight for s.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sums = [torch.zeros_like(base, dtype=torch.float32) for base in self.base]

    def shift(self, direction: int, eps: float) -> None:
        self._write(DirectionSum(self.pool, *self.pool.select([direction], [eps])), self.sums)

    def move(self, direction: int, step: float) -> None:
        self._add(*self.pool.select([direction], [step]))
        super().move(direction, step)

    def settle(self) -> None:
        for total in self.sums:
            total.zero_()
        self._add(*self.pool.dense(self.c))
        self._write(DirectionSum(self.pool, *NO_TERMS), self.sums)

    def restore(self) -> None:
        super().restore()
        for total in self.sums:
            total.zero_()

    def _add(self, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> None:
        tuned = zip(self.layout.tuned, self.sums, strict=True)
        DirectionSum(self.pool, directions, coefficients).combine([Piece(entry.number, s, s) for entry, s in tuned])
