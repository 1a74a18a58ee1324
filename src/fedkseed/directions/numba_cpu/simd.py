"""Vectors for Numba: 16 lanes of 32 bits, and tiles of 16 such rows held in registers.

Numba's own vectoriser gives up on loops whose partners lie in one vector register, and each slice of
an array costs it some 30 instructions. So kernels here use vectors explicitly and reach memory by its
address; LLVM splits a vector into those that the machine has (AVX-512, AVX2, SSE, NEON). A tile
goes through a transform in parts of as many lanes as a register has, since it would not fit otherwise.
Arithmetic is done as written: IEEE float32, no fused multiply-add, nothing reordered.

Weights are widened to float32 and rounded once to nearest even. A `marker` stands for their type: one number of the
type that NumPy calls float32, uint16 (for bfloat16) or int16 (for float16). So each type has kernels of its own.
"""

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import models, overload, register_model

from .kept_kernels import config, kept

kernel = kept(njit, nogil=True, fastmath=False, error_model="numpy")
# Inlined before LLVM sees it, so that vectors stay in registers.
inlined = njit(inline="always", fastmath=False, error_model="numpy")

intrinsic: Any = extending.intrinsic  # its result has another signature than what it decorates
ROWS = LANES = 16
STEPS = (1, 2, 4, 8)  # of a transform's stages within 16 rows
FEATURES = (get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES).split(",")
PART = 16 if "+avx512f" in FEATURES else 8 if "+avx" in FEATURES else 4  # lanes of a register
INDEX = ir.IntType(32)
NUMBER = ir.IntType(64)
BYTES = ir.IntType(8).as_pointer()


class Register(types.Type):
    """A Numba type that is one LLVM value, and the Numba type of a lane."""

    def __init__(self, name: str, llvm: Any, lane: types.Type) -> None:
        super().__init__(name=name)
        self.llvm, self.lane = llvm, lane


@register_model(Register)
class RegisterModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Register) -> None:
        super().__init__(manager, kind, kind.llvm)


