"""Directions on a CPU: Numba kernels that run on every core and write each weight once.

Values are those of `reference.py`, bit for bit: no fused multiply-add, no fast-math. The kernels
work on one unit (`Pool.unit` positions, 16 KiB of float32 at K ≤ 4096) at a time, so that sums over
any number of directions stay in registers and the first-level cache; weights are read once and
written once.

    __init__.py    sums and projections over a whole model's tensors
    kernels.py     one unit of a sum or of a projection
    philox.py      random bits and normals
    simd.py        vectors and tiles
    dtypes.py      types of weights
    gguf.py        quantised weights
    threads.py     threads that run the kernels
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import uint32
from numpy.typing import NDArray

from .. import reference as ref
from ..pool import Pool
from .dtypes import item_size
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
from .philox import kernel
from .simd import address_of, claim, copy, data_of, number_at
from .threads import compiled, run

CHUNK = 1 << 15  # positions that a thread takes at a time: 8 µs of the fastest kernel
ALONE = 1 << 16  # positions that one thread makes before a second has begun
CACHES = 16 << 20  # bytes; results larger than this are not read again soon: write them around the caches


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
    acc = address_of(memory)
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


@kernel
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
    acc = address_of(memory)
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


def _float32(job):
    work(job, np.float32(0))


def _bfloat16(job):
    work(job, np.uint16(0))


def _float16(job):
    work(job, np.int16(0))


def _project(job):
    project_work(job)


WORKERS = {"float32": _float32, "bfloat16": _bfloat16, "float16": _float16}  # by type of weights


@dataclass(frozen=True, slots=True)
class Plan:
    """A sum Σ_k c_k z_{j_k} in the form that the kernels read: made once, added to any number of tensors."""

    pool: Pool
    kind: int
    directions: NDArray[np.uint32]
    coefficients: NDArray[np.float32]
    table: NDArray[np.float32]


def _hadamard_table(
    pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]
) -> tuple[int, NDArray[np.float32]]:
    if directions.size == 1 and pool.size >= TILE:
        row = coefficients[0] * ref.walsh(np.arange(pool.size) & int(directions[0]))
        return HADAMARD_ONE, np.concatenate([row, -row, directions.view(np.float32)])
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    # tiles of 16 x 16, each transposed
    return HADAMARD, np.tile(c, pool.unit // pool.size).reshape(-1, 16, 16).transpose(0, 2, 1).ravel()


def _hashed_table(
    pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]
) -> tuple[int, NDArray[np.float32]]:
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    c, rows = ref.transform(c), np.arange(pool.size)
    return HASHED, np.concatenate([c[rows ^ low] for low in range(16)]) if pool.size >= TILE else c


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernels of one family.

    Args:
        kind: the branch of kernels.py that makes the family's sums and inner products.
        table: maps (pool, directions, coefficients) to the branch for this sum and the table that the branch reads;
            None: the branch reads no table.
    """

    kind: int
    table: Callable[[Pool, NDArray[np.uint32], NDArray[np.float32]], tuple[int, NDArray[np.float32]]] | None = None


KERNELS: dict[str, Kernel] = {
    "gaussian": Kernel(GAUSSIAN),
    "rademacher": Kernel(RADEMACHER),
    "hadamard": Kernel(HADAMARD, _hadamard_table),
    "hashed": Kernel(HASHED, _hashed_table),
}


def plan(pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]) -> Plan:
    """Choose the kernel of a sum and make the table that the kernel reads."""
    family = KERNELS[pool.family]
    kind, table = family.kind, np.empty(0, np.float32)
    if family.table:
        kind, table = family.table(pool, directions, coefficients)
    return Plan(pool, kind, directions, coefficients, table)


def combine(pieces: Sequence[tuple[int, int, int, int, int, int]], dtype: str, plan: Plan, threads: int) -> None:
    """Compute out = base + (addend + Σ_k c_k z_{j_k}) for pieces (tensor, start, count, base, out, addend).

    The last three are addresses: of weights of one type, and of a float32 addend (0: no addend). base and out may be
    the same.
    """
    rows, pool = np.array(pieces, np.int64).reshape(-1, 6), plan.pool
    total = int(rows[:, 2].sum())
    around = dtype == "float32" and 4 * total > CACHES and not np.array_equal(rows[:, 3], rows[:, 4])
    work = total * (1 if pool.transformed else max(1, plan.directions.size // 4))
    job = np.array(
        [
            0, plan.kind, pool.size, pool.unit, plan.directions.ctypes.data, plan.coefficients.ctypes.data,
            plan.directions.size, plan.table.ctypes.data, *pool.key_words, around, rows.ctypes.data, len(rows),
        ],
        np.int64,
    )  # fmt: skip
    run(compiled(WORKERS[dtype]), job, min(threads, 1 + work // ALONE))


def segment_size(pool: Pool) -> int:
    """The positions whose inner products are one partial sum."""
    return max(ref.SEGMENT, pool.unit)


def project(
    pieces: Iterable[tuple[int, Iterable[tuple[int, int, int]]]], pool: Pool, threads: int
) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ summed over pieces (tensor, parts of v), shape (K,).

    Args:
        pieces: a part is (start, count, address) of float32, and the parts of a piece follow each other, cut at
            multiples of `segment_size`; an address is used before the next part is asked for.
    """
    size, total = segment_size(pool), np.zeros(pool.size)
    for tensor, parts in pieces:
        of_tensor = np.zeros(pool.size)
        for start, count, v in parts:
            first, last = start // size, -(-(start + count) // size)
            results = np.empty((last - first, pool.size))
            job = np.array(
                [
                    first, KERNELS[pool.family].kind, pool.size, pool.unit, tensor, *pool.key_words, start, count, v,
                    results.ctypes.data, last,
                ],
                np.int64,
            )  # fmt: skip
            run(compiled(_project), job, min(threads, last - first))
            for partial in results:  # in ascending order: sums of float64 depend on it
                of_tensor += partial
        total += of_tensor
    return total
