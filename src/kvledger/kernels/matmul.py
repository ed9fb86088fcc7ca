"""y = x Wᵀ with quantised weights: 4 or 8 bits with a scale and a minimum per 32, activations as 8, 12 or 15 bits.

Weights lie in tiles of 16 outputs; per group of 32 inputs a tile holds its bytes ready for the dot product, then 16
scales and 16 minima. Activations lie in groups of 64 bytes: 32 high terms, then 32 low ones, with x = scale ·
(high · 2^shift + low). A group's dot product is an exact integer however it is computed, and groups are added in
ascending order in float32; so every path here (rows one by one, eight together, AMX tiles) gives the same bits, and
the number of rows decides only which one is fastest. Attention, models and files are unknown here.

Verdicts (2-core Emerald Rapids): AMX from 5 rows on; below, VNNI reads the weights at the memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel
from kvledger.kernels.simd import F32, I32, VF32, VI32, Emit, Val, emitted
from kvledger.kernels.team import next_item

GROUP = 32  # inputs that share a scale
TILE = 16  # outputs computed together
X_BYTES = 64  # of a group of activations: 32 high terms, 32 low terms
TERM_BITS = {"int8": 0, "int12": 4, "int8x2": 7}  # bits of the low term
MAX_LEVEL = {0: 127, 4: 127 * 16 + 7, 7: 127 * 128 + 63}  # largest integer activation by bits of the low term

# ctx words that every kernel may read
ROWS, SCRATCH, SCRATCH_BYTES, NUM_THREADS = 0, 1, 2, 3


def group_bytes(bits: int, wide: bool) -> int:
    """Bytes of a tile's group: 512 weights, then scales and minima (float32 if `wide`, else float16)."""
    return TILE * GROUP * bits // 8 + 2 * TILE * (4 if wide else 2)


# ---------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights of `rows` outputs × `cols` inputs, ready for the kernels. `data` is uint8, 64 bytes aligned."""

    rows: int
    cols: int
    bits: int  # 4 or 8
    wide: bool  # float32 scales: where float16 would not be exact
    data: np.ndarray

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def num_groups(self) -> int:
        return self.cols // GROUP

    @property
    def kernel(self) -> str:
        return f"q{self.bits}{'f' if self.wide else ''}"


def aligned_empty(num_bytes: int) -> np.ndarray:
    """uint8[num_bytes] at a multiple of 64; pages are committed when first written."""
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


def pack(levels: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int) -> PackedMatrix:
    """uint8[N, K] levels < 2^bits, float32[N, K/32] scales and minima → tiles. w = scale · level + minimum.

    N is padded to a multiple of 16 with zeros; K must be a multiple of 32.
    """
    n, k = levels.shape
    if pad := -n % TILE:
        levels, scale, minimum = (np.pad(a, ((0, pad), (0, 0))) for a in (levels, scale, minimum))
    tiles, groups = levels.shape[0] // TILE, k // GROUP
    wide = not (_fits_f16(scale) and _fits_f16(minimum))
    kind: Any = np.float32 if wide else np.float16
    size = group_bytes(bits, wide)
    data = aligned_empty(tiles * groups * size).reshape(tiles, groups, size)
    weights = TILE * GROUP * bits // 8
    quads = levels.reshape(tiles, TILE, groups, 8, 4).transpose(0, 2, 3, 1, 4)  # tile, group, quad, output, input
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    data[:, :, :weights] = quads.reshape(tiles, groups, weights)
    half = (size - weights) // 2
    for start, values in ((weights, scale), (weights + half, minimum)):
        rows = np.ascontiguousarray(values.reshape(tiles, TILE, groups).transpose(0, 2, 1).astype(kind))
        data[:, :, start : start + half] = rows.view(np.uint8)
    return PackedMatrix(n, k, bits, wide, data.reshape(-1))


def _fits_f16(x: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(x.astype(np.float16).astype(np.float32), x))


# ---------------------------------------------------------------------------------------------- inner loops


def _scale_loader(wide: bool) -> Callable[[Emit, Val, int], Val]:
    if wide:
        return lambda e, address, offset: e.load(VF32, address, offset)
    return lambda e, address, offset: e.load_f16(address, offset)


