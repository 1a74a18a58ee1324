"""The definition of every direction, in plain NumPy: slow, short, and always right.

Other backends exist only to be faster; each is tested against this file, bit for bit. Only integer
operations and IEEE-754 float32 add, subtract, multiply and square root are used, never a library's
log, sin or cos and never a fused multiply-add. docs/directions.md says the same in words; families.py names
the functions here that belong to each family.
"""

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .factors import Factor, Matrix

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BLOCK = 4096  # positions; every stream of random bits begins anew at a multiple of it
QUARTER = BLOCK // 4  # word w of a Philox call serves the w-th quarter of a block
EIGHTH = BLOCK // 8  # normals come in pairs: a word serves two eighths
LANES = 32  # neighbouring positions take their signs from neighbouring counters: no lane shuffles
ROWS = 4096  # rows of a factored tensor whose inner products are made at a time
SEGMENT = 1 << 20  # positions; partial sums of `project` are added segment by segment

# The last word of the counter: the use of the bits. A program's own family takes numbers from 256 on.
GAUSSIAN, RADEMACHER, HADAMARD_ROW, HADAMARD_BLOCK, HASHED_ROW, HASHED_BLOCK = range(6)
SEPARABLE_ROW, SEPARABLE_COLUMN = 6, 7


PoolLike: TypeAlias = Any  # a `pool.Pool`, whose families are made of the functions here


# --- bits ---------------------------------------------------------------------------------------


