"""Kernels for one unit of Σ_j c_j z_j and for inner products with one unit, inside the first-level cache.

A unit is `Pool.unit` positions, 16 KiB of float32 at K ≤ 4096. Arrays are passed by their addresses. Random bits and
normals are those of `reference.philox`, `signs` and `normals`, for 16 counters at a time.
"""

import numpy as np
from numba import uint32, uint64

from .. import reference as ref
from ..pool import BLOCK

from .simd import (  # isort: skip
    as_floats, as_words, butterflies, by_rows, claim, clear, copy, fetch_ahead, flipped, flipped_columns, float_at,
    floats, high_half, inlined, interleaved_high, interleaved_low, item_size, joined, kernel, lane_numbers,
    load_floats, load_words, low_half, number_at, plus_signed, put, put_rounded, signed_floats, signed_shift, sqrt,
    store, take, take_swapped, transposed, wide, widened, word_at, words, zero_tile,
)  # fmt: skip

# The branches of a kernel; the first two add direction by direction.
GAUSSIAN, RADEMACHER, HADAMARD, HADAMARD_ONE, HASHED = range(5)

EIGHTH, TILE, ROW = ref.EIGHTH, 256, 16  # positions
GAUSS = uint32(ref.GAUSSIAN)
SOME = 16  # directions whose signs are made together: 8 KiB of words
SIGNS = 512  # bytes of words that sign a block
CHUNK = 1 << 15  # positions that a thread takes at a time: 8 µs of the fastest kernel
ZERO = np.float32(0)
L0, L1, L2, L3, L4 = ref.LOG
S0, S1, S2 = ref.SIN
C0, C1 = ref.COS
LN2, ONE, TWO, HALVES = ref.LN2, np.float32(1), np.float32(2), np.float32(1.5)
W0, W1 = uint32(0x9E3779B9), uint32(0xBB67AE85)
M0, M1, LOW = uint64(0xD2511F53), uint64(0xCD9E8D57), uint64(0xFFFFFFFF)


# --- bits ---------------------------------------------------------------------------------------


@inlined
def two_rounds(number, x0, x1, x2, x3, k0, k1):
    """Apply rounds `number` and `number` + 1 (from 0) of Philox to 8 counters.

    Words stay in 64-bit lanes whose upper halves are ignored, so that a round is two multiplies, two
    shifts and four exclusive ors, with no shuffles: 2.4 times faster than splitting each product.
    """
    shift, low = wide(32), wide(LOW)
    for n in range(number, number + 2):
        a, b = wide(M0) * (x0 & low), wide(M1) * (x2 & low)
        x0 = (b >> shift) ^ x1 ^ wide(uint32(k0 + uint32(n) * W0))
        x2 = (a >> shift) ^ x3 ^ wide(uint32(k1 + uint32(n) * W1))
        x1, x3 = b, a
    return x0, x1, x2, x3


@inlined
def first_rounds(counter, x1, x2, x3, k0, k1):
    """Apply rounds 0 and 1 to 8 counters that differ in their first word only.

    Half of these rounds is the same for all counters, and the other half is the same for all x2: the
    compiler moves it out of a loop over directions.
    """
    shift, low = wide(32), wide(LOW)
    a = wide(M0) * counter
    b = M1 * uint64(x2)
    first, second = uint64(uint32(b >> uint64(32)) ^ x1 ^ k0), uint64(uint32(b))
    third, fourth = (a >> shift) ^ wide(uint64(x3 ^ k1)), a
    c, d = M0 * first, wide(M1) * (third & low)
    y0 = (d >> shift) ^ wide(uint32(second) ^ uint32(k0 + W0))
    y2 = fourth ^ wide(uint32(c >> uint64(32)) ^ uint32(k1 + W1))
    return y0, d, y2, wide(c)


