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
from .free_memory import available
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
        addends = [self.addend(entry) for entry in tuned]
        self.sum.combine([Piece(tuned[k].number, tuned[k].tensor, tuned[k].tensor, 0, addends[k]) for k in dense])
        self._put_back(dense)

    def addend(self, entry: TensorEntry) -> Tensor | None:
        """Float32 numbers to add to a tensor beside `sum`."""
        return None

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

    def _use(self, c: NDArray[np.float32], total: DirectionSum) -> None:
        self._install()
        self.sum = total

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


class InPlace(Streamed):
    """Weights w(c) made from w_0 and a float32 sum s = Σ_j c_j z_j, which steps change in place: O(d) in every family.

    Needs room for 4 bytes a weight more than `Streamed`. Perturbations are added on the way to an operation and never
    stored, so they leave no rounding behind; only true steps change s. They round s in an order of their own, some 1e-8
    away from the sum in ascending j. After them s is made anew from c, O(K d), when the model is asked for next: so
    that w(c) is exact, and nothing is made for a model that is replaced before it is used.

    Where clients take turns they begin from the same c, and s is copied from one that is kept, as far as there is room.

    Attributes:
        sums: s of each tuned tensor.
        again: the number of weights that were summed again for want of room, although an earlier sum was the same.
    """

    def __init__(self, layout: Layout, pool: Pool) -> None:
        super().__init__(layout, pool)
        kinds = {"dtype": torch.float32, "device": layout.tuned[0].tensor.device}
        self.sums = {entry.number: torch.zeros(entry.tensor.shape, **kinds) for entry in layout.tuned}
        self.again = 0
        self._of, self._due = self.c.tobytes(), False  # the c that `sums` are of; whether steps have changed them
        self._begun, self._turns = b"", False  # the c that was loaded last; whether clients take turns
        self._kept: dict[int, Tensor] = {}  # sums of `_begun`

    def load(self, c: NDArray[np.floating]) -> None:
        super().load(c)
        begun = self.c.tobytes()
        if begun == self._begun and self._of != begun:
            lacking = [total.numel() for number, total in self.sums.items() if number not in self._kept]
            self.again += sum(lacking) if self._turns else 0
            self._turns = True
        elif begun != self._begun:
            self._begun, self._kept = begun, {}
        self._ready()
        if self._turns and not self._kept:
            for number, total in self.sums.items():
                if total.nbytes < available(str(total.device)) // 2:  # half of what is free stays so
                    self._kept[number] = total.clone()

    def settle(self) -> None:
        self._install()
        self.sum, self._due = DirectionSum(self.pool, *NO_TERMS), True

    def shift(self, direction: int, eps: float) -> None:
        self._install()
        self.sum = self._along(direction, eps)

    def both(self, direction: int, eps: float, loss: Callable[[], Value]) -> tuple[Value, Value]:
        self._install()
        sums = [self._along(direction, eps), self._along(direction, -eps)]
        above, below = self.side_by_side.run(loss, sums, partial(setattr, self, "sum"))
        return above, below

    def move(self, direction: int, step: float) -> None:
        self._ready()
        self._of = b""
        self._add(self._along(direction, step), self.layout.tuned)
        super().move(direction, step)

    def restore(self) -> None:
        super().restore()
        self._due = True

    def addend(self, entry: TensorEntry) -> Tensor:
        self._ready()
        return self.sums[entry.number]

    def _along(self, direction: int, size: float) -> DirectionSum:
        return DirectionSum(self.pool, *self.pool.select([direction], [size]))

    def _ready(self) -> None:
        """Make the sums those of c, where they are to be exact and are not."""
        if not self._due:
            return
        if (c := self.c.tobytes()) == self._of:
            self._due = False
            return
        self._of, kept = b"", self._kept if c == self._begun else {}
        for number, total in self.sums.items():
            total.copy_(kept[number]) if number in kept else total.zero_()
        others = [entry for entry in self.layout.tuned if entry.number not in kept]
        self._add(DirectionSum(self.pool, *self.pool.dense(self.c)), others)
        self._of, self._due = c, False

    def _add(self, total: DirectionSum, entries: Sequence[TensorEntry]) -> None:
        total.combine([Piece(e.number, self.sums[e.number], self.sums[e.number]) for e in entries])


class TunedSource:
    """The `TensorSource` of one tensor's tuned values."""

    def __init__(self, entry: TensorEntry, weights: Unwritten) -> None:
        self.entry, self.weights = entry, weights
        self.shape, self.dtype, self.device = entry.tensor.shape, entry.tensor.dtype, entry.tensor.device

    def read(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        number, base, addend = self.entry.number, self.entry.tensor, self.weights.addend(self.entry)
        if isinstance(base, Lazy):
            base.source.read(parts)
        pieces = [
            Piece(
                number,
                out if isinstance(base, Lazy) else _part(base, p, out),
                out,
                p,
                addend if addend is None else _part(addend, p, out),
            )
            for p, out in parts
        ]
        self.weights.sum.combine(pieces)
        self.weights.made += sum(out.numel() for _, out in parts)


def _part(tensor: Tensor, start: int, like: Tensor) -> Tensor:
    """The values of a tensor from a position on, in another's shape."""
    return tensor.view(-1)[start : start + like.numel()].view(like.shape)
