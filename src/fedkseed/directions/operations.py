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

# NumPy has no bfloat16; the integer views tell the kernels which 16-bit type they hold.
VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


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


def combine(
    pieces: Sequence[Piece], pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]
) -> None:
    """out ← base + (addend + Σ_k c_k z_{j_k}) for every piece; arguments as `Pool.select` returns them."""
    from . import numba_cpu

    for piece in pieces:
        if piece.base.dtype != piece.out.dtype or piece.base.shape != piece.out.shape:
            raise FedKSeedError("the result must have the type and shape of the weights it is made from")
        if piece.addend is not None and (piece.addend.dtype != torch.float32 or piece.addend.shape != piece.base.shape):
            raise FedKSeedError("the addend must be float32 and have the shape of the weights")
    arrays = [
        (
            p.tensor,
            p.start,
            _flat(p.base, p.start),
            _flat(p.out, p.start),
            None if p.addend is None else _flat(p.addend),
        )
        for p in pieces
    ]
    numba_cpu.combine(arrays, pool, directions, coefficients, torch.get_num_threads())


def project_pieces(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    """Σ ⟨z_j, v⟩ over pieces (tensor, start, v) of float32, shape (K,)."""
    from . import numba_cpu

    arrays = []
    for tensor, start, v in pieces:
        if v.dtype != torch.float32:
            raise FedKSeedError(f"only float32 can be projected, got {v.dtype}; convert it first")
        arrays.append((tensor, start, _flat(v, start)))
    return numba_cpu.project(arrays, pool, torch.get_num_threads())


def _flat(tensor: Tensor, start: int = 0) -> NDArray:
    if tensor.device.type != "cpu":
        raise FedKSeedError(f"directions are made on the CPU, got a tensor on {tensor.device}; move it with .cpu()")
    if tensor.dtype not in VIEWS:
        raise FedKSeedError(f"weights must be float32, bfloat16 or float16, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise FedKSeedError("weights must be contiguous; got a strided view")
    if not 0 <= start <= MAX_POSITIONS - tensor.numel():
        raise FedKSeedError(
            f"positions of a tensor lie in 0 to {MAX_POSITIONS}, got {start} to {start + tensor.numel()}"
        )
    return tensor.detach().view(-1).view(VIEWS[tensor.dtype]).numpy()
