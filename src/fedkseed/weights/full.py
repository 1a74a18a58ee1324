"""Weights that may take any values, for algorithms whose model is not a function of K numbers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..directions import Pool
from ..directions.operations import DirectionSum, Piece, project_pieces
from ..errors import FedKSeedError
from .base import Weights
from .layout import Layout
from .lazy import TILE, Lazy


class FullWeights(Weights):
    """The weights w as d float32 numbers; the model holds them rounded to its type.

    Where nothing is perturbed, the model's own memory is all that is needed. Zeroth-order steps and
    16-bit models have an exact copy beside it, 4 bytes a weight: a perturbation is added on the way from
    the copy to the model and leaves no rounding behind. `keep` makes one more copy.

    Attributes:
        version: the number of rounds that the kept weights contain; see `strategies.replay`.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        if any(isinstance(entry.tensor, Lazy) for entry in layout.tuned):
            raise FedKSeedError("a quantised model's weights can't be written to; set [model] storage = 'dense'")
        self.version, self._model = 0, [entry.tensor for entry in layout.tuned]
        self._exact: list[Tensor] | None = None
        self._kept: list[Tensor] | None = None
        if any(tensor.dtype != torch.float32 for tensor in self._model):
            self._make_exact()

    @property
    def _truth(self) -> list[Tensor]:
        return self._model if self._exact is None else self._exact

    @property
    def finite(self) -> bool:
        return all(map(all_finite, self._truth))

    def values(self) -> NDArray[np.float32]:
        """The weights w, shape (d,): tensor after tensor in layout order."""
        return np.concatenate([t.detach().to("cpu", torch.float32).numpy().reshape(-1) for t in self._truth])

    def set(self, values: NDArray[np.float32]) -> None:
        """Set w to `values`.

        Raises:
            FedKSeedError: the number of values is not d; nothing has changed.
        """
        if values.size != self.layout.size:
            raise FedKSeedError(f"the model has {self.layout.size} tuned weights, got {values.size}")
        parts = np.split(values, np.cumsum([tensor.numel() for tensor in self._truth])[:-1])
        for tensor, part in zip(self._truth, parts, strict=True):
            tensor.copy_(torch.from_numpy(np.require(part, requirements="W")).view(tensor.shape))
        self.settle()

    def add(self, total: DirectionSum, tensor: int | None = None) -> None:
        """Add Σ_k c_k z_k to w, in all tensors or in one (by its place among the tuned); the model is then stale."""
        chosen = range(len(self._truth)) if tensor is None else [tensor]
        truth, tuned = self._truth, self.layout.tuned
        total.combine([Piece(tuned[k].number, truth[k], truth[k]) for k in chosen])

    def shift(self, direction: int, eps: float) -> None:
        self._make_exact()
        total = DirectionSum(self.pool, *self.pool.select([direction], [eps]))
        pieces = list(zip(self.layout.tuned, self._exact or [], strict=True))
        total.combine([Piece(e.number, exact, e.tensor) for e, exact in pieces if e.tensor.dtype == torch.float32])
        for entry, exact in pieces:
            if entry.tensor.dtype != torch.float32:
                tiles = zip(exact.view(-1).split(TILE), entry.tensor.view(-1).split(TILE), strict=True)
                for k, (wide, narrow) in enumerate(tiles):
                    scratch = torch.empty_like(wide)
                    total.combine([Piece(entry.number, wide, scratch, k * TILE)])
                    narrow.copy_(scratch)  # the one rounding

    def move(self, direction: int, step: float) -> None:
        self._make_exact()
        self.add(DirectionSum(self.pool, *self.pool.select([direction], [step])))

    def settle(self) -> None:
        if self._exact is not None:
            for tensor, exact in zip(self._model, self._exact, strict=True):
                tensor.copy_(exact)

    def keep(self) -> None:
        """Remember w for `back` and `change`."""
        if self._kept is None:
            self._kept = [tensor.to(torch.float32, copy=True) for tensor in self._truth]
            return
        for kept, tensor in zip(self._kept, self._truth, strict=True):
            kept.copy_(tensor)

    def back(self) -> None:
        """Set w to the kept weights, bit for bit; leave it if nothing was kept."""
        if self._kept is not None:
            for tensor, kept in zip(self._truth, self._kept, strict=True):
                tensor.copy_(kept)
            self.settle()

    def checkpoint(self) -> NDArray[np.float32]:
        return self.values()

    def rewind(self, checkpoint: NDArray[np.float32]) -> None:
        self.set(checkpoint)
        self.keep()
        self.version = 0

    def change(self, pool: Pool) -> NDArray[np.float64]:
        """The inner products ⟨z_j, Δ⟩ within each tuned tensor, shape (tensors, K); Δ = w − w_kept."""
        parts = zip(self.layout.tuned, self._moved(), strict=True)
        return np.stack([project_pieces([(entry.number, 0, moved)], pool) for entry, moved in parts])

    def distances(self) -> NDArray[np.float64]:
        """The norm ‖Δ‖ of each tuned tensor's change, shape (tensors,)."""
        return np.array([float(moved.norm()) for moved in self._moved()])

    def _moved(self) -> Iterator[Tensor]:
        if self._kept is None:
            raise FedKSeedError("nothing was kept to compare with; call keep() before the steps")
        for w, kept in zip(self._truth, self._kept, strict=True):
            yield (w - kept).contiguous()

    @contextmanager
    def trainable(self) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
        """The tuned parameters, each with the float32 numbers that an optimiser changes: itself, or its exact copy.

        A 16-bit parameter can't hold the steps of an optimiser: they are taken on the copy and rounded into it.
        """
        self.settle()
        if all(tensor.dtype == torch.float32 for tensor in self._model):
            self._exact = None
        with self.layout.trainable() as parameters:
            try:
                yield list(zip(parameters, self._exact or parameters, strict=True))
            finally:
                for copy in self._exact or []:
                    copy.grad = None

    def _make_exact(self) -> None:
        if self._exact is None:
            self._exact = [tensor.to(torch.float32, copy=True) for tensor in self._model]


def all_finite(tensor: Tensor) -> bool:
    """True if no number of a tensor is NaN or infinite.

    A sum with such a number is not finite, so a finite sum speaks for all of them at a fraction of the time; where
    finite numbers add up to too much, each is looked at.
    """
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
