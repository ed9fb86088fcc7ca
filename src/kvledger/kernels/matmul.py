"""y = x Wᵀ with quantised weights: 4 or 8 bits with a scale and a minimum per 32, activations as 8, 12 or 15 bits.

Weights lie in tiles of 16 outputs; per group of 32 inputs a tile holds its bytes ready for the dot product, then 16
scales and 16 minima. Activations lie by blocks of 16 rows, as [block][group][row][64 bytes]: 32 high terms, then 32
low ones, with x = scale · (high · 2^shift + low); scales, and scale × Σ, as [block][group][scales, sums][row]. A
group's dot product is an exact integer, and groups are added in ascending order in float32, so the number of rows
cannot change a bit of any of them. The AMX path, which computes otherwise, is in `matmul_amx.py`. Attention, models
and files are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, I32, VF32, VI32, Emit, Val
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.simd import emitted
from kvledger.kernels.team import next_item

GROUP = 32  # inputs that share a scale
TILE = 16  # outputs computed together
X_BYTES = 64  # of a group of activations: 32 high terms, 32 low terms
SCALES_BYTES = 128  # of a group of 16 rows: their scales, then their sums
PREFETCH_BYTES = 2048  # how far ahead weights are asked for: the hardware stops at every 4 KiB
LARGE_BYTES = 2 << 20  # a large page on x86 and most ARM
# bits of the low term; below 0: floating point, as `matmul_amx` (bf16) and `matmul_f32` read it
TERM_BITS = {"int8": 0, "int12": 4, "int8x2": 7, "bf16": -1, "fp32": -2}
# Place i of a group's 32 inputs in bfloat16 holds input ORDER[i]: as nibbles and bytes fall out of 16-bit lanes.
ORDER = [8 * p + k for p in range(4) for k in (0, 2, 4, 6, 1, 3, 5, 7)]
MAX_LEVEL = {
    0: 127,
    4: 127 * 16 + 7,
    7: 127 * 128 + 63,
    -1: 0,
    -2: 0,
}  # largest integer activation by bits of the low term

# ctx words that every kernel may read
ROWS, SCRATCH, SCRATCH_BYTES, NUM_THREADS = 0, 1, 2, 3


ROWS_AT = 22 * 8  # byte offset in an op of the address of its number of rows; 0: the step's


def group_bytes(bits: int, wide: bool) -> int:
    """Bytes of a tile's group: 512 weights, then scales and minima (float32 if `wide`, else float16) below 16 bits."""
    return TILE * GROUP * bits // 8 + (0 if bits >= 16 else 2 * TILE * (4 if wide else 2))


@inline
def num_rows(op: int, ctx: int) -> Any:
    """Rows that an op works on."""
    at = simd.get_i64(op + ROWS_AT)
    return simd.get_i64(ctx + 8 * ROWS) if at == 0 else simd.get_i64(at)


# ---------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights of `rows` outputs × `cols` inputs, ready for the kernels. `data` is uint8, 64 bytes aligned."""

    rows: int
    cols: int
    bits: int  # 4 or 8: levels; 16: bfloat16; 32: float32
    wide: bool  # float32 scales: where float16 would not be exact
    data: np.ndarray

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def num_groups(self) -> int:
        return self.cols // GROUP


def aligned_zeros(num_bytes: int) -> np.ndarray:
    """uint8[num_bytes] of zeros at a multiple of 64; pages are committed when first written.

    Zeros, because a masked place of a KV block is still multiplied (by 0): stale numbers are harmless, NaN is not.
    """
    buffer = np.zeros(num_bytes + 64, np.uint8)
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
    data = aligned_zeros(tiles * groups * size).reshape(tiles, groups, size)
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