@inlined
def philox_half(counter, x1, x2, x3, k0, k1):
    """The words of `reference.philox` for 8 counters that differ in their first word only."""
    y0, y1, y2, y3 = first_rounds(counter, x1, x2, x3, k0, k1)
    y0, y1, y2, y3 = two_rounds(2, y0, y1, y2, y3, k0, k1)
    y0, y1, y2, y3 = two_rounds(4, y0, y1, y2, y3, k0, k1)
    y0, y1, y2, y3 = two_rounds(6, y0, y1, y2, y3, k0, k1)
    return two_rounds(8, y0, y1, y2, y3, k0, k1)


@inlined
def philox(counter, x1, x2, x3, k0, k1):
    """The four words of each of 16 counters."""
    a0, a1, a2, a3 = philox_half(low_half(counter), x1, x2, x3, k0, k1)
    b0, b1, b2, b3 = philox_half(high_half(counter), x1, x2, x3, k0, k1)
    return joined(a0, b0), joined(a1, b1), joined(a2, b2), joined(a3, b3)


@kernel
def sign_words(to, group, tensor, direction, stream, k0, k1):
    """Make the 128 words of a block's signs: word w of counter 32 group + l goes to place 32 w + l."""
    for half in range(2):
        counter = words(uint32(group * 32 + half * 16)) + lane_numbers()
        x0, x1, x2, x3 = philox(counter, tensor, direction, uint32(stream), k0, k1)
        at = to + 64 * half
        store(at, x0)
        store(at + 128, x1)
        store(at + 256, x2)
        store(at + 384, x3)


@kernel
def paired_sign_words(to, group, tensor, stream, k0, k1):
    """Make the words of `sign_words` with l = 0, 16, 1, 17, … side by side, as `flipped_columns` reads them."""
    sign_words(to, group, tensor, uint32(0), stream, k0, k1)
    for at in range(to, to + SIGNS, 128):
        a, b = load_words(at), load_words(at + 64)
        store(at, interleaved_low(a, b))
        store(at + 64, interleaved_high(a, b))


@kernel
def one_philox(x0, x1, x2, x3, k0, k1):
    """The four words of one counter."""
    for _ in range(10):
        a, b = M0 * uint64(x0), M1 * uint64(x2)
        x0, x1 = uint32(uint32(b >> uint64(32)) ^ x1 ^ k0), uint32(b)
        x2, x3 = uint32(uint32(a >> uint64(32)) ^ x3 ^ k1), uint32(a)
        k0, k1 = uint32(k0 + W0), uint32(k1 + W1)
    return x0, x1, x2, x3


@inlined
def normals(x):
    """The normals of `reference.normals` from 16 words."""
    u = floats(TWO) - as_floats((x >> words(9)) & words(0x7FFFE0) | words(0x3F800010))
    shifted = as_words(u) - words(0x3F3504F3)
    exponent = signed_floats(signed_shift(shifted))
    t = as_floats((shifted & words(0x7FFFFF)) + words(0x3F3504F3)) - floats(ONE)
    p = (((t * floats(L4) + floats(L3)) * t + floats(L2)) * t + floats(L1)) * t + floats(L0)
    radius = sqrt((p * t - floats(ONE)) * t - exponent * floats(LN2))
    a = as_floats((x << words(9)) & words(0x7FF800) | words(0x3F800400)) - floats(HALVES)
    s = a * a
    sine = ((s * floats(S2) + floats(S1)) * s + floats(S0)) * a
    cosine = (s * floats(C1) + floats(C0)) * s + floats(ONE)
    first, second = radius * (cosine - sine), radius * (cosine + sine)
    return (
        as_floats(as_words(first) ^ (x << words(31))),
        as_floats(as_words(second) ^ ((x << words(30)) & words(0x80000000))),
    )


# --- sums ---------------------------------------------------------------------------------------


