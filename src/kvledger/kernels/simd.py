"""Vectors for Numba: 16 lanes of float32 or int32 as first-class values, and `emitted`, which makes functions of the
emitter's code (`emit.py`). All memory is addressed by plain integers; nothing is checked.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.extending import intrinsic

from kvledger.kernels.emit import F16, F32, I8, I16, I32, I64, LANES, VF32, VI8, VI32, Emit, Val, vec
from kvledger.kernels.isa import ISA

IS_X86 = platform.machine() in ("x86_64", "AMD64")


class VecType(types.Type):
    """Numba's type of a vector value."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=f"vec_{name}")


@register_default(VecType)
class _VecModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: VecType) -> None:
        super().__init__(manager, fe_type, fe_type.llvm_type)  # type: ignore[no-untyped-call]


f32x16 = VecType("f32x16", VF32)
i32x16 = VecType("i32x16", VI32)


def emitted(result: types.Type, params: Sequence[types.Type], emit: Callable[..., Val | None]) -> Any:
    """A Numba function of fixed types whose body is `emit(e, *values)`. Integers and floats are cast to `params`."""
    source = f"def f(typing, {', '.join(f'a{i}' for i in range(len(params)))}):\n  return build()"

    def build() -> tuple[Any, Any]:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> Any:
            e = Emit(builder)
            value = emit(e, *(Val(e, a) for a in args))
            return context.get_dummy_value() if value is None else value.v

        return result(*params), codegen

    scope: dict[str, Any] = {"build": build}
    exec(source, scope)  # the intrinsic's arity must show in its signature
    scope["f"].__name__ = getattr(emit, "__name__", "emitted")
    return intrinsic(scope["f"])


_i, _f, _v, _w = types.int64, types.float32, f32x16, i32x16

load_f32 = emitted(_v, [_i], lambda e, a: e.load(VF32, a))
store_f32 = emitted(types.void, [_i, _v], lambda e, a, x: e.store(x, a))
load_bf16 = emitted(_v, [_i], lambda e, a: e.load_bf16(a))
store_bf16 = emitted(types.void, [_i, _v], lambda e, a, x: e.store_bf16(x, a))
splat = emitted(_v, [_f], lambda e, x: e.splat(x))
add = emitted(_v, [_v, _v], lambda e, x, y: x + y)
sub = emitted(_v, [_v, _v], lambda e, x, y: x - y)
mul = emitted(_v, [_v, _v], lambda e, x, y: x * y)
div = emitted(_v, [_v, _v], lambda e, x, y: x / y)
fma = emitted(_v, [_v, _v, _v], lambda e, x, y, z: e.fma(x, y, z))
maximum = emitted(_v, [_v, _v], lambda e, x, y: e.max(x, y))
minimum = emitted(_v, [_v, _v], lambda e, x, y: e.min(x, y))
absolute = emitted(_v, [_v], lambda e, x: e.abs(x))
exp = emitted(_v, [_v], lambda e, x: e.exp(x))
round_i32 = emitted(_w, [_v], lambda e, x: e.round_i32(x))
add_i32 = emitted(_w, [_w, _w], lambda e, x, y: x + y)
sub_i32 = emitted(_w, [_w, _w], lambda e, x, y: x - y)
mul_i32 = emitted(_w, [_w, _w], lambda e, x, y: x * y)
splat_i32 = emitted(_w, [types.int32], lambda e, x: e.splat(x))
shl_i32 = emitted(_w, [_w, _w], lambda e, x, n: x << n)
sra_i32 = emitted(_w, [_w, _w], lambda e, x, n: x.sra(n))
store_i8 = emitted(types.void, [_i, _w], lambda e, a, x: e.store(Val(e, e.b.trunc(x.v, VI8)), a))
load_i8 = emitted(_w, [_i], lambda e, a: Val(e, e.b.sext(e.load(VI8, a).v, VI32)))
load_u8 = emitted(_w, [_i], lambda e, a: Val(e, e.b.zext(e.load(VI8, a).v, VI32)))
load_i32 = emitted(_w, [_i], lambda e, a: e.load(VI32, a))
to_f32 = emitted(_v, [_w], lambda e, x: e.to_f32(x))
power_of_two = emitted(_v, [_w], lambda e, x: e.bitcast((x + 127) << 23, VF32))


