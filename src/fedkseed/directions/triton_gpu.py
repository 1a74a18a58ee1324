"""Directions on NVIDIA and AMD GPUs: Triton kernels that write each weight once, whatever K is.

Values are those of `reference.py`, bit for bit: fusion of multiply and add is off at every launch,
the square root is the correctly rounded one, and every sum is written as pairs in its stated order.
A program makes one unit of a sum in registers. The stages of a transform exchange partners by
register moves and warp shuffles (`_stage`). On CPU tensors everything runs in Triton's interpreter.
"""
# Triton's kernels are a language of their own, which Python's type rules do not fit.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from . import reference as ref
from .backends import FlatPiece
from .pool import BLOCK, Pool
from .torch_any import transform

SCRATCH = 1 << 24  # float32 numbers, 64 MiB: products of `project`, units of transforms larger than HELD
HELD = 1 << 14  # a transform up to this size stays in one program's registers
WARP = 2048  # numbers of a transform in the registers of one warp: 64 a thread
COLUMNS = 128  # of `_add_rows`: one a thread
MOST = 1 << 15  # pieces of one launch; a grid's second axis is short
EACH = 32  # directions of one program of `_products`, which reads v once for them
KERNELS = "gaussian", "rademacher", "hadamard", "hashed"
EXACT: dict[str, Any] = {"enable_fp_fusion": False}  # a fused multiply-add rounds once instead of twice

_BLOCK, _QUARTER, _EIGHTH, _LANES = (tl.constexpr(n) for n in (BLOCK, ref.QUARTER, ref.EIGHTH, ref.LANES))
_GAUSSIAN, _RADEMACHER, _HADAMARD_ROW, _HADAMARD_BLOCK, _HASHED_ROW, _HASHED_BLOCK = map(tl.constexpr, range(6))
_L0, _L1, _L2, _L3, _L4 = (tl.constexpr(float(x)) for x in ref.LOG)
_S0, _S1, _S2 = (tl.constexpr(float(x)) for x in ref.SIN)
_C0, _C1 = (tl.constexpr(float(x)) for x in ref.COS)
_LN2 = tl.constexpr(float(ref.LN2))

_jit: Any = triton.jit
# `start` and `size` stay specialised: that they divide by 16 is what allows wide loads
_kernel: Any = triton.jit(do_not_specialize=["tensor", "group", "k0", "k1", "count", "columns", "first", "rows"])


# --- bits ---------------------------------------------------------------------------------------


@_jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@_jit
def _float(x):
    return x.to(tl.float32, bitcast=True)


@_jit
def _flip(x, flips):
    return _float(_bits(x) ^ flips)


@_jit
def _philox(x0, x1, x2, x3, k0, k1):
    """The words of `reference.philox` for integers of any type, taken mod 2^32; a wide product has both halves."""
    x0, x1, x2, x3 = tl.cast(x0, tl.uint32), tl.cast(x1, tl.uint32), tl.cast(x2, tl.uint32), tl.cast(x3, tl.uint32)
    k0, k1 = tl.cast(k0, tl.uint32), tl.cast(k1, tl.uint32)
    for _ in tl.static_range(10):
        a, b = x0.to(tl.uint64) * 0xD2511F53, x2.to(tl.uint64) * 0xCD9E8D57
        x0, x1 = (b >> 32).to(tl.uint32) ^ x1 ^ k0, b.to(tl.uint32)
        x2, x3 = (a >> 32).to(tl.uint32) ^ x3 ^ k1, a.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return x0, x1, x2, x3


