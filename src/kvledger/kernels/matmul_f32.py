"""y = x Wᵀ in float32: weights of any packing, activations as they are. The slow, exact path: checks, routers.

Activations lie as [block of 16 rows][group][row][32] float32. Each output is one chain of fused multiply-adds over its
inputs in the order of the packing, so the number of rows does not matter here, either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, VF32, VI32, Emit, Val
from kvledger.kernels.jit import Kernel
from kvledger.kernels.matmul import NUM_THREADS, num_rows
from kvledger.kernels.matmul_loops import scale_loader, start_sums, store_sums, weight_quads
from kvledger.kernels.packed import GROUP, ORDER, TILE, Activations, PackedMatrix, group_bytes
from kvledger.kernels.simd import emitted
from kvledger.kernels.team import next_item

ROW_BYTES = GROUP * 4


def _weights(e: Emit, bits: int, wide: bool, group: Val) -> Any:
    """Yields (input, 16 weights) of a group."""
    if bits == 32:
        for k in range(GROUP):
            yield k, e.load(VF32, group, k * 64)
    elif bits == 16:
        for pair in range(16):
            both = e.load(VI32, group, pair * 64)
            yield ORDER[2 * pair], e.bitcast(both << 16, VF32)
            yield ORDER[2 * pair + 1], e.bitcast(both & -65536, VF32)
    else:
        size = group_bytes(bits, wide)
        start = TILE * GROUP * bits // 8
        d, m = (scale_loader(wide)(e, group, at) for at in (start, start + (size - start) // 2))
        for quad, four in weight_quads(e, bits, group):
            for j in range(4):
                yield 4 * quad + j, e.fma(e.to_f32((four >> (8 * j)) & 255), d, m)


def rows_kernel(bits: int, wide: bool, rows: int) -> Any:
    """A tile of 16 outputs for `rows` rows."""

    def emit(e: Emit, x: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, origin: Val) -> None:
        sums = start_sums(e, rows, bias, y, ldy, origin)
        with e.loop(groups) as g:
            for k, weight in _weights(e, bits, wide, w + g * group_bytes(bits, wide)):
                for r in range(rows):
                    value = e.load_splat(F32, x + g * (16 * ROW_BYTES), r * ROW_BYTES + k * 4)
                    total = sums[r][0]
                    total.set(e.fma(weight, value, total.get()))
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 7, emit)


# names bound per variant
rows4: Any = None
rows1: Any = None
STRIDE = 0


def _matmul(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, weights, bias, y, tiles, groups, ldy bytes, add."""
    x, w = simd.get_i64(op + 8), simd.get_i64(op + 16)
    bias, y = simd.get_i64(op + 24), simd.get_i64(op + 32)
    num_tiles, groups, ldy = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    add = simd.get_i64(op + 64)
    rows = num_rows(op, ctx)
    share = simd.get_i64(ctx + 8 * NUM_THREADS) * 4
    chunk = (num_tiles + share - 1) // share
    while True:
        first = next_item(op) * chunk
        if first >= num_tiles:
            break
        for t in range(first, min(first + chunk, num_tiles)):
            wt, bt, yt = w + t * groups * STRIDE, bias + t * 64, y + t * 64
            for r0 in range(0, rows, 16):
                xr, yr = x + r0 // 16 * groups * 16 * ROW_BYTES, yt + r0 * ldy
                r, end = 0, min(16, rows - r0)
                while end - r >= 4:
                    rows4(xr + r * ROW_BYTES, wt, bt, yr + r * ldy, ldy, groups, add)
                    r += 4
                while end - r >= 1:
                    rows1(xr + r * ROW_BYTES, wt, bt, yr + r * ldy, ldy, groups, add)
                    r += 1


def _variant(bits: int, wide: bool) -> Kernel:
    bound = {f"rows{r}": rows_kernel(bits, wide, r) for r in (1, 4)}
    return Kernel(f"matmul_f32_q{bits}{'f' if wide else ''}", _matmul, **bound, STRIDE=group_bytes(bits, wide))


KERNELS = {
    key: _variant(*key) for key in [(4, False), (4, True), (8, False), (8, True), (16, False), (32, False)]
}  # fmt: skip


def matmul(x: Activations, w: PackedMatrix, y: int, ldy: int, bias: np.ndarray, *, add: bool) -> list[int]:
    """As `matmul.matmul`, x being float32."""
    assert x.cols == w.cols, f"{x.cols} activations meet rows of {w.cols} weights"
    return [
        KERNELS[w.bits, w.wide].address, x.values.ctypes.data, w.data.ctypes.data, bias.ctypes.data, y, w.num_tiles,
        w.num_groups, ldy, int(add),
    ]  # fmt: skip