def _e4m3_to_f32(e: Emit, x: Val) -> Val:
    """fp8 e4m3 (OCP; bias 7) in the low byte of each lane → float32: move the fields, then put the exponent right."""
    magnitude = e.bitcast((x & 0x7F) << 20, VF32) * 2.0**120
    return e.bitcast(e.bitcast(magnitude, VI32) | ((x & 0x80) << 24), VF32)


def _f32_to_e4m3(e: Emit, x: Val) -> Val:
    """|x| ≤ 448 → the nearest e4m3, ties to even, subnormals included."""
    bits = e.bitcast(x, VI32)
    small = e.bitcast(e.bitcast(bits & 0x7FFFFFFF, VF32) * 2.0**-120, VI32)
    return ((small + (((small >> 20) & 1) + 0x7FFFF)) >> 20) | ((bits >> 24) & 0x80)


e4m3_to_f32 = emitted(_v, [_w], _e4m3_to_f32)
f32_to_e4m3 = emitted(_w, [_v], _f32_to_e4m3)


def _below(e: Emit, x: Val, count: Val, y: Val) -> Val:
    """Lane i of x where i < count, else y."""
    lanes = Val(e, ir.Constant(VI32, list(range(LANES))))
    return e.select(lanes < e.splat(count), x, y)


def _at_lane(e: Emit, lane: Val, x: Val, y: Val) -> Val:
    """x in one lane, none where `lane` is not among them; y in the others."""
    lanes = ir.Constant(VI32, list(range(LANES)))
    this = e.splat(Val(e, e.b.trunc(lane.v, I32)))
    return e.select(Val(e, e.b.icmp_signed("==", this.v, lanes)), x, y)


def _first_equal(e: Emit, x: Val, value: Val) -> Val:
    """The first lane of x that is `value`; 16 where none is."""
    equal = e.b.bitcast(e.b.fcmp_ordered("==", x.v, e.splat(value).v), I16)
    found = e.b.or_(e.b.zext(equal, I64), ir.Constant(I64, 1 << LANES))
    return Val(e, e.b.cttz(found, ir.Constant(ir.IntType(1), 1)))


below = emitted(_v, [_v, types.int32, _v], _below)
at_lane = emitted(_v, [_i, _v, _v], _at_lane)
first_equal = emitted(_i, [_v, _f], _first_equal)


reduce_max = emitted(_f, [_v], lambda e, x: e.halve(x, e.max))
reduce_min = emitted(_f, [_v], lambda e, x: e.halve(x, e.min))
reduce_add = emitted(_f, [_v], lambda e, x: e.halve(x, lambda a, b: a + b))
reduce_add_i32 = emitted(types.int32, [_w], lambda e, x: e.halve(x, lambda a, b: a + b))

# scalars at addresses
get_i64 = emitted(_i, [_i], lambda e, a: e.load(I64, a))
get_i32 = emitted(types.int32, [_i], lambda e, a: e.load(I32, a))
get_f32 = emitted(_f, [_i], lambda e, a: e.load(F32, a))
get_u8 = emitted(types.uint8, [_i], lambda e, a: e.load(I8, a))
get_u16 = emitted(types.uint16, [_i], lambda e, a: e.load(I16, a))
put_i64 = emitted(types.void, [_i, _i], lambda e, a, x: e.store(x, a))
put_i32 = emitted(types.void, [_i, types.int32], lambda e, a, x: e.store(x, a))
put_f32 = emitted(types.void, [_i, _f], lambda e, a, x: e.store(x, a))
put_u16 = emitted(types.void, [_i, types.uint16], lambda e, a, x: e.store(x, a))
put_u8 = emitted(types.void, [_i, types.uint8], lambda e, a, x: e.store(x, a))
as_f32 = emitted(_f, [_i], lambda e, x: e.bitcast(Val(e, e.b.trunc(x.v, I32)), F32))


