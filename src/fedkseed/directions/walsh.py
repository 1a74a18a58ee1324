"""Four stages of the Walsh–Hadamard transform in one pass over the cache, as LLVM vectors.

Numba's own vectoriser makes slow code of the stages whose partners lie in one vector register, so
this file writes the vectors out: 16 lanes, which LLVM splits to what the machine has (AVX-512, AVX2,
SSE, NEON). The additions and their order are those of the definition: a + b and a − b, h = 1, 2, 4, …
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


def _address(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return cgutils.gep(builder, data, index)


def _load(builder: ir.IRBuilder, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, VECTOR.as_pointer()), typ=VECTOR, align=4)


def _store(builder: ir.IRBuilder, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, VECTOR.as_pointer()), align=4)


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


within2, within4, within8, within16 = (_within(radix) for radix in (2, 4, 8, 16))
across2, across4, across8, across16 = (_across(radix) for radix in (2, 4, 8, 16))
