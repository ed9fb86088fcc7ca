"""Vectors for Numba: 16 lanes of float32 or int32 as first-class values, and an emitter for unrolled inner loops.

Two ways in. Numba code uses the functions at the end (`load_f32`, `fma`, `exp` …) on addresses. Register-tiled inner
loops are written as Python that emits LLVM (`Emit`, `Val`): a Python loop there is an unrolled loop in the machine.
Only `dot_u8s8`, `dot_bf16` and the tile instructions differ between instruction sets; LLVM splits the rest to the
width the CPU has. Knows no model, no layout. Memory is addressed by plain integers: the caller owns it and its bounds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models, register_default
from numba.extending import intrinsic

from kvledger.kernels.isa import ISA

LANES = 16
I1, I8, I16, I32, I64, F32 = (
    ir.IntType(1),
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
F16 = ir.HalfType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BFloat()
PTR = I8.as_pointer()


def vec(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """The LLVM type of a vector."""
    return ir.VectorType(element, lanes)


VF32, VI32, VI16, VI8 = vec(F32), vec(I32), vec(I16), vec(I8)


def splat_const(vt: ir.VectorType, value: float) -> ir.Constant:
    """A vector constant with the same value in every lane."""
    return ir.Constant(vt, [value] * vt.count)


# ---------------------------------------------------------------------------------------------- the emitter


class Val:
    """An LLVM value with Python's operators. A Python number beside it becomes a constant of its type."""

    __slots__ = ("e", "v")

    def __init__(self, e: Emit, v: ir.Value) -> None:
        self.e, self.v = e, v

    @property
    def is_float(self) -> bool:
        kind = self.v.type.element if isinstance(self.v.type, ir.VectorType) else self.v.type
        return isinstance(kind, ir.FloatType)

    def _other(self, x: Any) -> ir.Value:
        if isinstance(x, Val):
            return x.v
        kind = self.v.type
        return splat_const(kind, x) if isinstance(kind, ir.VectorType) else ir.Constant(kind, x)

    def _bin(self, x: Any, f: str, i: str) -> Val:
        return Val(self.e, getattr(self.e.b, f if self.is_float else i)(self.v, self._other(x)))

    def __add__(self, x: Any) -> Val:
        return self._bin(x, "fadd", "add")

    def __sub__(self, x: Any) -> Val:
        return self._bin(x, "fsub", "sub")

    def __mul__(self, x: Any) -> Val:
        return self._bin(x, "fmul", "mul")

    def __truediv__(self, x: Any) -> Val:
        return self._bin(x, "fdiv", "sdiv")

    def __and__(self, x: Any) -> Val:
        return Val(self.e, self.e.b.and_(self.v, self._other(x)))

    def __or__(self, x: Any) -> Val:
        return Val(self.e, self.e.b.or_(self.v, self._other(x)))

    def __lshift__(self, x: Any) -> Val:
        return Val(self.e, self.e.b.shl(self.v, self._other(x)))

    def __rshift__(self, x: Any) -> Val:
        """Logical shift."""
        return Val(self.e, self.e.b.lshr(self.v, self._other(x)))

    def sra(self, x: Any) -> Val:
        """Arithmetic shift."""
        return Val(self.e, self.e.b.ashr(self.v, self._other(x)))

    def __lt__(self, x: Any) -> Val:
        b = self.e.b
        compare = b.fcmp_ordered if self.is_float else b.icmp_signed
        return Val(self.e, compare("<", self.v, self._other(x)))


