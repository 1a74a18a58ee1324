"""Vectors for Numba: 16 lanes of 32 bits, and tiles of 16 such rows held in registers.

Numba's own vectoriser gives up on loops whose partners lie in one vector register, and each slice of
an array costs it some 30 instructions. So kernels here use vectors explicitly and reach memory by its
address; LLVM splits a vector into those that the machine has (AVX-512, AVX2, SSE, NEON). Arithmetic
is done as written: IEEE float32, no fused multiply-add, nothing reordered.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, overload, register_model

intrinsic: Any = extending.intrinsic  # its result has another signature than what it decorates

ROWS = 16
LANES = 16
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


# --- arithmetic ---------------------------------------------------------------------------------


def _operator(symbol: Any, instructions: dict[Register, str]) -> None:
    @intrinsic
    def apply(typingctx: Any, a: Any, b: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, instructions[a])(*args)

        return a(a, a), code

    @overload(symbol)
    def lanewise(a, b):  # Numba compares names and annotations with those of the lambda
        if a == b and a in instructions:
            return lambda a, b: apply(a, b)
        return None


_operator(operator.add, {FLOATS: "fadd", WORDS: "add", WIDE: "add"})
_operator(operator.sub, {FLOATS: "fsub", WORDS: "sub"})
_operator(operator.mul, {FLOATS: "fmul", WIDE: "mul"})
_operator(operator.xor, {WORDS: "xor", WIDE: "xor"})
_operator(operator.and_, {WORDS: "and_", WIDE: "and_"})
_operator(operator.or_, {WORDS: "or_"})
_operator(operator.lshift, {WORDS: "shl"})
_operator(operator.rshift, {WORDS: "lshr", WIDE: "lshr"})


def _unary(of: Register, to: Register, emit: Any) -> Any:
    """An intrinsic that applies emit(builder, value) to one vector."""

    @intrinsic
    def apply(typingctx: Any, value: Any) -> Any:
        return to(of), lambda context, builder, signature, args: emit(builder, args[0])

    return apply


def _sqrt(builder: Any, value: Any) -> Any:
    kind = ir.FunctionType(FLOATS.llvm, [FLOATS.llvm])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{LANES}f32")
    return builder.call(function, [value])


def _halved(start: int) -> Any:
    def emit(builder: Any, value: Any) -> Any:
        return builder.zext(_shuffle(builder, value, value, range(start, start + LANES // 2)), WIDE.llvm)

    return emit


as_floats = _unary(WORDS, FLOATS, lambda builder, value: builder.bitcast(value, FLOATS.llvm))
as_words = _unary(FLOATS, WORDS, lambda builder, value: builder.bitcast(value, WORDS.llvm))
sqrt = _unary(FLOATS, FLOATS, _sqrt)  # IEEE: correctly rounded
signed_shift = _unary(WORDS, WORDS, lambda builder, value: builder.ashr(value, ir.Constant(WORDS.llvm, [23] * LANES)))
signed_floats = _unary(WORDS, FLOATS, lambda builder, value: builder.sitofp(value, FLOATS.llvm))
low_half, high_half = _unary(WORDS, WIDE, _halved(0)), _unary(WORDS, WIDE, _halved(LANES // 2))


def _spread(to: Register) -> Any:
    """An intrinsic that puts one number on all lanes."""

    @intrinsic
    def spread(typingctx: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _splat(builder, context.cast(builder, args[0], signature.args[0], to.lane), to.llvm)

        return to(value), code

    return spread


floats, words, wide = _spread(FLOATS), _spread(WORDS), _spread(WIDE)


@intrinsic
def lane_numbers(typingctx: Any) -> Any:
    """The numbers 0, 1, …, 15 of the lanes."""
    return WORDS(), lambda context, builder, signature, args: ir.Constant(WORDS.llvm, list(range(LANES)))


@intrinsic
def joined(typingctx: Any, low: Any, high: Any) -> Any:
    """The low 32 bits of 8 + 8 wide lanes as 16 words."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = (builder.bitcast(value, WORDS.llvm) for value in args)
        return _shuffle(builder, low, high, range(0, 2 * LANES, 2))

    return WORDS(WIDE, WIDE), code


