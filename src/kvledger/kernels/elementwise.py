"""Everything between products: embedding, RMSNorm, quantising activations, rope and KV write, gated activation.

Each kernel works on whole rows, and threads share the rows; a row's arithmetic has one order whatever stands beside
it. Products and attention are unknown here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, VF32, Emit, Val
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import NUM_THREADS, SCRATCH, SCRATCH_BYTES, num_rows
from kvledger.kernels.packed import FLOAT_MODES, MAX_LEVEL, TERM_BITS, Activations, PackedMatrix, group_bytes
from kvledger.kernels.quantise import (
    FINE,
    GROUP_BYTES,
    SIXTEEN,
    WORK_FACTORS,
    form,
    has_scales,
    quantise_group,
    quantise_groups,
    quantise_rows,
)
from kvledger.kernels.simd import float_bits
from kvledger.kernels.team import next_item

# further ctx words
TOKENS, POSITIONS, SEGMENT_OF, TABLE_STRIDE, POOL, TABLES = 4, 5, 6, 7, 8, 24


@inline
def rows_chunk(op: int, ctx: int) -> Any:
    """Rows per item of work: a quarter of a thread's fair share."""
    return max(1, num_rows(op, ctx) // (4 * simd.get_i64(ctx + 8 * NUM_THREADS)))


@inline
def inverse_rms(x, dim, eps):  # type: ignore[no-untyped-def]
    """1 / √(mean x² + eps) of `dim` float32 at x; `dim` is a multiple of 16."""
    total = simd.splat(np.float32(0))
    for k in range(0, dim, 16):
        v = simd.load_f32(x + 4 * k)
        total = simd.fma(v, v, total)
    return np.float32(1) / np.sqrt(simd.reduce_add(total) / np.float32(dim) + eps)


def _inverse_rms_rows(e: Emit, x: Val, step: Val, dim: Val, eps: Val, out: Val) -> None:
    """As `inverse_rms`, of 16 rows `step` bytes apart → float32[16] at `out`; four at a time keep the CPU busy."""
    totals = []
    for first in range(0, 16, 4):
        some = [e.var(e.const(VF32, 0.0)) for _ in range(4)]
        with e.loop(dim >> 4) as k:
            for r, total in enumerate(some):
                v = e.load(VF32, x + step * (first + r) + (k << 6))
                total.set(e.fma(v, v, total.get()))
        totals += [total.get() for total in some]
    mean = e.reduce_rows(totals, lambda a, b: a + b) / e.splat(Val(e, e.b.sitofp(dim.v, F32)))
    root = e.call("llvm.sqrt.v16f32", VF32, [(mean + e.splat(eps)).v])
    e.store(e.const(VF32, 1.0) / root, out)


inverse_rms_rows = simd.emitted(types.void, [*[types.int64] * 3, types.float32, types.int64], _inverse_rms_rows)


@inline
def norm_sixteen(x, step, weight, weight_step, factors, factor_step, to):  # type: ignore[no-untyped-def]
    """float32[16, 32] = sixteen groups, `step` bytes apart, each times a factor and weights."""
    for _ in range(SIXTEEN):
        factor = simd.splat(simd.get_f32(factors))
        for half in (0, 64):
            v = simd.mul(simd.mul(simd.load_f32(x + half), factor), simd.load_f32(weight + half))
            simd.store_f32(to + half, v)
        x, weight, factors, to = x + step, weight + weight_step, factors + factor_step, to + 128


@inline
def norm_block(x, stride, weight, eps, out, block, work):  # type: ignore[no-untyped-def]
    """Sixteen rows."""
    groups, factors = out[2], work + WORK_FACTORS
    if weight != 0:
        inverse_rms_rows(x, stride, groups * 32, eps, factors)
    for g in range(groups):
        if weight != 0:
            norm_sixteen(x + g * 128, stride, weight + g * 128, 0, factors, 4, work)
            quantise_rows(work, GROUP_BYTES, out, block, g)
        else:
            quantise_rows(x + g * 128, stride, out, block, g)


@inline
def norm_row(x, weight, eps, out, row, work):  # type: ignore[no-untyped-def]
    """One row: sixteen groups at once, and what is left one by one."""
    groups, factor, factors = out[2], np.float32(1), work + WORK_FACTORS
    if weight != 0:
        factor = inverse_rms(x, groups * 32, eps)
        simd.put_f32(factors, factor)
    together = groups // SIXTEEN * SIXTEEN if has_scales(out[3]) else 0
    for g in range(0, together, SIXTEEN):
        source = x + g * 128
        if weight != 0:
            norm_sixteen(source, 128, weight + g * 128, 128, factors, 0, work)
            source = work
        quantise_groups(source, out, row, g, work)
    for g in range(together, groups):
        v0, v1 = simd.load_f32(x + g * 128), simd.load_f32(x + g * 128 + 64)
        if weight != 0:
            v0 = simd.mul(simd.mul(v0, simd.splat(factor)), simd.load_f32(weight + g * 128))
            v1 = simd.mul(simd.mul(v1, simd.splat(factor)), simd.load_f32(weight + g * 128 + 64))
        quantise_group(v0, v1, out, row, g)


def _norm_quantise(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, weight (0: no norm), values, scales, dim, eps, shift, level, bytes between rows of x, index, share.

    Row r is row index[r] // share of x where there is an index. Items of work: as many blocks of 16 rows as all threads
    have the same number of; then rows.
    """
    x, weight = simd.get_i64(op + 8), simd.get_i64(op + 16)
    values, scales = simd.get_i64(op + 24), simd.get_i64(op + 32)
    dim, eps = simd.get_i64(op + 40), simd.as_f32(simd.get_i64(op + 48))
    shift, level = simd.get_i64(op + 56), np.float32(simd.get_i64(op + 64))
    stride, index, share = simd.get_i64(op + 72), simd.get_i64(op + 80), simd.get_i64(op + 88)
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    rows, threads = num_rows(op, ctx), simd.get_i64(ctx + 8 * NUM_THREADS)
    out = (values, scales, dim // 32, form(shift, rows), level)
    blocks = rows // (16 * threads) * threads if index == 0 and has_scales(shift) else 0
    chunk = max(1, (rows - 16 * blocks) // (4 * threads))
    while True:
        item = next_item(op)
        if item < blocks:
            norm_block(x + item * 16 * stride, stride, weight, eps, out, item, work)
            continue
        first = 16 * blocks + (item - blocks) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            at = row if index == 0 else np.int64(simd.get_i32(index + 4 * row)) // share
            norm_row(x + at * stride, weight, eps, out, row, work)


@inline
def silu(x):  # type: ignore[no-untyped-def]
    """x / (1 + e^−x)."""
    one = simd.splat(np.float32(1))
    return simd.div(x, simd.add(one, simd.exp(simd.sub(simd.splat(np.float32(0)), x))))


@inline
def tanh(x):  # type: ignore[no-untyped-def]
    """1 − 2 / (e^2x + 1)."""
    one, two = simd.splat(np.float32(1)), simd.splat(np.float32(2))
    return simd.sub(one, simd.div(two, simd.add(simd.exp(simd.mul(two, x)), one)))


@inline
def gelu(x):  # type: ignore[no-untyped-def]
    """The tanh form of GELU (Hendrycks & Gimpel, arXiv:1606.08415)."""
    cube = simd.mul(simd.mul(x, x), x)
    inner = simd.mul(simd.splat(np.float32(0.7978845608)), simd.fma(simd.splat(np.float32(0.044715)), cube, x))
    half = simd.mul(simd.splat(np.float32(0.5)), x)
    return simd.fma(half, tanh(inner), half)


@inline
def gated(gate, up, kind):  # type: ignore[no-untyped-def]
    """act(gate) · up of 16 numbers."""
    g = simd.load_f32(gate)
    return simd.mul(silu(g) if kind == 0 else gelu(g), simd.load_f32(up))


@inline
def gate_sixteen(gate, up, step, kind, to):  # type: ignore[no-untyped-def]
    """float32[16, 32] = sixteen groups, `step` bytes apart."""
    for i in range(SIXTEEN):
        for half in (0, 64):
            at = i * step + half
            simd.store_f32(to + i * 128 + half, gated(gate + at, up + at, kind))


@inline
def gate_row(gate, up, kind, out, row, first, end, work):  # type: ignore[no-untyped-def]
    """Groups [first, end) of one row; sixteen at once if that many."""
    if end - first == SIXTEEN and has_scales(out[3]):
        gate_sixteen(gate + first * 128, up + first * 128, 128, kind, work)
        quantise_groups(work, out, row, first, work)
        return
    for g in range(first, end):
        at = g * 128
        v0, v1 = gated(gate + at, up + at, kind), gated(gate + at + 64, up + at + 64, kind)
        quantise_group(v0, v1, out, row, g)


def _gate_quantise(op: int, ctx: int, thread: int) -> None:
    """Arguments: gate and up (rows of gate, then up), values, scales, dim, shift, level, 0 silu or 1 gelu.

    Items of work: some groups of blocks of 16 rows; then runs of 16 groups of single rows.
    """
    x = simd.get_i64(op + 8)
    values, scales = simd.get_i64(op + 16), simd.get_i64(op + 24)
    dim, shift, level = simd.get_i64(op + 32), simd.get_i64(op + 40), np.float32(simd.get_i64(op + 48))
    kind = simd.get_i64(op + 56)
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    groups, stride = dim // 32, 2 * dim * 4
    rows = num_rows(op, ctx)
    out = (values, scales, groups, form(shift, rows), level)
    blocks = rows // 16 if has_scales(shift) else 0
    runs = -(-groups // SIXTEEN)
    chunk = max(1, blocks * groups // (8 * simd.get_i64(ctx + 8 * NUM_THREADS)))
    items = -(-blocks * groups // chunk)
    while True:
        item = next_item(op)
        if item < items:
            for at in range(item * chunk, min(item * chunk + chunk, blocks * groups)):
                gate = x + at // groups * 16 * stride + at % groups * 128
                gate_sixteen(gate, gate + dim * 4, stride, kind, work)
                quantise_rows(work, GROUP_BYTES, out, at // groups, at % groups)
            continue
        row, g = 16 * blocks + (item - items) // runs, (item - items) % runs * SIXTEEN
        if row >= rows:
            break
        gate = x + row * stride
        gate_row(gate, gate + dim * 4, kind, out, row, g, min(g + SIXTEEN, groups), work)


def _embed(op: int, ctx: int, thread: int) -> None:
    """Arguments: packed matrix, x, dim, bits, bytes of a tile's group, wide, scale."""
    w, x, dim, bits = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    stride, wide, scale = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.as_f32(simd.get_i64(op + 56))
    tokens, rows, chunk = simd.get_i64(ctx + 8 * TOKENS), num_rows(op, ctx), rows_chunk(op, ctx)
    groups = dim // 32
    while True:
        first = next_item(op) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            token = np.int64(simd.get_i32(tokens + 4 * row))
            for g in range(groups):
                at = w + (token // 16 * groups + g) * stride
                read_weights(at, token % 16, bits, wide, scale, x + (row * dim + g * 32) * 4)


@inline
def read_weights(at, lane, bits, wide, scale, out):  # type: ignore[no-untyped-def]
    """out[32] = scale · the weights of one output of a tile's group, at `at` (layouts: `matmul.pack`, `pack_dense`)."""
    d, m = np.float32(1), np.float32(0)
    if bits < 16 and wide != 0:
        d, m = simd.get_f32(at + 64 * bits + lane * 4), simd.get_f32(at + 64 * bits + 64 + lane * 4)
    elif bits < 16:
        d, m = simd.get_f16(at + 64 * bits + lane * 2), simd.get_f16(at + 64 * bits + 32 + lane * 2)
    for k in range(32):
        if bits == 32:
            value = simd.get_f32(at + (k * 16 + lane) * 4)
        elif bits == 16:
            place = k // 8 * 8 + (k % 8 // 2 if k % 2 == 0 else 4 + k % 8 // 2)
            value = simd.as_f32(np.int64(simd.get_u16(at + place // 2 * 64 + lane * 4 + place % 2 * 2)) << 16)
        elif bits == 8:
            value = d * np.float32(simd.get_u8(at + k // 4 * 64 + lane * 4 + k % 4)) + m
        else:
            both = simd.get_u8(at + k // 8 * 64 + lane * 4 + k % 4)
            value = d * np.float32((both >> 4) if k // 4 % 2 else (both & 15)) + m
        simd.put_f32(out + k * 4, value * scale)


def _add_norm(op: int, ctx: int, thread: int) -> None:
    """Arguments: y, weight, x, dim, eps, add."""
    y, weight, x, dim = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    eps, add = simd.as_f32(simd.get_i64(op + 40)), simd.get_i64(op + 48)
    rows = num_rows(op, ctx)
    row = next_item(op)
    while row < rows:
        factor = simd.splat(inverse_rms(y + row * dim * 4, dim, eps))
        for d in range(0, dim, 16):
            at = (row * dim + d) * 4
            v = simd.mul(simd.mul(simd.load_f32(y + at), factor), simd.load_f32(weight + 4 * d))
            simd.store_f32(x + at, simd.add(simd.load_f32(x + at), v) if add != 0 else v)
        row = next_item(op)


def _soft_cap(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, dim, cap."""
    x, dim, cap = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.splat(simd.as_f32(simd.get_i64(op + 24)))
    rows = num_rows(op, ctx)
    row = next_item(op)
    while row < rows:
        for d in range(0, dim, 16):
            at = x + (row * dim + d) * 4
            simd.store_f32(at, simd.mul(tanh(simd.div(simd.load_f32(at), cap)), cap))
        row = next_item(op)


ADD_NORM = Kernel("add_norm", _add_norm)
SOFT_CAP = Kernel("soft_cap", _soft_cap)
NORM_QUANTISE = Kernel("norm_quantise", _norm_quantise)
GATE_QUANTISE = Kernel("gate_quantise", _gate_quantise)
EMBED = Kernel("embed", _embed)


ACTIVATIONS = {"silu": 0, "gelu": 1}


def into(out: Activations) -> list[int]:
    """Where activations lie."""
    return [out.values.ctypes.data, out.scales.ctypes.data]


def levels(mode: str) -> list[int]:
    """How integers of a mode are made: `TERM_BITS`, and the largest."""
    assert mode in ("int8", FINE, "turned", *FLOAT_MODES), f"no product takes {mode} here"
    return [TERM_BITS[mode], MAX_LEVEL.get(mode, 0)]


def norm_quantise(x: int, weight: np.ndarray | None, out: Activations, eps: float, mode: str, *, stride: int = 0,
                  index: int = 0, share: int = 1) -> list[int]:  # fmt: skip
    """The op out = quantised RMSNorm(x) · weight (Zhang & Sennrich, arXiv:1910.07467), or quantised x without weight.

    x: float32 rows `stride` bytes apart (0: dense). `index`: address of int32; row r is then row index[r] // share.
    """
    at = 0 if weight is None else weight.ctypes.data
    return [
        NORM_QUANTISE.address, x, at, *into(out), out.cols, float_bits(eps), *levels(mode), stride or out.cols * 4,
        index, share,
    ]  # fmt: skip


def quantise(x: int, out: Activations, mode: str) -> list[int]:
    """The op out = quantised x; x: float32[rows, dim]."""
    return norm_quantise(x, None, out, 0.0, mode)


def add_norm(y: np.ndarray, weight: np.ndarray, x: np.ndarray, eps: float, *, add: bool = True) -> list[int]:
    """The op x += RMSNorm(y) · weight, or x = that; both float32[rows, dim]."""
    return [
        ADD_NORM.address, y.ctypes.data, weight.ctypes.data, x.ctypes.data, y.shape[1], float_bits(eps), int(add),
    ]  # fmt: skip


def soft_cap(x: np.ndarray, cap: float) -> list[int]:
    """The op x = cap · tanh(x / cap); x: float32[rows, a multiple of 16]."""
    return [SOFT_CAP.address, x.ctypes.data, x.shape[1], float_bits(cap)]


def gate_quantise(x: int, out: Activations, mode: str, activation: str) -> list[int]:
    """The op out = quantised act(gate) · up (Shazeer, arXiv:2002.05202); x: float32[rows, gate then up]."""
    return [GATE_QUANTISE.address, x, *into(out), out.cols, *levels(mode), ACTIVATIONS[activation]]


def embed(w: PackedMatrix, x: int, scale: float = 1.0) -> list[int]:
    """The op x[row] = scale · row `tokens[row]` of w; x: float32[rows, cols]."""
    stride = group_bytes(w.bits, w.wide)
    return [EMBED.address, w.data.ctypes.data, x, w.cols, w.bits, stride, int(w.wide), float_bits(scale)]
