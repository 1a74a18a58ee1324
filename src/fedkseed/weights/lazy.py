"""Tensors whose values are made when an operation asks for them, and dropped after it.

A model whose parameters are `Lazy` needs room for one operation's weights, not for all of them: a
linear layer gets its matrix some rows at a time, an embedding only the rows in use. Works at the
level of PyTorch's functions, so no module and no architecture has code of its own.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..errors import FedKSeedError

TILE = 1 << 20  # weights of a matrix that are made at a time: 4 MiB of float32, within the caches
PART = 64  # on GPUs, where each tile costs a launch of 0.1 ms: a tile has up to 1 / PART of all lazy weights


class TensorSource(Protocol):
    """The origin of a tensor's values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Fill each `out` of (start, out) with the out.numel() values from position `start` on.

        Positions count through the flattened tensor. Every part is a whole number of rows.
        """


class UsableWithoutValues(ABC):
    """A `TensorSource` whose tensor operations can use without its values."""

    @property
    @abstractmethod
    def examples(self) -> int | None:
        """The number of examples that each have a tensor of their own; None: all have the same."""

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None, turned: bool = False) -> Tensor:
        """The layer's output W x + b; or Wᵀ x + b, of a layer that keeps its matrix as (inputs, outputs)."""

    @abstractmethod
    def look_up(self, rows: Tensor, padding: int | None) -> Tensor:
        """Some rows of W, shape (…, columns); the row `padding` has no gradient, as in F.embedding."""

    @abstractmethod
    def values(self, beside: Tensor | None = None) -> Tensor:
        """All of W, with a gradient where one is wanted, for an operation on the activations `beside`."""


class Workspace:
    """Memory that the lazy tensors of one model share, one operation at a time.

    Attributes:
        before_operation: called before an operation begins to make its tensors.
        on_gradient: called with a tensor, the position and the gradient of each part of it; None: none is wanted.
        weights: the number of weights of all lazy tensors.
    """

    def __init__(self) -> None:
        self.before_operation: Callable[[], None] = lambda: None
        self.on_gradient: Callable[[Lazy, int, Tensor], None] | None = None
        self.weights = 0
        self._threads = threading.local()  # threads that only read a model do not share its memory

    def borrow(self, shape: Sequence[int], like: "Lazy") -> Tensor:
        """A tensor for short use: the next one that is borrowed overwrites its values."""
        count = torch.Size(shape).numel()
        memory: Tensor | None = getattr(self._threads, "memory", None)
        if memory is None or memory.numel() < count or memory.dtype != like.dtype or memory.device != like.device:
            self._threads.memory = memory = _empty((count,), like)
        return memory[:count].view(*shape)