def _interleaved(start: int) -> Any:
    """An intrinsic that interleaves half of the lanes of two vectors: a b a b …"""

    @intrinsic
    def interleaved(typingctx: Any, a: Any, b: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _shuffle(builder, args[0], args[1], [start + k // 2 + LANES * (k % 2) for k in range(LANES)])

        return WORDS(WORDS, WORDS), code

    return interleaved


interleaved_low, interleaved_high = _interleaved(0), _interleaved(LANES // 2)


@intrinsic
def where_above(typingctx: Any, a: Any, b: Any, yes: Any, no: Any) -> Any:
    """Select `yes` where a > b as unsigned numbers, else `no`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_unsigned(">", args[0], args[1]), args[2], args[3])

    return WORDS(WORDS, WORDS, WORDS, WORDS), code


# --- memory -------------------------------------------------------------------------------------


def _address(boundary: int) -> Any:
    """An intrinsic that returns the address of an array's memory, or of the first boundary in it."""

    @intrinsic
    def address(typingctx: Any, array: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, NUMBER)
            number = builder.add(number, ir.Constant(NUMBER, boundary - 1))
            return builder.and_(number, ir.Constant(NUMBER, -boundary))

        return types.int64(array), code

    return address


data_of, address_of = _address(1), _address(64)


@intrinsic
def copy(typingctx: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source = (builder.inttoptr(address, BYTES) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


@intrinsic
def clear(typingctx: Any, to: Any, count: Any) -> Any:
    """Set `count` bytes to zero."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cgutils.memset(builder, builder.inttoptr(args[0], BYTES), args[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _loader(to: Any, memory: ir.Type, emit: Any = lambda builder, value: value) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, _load(builder, args[0], memory))

        return to(types.int64), code

    return load


SHORTS = ir.VectorType(ir.IntType(16), LANES)
load_floats = _loader(FLOATS, FLOATS.llvm)
load_shorts = _loader(WORDS, SHORTS, lambda builder, value: builder.zext(value, WORDS.llvm))
load_bytes = _loader(WORDS, ir.VectorType(ir.IntType(8), LANES), lambda builder, value: builder.zext(value, WORDS.llvm))
float_at, word_at = _loader(types.float32, ir.FloatType()), _loader(types.uint32, INDEX)
short_at = _loader(types.uint32, ir.IntType(16), lambda builder, value: builder.zext(value, INDEX))
number_at = _loader(types.int64, NUMBER)


def _storer(memory: ir.Type | None = None, *, around_caches: bool = False) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            narrowed = args[1] if memory is None else builder.trunc(args[1], memory)
            pointer = builder.inttoptr(args[0], narrowed.type.as_pointer())
            done = builder.store(narrowed, pointer, align=LANES * 4 if around_caches else 2)
            if around_caches:
                flag = builder.module.add_metadata([ir.Constant(INDEX, 1)])
                done.set_metadata("nontemporal", flag)
            return context.get_dummy_value()

        return types.void(types.int64, value), code

    return store


# `stream` goes around the caches: memory is not read before it is written. At a 64-byte boundary only.
store, store_shorts, stream = _storer(), _storer(SHORTS), _storer(around_caches=True)
put_float = put_word = store


@intrinsic
def fetch_ahead(typingctx: Any, address: Any) -> Any:
    """Fetch a tile's 16 lines of memory into the second-level cache ahead of their use; changes no memory."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [BYTES, INDEX, INDEX, INDEX])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        for row in _rows(builder, args[0], ir.Constant(NUMBER, 64)):
            read, second_level, data = (ir.Constant(INDEX, number) for number in (0, 2, 1))
            builder.call(function, [builder.inttoptr(row, BYTES), read, second_level, data])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def claim(typingctx: Any, counter: Any) -> Any:
    """Return the number at an address and add one to it, so that every thread gets another number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], NUMBER.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(NUMBER, 1), "seq_cst")

    return types.int64(types.int64), code


# --- tiles --------------------------------------------------------------------------------------


@intrinsic
def zero_tile(typingctx: Any) -> Any:
    return TILE(), lambda context, builder, signature, args: ir.Constant(TILE.llvm, None)


@intrinsic
def take(typingctx: Any, address: Any, stride: Any) -> Any:
    """Read a tile from 16 rows of 16 float32, `stride` bytes apart."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _tile(builder, [_load(builder, row, FLOATS.llvm) for row in _rows(builder, *args)])

    return TILE(types.int64, types.int64), code


@intrinsic
def take_swapped(typingctx: Any, address: Any, stride: Any, s: Any) -> Any:
    """Read a tile as `take` does, with row k from place k XOR s."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, stride, s = args
        places = [builder.xor(s, ir.Constant(s.type, k)) for k in range(ROWS)]
        rows = [builder.add(address, builder.mul(stride, place)) for place in places]
        return _tile(builder, [_load(builder, row, FLOATS.llvm) for row in rows])

    return TILE(types.int64, types.int64, types.int64), code


@intrinsic
def put(typingctx: Any, address: Any, stride: Any, tile: Any) -> Any:
    """Write a tile to 16 rows, `stride` bytes apart."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for row, value in zip(_rows(builder, *args[:2]), _vectors(builder, args[2]), strict=True):
            builder.store(value, builder.inttoptr(row, FLOATS.llvm.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, TILE), code


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


@intrinsic
def butterflies(typingctx: Any, tile: Any, h: Any, size: Any) -> Any:
    """Apply those of the transform's stages h, 2h, 4h, 8h that are below `size`, to rows that lie h apart.

    Additions and their order are those of the definition: a + b and a − b.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, h, size = args
        places = [cgutils.alloca_once(builder, FLOATS.llvm) for _ in range(ROWS)]
        for place, value in zip(places, _vectors(builder, tile), strict=True):
            builder.store(value, place)
        for step in (1, 2, 4, 8):
            reach = builder.mul(h, ir.Constant(h.type, step))
            with builder.if_then(builder.icmp_signed("<", reach, size), likely=True):
                for k in range(ROWS):
                    if not k & step:
                        a, b = builder.load(places[k]), builder.load(places[k + step])
                        builder.store(builder.fadd(a, b), places[k])
                        builder.store(builder.fsub(a, b), places[k + step])
        return _tile(builder, [builder.load(place) for place in places])

    return TILE(TILE, types.int64, types.int64), code


@intrinsic
def transposed(typingctx: Any, tile: Any) -> Any:
    """A tile with its rows as lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        v = _vectors(builder, args[0])
        for s in (1, 2, 4, 8):
            for k in range(ROWS):
                if not k & s:
                    a, b = v[k], v[k + s]
                    v[k] = _shuffle(builder, a, b, [l if not l & s else LANES + l - s for l in range(LANES)])
                    v[k + s] = _shuffle(builder, a, b, [l + s if not l & s else LANES + l for l in range(LANES)])
        return _tile(builder, v)

    return TILE(TILE), code


@intrinsic
def flipped(typingctx: Any, tile: Any, signs: Any, p: Any, stride: Any) -> Any:
    """A tile times the signs of positions p, p + stride, … of its rows; `signs` as `sign_words` writes them."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, signs, p, stride = args
        rows = []
        for k, value in enumerate(_vectors(builder, tile)):
            at = builder.add(p, builder.mul(stride, ir.Constant(stride.type, k)))
            rows.append(_flip(builder, value, *_sign_place(builder, signs, at)))
        return _tile(builder, rows)

    return TILE(TILE, types.int64, types.int64, types.int64), code


@intrinsic
def flipped_columns(typingctx: Any, tile: Any, signs: Any, p: Any) -> Any:
    """The result of `flipped` for the transpose of positions p … p + 255: lane m of row r is position p + 16 m + r.

    `signs` stand in pairs, as `paired_sign_words` writes them.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, signs, p = args
        number = p.type
        word = builder.and_(builder.lshr(p, ir.Constant(number, 10)), ir.Constant(number, 3))
        first = builder.add(signs, builder.shl(word, ir.Constant(number, 7)))
        first = builder.add(first, builder.shl(builder.lshr(p, ir.Constant(number, 12)), ir.Constant(number, 9)))
        lowest = builder.and_(builder.lshr(p, ir.Constant(number, 5)), ir.Constant(number, 31))
        top = _splat(builder, builder.trunc(builder.sub(ir.Constant(number, 31), lowest), INDEX), WORDS.llvm)
        shift = builder.sub(top, ir.Constant(WORDS.llvm, [m // 2 for m in range(LANES)]))
        rows = []
        for r, value in enumerate(_vectors(builder, tile)):
            pair = _load(builder, builder.add(first, ir.Constant(number, 8 * r)), ir.IntType(64))
            words_of_pair = builder.bitcast(_splat(builder, pair, WIDE.llvm), WORDS.llvm)
            rows.append(_flip(builder, value, words_of_pair, shift))
        return _tile(builder, rows)

    return TILE(TILE, types.int64, types.int64), code


@intrinsic
def plus_signed(typingctx: Any, tile: Any, c: Any, signs: Any, p: Any) -> Any:
    """The sum tile + c z over positions p … p + 255 of a block, z = ±1."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, c, signs, p = args
        c = _splat(builder, c, FLOATS.llvm)
        rows = []
        for k, value in enumerate(_vectors(builder, tile)):
            place = _sign_place(builder, signs, builder.add(p, ir.Constant(p.type, LANES * k)))
            rows.append(builder.fadd(value, _flip(builder, c, *place)))
        return _tile(builder, rows)

    return TILE(TILE, types.float32, types.int64, types.int64), code


def _sign_place(builder: Any, signs: Any, p: Any) -> tuple[Any, Any]:
    """The 16 words that hold the signs of positions p … p + 15, and the shift that brings them to bit 31."""

    def bits(first: int, count: int) -> Any:
        return builder.and_(builder.lshr(p, ir.Constant(p.type, first)), ir.Constant(p.type, (1 << count) - 1))

    group, word, bit, lane = bits(12, 30), bits(10, 2), bits(5, 5), bits(0, 5)
    words = [builder.shl(part, ir.Constant(p.type, by)) for part, by in ((group, 9), (word, 7), (lane, 2))]
    address = signs
    for part in words:
        address = builder.add(address, part)
    shift = builder.trunc(builder.sub(ir.Constant(p.type, 31), bit), INDEX)
    return _load(builder, address, WORDS.llvm), _splat(builder, shift, WORDS.llvm)


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


def _load(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), typ=kind, align=1)


def _shuffle(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    lanes = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INDEX, len(lanes)), lanes))


def _splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INDEX, 0))
    return _shuffle(builder, lane, lane, [0] * kind.count)