class Emit:
    """Emits LLVM at one place of a function. Addresses are int64 values; nothing is checked."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    # -- constants and conversions
    def i64(self, value: int) -> Val:
        return Val(self, ir.Constant(I64, value))

    def const(self, vt: ir.VectorType, value: float) -> Val:
        return Val(self, splat_const(vt, value))

    def splat(self, x: Val, lanes: int = LANES) -> Val:
        undefined = ir.Constant(vec(x.v.type, lanes), ir.Undefined)
        first = self.b.insert_element(undefined, x.v, ir.Constant(I32, 0))
        return Val(self, self.b.shuffle_vector(first, undefined, ir.Constant(vec(I32, lanes), None)))

    def bitcast(self, x: Val, to: ir.Type) -> Val:
        return Val(self, self.b.bitcast(x.v, to))

    def to_f32(self, x: Val) -> Val:
        """Signed integers → float32, rounded to nearest."""
        return Val(self, self.b.sitofp(x.v, VF32 if isinstance(x.v.type, ir.VectorType) else F32))

    def select(self, mask: Val, yes: Val, no: Val) -> Val:
        return Val(self, self.b.select(mask.v, yes.v, no.v))

    # -- memory
    def _pointer(self, address: Val, to: ir.Type) -> ir.Value:
        return self.b.inttoptr(address.v, to.as_pointer())

    def load(self, kind: ir.Type, address: Val, offset: int = 0) -> Val:
        """`kind` from address + offset bytes, any alignment."""
        where = address + offset if offset else address
        value = self.b.load(self._pointer(where, kind), typ=kind)
        value.align = 1
        return Val(self, value)

    def store(self, x: Val, address: Val, offset: int = 0) -> None:
        where = address + offset if offset else address
        self.b.store(x.v, self._pointer(where, x.v.type)).align = 1

    def load_splat(self, kind: ir.Type, address: Val, offset: int = 0) -> Val:
        """One element in all lanes."""
        return self.splat(self.load(kind, address, offset))

    def load_f16(self, address: Val, offset: int = 0) -> Val:
        """16 half floats → float32."""
        if ISA.half:
            return Val(self, self.b.fpext(self.load(vec(F16), address, offset).v, VF32))
        return self.half_bits_to_f32(Val(self, self.b.zext(self.load(VI16, address, offset).v, VI32)))

    def half_bits_to_f32(self, bits: Val) -> Val:
        """Half floats in the low 16 bits of each lane → float32: move the fields, then put the exponent right."""
        magnitude = self.bitcast((bits & 0x7FFF) << 13, VF32) * 2.0**112
        return self.bitcast(self.bitcast(magnitude, VI32) | ((bits & 0x8000) << 16), VF32)

    def load_bf16(self, address: Val, offset: int = 0) -> Val:
        """16 bfloat16 → float32: their bits are the upper half."""
        bits = self.b.zext(self.load(VI16, address, offset).v, VI32)
        return self.bitcast(Val(self, bits) << 16, VF32)

    def store_pairs(self, x: Val, y: Val, address: Val, order: Sequence[int]) -> None:
        """32 float32 (x, then y) → bfloat16 at `address`, element i being number order[i]."""
        low, high = (self.to_bf16(v).v for v in (x, y))
        self.store(Val(self, self.b.shuffle_vector(low, high, ir.Constant(vec(I32, 32), list(order)))), address)

    def store_bf16(self, x: Val, address: Val, offset: int = 0) -> None:
        """16 float32 → bfloat16, round to nearest even."""
        self.store(self.to_bf16(x), address, offset)

    def to_bf16(self, x: Val) -> Val:
        """16 float32 → the bits of 16 bfloat16, round to nearest even. Finite values only."""
        if ISA.bf16:
            return self.bitcast(Val(self, self.b.fptrunc(x.v, vec(BF16))), VI16)
        bits = self.bitcast(x, VI32)
        rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
        return Val(self, self.b.trunc((rounded >> 16).v, VI16))

    def prefetch(self, address: Val, offset: int) -> None:
        """Ask for the cache line at address + offset, wherever that may be."""
        where = self._pointer(address + offset, I8)
        hint = [ir.Constant(I32, k) for k in (0, 3, 1)]  # read, keep in all caches, data
        kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
        self.b.call(cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0"), [where, *hint])

    # -- control
    @contextmanager
    def loop(self, count: Val) -> Any:
        """`for i in range(count)` at run time; yields i (int64)."""
        with cgutils.for_range(self.b, count.v, intp=I64) as range_:
            yield Val(self, range_.index)

    def var(self, start: Val) -> Var:
        """A mutable local; LLVM keeps it in a register."""
        return Var(self, start)

    # -- arithmetic
    def call(self, name: str, result: ir.Type, args: Sequence[ir.Value]) -> Val:
        """Call an LLVM intrinsic by its name."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return Val(self, self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), list(args)))

    def fma(self, x: Val, y: Val, z: Val) -> Val:
        """x·y + z, rounded once."""
        return self.call("llvm.fma.v16f32", VF32, [x.v, y.v, z.v])

    def round(self, x: Val) -> Val:
        """To the nearest whole number, halves to even."""
        return self.call("llvm.roundeven.v16f32", VF32, [x.v])

    def fma_f16(self, x: Val, y: Val, z: Val) -> Val:
        """x·y + z on 32 half floats, rounded once."""
        return self.call("llvm.fma.v32f16", vec(F16, 32), [x.v, y.v, z.v])

    def permute_i16(self, table: Val, index: Val) -> Val:
        """table[index mod 32] for 32 lanes of 16 bits."""
        return self.call("llvm.x86.avx512.permvar.hi.512", vec(I16, 32), [table.v, index.v])

    def max(self, x: Val, y: Val) -> Val:
        """y where x is not a number."""
        return self.select(y < x, x, y)

    def min(self, x: Val, y: Val) -> Val:
        """y where x is not a number."""
        return self.select(x < y, x, y)

    def dot_u8s8(self, acc: Val, u: Val, s: Val) -> Val:
        """Per lane: acc + Σ over its four bytes of unsigned u × signed s, exact in int32. All are 16 × int32."""
        if ISA.vnni:
            wide = vec(I8, 64)
            args = [acc.v, self.bitcast(u, wide).v, self.bitcast(s, wide).v]
            return self.call("llvm.x86.avx512.vpdpbusd.512", VI32, args)
        even = _pairs(self, u & 0x00FF00FF, _sext_even(self, s))
        odd = _pairs(self, (u >> 8) & 0x00FF00FF, _sext_odd(self, s))
        return acc + even + odd

    def dot_bf16(self, acc: Val, x: Val, y: Val) -> Val:
        """Per lane: acc + x₀y₀ + x₁y₁ of the two bfloat16 in each 32-bit lane of x and y."""
        if ISA.bf16:
            wide = vec(BF16, 32)
            args = [acc.v, self.bitcast(x, wide).v, self.bitcast(y, wide).v]
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VF32, args)
        low = self.fma(self.bitcast(x << 16, VF32), self.bitcast(y << 16, VF32), acc)
        mask = -65536  # upper half
        return self.fma(self.bitcast(x & mask, VF32), self.bitcast(y & mask, VF32), low)

    def exp(self, x: Val) -> Val:
        """e^x, relative error below 2e-7; 0 below −87.3, and x is cut at 88. Exactly 1 at 0.

        2^n × 2^f with |f| ≤ ½; the polynomial is Taylor's in f·ln 2 (Cephes' expf uses the same reduction).
        """
        z = self.min(x, self.const(VF32, 88.0)) * 1.4426950408889634
        small = z < -126.0
        z = self.max(z, self.const(VF32, -126.0))
        n = self.round(z)
        f = z - n
        p = self.const(VF32, 1.5403530393381606e-04)
        for c in (1.3333558146428443e-03, 9.618129107628477e-03, 5.550410866482158e-02, 2.402265069591007e-01,
                  6.931471805599453e-01, 1.0):  # fmt: skip
            p = self.fma(p, f, self.const(VF32, c))
        power = (Val(self, self.b.fptosi(n.v, VI32)) + 127) << 23
        return self.select(small, self.const(VF32, 0.0), p * self.bitcast(power, VF32))

    # -- tiles (AMX): eight registers of 16 rows × 64 bytes, named by constants
    def tile_load(self, tile: int, address: Val, stride: Val) -> None:
        args = [ir.Constant(I8, tile), self._pointer(address, I8), stride.v]
        self.call("llvm.x86.tileloadd64", ir.VoidType(), args)

    def tile_store(self, tile: int, address: Val, stride: Val) -> None:
        args = [ir.Constant(I8, tile), self._pointer(address, I8), stride.v]
        self.call("llvm.x86.tilestored64", ir.VoidType(), args)

    def tile_zero(self, tile: int) -> None:
        self.call("llvm.x86.tilezero", ir.VoidType(), [ir.Constant(I8, tile)])

    def tile_dot(self, kind: str, acc: int, a: int, b: int) -> None:
        """acc += a · b; `kind` is `bf16ps` (pairs of bfloat16)."""
        self.call(f"llvm.x86.tdp{kind}", ir.VoidType(), [ir.Constant(I8, t) for t in (acc, a, b)])


