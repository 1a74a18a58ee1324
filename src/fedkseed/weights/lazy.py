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
        make_leaf: makes a tensor that has a gradient, for operations that are recorded; None: no gradient is wanted.
        weights: the number of weights of all lazy tensors.
    """

    def __init__(self) -> None:
        self.before_operation: Callable[[], None] = lambda: None
        self.make_leaf: Callable[[Lazy], Tensor] | None = None
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
        return self.workspace.make_leaf is not None and torch.is_grad_enabled()

    def values_for(self, beside: Tensor | None = None) -> Tensor:
        """All values, for an operation that may keep them, on the activations `beside`."""
        if isinstance(self.source, UsableWithoutValues):
            return self.source.values(beside)
        make_leaf = self.workspace.make_leaf
        return make_leaf(self) if make_leaf is not None and torch.is_grad_enabled() else self.whole()

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
    backward = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if backward or weight.recorded or weight.ndim != 2 or torch.is_autocast_enabled(x.device.type):
        # may live on, for the backward pass or in autocast's cache
        return functional.linear(x, weight.values_for(), bias)
    rows, columns = weight.shape
    step = weight.step
    if rows <= step:
        return functional.linear(x, weight.rows(0, rows), bias)
    flat, out = x.reshape(-1, columns), x.new_empty(*x.shape[:-1], rows)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part, place = weight.rows(first, last).t(), out.view(-1, rows)[:, first:last]
        if bias is None:
            torch.mm(flat, part, out=place)
        else:
            torch.addmm(bias[first:last], flat, part, out=place)
    return out


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
    if not isinstance(weight, Lazy) or max_norm is not None or weight.recorded:
        return functional.embedding(input, _with_values(weight), padding_idx, *more, **named)
    used, places = torch.unique(input, return_inverse=True)
    table = weight.workspace.borrow((used.numel(), weight.shape[1]), weight)
    weight.source.read([(row * weight.shape[1], out) for row, out in zip(used.tolist(), table, strict=True)])
    return table[places]


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