def _weight_quads(e: Emit, bits: int, group: Val) -> Any:
    """Yields (quad, 16 outputs × 4 weights as bytes) for the eight quads of a group."""
    if bits == 8:
        for quad in range(8):
            yield quad, e.load(VI32, group, quad * 64)
        return
    for pair in range(4):
        both = e.load(VI32, group, pair * 64)
        yield 2 * pair, both & 0x0F0F0F0F
        yield 2 * pair + 1, (both >> 4) & 0x0F0F0F0F


def _finish(e: Emit, sums: list[Any], y: Val, ldy: Val, add: Val) -> None:
    """y = sums, or y += sums."""
    for r, total in enumerate(sums):
        where = y + ldy * r
        with e.b.if_else(e.b.icmp_signed("!=", add.v, simd.ir.Constant(simd.I64, 0))) as (then, otherwise):
            with then:
                e.store(e.load(VF32, where) + total.get(), where)
            with otherwise:
                e.store(total.get(), where)


def _scaled(e: Emit, total: Any, dot: Val, d: Val, m: Val, xs: Val, xm: Val) -> None:
    """total += dot · d · xs + m · xm: one group's share, the same two roundings on every path."""
    partial = e.fma(e.to_f32(dot), d * xs, total.get())
    total.set(e.fma(m, xm, partial))


def rows_kernel(bits: int, wide: bool, terms: int, rows: int) -> Any:
    """A tile of 16 outputs for `rows` rows at once, with u8 × s8 dot products."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales = _scale_loader(wide)

    def emit(e: Emit, x: Val, xs: Val, xm: Val, w: Val, bias: Val, y: Val, ldx: Val, lds: Val, ldy: Val,
             groups: Val, shift: Val, add: Val) -> None:  # fmt: skip
        first = e.load(VF32, bias)
        sums = [e.var(first) for _ in range(rows)]
        shifts = e.splat(Val(e, e.b.trunc(shift.v, I32)))
        xr = [x + ldx * r for r in range(rows)]
        sr = [xs + lds * r for r in range(rows)]
        mr = [xm + lds * r for r in range(rows)]
        with e.loop(groups) as g:
            group = w + g * size
            high = [e.const(VI32, 0)] * rows
            low = [e.const(VI32, 0)] * rows
            for quad, u in _weight_quads(e, bits, group):
                for r in range(rows):
                    at = xr[r] + g * X_BYTES
                    high[r] = e.dot_u8s8(high[r], u, e.load_splat(I32, at, quad * 4))
                    if terms == 2:
                        low[r] = e.dot_u8s8(low[r], u, e.load_splat(I32, at, GROUP + quad * 4))
            d = scales(e, group, weights)
            m = scales(e, group, weights + (size - weights) // 2)
            for r in range(rows):
                dot = (high[r] << shifts) + low[r] if terms == 2 else high[r]
                _scaled(e, sums[r], dot, d, m, e.load_splat(F32, sr[r] + g * 4), e.load_splat(F32, mr[r] + g * 4))
        _finish(e, sums, y, ldy, add)

    return emitted(types.void, [types.int64] * 12, emit)


def unpack_fused(wide: bool) -> Any:
    """4-bit weights of a tile → AMX operands of 1 KiB per group: 8 rows of weight · 16, then 8 rows of weight.

    With the high and low activation terms side by side in one row, one tile product gives 16 · high + low at once.
    """
    size = group_bytes(4, wide)

    def emit(e: Emit, w: Val, out: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            for pair in range(4):
                both = e.load(VI32, w + g * size, pair * 64)
                at = out + g * 1024
                for half, value in enumerate((both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F)):
                    quad = (2 * pair + half) * 64
                    e.store(value << 4, at, quad)
                    e.store(value, at, 512 + quad)

    return emitted(types.void, [types.int64] * 3, emit)


def unpack_plain(bits: int, wide: bool) -> Any:
    """Weights of a tile → AMX operands of 512 bytes per group: eight rows of 16 outputs × 4."""
    size = group_bytes(bits, wide)

    def emit(e: Emit, w: Val, out: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            for quad, u in _weight_quads(e, bits, w + g * size):
                e.store(u, out + g * 512, quad * 64)

    return emitted(types.void, [types.int64] * 3, emit)


def amx_kernel(bits: int, wide: bool, terms: int, fused: bool, rows: int) -> Any:
    """A tile of 16 outputs for up to 16 rows, dot products by AMX, the rest as in `rows_kernel`.

    Reads 16 rows of x whatever `rows` is; the buffer must have them. Tiles: see `tile_shapes`.
    """
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales = _scale_loader(wide)
    operand = 1024 if fused else 512

    def emit(e: Emit, x: Val, xs: Val, xm: Val, w: Val, tiles: Val, dots: Val, bias: Val, y: Val, ldx: Val, lds: Val,
             ldy: Val, groups: Val, shift: Val, add: Val) -> None:  # fmt: skip
        first = e.load(VF32, bias)
        sums = [e.var(first) for _ in range(rows)]
        shifts = e.splat(Val(e, e.b.trunc(shift.v, I32)))
        line = e.i64(64)
        with e.loop(groups) as g:
            group = w + g * size
            e.tile_load(2 if fused else 3, tiles + g * operand, line)
            e.tile_load(1 if fused else 4, x + g * X_BYTES, ldx)
            e.tile_zero(0)
            e.tile_dot("bsud", 0, *((1, 2) if fused else (4, 3)))
            e.tile_store(0, dots, line)
            if terms == 2 and not fused:
                e.tile_load(4, x + g * X_BYTES + GROUP, ldx)
                e.tile_zero(5)
                e.tile_dot("bsud", 5, 4, 3)
                e.tile_store(5, dots + 1024, line)
            d = scales(e, group, weights)
            m = scales(e, group, weights + (size - weights) // 2)
            for r in range(rows):
                dot = e.load(VI32, dots, r * 64)
                if terms == 2 and not fused:
                    dot = (dot << shifts) + e.load(VI32, dots, 1024 + r * 64)
                at = g * 4 + lds * r
                _scaled(e, sums[r], dot, d, m, e.load_splat(F32, xs + at), e.load_splat(F32, xm + at))
        _finish(e, sums, y, ldy, add)

    return emitted(types.void, [types.int64] * 14, emit)


def tile_shapes() -> np.ndarray:
    """AMX configuration for the kernels above: 0, 5 dots; 1, 2 fused operands; 3 plain weights; 4 plain activations."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (rows, row_bytes) in enumerate([(16, 64), (16, 64), (16, 64), (8, 64), (16, 32), (16, 64)]):
        config[48 + tile], config[16 + 2 * tile] = rows, row_bytes
    return config


