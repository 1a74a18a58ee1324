"""Random bits and normals: `reference.philox`, `signs` and `normals` as kernels."""

import numpy as np
from numba import int32, njit, uint32, uint64

from .. import reference as ref
from ..pool import BLOCK
from .lanes import flip16

QUARTER, EIGHTH, LANES = ref.QUARTER, ref.EIGHTH, ref.LANES
LN2, SIGN, LOW = ref.LN2, np.uint32(0x80000000), np.uint64(0xFFFFFFFF)
L0, L1, L2, L3, L4 = ref.LOG
S0, S1, S2 = ref.SIN
C0, C1 = ref.COS
ONE, TWO, HALVES = np.float32(1), np.float32(2), np.float32(1.5)

kernel = njit(nogil=True, cache=True, fastmath=False, error_model="numpy")
# Inlined before LLVM sees it: a call in the way keeps a loop from being vectorised.
inlined = njit(inline="always", fastmath=False, error_model="numpy")


@inlined
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


@kernel
def sign_words(words, group, tensor, direction, stream, k0, k1):
    """The 128 words that sign one block; words[32 w + l] is word w of counter 32 group + l."""
    for lane in range(LANES):
        counter = uint32(uint32(group * LANES) + uint32(lane))
        x0, x1, x2, x3 = philox(counter, tensor, direction, uint32(stream), k0, k1)
        words[lane], words[LANES + lane], words[2 * LANES + lane], words[3 * LANES + lane] = x0, x1, x2, x3


@kernel
def flip(out, values, first, words):
    """out[p] = ± values[p] over the block that begins at `first`; both are float32 seen as uint32."""
    for w in range(4):
        for t in range(32):
            begin = first + QUARTER * w + LANES * t
            for lane in range(0, LANES, 16):
                flip16(out, begin + lane, values, words, LANES * w + lane, 31 - t)


@kernel
def sign_at(position, tensor, stream, k0, k1):
    """The sign of one position as a bit to XOR into a float32."""
    counter = uint32(uint32(position // BLOCK * LANES) + uint32(position % LANES))
    x0, x1, x2, x3 = philox(counter, tensor, uint32(0), uint32(stream), k0, k1)
    w = position // QUARTER % 4
    word = x0 if w == 0 else x1 if w == 1 else x2 if w == 2 else x3
    return uint32(word << uint32(31 - position // LANES % 32) & SIGN)


@inlined
def as_float(bits):
    return np.uint32(bits).view(np.float32)


@inlined
def as_bits(value):
    return np.float32(value).view(np.uint32)


@inlined
def normals(x):
    """`reference.normals` of one word. Every step is cast back to 32 bits, or Numba widens it."""
    u = TWO - as_float(uint32(uint32(x >> uint32(9)) & uint32(0x7FFFE0)) | uint32(0x3F800010))
    shifted = int32(int32(as_bits(u)) - int32(0x3F3504F3))
    exponent = np.float32(int32(shifted >> int32(23)))
    t = as_float(uint32(uint32(shifted) & uint32(0x7FFFFF)) + uint32(0x3F3504F3)) - ONE
    p = (((t * L4 + L3) * t + L2) * t + L1) * t + L0
    radius = np.sqrt((p * t - ONE) * t - exponent * LN2)
    a = as_float(uint32(uint32(x << uint32(9)) & uint32(0x7FF800)) | uint32(0x3F800400)) - HALVES
    s = a * a
    sine = ((s * S2 + S1) * s + S0) * a
    cosine = (s * C1 + C0) * s + ONE
    first, second = radius * (cosine - sine), radius * (cosine + sine)
    return (
        as_float(as_bits(first) ^ uint32(x << uint32(31))),
        as_float(as_bits(second) ^ uint32(uint32(x << uint32(30)) & SIGN)),
    )


@kernel
def gaussian_words(words, low, high, block, tensor, direction, k0, k1):
    """Words of counters low ≤ i < high of one block; words[512 w + i] is word w."""
    w0, w1 = words[low:high], words[EIGHTH + low : EIGHTH + high]
    w2, w3 = words[2 * EIGHTH + low : 2 * EIGHTH + high], words[3 * EIGHTH + low : 3 * EIGHTH + high]
    first = uint32(block * EIGHTH + low)
    for i in range(high - low):
        w0[i], w1[i], w2[i], w3[i] = philox(uint32(first + uint32(i)), tensor, direction, uint32(0), k0, k1)
