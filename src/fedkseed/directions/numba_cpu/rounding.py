"""Weights of each type: widen, add, round once to nearest even."""

import numpy as np
from numba import uint32
from numba.extending import overload

from .bits import as_bits, as_float, inlined

ZERO = np.float32(0)


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
                bits = as_bits(as_float(uint32(base[i]) << uint32(16)) + (ZERO + total[i]))
                rounded = uint32(bits + uint32(0x7FFF) + (bits >> uint32(16) & uint32(1))) >> uint32(16)
                nan = bits & uint32(0x7FFFFFFF) > uint32(0x7F800000)
                out[i] = np.uint16((bits >> uint32(16) | uint32(0x40)) if nan else rounded)

        return store_bfloat16

    def store_float16(out, base, total):
        for i in range(out.size):
            out[i] = np.int16(_half(_unhalf(uint32(np.uint16(base[i]))) + (ZERO + total[i])))

    return store_float16


@inlined
def _unhalf(h):
    """float16 bits to float32: move exponent and mantissa, then mend the bias by an exact product."""
    magnitude = as_float(uint32((h & uint32(0x7FFF)) << uint32(13))) * np.float32(2.0**112)
    bits = as_bits(magnitude)
    special = uint32(0x7F800000) | bits & uint32(0x7FFFFF)  # infinity and NaN
    bits = special if magnitude >= np.float32(65536) else bits
    return as_float(uint32(bits | (h & uint32(0x8000)) << uint32(16)))


@inlined
def _half(value):
    """float32 to float16 bits, to nearest even, overflow to infinity."""
    bits = as_bits(value)
    sign = uint32(bits >> uint32(16) & uint32(0x8000))
    m = uint32(bits & uint32(0x7FFFFFFF))
    odd = uint32(m >> uint32(13) & uint32(1))
    normal = uint32(uint32(m - uint32(0x38000000) + uint32(0xFFF) + odd) >> uint32(13))
    # below 2^-14 the adder itself rounds to multiples of 2^-24, when 0.5 aligns them
    tiny = uint32(as_bits(as_float(m) + np.float32(0.5)) - uint32(0x3F000000))
    special = uint32(0x7E00) if m > uint32(0x7F800000) else uint32(0x7C00)
    small = tiny if m < uint32(0x38800000) else normal
    return uint32(sign | (special if m >= uint32(0x47800000) else small))
