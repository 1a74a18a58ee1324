"""Conversion of weights in memory: widened to float32, rounded once to nearest even.

A `marker` stands for a type of weights: one number of the type that NumPy calls float32, uint16 (for bfloat16) or
int16 (for float16). So each type has kernels of its own.
"""

import numpy as np
from numba.extending import overload

from .philox import inlined
from .simd import as_floats, as_words, floats, load_floats, load_shorts, store, store_shorts, stream, where_above, words


def item_size(marker) -> int:
    """The bytes that one weight takes."""
    raise NotImplementedError  # Numba has an overload for each marker


def widened(address, marker):
    """Read 16 weights as float32."""


def put_rounded(address, value, marker, around):
    """Write 16 float32 as weights; past the caches if `around` is true (float32 at a 64-byte boundary only)."""


@inlined
def from_half(bits):
    """The bits of 16 float16 as float32: move exponent and mantissa, then correct the bias by an exact product."""
    magnitude = as_words(as_floats((bits & words(0x7FFF)) << words(13)) * floats(np.float32(2.0**112)))
    special = magnitude & words(0x7FFFFF) | words(0x7F800000)  # infinity and NaN: from 65536 on
    magnitude = where_above(magnitude, words(0x477FFFFF), special, magnitude)
    return as_floats(magnitude | ((bits & words(0x8000)) << words(16)))


@overload(item_size)
def _item_size(marker):
    size = marker.bitwidth // 8
    return lambda marker: size


@overload(widened)
def _widened(address, marker):
    if marker.name == "float32":
        return lambda address, marker: load_floats(address)
    if marker.name == "uint16":
        return lambda address, marker: as_floats(load_shorts(address) << words(16))

    return lambda address, marker: from_half(load_shorts(address))


@overload(put_rounded)
def _put_rounded(address, value, marker, around):
    if marker.name == "float32":

        def put_float(address, value, marker, around):
            if around:
                stream(address, value)
            else:
                store(address, value)

        return put_float
    if marker.name == "uint16":

        def put_bfloat16(address, value, marker, around):
            bits = as_words(value)
            odd = (bits >> words(16)) & words(1)
            rounded = (bits + words(0x7FFF) + odd) >> words(16)
            quiet = (bits >> words(16)) | words(0x40)
            store_shorts(address, where_above(bits & words(0x7FFFFFFF), words(0x7F800000), quiet, rounded))

        return put_bfloat16

    def put_float16(address, value, marker, around):
        bits = as_words(value)
        m = bits & words(0x7FFFFFFF)
        odd = (m >> words(13)) & words(1)
        normal = (m - words(0x38000000) + words(0xFFF) + odd) >> words(13)
        # below 2^-14 the adder itself rounds to multiples of 2^-24, when 0.5 aligns them
        tiny = as_words(as_floats(m) + floats(np.float32(0.5))) - words(0x3F000000)
        special = where_above(m, words(0x7F800000), words(0x7E00), words(0x7C00))
        small = where_above(words(0x38800000), m, tiny, normal)
        rounded = where_above(m, words(0x477FFFFF), special, small)
        store_shorts(address, rounded | ((bits >> words(16)) & words(0x8000)))

    return put_float16