@kernel
def add_gaussian(acc, block, start, stop, directions, coefficients, count, tensor, k0, k1):
    """Add Σ c z over one block to acc; positions outside start ≤ p < stop may be left out."""
    for i in range(0, EIGHTH, ROW):
        wanted = False
        for p in range(i, BLOCK, EIGHTH):
            wanted |= p < stop and p + ROW > start
        if not wanted or not count:
            continue
        counter = words(uint32(block * EIGHTH + i)) + lane_numbers()
        at, step = acc + 4 * i, 4 * EIGHTH
        s0, s1, s2, s3 = load_floats(at), load_floats(at + step), load_floats(at + 2 * step), load_floats(at + 3 * step)
        s4, s5 = load_floats(at + 4 * step), load_floats(at + 5 * step)
        s6, s7 = load_floats(at + 6 * step), load_floats(at + 7 * step)
        low, high = low_half(counter), high_half(counter)
        direction = word_at(directions)
        x0, x1, x2, x3 = philox(counter, tensor, direction, GAUSS, k0, k1)
        for k in range(count):
            # The bits of the next direction are made between the normals of this one: neither alone
            # has enough independent instructions to keep the units of a core busy.
            direction = word_at(directions + 4 * min(k + 1, count - 1))
            c = floats(float_at(coefficients + 4 * k))
            a0, a1, a2, a3 = first_rounds(low, tensor, direction, GAUSS, k0, k1)
            b0, b1, b2, b3 = first_rounds(high, tensor, direction, GAUSS, k0, k1)
            first, second = normals(x0)
            s0, s1 = s0 + c * first, s1 + c * second
            a0, a1, a2, a3 = two_rounds(2, a0, a1, a2, a3, k0, k1)
            b0, b1, b2, b3 = two_rounds(2, b0, b1, b2, b3, k0, k1)
            first, second = normals(x1)
            s2, s3 = s2 + c * first, s3 + c * second
            a0, a1, a2, a3 = two_rounds(4, a0, a1, a2, a3, k0, k1)
            b0, b1, b2, b3 = two_rounds(4, b0, b1, b2, b3, k0, k1)
            first, second = normals(x2)
            s4, s5 = s4 + c * first, s5 + c * second
            a0, a1, a2, a3 = two_rounds(6, a0, a1, a2, a3, k0, k1)
            b0, b1, b2, b3 = two_rounds(6, b0, b1, b2, b3, k0, k1)
            first, second = normals(x3)
            s6, s7 = s6 + c * first, s7 + c * second
            a0, a1, a2, a3 = two_rounds(8, a0, a1, a2, a3, k0, k1)
            b0, b1, b2, b3 = two_rounds(8, b0, b1, b2, b3, k0, k1)
            x0, x1, x2, x3 = joined(a0, b0), joined(a1, b1), joined(a2, b2), joined(a3, b3)
        store(at, s0)
        store(at + step, s1)
        store(at + 2 * step, s2)
        store(at + 3 * step, s3)
        store(at + 4 * step, s4)
        store(at + 5 * step, s5)
        store(at + 6 * step, s6)
        store(at + 7 * step, s7)


@kernel
def make_signs(signs, block, directions, count, tensor, k0, k1):
    for k in range(count):
        sign_words(signs + SIGNS * k, block, tensor, word_at(directions + 4 * k), ref.RADEMACHER, k0, k1)


@kernel
def add_rademacher(acc, block, directions, coefficients, count, signs, tensor, k0, k1):
    """Add Σ c z over one block to acc; `signs` has room for the sign words of SOME directions."""
    for first in range(0, count, SOME):
        present = min(SOME, count - first)
        make_signs(signs, block, directions + 4 * first, present, tensor, k0, k1)
        for p in range(0, BLOCK, TILE):
            tile = take(acc + 4 * p, 4 * ROW)
            for k in range(present):
                tile = plus_signed(tile, float_at(coefficients + 4 * (first + k)), signs + SIGNS * k, p)
            put(acc + 4 * p, 4 * ROW, tile)


@by_rows
def finish(z, p, target):
    """Write 16 weights out = base + (addend + z), rounded once; without addend if its address is 0.

    The 0 that the code adds to the sum is part of the definition.
    """
    out, base, addend, marker, around = target
    size = item_size(marker)
    total = load_floats(addend + 4 * p) + z if addend else z
    put_rounded(out + size * p, widened(base + size * p, marker) + (floats(ZERO) + total), marker, around)