def float_bits(x: float) -> int:
    """The bits of float32 `x` as an integer: how an op carries a number; `as_f32` reads it back."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _f16_to_f32(e: Emit, a: Val) -> Val:
    if ISA.half:
        return Val(e, e.b.fpext(e.load(F16, a).v, F32))
    bits = e.splat(Val(e, e.b.zext(e.load(I16, a).v, I32)))
    return Val(e, e.b.extract_element(e.half_bits_to_f32(bits).v, ir.Constant(I32, 0)))


get_f16 = emitted(_f, [_i], _f16_to_f32)


def _put_f16(e: Emit, a: Val, x: Val) -> None:
    """The nearest half float, ties to even, cut to ±65504; as `_f32_to_e4m3`."""
    wide = e.min(e.max(e.splat(x), e.const(VF32, -65504.0)), e.const(VF32, 65504.0))
    bits = e.bitcast(wide, VI32)
    small = e.bitcast(e.bitcast(bits & 0x7FFFFFFF, VF32) * 2.0**-112, VI32)
    half = ((small + (((small >> 13) & 1) + 0xFFF)) >> 13) | ((bits >> 16) & 0x8000)
    e.store(Val(e, e.b.trunc(e.b.extract_element(half.v, ir.Constant(I32, 0)), I16)), a)


put_f16 = emitted(types.void, [_i, _f], _put_f16)

# pairs of bfloat16 in the lanes of int32
low_bf16 = emitted(_v, [_w], lambda e, x: e.bitcast(x << 16, VF32))
high_bf16 = emitted(_v, [_w], lambda e, x: e.bitcast((x >> 16) << 16, VF32))
_IN_TURN = [i // 2 + i % 2 * LANES for i in range(2 * LANES)]
f32_bits = emitted(types.int32, [_f], lambda e, x: e.bitcast(x, I32))


def _lanes_of(first: int) -> Callable[[Emit, Val], Val]:
    """Lanes `first` … `first` + 7, each twice."""
    mask = ir.Constant(VI32, [first + i // 2 for i in range(LANES)])
    return lambda e, x: Val(e, e.b.shuffle_vector(x.v, x.v, mask))


def _in_turn(e: Emit, x: Val, y: Val) -> Val:
    mask = ir.Constant(VI32, [i % 2 * LANES for i in range(LANES)])
    return Val(e, e.b.shuffle_vector(e.splat(x).v, e.splat(y).v, mask))


low_lanes_twice, high_lanes_twice = (emitted(_w, [_w], _lanes_of(first)) for first in (0, 8))
in_turn = emitted(_w, [types.int32, types.int32], _in_turn)
store_bf16_pairs = emitted(types.void, [_i, _v, _v], lambda e, a, x, y: e.store_pairs(x, y, a, _IN_TURN))


def _turned(e: Emit, address: Val, stride: Val) -> list[Val]:
    """The 16 columns of 16 rows of 16 words that lie `stride` bytes apart.

    Lanes i and i ^ distance of two rows that are as far apart change places, for four distances.
    """
    rows = [e.load(VI32, address + e.i64(i) * stride) for i in range(LANES)]
    for distance in (8, 4, 2, 1):
        low = ir.Constant(VI32, [i if i & distance == 0 else i - distance + LANES for i in range(LANES)])
        high = ir.Constant(VI32, [i + distance if i & distance == 0 else i + LANES for i in range(LANES)])
        for i in (i for i in range(LANES) if i & distance == 0):
            a, b = rows[i].v, rows[i + distance].v
            rows[i] = Val(e, e.b.shuffle_vector(a, b, low))
            rows[i + distance] = Val(e, e.b.shuffle_vector(a, b, high))
    return rows


def _turn_words(e: Emit, source: Val, stride: Val, to: Val) -> None:
    """16 rows of 16 words, `stride` bytes apart, → their columns, one after another."""
    for i, column in enumerate(_turned(e, source, stride)):
        e.store(column, to, 64 * i)


def _turn_halves(e: Emit, source: Val, stride: Val, to: Val) -> None:
    """As `turn_words`, of 32 columns of halves of words."""
    apart = ir.Constant(vec(I32, 32), [*range(0, 32, 2), *range(1, 32, 2)])
    for i, column in enumerate(_turned(e, source, stride)):
        halves = e.bitcast(column, vec(I16, 32)).v
        e.store(Val(e, e.b.shuffle_vector(halves, halves, apart)), to, 64 * i)


def _store_both_i8(e: Emit, to: Val, x: Val, y: Val) -> None:
    """16 bytes of each of two places, in turn."""
    mask = ir.Constant(vec(I32, 32), _IN_TURN)
    e.store(Val(e, e.b.shuffle_vector(e.load(VI8, x).v, e.load(VI8, y).v, mask)), to)


def _store_one(e: Emit, to: Val, x: Val, is_second: Val) -> None:
    """16 elements to every second place: to the first of each two, or to the second."""
    width = x.v.type.element.width
    whole = vec(ir.IntType(2 * width))
    shift = e.splat(Val(e, e.b.trunc((is_second * width).v, whole.element)))
    kept = e.load(whole, to) & (e.const(whole, ((1 << width) - 1) << width) >> shift)
    e.store(kept | (Val(e, e.b.zext(x.v, whole)) << shift), to)


turn_words = emitted(types.void, [_i, _i, _i], _turn_words)
turn_halves = emitted(types.void, [_i, _i, _i], _turn_halves)
store_both_i8 = emitted(types.void, [_i, _i, _i], _store_both_i8)
store_one_i8 = emitted(types.void, [_i, _i, _i], lambda e, to, x, second: _store_one(e, to, e.load(VI8, x), second))
store_one_bf16 = emitted(types.void, [_i, _v, _i], lambda e, to, x, second: _store_one(e, to, e.to_bf16(x), second))

# atomics: how threads share work and wait for each other
fetch_add = emitted(_i, [_i, _i], lambda e, a, x: Val(e, e.b.atomic_rmw("add", e.pointer(a, I64), x.v, "seq_cst")))
fetch_or = emitted(_i, [_i, _i], lambda e, a, x: Val(e, e.b.atomic_rmw("or", e.pointer(a, I64), x.v, "seq_cst")))
load_acquire = emitted(_i, [_i], lambda e, a: Val(e, e.b.load_atomic(e.pointer(a, I64), "acquire", 8, typ=I64)))


def _store_release(e: Emit, a: Val, x: Val) -> None:
    e.b.store_atomic(x.v, e.pointer(a, I64), "release", 8)


store_release = emitted(types.void, [_i, _i], _store_release)


def _pause(e: Emit, _: Val) -> None:
    if IS_X86:
        e.call("llvm.x86.sse2.pause", ir.VoidType(), [])


prefetch = emitted(types.void, [_i], lambda e, a: e.prefetch(a, 0))
pause = emitted(types.void, [_i], _pause)


def _call_kernel(e: Emit, function: Val, op: Val, ctx: Val, thread: Val) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    pointer = e.b.inttoptr(function.v, kind.as_pointer())
    e.b.call(pointer, [op.v, ctx.v, thread.v])


call_kernel = emitted(types.void, [_i, _i, _i, _i], _call_kernel)


def _tile_config(e: Emit, address: Val) -> None:
    if ISA.amx:
        e.call("llvm.x86.ldtilecfg", ir.VoidType(), [e.pointer(address, I8)])


def _tile_release(e: Emit, _: Val) -> None:
    if ISA.amx:
        e.call("llvm.x86.tilerelease", ir.VoidType(), [])


tile_config = emitted(types.void, [_i], _tile_config)
tile_release = emitted(types.void, [_i], _tile_release)
