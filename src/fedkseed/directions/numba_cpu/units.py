"""One unit of Σ_j c_j z_j, and the inner products with one unit, inside the first-level cache."""

import numpy as np
from numba import uint32

from .. import reference as ref
from ..pool import BLOCK
from .bits import (
    EIGHTH,
    LANES,
    QUARTER,
    as_bits,
    flip,
    gaussian_words,
    kernel,
    normals,
    philox,
    sign_at,
    sign_words,
)
from .lanes import add16, copy16, walsh_pass

# What a kernel does with a unit; the first two add direction by direction.
GAUSSIAN, RADEMACHER, HADAMARD, HADAMARD_ONE, HASHED = range(5)


@kernel
def add_normals(first, second, words, c):
    for i in range(words.size):
        a, b = normals(words[i])
        first[i] += c * a
        second[i] += c * b


@kernel
def add_gaussian(acc, block, low, high, directions, coefficients, words, tensor, k0, k1):
    """acc += Σ c z over the rows low ≤ i < high of each eighth of one block."""
    for k in range(directions.size):
        gaussian_words(words, low, high, block, tensor, directions[k], k0, k1)
        for w in range(4):
            pair = acc[QUARTER * w : QUARTER * (w + 1)]
            of = words[EIGHTH * w + low : EIGHTH * w + high]
            add_normals(pair[low:high], pair[EIGHTH + low : EIGHTH + high], of, coefficients[k])


@kernel
def add_rademacher(acc, block, directions, coefficients, words, tensor, k0, k1):
    """acc += Σ c z over one block."""
    for k in range(directions.size):
        sign_words(words, block, tensor, directions[k], ref.RADEMACHER, k0, k1)
        c = as_bits(coefficients[k])
        for w in range(4):
            for t in range(32):
                begin = QUARTER * w + LANES * t
                for lane in range(0, LANES, 16):
                    add16(acc, begin + lane, c, words, LANES * w + lane, 31 - t)


@kernel
def transform(x, n):
    """Walsh–Hadamard transform of every n elements of x, stages h = 1, 2, 4, …"""
    h = 1
    while h < n:
        radix = min(16, n // h)
        walsh_pass(x, h, radix)
        h *= radix


@kernel
def make_unit(kind, z, unit, size, table, words, tensor, k0, k1):
    """z = Σ c_j z_j over one unit of a transformed family."""
    zb, groups = z.view(np.uint32), z.size // BLOCK
    if kind == HADAMARD:  # table: c, repeated to fill a unit
        for g in range(groups):
            sign_words(words, unit * groups + g, tensor, uint32(0), ref.HADAMARD_BLOCK, k0, k1)
            flip(zb, table, g * BLOCK, words)
        transform(z, size)
    elif kind == HADAMARD_ONE:  # table: c_j H[:, j]; the direction j rides at the table's end
        j = np.int64(table[size])
        for begin in range(0, z.size, size):
            sign = sign_at(unit * z.size + begin + j, tensor, ref.HADAMARD_BLOCK, k0, k1)
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
    stream = ref.HASHED_ROW if kind == HASHED else ref.HADAMARD_ROW
    for g in range(groups):
        sign_words(words, unit * groups + g, tensor, uint32(0), stream, k0, k1)
        flip(zb, zb, g * BLOCK, words)


@kernel
def shift_at(block, size, tensor, k0, k1):
    """s_b of the hashed family."""
    return np.int64(philox(uint32(block), tensor, uint32(0), uint32(ref.HASHED_BLOCK), k0, k1)[0]) & (size - 1)


@kernel
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


@kernel
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


@kernel
def project_unit(kind, v, unit, size, tensor, k0, k1, result, words):
    """Add the inner products with one unit of a transformed family; v is overwritten."""
    vb, groups = v.view(np.uint32), v.size // BLOCK
    for g in range(groups):
        stream = ref.HASHED_ROW if kind == HASHED else ref.HADAMARD_ROW
        sign_words(words, unit * groups + g, tensor, uint32(0), stream, k0, k1)
        flip(vb, vb, g * BLOCK, words)
    if kind == HADAMARD:
        transform(v, size)
        for g in range(groups):
            sign_words(words, unit * groups + g, tensor, uint32(0), ref.HADAMARD_BLOCK, k0, k1)
            flip(vb, vb, g * BLOCK, words)
    for begin in range(0, v.size, size):
        s = shift_at(unit * v.size // size + begin // size, size, tensor, k0, k1) if kind == HASHED else 0
        for j in range(size):
            result[j] += np.float64(v[begin + (j ^ s)])
