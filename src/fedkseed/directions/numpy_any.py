"""The definition as a backend: every family on every device, some hundred times slower than kernels."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import reference as ref
from .backends import FlatPiece
from .families import FAMILIES
from .pool import Pool

KERNELS = FAMILIES
CHUNK = 1 << 18  # positions made at a time: some temporary arrays of 1 MiB


def plan(pool: Pool, directions: ref.Words, coefficients: ref.Floats, device: torch.device) -> tuple[Any, ...]:
    return pool, directions, coefficients


def combine(pieces: Sequence[FlatPiece], plan: tuple[Any, ...]) -> None:
    pool, directions, coefficients = plan
    for tensor, start, base, out, addend in pieces:
        for begin in range(0, base.numel(), CHUNK):
            end = min(begin + CHUNK, base.numel())
            more = None if addend is None else addend[begin:end].cpu().numpy()
            total = ref.total(pool, directions, coefficients, tensor, start + begin, start + end, more)
            w = ref.combine(base[begin:end].float().cpu().numpy(), total, str(base.dtype).removeprefix("torch."))
            weights = torch.from_numpy(w.view(np.int16)).view(base.dtype) if w.itemsize == 2 else torch.from_numpy(w)
            out[begin:end] = weights.to(out.device)


def project(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    total = np.zeros(pool.size)
    for tensor, start, v in pieces:
        total += ref.project(pool, v.float().cpu().numpy(), tensor, start)
    return total