def philox(counter: tuple[NDArray[np.integer] | int, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Philox-4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, x2, x3 = (np.atleast_1d(np.asarray(c)).astype(np.uint64) & low for c in counter)
    for number in range(10):
        k0 = np.uint64((key[0] + number * 0x9E3779B9) & 0xFFFFFFFF)
        k1 = np.uint64((key[1] + number * 0xBB67AE85) & 0xFFFFFFFF)
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (b >> shift) ^ x1 ^ k0, b & low, (a >> shift) ^ x3 ^ k1, a & low
    return tuple(np.broadcast_arrays(*(x.astype(np.uint32) for x in (x0, x1, x2, x3))))


def signs(pool: PoolLike, stream: int, tensor: int, direction: int, positions: NDArray[np.int64]) -> Floats:
    """Random signs ±1 at some positions: a set bit is −1.

    Position p = 4096 g + 1024 w + 32 t + l takes bit t of word w of counter 32 g + l.
    """
    group, word = positions // BLOCK, positions // QUARTER % 4
    bit, lane = positions // LANES % 32, positions % LANES
    words = np.stack(philox((group * LANES + lane, tensor, direction, stream), pool.key_words))
    bits = np.take_along_axis(words, word[None], axis=0)[0] >> bit.astype(np.uint32) & np.uint32(1)
    return np.float32(1) - np.float32(2) * bits.astype(np.float32)


def normals(x: Words) -> tuple[Floats, Floats]:
    """Two standard normals from each word: Box–Muller with the angle taken in one quadrant.

    Bits 14 to 31 choose u, the midpoint of one of 2^18 steps of (0, 1); bits 2 to 13 choose
    a = π/2 · t, t the midpoint of one of 2^12 steps of (−½, ½). The point at angle π/4 + a and
    radius √(−2 ln u) has the coordinates √(−ln u) (cos a ∓ sin a); bits 0 and 1 are their signs.
    Odd moments are exactly zero, the variance is 1 + 4e-6, the largest value 5.1. The polynomials
    are minimax fits: √(−ln u) is within 3.2e-6, sin a within 6.1e-7, cos a within 1.3e-5, far
    below the steps of 3.8e-4 in the angle.
    """
    unit = np.float32(1)
    u = np.float32(2) - (x >> np.uint32(9) & np.uint32(0x7FFFE0) | np.uint32(0x3F800010)).view(np.float32)
    # u = 2^e (1 + t) with 1 + t in [√½, √2)
    shifted = u.view(np.int32) - np.int32(0x3F3504F3)
    exponent = (shifted >> np.int32(23)).astype(np.float32)
    t = ((shifted & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - unit
    p = (((t * LOG[4] + LOG[3]) * t + LOG[2]) * t + LOG[1]) * t + LOG[0]
    radius = np.sqrt((p * t - unit) * t - exponent * LN2)
    a = (x << np.uint32(9) & np.uint32(0x7FF800) | np.uint32(0x3F800400)).view(np.float32) - np.float32(1.5)
    s = a * a
    sine = ((s * SIN[2] + SIN[1]) * s + SIN[0]) * a
    cosine = (s * COS[1] + COS[0]) * s + unit
    first, second = radius * (cosine - sine), radius * (cosine + sine)
    return (
        (first.view(np.uint32) ^ x << np.uint32(31)).view(np.float32),
        (second.view(np.uint32) ^ x << np.uint32(30) & np.uint32(0x80000000)).view(np.float32),
    )


def _floats(*hexadecimal: str) -> list[np.float32]:
    return [np.float32(float.fromhex(h)) for h in hexadecimal]


# −ln(1+t) = t (t P(t) − 1); sin(π/2 t) = t S(t²); cos(π/2 t) = 1 + t² C(t²); lowest power first
LOG = _floats("0x1.ffedeap-2", "-0x1.54a848p-2", "0x1.037cd8p-2", "-0x1.c2ffb4p-3", "0x1.2acfecp-3")
SIN = _floats("0x1.921f32p+0", "-0x1.4a9ac4p-1", "0x1.3e202ap-4")
COS = _floats("-0x1.3bafa0p+0", "0x1.f8d4aep-3")
LN2 = _floats("0x1.62e430p-1")[0]


# --- the families: z_j at positions start ≤ p < stop of one tensor, shape (stop − start,) ---------


def gaussian(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    counter = positions // BLOCK * EIGHTH + positions % EIGHTH
    words = philox((counter, tensor, direction, GAUSSIAN), pool.key_words)
    eight = np.concatenate([normals(word) for word in words])
    return np.take_along_axis(eight, (positions // EIGHTH % 8)[None], axis=0)[0]


def rademacher(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    return signs(pool, RADEMACHER, tensor, direction, np.arange(start, stop, dtype=np.int64))


def hadamard(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    block, row = positions // pool.size, positions % pool.size
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, block * pool.size + direction)
    return signs(pool, HADAMARD_ROW, tensor, 0, positions) * walsh(row & direction) * d2


def hashed(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    block, row = positions // pool.size, positions % pool.size
    d2 = walsh(shifts(pool, tensor, block) & direction)
    return signs(pool, HASHED_ROW, tensor, 0, positions) * walsh(row & direction) * d2


def walsh(both: NDArray[np.int64]) -> Floats:
    """The entry H[i, j] = (−1)^popcount(i & j) of the Walsh–Hadamard matrix, from i & j."""
    return np.float32(1) - np.float32(2) * (np.bitwise_count(both) % 2).astype(np.float32)


def shifts(pool: PoolLike, tensor: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shifts s_b of the hashed family: the low bits of the first word of counter b."""
    return philox((blocks, tensor, 0, HASHED_BLOCK), pool.key_words)[0].astype(np.int64) & (pool.size - 1)


# --- the transformed families: sums and inner products, by one transform a block of K positions ---


def transform(x: NDArray) -> NDArray:
    """Walsh–Hadamard transform of the last axis, stages h = 1, 2, 4, …: y_i = Σ_j H[i, j] x_j."""
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        h *= 2
    return x


def hadamard_total(pool: PoolLike, c: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, positions).reshape(-1, pool.size)
    d1 = signs(pool, HADAMARD_ROW, tensor, 0, positions)
    return d1 * transform(d2 * c).reshape(-1)


def hadamard_products(pool: PoolLike, v: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    d1 = signs(pool, HADAMARD_ROW, tensor, 0, positions)
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, positions).reshape(-1, pool.size)
    return d2 * transform((d1 * v).reshape(-1, pool.size))


def hashed_total(pool: PoolLike, c: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    row = positions % pool.size ^ shifts(pool, tensor, positions // pool.size)
    return signs(pool, HASHED_ROW, tensor, 0, positions) * transform(c)[row]


def hashed_products(pool: PoolLike, v: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    signed = (signs(pool, HASHED_ROW, tensor, 0, positions) * v).reshape(-1, pool.size)
    s = shifts(pool, tensor, positions[:: pool.size] // pool.size)
    return np.take_along_axis(signed, np.arange(pool.size) ^ s[:, None], axis=1)


# --- the factored families: z = u vᵀ in a tensor that is seen as a matrix (o × i), a sum is U C Vᵀ ---


def factored(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    unit_vector = np.zeros(pool.size, np.float32)
    unit_vector[direction] = 1
    return total(pool, np.arange(pool.size, dtype=np.uint32), unit_vector, tensor, start, stop)


def separable_core(c: Floats) -> Floats:
    """The table M = H C H, (m, m), for C = c in rows of m = √K: first along rows, then along columns."""
    m = math.isqrt(c.size)
    return transform(transform(c.reshape(m, m)).T).T


def separable_signs(pool: PoolLike, tensor: int, rows: range, matrix: Matrix) -> tuple[Floats, Floats]:
    """The signs s_u of some rows and s_v of all columns."""
    of_rows = signs(pool, SEPARABLE_ROW, tensor, 0, np.arange(rows.start, rows.stop, dtype=np.int64))
    return of_rows, signs(pool, SEPARABLE_COLUMN, tensor, 0, np.arange(matrix.columns, dtype=np.int64))


def separable_total(pool: PoolLike, core: Floats, tensor: int, rows: range, matrix: Matrix, sums: Floats) -> Floats:
    """The sums s[x, y] + (s_u[x] s_v[y]) M[x mod m, y mod m]."""
    s_u, s_v = separable_signs(pool, tensor, rows, matrix)
    x, y = np.arange(rows.start, rows.stop) % len(core), np.arange(matrix.columns) % len(core)
    signed: Floats = np.outer(s_u, s_v) * core[np.ix_(x, y)]
    return sums + signed


def separable_products(pool: PoolLike, v: Floats, tensor: int, rows: range, matrix: Matrix) -> NDArray[np.float64]:
    """The K inner products with some rows of a tensor: signs taken off, tiles laid over each other, transformed."""
    s_u, s_v = separable_signs(pool, tensor, rows, matrix)
    signed, m = (s_u[:, None] * s_v) * v, math.isqrt(pool.size)
    across = np.zeros((len(rows), m), np.float32)
    for begin in range(0, matrix.columns, m):
        part = signed[:, begin : begin + m]
        across[:, : part.shape[1]] += part
    folded = np.zeros((m, m))
    for x, row in zip(rows, across, strict=True):
        folded[x % m] += row
    return transform(transform(folded).T).T.reshape(-1)


def informed_total(pool: PoolLike, c: Floats, tensor: int, rows: range, factor: Factor, sums: Floats) -> Floats:
    """The sums s[x, y] + Σ_b (Σ_a U[x, a] C[a, b]) V[y, b], a and b ascending, each product and sum rounded."""
    left = factor.left[rows.start : rows.stop].astype(np.float32)
    moved = np.zeros((len(rows), factor.ranks[1]), np.float32)
    for a, row in enumerate(factor.core(c)):
        moved = moved + left[:, a : a + 1] * row
    for b, column in enumerate(factor.right.T.astype(np.float32)):
        sums = sums + moved[:, b : b + 1] * column
    return sums


def informed_products(pool: PoolLike, v: Floats, tensor: int, rows: range, factor: Factor) -> NDArray[np.float64]:
    """The K inner products with some rows of a tensor: Q[x, b] = Σ_y v[x, y] V[y, b] in float32 by halves, then
    Σ_x U[x, a] Q[x, b] in float64 by halves, times both scales.
    """
    left, found = factor.left[rows.start : rows.stop].astype(np.float64), np.zeros(pool.size)
    for b, column in enumerate(factor.right.T.astype(np.float32)):
        q = halved(v * column).astype(np.float64)
        for a in range(factor.ranks[0]):
            scale = np.float64(factor.left_scale[a]) * np.float64(factor.right_scale[b])
            found[factor.first + a * factor.ranks[1] + b] = halved(left[:, a] * q) * scale
    return found


def halved(x: NDArray) -> NDArray:
    """The sum over the last axis, filled up with zeros to a power of two: halves onto each other until one is left."""
    n = 1 << (x.shape[-1] - 1).bit_length()
    x = np.concatenate([x, np.zeros((*x.shape[:-1], n - x.shape[-1]), x.dtype)], axis=-1)
    while n := n // 2:
        x = x[..., :n] + x[..., n:]
    return x[..., 0]


# --- the operations -----------------------------------------------------------------------------


def elements(pool: PoolLike, direction: int, tensor: int, start: int, stop: int) -> Floats:
    """The direction z_j at positions start ≤ p < stop of one tensor, shape (stop − start,)."""
    return pool.record.elements(pool, direction, tensor, start, stop)


def total(
    pool: PoolLike,
    directions: Words,
    coefficients: Floats,
    tensor: int,
    start: int,
    stop: int,
    addend: Floats | None = None,
) -> Floats:
    """The sum addend + Σ_k c_k z_{j_k} at positions start ≤ p < stop, in float32.

    Families without a transform add the products in ascending j, starting from the addend (or zero);
    the others transform c and add the result to the addend.
    """
    sums = np.zeros(stop - start, np.float32) if addend is None else addend.copy()
    if not pool.transformed and not pool.factored:
        for direction, coefficient in zip(directions, coefficients, strict=True):
            sums = sums + coefficient * elements(pool, int(direction), tensor, start, stop)
        return sums
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    if pool.transformed:
        first, last = start // pool.size, -(-stop // pool.size)  # whole blocks
        positions = np.arange(first * pool.size, last * pool.size, dtype=np.int64)
        blocks = pool.record.transform.total(pool, c, tensor, positions)
        return sums + blocks[start - positions[0] : stop - positions[0]]
    matrix = pool.matrix(tensor)
    if matrix is None:
        return sums
    rows = matrix.rows_of(start, stop)
    whole = np.zeros((len(rows), matrix.columns), np.float32)
    inside = slice(start - rows.start * matrix.columns, stop - rows.start * matrix.columns)
    whole.reshape(-1)[inside] = sums
    made = pool.record.factored.total(pool, pool.record.core(c), tensor, rows, matrix, whole)
    return made.reshape(-1)[inside]


def combine(base: Floats, addend: Floats, dtype: str) -> NDArray:
    """The weights base + addend, rounded once, to nearest even, to `dtype`.

    bfloat16 has no NumPy type: it is returned as the upper 16 bits of its float32.
    """
    w = base + addend
    if dtype == "float32":
        return w
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return w.astype(np.float16)
    bits = w.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(w), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)


def project(pool: PoolLike, v: Floats, tensor: int, start: int) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ over positions start ≤ p < start + len(v), shape (K,).

    Products and sums inside a block are float32; blocks are added in ascending order in float64,
    one SEGMENT of positions at a time, and the segments' sums in ascending order. Factored families: ROWS rows of the
    tensor at a time, and their results in ascending order.
    """
    if pool.factored:
        return _factored_project(pool, v, tensor, start)
    unit = pool.unit
    first, last = start // unit, -(-(start + v.size) // unit)
    whole = np.zeros((last - first) * unit, np.float32)
    whole[start - first * unit :][: v.size] = v
    result = np.zeros(pool.size)
    per_segment = max(1, SEGMENT // unit)
    for segment in range(first // per_segment, -(-last // per_segment)):
        partial = np.zeros(pool.size)
        for number in range(max(first, segment * per_segment), min(last, (segment + 1) * per_segment)):
            begin, part = number * unit, whole[(number - first) * unit :][:unit]
            if pool.transformed:
                positions = np.arange(begin, begin + unit, dtype=np.int64)
                blocks = pool.record.transform.products(pool, part, tensor, positions)
            else:
                z = (elements(pool, j, tensor, begin, begin + unit) for j in range(pool.size))
                blocks = [np.array([halved(direction * part) for direction in z])]
            for block in blocks:
                partial = partial + block
        result += transform(partial) if pool.record.at_end else partial
    return result


def _factored_project(pool: PoolLike, v: Floats, tensor: int, start: int) -> NDArray[np.float64]:
    matrix, result, stop = pool.matrix(tensor), np.zeros(pool.size), start + v.size
    if matrix is None or not v.size:
        return result
    rows = matrix.rows_of(start, stop)
    for first in range(rows.start // ROWS * ROWS, rows.stop, ROWS):
        band = range(first, min(first + ROWS, matrix.rows))
        whole = np.zeros(len(band) * matrix.columns, np.float32)
        low, high = max(start, first * matrix.columns), min(stop, band.stop * matrix.columns)
        whole[low - first * matrix.columns :][: high - low] = v[low - start : high - start]
        result += pool.record.factored.products(pool, whole.reshape(len(band), -1), tensor, band, matrix)
    return result
