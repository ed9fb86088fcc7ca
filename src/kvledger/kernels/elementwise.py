"""Everything between products: embedding, RMSNorm, quantising activations, rope and KV write, gated activation.

Each kernel works on whole rows, and threads share the rows; a row's arithmetic has one order whatever stands beside
it. Products and attention are unknown here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import NUM_THREADS, num_rows
from kvledger.kernels.matmul_amx import store_activations
from kvledger.kernels.packed import (
    MAX_LEVEL,
    SCALES_BYTES,
    TERM_BITS,
    Activations,
    PackedMatrix,
    bytes_of_terms,
    group_bytes,
)
from kvledger.kernels.simd import float_bits
from kvledger.kernels.team import next_item

# further ctx words
TOKENS, POSITIONS, SEGMENT_OF, TABLE_STRIDE, POOL, TABLES = 4, 5, 6, 7, 8, 24


@inline
def rows_chunk(op: int, ctx: int) -> Any:
    """Rows per item of work: a quarter of a thread's fair share."""
    return max(1, num_rows(op, ctx) // (4 * simd.get_i64(ctx + 8 * NUM_THREADS)))


row_bytes = inline(bytes_of_terms)


@inline
def quantise_group(v0, v1, values, scales, row, group, groups, shift, level):  # type: ignore[no-untyped-def]
    """Two vectors, 32 activations of a row's group → their terms in `values`, their scale and sum in `scales`.

    `shift` is `TERM_BITS`' number: below 0 the forms without terms, of which only the integers have scales.
    """
    values += ((row // 16 * groups + group) * 16 + row % 16) * row_bytes(shift)
    if shift == -2:
        simd.store_f32(values, v0)
        simd.store_f32(values + 64, v1)
        return
    if shift == -1:
        store_activations(v0, v1, values)
        return
    scales += (row // 16 * groups + group) * SCALES_BYTES + row % 16 * 4
    largest = simd.reduce_max(simd.maximum(simd.absolute(v0), simd.absolute(v1)))
    scale = largest / level
    inverse = simd.splat(level / largest if largest > np.float32(0) else np.float32(0))
    q0, q1 = simd.round_i32(simd.mul(v0, inverse)), simd.round_i32(simd.mul(v1, inverse))
    if shift == -3:
        simd.store_i16_ordered(values, q0, q1)
    elif shift == 0:
        simd.store_i8(values, q0)
        simd.store_i8(values + 16, q1)
    else:
        store_terms(q0, q1, values, shift)
    simd.put_f32(scales, scale)
    simd.put_f32(scales + 64, scale * np.float32(simd.reduce_add_i32(simd.add_i32(q0, q1))))


@inline
def store_terms(q0, q1, values, shift):  # type: ignore[no-untyped-def]
    """Integers of 8 + `shift` bits as a high and a low term."""
    bits, half = simd.splat_i32(np.int32(shift)), simd.splat_i32(np.int32((1 << shift) >> 1))
    h0, h1 = simd.sra_i32(simd.add_i32(q0, half), bits), simd.sra_i32(simd.add_i32(q1, half), bits)
    simd.store_i8(values, h0)
    simd.store_i8(values + 16, h1)
    simd.store_i8(values + 32, simd.sub_i32(q0, simd.shl_i32(h0, bits)))
    simd.store_i8(values + 48, simd.sub_i32(q1, simd.shl_i32(h1, bits)))


@inline
def inverse_rms(x, dim, eps):  # type: ignore[no-untyped-def]
    """1 / √(mean x² + eps) of `dim` float32 at x; `dim` is a multiple of 16."""
    total = simd.splat(np.float32(0))
    for k in range(0, dim, 16):
        v = simd.load_f32(x + 4 * k)
        total = simd.fma(v, v, total)
    return np.float32(1) / np.sqrt(simd.reduce_add(total) / np.float32(dim) + eps)


def _norm_quantise(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, weight (0: no norm), values, scales, dim, eps, shift, level, bytes between rows of x, index, share.

    Row r is row index[r] // share of x where there is an index.
    """
    x, weight = simd.get_i64(op + 8), simd.get_i64(op + 16)
    values, scales = simd.get_i64(op + 24), simd.get_i64(op + 32)
    dim, eps = simd.get_i64(op + 40), simd.as_f32(simd.get_i64(op + 48))
    shift, level = simd.get_i64(op + 56), np.float32(simd.get_i64(op + 64))
    stride, index, share = simd.get_i64(op + 72), simd.get_i64(op + 80), simd.get_i64(op + 88)
    groups = dim // 32
    rows, chunk = num_rows(op, ctx), rows_chunk(op, ctx)
    while True:
        first = next_item(op) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            xr = x + (row if index == 0 else np.int64(simd.get_i32(index + 4 * row)) // share) * stride
            factor = simd.splat(np.float32(1))
            if weight != 0:
                factor = simd.splat(inverse_rms(xr, dim, eps))
            for g in range(groups):
                v0, v1 = simd.load_f32(xr + g * 128), simd.load_f32(xr + g * 128 + 64)
                if weight != 0:
                    v0 = simd.mul(simd.mul(v0, factor), simd.load_f32(weight + g * 128))
                    v1 = simd.mul(simd.mul(v1, factor), simd.load_f32(weight + g * 128 + 64))
                quantise_group(v0, v1, values, scales, row, g, groups, shift, level)


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


def _gate_quantise(op: int, ctx: int, thread: int) -> None:
    """Arguments: gate and up (rows of gate, then up), values, scales, dim, shift, level, 0 silu or 1 gelu."""
    x = simd.get_i64(op + 8)
    values, scales = simd.get_i64(op + 16), simd.get_i64(op + 24)
    dim, shift, level = simd.get_i64(op + 32), simd.get_i64(op + 40), np.float32(simd.get_i64(op + 48))
    kind = simd.get_i64(op + 56)
    groups = dim // 32
    total = num_rows(op, ctx) * groups
    chunk = max(4, total // (8 * simd.get_i64(ctx + 8 * NUM_THREADS)))
    while True:
        first = next_item(op) * chunk
        if first >= total:
            break
        for at in range(first, min(first + chunk, total)):
            gate = x + (at // groups * 2 * dim + at % groups * 32) * 4
            g0, g1 = simd.load_f32(gate), simd.load_f32(gate + 64)
            if kind == 0:
                g0, g1 = silu(g0), silu(g1)
            else:
                g0, g1 = gelu(g0), gelu(g1)
            up = gate + dim * 4
            v0, v1 = simd.mul(g0, simd.load_f32(up)), simd.mul(g1, simd.load_f32(up + 64))
            quantise_group(v0, v1, values, scales, at // groups, at % groups, groups, shift, level)


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


def _into(out: Activations) -> list[int]:
    return [out.values.ctypes.data, out.scales.ctypes.data]


def _levels(mode: str) -> list[int]:
    return [TERM_BITS[mode], MAX_LEVEL.get(mode, 0)]


def norm_quantise(x: int, weight: np.ndarray | None, out: Activations, eps: float, mode: str, *, stride: int = 0,
                  index: int = 0, share: int = 1) -> list[int]:  # fmt: skip
    """The op out = quantised RMSNorm(x) · weight (Zhang & Sennrich, arXiv:1910.07467), or quantised x without weight.

    x: float32 rows `stride` bytes apart (0: dense). `index`: address of int32; row r is then row index[r] // share.
    """
    at = 0 if weight is None else weight.ctypes.data
    return [
        NORM_QUANTISE.address, x, at, *_into(out), out.cols, float_bits(eps), *_levels(mode), stride or out.cols * 4,
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
    return [GATE_QUANTISE.address, x, *_into(out), out.cols, *_levels(mode), {"silu": 0, "gelu": 1}[activation]]


def embed(w: PackedMatrix, x: int, scale: float = 1.0) -> list[int]:
    """The op x[row] = scale · row `tokens[row]` of w; x: float32[rows, cols]."""
    stride = group_bytes(w.bits, w.wide)
    return [EMBED.address, w.data.ctypes.data, x, w.cols, w.bits, stride, int(w.wide), float_bits(scale)]
