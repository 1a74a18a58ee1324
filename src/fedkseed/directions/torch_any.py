"""Directions in plain PyTorch operations, for every device that has no kernels of its own.

Values are those of `reference.py`, bit for bit, wherever the device rounds a float32 add and multiply
correctly: each operation is a kernel of its own, so nothing can be fused. Random
words are int64, because not every device has uint32; float64 sums are NumPy's, because not every
device has float64.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import reference as ref
from .backends import FlatPiece
from .factors import Factor, Matrix
from .families import Sums
from .pool import BLOCK, Pool

CHUNK = 1 << 20  # positions or inner products made at a time, a segment at most: 8 MiB an int64 tensor
LOG, SIN, COS, LN2 = ([float(x) for x in constants] for constants in (ref.LOG, ref.SIN, ref.COS, [ref.LN2]))


# --- bits ---------------------------------------------------------------------------------------


def philox(counter: Tensor, tensor: int, direction: int, stream: int, pool: Pool) -> tuple[Tensor, ...]:
    """The words of `reference.philox`, for counters whose word 0 is an int64 tensor: four int64 tensors below 2^32."""
    low, (k0, k1) = 0xFFFFFFFF, pool.key_words
    x0 = counter & low
    x1, x2, x3 = (torch.full_like(x0, word) for word in (tensor, direction, stream))
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2  # mod 2^64; the mask makes the shift of a negative one logical
        x0, x1 = (b >> 32 & low) ^ x1 ^ k0, b & low
        x2, x3 = (a >> 32 & low) ^ x3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return x0, x1, x2, x3


def signs(pool: Pool, stream: int, tensor: int, direction: int, groups: range, device: torch.device) -> Tensor:
    """The signs ±1 of `reference.signs` for whole groups of 4,096 positions, flat."""
    lanes = torch.arange(groups.start * ref.LANES, groups.stop * ref.LANES, device=device).view(-1, ref.LANES)
    words = torch.stack(philox(lanes, tensor, direction, stream, pool), 1)  # (groups, 4, 32)
    shifts = torch.arange(32, device=device)[:, None]
    bits = words[:, :, None] >> shifts & 1  # (groups, 4, 32, 32): word, bit, lane
    return (1 - 2 * bits).to(torch.float32).view(-1)


def normals(x: Tensor) -> tuple[Tensor, Tensor]:
    """The normals of `reference.normals` from int64 words below 2^32."""
    u = 2 - _float(x >> 9 & 0x7FFFE0 | 0x3F800010)
    shifted = u.view(torch.int32) - 0x3F3504F3
    exponent = (shifted >> 23).to(torch.float32)
    t = ((shifted & 0x7FFFFF) + 0x3F3504F3).view(torch.float32) - 1
    p = (((t * LOG[4] + LOG[3]) * t + LOG[2]) * t + LOG[1]) * t + LOG[0]
    radius = root((p * t - 1) * t - exponent * LN2[0])
    a = _float(x << 9 & 0x7FF800 | 0x3F800400) - 1.5
    s = a * a
    sine = ((s * SIN[2] + SIN[1]) * s + SIN[0]) * a
    cosine = (s * COS[1] + COS[0]) * s + 1
    first, second = 1 - 2 * (x & 1), 1 - (x & 2)  # ±1: exact factors
    return radius * (cosine - sine) * first.to(torch.float32), radius * (cosine + sine) * second.to(torch.float32)


def root(x: Tensor) -> Tensor:
    """The root √x of positive normal float32, correctly rounded: a device's own may be a unit off (MKL's on CPUs is).

    x = M 2^m and r = R 2^n with 24-bit integers; r is right if 16 x lies between the squares of four
    times its borders, R ± ½. A power of two is nearer to its lower neighbour: its border is R − ¼.
    """
    bits = torch.sqrt(x).view(torch.int32)
    m, n = x.view(torch.int32) >> 23, bits >> 23
    r = (bits & 0x7FFFFF | 0x800000).to(torch.int64)
    sixteen = (x.view(torch.int32) & 0x7FFFFF | 0x800000).to(torch.int64) << (m - 2 * n + 154)
    above, below = 4 * r + 2, 4 * r - 2 + (r == 0x800000).to(torch.int64)
    return (bits + (sixteen > above * above).to(torch.int32) - (sixteen < below * below).to(torch.int32)).view(x.dtype)


def _float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


# --- directions ---------------------------------------------------------------------------------


def gaussian(pool: Pool, direction: int, tensor: int, groups: range, device: torch.device) -> Tensor:
    """The Gaussian direction z_j over whole groups, flat."""
    counter = torch.arange(groups.start * ref.EIGHTH, groups.stop * ref.EIGHTH, device=device).view(-1, ref.EIGHTH)
    eight = [z for word in philox(counter, tensor, direction, ref.GAUSSIAN, pool) for z in normals(word)]
    return torch.stack(eight, 1).view(-1)  # (groups, 8, 512)


def transform(x: Tensor) -> Tensor:
    """The Walsh–Hadamard transform of the last axis as in `reference.transform`, stages h = 1, 2, 4, …"""
    h = 1
    while h < x.shape[-1]:
        a, b = x.reshape(*x.shape[:-1], -1, 2, h).unbind(-2)
        x = torch.stack((a + b, a - b), -2).reshape(x.shape)
        h *= 2
    return x


def permutation(pool: Pool, tensor: int, groups: range, device: torch.device) -> Tensor:
    """The indices i XOR s_b of the hashed family's blocks in whole groups, int64 (blocks, K)."""
    blocks = torch.arange(groups.start * BLOCK // pool.size, groups.stop * BLOCK // pool.size, device=device)
    s = philox(blocks, tensor, 0, ref.HASHED_BLOCK, pool)[0] & (pool.size - 1)
    return s[:, None] ^ torch.arange(pool.size, device=device)


def hadamard_total(pool: Pool, c: Tensor, tensor: int, groups: range) -> Tensor:
    d2 = signs(pool, ref.HADAMARD_BLOCK, tensor, 0, groups, c.device).view(-1, pool.size)
    return signs(pool, ref.HADAMARD_ROW, tensor, 0, groups, c.device) * transform(d2 * c).view(-1)


def hadamard_products(pool: Pool, v: Tensor, tensor: int, groups: range) -> Tensor:
    x = (signs(pool, ref.HADAMARD_ROW, tensor, 0, groups, v.device) * v).view(-1, pool.size)
    return signs(pool, ref.HADAMARD_BLOCK, tensor, 0, groups, v.device).view(-1, pool.size) * transform(x)


def hashed_total(pool: Pool, transformed: Tensor, tensor: int, groups: range) -> Tensor:
    y = transformed[permutation(pool, tensor, groups, transformed.device)]
    return signs(pool, ref.HASHED_ROW, tensor, 0, groups, transformed.device) * y.view(-1)


def hashed_products(pool: Pool, v: Tensor, tensor: int, groups: range) -> Tensor:
    x = (signs(pool, ref.HASHED_ROW, tensor, 0, groups, v.device) * v).view(-1, pool.size)
    return x.gather(1, permutation(pool, tensor, groups, v.device))


def separable_total(pool: Pool, core: Tensor, tensor: int, rows: range, matrix: Matrix, sums: Tensor) -> Tensor:
    m, device = len(core), core.device
    x, y = torch.arange(rows.start, rows.stop, device=device), torch.arange(matrix.columns, device=device)
    s_u, s_v = separable_signs(pool, tensor, rows, matrix, device)
    return sums + (s_u[:, None] * s_v) * core[(x % m)[:, None], y % m]


def separable_signs(pool: Pool, tensor: int, rows: range, matrix: Matrix, device: torch.device) -> tuple[Tensor, ...]:
    """The signs s_u of some rows and s_v of all columns."""
    first = rows.start // BLOCK
    of_rows = signs(pool, ref.SEPARABLE_ROW, tensor, 0, range(first, -(-rows.stop // BLOCK)), device)
    of_columns = signs(pool, ref.SEPARABLE_COLUMN, tensor, 0, range(-(-matrix.columns // BLOCK)), device)
    return of_rows[rows.start - first * BLOCK :][: len(rows)], of_columns[: matrix.columns]


def separable_products(pool: Pool, v: Tensor, tensor: int, rows: range, matrix: Matrix) -> NDArray[np.float64]:
    m = math.isqrt(pool.size)
    s_u, s_v = separable_signs(pool, tensor, rows, matrix, v.device)
    signed, across = (s_u[:, None] * s_v) * v, v.new_zeros(len(rows), m)
    for part in signed.split(m, 1):
        across[:, : part.shape[1]] += part
    folded = np.zeros((m, m))
    for begin in range(0, len(rows), m):  # rows of a multiple of 4,096 on: tiles begin where they do
        part = across[begin : begin + m].cpu().numpy()
        folded[: len(part)] += part
    return ref.transform(ref.transform(folded).T).T.reshape(-1)


def informed_total(pool: Pool, core: Tensor, tensor: int, rows: range, factor: Factor, sums: Tensor) -> Tensor:
    left, right = held(factor, sums.device)
    left_sums = sums.new_zeros(len(rows), factor.ranks[1])
    for a, row in enumerate(torch.from_numpy(factor.core(core.cpu().numpy())).to(sums.device)):
        left_sums = left_sums + left[rows.start : rows.stop, a : a + 1] * row
    for b in range(factor.ranks[1]):
        sums = sums + left_sums[:, b : b + 1] * right[:, b]
    return sums


def informed_products(pool: Pool, v: Tensor, tensor: int, rows: range, factor: Factor) -> NDArray[np.float64]:
    products, (_, right) = np.zeros(pool.size), held(factor, v.device)
    left = factor.left[rows.start : rows.stop].astype(np.float64)
    q = np.stack([_halved(v * right[:, b]).cpu().numpy().astype(np.float64) for b in range(factor.ranks[1])])
    scales = factor.left_scale.astype(np.float64)[:, None] * factor.right_scale.astype(np.float64)
    sums = np.stack([ref.halved(left[:, a] * q) for a in range(factor.ranks[0])])
    products[factor.directions] = (sums * scales).reshape(-1)
    return products


def held(factor: Factor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The factors U and V as float32, once a device."""
    by_device = HELD.setdefault(factor, {})
    if device not in by_device:
        left, right = (torch.from_numpy(part.astype(np.float32)).to(device) for part in (factor.left, factor.right))
        by_device[device] = left, right
    return by_device[device]


HELD: "WeakKeyDictionary[Factor, dict[torch.device, tuple[Tensor, Tensor]]]" = WeakKeyDictionary()


def _halved(x: Tensor) -> Tensor:
    """The sum over the last axis in the order of `reference.halved`."""
    n = 1 << (x.shape[-1] - 1).bit_length()
    if n > x.shape[-1]:
        x = torch.cat([x, x.new_zeros(*x.shape[:-1], n - x.shape[-1])], -1)
    while n := n // 2:
        x = x[..., :n] + x[..., n:]
    return x[..., 0]


DIRECT = {
    "gaussian": gaussian,
    "rademacher": lambda pool, j, tensor, *place: signs(pool, ref.RADEMACHER, tensor, j, *place),
}
SUMS = {  # by whole groups, or by rows of a tensor
    "hadamard": Sums(hadamard_total, hadamard_products),
    "hashed": Sums(hashed_total, hashed_products),
    "separable": Sums(separable_total, separable_products),
    "informed": Sums(informed_total, informed_products),
    "mixed": Sums(informed_total, lambda *place: ref.transform(informed_products(*place))),
}
KERNELS = {*DIRECT, *SUMS}


# --- the operations -----------------------------------------------------------------------------


def plan(pool: Pool, directions: ref.Words, coefficients: ref.Floats, device: torch.device) -> tuple[Any, ...]:
    """Prepare a sum for `combine`: the pool, c or H c on the device, and (direction, coefficient) pairs."""
    if pool.family in DIRECT:
        return pool, None, list(zip(directions.tolist(), coefficients.tolist(), strict=True))
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    table = torch.from_numpy(np.ascontiguousarray(pool.record.core(c))).to(device)
    return pool, transform(table) if pool.record.at_end else table, []


def combine(pieces: Sequence[FlatPiece], plan: tuple[Any, ...]) -> None:
    pool, table, pairs = plan
    for tensor, start, base, out, addend in pieces:
        if pool.factored and (matrix := pool.matrix(tensor)) is not None:
            _combine_rows(pool, table, matrix, (tensor, start, base, out, addend))
            continue
        for groups, begin, end in _chunks(pool, start, base.numel(), CHUNK):
            inside = slice(start + begin - groups.start * BLOCK, start + end - groups.start * BLOCK)
            total = torch.zeros_like(base[begin:end], dtype=torch.float32) if addend is None else addend[begin:end]
            if pool.transformed:
                total = total + SUMS[pool.family].total(pool, table, tensor, groups)[inside]
            for j, coefficient in pairs:
                total = total + coefficient * DIRECT[pool.family](pool, j, tensor, groups, base.device)[inside]
            out[begin:end] = (base[begin:end].to(torch.float32) + total).to(base.dtype)


def _combine_rows(pool: Pool, core: Tensor, matrix: Matrix, piece: FlatPiece) -> None:
    tensor, start, base, out, addend = piece
    stop = start + base.numel()
    rows, step = matrix.rows_of(start, stop), max(1, CHUNK // matrix.columns)
    for first in range(rows.start, rows.stop, step):
        band = range(first, min(first + step, rows.stop))
        low, high = max(start, first * matrix.columns), min(stop, band.stop * matrix.columns)
        sums = base.new_zeros(len(band) * matrix.columns, dtype=torch.float32)
        inside = slice(low - start, high - start)
        within = slice(low - first * matrix.columns, high - first * matrix.columns)
        if addend is not None:
            sums[within] = addend[inside]
        total = SUMS[pool.family].total(pool, core, tensor, band, matrix, sums.view(len(band), -1))
        out[inside] = (base[inside].to(torch.float32) + total.reshape(-1)[within]).to(base.dtype)


def _project_rows(pool: Pool, tensor: int, start: int, v: Tensor) -> NDArray[np.float64]:
    matrix, total, stop = pool.matrix(tensor), np.zeros(pool.size), start + v.numel()
    if matrix is None or not v.numel():
        return total
    rows = matrix.rows_of(start, stop)
    for first in range(rows.start // ref.ROWS * ref.ROWS, rows.stop, ref.ROWS):
        band = range(first, min(first + ref.ROWS, matrix.rows))
        low, high = max(start, first * matrix.columns), min(stop, band.stop * matrix.columns)
        whole = v.new_zeros(len(band) * matrix.columns)
        whole[low - first * matrix.columns :][: high - low] = v[low - start : high - start]
        total += SUMS[pool.family].products(pool, whole.view(len(band), -1), tensor, band, matrix)
    return total


def project(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    total = np.zeros(pool.size)
    each = CHUNK if pool.transformed else max(1, CHUNK // max(pool.size, BLOCK)) * BLOCK
    for tensor, start, narrow in pieces:
        v, of_tensor = narrow.float(), np.zeros(pool.size)
        if pool.factored:
            total += _project_rows(pool, tensor, start, v)
            continue
        for _, chunks in groupby(_chunks(pool, start, v.numel(), each), lambda c: c[0].start * BLOCK // ref.SEGMENT):
            partial = np.zeros(pool.size)
            for groups, begin, end in chunks:
                whole = v.new_zeros(len(groups) * BLOCK)
                whole[start + begin - groups.start * BLOCK :][: end - begin] = v[begin:end]
                # adds rows one after the other, an order that only an accumulation guarantees
                rows = np.vstack([partial, _products(pool, whole, tensor, groups)])
                partial = np.add.accumulate(rows, axis=0)[-1]
            of_tensor += ref.transform(partial) if pool.record.at_end else partial
        total += of_tensor
    return total


def _products(pool: Pool, v: Tensor, tensor: int, groups: range) -> NDArray[np.float32]:
    """The float32 inner products with blocks, in ascending order, shape (blocks, K)."""
    if pool.transformed:
        return SUMS[pool.family].products(pool, v, tensor, groups).cpu().numpy()
    products = np.empty((len(groups), pool.size), np.float32)
    for j in range(pool.size):
        x = DIRECT[pool.family](pool, j, tensor, groups, v.device).view(-1, BLOCK)
        products[:, j] = _halved(x * v.view(-1, BLOCK)).cpu().numpy()
    return products


def _chunks(pool: Pool, start: int, size: int, most: int) -> Iterator[tuple[range, int, int]]:
    """The chunks (groups, begin, end): whole units of at most `most` positions, and the part of a piece inside."""
    step = max(1 << most.bit_length() - 1, pool.unit)  # a power of two: no chunk lies in two segments
    for first in range(start // step * step, start + size, step):
        begin, end = max(first - start, 0), min(first + step - start, size)
        low, high = (start + begin) // pool.unit * pool.unit, -(-(start + end) // pool.unit) * pool.unit
        yield range(low // BLOCK, high // BLOCK), begin, end
