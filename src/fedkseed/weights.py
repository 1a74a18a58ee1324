"""A model as a function of K numbers: w(c) = w_0 + Σ_j c_j z_j.

`Layout` names the tensors and fixes their order; `Materialized` and `InPlace` are two ways to hold
w(c), with the same methods. Works for any PyTorch module: no code per architecture.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .directions import Pool
from .directions.operations import Piece, combine
from .directions.pool import TRANSFORMED
from .errors import FedKSeedError

NOTHING = np.empty(0, np.uint32), np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the layout."""

    number: int  # place in the sorted order of all names: the `tensor` of its directions
    name: str
    tensor: Tensor
    tuned: bool


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
        named = {name: t for name, t in sorted(model.named_parameters(remove_duplicate=False)) if t.numel()}
        first: dict[tuple[int, int], str] = {}  # memory, from where to where -> smallest name
        for name, tensor in named.items():
            first.setdefault(_memory(tensor), name)
        aliases = {name: first[_memory(tensor)] for name, tensor in named.items()}
        for pattern in tuned:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise FedKSeedError(
                    f"no parameter's name fits the pattern {pattern!r}; names look like {next(iter(named), '—')!r}"
                )
        chosen = {aliases[name] for name in named if any(fnmatchcase(name, pattern) for pattern in tuned)}
        names = sorted(first.values())
        self.entries = [Entry(k, name, named[name].data, name in chosen) for k, name in enumerate(names)]
        self.tuned = [entry for entry in self.entries if entry.tuned]
        if not self.tuned:
            raise FedKSeedError("the model has no tuned tensors; give patterns of parameter names, or '*' for all")
        places = sorted(first)
        if any(end > start for (_, end), (start, _) in pairwise(places)):
            raise FedKSeedError("some parameters are overlapping views of one memory; give each its own")

    @property
    def size(self) -> int:
        """d, the number of tuned weights."""
        return sum(entry.tensor.numel() for entry in self.tuned)

    def digest(self) -> bytes:
        """SHA-256 over all parameters: names, types, shapes and the weights' bits, in layout order.

        A hash of one hash a tensor, so that tensors can be hashed side by side.
        """

        def of_tensor(entry: Entry) -> str:
            t = entry.tensor.detach().cpu().contiguous()
            bits = hashlib.sha256(t.view(-1).view(torch.uint8).numpy().data)
            return f"{entry.name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} {bits.hexdigest()}\n"

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return hashlib.sha256("".join(threads.map(of_tensor, self.entries)).encode()).digest()


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Weights(ABC):
    """w(c) of one model, written into the model itself; `base` keeps w_0.

    Args:
        layout: the model's tensors. They must hold w_0 now, and belong to this object from now on.
        pool: the directions.

    Attributes:
        c: the coefficients, float32, shape (K,).
        passes: how many times all tuned weights were written.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        self.layout, self.pool = layout, pool
        self.base_digest = layout.digest()
        self.base = [entry.tensor.clone() for entry in layout.tuned]
        self.c = np.zeros(pool.size, np.float32)
        self.passes = 0

    @abstractmethod
    def load(self, c: NDArray[np.floating]) -> None:
        """Set c; the model becomes w(c)."""

    @abstractmethod
    def shift(self, direction: int, eps: float) -> None:
        """The model becomes w(c + ε e_j); c stays."""

    @abstractmethod
    def move(self, direction: int, step: float) -> None:
        """c_j ← c_j + step in float32; the model is stale until the next `shift` or `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """The model becomes w(c)."""

    def restore(self) -> None:
        """The model becomes w_0, bit for bit, and c zero."""
        self.c[:] = 0
        for entry, base in zip(self.layout.tuned, self.base, strict=True):
            entry.tensor.copy_(base)

    def _write(
        self, directions: NDArray[np.uint32], coefficients: NDArray[np.float32], addends: list[Tensor] | None = None
    ) -> None:
        pieces = [
            Piece(entry.number, base, entry.tensor, addend=None if addends is None else addends[k])
            for k, (entry, base) in enumerate(zip(self.layout.tuned, self.base, strict=True))
        ]
        combine(pieces, self.pool, directions, coefficients)
        self.passes += 1


class Materialized(Weights):
    """w(c) written afresh from w_0 for every point: exact, no drift, memory w_0 and w.

    One pass costs O(d log K) or O(d) for the transformed families, O(K d) for the others.
    """

    def load(self, c: NDArray[np.floating]) -> None:
        sparse = self.pool.dense(c)
        self.c = np.array(c, dtype=np.float32).reshape(-1)
        self._write(*sparse)

    def shift(self, direction: int, eps: float) -> None:
        c = self.c.copy()
        c[direction] += np.float32(eps)
        self._write(*self.pool.dense(c))

    def move(self, direction: int, step: float) -> None:
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        self._write(*self.pool.dense(self.c))


class InPlace(Weights):
    """w(c) from a running float32 sum s = Σ_j c_j z_j: O(d) a step in every family.

    Perturbations are added to s on the way to the model and never stored, so they leave no
    rounding behind (editing 16-bit weights and undoing the edit drifts by more than the updates);
    only true steps change s. They round s in an order of their own, some 1e-8 away from the sum in
    ascending j; `settle` makes s from c afresh, so what a client ends with is w(c) bit for bit. It
    costs what a sync costs, O(K d). Memory: w_0, w and 4 bytes a weight for s.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        self.sums = [torch.zeros(base.shape, dtype=torch.float32) for base in self.base]

    def load(self, c: NDArray[np.floating]) -> None:
        self.pool.dense(c)  # refuse before anything changes
        self.c = np.array(c, dtype=np.float32).reshape(-1)
        self.settle()

    def shift(self, direction: int, eps: float) -> None:
        self._write(*self.pool.select([direction], [eps]), self.sums)

    def move(self, direction: int, step: float) -> None:
        self._add(*self.pool.select([direction], [step]))
        self.c[direction] += np.float32(step)

    def settle(self) -> None:
        for total in self.sums:
            total.zero_()
        self._add(*self.pool.dense(self.c))
        self._write(*NOTHING, self.sums)

    def restore(self) -> None:
        super().restore()
        for total in self.sums:
            total.zero_()

    def _add(self, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> None:
        tuned = zip(self.layout.tuned, self.sums, strict=True)
        combine([Piece(entry.number, s, s) for entry, s in tuned], self.pool, directions, coefficients)


MODES = {"materialized": Materialized, "in place": InPlace}


def hold(model: nn.Module, pool: Pool, tuned: Sequence[str] = ("*",), mode: str = "auto") -> Weights:
    """Take over a model's weights; `auto` makes them afresh where that is one cheap pass."""
    if mode == "auto":
        mode = "materialized" if pool.family in TRANSFORMED else "in place"
    if mode not in MODES:
        raise FedKSeedError(f"no mode is called {mode!r}; choose auto, {' or '.join(MODES)}")
    return MODES[mode](Layout(model, tuned), pool)
