"""The directions on a CPU: Numba kernels that run on every core and write each weight once.

Values are those of `reference.py`, bit for bit: no fused multiply-add, no fast-math. The kernels
work on one unit (`Pool.unit` positions, 16 KiB of float32 at K ≤ 4096) at a time, so that sums over
any number of directions stay in the first-level cache; a chunk of units is one task of a thread.
Inner loops run over independent lanes, because that is what the compiler vectorises.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numba import int32, njit, uint32, uint64
from numba.extending import overload
from numpy.typing import NDArray

from . import reference as ref
from .lanes import copy16, flip16, walsh_pass
from .pool import BLOCK, Pool

CHUNK = 1 << 18  # positions a task: 1 ms of the fastest kernel, 512 tasks for SmolLM2-135M
QUARTER, EIGHTH, LANES = ref.QUARTER, ref.EIGHTH, ref.LANES
WORDS = 4 * EIGHTH  # scratch for the random bits of a block
# What a kernel does with a unit; the first two add direction by direction.
GAUSSIAN, RADEMACHER, HADAMARD, HADAMARD_ONE, HASHED = range(5)

LN2, SIGN, LOW = ref.LN2, np.uint32(0x80000000), np.uint64(0xFFFFFFFF)
L0, L1, L2, L3, L4 = ref.LOG
S0, S1, S2 = ref.SIN
C0, C1 = ref.COS
ZERO, ONE, TWO, HALVES = np.float32(0), np.float32(1), np.float32(2), np.float32(1.5)

_kernel = njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
# Inlined before LLVM sees it: a call in the way keeps a loop from being vectorised.
_inlined = njit(inline="always", fastmath=False, error_model="numpy")


# --- bits ---------------------------------------------------------------------------------------


@_inlined
def philox(x0, x1, x2, x3, k0, k1):
    """`reference.philox` of one counter; a loop over it vectorises.

    Words stay in 64-bit lanes whose upper halves are ignored, so that a round is a multiply, a
    shift and an exclusive or, with no shuffles: 2.4 times faster than splitting each product.
    """
    x0, x1, x2, x3 = uint64(x0), uint64(x1), uint64(x2), uint64(x3)
    for _ in range(10):
        a = uint64(0xD2511F53) * (x0 & LOW)
        b = uint64(0xCD9E8D57) * (x2 & LOW)
        x0 = (b >> uint64(32)) ^ x1 ^ uint64(k0)
        x2 = (a >> uint64(32)) ^ x3 ^ uint64(k1)
        x1, x3 = b, a
        k0, k1 = uint32(k0 + uint32(0x9E3779B9)), uint32(k1 + uint32(0xBB67AE85))
    return uint32(x0), uint32(x1), uint32(x2), uint32(x3)


@_kernel
def sign_words(words, group, tensor, direction, stream, k0, k1):
    """The 128 words that sign one block; words[32 w + l] is word w of counter 32 group + l."""
    for lane in range(LANES):
        counter = uint32(uint32(group * LANES) + uint32(lane))
        x0, x1, x2, x3 = philox(counter, tensor, direction, uint32(stream), k0, k1)
        words[lane], words[LANES + lane], words[2 * LANES + lane], words[3 * LANES + lane] = x0, x1, x2, x3


@_kernel
def flip(out, values, first, words):
    """out[p] = ± values[p] over the block that begins at `first`; both are float32 seen as uint32."""
    for w in range(4):
        for t in range(32):
            begin = first + QUARTER * w + LANES * t
            for lane in range(0, LANES, 16):
                flip16(out, begin + lane, values, words, LANES * w + lane, 31 - t)


@_kernel
def sign_at(position, tensor, stream, k0, k1):
    """The sign of one position as a bit to XOR into a float32."""
    counter = uint32(uint32(position // BLOCK * LANES) + uint32(position % LANES))
    x0, x1, x2, x3 = philox(counter, tensor, uint32(0), uint32(stream), k0, k1)
    w = position // QUARTER % 4
    word = x0 if w == 0 else x1 if w == 1 else x2 if w == 2 else x3
    return uint32(word << uint32(31 - position // LANES % 32) & SIGN)


# --- one unit of Σ c_j z_j ----------------------------------------------------------------------


@_inlined
def _float(bits):
    return np.uint32(bits).view(np.float32)


@_inlined
def _bits(value):
    return np.float32(value).view(np.uint32)


@_inlined
def normals(x):
    """`reference.normals` of one word. Every step is cast back to 32 bits, or Numba widens it."""
    u = TWO - _float(uint32(uint32(x >> uint32(9)) & uint32(0x7FFFE0)) | uint32(0x3F800010))
    shifted = int32(int32(_bits(u)) - int32(0x3F3504F3))
    exponent = np.float32(int32(shifted >> int32(23)))
    t = _float(uint32(uint32(shifted) & uint32(0x7FFFFF)) + uint32(0x3F3504F3)) - ONE
    p = (((t * L4 + L3) * t + L2) * t + L1) * t + L0
    radius = np.sqrt((p * t - ONE) * t - exponent * LN2)
    a = _float(uint32(uint32(x << uint32(9)) & uint32(0x7FF800)) | uint32(0x3F800400)) - HALVES
    s = a * a
    sine = ((s * S2 + S1) * s + S0) * a
    cosine = (s * C1 + C0) * s + ONE
    first, second = radius * (cosine - sine), radius * (cosine + sine)
    return (
        _float(_bits(first) ^ uint32(x << uint32(31))),
        _float(_bits(second) ^ uint32(uint32(x << uint32(30)) & SIGN)),
    )


@_kernel
def gaussian_words(words, low, high, block, tensor, direction, k0, k1):
    """Words of counters low ≤ i < high of one block; words[512 w + i] is word w."""
    w0, w1 = words[low:high], words[EIGHTH + low : EIGHTH + high]
    w2, w3 = words[2 * EIGHTH + low : 2 * EIGHTH + high], words[3 * EIGHTH + low : 3 * EIGHTH + high]
    first = uint32(block * EIGHTH + low)
    for i in range(high - low):
        w0[i], w1[i], w2[i], w3[i] = philox(uint32(first + uint32(i)), tensor, direction, uint32(0), k0, k1)


@_kernel
def add_normals(first, second, words, c):
    for i in range(words.size):
        a, b = normals(words[i])
        first[i] += c * a
        second[i] += c * b


@_kernel
def add_gaussian(acc, block, low, high, directions, coefficients, words, tensor, k0, k1):
    """acc += Σ c z over the rows low ≤ i < high of each eighth of one block."""
    for k in range(directions.size):
        gaussian_words(words, low, high, block, tensor, directions[k], k0, k1)
        for w in range(4):
            pair = acc[QUARTER * w : QUARTER * (w + 1)]
            of = words[EIGHTH * w + low : EIGHTH * w + high]
            add_normals(pair[low:high], pair[EIGHTH + low : EIGHTH + high], of, coefficients[k])


@_kernel
def add_rademacher(acc, block, directions, coefficients, words, tensor, k0, k1):
    """acc += Σ c z over one block."""
    for k in range(directions.size):
        sign_words(words, block, tensor, directions[k], 1, k0, k1)
        c = _bits(coefficients[k])
        for w in range(4):
            row = words[LANES * w : LANES * (w + 1)]
            for t in range(32):
                begin = QUARTER * w + LANES * t
                to = acc[begin : begin + LANES]
                for lane in range(LANES):
                    to[lane] += _float(c ^ (row[lane] << uint32(31 - t) & SIGN))


@_kernel
def transform(x, n):
    """Walsh–Hadamard transform of every n elements of x, stages h = 1, 2, 4, …"""
    h = 1
    while h < n:
        radix = min(16, n // h)
        walsh_pass(x, h, radix)
        h *= radix


@_kernel
def make_unit(kind, z, unit, size, table, words, tensor, k0, k1):
    """z = Σ c_j z_j over one unit of a transformed family."""
    zb, groups = z.view(np.uint32), z.size // BLOCK
    if kind == HADAMARD:  # table: c, repeated to fill a unit
        for g in range(groups):
            sign_words(words, unit * groups + g, tensor, uint32(0), 3, k0, k1)
            flip(zb, table, g * BLOCK, words)
        transform(z, size)
    elif kind == HADAMARD_ONE:  # table: c_j H[:, j]; the direction j rides at the table's end
        j = np.int64(table[size])
        for begin in range(0, z.size, size):
            sign = sign_at(unit * z.size + begin + j, tensor, 3, k0, k1)
            to = zb[begin : begin + size]
            for i in range(size):
                to[i] = table[i] ^ sign
    else:  # table: copies of H c, copy number m with the low four bits of the index XORed with m
        for begin in range(0, z.size, size):
            s = shift_at(unit * z.size // size + begin // size, size, tensor, k0, k1)
            if size < 16:
                for i in range(size):
                    zb[begin + i] = table[i ^ s]
            else:
                row, coarse = (s & 15) * size, s & ~15
                for i in range(0, size, 16):
                    copy16(zb, begin + i, table, row + (i ^ coarse))
    stream = 4 if kind == HASHED else 2
    for g in range(groups):
        sign_words(words, unit * groups + g, tensor, uint32(0), stream, k0, k1)
        flip(zb, zb, g * BLOCK, words)


@_kernel
def shift_at(block, size, tensor, k0, k1):
    """s_b of the hashed family."""
    return np.int64(philox(uint32(block), tensor, uint32(0), uint32(5), k0, k1)[0]) & (size - 1)


# --- weights of each type -----------------------------------------------------------------------


def store(out, base, total):
    """out = base + total, rounded once to the type of the weights.

    A float32 array is itself, a bfloat16 one is seen as uint16, a float16 one as int16, so that
    each type has a kernel of its own; Numba has neither type on CPUs. Adding 0 first is part of the
    definition: a sum without an addend starts from +0, so it is never −0.
    """


@overload(store, inline="never")
def _store(out, base, total):
    if out.dtype.name == "float32":

        def store32(out, base, total):
            for i in range(out.size):
                out[i] = base[i] + (ZERO + total[i])

        return store32
    if out.dtype.name == "uint16":

        def store_bfloat16(out, base, total):
            for i in range(out.size):
                bits = _bits(_float(uint32(base[i]) << uint32(16)) + (ZERO + total[i]))
                rounded = uint32(bits + uint32(0x7FFF) + (bits >> uint32(16) & uint32(1))) >> uint32(16)
                nan = bits & uint32(0x7FFFFFFF) > uint32(0x7F800000)
                out[i] = np.uint16((bits >> uint32(16) | uint32(0x40)) if nan else rounded)

        return store_bfloat16

    def store_float16(out, base, total):
        for i in range(out.size):
            out[i] = np.int16(_half(_unhalf(uint32(np.uint16(base[i]))) + (ZERO + total[i])))

    return store_float16


@_inlined
def _unhalf(h):
    """float16 bits to float32: move exponent and mantissa, then mend the bias by an exact product."""
    magnitude = _float(uint32((h & uint32(0x7FFF)) << uint32(13))) * np.float32(2.0**112)
    bits = _bits(magnitude)
    special = uint32(0x7F800000) | bits & uint32(0x7FFFFF)  # infinity and NaN
    bits = special if magnitude >= np.float32(65536) else bits
    return _float(uint32(bits | (h & uint32(0x8000)) << uint32(16)))


@_inlined
def _half(value):
    """float32 to float16 bits, to nearest even, overflow to infinity."""
    bits = _bits(value)
    sign = uint32(bits >> uint32(16) & uint32(0x8000))
    m = uint32(bits & uint32(0x7FFFFFFF))
    odd = uint32(m >> uint32(13) & uint32(1))
    normal = uint32(uint32(m - uint32(0x38000000) + uint32(0xFFF) + odd) >> uint32(13))
    # below 2^-14 the adder itself rounds to multiples of 2^-24, when 0.5 aligns them
    tiny = uint32(_bits(_float(m) + np.float32(0.5)) - uint32(0x3F000000))
    special = uint32(0x7E00) if m > uint32(0x7F800000) else uint32(0x7C00)
    small = tiny if m < uint32(0x38800000) else normal
    return uint32(sign | (special if m >= uint32(0x47800000) else small))


@_kernel
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


# --- projection ---------------------------------------------------------------------------------


@_kernel
def project_segment(kind, v, start, size, unit_size, tensor, k0, k1, result, acc, words):
    """result = the K inner products over positions start … start + v.size, inside one segment."""
    stop = start + v.size
    result[:] = 0
    one, unity = np.empty(1, np.uint32), np.ones(1, np.float32)
    products = np.empty(BLOCK, np.float32)
    for unit in range(start // unit_size, (stop + unit_size - 1) // unit_size):
        low, high = max(start - unit * unit_size, 0), min(stop - unit * unit_size, unit_size)
        acc[:] = np.float32(0)
        acc[low:high] = v[unit * unit_size + low - start : unit * unit_size + high - start]
        if kind <= RADEMACHER:
            for j in range(size):
                one[0] = j
                products[:] = np.float32(0)
                if kind == GAUSSIAN:
                    add_gaussian(products, unit, 0, EIGHTH, one, unity, words, tensor, k0, k1)
                else:
                    add_rademacher(products, unit, one, unity, words, tensor, k0, k1)
                result[j] += _inner(products, acc)
        else:
            project_unit(kind, acc, unit, size, tensor, k0, k1, result, words)
    if kind == HASHED:
        h = 1
        while h < size:
            for begin in range(0, size, 2 * h):
                for i in range(begin, begin + h):
                    a, b = result[i], result[i + h]
                    result[i], result[i + h] = a + b, a - b
            h *= 2


@_kernel
def _inner(products, v):
    """⟨products, v⟩ in float32, halves added onto each other: 2048, 1024, …"""
    for i in range(BLOCK):
        products[i] *= v[i]
    h = BLOCK // 2
    while h:
        for i in range(h):
            products[i] += products[h + i]
        h //= 2
    return products[0]


@_kernel
def project_unit(kind, v, unit, size, tensor, k0, k1, result, words):
    """Add the inner products with one unit of a transformed family; v is overwritten."""
    vb, groups = v.view(np.uint32), v.size // BLOCK
    for g in range(groups):
        sign_words(words, unit * groups + g, tensor, uint32(0), 4 if kind == HASHED else 2, k0, k1)
        flip(vb, vb, g * BLOCK, words)
    if kind == HADAMARD:
        transform(v, size)
        for g in range(groups):
            sign_words(words, unit * groups + g, tensor, uint32(0), 3, k0, k1)
            flip(vb, vb, g * BLOCK, words)
    for begin in range(0, v.size, size):
        s = shift_at(unit * v.size // size + begin // size, size, tensor, k0, k1) if kind == HASHED else 0
        for j in range(size):
            result[j] += np.float64(v[begin + (j ^ s)])


# --- whole models -------------------------------------------------------------------------------


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
