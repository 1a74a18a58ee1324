"""Conversion of quantised weights of GGUF files to floating point: the layout of each type's blocks, and its kernel.

Weight i is q_i d, in some types q_i d + m, with float16 numbers d and m of the block and a small integer q_i. Where the
weights of a block form groups, d is d s_g and m is −m t_g, with small integers s and t of group g. Results equal those
of the `gguf` package bit for bit: float32, one rounding for each operation, and one to the type of the result.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from .simd import (
    FLOATS,
    INDEX,
    LANES,
    WORDS,
    claim,
    from_half,
    intrinsic,
    load,
    number_at,
    put_rounded,
    shuffle,
    splat,
)
from .threads import compiled, run

EIGHTS = ir.VectorType(ir.IntType(8), LANES)
CHUNK = 1 << 14  # weights that a thread takes at a time


class BitField(NamedTuple):
    """Some bits of every number: `width` of its byte, from bit `shift` on, of which the lowest is worth 2^place."""

    byte: NDArray[np.int64]
    shift: NDArray[np.int64]
    width: int
    place: int = 0


def bits(first: int, run: int, width: int, numbers: int, place: int = 0) -> BitField:
    """Bits of numbers that lie in runs: in the lowest bits of `run` bytes, then in the next higher ones, and so on.

    When the bytes from `first` on are used up, the same begins in the next `run` bytes.
    """
    number, levels = np.arange(numbers), 8 // width
    return BitField(first + number // (run * levels) * run + number % run, number // run % levels * width, width, place)


class Codes(NamedTuple):
    """Integers in a block: the sum of their bits less `minus`; or signed bytes; or those of a table by this sum."""

    parts: tuple[BitField, ...]
    minus: int = 0
    signed: bool = False
    table: tuple[int, ...] = ()


class BlockLayout(NamedTuple):
    """The bytes of a block.

    Attributes:
        weights, size: weights and bytes of a block.
        q: the integer of each weight.
        d: the first byte of d.
        m: whether m follows d.
        groups: s of each group, and then t of each if there is m; without groups, 1 and −1.
    """

    weights: int
    size: int
    q: Codes
    d: int = 0
    m: bool = False
    groups: Codes | None = None

    @property
    def group_count(self) -> int:
        return 1 if self.groups is None else len(self.groups.parts[0].byte) // (2 if self.m else 1)


CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The twelve bytes from 4 on: six bits of s and t of the first four groups each have a byte, whose two highest bits
# belong to the last four groups; these have their lower bits in the last four bytes, s low and t high.
SIX = Codes(
    (
        BitField(np.r_[4:8, 12:16, 8:12, 12:16], np.repeat([0, 4], [12, 4]), 4),
        BitField(np.r_[4:8, 4:8, 8:12, 8:12], np.tile(np.repeat([4, 6], 4), 2), 2, 4),
    )
)
LAYOUTS = {
    "Q4_0": BlockLayout(32, 18, Codes((bits(2, 16, 4, 32),), 8)),
    "Q4_1": BlockLayout(32, 20, Codes((bits(4, 16, 4, 32),)), m=True),
    "Q5_0": BlockLayout(32, 22, Codes((bits(6, 16, 4, 32), bits(2, 1, 1, 32, 4)), 16)),
    "Q5_1": BlockLayout(32, 24, Codes((bits(8, 16, 4, 32), bits(4, 1, 1, 32, 4))), m=True),
    "Q8_0": BlockLayout(32, 34, Codes((bits(2, 32, 8, 32),), signed=True)),
    "IQ4_NL": BlockLayout(32, 18, Codes((bits(2, 16, 4, 32),), table=CURVE)),
    "Q2_K": BlockLayout(256, 84, Codes((bits(16, 32, 2, 256),)), 80, True, Codes((bits(0, 16, 4, 32),))),
    "Q3_K": BlockLayout(
        256,
        110,
        Codes((bits(32, 32, 2, 256), bits(0, 32, 1, 256, 2)), 4),
        d=108,
        groups=Codes((bits(96, 8, 4, 16), bits(104, 4, 2, 16, 4)), 32),
    ),
    "Q4_K": BlockLayout(256, 144, Codes((bits(16, 32, 4, 256),)), 0, True, SIX),
    "Q5_K": BlockLayout(256, 176, Codes((bits(48, 32, 4, 256), bits(16, 32, 1, 256, 4))), 0, True, SIX),
    "Q6_K": BlockLayout(
        256,
        210,
        Codes((bits(0, 64, 4, 256), bits(128, 32, 2, 256, 4)), 32),
        d=208,
        groups=Codes((bits(192, 16, 8, 16),), signed=True),
    ),
    "IQ4_XS": BlockLayout(
        256,
        136,
        Codes((bits(8, 16, 4, 256),), table=CURVE),
        groups=Codes((bits(4, 1, 4, 8), bits(2, 1, 2, 8, 4)), 32),
    ),
}


@intrinsic(prefer_literal=True)
def widen_block(typingctx: Any, number: Any, at: Any, out: Any, marker: Any) -> Any:
    """Write the weights of a block; the number of its type among LAYOUTS is known when this is compiled."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, out, zero = args
        layout = list(LAYOUTS.values())[number.literal_value]
        count, groups = layout.group_count, layout.groups

        def put(place: Any, value: Any) -> None:
            def rounded(place, value, marker):
                put_rounded(place, value, marker, False)

            kinds = types.void(types.int64, FLOATS, marker)
            context.compile_internal(builder, rounded, kinds, [place, value, zero])

        d, m = scale_and_summand(context, builder, plus(builder, at, layout.d), layout.m)
        scaled = list[Any]()  # d s of all groups, then −m t of all
        for first in range(0, 0 if groups is None else len(groups.parts[0].byte), LANES):
            lanes = [lane if first + lane < count else LANES + lane for lane in range(LANES)]
            factors = shuffle(builder, d, builder.fneg(m), lanes)
            vector = builder.fmul(factors, integers(builder, at, layout.size, groups, first))
            scaled += [shuffle(builder, vector, vector, [lane] * LANES) for lane in range(LANES)]
        for first in range(0, layout.weights, LANES):
            group = first * count // layout.weights
            value = integers(builder, at, layout.size, layout.q, first)
            value = builder.fmul(value, scaled[group] if scaled else d)
            if layout.m:
                value = builder.fadd(value, scaled[count + group] if scaled else m)
            put(plus(builder, out, first * marker.bitwidth // 8), value)
        return context.get_dummy_value()

    return types.void(number, types.int64, types.int64, marker), code


def scale_and_summand(context: Any, builder: Any, at: Any, both: bool) -> list[Any]:
    """The float16 at an address and, if there are `both`, the one behind it, as 16 equal floats each."""
    read = load(builder, at, ir.VectorType(ir.IntType(16), 2 if both else 1))
    if "+f16c" in context.codegen().magic_tuple()[2]:  # one instruction of the processor; others have no such function
        halves = builder.bitcast(read, ir.VectorType(ir.HalfType(), 2 if both else 1))
        values = builder.fpext(halves, ir.VectorType(ir.FloatType(), 2 if both else 1))
    else:
        by_turns = builder.zext(shuffle(builder, read, read, [0, int(both)] * (LANES // 2)), WORDS.llvm)
        values = context.compile_internal(builder, lambda halves: from_half(halves), FLOATS(WORDS), [by_turns])
    return [shuffle(builder, values, values, [lane] * LANES) for lane in (0, int(both))]


def integers(builder: Any, at: Any, size: int, of: Any, first: int) -> Any:
    """Sixteen integers of the block of `size` bytes at an address, from number `first` on, as floats."""

    def lanes(numbers: Any, kind: Any = WORDS.llvm) -> Any:
        return ir.Constant(kind, [int(number) for number in np.broadcast_to(numbers, LANES)])

    total = lanes(0)
    for byte, shift, width, place in of.parts:
        byte, shift = (places.take(range(first, first + LANES), mode="clip") for places in (byte, shift))
        if byte.max() - byte.min() < 4:
            start = min(int(byte.min()), size - 4)
            word = splat(builder, load(builder, plus(builder, at, start), INDEX), WORDS.llvm)
            shift = shift + 8 * (byte - start)
        else:
            start = min(int(byte.min()), size - LANES)
            read = load(builder, plus(builder, at, start), EIGHTS)
            word = builder.zext(shuffle(builder, read, read, byte - start), WORDS.llvm)
        if width == 1 and shift.min() < shift.max():  # one instruction where there are masks
            is_set = builder.icmp_unsigned("!=", builder.and_(word, lanes(1 << shift)), lanes(0))
            part = builder.select(is_set, lanes(1 << place), lanes(0))
        else:
            part = builder.and_(builder.lshr(word, lanes(shift)), lanes((1 << width) - 1))
            part = builder.shl(part, lanes(place))
        total = builder.or_(total, part)
    if of.table:  # LLVM makes one instruction of these
        places, table, entries = builder.trunc(total, EIGHTS), lanes(of.table, EIGHTS), lanes(0, EIGHTS)
        for lane in (ir.Constant(INDEX, lane) for lane in range(LANES)):
            entry = builder.extract_element(table, builder.extract_element(places, lane))
            entries = builder.insert_element(entries, entry, lane)
        total = builder.sext(entries, WORDS.llvm)
    if of.signed:
        total = builder.sub(builder.xor(total, lanes(128)), lanes(128))
    return builder.sitofp(builder.sub(total, lanes(of.minus)), FLOATS.llvm)


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(address.type, offset))


MARKERS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}


@cache
def worker(kind: str, dtype: torch.dtype) -> Callable[[int], None]:
    """The function with which any number of threads share the blocks of a job's pieces, all of one type."""
    number, marker = list(LAYOUTS).index(kind), MARKERS[dtype]
    weights, size = LAYOUTS[kind][:2]
    chunk, step = CHUNK // weights, weights * dtype.itemsize

    def widen(job):
        pieces, rows = number_at(job + 8), number_at(job + 16)
        mine, before = claim(job), 0  # chunks are numbered through all pieces
        for row in range(pieces, pieces + 24 * rows, 24):
            source, out, count = number_at(row), number_at(row + 8), number_at(row + 16)
            chunks = (count + chunk - 1) // chunk
            while mine < before + chunks:
                first = (mine - before) * chunk
                for block in range(first, min(first + chunk, count)):
                    widen_block(number, source + size * block, out + step * block, marker)
                mine = claim(job)
            before += chunks

    return widen


def dequantise(parts: Sequence[tuple[int, int, int]], kind: str, dtype: torch.dtype) -> None:
    """Dequantise parts (address of blocks, address of weights, number of weights)."""
    rows = np.array(parts, np.int64).reshape(-1, 3)
    alone = 4 * CHUNK  # weights that one thread makes before a second has begun
    threads = min(torch.get_num_threads(), 1 + int(rows[:, 2].sum()) // alone)
    rows[:, 2] //= LAYOUTS[kind].weights
    job: NDArray[np.int64] = np.array([0, rows.ctypes.data, len(rows)], np.int64)
    run(compiled(worker(kind, dtype)), job, threads)
