"""Directions on a CPU: Numba kernels that run on every core and write each weight once.

Values are those of `reference.py`, bit for bit: no fused multiply-add, no fast-math. The kernels
work on one unit (`Pool.unit` positions, 16 KiB of float32 at K ≤ 4096) at a time, so that sums over
any number of directions stay in registers and the first-level cache; weights are read once and
written once.

    __init__.py    sums and projections over a whole model's tensors
    kernels.py     random bits, and one unit of a sum or of a projection
    simd.py        vectors, tiles, and weights of each type
    gguf.py        quantised weights
    threads.py     threads that run the kernels
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numba import uint32
from numpy.typing import NDArray
from torch import Tensor

from .. import reference as ref
from ..pool import Pool
from .kernels import (
    BLOCK,
    GAUSSIAN,
    HADAMARD,
    HADAMARD_ONE,
    HASHED,
    RADEMACHER,
    SIGNS,
    SOME,
    TILE,
    add_directions,
    combine_unit,
    project_segment,
)
from .simd import claim, copy, data_of, item_size, kernel, number_at
from .threads import compiled, run

CHUNK = 1 << 15  # positions that a thread takes at a time: 8 µs of the fastest kernel
ALONE = 1 << 16  # positions that one thread makes before a second has begun
CACHES = 16 << 20  # bytes; results larger than this are not read again soon: write them around the caches
WIDENED = 4  # segments of 16-bit numbers that `project` holds in float32 at a time, at least: 16 MiB


@kernel
def work(job, marker):
    """Compute out = base + (addend + Σ c z) for all pieces of a job; any number of threads share the work."""
    unit_size = number_at(job + 24)
    memory = np.empty(12 * unit_size + SIGNS * max(SOME, unit_size // BLOCK) + 64, np.uint8)
    _work_in(memory, job, marker)  # a call, so that memory outlives the use of its address


@kernel
def _work_in(memory, job, marker):
    kind, size, unit_size = number_at(job + 8), number_at(job + 16), number_at(job + 24)
    directions, coefficients, count = number_at(job + 32), number_at(job + 40), number_at(job + 48)
    table, k0, k1 = number_at(job + 56), uint32(number_at(job + 64)), uint32(number_at(job + 72))
    around, pieces, rows = number_at(job + 80) != 0, number_at(job + 88), number_at(job + 96)
    acc = (data_of(memory) + 63) & -64
    edge, addend_edge, signs = acc + 4 * unit_size, acc + 8 * unit_size, acc + 12 * unit_size
    item, units = item_size(marker), max(1, CHUNK // unit_size)

    mine, before = claim(job), 0  # chunks are numbered through all pieces
    for row in range(pieces, pieces + 48 * rows, 48):
        tensor, start, length = uint32(number_at(row)), number_at(row + 8), number_at(row + 16)
        base, out, addend = number_at(row + 24), number_at(row + 32), number_at(row + 40)
        first, last = start // unit_size, (start + length + unit_size - 1) // unit_size
        chunks = (last - first + units - 1) // units
        while mine < before + chunks:
            begin = first + (mine - before) * units
            for unit in range(begin, min(begin + units, last)):
                low, high = max(start - unit * unit_size, 0), min(start + length - unit * unit_size, unit_size)
                offset, inside = unit * unit_size + low - start, high - low  # counted in weights
                whole = inside == unit_size
                b, o, a = base + item * offset, out + item * offset, addend + 4 * offset if addend else 0
                if not whole:  # at a tensor's ends: work on a copy as long as a unit
                    copy(edge + item * low, b, item * inside)
                    if addend:
                        copy(addend_edge + 4 * low, a, 4 * inside)
                        a = addend_edge
                    b = edge
                target = (o if whole else edge), b, a, marker, around and whole and o % 64 == 0
                if kind > RADEMACHER:
                    combine_unit(kind, acc, unit, unit_size, size, table, signs, tensor, k0, k1, target)
                else:
                    add_directions(
                        kind, acc, unit, low, high, directions, coefficients, count, signs, tensor, k0, k1, target
                    )
                if not whole:
                    copy(o, edge + item * low, item * inside)
            mine = claim(job)
        before += chunks


def project_work(job):
    """Compute the inner products with every segment of a tensor, one row of results a segment."""
    size, unit_size = number_at(job + 16), number_at(job + 24)
    memory = np.empty(4 * unit_size + 4 * BLOCK + SIGNS * max(SOME, unit_size // BLOCK) + 64, np.uint8)
    _project_in(memory, np.empty(size), job)


@kernel
def _project_in(memory, partial, job):
    kind, size, unit_size = number_at(job + 8), number_at(job + 16), number_at(job + 24)
    tensor, k0, k1 = uint32(number_at(job + 32)), uint32(number_at(job + 40)), uint32(number_at(job + 48))
    start, length, v = number_at(job + 56), number_at(job + 64), number_at(job + 72)
    results, last = number_at(job + 80), number_at(job + 88)
    acc = (data_of(memory) + 63) & -64
    products, signs = acc + 4 * unit_size, acc + 4 * unit_size + 4 * BLOCK
    segment_size = max(ref.SEGMENT, unit_size)
    segment = claim(job)
    while segment < last:
        begin, end = max(segment * segment_size, start), min((segment + 1) * segment_size, start + length)
        project_segment(
            kind, v + 4 * (begin - start), begin, end - begin, size, unit_size, tensor, k0, k1, partial,
            acc, products, signs,
        )  # fmt: skip
        copy(results + 8 * size * (segment - start // segment_size), data_of(partial), 8 * size)
        segment = claim(job)


WORKERS = {
    torch.float32: lambda job: work(job, np.float32(0)),
    torch.bfloat16: lambda job: work(job, np.uint16(0)),
    torch.float16: lambda job: work(job, np.int16(0)),
}
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


def combine(pieces: Sequence[tuple[int, int, Tensor, Tensor, Tensor | None]], plan: tuple[Any, ...]) -> None:
    """Compute out = base + (addend + Σ_k c_k z_{j_k}) for pieces (tensor, start, base, out, addend); all are flat."""
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
        run(compiled(WORKERS[dtype]), job, min(torch.get_num_threads(), 1 + effort // ALONE))


def project(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ summed over pieces (tensor, start, v), shape (K,).

    16-bit numbers are widened some at a time: a copy of a whole output matrix would be twice as large as the matrix,
    in memory that the system has to clear first.
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
            run(compiled(project_work), job, min(threads, last - first))
            for partial in results:  # in ascending order: sums of float64 depend on it
                of_tensor += partial
            begin = end
        total += of_tensor
    return total