def _empty(shape: Sequence[int], like: "Lazy") -> Tensor:
    """Memory that may be written to later, even outside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=like.dtype, device=like.device)


class Lazy(Tensor):
    """A tensor of which only shape, type and device exist.

    Args:
        source: its values.
        workspace: memory to make them in.
    """

    source: TensorSource
    workspace: Workspace
    _is_param = True  # `isinstance(lazy, nn.Parameter)` holds, so that modules take it as one

    @staticmethod
    def __new__(cls, source: TensorSource, workspace: Workspace) -> "Lazy":
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, source.shape, dtype=source.dtype, device=source.device)

    def __init__(self, source: TensorSource, workspace: Workspace) -> None:
        self.source, self.workspace = source, workspace
        workspace.weights += source.shape.numel()

    def whole(self) -> Tensor:
        """All values, in memory of their own."""
        out = _empty(self.shape, self)
        self.source.read([(0, out)])
        return out

    @property
    def recorded(self) -> bool:
        """Whether the tensor's gradient is wanted."""
        return self.workspace.on_gradient is not None and torch.is_grad_enabled()

    def values_for(self, beside: Tensor | None = None) -> Tensor:
        """All values, for an operation that may keep them, on the activations `beside`."""
        if isinstance(self.source, UsableWithoutValues):
            return self.source.values(beside)
        return self.recorded_values() if self.recorded else self.whole()

    def recorded_values(self, rows: list[int] | None = None) -> Tensor:
        """All values, or these rows, with a gradient."""
        values: Any = _Values.apply  # its stub has no types
        return values(_anchor(self), (self,), rows)

    @property
    def step(self) -> int:
        """The number of rows to make at a time."""
        tile = TILE if self.device.type == "cpu" else max(TILE, self.workspace.weights // PART)
        return max(1, tile // self.shape[1:].numel())

    def rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last`, without the last, in the workspace: valid until the next operation."""
        out = self.workspace.borrow((last - first, *self.shape[1:]), self)
        self.source.read([(first * self.shape[1:].numel(), out)])
        return out

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """All rows of a matrix, a tile at a time, each with its first row and the row after its last."""
        for first in range(0, self.shape[0], self.step):
            last = min(first + self.step, self.shape[0])
            yield first, last, self.rows(first, last)

    def some(self, rows: Sequence[int]) -> Tensor:
        """These rows, in the workspace."""
        table, width = self.workspace.borrow((len(rows), self.shape[1]), self), self.shape[1]
        self.source.read([(row * width, out) for row, out in zip(rows, table, strict=True)])
        return table

    def __repr__(self, **_: Any) -> str:
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype}, source={type(self.source).__name__})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in WITHOUT_READING:
            name = getattr(func, "__name__", str(func))
            writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.startswith("__"))
            if (writes and args and isinstance(args[0], Lazy)) or isinstance(kwargs.get("out"), Lazy):
                raise FedKSeedError(
                    f"{name} would write to weights that exist only while they are used: "
                    "set [model] mode = 'materialized' (and storage = 'dense') in the recipe, or mode='materialized' "
                    "of hold(); of an adapter's model, call fedkseed.weights.lazy.densify(model) first"
                )
            lazy = next(_lazies((*args, *kwargs.values())))
            if isinstance(lazy.source, UsableWithoutValues) and func in BY_SOURCE:
                # before the guard below, which would hold for all points of a step: they change places inside
                return BY_SOURCE[func](*args, **kwargs)
            lazy.workspace.before_operation()
        with torch._C.DisableTorchFunctionSubclass():
            if func in WITHOUT_READING:
                return func(*args, **kwargs)
            if func in (functional.linear, functional.embedding):
                return BY_SOURCE[func](*args, **kwargs)
            # Any other function gets a tensor that lives as long as it is used: its result may be a view of it.
            beside = next((value for value in args if type(value) is Tensor), None) if func in ELEMENTWISE else None
            return func(*_with_values(args, beside), **_with_values(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle calls from C++, which do not pass `__torch_function__`."""
        if func is torch.ops.aten.detach.default:  # what isinstance(…, Parameter) bookkeeping asks for
            return args[0]
        if func._schema.is_mutable:
            raise FedKSeedError(f"{func} would write to weights that exist only while they are used")
        return func(*_with_values(args), **_with_values(kwargs or {}))


def densify(model: nn.Module) -> None:
    """Give a model real tensors in place of its lazy ones, tied ones once; it then holds all its weights."""
    dense = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, Lazy):
                if id(parameter) not in dense:
                    dense[id(parameter)] = nn.Parameter(parameter.whole(), requires_grad=False)
                setattr(module, name, dense[id(parameter)])


# Attributes and functions that need no values of any lazy tensor.
ATTRIBUTES = """shape dtype device layout ndim itemsize nbytes grad grad_fn requires_grad is_leaf is_cpu is_cuda is_mps
is_xpu is_meta is_quantized is_sparse is_mkldnn is_nested"""
METHODS = """size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex
is_inference get_device storage_offset __len__ requires_grad_ __repr__ __hash__"""
WITHOUT_READING = {
    *(getattr(Tensor, name).__get__ for name in ATTRIBUTES.split()),
    *(getattr(Tensor, name) for name in METHODS.split()),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 — the names of F.linear
    """The linear layer x Wᵀ + b with some rows of W at a time."""
    x, bias = input, _with_values(bias, input)
    if bias is not None and bias.ndim > 1:  # one for each example
        return linear(x, weight) + bias
    if not isinstance(weight, Lazy):
        return functional.linear(x, weight, bias)
    if isinstance(weight.source, UsableWithoutValues):
        return weight.source.linear(x, bias)
    if weight.ndim != 2 or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight.values_for(), bias)  # may live on, in autocast's cache
    if torch.is_grad_enabled() and (weight.recorded or x.requires_grad or (bias is not None and bias.requires_grad)):
        apply: Any = _Linear.apply  # its stub has no types
        return apply(x, bias, _anchor(weight), (weight,))
    return _by_rows(x, weight, bias)


def _by_rows(x: Tensor, weight: Lazy, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape
    if rows <= weight.step:
        return functional.linear(x, weight.rows(0, rows), bias)
    flat, out = x.reshape(-1, columns), x.new_empty(*x.shape[:-1], rows)
    for first, last, tile in weight.tiles():
        part, place = tile.t(), out.view(-1, rows)[:, first:last]
        if bias is None:
            torch.mm(flat, part, out=place)
        else:
            torch.addmm(bias[first:last], flat, part, out=place)
    return out


class _Linear(torch.autograd.Function):
    """A linear layer whose pass back makes the rows of W again, and drops their gradients when they are used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, weight: tuple[Lazy]) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(*([] if anchor is None else [x]))
        return _by_rows(x, weight[0], bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] — decorated
        (weight,), (by_x, by_bias, *_) = ctx.weight, ctx.needs_input_grad
        rows, columns, total = gradient.reshape(-1, gradient.shape[-1]), weight.shape[1], None
        for x in ctx.saved_tensors:  # none where no gradient by the weights is wanted
            for k, part in enumerate(rows.split(weight.step, 1)):
                gradient_part = part.t() @ x.reshape(-1, columns)
                weight.workspace.on_gradient(weight, k * weight.step * columns, gradient_part)
        for first, last, tile in weight.tiles() if by_x else ():
            part = rows[:, first:last] @ tile
            total = part if total is None else total.float().add_(part)  # 16-bit parts are added in float32
        by_inputs = None if total is None else total.to(gradient.dtype).view(*gradient.shape[:-1], -1)
        return by_inputs, rows.sum(0) if by_bias else None, None, None


class _Values(torch.autograd.Function):
    """All values of a lazy tensor, or these rows of a matrix, with a gradient that is used and dropped."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lazy: tuple[Lazy], rows: list[int] | None) -> Tensor:
        ctx.lazy, ctx.rows = lazy, rows
        return lazy[0].whole() if rows is None else lazy[0].some(rows).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] — decorated
        (lazy,), whole = ctx.lazy, gradient.contiguous()
        for row, part in [(0, whole)] if ctx.rows is None else zip(ctx.rows, whole, strict=True):
            lazy.workspace.on_gradient(lazy, row * part.numel(), part)
        return None, None, None


def _anchor(lazy: Lazy) -> Tensor | None:
    """A number by which the results of an operation on a lazy tensor depend on it; None: no gradient is wanted."""
    return torch.zeros((), requires_grad=True) if lazy.recorded else None


def addmm(bias: Tensor, x: Tensor, weight: Tensor, **more: Any) -> Tensor:
    """The sum b + x W for inputs of shape (examples · tokens, n): the linear layer of GPT-2 (transformers' Conv1D)."""
    if more or not (isinstance(weight, Lazy) and isinstance(weight.source, UsableWithoutValues)):
        return torch.addmm(_with_values(bias), _with_values(x), _with_values(weight), **more)
    y = weight.source.linear(x, None, turned=True)
    by_example = y.view(weight.source.examples or 1, -1, y.shape[-1])
    return (by_example + _with_values(bias, by_example)).view(y.shape)


def layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:  # noqa: A002
    """Normalised activations times a vector, plus one; either may be another one for each example."""
    times, plus = _with_values(weight, input), _with_values(bias, input)
    if all(vector is None or vector.ndim <= len(normalized_shape) for vector in (times, plus)):
        return functional.layer_norm(input, normalized_shape, times, plus, eps)
    y = functional.layer_norm(input, normalized_shape, None, None, eps)
    y = y if times is None else y * times
    return y if plus is None else y + plus


def look_up(input: Tensor, weight: Tensor, padding_idx: Any = None, *more: Any, **named: Any) -> Tensor:  # noqa: A002
    """Rows of an embedding table; each row that occurs is made once."""
    if isinstance(weight, Lazy) and isinstance(weight.source, UsableWithoutValues):
        return weight.source.look_up(input, padding_idx)
    max_norm = more[0] if more else named.get("max_norm")
    if not isinstance(weight, Lazy) or max_norm is not None:
        return functional.embedding(input, _with_values(weight), padding_idx, *more, **named)
    used, places = torch.unique(input, return_inverse=True)
    rows = used.tolist()
    if not weight.recorded:
        return weight.some(rows)[places]
    padding = rows.index(padding_idx) if padding_idx in rows else None
    return functional.embedding(places, weight.recorded_values(rows), padding, *more, **named)


def _lazies(values: Any) -> Iterator[Lazy]:
    for value in values:
        if isinstance(value, Lazy):
            yield value
        elif isinstance(value, list | tuple):
            yield from _lazies(value)


def _with_values(value: Any, beside: Tensor | None = None) -> Any:
    """The same arguments with real tensors in place of lazy ones, for an operation on the activations `beside`."""
    if isinstance(value, Lazy):
        return value.values_for(beside)
    if isinstance(value, list | tuple):
        return type(value)(_with_values(item, beside) for item in value)
    if isinstance(value, dict):
        return {key: _with_values(item, beside) for key, item in value.items()}
    return value


# Functions that need no values of a tensor whose source is `UsableWithoutValues`.
BY_SOURCE: dict[Any, Callable[..., Tensor]] = {functional.linear: linear, functional.embedding: look_up}
BY_SOURCE |= {functional.layer_norm: layer_norm, torch.addmm: addmm}
# Functions of a vector and activations, in which each example can have a vector of its own.
ELEMENTWISE = {Tensor.__mul__, Tensor.__rmul__, Tensor.__add__, Tensor.__radd__, Tensor.mul, Tensor.add}
ELEMENTWISE |= {torch.mul, torch.add}
