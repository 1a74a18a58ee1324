"""Sums and projections over a whole model's tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import reference as ref
from ..backends import FlatPiece
from ..pool import Pool
from .kernels import GAUSSIAN, HADAMARD, HADAMARD_ONE, HASHED, RADEMACHER, TILE, project_work, work
from .threads import compiled, run

ALONE = 1 << 16  # positions that one thread makes before a second has begun
CACHES = 16 << 20  # bytes; results larger than this are not read again soon: write them around the caches
WIDENED = 4  # segments of 16-bit numbers that `project` holds in float32 at a time, at least: 16 MiB


WORKERS = {  # by the weights' type, and whether the family is transformed; see `work`
    (torch.float32, True): lambda job: work(job, np.float32(0), None),
    (torch.bfloat16, True): lambda job: work(job, np.uint16(0), None),
    (torch.float16, True): lambda job: work(job, np.int16(0), None),
    (torch.float32, False): lambda job: work(job, np.float32(0), True),
    (torch.bfloat16, False): lambda job: work(job, np.uint16(0), True),
    (torch.float16, False): lambda job: work(job, np.int16(0), True),
}
PROJECTORS = {True: lambda job: project_work(job, None), False: lambda job: project_work(job, True)}
KERNELS = {"gaussian": GAUSSIAN, "rademacher": RADEMACHER, "hadamard": HADAMARD, "hashed": HASHED}


def plan(pool: Pool, directions: ref.Words, coefficients: ref.Floats, device: torch.device) -> tuple[Any, ...]:
    """Prepare a sum for `combine`: choose its kernel, and make the table that this one reads."""
    kind, table = KERNELS[pool.family], np.empty(0, np.float32)
    if kind == HADAMARD and directions.size == 1 and pool.size >= TILE:
        row = coefficients[0] * ref.walsh(np.arange(pool.size) & int(directions[0]))
        kind, table = HADAMARD_ONE, np.concatenate([row, -row, directions.view(np.float32)])
    elif pool.transformed:
        table = np.zeros(pool.size, np.float32)
        table[directions] = coefficients
        if kind == HADAMARD:  # tiles of 16 x 16, each transposed
            table = np.tile(table, pool.unit // pool.size).reshape(-1, 16, 16).transpose(0, 2, 1).ravel()
        else:
            table, rows = ref.transform(table), np.arange(pool.size)
            table = np.concatenate([table[rows ^ low] for low in range(16)]) if pool.size >= TILE else table
    return pool, kind, directions, coefficients, table


def combine(pieces: Sequence[FlatPiece], plan: tuple[Any, ...]) -> None:
    pool, kind, directions, coefficients, table = plan
    by_type: dict[torch.dtype, list[tuple[int, ...]]] = {}
    for tensor, start, base, out, addend in pieces:
        addresses = base.data_ptr(), out.data_ptr(), 0 if addend is None else addend.data_ptr()
        by_type.setdefault(base.dtype, []).append((tensor, start, base.numel(), *addresses))
    for dtype, of_type in by_type.items():
        rows = np.array(of_type, np.int64)
        total = int(rows[:, 2].sum())
        around = dtype == torch.float32 and 4 * total > CACHES and not np.array_equal(rows[:, 3], rows[:, 4])
        job = np.array(
            [
                0, kind, pool.size, pool.unit, directions.ctypes.data, coefficients.ctypes.data, directions.size,
                table.ctypes.data, *pool.key_words, around, rows.ctypes.data, len(rows),
            ],
            np.int64,
        )  # fmt: skip
        effort = total * (1 if pool.transformed else max(1, directions.size // 4))
        run(compiled(WORKERS[dtype, pool.transformed]), job, min(torch.get_num_threads(), 1 + effort // ALONE))


def project(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    """16-bit numbers are widened some at a time.

    A copy of a whole output matrix would be twice as large as the matrix, in memory that the system has to clear first.
    """
    segment, threads, total = max(ref.SEGMENT, pool.unit), torch.get_num_threads(), np.zeros(pool.size)
    each = max(WIDENED, threads) * segment
    for tensor, start, v in pieces:
        of_tensor, begin, stop = np.zeros(pool.size), start, start + v.numel()
        while begin < stop:
            end = stop if v.dtype == torch.float32 else min(stop, (begin // each + 1) * each)
            part = v[begin - start : end - start].float()
            first, last = begin // segment, -(-end // segment)
            results = np.empty((last - first, pool.size))
            job = np.array(
                [
                    first, KERNELS[pool.family], pool.size, pool.unit, tensor, *pool.key_words, begin, end - begin,
                    part.data_ptr(), results.ctypes.data, last,
                ],
                np.int64,
            )  # fmt: skip
            run(compiled(PROJECTORS[pool.transformed]), job, min(threads, last - first))
            for partial in results:  # in ascending order: sums of float64 depend on it
                of_tensor += partial
            begin = end
        total += of_tensor
    return total