def _sext_even(e: Emit, s: Val) -> Val:
    """Bytes 0 and 2 of each lane as two int16."""
    return Val(e, e.b.ashr(e.b.shl(e.bitcast(s, vec(I16, 32)).v, splat_const(vec(I16, 32), 8)), splat_const(vec(I16, 32), 8)))  # fmt: skip # noqa: E501


def _sext_odd(e: Emit, s: Val) -> Val:
    """Bytes 1 and 3 of each lane as two int16."""
    return Val(e, e.b.ashr(e.bitcast(s, vec(I16, 32)).v, splat_const(vec(I16, 32), 8)))


def _pairs(e: Emit, u: Val, s: Val) -> Val:
    """Per lane: u₀s₀ + u₁s₁ of its int16 halves; LLVM knows this as pmaddwd."""
    wide = vec(I32, 32)
    product = e.b.mul(e.b.sext(e.bitcast(u, vec(I16, 32)).v, wide), e.b.sext(s.v, wide))
    halves = [ir.Constant(vec(I32), list(range(start, 32, 2))) for start in (0, 1)]
    parts = [e.b.shuffle_vector(product, product, h) for h in halves]
    return Val(e, e.b.add(*parts))


class Var:
    """A local that loops may change."""

    __slots__ = ("e", "slot")

    def __init__(self, e: Emit, start: Val) -> None:
        self.e = e
        self.slot = cgutils.alloca_once(e.b, start.v.type)
        self.set(start)

    def get(self) -> Val:
        return Val(self.e, self.e.b.load(self.slot, typ=self.slot.allocated_type))

    def set(self, value: Val) -> None:
        self.e.b.store(value.v, self.slot)