@kernel
def add_directions(kind, acc, unit, low, high, directions, coefficients, count, signs, tensor, k0, k1, target):
    """Compute out = base + (addend + Σ c z) at positions low ≤ p < high of one unit, direction by direction."""
    out, base, addend, marker, around = target
    no_addend = out, base, 0, marker, around
    if kind == RADEMACHER and count <= SOME and not addend:  # the sum stays in registers
        make_signs(signs, unit, directions, count, tensor, k0, k1)
        for p in range(0, BLOCK, TILE):
            tile = zero_tile()
            for k in range(count):
                tile = plus_signed(tile, float_at(coefficients + 4 * k), signs + SIGNS * k, p)
            finish(tile, p, ROW, no_addend)
        return
    if addend:
        copy(acc, addend, 4 * BLOCK)
    else:
        clear(acc, 4 * BLOCK)
    if kind == GAUSSIAN:
        add_gaussian(acc, unit, low, high, directions, coefficients, count, tensor, k0, k1)
    else:
        add_rademacher(acc, unit, directions, coefficients, count, signs, tensor, k0, k1)
    for p in range(0, BLOCK, TILE):
        finish(take(acc + 4 * p, 4 * ROW), p, ROW, no_addend)


@kernel
def transform_tile(tile, to, size):
    """Apply those stages 1 … 128 of the transform that are below `size` to 256 neighbours, given as columns."""
    tile = butterflies(tile, 1, size)
    tile = butterflies(transposed(tile), ROW, size)
    put(to, 4 * ROW, tile)


@kernel
def middle_stages(z, unit_size, size):
    """Apply stages 256, … of the transform, without the last four, to every `size` elements of z; return the next h."""
    h = TILE
    while BLOCK * h < TILE * size:  # only for K > 4096
        for begin in range(0, unit_size, 2 * h):
            for i in range(4 * begin, 4 * (begin + h), 4 * ROW):
                a, b = load_floats(z + i), load_floats(z + i + 4 * h)
                store(z + i, a + b)
                store(z + i + 4 * h, a - b)
        h *= 2
    return h


