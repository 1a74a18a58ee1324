"""The inner steps of the transformed families as LLVM vectors of 16 lanes.

Numba's own vectoriser makes slow code of transform stages whose partners lie in one vector register,
and each slice of an array costs it some 30 instructions. So this file writes the vectors out; LLVM
splits them to what the machine has (AVX-512, AVX2, SSE, NEON). The additions of the transform and
their order are those of the definition: a + b and a − b, h = 1, 2, 4, …
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
MASK = ir.VectorType(ir.IntType(32), WIDTH)


@njit(nogil=True, cache=True)
def walsh_pass(x, h, radix):
    """Do stages h, 2h, … of radix in all on every element of x; h is 1 or at least 16."""
    if h == 1:
        for i in range(0, x.size, 16):
            if radix == 16:
                within16(x, i)
            elif radix == 8:
                within8(x, i)
            elif radix == 4:
                within4(x, i)
            elif radix == 2:
                within2(x, i)
    else:
        for begin in range(0, x.size, h * radix):
            for i in range(begin, begin + h, 16):
                if radix == 16:
                    across16(x, i, h)
                elif radix == 8:
                    across8(x, i, h)
                elif radix == 4:
                    across4(x, i, h)
                elif radix == 2:
                    across2(x, i, h)


def _flip16(typingctx: Any, out: Any, i: Any, values: Any, words: Any, k: Any, shift: Any) -> Any:
    """out[i + l] = values[i + l] with the sign bit flipped by bit 31 of words[k + l] << shift, l < 16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        to, of, by = (
            _address(context, builder, signature.args[n], args[n], args[m]) for n, m in ((0, 1), (2, 1), (3, 4))
        )
        _store(builder, builder.xor(_load(builder, of, MASK), _signs(builder, by, args[5])), to)
        return context.get_dummy_value()

    return types.void(out, i, values, words, k, shift), code


def _add16(typingctx: Any, acc: Any, i: Any, c: Any, words: Any, k: Any, shift: Any) -> Any:
    """acc[i + l] += c, its sign flipped by bit 31 of words[k + l] << shift, l < 16; c is float32 seen as uint32."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        to = _address(context, builder, signature.args[0], args[0], args[1])
        by = _address(context, builder, signature.args[3], args[3], args[4])
        signed = builder.xor(_spread(builder, args[2]), _signs(builder, by, args[5]))
        _store(builder, builder.fadd(_load(builder, to), builder.bitcast(signed, VECTOR)), to)
        return context.get_dummy_value()

    return types.void(acc, i, c, words, k, shift), code


def _copy16(typingctx: Any, out: Any, i: Any, values: Any, j: Any) -> Any:
    """out[i + l] = values[j + l], l < 16."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        of = _address(context, builder, signature.args[2], args[2], args[3])
        _store(builder, _load(builder, of, MASK), _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(out, i, values, j), code


def _signs(builder: ir.IRBuilder, words: Any, shift: Any) -> Any:
    amounts = _spread(builder, builder.trunc(shift, ir.IntType(32)))
    return builder.and_(builder.shl(_load(builder, words, MASK), amounts), ir.Constant(MASK, [0x80000000] * WIDTH))


def _spread(builder: ir.IRBuilder, word: Any) -> Any:
    one = builder.insert_element(ir.Constant(MASK, ir.Undefined), word, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(MASK, [0] * WIDTH))


def _address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return cgutils.gep(builder, data, index)


def _load(builder: ir.IRBuilder, pointer: Any, kind: ir.VectorType = VECTOR) -> Any:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), typ=kind, align=4)


def _store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _within(radix: int) -> Any:
    """An intrinsic (x, i): stages 1 … radix/2 inside the 16 elements x[i], …"""

    @intrinsic
    def within(typingctx: Any, x: Any, i: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            pointer = _address(context, builder, signature.args[0], args[0], args[1])
            v = _load(builder, pointer)
            h = 1
            while h < radix:
                partner = builder.shuffle_vector(v, v, ir.Constant(MASK, [lane ^ h for lane in range(WIDTH)]))
                negate = ir.Constant(MASK, [0x80000000 if lane & h else 0 for lane in range(WIDTH)])
                flipped = builder.bitcast(builder.xor(builder.bitcast(v, MASK), negate), VECTOR)
                v = builder.fadd(partner, flipped)  # lanes without bit h: b + a; with it: a + (−b) = a − b
                h *= 2
            _store(builder, v, pointer)
            return context.get_dummy_value()

        return types.void(x, i), code

    return within


def _across(radix: int) -> Any:
    """An intrinsic (x, i, h): stages h … h radix/2 on the 16 columns x[i], … of rows h apart."""

    @intrinsic
    def across(typingctx: Any, x: Any, i: Any, h: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            array, index, stride = args
            rows = [builder.add(index, builder.mul(stride, ir.Constant(stride.type, k))) for k in range(radix)]
            pointers = [_address(context, builder, signature.args[0], array, row) for row in rows]
            v = [_load(builder, pointer) for pointer in pointers]
            step = 1
            while step < radix:
                for k in range(radix):
                    if not k & step:
                        a, b = v[k], v[k + step]
                        v[k], v[k + step] = builder.fadd(a, b), builder.fsub(a, b)
                step *= 2
            for value, pointer in zip(v, pointers, strict=True):
                _store(builder, value, pointer)
            return context.get_dummy_value()

        return types.void(x, i, h), code

    return across


flip16: Any = intrinsic(_flip16)
copy16: Any = intrinsic(_copy16)
add16: Any = intrinsic(_add16)
within2, within4, within8, within16 = (_within(radix) for radix in (2, 4, 8, 16))
across2, across4, across8, across16 = (_across(radix) for radix in (2, 4, 8, 16))