def pack_dense(w: np.ndarray, bits: int) -> PackedMatrix:
    """float32[N, K] → tiles of bfloat16 ([16 pairs][16 outputs][2] in ORDER) or float32 ([32 inputs][16 outputs])."""
    n, k = w.shape
    w = np.pad(w, ((0, -n % TILE), (0, 0)))
    tiles, groups = len(w) // TILE, k // GROUP
    data = aligned_zeros(tiles * groups * group_bytes(bits, False))
    grouped = w.reshape(tiles, TILE, groups, GROUP)
    if bits == 32:
        data.view(np.float32).reshape(tiles, groups, GROUP, TILE)[:] = grouped.transpose(0, 2, 3, 1)
    else:
        raw = np.ascontiguousarray(grouped, np.float32).view(np.uint32)
        half = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)[..., ORDER]
        pairs = half.reshape(tiles, TILE, groups, 16, 2).transpose(0, 2, 3, 1, 4)
        data.view(np.uint16).reshape(tiles, groups, 16, TILE, 2)[:] = pairs
    return PackedMatrix(n, k, bits, False, data)


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


def store_sums(e: Emit, sums: list[Any], y: Val, ldy: Val, add: Val) -> None:
    """y = sums, or y += sums."""
    for r, total in enumerate(sums):
        where = y + ldy * r
        with e.b.if_else(e.b.icmp_signed("!=", add.v, e.i64(0).v)) as (then, otherwise):
            with then:
                e.store(e.load(VF32, where) + total.get(), where)
            with otherwise:
                e.store(total.get(), where)


def _scaled(e: Emit, total: Any, dot: Val, d: Val, m: Val, xs: Val, row: int) -> None:
    """total += dot · (d · scale) + m · sum: one group's share, the same roundings on every path."""
    scale, x_sum = e.load_splat(F32, xs, row * 4), e.load_splat(F32, xs, 64 + row * 4)
    partial = e.fma(e.to_f32(dot), d * scale, total.get())
    total.set(e.fma(m, x_sum, partial))


def rows_kernel(bits: int, wide: bool, terms: int, rows: int) -> Any:
    """A tile of 16 outputs for `rows` rows at once, with u8 × s8 dot products. `xs`: see `scales_at`."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales = _scale_loader(wide)

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, shift: Val,
             add: Val) -> None:  # fmt: skip
        first = e.load(VF32, bias)
        sums = [e.var(first) for _ in range(rows)]
        shifts = e.splat(Val(e, e.b.trunc(shift.v, I32)))
        with e.loop(groups) as g:
            group = w + g * size
            for line in range(0, size, 64):
                e.prefetch(group, PREFETCH_BYTES + line)
            high = [e.const(VI32, 0)] * rows
            low = [e.const(VI32, 0)] * rows
            for quad, u in _weight_quads(e, bits, group):
                for r in range(rows):
                    at = x + (g * 1024 + r * X_BYTES)
                    high[r] = e.dot_u8s8(high[r], u, e.load_splat(I32, at, quad * 4))
                    if terms == 2:
                        low[r] = e.dot_u8s8(low[r], u, e.load_splat(I32, at, GROUP + quad * 4))
            d = scales(e, group, weights)
            m = scales(e, group, weights + (size - weights) // 2)
            for r in range(rows):
                dot = (high[r] << shifts) + low[r] if terms == 2 else high[r]
                _scaled(e, sums[r], dot, d, m, xs + g * SCALES_BYTES, r)
        store_sums(e, sums, y, ldy, add)

    return emitted(types.void, [types.int64] * 9, emit)


# ---------------------------------------------------------------------------------------------- kernels

# names bound per variant
rows8: Any = None
rows4: Any = None
rows2: Any = None
rows1: Any = None
STRIDE = 0  # bytes of a tile's group


def _matmul(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, scales, weights, bias, y, tiles, groups, ldy bytes, shift, add."""
    x, xs = simd.get_i64(op + 8), simd.get_i64(op + 16)
    w, bias, y = simd.get_i64(op + 24), simd.get_i64(op + 32), simd.get_i64(op + 40)
    num_tiles, groups, ldy = simd.get_i64(op + 48), simd.get_i64(op + 56), simd.get_i64(op + 64)
    shift, add = simd.get_i64(op + 72), simd.get_i64(op + 80)
    rows = num_rows(op, ctx)
    share = simd.get_i64(ctx + 8 * NUM_THREADS) * (8 if rows > 4 else 2)
    chunk = (num_tiles + share - 1) // share
    while True:
        first = next_item(op) * chunk
        if first >= num_tiles:
            break
        for t in range(first, min(first + chunk, num_tiles)):
            wt, bt, yt = w + t * groups * STRIDE, bias + t * 64, y + t * 64
            for r0 in range(0, rows, 16):
                xr, sr, yr = x + r0 // 16 * groups * 1024, xs + r0 // 16 * groups * SCALES_BYTES, yt + r0 * ldy
                r, end = 0, min(16, rows - r0)
                while end - r >= 8:
                    rows8(xr + r * X_BYTES, sr + r * 4, wt, bt, yr + r * ldy, ldy, groups, shift, add)
                    r += 8
                if end - r >= 4:
                    rows4(xr + r * X_BYTES, sr + r * 4, wt, bt, yr + r * ldy, ldy, groups, shift, add)
                    r += 4
                if end - r >= 2:
                    rows2(xr + r * X_BYTES, sr + r * 4, wt, bt, yr + r * ldy, ldy, groups, shift, add)
                    r += 2
                if end - r >= 1:
                    rows1(xr + r * X_BYTES, sr + r * 4, wt, bt, yr + r * ldy, ldy, groups, shift, add)


