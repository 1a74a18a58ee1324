"""Weights w(c) that are never made: a layer adds U (C (Vᵀ x)) to its output W_0 x. For factored families.

A step costs what inference costs, and a derivative by c a pass through activations, with no gradient of a weight.
Losses are those of the weights of the definition up to rounding; a digest, and the model that is kept in the end, are
made by the definition, as `Streamed` does.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..directions import Pool
from ..directions.factors import Factor, Matrix
from ..directions.operations import DirectionSum
from ..directions.torch_any import held, separable_signs, transform
from ..errors import FedKSeedError
from .base import NO_GRADIENT, backpropagate
from .layout import Layout, TensorEntry
from .lazy import Lazy, linear, look_up
from .side_by_side import Value
from .streamed import TunedSource, Unwritten

WIDE = 8  # a layer with more outputs for each input makes logits: they exist for one point at a time


class FactoredWeights(Unwritten):
    """Weights w(c) of a pool of a factored family, used without being made. No drift; memory of inference.

    At each layer the inputs of all points of a step are one batch, so W_0 is read once.

    Attributes:
        cores: the matrix C of each changed tensor by its number, at the point that is computed now.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        if not self.pool.factored:
            raise FedKSeedError(
                f"mode 'factored' is for factored families of directions, this pool's is {self.pool.family}"
            )
        changes = {entry.number: _change(self.pool, entry) for entry in layout.tuned}
        self._changes = {number: change for number, change in changes.items() if change is not None}
        for k, entry in enumerate(layout.tuned):
            if entry.number in self._changes:
                source = FactoredSource(entry, self, self._changes[entry.number])
                self._lazy[k] = Lazy(source, self._workspace)
            else:  # no direction changes it: the model keeps its own, and no step makes a copy
                self._places[k], self._original[k] = (), []
        self._scales = _scales(self.pool)
        self.cores: dict[int, Tensor] = {}

    def shift(self, direction: int, eps: float) -> None:
        c = self._shifted(direction, eps)
        self._use(c, DirectionSum.over(self.pool, c))

    def settle(self) -> None:
        self._use(self.c, DirectionSum(self.pool, *self.pool.dense(self.c)))

    def _use(self, c: NDArray[np.float32], total: DirectionSum) -> None:
        self._install()
        self.sum, self.cores = total, self._cores(torch.from_numpy(c))

    def points(self, coefficients: Sequence[NDArray[np.float32]], loss: Callable[[], Value]) -> list[Value]:
        self._install()
        cores, before = [self._cores(torch.from_numpy(c)) for c in coefficients], self.cores

        def before_turn(number: int) -> None:
            self.cores = cores[number]

        try:
            return self._side_by_side.run(loss, len(cores), before_turn, _products)
        finally:
            self.cores = before

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[float, NDArray[np.float64]]:
        """`Pooled.gradient`, by a pass back through activations, with no gradient of a weight."""
        c = torch.from_numpy(self.c.copy()).requires_grad_(True)
        with self._at(c):
            value = backpropagate(loss)
        return value, np.zeros(self.pool.size) if c.grad is None else c.grad.numpy().astype(np.float64)

    def gradients(self, losses: Callable[[], Tensor], count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The loss of each example of a batch and its derivatives by c, shapes (B,) and (B, K), from one pass back.

        Each example gets coefficients of its own, which are all the same numbers: C is then B matrices, and no example
        has a derivative by another's.

        Args:
            losses: of the examples, shape (B,), with their graph: from a model whose activations are (B, …).
            count: B.

        Raises:
            FedKSeedError: the losses do not depend on the tuned weights, one is not finite, or the model uses a tuned
                tensor in a way that says nothing of which example it is for.
        """
        c = torch.from_numpy(np.tile(self.c, (count, 1))).requires_grad_(True)
        with self._at(c):
            values = losses()
            if not values.requires_grad:
                raise FedKSeedError(NO_GRADIENT)
            if values.shape != (count,) or not bool(torch.isfinite(values.detach()).all()):
                raise FedKSeedError(f"expected {count} finite losses, got {values.detach().tolist()}")
            values.sum().backward()
        slopes = np.zeros(c.shape) if c.grad is None else c.grad.numpy().astype(np.float64)
        return values.detach().cpu().double().numpy(), slopes

    @contextmanager
    def _at(self, c: Tensor) -> Iterator[None]:
        """Use w(c) with a graph back to c, of shape (K,) or (B, K)."""
        self._install()
        before = self.cores
        try:
            with torch.enable_grad():
                self.cores = self._cores(c)
                yield
        finally:
            self.cores = before

    def product(self, source: "FactoredSource", x: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
        """The layer's output W_0 x + b, or W_0ᵀ x + b if `turned`; made for all points of a step together."""
        shared = self._side_by_side.ask((source, x, turned))
        if shared is None:
            return _product(x, source, turned, bias)
        return shared if bias is None else shared.add_(bias)  # each point has a bias of its own

    def _cores(self, c: Tensor) -> dict[int, Tensor]:
        """The matrices C of all tensors, or the one M, on the devices of their tensors; c is (K,) or (B, K)."""
        if self.pool.informed:
            table = (transform(c) if self.pool.family == "mixed" else c) * self._scales
        else:
            m = math.isqrt(self.pool.size)
            table = transform(transform(c.view(*c.shape[:-1], m, m)).mT).mT.contiguous()
        # one copy a device and point: a model has hundreds of tensors, and each copy to a GPU would be waited for
        tables = {device: table.to(device) for device in {change.device for change in self._changes.values()}}
        return {number: change.core(tables[change.device]) for number, change in self._changes.items()}


class FactoredSource(TunedSource):
    """The `UsableWithoutValues` source of one tensor's tuned values."""

    weights: FactoredWeights

    def __init__(self, entry: TensorEntry, weights: FactoredWeights, change: "TensorChange") -> None:
        super().__init__(entry, weights)
        self.change = change

    @property
    def core(self) -> Tensor:
        """The matrix C at the point that is computed now; B of them where examples have coefficients of their own."""
        return self.weights.cores[self.entry.number]

    @property
    def examples(self) -> int | None:
        """The number of examples that each have a ΔW of their own; None: all have the same."""
        return len(self.core) if self.core.ndim == 3 else None

    def linear(self, x: Tensor, bias: Tensor | None, turned: bool = False) -> Tensor:
        """The layer's output (W_0 + ΔW) x + b; `turned`: of a layer that keeps its matrix as (inputs, outputs)."""
        examples = self.examples
        if examples is not None and not turned and (x.ndim < 3 or len(x) != examples):  # an expert's tokens, say
            raise FedKSeedError(
                f"{self.entry.name} gets inputs of shape {tuple(x.shape)}, which do not say which of {examples} "
                "examples each is of: derivatives of single examples need layers whose inputs are (examples, …)"
            )
        return self.change.add(self.weights.product(self, x, bias, turned), x, self.core, turned)

    def look_up(self, rows: Tensor, padding: int | None) -> Tensor:
        """Some rows of W_0 + ΔW, shape (…, columns); the row `padding` has no gradient, as in F.embedding."""
        base, change = look_up(rows, self.entry.tensor), self.change.rows(rows, self.core)
        if padding is not None and change.requires_grad:
            change = torch.where((rows == padding)[..., None], change.detach(), change)
        return base + change.to(base.dtype)

    def values(self, beside: Tensor | None = None) -> Tensor:
        """The tensor W_0 + ΔW; with a ΔW for each example, a vector for an operation on `beside`, shape (B, …, n)."""
        whole, core = _dense(self.entry.tensor), self.core
        every = torch.arange(self.change.matrix.rows, device=whole.device)
        if self.examples is None:
            return whole + self.change.rows(every, core).view(self.shape).to(whole.dtype)
        if whole.ndim != 1 or beside is None or beside.ndim < 3 or len(beside) != self.examples:
            raise FedKSeedError(
                f"{self.entry.name} is used in a way that has no derivatives of single examples: they go with linear "
                "layers, embeddings, and vectors in products with activations (examples, …) or layer_norm"
            )
        change = self.change.rows(every[None], core).view(len(core), -1)
        return (whole + change.to(whole.dtype)).view(len(core), *[1] * (beside.ndim - 2), -1)


class TensorChange(ABC):
    """The change ΔW of one tensor, as operations on a layer's input and output.

    Each takes one matrix C, or B of them for the B examples of a batch, shape (B, …).
    """

    def __init__(self, matrix: Matrix, device: torch.device) -> None:
        self.matrix, self.device = matrix, device

    @abstractmethod
    def core(self, c: Tensor) -> Tensor:
        """The tensor's own matrix C from all scaled coefficients, or M itself; on the tensor's device as they are."""

    @abstractmethod
    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        """The sum y + ΔW x, or y + ΔWᵀ x if `turned`; y may be overwritten where no gradient is wanted."""

    @abstractmethod
    def rows(self, rows: Tensor, core: Tensor) -> Tensor:
        """Some rows of ΔW, float32, shape (…, columns)."""


class LowRankChange(TensorChange):
    """ΔW = U C Vᵀ."""

    def __init__(self, factor: Factor, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(factor, device)
        self.factor = factor
        self.left, self.right = (part.to(dtype) for part in held(factor, device))  # whole numbers to 127: exact

    def core(self, c: Tensor) -> Tensor:
        return c[..., self.factor.directions].view(*c.shape[:-1], *self.factor.ranks)

    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        into, out = (self.left, self.right) if turned else (self.right, self.left)
        rows = x.flatten(0, -2) if core.ndim == 2 else x.reshape(len(core), -1, x.shape[-1])
        inner = ((rows @ into).float() @ (core if turned else core.mT)).to(x.dtype).flatten(0, -2)
        flat = y.reshape(-1, len(out))
        if torch.is_grad_enabled():
            return torch.addmm(flat, inner, out.T).view(y.shape)
        return flat.addmm_(inner, out.T).view(y.shape)

    def rows(self, rows: Tensor, core: Tensor) -> Tensor:
        return (self.left[rows].float() @ core) @ self.right.T.float()


class TiledChange(TensorChange):
    """ΔW[x, y] = s_u[x] s_v[y] M[x mod m, y mod m]."""

    def __init__(self, pool: Pool, number: int, matrix: Matrix, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(matrix, device)
        self.m = math.isqrt(pool.size)
        signs = separable_signs(pool, number, range(matrix.rows), matrix, device)
        self.s_u, self.s_v = (part.to(dtype) for part in signs)

    def core(self, c: Tensor) -> Tensor:
        return c

    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        into, out = (self.s_u, self.s_v) if turned else (self.s_v, self.s_u)
        shape = y.shape
        if core.ndim == 3:
            x, y = (t.reshape(len(core), -1, t.shape[-1]) for t in (x, y))
        folded = self._tiles(x * into).sum(-2)
        inner = (folded.float() @ (core if turned else core.mT)).to(x.dtype)
        if len(out) % self.m:
            repeated = inner.repeat(*[1] * (inner.ndim - 1), -(-len(out) // self.m))[..., : len(out)]
            return torch.addcmul(y, repeated, out).view(shape)
        tiles = y.reshape(*y.shape[:-1], -1, self.m)
        addcmul = tiles.addcmul if torch.is_grad_enabled() else tiles.addcmul_
        return addcmul(inner[..., None, :], out.view(-1, self.m)).view(shape)

    def rows(self, rows: Tensor, core: Tensor) -> Tensor:
        every, places = torch.arange(self.matrix.columns, device=self.device) % self.m, rows % self.m
        picked = core[places] if core.ndim == 2 else core[torch.arange(len(core), device=self.device)[:, None], places]
        return picked[..., every] * self.s_u[rows][..., None].float() * self.s_v.float()

    def _tiles(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self.m
        padded = functional.pad(x, (0, missing)) if missing else x
        return padded.view(*x.shape[:-1], -1, self.m)


def _change(pool: Pool, entry: TensorEntry) -> TensorChange | None:
    """The change of one tensor; None: no direction changes it."""
    matrix, tensor = pool.matrix(entry.number), entry.tensor
    if matrix is None:
        return None
    if isinstance(matrix, Factor):
        return LowRankChange(matrix, tensor.device, tensor.dtype)
    return TiledChange(pool, entry.number, matrix, tensor.device, tensor.dtype)


def _scales(pool: Pool) -> Tensor:
    """The product of both scales for each direction, shape (K,)."""
    scales = np.zeros(pool.size, np.float32)
    for factor in (pool.tensors or {}).values():
        if isinstance(factor, Factor):
            scales[factor.directions] = (factor.left_scale[:, None] * factor.right_scale).reshape(-1)
    return torch.from_numpy(scales)


Question: TypeAlias = tuple[FactoredSource, Tensor, bool]  # of which layer, its input, and whether it is turned


def _products(questions: Sequence[Question]) -> Sequence[Tensor | None]:
    """The outputs W_0 x of the points that wait for them, from one batch; None: each is to make its own."""
    if not questions:
        return []
    source, x, turned = questions[0]
    alone = source.change.matrix.rows > WIDE * source.change.matrix.columns
    if alone or any(other is not source or more.shape != x.shape for other, more, _ in questions):
        return [None] * len(questions)
    return _product(torch.cat([x for _, x, _ in questions]), source, turned).split(len(x))


def _product(x: Tensor, source: FactoredSource, turned: bool, bias: Tensor | None = None) -> Tensor:
    """The output W_0 x + b of a layer, or W_0ᵀ x + b."""
    if not turned:
        return linear(x, source.entry.tensor, bias)
    y = x @ _dense(source.entry.tensor)
    return y if bias is None else y + bias


def _dense(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, Lazy) else tensor