@_jit
def _flips(stream, tensor, direction, group, k0, k1, N: tl.constexpr):
    """The signs of `reference.signs` for N positions from the start of a group, (N,): bit 31 is set for −1."""
    g = tl.arange(0, N // _BLOCK)[:, None, None, None]
    w = tl.arange(0, 4)[None, :, None, None]
    t = tl.arange(0, 32).to(tl.uint32)[None, None, :, None]
    lane = tl.arange(0, _LANES)[None, None, None, :]
    x0, x1, x2, x3 = _philox((group + g) * _LANES + lane, tensor, direction, stream, k0, k1)
    words = tl.where(w < 2, tl.where(w == 0, x0, x1), tl.where(w == 2, x2, x3))  # (groups, 4, 1, 32)
    return (words << (31 - t) & 0x80000000).reshape(N)


@_jit
def _shifts(tensor, group, k0, k1, SIZE: tl.constexpr):
    """The shifts of `reference.shifts` for the blocks that the positions of a group lie in, int32 (BLOCK,)."""
    ROWS: tl.constexpr = _BLOCK // SIZE if SIZE < _BLOCK else 1
    blocks = group.to(tl.int64) * _BLOCK // SIZE + tl.arange(0, ROWS)
    s, _, _, _ = _philox(blocks, tensor, 0, _HASHED_BLOCK, k0, k1)
    s = (s & (SIZE - 1)).to(tl.int32)
    return tl.broadcast_to(s[:, None], (ROWS, _BLOCK // ROWS)).reshape(_BLOCK)


@_jit
def _normals(x):
    """The normals of `reference.normals`."""
    u = 2.0 - _float(x >> 9 & 0x7FFFE0 | 0x3F800010)
    shifted = u.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = (shifted >> 23).to(tl.float32)
    t = _float((shifted & 0x7FFFFF) + 0x3F3504F3) - 1.0
    p = (((t * _L4 + _L3) * t + _L2) * t + _L1) * t + _L0
    radius = tl.sqrt_rn((p * t - 1.0) * t - exponent * _LN2)
    a = _float(x << 9 & 0x7FF800 | 0x3F800400) - 1.5
    s = a * a
    sine = ((s * _S2 + _S1) * s + _S0) * a
    cosine = (s * _C1 + _C0) * s + 1.0
    return _flip(radius * (cosine - sine), x << 31), _flip(radius * (cosine + sine), x << 30 & 0x80000000)


# --- one unit -----------------------------------------------------------------------------------


@_jit
def _gaussian(tensor, direction, group, k0, k1):
    """The direction z_j over a group, (512, 2, 2, 2): element [i, a, b, h] has position 2048 b + 1024 a + 512 h + i."""
    counter = group * _EIGHTH + tl.arange(0, _EIGHTH)
    x0, x1, x2, x3 = _philox(counter, tensor, direction, _GAUSSIAN, k0, k1)
    first, second = _normals(tl.join(tl.join(x0, x1), tl.join(x2, x3)))
    return tl.join(first, second)


@_jit
def _positions(FAMILY: tl.constexpr):
    """The positions, in its group, of the elements that `_gaussian` or `_flips` makes."""
    if FAMILY == "gaussian":
        i = tl.arange(0, _EIGHTH)[:, None, None, None]
        a, b = tl.arange(0, 2)[None, :, None, None], tl.arange(0, 2)[None, None, :, None]
        return 2 * _QUARTER * b + _QUARTER * a + _EIGHTH * tl.arange(0, 2)[None, None, None, :] + i
    else:
        return tl.arange(0, _BLOCK)


@_jit
def _stage(x, H: tl.constexpr):
    """Apply one stage of a Walsh–Hadamard transform: x[k], x[k + H] ← x[k] + x[k + H], x[k] − x[k + H]."""
    N: tl.constexpr = x.shape[0]
    pairs = _bits(x).reshape(N // (2 * H), 2, H)
    partner = tl.sum(pairs, 1, keep_dims=True) - pairs  # exact in integers; compiles to a move or a shuffle
    second = tl.arange(0, 2).to(tl.uint32)[None, :, None]
    return (_float(partner) + _float(pairs ^ second << 31)).reshape(N)  # b + a and a + (−b)


@_jit
def _transform(x, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Apply the stages h = 2^FIRST … 2^(LAST − 1)."""
    for stage in tl.static_range(FIRST, LAST):
        x = _stage(x, 1 << stage)
    return x


@_jit
def _halve(x):
    return tl.sum(x.reshape(2, x.shape[0] // 2), 0)  # two terms: their order does not matter


@_jit
def _load(pointer, offset, size):
    return tl.load(pointer + offset, mask=(offset >= 0) & (offset < size), other=0)


@_jit
def _store(out, base, total, offset, size):
    """Write out = base + total, rounded once to nearest even; bfloat16 is seen as uint16."""
    w = _load(base, offset, size)
    if out.dtype.element_ty == tl.uint16:
        bits = _bits(_float(w.to(tl.uint32) << 16) + total)
        rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        moved = tl.where(nan, bits >> 16 | 0x40, rounded).to(tl.uint16)
    else:
        moved = (w.to(tl.float32) + total).to(out.dtype.element_ty)
    tl.store(out + offset, moved, mask=(offset >= 0) & (offset < size))


# --- kernels ------------------------------------------------------------------------------------


@_jit
def _placed(out, base, places, start, group, N: tl.constexpr):
    """The memory, position and first group of a program's piece: one of many, unless `places` is None."""
    if places is not None:
        here = places + tl.program_id(1) * 3
        start = tl.load(here)
        group, base, out = start // N * (N // _BLOCK), base + tl.load(here + 1), out + tl.load(here + 2)
    return out, base, start, group


@_kernel
def _combine_sum(
    out, base, addend, places, start, size, tensor, group, k0, k1, directions, coefficients, count,
    FAMILY: tl.constexpr,
):  # fmt: skip
    """Compute out = base + (addend + Σ c z) over one group; the sum stays in registers."""
    out, base, start, group = _placed(out, base, places, start, group, _BLOCK)
    group += tl.program_id(0)
    position = _positions(FAMILY)
    offset = group.to(tl.int64) * _BLOCK - start + position
    if addend is None:
        total = tl.zeros_like(position).to(tl.float32)
    else:
        total = _load(addend, offset, size)
    for k in range(count):
        direction, c = tl.load(directions + k), tl.load(coefficients + k)
        if FAMILY == "gaussian":
            total += c * _gaussian(tensor, direction, group, k0, k1)
        else:
            total += _float(_bits(c) ^ _flips(_RADEMACHER, tensor, direction, group, k0, k1, _BLOCK))
    _store(out, base, total, offset, size)


@_kernel
def _combine_transformed(
    out, base, addend, places, start, size, tensor, group, k0, k1, table, first,
    WAY: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute out = base + (addend + D1 y) over N positions.

    "held": y is the transform of D2 c with c = table. "hashed": y = table[i XOR s_b].
    "made": y = table from group `first` on.
    """
    out, base, start, group = _placed(out, base, places, start, group, N)
    group += tl.program_id(0) * (N // _BLOCK)
    position = tl.arange(0, N)
    if WAY == "held":
        c = tl.load(table + (position & (SIZE - 1)))
        y = _transform(_flip(c, _flips(_HADAMARD_BLOCK, tensor, 0, group, k0, k1, N)), 0, STAGES)
    elif WAY == "hashed":
        row = (group.to(tl.uint32) * _BLOCK & (SIZE - 1)).to(tl.int32) + (position & (SIZE - 1))
        y = tl.load(table + (row ^ _shifts(tensor, group, k0, k1, SIZE)))
    else:
        y = tl.load(table + (group - first).to(tl.int64) * _BLOCK + position)
    D1: tl.constexpr = _HASHED_ROW if WAY == "hashed" else _HADAMARD_ROW
    z = _flip(y, _flips(D1, tensor, 0, group, k0, k1, N))
    offset = group.to(tl.int64) * _BLOCK - start + position
    total = 0.0 if addend is None else _load(addend, offset, size)
    _store(out, base, total + z, offset, size)


@_kernel
def _signed(out, x, start, size, tensor, group, k0, k1, STREAM: tl.constexpr, PERIOD: tl.constexpr):
    """Compute out = sign · x over one group; out begins at the first group, x at `start` or repeats after PERIOD."""
    here = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    group += tl.program_id(0)
    if PERIOD:
        values = tl.load(x + (here & (PERIOD - 1)))
    else:
        values = _load(x, group.to(tl.int64) * _BLOCK - start + tl.arange(0, _BLOCK), size)
    tl.store(out + here, _flip(values, _flips(STREAM, tensor, 0, group, k0, k1, _BLOCK)))


@_jit
def _walsh(x, INNER: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Apply the stages h = INNER … of a transform, in memory: a tile is N / COLUMNS rows that lie INNER apart."""
    across: tl.constexpr = INNER // COLUMNS
    tile = tl.program_id(0)
    position = tl.arange(0, N)
    offset = (tile // across).to(tl.int64) * (N * across) + (
        tile % across * COLUMNS + position // COLUMNS * INNER + position % COLUMNS
    )
    tl.store(x + offset, _transform(tl.load(x + offset), FIRST, LAST))


@_kernel
def _products(products, v, start, size, tensor, group, k0, k1, count, EACH: tl.constexpr, FAMILY: tl.constexpr):
    """Compute products[g, j] = ⟨z_j, v⟩ over group g in float32, halves added onto each other.

    One program does EACH directions.
    """
    group += tl.program_id(1)
    position = _positions(FAMILY)
    values = _load(v, group.to(tl.int64) * _BLOCK - start + position, size)
    begin = tl.program_id(0).to(tl.int64) * EACH
    for j in range(begin, min(begin + EACH, count)):
        if FAMILY == "gaussian":
            x = _gaussian(tensor, j, group, k0, k1) * values
            x = tl.sum(tl.sum(tl.sum(x, 2), 1), 1)  # 2,048 apart, 1,024 apart, 512 apart
        else:
            x = _flip(values, _flips(_RADEMACHER, tensor, j, group, k0, k1, _BLOCK))
            x = _halve(_halve(_halve(x)))
        for _ in tl.static_range(8):
            x = _halve(x)
        tl.store(products + tl.program_id(1).to(tl.int64) * count + j, tl.sum(x, 0))


@_kernel
def _project_transformed(
    out, v, start, size, tensor, group, k0, k1,
    WAY: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute each block's products: out[b, j] = D2 y, y the transform of D1 v, or out[b, i XOR s_b] = D1 v."""
    group += tl.program_id(0) * (N // _BLOCK)
    position = tl.arange(0, N)
    D1: tl.constexpr = _HASHED_ROW if WAY == "hashed" else _HADAMARD_ROW
    values = _load(v, group.to(tl.int64) * _BLOCK - start + position, size)
    x = _flip(values, _flips(D1, tensor, 0, group, k0, k1, N))
    here = tl.program_id(0).to(tl.int64) * N + position
    if WAY == "hashed":
        here ^= _shifts(tensor, group, k0, k1, SIZE)
    else:
        x = _flip(_transform(x, 0, STAGES), _flips(_HADAMARD_BLOCK, tensor, 0, group, k0, k1, N))
    tl.store(out + here, x)


@_kernel
def _add_rows(partial, products, first, rows, columns, PER_SEGMENT: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the rows of segment s to partial[s], ascending, in float64; `products` begins at row `first` of segment 0."""
    segment, column = tl.program_id(1), tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    here = partial + segment.to(tl.int64) * columns + column
    total = tl.load(here, mask=inside, other=0)
    for row in range(max(segment * PER_SEGMENT, first), min((segment + 1) * PER_SEGMENT, first + rows)):
        total += tl.load(products + (row - first).to(tl.int64) * columns + column, mask=inside, other=0).to(tl.float64)
    tl.store(here, total, mask=inside)


# --- the operations -----------------------------------------------------------------------------


def plan(pool: Pool, directions: ref.Words, coefficients: ref.Floats, device: torch.device) -> tuple[Any, ...]:
    """Prepare a sum for the kernels: (pool, directions, coefficients, their number), or (pool, table)."""
    if not pool.transformed:
        return pool, _upload(directions.view(np.int32), device), _upload(coefficients, device), directions.size
    c = np.zeros(pool.size, np.float32)
    c[directions] = coefficients
    with _on(device):
        table = _upload(c, device)
        if pool.record.at_end:
            _transform_(table, pool.size)
    return pool, table


def _way(pool: Pool) -> dict[str, Any] | None:
    """The constants of kernels that make a unit of a transformed family; None: its transform is too large for one."""
    if pool.family == "hashed":
        return {"WAY": "hashed", "SIZE": pool.size, "STAGES": 0, "N": BLOCK, "num_warps": 4}
    if pool.size > HELD:
        return None
    stages = pool.size.bit_length() - 1
    return {"WAY": "held", "SIZE": pool.size, "STAGES": stages, "N": pool.unit, "num_warps": pool.unit // WARP}


def combine(pieces: Sequence[FlatPiece], plan: tuple[Any, ...]) -> None:
    """Nothing here waits for the device."""
    pool, *inputs = plan
    way = _way(pool) if pool.transformed else {"FAMILY": pool.family, "N": BLOCK, "num_warps": 4}
    unit, per_unit = pool.unit, pool.unit // BLOCK
    for run in _runs([piece for piece in pieces if piece[2].numel()], MOST if way else 1):
        tensor, start, base, out, addend = run[0]
        places, size = _places(run) if len(run) > 1 else None, base.numel()
        if base.dtype == torch.bfloat16:
            base, out = base.view(torch.uint16), out.view(torch.uint16)
        groups = range(start // unit * per_unit, -(-(start + size) // unit) * per_unit)  # in whole units
        piece, place = (out, base, addend), (start, size, tensor)
        with _on(base.device):
            if way is None:
                _combine_made(piece, place, groups, pool, *inputs)
                continue
            # of several pieces, no one touches more units than this
            units = len(groups) // per_unit if places is None else (size - 2) // unit + 2
            here, grid = (*piece, places, *place, groups[0], *_key(pool), *inputs), (units * unit // way["N"], len(run))
            if pool.transformed:
                _combine_transformed[grid](*here, 0, **way, **EXACT)
            else:
                _combine_sum[grid](*here, FAMILY=pool.family, num_warps=way["num_warps"], **EXACT)


def _runs(pieces: Sequence[FlatPiece], most: int) -> Iterator[Sequence[FlatPiece]]:
    """Neighbouring pieces that one launch can do: some rows of one tensor, as many numbers each."""

    def kind(piece: FlatPiece) -> tuple[Any, ...]:
        tensor, _, base, _, addend = piece
        return tensor, base.numel(), base.dtype, base.device, None if addend is None else id(addend)

    for _, alike in groupby(pieces, kind):
        run = [*alike]
        yield from (run[first : first + most] for first in range(0, len(run), most))


def _places(run: Sequence[FlatPiece]) -> Tensor:
    """The place of each of several pieces: its start, and its memory, counted from the first one's, in numbers."""
    _, _, base, out, _ = run[0]
    far = [(start, b.data_ptr() - base.data_ptr(), o.data_ptr() - out.data_ptr()) for _, start, b, o, _ in run]
    places = np.array(far, np.int64)
    places[:, 1:] //= base.element_size()
    return _upload(places, base.device)


def _combine_made(piece: tuple[Any, ...], place: tuple[int, ...], groups: range, pool: Pool, c: Tensor) -> None:
    """Compute a sum whose transform is too large for one program: some units at a time, in a scratch tensor."""
    tensor, each = place[-1], max(SCRATCH, pool.unit) // BLOCK
    y = torch.empty(min(each, len(groups)) * BLOCK, device=c.device)
    for group in groups[::each]:
        count = min(each, groups.stop - group)
        units = (tensor, group, *_key(pool))
        _signed[(count,)](y, c, 0, 0, *units, STREAM=ref.HADAMARD_BLOCK, PERIOD=pool.size, **EXACT)
        _transform_(y[: count * BLOCK], pool.size)
        _combine_transformed[(count,)](
            *piece, None, *place, group, *_key(pool), y, group,
            WAY="made", SIZE=pool.size, STAGES=0, N=BLOCK, num_warps=4, **EXACT,
        )  # fmt: skip


def project(pieces: Iterable[tuple[int, int, Tensor]], pool: Pool) -> NDArray[np.float64]:
    total = np.zeros(pool.size)
    for tensor, start, v in pieces:
        if v.numel():
            with _on(v.device):
                total += _project_piece((tensor, start, v.float()), pool).cpu().numpy()
    return total


def _project_piece(piece: tuple[int, int, Tensor], pool: Pool) -> Tensor:
    """The inner products with one piece: those of blocks in float32, their sums in float64, segment by segment.

    SCRATCH limits the number of blocks at a time.
    """
    _, start, v = piece
    unit = pool.unit
    rows = unit // pool.size if pool.transformed else 1  # of K products, made from one unit
    segment = max(1, ref.SEGMENT // unit)  # units
    each = max(1, min(SCRATCH // (rows * pool.size), 1 << 15))  # units at a time; a grid's second axis is short
    batch = max(1, each // segment)  # segments side by side
    units = range(start // unit, -(-(start + v.numel()) // unit))
    result = torch.zeros(pool.size, dtype=torch.float64, device=v.device)
    for first in range(units.start // segment * segment, units.stop, batch * segment):
        here = range(max(units.start, first), min(units.stop, first + batch * segment))
        partial = result.new_zeros(-(-(here.stop - first) // segment), pool.size)
        for begin in here[::each]:
            count = min(each, here.stop - begin)
            _add_rows[(-(-pool.size // COLUMNS), len(partial))](
                partial, _blocks(piece, pool, begin, count), (begin - first) * rows, count * rows, pool.size,
                PER_SEGMENT=segment * rows, COLUMNS=COLUMNS, num_warps=COLUMNS // 32, **EXACT,
            )  # fmt: skip
        for row in transform(partial) if pool.record.at_end else partial:
            result += row
    return result


def _blocks(piece: tuple[int, int, Tensor], pool: Pool, first: int, count: int) -> Tensor:
    """The float32 products of every block of some units, (blocks, K), flat."""
    tensor, start, v = piece
    groups = count * pool.unit // BLOCK
    group = first * pool.unit // BLOCK
    arguments = (v, start, v.numel(), tensor, group, *_key(pool))
    if not pool.transformed:
        products = torch.empty(groups * pool.size, device=v.device)
        _products[(-(-pool.size // EACH), groups)](
            products, *arguments, pool.size, EACH=EACH, FAMILY=pool.family, num_warps=4, **EXACT
        )
        return products
    products = torch.empty(groups * BLOCK, device=v.device)
    if (way := _way(pool)) is not None:
        _project_transformed[(groups * BLOCK // way["N"],)](products, *arguments, **way, **EXACT)
    else:
        _signed[(groups,)](products, *arguments, STREAM=ref.HADAMARD_ROW, PERIOD=0, **EXACT)
        _transform_(products, pool.size)
        again = (products, group * BLOCK, products.numel(), tensor, group, *_key(pool))
        _signed[(groups,)](products, *again, STREAM=ref.HADAMARD_BLOCK, PERIOD=0, **EXACT)
    return products


# --- host ---------------------------------------------------------------------------------------


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which kernels run on a tensor's GPU; Triton's interpreter runs on CPU tensors and needs none."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _upload(array: NDArray, device: torch.device) -> Tensor:
    """Copy a small array to the device without waiting for it: pinned memory lives until the copy is done."""
    host = torch.from_numpy(array.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _key(pool: Pool) -> tuple[int, ...]:
    """The key's words as signed numbers: an unsigned one above 2^31 would need another kernel, with 64 bits."""
    return tuple(word - (word >> 31 << 32) for word in pool.key_words)


def _transform_(x: Tensor, size: int) -> None:
    """Transform every `size` elements of x in place: stages below 4096 in one pass, the rest in another."""
    for inner in (1, BLOCK):
        radix = min(size // inner, BLOCK)
        if radix > 1:
            tile = radix if inner == 1 else BLOCK
            _walsh[(x.numel() // tile,)](
                x, INNER=inner, COLUMNS=tile // radix, N=tile, FIRST=(tile // radix).bit_length() - 1,
                LAST=tile.bit_length() - 1, num_warps=max(tile // WARP, 1), **EXACT,
            )  # fmt: skip
