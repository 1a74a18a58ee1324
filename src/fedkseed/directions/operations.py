"""The three operations on directions: accumulate_, materialize, project, on PyTorch tensors.

`DirectionSum` and `project_pieces` do the same over a whole model at once. The backend follows the device of the
tensors; every backend gives the bits of `reference.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FedKSeedError
from .backends import FlatPiece, trusted
from .pool import MAX_POSITIONS, Integers, Numbers, Pool

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring weights of one tensor, and the memory for their new values.

    Args:
        tensor: the tensor's number in the layout.
        base: the weights to start from, any shape, contiguous; float32, bfloat16 or float16.
        out: same shape and type; may be `base` itself.
        start: position of the first weight inside the tensor.
        addend: float32 numbers to add before the one rounding, or None.
    """

    tensor: int
    base: Tensor
    out: Tensor
    start: int = 0
    addend: Tensor | None = None


def accumulate_(
    w: Tensor, pool: Pool, directions: Integers, coefficients: Numbers, *, tensor: int = 0, start: int = 0
) -> None:
    """Add Σ_k c_k z_{j_k} to w in place: one pass over w whatever the number of directions.

    The sum is float32 and is rounded once to w's type. `directions` must ascend.

    Raises:
        FedKSeedError: a direction or coefficient is not allowed, or w can't be worked on.
    """
    DirectionSum(pool, *pool.select(directions, coefficients)).combine([Piece(tensor, w, w, start)])


def materialize(base: Tensor, pool: Pool, c: Numbers, out: Tensor, *, tensor: int = 0, start: int = 0) -> None:
    """Write w_0 + Σ_j c_j z_j to `out`, with w_0 = base, which is left untouched; c has shape (K,).

    Source: Qin et al., 2024, Eq. 4, with c = −η A
    """
    DirectionSum(pool, *pool.dense(c)).combine([Piece(tensor, base, out, start)])


def project(v: Tensor, pool: Pool, *, tensor: int = 0, start: int = 0) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ with a tensor, shape (K,): the adjoint of `accumulate_`."""
    return project_pieces([(tensor, start, v)], pool)


class DirectionSum:
    """A sum Σ_k c_k z_{j_k} to add to any number of tensors; arguments as `Pool.select` returns them."""

    def __init__(self, pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> None:
        self._pool, self._terms = pool, lambda: (directions, coefficients)
        self._plans: dict[torch.device, Any] = {}  # by device: the plan of its backend

    @classmethod
    def over(cls, pool: Pool, c: NDArray[np.float32]) -> Self:
        """The sum over a whole pool, c of shape (K,), which `combine` checks and reads: no weight made, no pass over c.

        A point of a zeroth-order step is such a sum.
        """
        total = cls(pool, c[:0].astype(np.uint32), c[:0])
        total._terms = lambda: pool.dense(c)
        return total

    def combine(self, pieces: Sequence[Piece]) -> None:
        """Compute out ← base + (addend + Σ_k c_k z_{j_k}) for every piece.

        Raises:
            FedKSeedError: a tensor can't be worked on, or c of `over` is not allowed; no weight has changed.
        """
        flat = [_checked(piece) for piece in pieces]
        kinds = dict.fromkeys((piece.base.device, piece.base.dtype) for piece in pieces)
        backends = {device: trusted(device, self._pool, dtype) for device, dtype in kinds}  # before a weight changes
        for device, backend in backends.items():
            if device not in self._plans:
                self._plans[device] = backend.plan(self._pool, *self._terms(), device)
            backend.combine([piece for piece in flat if piece[2].device == device], self._plans[device])


def project_pieces(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ summed over pieces (tensor, start, v), shape (K,)."""
    total = np.zeros(pool.size)
    for tensor, start, v in pieces:
        total += trusted(v.device, pool, None).project([(tensor, start, _flat(v, start))], pool)
    return total


def _checked(piece: Piece) -> FlatPiece:
    base, out, addend = piece.base, piece.out, piece.addend
    if base.dtype != out.dtype or base.shape != out.shape:
        raise FedKSeedError("the result must have the type and shape of the weights it is made from")
    if addend is not None and (addend.dtype != torch.float32 or addend.shape != base.shape):
        raise FedKSeedError("the addend must be float32 and have the shape of the weights")
    for other in (out, addend):
        if other is not None and other.device != base.device:
            raise FedKSeedError(f"weights, result and addend are on one device, got {base.device} and {other.device}")
    flat = _flat(base, piece.start), _flat(out, piece.start), None if addend is None else _flat(addend)
    return piece.tensor, piece.start, *flat


def _flat(tensor: Tensor, start: int = 0) -> Tensor:
    if tensor.dtype not in TYPES:
        raise FedKSeedError(f"weights must be float32, bfloat16 or float16, got {tensor.dtype}; take model.float()")
    if not tensor.is_contiguous():
        raise FedKSeedError("weights must be contiguous; got a strided view")
    if not 0 <= start <= MAX_POSITIONS - tensor.numel():
        raise FedKSeedError(f"positions of a tensor are 0 to {MAX_POSITIONS}, got {start} to {start + tensor.numel()}")
    return tensor.detach().view(-1)