TILE_SHAPES = tile_shapes()  # kept alive: the kernels load it by address


def _nothing(num_args: int) -> Any:
    """Stands in for an AMX function where there is no AMX; never called."""
    return emitted(types.void, [types.int64] * num_args, lambda e, *args: None)


# ---------------------------------------------------------------------------------------------- kernels

_AMX_FROM = 5  # rows
# names bound per variant
unpack: Any = None
amx16: Any = None
amx8: Any = None
rows8: Any = None
rows4: Any = None
rows2: Any = None
rows1: Any = None
HAS_AMX = ISA.amx
STRIDE = 0  # bytes of a tile's group
OPERAND = 0


def _matmul(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, xs, xm, weights, bias, y, tiles, groups, ldy bytes, shift, add, tile configuration."""
    x, xs, xm = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24)
    w, bias, y = simd.get_i64(op + 32), simd.get_i64(op + 40), simd.get_i64(op + 48)
    num_tiles, groups, ldy = simd.get_i64(op + 56), simd.get_i64(op + 64), simd.get_i64(op + 72)
    shift, add = simd.get_i64(op + 80), simd.get_i64(op + 88)
    rows = simd.get_i64(ctx + 8 * ROWS)
    scratch = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    ldx, lds = groups * X_BYTES, groups * 4
    chunk = max(1, min(16, num_tiles // (simd.get_i64(ctx + 8 * NUM_THREADS) * 4)))
    if rows >= 32:
        chunk = 1
    use_amx = HAS_AMX and rows >= _AMX_FROM
    if use_amx:
        simd.tile_config(simd.get_i64(op + 96))
    while True:
        first = next_item(op) * chunk
        if first >= num_tiles:
            break
        for t in range(first, min(first + chunk, num_tiles)):
            wt, bt, yt = w + t * groups * STRIDE, bias + t * 64, y + t * 64
            r = 0
            if use_amx:
                unpack(wt, scratch + 2048, groups)
                while rows - r > 8:
                    amx16(x + r * ldx, xs + r * lds, xm + r * lds, wt, scratch + 2048, scratch, bt, yt + r * ldy,
                          ldx, lds, ldy, groups, shift, add)  # fmt: skip
                    r += 16
                if rows - r > 0:
                    amx8(x + r * ldx, xs + r * lds, xm + r * lds, wt, scratch + 2048, scratch, bt, yt + r * ldy,
                         ldx, lds, ldy, groups, shift, add)  # fmt: skip
                continue
            while rows - r >= 8:
                rows8(x + r * ldx, xs + r * lds, xm + r * lds, wt, bt, yt + r * ldy, ldx, lds, ldy, groups, shift, add)
                r += 8
            if rows - r >= 4:
                rows4(x + r * ldx, xs + r * lds, xm + r * lds, wt, bt, yt + r * ldy, ldx, lds, ldy, groups, shift, add)
                r += 4
            if rows - r >= 2:
                rows2(x + r * ldx, xs + r * lds, xm + r * lds, wt, bt, yt + r * ldy, ldx, lds, ldy, groups, shift, add)
                r += 2
            if rows - r >= 1:
                rows1(x + r * ldx, xs + r * lds, xm + r * lds, wt, bt, yt + r * ldy, ldx, lds, ldy, groups, shift, add)
    if use_amx:
        simd.tile_release(0)


def _variant(bits: int, wide: bool, mode: str) -> Kernel:
    terms = 1 if mode == "int8" else 2
    fused = bits == 4 and mode == "int12"
    bound: dict[str, Any] = {f"rows{r}": rows_kernel(bits, wide, terms, r) for r in (1, 2, 4, 8)}
    if ISA.amx:
        bound["unpack"] = unpack_fused(wide) if fused else unpack_plain(bits, wide)
        bound |= {f"amx{r}": amx_kernel(bits, wide, terms, fused, r) for r in (8, 16)}
    else:
        bound |= {"unpack": _nothing(3), "amx8": _nothing(14), "amx16": _nothing(14)}
    bound["STRIDE"] = group_bytes(bits, wide)
    return Kernel(f"matmul_q{bits}{'f' if wide else ''}_{mode}", _matmul, **bound)


KERNELS = {
    (f"q{bits}{'f' if wide else ''}", mode): _variant(bits, wide, mode)
    for bits in (4, 8)
    for wide in (False, True)
    for mode in TERM_BITS
}


def scratch_bytes(matrix: PackedMatrix) -> int:
    """Per thread: two AMX results and one tile's weights unpacked."""
    return 2048 + matrix.num_groups * 1024


@dataclass(frozen=True, slots=True)
class Activations:
    """Where quantised activations of up to `max_rows` (a multiple of 16) × `cols` lie."""

    cols: int
    values: np.ndarray  # int8[max_rows, groups, 64]
    scales: np.ndarray  # float32[max_rows, groups]
    sums: np.ndarray  # float32[max_rows, groups]: scale × Σ of the integers

    @staticmethod
    def empty(max_rows: int, cols: int) -> Activations:
        """Zeroed buffers."""
        rows, groups = -(-max_rows // 16) * 16, cols // GROUP
        values = aligned_empty(rows * groups * X_BYTES)
        values[:] = 0
        scales, sums = np.zeros((rows, groups), np.float32), np.zeros((rows, groups), np.float32)
        return Activations(cols, values, scales, sums)


def matmul(x: Activations, w: PackedMatrix, y: int, ldy: int, mode: str, bias: np.ndarray, *, add: bool) -> list[int]:
    """The op y[row, n] (+)= Σ x w + bias. `y` is the address of float32 rows `ldy` bytes apart, padded to 16 rows.

    `bias` is float32[≥ padded N]; zeros for none.
    """
    assert x.cols == w.cols and len(bias) >= w.num_tiles * TILE
    kernel = KERNELS[w.kernel, mode]
    return [
        kernel.address, x.values.ctypes.data, x.scales.ctypes.data, x.sums.ctypes.data, w.data.ctypes.data,
        bias.ctypes.data, y, w.num_tiles, w.num_groups, ldy, TERM_BITS[mode], int(add), TILE_SHAPES.ctypes.data,
    ]  # fmt: skip
