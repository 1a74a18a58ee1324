"""A model as a function of K numbers: w(c) = w_0 + Σ_j c_j z_j.

`Layout` names the tensors and fixes their order; `Streamed`, `Materialized` and `InPlace` are three
ways to hold w(c), with the same methods. Works for any PyTorch module: no code per architecture.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray
from torch import Tensor, nn

from .directions import Pool
from .directions.operations import Piece, Sum, combine, project_pieces
from .directions.pool import TRANSFORMED
from .errors import FedKSeedError
from .lazy import TILE, Lazy, Workspace

NOTHING = np.empty(0, np.uint32), np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the layout."""

    number: int  # place in the sorted order of all names: the `tensor` of its directions
    name: str
    tensor: Tensor  # a `Lazy` one in a quantised model
    tuned: bool
    places: tuple[tuple[nn.Module, str], ...]  # the modules that own it, and what they call it


class Layout:
    """A module's parameters, sorted by name, tied ones once, numbered from 0.

    Tensors that are not tuned keep their numbers, so a party that tunes a part of the model moves
    that part along the same directions as a party that tunes all of it.

    Args:
        model: any module.
        tuned: shell patterns of parameter names (`*`, `model.layers.*`, `*.mlp.*`).

    Raises:
        FedKSeedError: nothing is tuned, a pattern fits nothing, or two parameters share only a
            part of their memory.
    """

    def __init__(self, model: nn.Module, tuned: Sequence[str] = ("*",)) -> None:
        named: dict[str, Tensor] = {}
        owners: dict[str, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                if tensor.numel():
                    full = f"{path}.{name}" if path else name
                    named[full], owners[full] = tensor, (module, name)
        for name, tensor in named.items():
            if not isinstance(tensor, Lazy) and not tensor.is_contiguous():
                raise FedKSeedError(f"the parameter {name} is a strided view; give it memory of its own: .contiguous()")
        first: dict[tuple[int, int], str] = {}  # memory, from where to where -> smallest name
        for name in sorted(named):
            first.setdefault(_memory(named[name]), name)
        aliases = {name: first[_memory(tensor)] for name, tensor in named.items()}
        for pattern in tuned:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise FedKSeedError(
                    f"no parameter's name fits the pattern {pattern!r}; names look like {next(iter(named), '—')!r}"
                )
        chosen = {aliases[name] for name in named if any(fnmatchcase(name, pattern) for pattern in tuned)}
        names = sorted(first.values())
        places = {name: tuple({owners[a]: None for a in sorted(named) if aliases[a] == name}) for name in names}
        self.entries = [
            Entry(k, name, _data(named[name]), name in chosen, places[name]) for k, name in enumerate(names)
        ]
        self.tuned = [entry for entry in self.entries if entry.tuned]
        if not self.tuned:
            raise FedKSeedError("the model has no tuned tensors; give patterns of parameter names, or '*' for all")
        if any(end > start for (_, end), (start, _) in pairwise(sorted(first))):
            raise FedKSeedError("some parameters are overlapping views of one memory; give each its own")

    @property
    def size(self) -> int:
        """d, the number of tuned weights."""
        return sum(entry.tensor.numel() for entry in self.tuned)

    def digest(self) -> bytes:
        """`digest` of the tensors as they are now."""
        return digest(self.entries)


def digest(entries: Sequence[Entry]) -> bytes:
    """SHA-256 over parameters: names, types, shapes and the weights' bits, in layout order.

    A hash of one hash a tensor, so that tensors can be hashed side by side.
    """

    def of_tensor(entry: Entry) -> str:
        t, bits = entry.tensor, hashlib.sha256()
        for part in _parts(t):
            bits.update(part.view(torch.uint8).numpy().data)
        return f"{entry.name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} {bits.hexdigest()}\n"

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        # Lazy ones in this thread: kernels have threads of their own.
        lines = [None if isinstance(e.tensor, Lazy) else threads.submit(of_tensor, e) for e in entries]
        done = [of_tensor(e) if line is None else line.result() for e, line in zip(entries, lines, strict=True)]
    return hashlib.sha256("".join(done).encode()).digest()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """All weights of a tensor on the CPU, flat; a lazy one some rows at a time."""
    if not isinstance(tensor, Lazy):
        yield tensor.detach().cpu().contiguous().view(-1)
        return
    if not tensor.ndim:
        yield tensor.whole().cpu().view(-1)
        return
    rows, step = tensor.shape[0], max(1, TILE // tensor.shape[1:].numel())
    for first in range(0, rows, step):
        yield tensor.lent(first, min(first + step, rows)).cpu().view(-1)


def _data(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, Lazy) else tensor.data


def _memory(tensor: Tensor) -> tuple[int, int]:
    if isinstance(tensor, Lazy):
        return id(tensor), id(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Weights(ABC):
    """The weights w of one model: whoever runs the model sees them.

    Args:
        layout: the model's tensors. They must hold w_0 now, and belong to this object from now on.
        pool: the directions.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        self.layout, self.pool = layout, pool
        self.base_digest = layout.digest()

    @property
    @abstractmethod
    def passes(self) -> float:
        """How many times all tuned weights were made."""

    @abstractmethod
    def shift(self, direction: int, eps: float) -> None:
        """The model becomes w + ε z_j; w stays."""

    @abstractmethod
    def move(self, direction: int, step: float) -> None:
        """w ← w + step z_j; the model is stale until the next `shift` or `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """The model becomes w."""

    def both(self, direction: int, eps: float, loss: Callable[[], float]) -> tuple[float, float]:
        """The loss at w + ε z_j and at w − ε z_j; the model is stale afterwards."""
        self.shift(direction, eps)
        above = loss()
        self.shift(direction, -eps)
        return above, loss()

    def digest(self) -> bytes:
        """`digest` of the model as it is now."""
        return self.layout.digest()


class Pooled(Weights):
    """w = w(c): `shift` goes to w(c + ε e_j), `move` adds to c_j in float32.

    Attributes:
        c: the coefficients, float32, shape (K,).
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.c = np.zeros(pool.size, np.float32)

    @abstractmethod
    def load(self, c: NDArray[np.floating]) -> None:
        """Set c; the model becomes w(c)."""

    @abstractmethod
    def restore(self) -> None:
        """The model becomes w_0, bit for bit, and c zero."""

    def gradient(self, loss: Callable[[], Tensor]) -> tuple[float, NDArray[np.float64]]:
        """L(w(c)) and its K derivatives Zᵀ∇L by c, shape (K,), from one pass backward.

        The gradient of each tensor is projected on the directions as soon as it is whole, and let go of. The
        weights that the loss depends on are held in its type until the pass is over, streamed ones, too.

        Raises:
            FedKSeedError: the loss does not depend on the tuned weights.
        """
        slope = np.zeros(self.pool.size)

        def take(number: int, tensor: Tensor) -> None:
            if tensor.grad is not None:
                slope[:] += project_pieces([(number, 0, tensor.grad.float().contiguous())], self.pool)
                tensor.grad = None

        with self._leaves(take), torch.enable_grad():
            value = loss()
            if not value.requires_grad:
                raise FedKSeedError(
                    "the loss does not depend on the tuned weights; set [model] tuned to weights that it depends on"
                )
            if bool(torch.isfinite(value.detach())):
                value.backward()
        return float(value.detach()), slope

    @abstractmethod
    def _leaves(self, take: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """While it lasts, tuned tensors have gradients: `take` is called with a tensor's number and the tensor."""

    def _coefficients(self, c: NDArray[np.floating]) -> NDArray[np.float32]:
        """A checked copy of a whole coefficient vector: nothing changes if it is refused."""
        self.pool.dense(c)
        return np.array(c, dtype=np.float32).reshape(-1)

    def _shifted(self, direction: int, eps: float) -> Sum:
        """Σ (c + ε e_j) z."""
        c = self.c.copy()
        c[direction] += np.float32(eps)
        return Sum(self.pool, *self.pool.dense(c))


class Streamed(Pooled):
    """w(c) made from w_0 when an operation asks for it, and dropped after it: memory of inference.

    Needs room for w_0, 4 MiB of a matrix and the activations. w_0 is the model's own memory, and may
    be a memory-mapped file or quantised. The two points of a step go operation by operation side by
    side, so that w_0 is read once. Exact, no drift; no weight is ever written.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sum = Sum(pool, *NOTHING)
        self.made = 0  # weights
        self._installed = False
        self._workspace = Workspace()
        self._lazy = [Lazy(Moved(entry, self), self._workspace) for entry in layout.tuned]
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
        self.sum = Sum(self.pool, *self.pool.dense(self.c))

    def restore(self) -> None:
        self.c[:] = 0
        self._installed = False
        for places, originals in zip(self._places, self._original, strict=True):
            for (module, name), original in zip(places, originals, strict=True):
                setattr(module, name, original)

    def both(self, direction: int, eps: float, loss: Callable[[], float]) -> tuple[float, float]:
        self._install()
        sums = [self._shifted(direction, sign * eps) for sign in (1, -1)]
        # Two calls of `loss` in one thread that change places before each operation on lazy tensors. The
        # last operation makes the logits, which are large: no place to change after it, so they are never
        # there twice.
        points, here = [greenlet(loss), greenlet(loss)], getcurrent()

        def turn() -> None:
            if any(torch.is_autocast_enabled(entry.tensor.device.type) for entry in self.layout.tuned[:1]):
                raise FedKSeedError("a loss can't use autocast while weights are streamed: hold the model in the type")
            here.switch()

        self._workspace.turn = turn
        values: list[float] = [0.0, 0.0]
        with torch.inference_mode():  # outside both, so that entering and leaving it in turns leaves it alone
            try:
                while not all(point.dead for point in points):
                    for k, point in enumerate(points):
                        if not point.dead:
                            self.sum = sums[k]
                            values[k] = point.switch()
            finally:
                self._workspace.turn = lambda: None
                for point in points:
                    if not point.dead:
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


class Moved:
    """A `Source`: the tuned values of one tensor."""

    def __init__(self, entry: Entry, weights: Streamed) -> None:
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


class Written(Pooled):
    """w(c) written into the model's own memory; `base` keeps w_0."""

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        if any(isinstance(entry.tensor, Lazy) for entry in layout.tuned):
            raise FedKSeedError("a quantised model can't be written to; hold it in mode 'streamed'")
        self.base = [entry.tensor.clone() for entry in layout.tuned]
        self._passes = 0

    @property
    def passes(self) -> float:
        return self._passes

    def restore(self) -> None:
        self.c[:] = 0
        for entry, base in zip(self.layout.tuned, self.base, strict=True):
            entry.tensor.copy_(base)

    @contextmanager
    def _leaves(self, take: Callable[[int, Tensor], None]) -> Iterator[None]:
        own = {
            id(parameter): (parameter, entry.number)
            for entry in self.layout.tuned
            for module, name in entry.places
            if (parameter := module._parameters[name]) is not None
        }
        hooks = []
        try:
            for parameter, number in own.values():
                parameter.requires_grad_(True)
                hooks.append(parameter.register_post_accumulate_grad_hook(partial(take, number)))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, _ in own.values():
                parameter.requires_grad_(False)
                parameter.grad = None

    def _write(self, total: Sum, addends: list[Tensor] | None = None) -> None:
        pieces = [
            Piece(entry.number, base, entry.tensor, addend=None if addends is None else addends[k])
            for k, (entry, base) in enumerate(zip(self.layout.tuned, self.base, strict=True))
        ]
        total.combine(pieces)
        self._passes += 1


class Materialized(Written):
    """w(c) written afresh from w_0 for every point: exact, no drift, memory w_0 and w.

    One pass costs O(d log K) or O(d) for the transformed families, O(K d) for the others.
    """

    def load(self, c: NDArray[np.floating]) -> None:
        self.c = self._coefficients(c)
        self.settle()

    def shift(self, direction: int, eps: float) -> None:
        self._write(self._shifted(direction, eps))

    def move(self, direction: int, step: float) -> None:
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        self._write(Sum(self.pool, *self.pool.dense(self.c)))


class InPlace(Written):
    """w(c) from a running float32 sum s = Σ_j c_j z_j: O(d) a step in every family.

    Perturbations are added to s on the way to the model and never stored, so they leave no
    rounding behind (editing 16-bit weights and undoing the edit drifts by more than the updates);
    only true steps change s. They round s in an order of their own, some 1e-8 away from the sum in
    ascending j; `settle` makes s from c afresh, so what a client ends with is w(c) bit for bit. It
    costs what a sync costs, O(K d). Memory: w_0, w and 4 bytes a weight for s.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sums = [torch.zeros_like(base, dtype=torch.float32) for base in self.base]

    def load(self, c: NDArray[np.floating]) -> None:
        self.c = self._coefficients(c)
        self.settle()

    def shift(self, direction: int, eps: float) -> None:
        self._write(Sum(self.pool, *self.pool.select([direction], [eps])), self.sums)

    def move(self, direction: int, step: float) -> None:
        self._add(*self.pool.select([direction], [step]))
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        for total in self.sums:
            total.zero_()
        self._add(*self.pool.dense(self.c))
        self._write(Sum(self.pool, *NOTHING), self.sums)

    def restore(self) -> None:
        super().restore()
        for total in self.sums:
            total.zero_()

    def _add(self, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> None:
        tuned = zip(self.layout.tuned, self.sums, strict=True)
        combine([Piece(entry.number, s, s) for entry, s in tuned], self.pool, directions, coefficients)


MODES = {"streamed": Streamed, "materialized": Materialized, "in place": InPlace}


def hold(model: nn.Module, pool: Pool, tuned: Sequence[str] = ("*",), mode: str = "auto") -> Pooled:
    """Take over a model's weights; `auto` streams them where making them is one cheap pass."""
    layout = Layout(model, tuned)
    if mode == "auto":
        quantised = any(isinstance(entry.tensor, Lazy) for entry in layout.tuned)
        mode = "streamed" if pool.family in TRANSFORMED or quantised else "in place"
    if mode not in MODES:
        raise FedKSeedError(f"no mode is called {mode!r}; choose auto, {' or '.join(MODES)}")
    return MODES[mode](layout, pool)
