"""An emitter of LLVM for unrolled inner loops: Python's operators on values, Python's loops for unrolling.

Only the dot products, the half-float operations and the tile instructions differ between instruction sets; LLVM
splits everything else to the width that the CPU has. Memory is addressed by plain integers: the caller owns it and its
bounds. Knows no model, no layout and nothing of how functions reach Numba (`simd.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils as _cgutils

from kvledger.kernels.isa import ISA

_c: Any = _cgutils  # untyped
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


class _BFloat(ir.Type):  # type: ignore[misc]
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
        kind = x.v.type
        return Val(self, self.b.sitofp(x.v, vec(F32, kind.count) if isinstance(kind, ir.VectorType) else F32))

    def select(self, mask: Val, yes: Val, no: Val) -> Val:
        return Val(self, self.b.select(mask.v, yes.v, no.v))

    # -- memory
    def pointer(self, address: Val, to: ir.Type) -> ir.Value:
        """An address as LLVM's pointer."""
        return self.b.inttoptr(address.v, to.as_pointer())

    def load(self, kind: ir.Type, address: Val, offset: int = 0) -> Val:
        """`kind` from address + offset bytes, any alignment."""
        where = address + offset if offset else address
        value = self.b.load(self.pointer(where, kind), typ=kind)
        value.align = 1
        return Val(self, value)

    def store(self, x: Val, address: Val, offset: int = 0) -> None:
        where = address + offset if offset else address
        self.b.store(x.v, self.pointer(where, x.v.type)).align = 1

    def load_splat(self, kind: ir.Type, address: Val, offset: int = 0, lanes: int = LANES) -> Val:
        """One element in all lanes."""
        return self.splat(self.load(kind, address, offset), lanes)

    def load_f16(self, address: Val, offset: int = 0, lanes: int = LANES) -> Val:
        """Half floats → float32."""
        if ISA.half:
            return Val(self, self.b.fpext(self.load(vec(F16, lanes), address, offset).v, vec(F32, lanes)))
        bits = self.load(vec(I16, lanes), address, offset).v
        return self.half_bits_to_f32(Val(self, self.b.zext(bits, vec(I32, lanes))))

    def half_bits_to_f32(self, bits: Val) -> Val:
        """Half floats in the low 16 bits of each lane → float32: move the fields, then put the exponent right."""
        floats = vec(F32, bits.v.type.count)
        magnitude = self.bitcast((bits & 0x7FFF) << 13, floats) * 2.0**112
        return self.bitcast(self.bitcast(magnitude, bits.v.type) | ((bits & 0x8000) << 16), floats)

    def load_bf16(self, address: Val, offset: int = 0) -> Val:
        """16 bfloat16 → float32: their bits are the upper half."""
        bits = self.b.zext(self.load(VI16, address, offset).v, VI32)
        return self.bitcast(Val(self, bits) << 16, VF32)

    def store_pairs(self, x: Val, y: Val, address: Val, order: Sequence[int]) -> None:
        """32 float32 (x, then y) → bfloat16 at `address`, element i being number order[i]."""
        low, high = (self.to_bf16(v).v for v in (x, y))
        self.store(Val(self, self.b.shuffle_vector(low, high, ir.Constant(vec(I32, 32), list(order)))), address)

    def store_i16_pairs(self, x: Val, y: Val, address: Val, order: Sequence[int]) -> None:
        """32 int32 (x, then y) → int16 at `address`, element i being number order[i]."""
        low, high = (self.b.trunc(v.v, VI16) for v in (x, y))
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

    def prefetch(self, address: Val, offset: int, locality: int = 3) -> None:
        """Ask for the cache line at address + offset, wherever that may be; `locality` 3: for L1, 2: for L2."""
        where = self.pointer(address + offset, I8)
        hint = [ir.Constant(I32, k) for k in (0, locality, 1)]  # read, …, data
        kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
        self.b.call(_c.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0"), [where, *hint])

    # -- control
    @contextmanager
    def loop(self, count: Val) -> Iterator[Val]:
        """`for i in range(count)` at run time; yields i (int64)."""
        with _c.for_range(self.b, count.v, intp=I64) as range_:
            yield Val(self, range_.index)

    def var(self, start: Val) -> Var:
        """A mutable local; LLVM keeps it in a register."""
        return Var(self, start)

    # -- arithmetic
    def call(self, name: str, result: ir.Type, args: Sequence[ir.Value]) -> Val:
        """Call an LLVM intrinsic by its name."""
        kind = ir.FunctionType(result, [a.type for a in args])
        return Val(self, self.b.call(_c.get_or_insert_function(self.b.module, kind, name), list(args)))

    def fma(self, x: Val, y: Val, z: Val) -> Val:
        """x·y + z, rounded once."""
        return self.call(f"llvm.fma.v{x.v.type.count}f32", x.v.type, [x.v, y.v, z.v])

    def round_i32(self, x: Val) -> Val:
        """16 float32 → int32, to nearest, halves to even; what is out of range or no number: −2³¹ on x86."""
        return self.call("llvm.lrint.v16i32.v16f32", VI32, [x.v])

    def fma_f16(self, x: Val, y: Val, z: Val) -> Val:
        """x·y + z on 32 half floats, rounded once."""
        return self.call("llvm.fma.v32f16", vec(F16, 32), [x.v, y.v, z.v])

    def permute_i16(self, table: Val, index: Val) -> Val:
        """table[index mod 32] for 32 lanes of 16 bits."""
        return self.call("llvm.x86.avx512.permvar.hi.512", vec(I16, 32), [table.v, index.v])

    def abs(self, x: Val) -> Val:
        return self.call("llvm.fabs.v16f32", VF32, [x.v])

    def max(self, x: Val, y: Val) -> Val:
        """y where x is not a number."""
        return self.select(y < x, x, y)

    def min(self, x: Val, y: Val) -> Val:
        """y where x is not a number."""
        return self.select(x < y, x, y)

    def with_partner(self, x: Val, distance: int) -> Val:
        """Elements i and i ^ distance become their sum and their difference: a step of a Hadamard transform."""
        kind = x.v.type
        partner = self.shuffle(x, x, [i ^ distance for i in range(kind.count)])
        is_second = [int(i & distance != 0) for i in range(kind.count)]
        if not x.is_float:
            return self.select(Val(self, ir.Constant(vec(I1, kind.count), is_second)), partner - x, partner + x)
        sign = ir.Constant(kind, [-1.0 if second else 1.0 for second in is_second])
        one = ("contract",)  # one operation where the CPU has it: the product is exact
        return Val(self, self.b.fadd(partner.v, self.b.fmul(x.v, sign, flags=one), flags=one))

    def halve(self, x: Val, join: Callable[[Val, Val], Val]) -> Val:
        """Reduce by halves: lanes i and i + 8, then 4, 2, 1: one fixed tree on every CPU."""
        width = LANES
        while width > 1:
            width //= 2
            x = join(*(self.shuffle(x, x, range(start, start + width)) for start in (0, width)))
        return Val(self, self.b.extract_element(x.v, ir.Constant(I32, 0)))

    def reduce_rows(self, rows: Sequence[Val], join: Callable[[Val, Val], Val]) -> Val:
        """Lane r is row r's 16 lanes joined, by `halve`'s tree: halves of lanes first, of two rows at once."""
        half = LANES // 2
        while len(rows) > 1:
            low, high = ([i for i in range(2 * LANES) if i & half == side] for side in (0, half))
            rows = [
                join(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            ]
            half //= 2
        return rows[0]

    def shuffle(self, x: Val, y: Val, order: Sequence[int]) -> Val:
        """Lane i is number order[i] of x's lanes and then y's."""
        return Val(self, self.b.shuffle_vector(x.v, y.v, ir.Constant(vec(I32, len(order)), list(order))))

    def dot_u8s8(self, acc: Val, u: Val, s: Val) -> Val:
        """Per lane: acc + Σ over its four bytes of unsigned u × signed s, exact in int32. All are 16 × int32."""
        assert ISA.vnni
        wide = vec(I8, 64)
        args = [acc.v, self.bitcast(u, wide).v, self.bitcast(s, wide).v]
        return self.call("llvm.x86.avx512.vpdpbusd.512", VI32, args)

    def dot_i16(self, acc: Val, x: Val, y: Val) -> Val:
        """Per lane: acc + x₀y₀ + x₁y₁ of the two int16 in each 32-bit lane of x and y; exact below 2³¹."""
        lanes = x.v.type.count
        halves, wide = vec(I16, 2 * lanes), vec(I32, 2 * lanes)
        a, b = (self.bitcast(v, halves).v for v in (x, y))
        if ISA.name == "avx2" and lanes == 8:
            return self._in_order(acc + self.call("llvm.x86.avx2.pmadd.wd", x.v.type, [a, b]))
        product = self.b.mul(self.b.sext(a, wide), self.b.sext(b, wide))
        even, odd = (ir.Constant(vec(I32, lanes), list(range(start, 2 * lanes, 2))) for start in (0, 1))
        parts = (Val(self, self.b.shuffle_vector(product, product, which)) for which in (even, odd))
        return acc + next(parts) + next(parts)

    def dot_u8s8_i16(self, acc: Val, u: Val, s: Val) -> Val:
        """Per int16 lane: acc + u₀s₀ + u₁s₁ of its unsigned and signed bytes (AVX2); the caller sees to the range."""
        kind = vec(I8, 32)
        args = [self.bitcast(u, kind).v, self.bitcast(s, kind).v]
        return self._in_order(acc + self.call("llvm.x86.avx2.pmadd.ub.sw", acc.v.type, args))

    def _in_order(self, x: Val) -> Val:
        """x, as it is: LLVM may not regroup the sum that it is of, which would take more registers than there are."""
        floats = vec(F32, 8)
        return self.bitcast(self.call("llvm.arithmetic.fence.v8f32", floats, [self.bitcast(x, floats).v]), x.v.type)

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
        """e^x, relative error below 2e-7 · max(1, |x|) and 4e-6; 0 below −87.7, and x is cut at 88. Exactly 1 at 0."""
        return self.exp_all([self.min(x, self.const(VF32, 88.0))])[0]

    def exp_all(self, xs: Sequence[Val]) -> list[Val]:
        """`exp` of each of xs, none above 88. Step by step for all: one alone is a chain of operations that wait.

        2^n × 2^f with |f| ≤ ½ (Cephes' expf uses the same reduction); the polynomial is the one of degree 5 that is 1
        at 0 and errs least, by 9.2e-8 (least squares, weighted anew by the error until that is even). Adding
        1.5 · 2^23 + 127 leaves n + 127 in the last bits, 2^n's exponent; where n is −127 that is no bits: 0.
        """
        zs = [self.max(x * 1.4426950408889634, self.const(VF32, -127.0)) for x in xs]
        wholes = [z + 12583039.0 for z in zs]
        fs = [z - (whole - 12583039.0) for z, whole in zip(zs, wholes, strict=True)]
        ps = [self.const(VF32, 1.326472726219176e-03) for _ in xs]
        for c in (9.671512710403021e-03, 5.550733743741771e-02, 2.402224208429383e-01, 6.931469775985017e-01, 1.0):
            ps = [self.fma(p, f, self.const(VF32, c)) for p, f in zip(ps, fs, strict=True)]
        powers = [self.bitcast(whole, VI32) << 23 for whole in wholes]
        return [p * self.bitcast(power, VF32) for p, power in zip(ps, powers, strict=True)]

    # -- tiles (AMX): eight registers of 16 rows × 64 bytes, named by constants
    def tile_load(self, tile: int, address: Val, stride: Val) -> None:
        args = [ir.Constant(I8, tile), self.pointer(address, I8), stride.v]
        self.call("llvm.x86.tileloadd64", ir.VoidType(), args)

    def tile_store(self, tile: int, address: Val, stride: Val) -> None:
        args = [ir.Constant(I8, tile), self.pointer(address, I8), stride.v]
        self.call("llvm.x86.tilestored64", ir.VoidType(), args)

    def tile_zero(self, tile: int) -> None:
        self.call("llvm.x86.tilezero", ir.VoidType(), [ir.Constant(I8, tile)])

    def tile_dot(self, kind: str, acc: int, a: int, b: int) -> None:
        """acc += a · b; `kind` is `bf16ps` (pairs of bfloat16)."""
        self.call(f"llvm.x86.tdp{kind}", ir.VoidType(), [ir.Constant(I8, t) for t in (acc, a, b)])


class Var:
    """A local that loops may change."""

    __slots__ = ("e", "slot")

    def __init__(self, e: Emit, start: Val) -> None:
        self.e = e
        self.slot = _c.alloca_once(e.b, start.v.type)
        self.set(start)

    def get(self) -> Val:
        return Val(self.e, self.e.b.load(self.slot, typ=self.slot.allocated_type))

    def set(self, value: Val) -> None:
        self.e.b.store(value.v, self.slot)
