"""Weights w(c) that are never made: a layer adds U (C (Vᵀ x)) to its output W_0 x. For factored families.

A step costs what inference costs, and a derivative by c a pass through activations, with no gradient of a weight.
Losses are those of the weights of the definition up to rounding; a digest, and the model that is kept in the end, are
made by the definition, as `Streamed` does.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

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
from .lazy import Lazy, UsableWithoutValues, linear, look_up
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
            raise FedKSeedError(f"mode 'factored' is for factored families of directions, not for {self.pool.family}")
        scales, self._sources = np.zeros(self.pool.size, np.float32), dict[int, FactoredSource]()
        for k, entry in enumerate(layout.tuned):
            matrix = self.pool.matrix(entry.number)
            if matrix is None:  # no direction changes it: the model keeps its own, and no step makes a copy
                self._places[k], self._original[k] = (), []
                continue
            if isinstance(matrix, Factor):
                source: FactoredSource = LowRankSource(entry, self, matrix)
                scales[matrix.directions] = (matrix.left_scale[:, None] * matrix.right_scale).reshape(-1)
            else:
                source = TiledSource(entry, self, matrix)
            self._sources[entry.number], self._lazy[k] = source, Lazy(source, self._workspace)
        self._scales = torch.from_numpy(scales)  # the product of both for each direction
        self.cores: dict[int, Tensor] = {}

    def _use(self, c: NDArray[np.float32], total: DirectionSum) -> None:
        self._install()
        self.sum, self.cores = total, self._cores(torch.from_numpy(c))

    def points(self, coefficients: Sequence[NDArray[np.float32]], loss: Callable[[], Value]) -> list[Value]:
        cores = [self._cores(torch.from_numpy(c)) for c in coefficients]
        with self._own_cores():
            return self.side_by_side.run(loss, cores, partial(setattr, self, "cores"), _products)

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[float, NDArray[np.float64]]:
        """`Pooled.gradient`, by a pass back through activations, with no gradient of a weight."""
        c = torch.from_numpy(self.c.copy()).requires_grad_(True)
        with self._own_cores(), torch.enable_grad():
            self.cores = self._cores(c)
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
        with self._own_cores(), torch.enable_grad():
            self.cores = self._cores(c)
            values = losses()
            if not values.requires_grad:
                raise FedKSeedError(NO_GRADIENT)
            if values.shape != (count,) or not bool(torch.isfinite(values.detach()).all()):
                raise FedKSeedError(f"expected {count} finite losses, got {values.detach().tolist()}")
            values.sum().backward()
        slopes = np.zeros(c.shape) if c.grad is None else c.grad.numpy().astype(np.float64)
        return values.detach().cpu().double().numpy(), slopes

    @contextmanager
    def _own_cores(self) -> Iterator[None]:
        """Let other matrices C be used, of other points or with a graph back to c."""
        self._install()
        before = self.cores
        try:
            yield
        finally:
            self.cores = before

    def _cores(self, c: Tensor) -> dict[int, Tensor]:
        """The matrices C of all tensors, or the one M, on the devices of their tensors; c is (K,) or (B, K)."""
        if self.pool.informed:
            table = (transform(c) if self.pool.family == "mixed" else c) * self._scales
        else:
            m = math.isqrt(self.pool.size)
            table = transform(transform(c.view(*c.shape[:-1], m, m)).mT).mT.contiguous()
        # one copy a device and point: a model has hundreds of tensors, and each copy to a GPU would be waited for
        tables = {device: table.to(device) for device in {source.device for source in self._sources.values()}}
        return {number: source.core_of(tables[source.device]) for number, source in self._sources.items()}


class FactoredSource(TunedSource, UsableWithoutValues):
    """The source of one tensor's tuned values W_0 + ΔW; a subclass has the change ΔW.

    C is one matrix, or B of them for the B examples of a batch, shape (B, …).
    """

    weights: FactoredWeights

    def __init__(self, entry: TensorEntry, weights: FactoredWeights, matrix: Matrix) -> None:
        super().__init__(entry, weights)
        self.matrix = matrix

    @abstractmethod
    def core_of(self, c: Tensor) -> Tensor:
        """The tensor's own matrix C from all scaled coefficients, or M itself; on the tensor's device as they are."""

    @abstractmethod
    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        """The sum y + ΔW x, or y + ΔWᵀ x if `turned`; y may be overwritten where no gradient is wanted."""

    @abstractmethod
    def rows(self, rows: Tensor, core: Tensor) -> Tensor:
        """Some rows of ΔW, float32, shape (…, columns)."""

    @property
    def core(self) -> Tensor:
        """The matrix C at the point that is computed now; B of them where examples have coefficients of their own."""
        return self.weights.cores[self.entry.number]

    @property
    def examples(self) -> int | None:
        return len(self.core) if self.core.ndim == 3 else None

    def linear(self, x: Tensor, bias: Tensor | None, turned: bool = False) -> Tensor:
        examples = self.examples
        if examples is not None and not turned and (x.ndim < 3 or len(x) != examples):  # an expert's tokens, say
            raise FedKSeedError(
                f"{self.entry.name} gets inputs of shape {tuple(x.shape)}, which do not say which of {examples} "
                "examples each is of: derivatives of single examples need layers whose inputs are (examples, …)"
            )
        y = self.weights.side_by_side.ask((self, x, turned))  # W_0 x, made for all points of a step together
        if y is None:
            y = self.product(x, turned, bias)
        elif bias is not None:
            y = y.add_(bias)  # each point has a bias of its own
        return self.add(y, x, self.core, turned)

    def product(self, x: Tensor, turned: bool, bias: Tensor | None = None) -> Tensor:
        """The output W_0 x + b of a layer, or W_0ᵀ x + b if `turned`."""
        if not turned:
            return linear(x, self.entry.tensor, bias)
        y = x @ _dense(self.entry.tensor)
        return y if bias is None else y + bias

    def look_up(self, rows: Tensor, padding: int | None) -> Tensor:
        base, change = look_up(rows, self.entry.tensor), self.rows(rows, self.core)
        if padding is not None and change.requires_grad:
            change = torch.where((rows == padding)[..., None], change.detach(), change)
        return base + change.to(base.dtype)

    def values(self, beside: Tensor | None = None) -> Tensor:
        """The tensor W_0 + ΔW; with a ΔW for each example, a vector for an operation on `beside`, shape (B, …, n)."""
        whole, core = _dense(self.entry.tensor), self.core
        every = torch.arange(self.matrix.rows, device=whole.device)
        if self.examples is None:
            return whole + self.rows(every, core).view(self.shape).to(whole.dtype)
        if whole.ndim != 1 or beside is None or beside.ndim < 3 or len(beside) != self.examples:
            raise FedKSeedError(
                f"{self.entry.name} is used in a way that has no derivatives of single examples: they go with linear "
                "layers, embeddings, and vectors in products with activations (examples, …) or layer_norm"
            )
        change = self.rows(every[None], core).view(len(core), -1)
        return (whole + change.to(whole.dtype)).view(len(core), *[1] * (beside.ndim - 2), -1)


class LowRankSource(FactoredSource):
    """ΔW = U C Vᵀ."""

    def __init__(self, entry: TensorEntry, weights: FactoredWeights, factor: Factor) -> None:
        super().__init__(entry, weights, factor)
        self.factor = factor
        self.left, self.right = (part.to(self.dtype) for part in held(factor, self.device))  # whole, to 127: exact

    def core_of(self, c: Tensor) -> Tensor:
        return c[..., self.factor.directions].view(*c.shape[:-1], *self.factor.ranks)

    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        into, out = (self.left, self.right) if turned else (self.right, self.left)
        rows = x.flatten(0, -2) if core.ndim == 2 else x.reshape(len(core), -1, x.shape[-1])
        inner = ((rows @ into).float() @ (core if turned else core.mT)).to(x.dtype).flatten(0, -2)
        flat = y.reshape(-1, len(out))
        addmm = flat.addmm if torch.is_grad_enabled() else flat.addmm_
        return addmm(inner, out.T).view(y.shape)

    def rows(self, rows: Tensor, core: Tensor) -> Tensor:
        return (self.left[rows].float() @ core) @ self.right.T.float()


class TiledSource(FactoredSource):
    """ΔW[x, y] = s_u[x] s_v[y] M[x mod m, y mod m]."""

    def __init__(self, entry: TensorEntry, weights: FactoredWeights, matrix: Matrix) -> None:
        super().__init__(entry, weights, matrix)
        self.m = math.isqrt(weights.pool.size)
        signs = separable_signs(weights.pool, entry.number, range(matrix.rows), matrix, self.device)
        self.s_u, self.s_v = (part.to(self.dtype) for part in signs)

    def core_of(self, c: Tensor) -> Tensor:
        return c

    def add(self, y: Tensor, x: Tensor, core: Tensor, turned: bool = False) -> Tensor:
        into, out = (self.s_u, self.s_v) if turned else (self.s_v, self.s_u)
        shape = y.shape
        if core.ndim == 3:
            x, y = (t.reshape(len(core), -1, t.shape[-1]) for t in (x, y))
        signed = x * into
        if missing := -x.shape[-1] % self.m:
            signed = functional.pad(signed, (0, missing))
        folded = signed.unflatten(-1, (-1, self.m)).sum(-2)
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


def _products(questions: Sequence[tuple[FactoredSource, Tensor, bool]]) -> Sequence[Tensor | None]:
    """The outputs W_0 x of the points that wait for them, each asked for by (source, x, turned), from one batch.

    None: each is to make its own.
    """
    if not questions:
        return []
    source, x, turned = questions[0]
    alone = source.matrix.rows > WIDE * source.matrix.columns
    if alone or any(other is not source or more.shape != x.shape for other, more, _ in questions):
        return [None] * len(questions)
    return source.product(torch.cat([x for _, x, _ in questions]), turned).split(len(x))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, Lazy) else tensor
