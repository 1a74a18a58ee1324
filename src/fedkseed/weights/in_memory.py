"""Weights w(c) written into the model's own memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..directions import Pool
from ..directions.operations import DirectionSum, Piece
from ..errors import FedKSeedError
from .base import Pooled
from .layout import Layout
from .lazy import Lazy


class Materialized(Pooled):
    """Weights w(c) written anew from w_0 for every point: exact, no drift, memory w_0 and w.

    `base` keeps w_0. One pass costs O(d log K) or O(d) for the transformed families, O(K d) for the others.
    """

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

    def _use(self, c: NDArray[np.float32], total: DirectionSum) -> None:
        rows = zip(self.layout.tuned, self.base, strict=True)
        total.combine([Piece(entry.number, base, entry.tensor) for entry, base in rows])
