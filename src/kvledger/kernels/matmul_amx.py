"""y = x Wᵀ on AMX: weights to bfloat16 on the way, activations in bfloat16, sums in float32 by the tile unit.

The packed weights are those of `matmul.py`. A tile of 16 outputs is unpacked once per use, group by group, into tile
operands of 1 KiB ([16 pairs of inputs][16 outputs][2]) and multiplied with all rows of x. The tile unit adds each
row's products in one order, group after group, whatever rows stand beside it: the same bits for one row as for many.

To get from float16 to bfloat16 in three instructions the exponent is not re-biased: an unpacked weight is w · 2^−112,
so activations are written as x · 2^56 and sums are multiplied by 2^56. float16 numbers below 6e-5 become zero.

Integer tiles (two 8-bit terms, scaled per 32) were tried and dropped: they must leave the tile unit after every group,
which costs five times as much as the product (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F16, I16, VF32, VI32, Emit, Val, vec
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import NUM_THREADS, SCRATCH, SCRATCH_BYTES, num_rows
from kvledger.kernels.matmul_loops import PREFETCH_BYTES
from kvledger.kernels.packed import GROUP, ORDER, TILE, Activations, PackedMatrix, group_bytes
from kvledger.kernels.simd import emitted
from kvledger.kernels.team import next_item

X_SCALE = 2.0**56
_V16, _H32 = vec(I16, 32), vec(F16, 32)
CHUNK = 24  # groups unpacked ahead of the tile unit for few rows: 24 KiB of operands stay in the L1 cache


def _twice(e: Emit, x: Val) -> Val:
    """16 half floats, each in both halves of a 32-bit lane."""
    bits = Val(e, e.b.zext(e.bitcast(x, vec(I16)).v, VI32))
    return e.bitcast(bits | (bits << 16), _H32)


def _words(e: Emit, bits: int, group: Val) -> Any:
    """Yields the 16 rows of a group in ORDER: 32 levels as half floats, two inputs to an output."""
    words: Any = lambda x: e.bitcast(x, _V16)  # noqa: E731
    if bits == 4:
        table = Val(e, ir.Constant(_V16, [int(v) for v in np.arange(16, dtype=np.float16).view(np.uint16)] * 2))
        for pair in range(4):
            both = words(e.load(VI32, group, pair * 64))
            for nibble in range(4):
                yield e.bitcast(e.permute_i16(table, both >> (4 * nibble) if nibble else both), _H32)
        return
    for pair in range(4):
        quads = [words(e.load(VI32, group, (2 * pair + q) * 64)) for q in (0, 1)]
        for x in (*(q & 255 for q in quads), *(q >> 8 for q in quads)):
            yield Val(e, e.b.uitofp(x.v, _H32))


def _to_tile(e: Emit, w: Val) -> Val:
    """float16 → the bits of w · 2^−112 in bfloat16, rounded: three mantissa bits go, the exponent stays as it is."""
    eighth = e.const(_V16, 4096)  # (bits · 4096 + 2^14) >> 15
    shifted = e.call("llvm.x86.avx512.pmul.hr.sw.512", _V16, [e.bitcast(w, _V16).v, eighth.v])
    return shifted & -28673  # 0x8FFF: the sign came along with the shift


def _unpack_narrow(bits: int) -> Any:
    """Weights with float16 scales → operands, `groups` of them."""
    size, weights = group_bytes(bits, False), TILE * GROUP * bits // 8

    def emit(e: Emit, w: Val, out: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            group = w + g * size
            for line in range(0, size, 64):
                e.prefetch(group, PREFETCH_BYTES + line)
            d = _twice(e, e.load(vec(F16), group, weights))
            m = _twice(e, e.load(vec(F16), group, weights + 32))
            for row, q in enumerate(_words(e, bits, group)):
                e.store(_to_tile(e, e.fma_f16(q, d, m)), out + g * 1024, row * 64)

    return emitted(types.void, [types.int64] * 3, emit)


def _half_fma(e: Emit, level: Val, d: Val, m: Val) -> Val:
    """float16 levels in the low half of each lane → the bits of float16(level · d + m), there again."""
    q = e.b.fpext(e.b.bitcast(e.b.trunc(level.v, vec(I16)), vec(F16)), VF32)
    w = e.b.fptrunc(e.fma(Val(e, q), d, m).v, vec(F16))
    return Val(e, e.b.zext(e.b.bitcast(w, vec(I16)), VI32))


def _unpack_wide(bits: int) -> Any:
    """Weights with float32 scales → operands."""
    size, weights = group_bytes(bits, True), TILE * GROUP * bits // 8

    def emit(e: Emit, w: Val, out: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            group = w + g * size
            d, m = (e.load(VF32, group, weights + at) for at in (0, 64))
            for row, q in enumerate(_words(e, bits, group)):
                halves = e.bitcast(q, VI32)
                low, high = (_half_fma(e, part, d, m) for part in (halves & 0xFFFF, halves >> 16))
                e.store(_to_tile(e, e.bitcast(low | (high << 16), _H32)), out + g * 1024, row * 64)

    return emitted(types.void, [types.int64] * 3, emit)


def _unpack_bf16(e: Emit, w: Val, out: Val, groups: Val) -> None:
    """bfloat16 weights → operands: exponents lowered by 112; what is below 2^−14 becomes zero."""
    with e.loop(groups) as g:
        for line in range(0, 1024, 64):
            bits = e.load(_V16, w + g * 1024, line)
            e.prefetch(w + g * 1024, PREFETCH_BYTES + line)
            low = e.call("llvm.usub.sat.v32i16", _V16, [(bits & 0x7FFF).v, e.const(_V16, 112 << 7).v])
            e.store(low | (bits & -32768), out + g * 1024, line)


def _multiply(blocks: int, tiles: int) -> Any:
    """Add `groups` groups of x (`blocks` × 16 rows) times `tiles` tiles of outputs to the results in tiles 0 … 3.

    `ldx`, `ldw`: bytes between blocks of x, and between the operands of the two tiles.
    """

    def emit(e: Emit, x: Val, operands: Val, groups: Val, ldx: Val, ldw: Val) -> None:
        line = e.i64(64)
        with e.loop(groups) as g:
            for b in range(blocks):
                e.tile_load(4 + b, x + g * 1024 + ldx * b, line)
            for t in range(tiles):
                e.tile_load(6 + t, operands + g * 1024 + ldw * t, line)
                for b in range(blocks):
                    e.tile_dot("bf16ps", 2 * b + t, 4 + b, 6 + t)

    return emitted(types.void, [types.int64] * 5, emit)


def _zero_tiles(e: Emit, _: Val) -> None:
    for tile in range(4):
        e.tile_zero(tile)


def _store_tiles(e: Emit, to: Val) -> None:
    for tile in range(4):
        e.tile_store(tile, to + tile * 1024, e.i64(64))


def _store_tile(e: Emit, to: Val) -> None:
    e.tile_store(0, to, e.i64(64))


def _store_row(e: Emit, sums: Val, bias: Val, y: Val, add: Val) -> None:
    """y (+)= sums · 2^56 + bias for one row of 16 outputs."""
    total = e.fma(e.load(VF32, sums), e.const(VF32, X_SCALE), e.load(VF32, bias))
    with e.b.if_else(e.b.icmp_signed("!=", add.v, e.i64(0).v)) as (then, otherwise):
        with then:
            e.store(e.load(VF32, y) + total, y)
        with otherwise:
            e.store(total, y)


def _amx(num_args: int, emit: Any) -> Any:
    """An emitted function, or an empty one where there is no AMX (never called)."""
    return emitted(types.void, [types.int64] * num_args, emit if ISA.amx else lambda e, *args: None)


multiply1x1, multiply1, multiply2 = (_multiply(b, t) if ISA.amx else _amx(5, None) for b, t in ((1, 1), (1, 2), (2, 2)))
zero_tiles, store_tiles, store_tile = (_amx(1, f) for f in (_zero_tiles, _store_tiles, _store_tile))
store_row = emitted(types.void, [types.int64] * 4, _store_row)
unpack: Any = None  # bound per variant
STRIDE = 0


@inline
def finish(sums, bias, y, ldy, rows, tiles, add):  # type: ignore[no-untyped-def]
    """Results of one block of rows, `tiles` of 1 KiB → y."""
    for t in range(tiles):
        for r in range(rows):
            store_row(sums + t * 1024 + r * 64, bias + t * 64, y + r * ldy + t * 64, add)


@inline
def few_rows(unpack, x, w, bias, y, ldy, rows, groups, stride, operands, sums, add):  # type: ignore[no-untyped-def]
    """One tile of outputs for at most 16 rows: reads the weights as one stream, a few groups ahead of the tile unit."""
    zero_tiles(0)
    for g in range(0, groups, CHUNK):
        n = min(CHUNK, groups - g)
        unpack(w + g * stride, operands, n)
        multiply1x1(x + g * 1024, operands, n, 0, 0)
    store_tile(sums)
    finish(sums, bias, y, ldy, rows, 1, add)


@inline
def many_rows(unpack, x, w, bias, y, ldy, rows, groups, stride, operands, sums, tiles, add):  # type: ignore[no-untyped-def]
    """Two tiles of outputs (or a last one) for any number of rows, 32 at a time."""
    ldw = groups * 1024
    for t in range(tiles):
        unpack(w + t * groups * stride, operands + t * ldw, groups)
    for r in range(0, rows, 32):
        zero_tiles(0)
        if rows - r > 16:
            multiply2(x + r // 16 * ldw, operands, groups, ldw, ldw)
        else:
            multiply1(x + r // 16 * ldw, operands, groups, ldw, ldw)
        store_tiles(sums)
        finish(sums, bias, y + r * ldy, ldy, min(16, rows - r), tiles, add)
        if rows - r > 16:
            finish(sums + 2048, bias, y + (r + 16) * ldy, ldy, min(16, rows - r - 16), tiles, add)


def _matmul(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, weights, bias, y, tiles, groups, ldy bytes, add, tile configurations."""
    x, w = simd.get_i64(op + 8), simd.get_i64(op + 16)
    bias, y = simd.get_i64(op + 24), simd.get_i64(op + 32)
    num_tiles, groups, ldy = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    add = simd.get_i64(op + 64)
    rows = num_rows(op, ctx)
    if rows == 0:  # an expert that nobody chose: there is no tile shape of no rows
        return
    sums = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    operands, tile_bytes = sums + 4096, groups * STRIDE
    pairs = (num_tiles + 1) // 2
    share = simd.get_i64(ctx + 8 * NUM_THREADS) * (8 if rows > 16 else 2)
    chunk = (pairs + share - 1) // share
    simd.tile_config(simd.get_i64(op + 72) + (min(rows, 16) - 1) * 64)
    while True:
        first = next_item(op) * chunk
        if first >= pairs:
            break
        for t in range(2 * first, min(2 * (first + chunk), num_tiles), 2):
            wt, bt, yt, tiles = w + t * tile_bytes, bias + t * 64, y + t * 64, min(2, num_tiles - t)
            if rows > 16:
                many_rows(unpack, x, wt, bt, yt, ldy, rows, groups, STRIDE, operands, sums, tiles, add)
                continue
            for i in range(tiles):
                few_rows(
                    unpack,
                    x,
                    wt + i * tile_bytes,
                    bt + i * 64,
                    yt + i * 64,
                    ldy,
                    rows,
                    groups,
                    STRIDE,
                    operands,
                    sums,
                    add,
                )
    simd.tile_release(0)