# ---------------------------------------------------------------------------------------------- Numba's side


class VecType(types.Type):
    """Numba's type of a vector value."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=f"vec_{name}")


@register_default(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: VecType) -> None:
        super().__init__(manager, fe_type, fe_type.llvm_type)


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
absolute = emitted(_v, [_v], lambda e, x: e.call("llvm.fabs.v16f32", VF32, [x.v]))
exp = emitted(_v, [_v], lambda e, x: e.exp(x))
round_i32 = emitted(_w, [_v], lambda e, x: Val(e, e.b.fptosi(e.round(x).v, VI32)))
add_i32 = emitted(_w, [_w, _w], lambda e, x, y: x + y)
sub_i32 = emitted(_w, [_w, _w], lambda e, x, y: x - y)
splat_i32 = emitted(_w, [types.int32], lambda e, x: e.splat(x))
shl_i32 = emitted(_w, [_w, _w], lambda e, x, n: x << n)
sra_i32 = emitted(_w, [_w, _w], lambda e, x, n: x.sra(n))
store_i8 = emitted(types.void, [_i, _w], lambda e, a, x: e.store(Val(e, e.b.trunc(x.v, VI8)), a))
load_i8 = emitted(_w, [_i], lambda e, a: Val(e, e.b.sext(e.load(VI8, a).v, VI32)))
load_u8 = emitted(_w, [_i], lambda e, a: Val(e, e.b.zext(e.load(VI8, a).v, VI32)))
load_i32 = emitted(_w, [_i], lambda e, a: e.load(VI32, a))
to_f32 = emitted(_v, [_w], lambda e, x: e.to_f32(x))


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


below = emitted(_v, [_v, types.int32, _v], _below)


def _reduce_max(e: Emit, x: Val) -> Val:
    return e.call("llvm.vector.reduce.fmax.v16f32", F32, [x.v])


def _halve(e: Emit, x: Val, join: Callable[[Val, Val], Val]) -> Val:
    """Reduce by halves: lanes i and i + 8, then 4, 2, 1: one fixed tree on every CPU."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(vec(I32, width), list(range(s, s + width))) for s in (0, width))
        x = join(Val(e, e.b.shuffle_vector(x.v, x.v, low)), Val(e, e.b.shuffle_vector(x.v, x.v, high)))
    return Val(e, e.b.extract_element(x.v, ir.Constant(I32, 0)))


reduce_max = emitted(_f, [_v], _reduce_max)
reduce_add = emitted(_f, [_v], lambda e, x: _halve(e, x, lambda a, b: a + b))
reduce_add_i32 = emitted(types.int32, [_w], lambda e, x: _halve(e, x, lambda a, b: a + b))

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

# atomics: how threads share work and wait for each other
fetch_add = emitted(_i, [_i, _i], lambda e, a, x: Val(e, e.b.atomic_rmw("add", e._pointer(a, I64), x.v, "seq_cst")))
load_acquire = emitted(_i, [_i], lambda e, a: Val(e, e.b.load_atomic(e._pointer(a, I64), "acquire", 8, typ=I64)))


def _store_release(e: Emit, a: Val, x: Val) -> None:
    e.b.store_atomic(x.v, e._pointer(a, I64), "release", 8)


store_release = emitted(types.void, [_i, _i], _store_release)


def _pause(e: Emit, _: Val) -> None:
    if platform_is_x86():
        e.call("llvm.x86.sse2.pause", ir.VoidType(), [])


def platform_is_x86() -> bool:
    """Whether x86's own instructions may be emitted."""
    import platform

    return platform.machine() in ("x86_64", "AMD64")


pause = emitted(types.void, [_i], _pause)


def _call_kernel(e: Emit, function: Val, op: Val, ctx: Val, thread: Val) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    pointer = e.b.inttoptr(function.v, kind.as_pointer())
    e.b.call(pointer, [op.v, ctx.v, thread.v])


call_kernel = emitted(types.void, [_i, _i, _i, _i], _call_kernel)


def _tile_config(e: Emit, address: Val) -> None:
    if ISA.amx:
        e.call("llvm.x86.ldtilecfg", ir.VoidType(), [e._pointer(address, I8)])


def _tile_release(e: Emit, _: Val) -> None:
    if ISA.amx:
        e.call("llvm.x86.tilerelease", ir.VoidType(), [])


tile_config = emitted(types.void, [_i], _tile_config)
tile_release = emitted(types.void, [_i], _tile_release)
