"""The first half of a gated feed-forward layer as one op: products of gate and up, gated, quantised for the second.

A tile's results are used while they are in the cache: gate and up of 32 channels, which the second product takes with
one scale, come one after the other, and are never written out. Integer activations only; the float forms take a product
and `elementwise.gate_quantise`. Knows nothing of models.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.elementwise import ACTIVATIONS, gate_row, gate_sixteen, into, levels
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import NUM_THREADS, PANEL_BYTES, SCRATCH, SCRATCH_BYTES, VARIANTS, num_rows, shift_of
from kvledger.kernels.packed import TILE, Activations, PackedMatrix
from kvledger.kernels.quantise import GROUP_BYTES, WORK_BYTES, form, quantise_rows
from kvledger.kernels.team import next_item

FEW_ROWS = 8  # up to as many read weights at the memory's speed: tiles of several groups of 32 in turn, as they lie
MOST_GROUPS = 32  # of an item of work, then
_GROUP_FLOATS = 64  # of a row: 32 of gate, 32 of up

# names bound per variant
multiply_tile: Any = None
STRIDE = 0


@inline
def gate_group(y, ldy, up, kind, out, rows, group, work):  # type: ignore[no-untyped-def]
    """One group of 32 channels of all rows: gate at y, up `up` bytes after it."""
    blocks = rows // 16
    for block in range(blocks):
        gate = y + block * 16 * ldy
        gate_sixteen(gate, gate + up, ldy, kind, work)
        quantise_rows(work, GROUP_BYTES, out, block, group)
    for row in range(16 * blocks, rows):
        gate = y + row * ldy - group * GROUP_BYTES
        gate_row(gate, gate + up, kind, out, row, group, group + 1, work)


def _gated(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, scales, weights (gate's outputs, then up's), bias, groups, shift (or PARTS); values, scales and
    groups of the results, their shift and level; 0 silu or 1 gelu.
    """
    x, xs, w, bias = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    groups, shift = simd.get_i64(op + 40), simd.get_i64(op + 48)
    num_results, kind = simd.get_i64(op + 72), simd.get_i64(op + 96)
    rows, threads = num_rows(op, ctx), simd.get_i64(ctx + 8 * NUM_THREADS)
    out = (
        simd.get_i64(op + 56), simd.get_i64(op + 64), num_results,
        form(simd.get_i64(op + 80), rows), np.float32(simd.get_i64(op + 88)),
    )  # fmt: skip
    panel = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    work = panel + PANEL_BYTES
    y = work + WORK_BYTES
    run = min(MOST_GROUPS, max(1, num_results // (4 * threads))) if rows <= FEW_ROWS else 1
    ldy, up = run * _GROUP_FLOATS * 4, run * GROUP_BYTES
    while True:
        first = next_item(op) * run
        if first >= num_results:
            break
        count = min(run, num_results - first)
        for part in range(2):
            for t in range(2 * count):
                tile = 2 * (part * num_results + first) + t
                at = w + tile * groups * STRIDE
                multiply_tile(x, xs, at, bias + tile * 64, y + part * up + t * 64, ldy, rows, groups, shift, 0, panel)
        for g in range(count):
            gate_group(y + g * GROUP_BYTES, ldy, up, kind, out, rows, first + g, work)


KERNELS = {
    key: Kernel(f"gated_{name}", _gated, multiply_tile=tile, STRIDE=stride)
    for key, (name, tile, stride) in VARIANTS.items()
}


def scratch_bytes(max_rows: int) -> int:
    """Per thread: a panel, sixteen groups, and results of gate and up on their way."""
    return PANEL_BYTES + WORK_BYTES + max(max_rows, FEW_ROWS * MOST_GROUPS) * _GROUP_FLOATS * 4


def gated(x: Activations, w: PackedMatrix, mode: str, bias: np.ndarray, out: Activations, out_mode: str,
          activation: str) -> list[int]:  # fmt: skip
    """The op out = quantised act(gate) · up, (gate, up) = W x (Shazeer, arXiv:2002.05202).

    `w`: gate's out.cols outputs, then up's. `bias` is float32[2 · out.cols]; zeros for none. Both modes are integers.
    """
    assert w.num_tiles * TILE >= 2 * out.cols
    return [
        KERNELS[w.bits, w.wide, mode].address, x.values.ctypes.data, x.scales.ctypes.data, w.data.ctypes.data,
        bias.ctypes.data, w.num_groups, shift_of(mode), *into(out), out.cols // 32,
        *levels(out_mode), ACTIVATIONS[activation],
    ]  # fmt: skip
