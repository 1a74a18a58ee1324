"""The three operations on directions: accumulate_, materialize, project, on PyTorch tensors.

`combine` and `project_pieces` are the same operations over a whole model at once. The backend
follows the device of the tensors; every backend gives the bits of `reference.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FedKSeedError
from .pool import MAX_POSITIONS, Pool

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of neighbouring weights of one tensor, and where the result goes.

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
    w: Tensor,
    pool: Pool,
    directions: Sequence[int] | NDArray[np.integer],
    coefficients: Sequence[float] | NDArray[np.floating],
    *,
    tensor: int = 0,
    start: int = 0,
) -> None:
    """w ← w + Σ_k c_k z_{j_k}, in place: one pass over w whatever the number of directions.

    The sum is float32 and is rounded once to w's type. `directions` must ascend.

    Raises:
        FedKSeedError: a direction or coefficient is not allowed, or w can't be worked on.
    """
    combine([Piece(tensor, w, w, start)], pool, *pool.select(directions, coefficients))


def materialize(
    base: Tensor,
    pool: Pool,
    c: Sequence[float] | NDArray[np.floating],
    out: Tensor,
    *,
    tensor: int = 0,
    start: int = 0,
) -> None:
    """out ← w_0 + Σ_j c_j z_j with w_0 = base untouched; c has shape (K,).

    Source: Qin et al., 2024, Eq. 4, with c = −η A
    """
    combine([Piece(tensor, base, out, start)], pool, *pool.dense(c))


def project(v: Tensor, pool: Pool, *, tensor: int = 0, start: int = 0) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ with a float32 tensor, shape (K,): the adjoint of `accumulate_`."""
    return project_pieces([(tensor, start, v)], pool)


class Sum:
    """Σ_k c_k z_{j_k}, ready to be added to any number of tensors; arguments as `Pool.select` returns them."""

    def __init__(self, pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> None:
        from . import numba_cpu

        self._plan = numba_cpu.plan(pool, directions, coefficients)

    def combine(self, pieces: Sequence[Piece]) -> None:
        """out ← base + (addend + Σ_k c_k z_{j_k}) for every piece."""
        from . import numba_cpu

        by_type: dict[torch.dtype, list[tuple[int, int, int, int, int, int]]] = {}
        for p in pieces:
            if p.base.dtype != p.out.dtype or p.base.shape != p.out.shape:
                raise FedKSeedError("the result must have the type and shape of the weights it is made from")
            if p.addend is not None and (p.addend.dtype != torch.float32 or p.addend.shape != p.base.shape):
                raise FedKSeedError("the addend must be float32 and have the shape of the weights")
            base, out = _address(p.base, p.start), _address(p.out, p.start)
            addend = 0 if p.addend is None else _address(p.addend, 0)
            by_type.setdefault(p.base.dtype, []).append((p.tensor, p.start, p.base.numel(), base, out, addend))
        for dtype, rows in by_type.items():
            numba_cpu.combine(rows, str(dtype).removeprefix("torch."), self._plan, torch.get_num_threads())


def combine(
    pieces: Sequence[Piece], pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]
) -> None:
    """`Sum.combine` of a sum that is needed once."""
    Sum(pool, directions, coefficients).combine(pieces)


def project_pieces(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    """Σ ⟨z_j, v⟩ over pieces (tensor, start, v) of float32, shape (K,)."""
    from . import numba_cpu

    held = list(pieces)  # keeps the memory while addresses are in use
    rows = []
    for tensor, start, v in held:
        if v.dtype != torch.float32:
            raise FedKSeedError(f"only float32 can be projected, got {v.dtype}; convert it first")
        rows.append((tensor, start, v.numel(), _address(v, start)))
    return numba_cpu.project(rows, pool, torch.get_num_threads())


def _address(tensor: Tensor, start: int) -> int:
    if tensor.device.type != "cpu":
        raise FedKSeedError(f"directions are made on the CPU, got a tensor on {tensor.device}; move it with .cpu()")
    if tensor.dtype not in TYPES:
        raise FedKSeedError(f"weights must be float32, bfloat16 or float16, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise FedKSeedError("weights must be contiguous; got a strided view")
    if not 0 <= start <= MAX_POSITIONS - tensor.numel():
        raise FedKSeedError(
            f"positions of a tensor lie in 0 to {MAX_POSITIONS}, got {start} to {start + tensor.numel()}"
        )
    return tensor.data_ptr()