@kernel
def combine_unit(kind, acc, unit, unit_size, size, table, signs, tensor, k0, k1, target):
    """Compute out = base + (addend + Σ c_j z_j) over one unit of a transformed family; `table` is its plan's."""
    groups = unit_size // BLOCK
    if kind == HADAMARD:  # table: columns of c, repeated to fill a unit
        for g in range(groups):
            paired_sign_words(signs + SIGNS * g, unit * groups + g, tensor, ref.HADAMARD_BLOCK, k0, k1)
        for p in range(0, unit_size, TILE):
            fetch_ahead(target[1] + 4 * p)
            transform_tile(flipped_columns(take(table + 4 * p, 4 * ROW), signs, p), acc + 4 * p, size)
    stream = ref.HASHED_ROW if kind == HASHED else ref.HADAMARD_ROW
    for g in range(groups):
        sign_words(signs + SIGNS * g, unit * groups + g, tensor, uint32(0), stream, k0, k1)
    if kind == HADAMARD:
        h = middle_stages(acc, unit_size, size)
        for p in range(0, h, ROW):
            tile = butterflies(take(acc + 4 * p, 4 * h), h, size)
            finish(flipped(tile, signs, p, h), p, h, target)
    elif kind == HADAMARD_ONE:  # table: c_j H[:, j] and −c_j H[:, j]; its last entry is the direction j
        j = np.int64(word_at(table + 8 * size))
        for begin in range(0, unit_size, size):
            negative = sign_at(unit * unit_size + begin + j, tensor, ref.HADAMARD_BLOCK, k0, k1)
            for p in range(0, size, TILE):
                tile = take(table + 4 * (size * negative + p), 4 * ROW)
                finish(flipped(tile, signs, begin + p, ROW), begin + p, ROW, target)
    elif size >= TILE:  # table: 16 copies of H c, number m with the lowest four bits of the index XORed with m
        for begin in range(0, unit_size, size):
            s = shift_at((unit * unit_size + begin) // size, size, tensor, k0, k1)
            copy, rows, tiles = (s & 15) * size, s >> 4 & 15, s & ~255
            for p in range(0, size, TILE):
                tile = take_swapped(table + 4 * (copy + (p ^ tiles)), 4 * ROW, rows)
                finish(flipped(tile, signs, begin + p, ROW), begin + p, ROW, target)
    else:  # table: H c
        for begin in range(0, unit_size, size):
            s = shift_at((unit * unit_size + begin) // size, size, tensor, k0, k1)
            for i in range(size):
                store(acc + 4 * (begin + i), word_at(table + 4 * (i ^ s)))
        for p in range(0, unit_size, TILE):
            finish(flipped(take(acc + 4 * p, 4 * ROW), signs, p, ROW), p, ROW, target)


@kernel
def sign_at(position, tensor, stream, k0, k1):
    """Return 1 if the sign of one position is −1, else 0."""
    lane = uint32(position // BLOCK * ref.LANES + position % ref.LANES)
    x0, x1, x2, x3 = one_philox(lane, tensor, uint32(0), uint32(stream), k0, k1)
    w = position // ref.QUARTER % 4
    word = x0 if w == 0 else x1 if w == 1 else x2 if w == 2 else x3
    return np.int64(word >> uint32(position // ref.LANES % 32) & uint32(1))


@kernel
def shift_at(block, size, tensor, k0, k1):
    """The shift s_b of one block of the hashed family."""
    return np.int64(one_philox(uint32(block), tensor, uint32(0), uint32(ref.HASHED_BLOCK), k0, k1)[0]) & (size - 1)


# --- projections ----------------------------------------------------------------------------------


@kernel
def transform(x):
    """Apply all stages of the transform to an array of float64."""
    h = 1
    while h < x.size:
        for first in range(0, x.size, 2 * h):
            for i in range(first, first + h):
                a, b = x[i], x[i + h]
                x[i], x[i + h] = a + b, a - b
        h *= 2


@kernel
def _inner(products, v):
    """The inner product ⟨products, v⟩ over a block in float32, halves added onto each other: 2048, 1024, …"""
    for i in range(0, 4 * BLOCK, 4 * ROW):
        store(products + i, load_floats(products + i) * load_floats(v + i))
    h = BLOCK // 2
    while h >= ROW:
        for i in range(0, 4 * h, 4 * ROW):
            store(products + i, load_floats(products + i) + load_floats(products + 4 * h + i))
        h //= 2
    while h:
        for i in range(0, 4 * h, 4):
            store(products + i, float_at(products + i) + float_at(products + 4 * h + i))
        h //= 2
    return float_at(products)


@kernel
def project_unit(kind, v, unit, unit_size, size, tensor, k0, k1, result, signs):
    """Add the inner products with one unit of a transformed family to `result`; v is overwritten."""
    groups = unit_size // BLOCK
    stream = ref.HASHED_ROW if kind == HASHED else ref.HADAMARD_ROW
    for g in range(groups):
        sign_words(signs + SIGNS * g, unit * groups + g, tensor, uint32(0), stream, k0, k1)
    for p in range(0, unit_size, TILE):
        tile = flipped(take(v + 4 * p, 4 * ROW), signs, p, ROW)
        if kind == HADAMARD:
            transform_tile(transposed(tile), v + 4 * p, size)
        else:
            put(v + 4 * p, 4 * ROW, tile)
    if kind == HADAMARD:
        for g in range(groups):
            sign_words(signs + SIGNS * g, unit * groups + g, tensor, uint32(0), ref.HADAMARD_BLOCK, k0, k1)
        h = middle_stages(v, unit_size, size)
        for p in range(0, h, ROW):
            tile = butterflies(take(v + 4 * p, 4 * h), h, size)
            put(v + 4 * p, 4 * h, flipped(tile, signs, p, h))
    for begin in range(0, unit_size, size):
        s = shift_at((unit * unit_size + begin) // size, size, tensor, k0, k1) if kind == HASHED else 0
        for j in range(size):
            result[j] += np.float64(float_at(v + 4 * (begin + (j ^ s))))


# --- jobs, which any number of threads share ---------------------------------------------------------


@kernel
def work(job, marker, one_by_one):
    """Compute out = base + (addend + Σ c z) for all pieces of a job; any number of threads share the work.

    With None for `one_by_one`, families whose directions are added one by one are not compiled, else the others.
    """
    unit_size = number_at(job + 24)
    memory = np.empty(12 * unit_size + SIGNS * max(SOME, unit_size // BLOCK) + 64, np.uint8)
    _work_in(memory, job, marker, one_by_one)  # a call, so that memory outlives the use of its address


@kernel
def _work_in(memory, job, marker, one_by_one):
    kind, size, unit_size = number_at(job + 8), number_at(job + 16), number_at(job + 24)
    directions, coefficients, count = number_at(job + 32), number_at(job + 40), number_at(job + 48)
    table, k0, k1 = number_at(job + 56), uint32(number_at(job + 64)), uint32(number_at(job + 72))
    around, pieces, rows = number_at(job + 80) != 0, number_at(job + 88), number_at(job + 96)
    acc = np.int64(memory.ctypes.data) + 63 & -64
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
                if one_by_one is None:
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
def project_work(job, one_by_one):
    """Compute the inner products with every segment of a tensor, one row of results a segment; see `work`."""
    size, unit_size = number_at(job + 16), number_at(job + 24)
    memory = np.empty(4 * unit_size + 4 * BLOCK + SIGNS * max(SOME, unit_size // BLOCK) + 8 + 64, np.uint8)
    _project_in(memory, np.empty(size), job, one_by_one)


@kernel
def _project_in(memory, partial, job, one_by_one):
    kind, size, unit_size = number_at(job + 8), number_at(job + 16), number_at(job + 24)
    tensor, k0, k1 = uint32(number_at(job + 32)), uint32(number_at(job + 40)), uint32(number_at(job + 48))
    start, length, v = number_at(job + 56), number_at(job + 64), number_at(job + 72)
    results, last = number_at(job + 80), number_at(job + 88)
    acc, segment_size = np.int64(memory.ctypes.data) + 63 & -64, max(ref.SEGMENT, unit_size)
    products, signs = acc + 4 * unit_size, acc + 4 * unit_size + 4 * BLOCK
    j_at = signs + SIGNS * max(SOME, unit_size // BLOCK)
    store(j_at + 4, ONE)  # its coefficient
    segment = claim(job)
    while segment < last:
        begin, end = max(segment * segment_size, start), min((segment + 1) * segment_size, start + length)
        partial[:] = 0
        for unit in range(begin // unit_size, (end + unit_size - 1) // unit_size):
            low, high = max(begin - unit * unit_size, 0), min(end - unit * unit_size, unit_size)
            clear(acc, 4 * unit_size)
            copy(acc + 4 * low, v + 4 * (unit * unit_size + low - start), 4 * (high - low))
            if one_by_one is None:
                project_unit(kind, acc, unit, unit_size, size, tensor, k0, k1, partial, signs)
            else:
                for j in range(size):
                    store(j_at, uint32(j))
                    clear(products, 4 * BLOCK)
                    if kind == GAUSSIAN:
                        add_gaussian(products, unit, 0, BLOCK, j_at, j_at + 4, 1, tensor, k0, k1)
                    else:
                        add_rademacher(products, unit, j_at, j_at + 4, 1, signs, tensor, k0, k1)
                    partial[j] += _inner(products, acc)
        if kind == HASHED:
            transform(partial)
        copy(results + 8 * size * (segment - start // segment_size), np.int64(partial.ctypes.data), 8 * size)
        segment = claim(job)
