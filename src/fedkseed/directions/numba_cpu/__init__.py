"""The directions on a CPU: Numba kernels that run on every core and write each weight once.

Values are those of `reference.py`, bit for bit: no fused multiply-add, no fast-math. The kernels
work on one unit (`Pool.unit` positions, 16 KiB of float32 at K ≤ 4096) at a time, so that sums over
any number of directions stay in the first-level cache; a chunk of units is one task of a thread.
Inner loops run over independent lanes, because that is what the compiler vectorises.

bits.py: random bits and normals. lanes.py: vectors written out. units.py: one unit of a sum or of a
projection. rounding.py: types of weights. Here: ranges of a tensor and whole models.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference as ref
from ..pool import Pool
from .bits import EIGHTH, kernel
from .rounding import store
from .units import (
    GAUSSIAN,
    HADAMARD,
    HADAMARD_ONE,
    HASHED,
    RADEMACHER,
    add_gaussian,
    add_rademacher,
    make_unit,
    project_segment,
)

CHUNK = 1 << 18  # positions a task: 1 ms of the fastest kernel, 512 tasks for SmolLM2-135M
WORDS = 4 * EIGHTH  # scratch for the random bits of a block


@kernel
def combine_range(
    kind, out, base, addend, start, size, unit_size, directions, coefficients, table, tensor, k0, k1, acc, words
):  # fmt: skip
    """out = base + (addend + Σ c z) over positions start … start + out.size of one tensor."""
    stop = start + out.size
    for unit in range(start // unit_size, (stop + unit_size - 1) // unit_size):
        low, high = max(start - unit * unit_size, 0), min(stop - unit * unit_size, unit_size)
        here = slice(unit * unit_size + low - start, unit * unit_size + high - start)
        part = acc[low:high]
        if kind <= RADEMACHER:
            if addend.size:
                part[:] = addend[here]
            else:
                part[:] = np.float32(0)
            if kind == GAUSSIAN:
                within = low // EIGHTH == (high - 1) // EIGHTH
                first, last = (low % EIGHTH, (high - 1) % EIGHTH + 1) if within else (0, EIGHTH)
                add_gaussian(acc, unit, first, last, directions, coefficients, words, tensor, k0, k1)
            else:
                add_rademacher(acc, unit, directions, coefficients, words, tensor, k0, k1)
        else:
            make_unit(kind, acc, unit, size, table, words, tensor, k0, k1)
            if addend.size:
                more = addend[here]
                for i in range(part.size):
                    part[i] = more[i] + part[i]
        store(out[here], base[here], part)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fedkseed")


def _run(threads: int, tasks: Iterable[tuple[Any, ...]], work: Any) -> list[Any]:
    """Do work(task) for every task on `threads` threads (kernels release the lock); in order."""
    return list(_threads(threads).map(work, tasks)) if threads > 1 else [work(task) for task in tasks]


def combine(
    pieces: Iterable[tuple[int, int, NDArray, NDArray, NDArray[np.float32] | None]],
    pool: Pool,
    directions: NDArray[np.uint32],
    coefficients: NDArray[np.float32],
    threads: int,
) -> None:
    """out = base + (addend + Σ_k c_k z_{j_k}) for pieces (tensor, start, base, out, addend) of a model.

    base and out are flat arrays of one type (float32; bfloat16 as uint16; float16 as int16) and
    may be the same array.
    """
    kind, table = _plan(pool, directions, coefficients)
    none = np.empty(0, np.float32)

    def work(task: tuple[Any, ...]) -> None:
        tensor, start, base, out, addend = task
        acc, words = np.empty(pool.unit, np.float32), np.empty(WORDS, np.uint32)
        k0, k1 = pool.key_words
        combine_range(
            kind, out, base, none if addend is None else addend, start, pool.size, pool.unit, directions, coefficients,
            table, np.uint32(tensor), np.uint32(k0), np.uint32(k1), acc, words,
        )  # fmt: skip

    def cut() -> Iterable[tuple[Any, ...]]:
        for tensor, start, base, out, addend in pieces:
            for a, b in _cuts(start, out.size, max(CHUNK, pool.unit)):
                yield tensor, start + a, base[a:b], out[a:b], None if addend is None else addend[a:b]

    _run(threads, cut(), work)


def project(pieces: Iterable[tuple[int, int, NDArray[np.float32]]], pool: Pool, threads: int) -> NDArray[np.float64]:
    """Σ over pieces (tensor, start, v) of the K inner products ⟨z_j, v⟩, shape (K,)."""
    kind = {"gaussian": GAUSSIAN, "rademacher": RADEMACHER, "hadamard": HADAMARD, "hashed": HASHED}[pool.family]

    def work(task: tuple[Any, ...]) -> NDArray[np.float64]:
        tensor, start, v = task
        acc, words, result = np.empty(pool.unit, np.float32), np.empty(WORDS, np.uint32), np.empty(pool.size)
        k0, k1 = pool.key_words
        project_segment(
            kind, v, start, pool.size, pool.unit, np.uint32(tensor), np.uint32(k0), np.uint32(k1), result, acc, words
        )
        return result

    total = np.zeros(pool.size)
    for tensor, start, v in pieces:
        cuts = _cuts(start, v.size, max(ref.SEGMENT, pool.unit))
        of_tensor = np.zeros(pool.size)
        for partial in _run(threads, ((tensor, start + a, v[a:b]) for a, b in cuts), work):
            of_tensor += partial
        total += of_tensor
    return total


def _cuts(start: int, size: int, chunk: int) -> Iterable[tuple[int, int]]:
    """Cut positions start … start + size at multiples of chunk; offsets into the piece."""
    edges = [0, *range(chunk - start % chunk, size, chunk), size]
    return list(pairwise(edges))


def _plan(
    pool: Pool, directions: NDArray[np.uint32], coefficients: NDArray[np.float32]
) -> tuple[int, NDArray[np.uint32]]:
    """Which kernel to run and the table, made once a call, that it reads (float32 seen as uint32)."""
    if pool.family in ("gaussian", "rademacher"):
        return (GAUSSIAN if pool.family == "gaussian" else RADEMACHER), np.empty(0, np.uint32)
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    if pool.family == "hadamard" and directions.size == 1:
        row = coefficients[0] * ref.walsh(np.arange(pool.size) & int(directions[0]))
        return HADAMARD_ONE, np.append(row.view(np.uint32), directions)
    if pool.family == "hadamard":
        return HADAMARD, np.tile(c, pool.unit // pool.size).view(np.uint32)
    c = ref.transform(c)
    rows = np.arange(pool.size)
    return HASHED, np.concatenate([c[rows ^ low] for low in range(min(16, pool.size))]).view(np.uint32)