def _variant(bits: int, wide: bool, terms: int) -> Kernel:
    bound = {f"rows{r}": rows_kernel(bits, wide, terms, r) for r in (1, 2, 4, 8)}
    return Kernel(f"matmul_q{bits}{'f' if wide else ''}_{terms}", _matmul, **bound, STRIDE=group_bytes(bits, wide))


KERNELS = {
    (bits, wide, terms): _variant(bits, wide, terms) for bits in (4, 8) for wide in (False, True) for terms in (1, 2)
}


@dataclass(frozen=True, slots=True)
class Activations:
    """Where quantised activations of up to `max_rows` (a multiple of 16) × `cols` lie."""

    cols: int
    values: np.ndarray  # uint8[max_rows / 16, groups, 16, 64 or 128]: signed terms, bfloat16 or float32
    scales: np.ndarray  # float32[max_rows / 16, groups, 2, 16]: scales, then scale × Σ of the integers

    @staticmethod
    def empty(max_rows: int, cols: int, mode: str = "int8") -> Activations:
        """Zeroed buffers."""
        blocks, groups, size = -(-max_rows // 16), cols // GROUP, 2 * X_BYTES if mode == "fp32" else X_BYTES
        values = aligned_zeros(blocks * 16 * groups * size).reshape(blocks, groups, 16, size)
        values[:] = 0
        scales = aligned_zeros(blocks * groups * SCALES_BYTES).view(np.float32).reshape(blocks, groups, 2, 16)
        scales[:] = 0
        return Activations(cols, values, scales)


def matmul(x: Activations, w: PackedMatrix, y: int, ldy: int, mode: str, bias: np.ndarray, *, add: bool) -> list[int]:
    """The op y[row, n] (+)= Σ x w + bias. `y` is the address of float32 rows `ldy` bytes apart, padded to 16 rows.

    `bias` is float32[≥ padded N]; zeros for none.
    """
    assert x.cols == w.cols, f"{x.cols} activations meet rows of {w.cols} weights"
    assert len(bias) >= w.num_tiles * TILE
    kernel = KERNELS[w.bits, w.wide, 1 if mode == "int8" else 2]
    return [
        kernel.address, x.values.ctypes.data, x.scales.ctypes.data, w.data.ctypes.data, bias.ctypes.data, y,
        w.num_tiles, w.num_groups, ldy, TERM_BITS[mode], int(add),
    ]  # fmt: skip