FLOATS = Register("floats", ir.VectorType(ir.FloatType(), LANES), types.float32)
WORDS = Register("words", ir.VectorType(ir.IntType(32), LANES), types.uint32)
WIDE = Register("wide", ir.VectorType(ir.IntType(64), LANES // 2), types.uint64)
TILE = Register("tile", ir.ArrayType(FLOATS.llvm, ROWS), types.float32)


def _intrinsic(to: Any, *of: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator of emit(builder, *arguments), which writes an intrinsic's LLVM code.

    Args:
        to: the type of the result, or `types.void`.
        of: the types that the arguments are cast to; None: as they are.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def define(typingctx: Any, *arguments: Any) -> Any:
            def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                made = emit(builder, *args)
                return context.get_dummy_value() if to is types.void else made

            return to(*(kind or argument for kind, argument in zip(of, arguments, strict=True))), code

        return intrinsic(define)

    return decorate


# --- arithmetic ---------------------------------------------------------------------------------


def _operator(symbol: Any, instructions: dict[Register, str]) -> None:
    def intrinsic_of(kind: Register) -> Any:
        return _intrinsic(kind, kind, kind)(lambda builder, a, b: getattr(builder, instructions[kind])(a, b))

    by_kind = {kind: intrinsic_of(kind) for kind in instructions}

    @overload(symbol)
    def lanewise(a, b):  # Numba compares names and annotations with those of the lambda
        if a != b or a not in by_kind:
            return None
        apply = by_kind[a]
        return lambda a, b: apply(a, b)


_operator(operator.add, {FLOATS: "fadd", WORDS: "add", WIDE: "add"})
_operator(operator.sub, {FLOATS: "fsub", WORDS: "sub"})
_operator(operator.mul, {FLOATS: "fmul", WIDE: "mul"})
_operator(operator.xor, {WORDS: "xor", WIDE: "xor"})
_operator(operator.and_, {WORDS: "and_", WIDE: "and_"})
_operator(operator.or_, {WORDS: "or_"})
_operator(operator.lshift, {WORDS: "shl"})
_operator(operator.rshift, {WORDS: "lshr", WIDE: "lshr"})


@_intrinsic(FLOATS, FLOATS)
def sqrt(builder, value):
    """IEEE: correctly rounded."""
    kind = ir.FunctionType(FLOATS.llvm, [FLOATS.llvm])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{LANES}f32"), [value])


as_floats = _intrinsic(FLOATS, WORDS)(lambda builder, value: builder.bitcast(value, FLOATS.llvm))
as_words = _intrinsic(WORDS, FLOATS)(lambda builder, value: builder.bitcast(value, WORDS.llvm))
signed_floats = _intrinsic(FLOATS, WORDS)(lambda builder, value: builder.sitofp(value, FLOATS.llvm))
signed_shift = _intrinsic(WORDS, WORDS)(
    lambda builder, value: builder.ashr(value, ir.Constant(WORDS.llvm, [23] * LANES))
)
lane_numbers = _intrinsic(WORDS)(lambda builder: ir.Constant(WORDS.llvm, list(range(LANES))))


def _spread(kind: Register) -> Any:
    """An intrinsic that puts one number on all lanes."""
    return _intrinsic(kind, kind.lane)(lambda builder, value: splat(builder, value, kind.llvm))


floats, words, wide = _spread(FLOATS), _spread(WORDS), _spread(WIDE)


def _half(first: int) -> Any:
    """An intrinsic that widens half of the lanes."""
    lanes = range(first, first + LANES // 2)
    return _intrinsic(WIDE, WORDS)(
        lambda builder, value: builder.zext(shuffle(builder, value, value, lanes), WIDE.llvm)
    )


low_half, high_half = _half(0), _half(LANES // 2)


@_intrinsic(WORDS, WIDE, WIDE)
def joined(builder, low, high):
    """The low 32 bits of 8 + 8 wide lanes as 16 words."""
    low, high = (builder.bitcast(value, WORDS.llvm) for value in (low, high))
    return shuffle(builder, low, high, range(0, 2 * LANES, 2))


def _interleaved(first: int) -> Any:
    """An intrinsic that interleaves half of the lanes of two vectors: a b a b …"""
    lanes = [first + k // 2 + LANES * (k % 2) for k in range(LANES)]
    return _intrinsic(WORDS, WORDS, WORDS)(lambda builder, a, b: shuffle(builder, a, b, lanes))


interleaved_low, interleaved_high = _interleaved(0), _interleaved(LANES // 2)


@_intrinsic(WORDS, WORDS, WORDS, WORDS, WORDS)
def where_above(builder, a, b, yes, no):
    """Select `yes` where a > b as unsigned numbers, else `no`."""
    return builder.select(builder.icmp_unsigned(">", a, b), yes, no)


# --- memory -------------------------------------------------------------------------------------


@_intrinsic(types.void, types.int64, types.int64, types.int64)
def copy(builder, to, source, count):
    """Copy `count` bytes."""
    cgutils.raw_memcpy(builder, builder.inttoptr(to, BYTES), builder.inttoptr(source, BYTES), count, 1)


@_intrinsic(types.void, types.int64, types.int64)
def clear(builder, to, count):
    """Set `count` bytes to zero."""
    cgutils.memset(builder, builder.inttoptr(to, BYTES), count, 0)


def _loader(to: Any, memory: ir.Type, widened: ir.Type | None = None) -> Any:
    """An intrinsic that reads what is at an address; unsigned numbers may be widened."""
    return _intrinsic(to, types.int64)(
        lambda builder, address: builder.zext(load(builder, address, memory), widened or memory)
    )


SHORTS = ir.VectorType(ir.IntType(16), LANES)
load_floats, load_words = _loader(FLOATS, FLOATS.llvm), _loader(WORDS, WORDS.llvm)
load_shorts = _loader(WORDS, SHORTS, WORDS.llvm)
float_at, word_at = _loader(types.float32, ir.FloatType()), _loader(types.uint32, INDEX)
number_at = _loader(types.int64, NUMBER)


@_intrinsic(types.void, types.int64, None)
def store(builder, address, value):
    """Write a number or a vector."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=2)


@_intrinsic(types.void, types.int64, WORDS)
def store_shorts(builder, address, value):
    """Write the lower halves of the lanes."""
    builder.store(builder.trunc(value, SHORTS), builder.inttoptr(address, SHORTS.as_pointer()), align=2)


@_intrinsic(types.void, types.int64, FLOATS)
def stream(builder, address, value):
    """Write around the caches: memory is not read before it is written. At a 64-byte boundary only."""
    done = builder.store(value, builder.inttoptr(address, FLOATS.llvm.as_pointer()), align=LANES * 4)
    done.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INDEX, 1)]))


@_intrinsic(types.void, types.int64)
def fetch_ahead(builder, address):
    """Fetch a tile's 16 lines of memory into the second-level cache ahead of their use; changes no memory."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, INDEX, INDEX, INDEX])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = (ir.Constant(INDEX, number) for number in (0, 2, 1))
    for row in _rows(builder, address, ir.Constant(NUMBER, 64)):
        builder.call(function, [builder.inttoptr(row, BYTES), read, second_level, data])


@_intrinsic(types.int64, types.int64)
def claim(builder, counter):
    """Return the number at an address and add one to it, so that every thread gets another number."""
    pointer = builder.inttoptr(counter, NUMBER.as_pointer())
    return builder.atomic_rmw("add", pointer, ir.Constant(NUMBER, 1), "seq_cst")


# --- weights ---------------------------------------------------------------------------------


def item_size(marker) -> Any:  # Numba has an overload of this and of the next two for each marker
    """The bytes that one weight takes."""


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
        return lambda address, value, marker, around: stream(address, value) if around else store(address, value)
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


# --- tiles --------------------------------------------------------------------------------------

zero_tile = _intrinsic(TILE)(lambda builder: ir.Constant(TILE.llvm, None))


@_intrinsic(TILE, types.int64, types.int64)
def take(builder, address, stride):
    """Read a tile from 16 rows of 16 float32, `stride` bytes apart."""
    return _tile(builder, [load(builder, row, FLOATS.llvm) for row in _rows(builder, address, stride)])


@_intrinsic(TILE, types.int64, types.int64, types.int64)
def take_swapped(builder, address, stride, s):
    """Read a tile as `take` does, with row k from place k XOR s."""
    places = [builder.xor(s, ir.Constant(s.type, k)) for k in range(ROWS)]
    rows = [builder.add(address, builder.mul(stride, place)) for place in places]
    return _tile(builder, [load(builder, row, FLOATS.llvm) for row in rows])


@_intrinsic(types.void, types.int64, types.int64, TILE)
def put(builder, address, stride, tile):
    """Write a tile to 16 rows, `stride` bytes apart."""
    for row, value in zip(_rows(builder, address, stride), _vectors(builder, tile), strict=True):
        builder.store(value, builder.inttoptr(row, FLOATS.llvm.as_pointer()), align=4)


def by_rows(function: Callable[..., None]) -> Any:
    """An intrinsic (tile, p, stride, more) that calls function(row, p + k stride, more) for each row k of a tile."""

    @intrinsic
    def apply(typingctx: Any, tile: Any, p: Any, stride: Any, more: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tile, p, stride, more = args
            of_row = types.void(FLOATS, types.int64, signature.args[3])
            for row, at in zip(_vectors(builder, tile), _rows(builder, p, stride), strict=True):
                context.compile_internal(builder, function, of_row, [row, at, more])
            return context.get_dummy_value()

        return types.void(TILE, types.int64, types.int64, more), code

    return apply


@_intrinsic(TILE, TILE, types.int64, types.int64)
def butterflies(builder, tile, h, size):
    """Apply those of the transform's stages h, 2h, 4h, 8h that are below `size`, to rows that lie h apart.

    Additions and their order are those of the definition: a + b and a − b.
    """
    parts = _parts(builder, _vectors(builder, tile))
    places = [[cgutils.alloca_once(builder, row.type) for row in rows] for rows in parts]

    def stage(rows: list[Any], step: int) -> None:
        for k in range(ROWS):
            if not k & step:
                a, b = rows[k], rows[k + step]
                rows[k], rows[k + step] = builder.fadd(a, b), builder.fsub(a, b)

    def keep(rows: list[Any], number: int) -> None:
        for row, place in zip(rows, places[number], strict=True):
            builder.store(row, place)

    is_below = [builder.icmp_signed("<", builder.mul(h, ir.Constant(h.type, step)), size) for step in STEPS]
    with builder.if_else(is_below[-1], likely=True) as (all_stages, some):
        with all_stages:  # without a branch between them, rows stay in registers
            for number, rows in enumerate(parts):
                changed = list(rows)
                for step in STEPS:
                    stage(changed, step)
                keep(changed, number)
        with some:
            for number, rows in enumerate(parts):
                keep(rows, number)
                for step, below in zip(STEPS[:-1], is_below[:-1], strict=True):
                    with builder.if_then(below):
                        changed = [builder.load(place) for place in places[number]]
                        stage(changed, step)
                        keep(changed, number)
    return _tile(builder, _whole(builder, [[builder.load(place) for place in rows] for rows in places]))


@_intrinsic(TILE, TILE)
def transposed(builder, tile):
    """A tile with its rows as lanes."""
    v = _vectors(builder, tile)
    for s in (1, 2, 4, 8):
        for k in range(ROWS):
            if not k & s:
                a, b = v[k], v[k + s]
                v[k] = shuffle(builder, a, b, [l if not l & s else LANES + l - s for l in range(LANES)])
                v[k + s] = shuffle(builder, a, b, [l + s if not l & s else LANES + l for l in range(LANES)])
    return _tile(builder, v)


@_intrinsic(TILE, TILE, types.int64, types.int64, types.int64)
def flipped(builder, tile, signs, p, stride):
    """A tile times the signs of positions p, p + stride, … of its rows; `signs` as `sign_words` writes them."""
    rows = zip(_vectors(builder, tile), _rows(builder, p, stride), strict=True)
    return _tile(builder, [_flip_at(builder, value, signs, at) for value, at in rows])


@_intrinsic(TILE, TILE, types.int64, types.int64)
def flipped_columns(builder, tile, signs, p):
    """The result of `flipped` for the transpose of positions p … p + 255: lane m of row r is position p + 16 m + r.

    `signs` stand in pairs, as `paired_sign_words` writes them.
    """
    first, top = _sign_place(builder, signs, p)
    shift = builder.sub(top, ir.Constant(WORDS.llvm, [m // 2 for m in range(LANES)]))
    rows = []
    for r, value in enumerate(_vectors(builder, tile)):
        pair = load(builder, builder.add(first, ir.Constant(p.type, 8 * r)), ir.IntType(64))
        words_of_pair = builder.bitcast(splat(builder, pair, WIDE.llvm), WORDS.llvm)
        rows.append(_flip(builder, value, words_of_pair, shift))
    return _tile(builder, rows)


@_intrinsic(TILE, TILE, types.float32, types.int64, types.int64)
def plus_signed(builder, tile, c, signs, p):
    """The sum tile + c z over positions p … p + 255 of a block, z = ±1."""
    c, rows = splat(builder, c, FLOATS.llvm), _rows(builder, p, ir.Constant(p.type, LANES))
    signed = [_flip_at(builder, c, signs, at) for at in rows]
    return _tile(builder, [builder.fadd(*pair) for pair in zip(_vectors(builder, tile), signed, strict=True)])


def _sign_place(builder: Any, signs: Any, p: Any) -> tuple[Any, Any]:
    """The address of the 32 words with the signs of p and its neighbours, and the shift that brings them to bit 31."""
    for first, count, size in ((12, 30, 9), (10, 2, 7)):  # the block, and the word in it
        signs = builder.add(signs, builder.shl(_bits(builder, p, first, count), ir.Constant(p.type, size)))
    shift = builder.trunc(builder.sub(ir.Constant(p.type, 31), _bits(builder, p, 5, 5)), INDEX)
    return signs, splat(builder, shift, WORDS.llvm)


def _flip_at(builder: Any, value: Any, signs: Any, p: Any) -> Any:
    """A vector times the signs of positions p … p + 15."""
    address, shift = _sign_place(builder, signs, p)
    lane = builder.shl(_bits(builder, p, 0, 5), ir.Constant(p.type, 2))
    return _flip(builder, value, load(builder, builder.add(address, lane), WORDS.llvm), shift)


def _bits(builder: Any, p: Any, first: int, count: int) -> Any:
    return builder.and_(builder.lshr(p, ir.Constant(p.type, first)), ir.Constant(p.type, (1 << count) - 1))


def _flip(builder: Any, value: Any, words: Any, shift: Any) -> Any:
    sign = builder.and_(builder.shl(words, shift), ir.Constant(WORDS.llvm, [0x80000000] * LANES))
    return builder.bitcast(builder.xor(builder.bitcast(value, WORDS.llvm), sign), FLOATS.llvm)


def _rows(builder: Any, address: Any, stride: Any) -> list[Any]:
    return [builder.add(address, builder.mul(stride, ir.Constant(stride.type, k))) for k in range(ROWS)]


def _vectors(builder: Any, tile: Any) -> list[Any]:
    return [builder.extract_value(tile, k) for k in range(ROWS)]


def _tile(builder: Any, vectors: list[Any]) -> Any:
    tile = ir.Constant(TILE.llvm, ir.Undefined)
    for k, vector in enumerate(vectors):
        tile = builder.insert_value(tile, vector, k)
    return tile


def _parts(builder: Any, rows: list[Any]) -> list[list[Any]]:
    """The lanes of 16 rows that fit into the machine's registers at once, then the next ones."""
    if PART == LANES:
        return [rows]
    return [[shuffle(builder, row, row, range(f, f + PART)) for row in rows] for f in range(0, LANES, PART)]


def _whole(builder: Any, parts: list[list[Any]]) -> list[Any]:
    """The rows that `_parts` has taken apart."""
    while len(parts) > 1:
        lanes = range(LANES // (len(parts) // 2))
        halves = zip(parts[::2], parts[1::2], strict=True)
        parts = [[shuffle(builder, a, b, lanes) for a, b in zip(low, high, strict=True)] for low, high in halves]
    return parts[0]


def load(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), typ=kind, align=1)


def shuffle(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    lanes = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INDEX, len(lanes)), lanes))


def splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INDEX, 0))
    return shuffle(builder, lane, lane, [0] * kind.count)
