"""The definition of every direction, in plain NumPy: slow, short, and always right.

Other backends exist only to be faster; each is tested against this file, bit for bit. Only integer
operations and IEEE-754 float32 add, subtract, multiply and square root are used, never a library's
log, sin or cos and never a fused multiply-add. docs/directions.md says the same in words; families.py names
the functions here that belong to each family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

BLOCK = 4096  # positions; every stream of random bits begins anew at a multiple of it
QUARTER = BLOCK // 4  # word w of a Philox call serves the w-th quarter of a block
EIGHTH = BLOCK // 8  # normals come in pairs: a word serves two eighths
LANES = 32  # neighbouring positions take their signs from neighbouring counters: no lane shuffles
SEGMENT = 1 << 20  # positions; partial sums of `project` are added segment by segment

# The last word of the counter: the use of the bits. A program's own family takes numbers from 256 on.
GAUSSIAN, RADEMACHER, HADAMARD_ROW, HADAMARD_BLOCK, HASHED_ROW, HASHED_BLOCK = range(6)


class Pool(Protocol):
    """The part of a `pool.Pool` that its directions are made from."""

    @property
    def key_words(self) -> tuple[int, int]: ...  # the key as Philox takes it

    @property
    def size(self) -> int: ...  # K

    @property
    def unit(self) -> int: ...  # positions that are made together

    @property
    def record(self) -> Any: ...  # the Family


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


def signs(pool: Pool, stream: int, tensor: int, direction: int, positions: NDArray[np.int64]) -> Floats:
    """Random signs ±1 at some positions: a set bit is −1.

    Position p = 4096 g + 1024 w + 32 t + l takes bit t of word w of counter 32 g + l.
    """
    group, word = positions // BLOCK, positions // QUARTER % 4
    bit, lane = positions // LANES % 32, positions % LANES
    words = np.stack(philox((group * LANES + lane, tensor, direction, stream), pool.key_words))
    taken = np.take_along_axis(words, word[None], axis=0)[0] >> bit.astype(np.uint32) & np.uint32(1)
    return np.float32(1) - np.float32(2) * taken.astype(np.float32)


def normals(x: Words) -> tuple[Floats, Floats]:
    """Two standard normals from each word: Box–Muller with the angle taken in one quadrant.

    Bits 14 to 31 choose u, the midpoint of one of 2^18 steps of (0, 1); bits 2 to 13 choose
    a = π/2 · t, t the midpoint of one of 2^12 steps of (−½, ½). The point at angle π/4 + a and
    radius √(−2 ln u) has the coordinates √(−ln u) (cos a ∓ sin a); bits 0 and 1 are their signs.
    Odd moments are exactly zero, the variance is 1 + 4e-6, the largest value 5.1. The polynomials
    are minimax fits: √(−ln u) is within 3.2e-6, sin a within 6.1e-7, cos a within 1.3e-5, far
    below the steps of 3.8e-4 in the angle.
    """
    one = np.float32(1)
    u = np.float32(2) - (x >> np.uint32(9) & np.uint32(0x7FFFE0) | np.uint32(0x3F800010)).view(np.float32)
    # u = 2^e (1 + t) with 1 + t in [√½, √2)
    shifted = u.view(np.int32) - np.int32(0x3F3504F3)
    exponent = (shifted >> np.int32(23)).astype(np.float32)
    t = ((shifted & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - one
    p = (((t * LOG[4] + LOG[3]) * t + LOG[2]) * t + LOG[1]) * t + LOG[0]
    radius = np.sqrt((p * t - one) * t - exponent * LN2)
    a = (x << np.uint32(9) & np.uint32(0x7FF800) | np.uint32(0x3F800400)).view(np.float32) - np.float32(1.5)
    s = a * a
    sine = ((s * SIN[2] + SIN[1]) * s + SIN[0]) * a
    cosine = (s * COS[1] + COS[0]) * s + one
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


def gaussian(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    counter = positions // BLOCK * EIGHTH + positions % EIGHTH
    words = philox((counter, tensor, direction, GAUSSIAN), pool.key_words)
    eight = np.concatenate([normals(word) for word in words])
    return np.take_along_axis(eight, (positions // EIGHTH % 8)[None], axis=0)[0]


def rademacher(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> Floats:
    return signs(pool, RADEMACHER, tensor, direction, np.arange(start, stop, dtype=np.int64))


def hadamard(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    block, row = positions // pool.size, positions % pool.size
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, block * pool.size + direction)
    return signs(pool, HADAMARD_ROW, tensor, 0, positions) * walsh(row & direction) * d2


def hashed(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> Floats:
    positions = np.arange(start, stop, dtype=np.int64)
    block, row = positions // pool.size, positions % pool.size
    d2 = walsh(shifts(pool, tensor, block) & direction)
    return signs(pool, HASHED_ROW, tensor, 0, positions) * walsh(row & direction) * d2


def walsh(both: NDArray[np.int64]) -> Floats:
    """The entry H[i, j] = (−1)^popcount(i & j) of the Walsh–Hadamard matrix, from i & j."""
    return np.float32(1) - np.float32(2) * (np.bitwise_count(both) % 2).astype(np.float32)


def shifts(pool: Pool, tensor: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
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


def hadamard_total(pool: Pool, c: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, positions).reshape(-1, pool.size)
    d1 = signs(pool, HADAMARD_ROW, tensor, 0, positions)
    return d1 * transform(d2 * c).reshape(-1)


def hadamard_products(pool: Pool, v: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    d1 = signs(pool, HADAMARD_ROW, tensor, 0, positions)
    d2 = signs(pool, HADAMARD_BLOCK, tensor, 0, positions).reshape(-1, pool.size)
    return d2 * transform((d1 * v).reshape(-1, pool.size))


def hashed_total(pool: Pool, c: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    row = positions % pool.size ^ shifts(pool, tensor, positions // pool.size)
    return signs(pool, HASHED_ROW, tensor, 0, positions) * transform(c)[row]


def hashed_products(pool: Pool, v: Floats, tensor: int, positions: NDArray[np.int64]) -> Floats:
    signed = (signs(pool, HASHED_ROW, tensor, 0, positions) * v).reshape(-1, pool.size)
    s = shifts(pool, tensor, positions[:: pool.size] // pool.size)
    return np.take_along_axis(signed, np.arange(pool.size) ^ s[:, None], axis=1)


@dataclass(frozen=True, slots=True)
class Transform:
    """The definition of a transformed family's sums and inner products.

    Args:
        total: maps (pool, c, tensor, positions) to Σ_j c_j z_j at the positions of whole blocks; c has shape (K,).
        products: maps (pool, v, tensor, positions) to the K inner products of every block, shape (blocks, K).
        at_end: whether the inner products are the transform of the sum of a segment's products.
    """

    total: Callable[[Pool, Floats, int, NDArray[np.int64]], Floats]
    products: Callable[[Pool, Floats, int, NDArray[np.int64]], Floats]
    at_end: bool = False


# --- the operations -----------------------------------------------------------------------------


def elements(pool: Pool, direction: int, tensor: int, start: int, stop: int) -> Floats:
    """The direction z_j at positions start ≤ p < stop of one tensor, shape (stop − start,)."""
    return pool.record.elements(pool, direction, tensor, start, stop)


def total(
    pool: Pool,
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
    start_from = np.zeros(stop - start, np.float32) if addend is None else addend.copy()
    of = pool.record.transform
    if of is None:
        for direction, coefficient in zip(directions, coefficients, strict=True):
            start_from = start_from + coefficient * elements(pool, int(direction), tensor, start, stop)
        return start_from
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    first, last = start // pool.size, -(-stop // pool.size)  # whole blocks
    positions = np.arange(first * pool.size, last * pool.size, dtype=np.int64)
    return start_from + of.total(pool, c, tensor, positions)[start - positions[0] : stop - positions[0]]


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


def project(pool: Pool, v: Floats, tensor: int, start: int) -> NDArray[np.float64]:
    """The K inner products ⟨z_j, v⟩ over positions start ≤ p < start + len(v), shape (K,).

    Products and sums inside a block are float32; blocks are added in ascending order in float64,
    one SEGMENT of positions at a time, and the segments' sums in ascending order.
    """
    unit, of = pool.unit, pool.record.transform
    first, last = start // unit, -(-(start + v.size) // unit)
    whole = np.zeros((last - first) * unit, np.float32)
    whole[start - first * unit :][: v.size] = v
    result = np.zeros(pool.size)
    per_segment = max(1, SEGMENT // unit)
    for segment in range(first // per_segment, -(-last // per_segment)):
        partial = np.zeros(pool.size)
        for number in range(max(first, segment * per_segment), min(last, (segment + 1) * per_segment)):
            for block in products(pool, whole[(number - first) * unit :][:unit], tensor, number * unit):
                partial = partial + block
        result += transform(partial) if of is not None and of.at_end else partial
    return result


def products(pool: Pool, v: Floats, tensor: int, start: int) -> Floats:
    """The inner products with one unit, block by block, shape (blocks, K)."""
    of = pool.record.transform
    if of is not None:
        return of.products(pool, v, tensor, np.arange(start, start + v.size, dtype=np.int64))
    made = np.empty((1, pool.size), np.float32)
    for j in range(pool.size):
        x = elements(pool, j, tensor, start, start + v.size) * v
        while x.size > 1:  # halves onto each other: 2048, 1024, …
            x = x[: x.size // 2] + x[x.size // 2 :]
        made[0, j] = x[0]
    return made