def _variant(bits: int, wide: bool) -> Kernel:
    if bits == 16:
        bound = _amx(3, _unpack_bf16)
    else:
        bound = (_unpack_wide if wide else _unpack_narrow)(bits) if ISA.amx else _amx(3, None)
    return Kernel(f"matmul_amx_q{bits}{'f' if wide else ''}", _matmul, unpack=bound, STRIDE=group_bytes(bits, wide))


KERNELS = {key: _variant(*key) for key in [(4, False), (4, True), (8, False), (8, True), (16, False)]}


def _tile_shapes() -> np.ndarray:
    """uint8[16, 64]: configuration i has i + 1 rows of results and x (tiles 0–5); weights are 16 rows of 64 bytes."""
    config = np.zeros((16, 64), np.uint8)
    config[:, 0], config[:, 54:56], config[:, 16:32:2] = 1, 16, 64
    config[:, 48:54] = np.arange(1, 17, dtype=np.uint8)[:, None]
    return config


TILE_SHAPES = _tile_shapes()  # kept alive: the kernels load it by address


def scratch_bytes(matrix: PackedMatrix) -> int:
    """Per thread: four results, and two tiles' weights unpacked."""
    return 4096 + 2 * max(matrix.num_groups, CHUNK) * 1024


def matmul(x: Activations, w: PackedMatrix, y: int, ldy: int, bias: np.ndarray, *, add: bool) -> list[int]:
    """As `matmul.matmul`, x being bfloat16."""
    assert x.cols == w.cols, f"{x.cols} activations meet rows of {w.cols} weights"
    return [
        KERNELS[w.bits, w.wide].address, x.values.ctypes.data, w.data.ctypes.data, bias.ctypes.data, y, w.num_tiles,
        w.num_groups, ldy, int(add), TILE_SHAPES.ctypes.data,
    ]  # fmt: skip


def _store_order(e: Emit, v0: Val, v1: Val, address: Val) -> None:
    scale = e.const(VF32, X_SCALE)
    e.store_pairs(v0 * scale, v1 * scale, address, ORDER)


store_activations = emitted(types.void, [simd.f32x16, simd.f32x16, types.int64], _store_order)
