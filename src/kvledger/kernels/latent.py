"""Multi-head latent attention: writing the latent to its page, and queries in the latent's space (DeepSeek-V2,
arXiv:2405.04434). Keys are (latent, rope key), shared by all heads; values are the latent itself.
"""

from __future__ import annotations

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.elementwise import (
    POOL,
    POSITIONS,
    SEGMENT_OF,
    TABLE_STRIDE,
    TABLES,
    inverse_rms,
    rows_chunk,
)  # fmt: skip
from kvledger.kernels.hadamard import transform
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.kv_pages import (
    BF16,
    FP32,
    INT8,
    KINDS,
    AttentionShape,
    to_floats,
    to_latent_elements,
    write_key,
    write_key_word,
)
from kvledger.kernels.kv_write import Q_SIZE, rotate
from kvledger.kernels.matmul import SCRATCH, SCRATCH_BYTES, num_rows
from kvledger.kernels.simd import float_bits
from kvledger.kernels.team import next_item


@inline
def spread_row(row, latent, rope, spread, rope_spread):  # type: ignore[no-untyped-def]
    """Transform both parts of a row, each for itself: values are the latent alone."""
    if spread > 0:
        transform(row, latent, spread)
        transform(row + latent * 4, rope, rope_spread)


@inline
def norm_latent(source, latent, eps, norm, work):  # type: ignore[no-untyped-def]
    """work = RMSNorm of the latent."""
    factor = simd.splat(inverse_rms(source, latent, eps))
    for d in range(0, latent, 16):
        normed = simd.mul(simd.mul(simd.load_f32(source + 4 * d), factor), simd.load_f32(norm + 4 * d))
        simd.store_f32(work + 4 * d, normed)


@inline
def scale_query(source, latent, scale, work):  # type: ignore[no-untyped-def]
    """work = the part of a query that is in the latent's space, × scale."""
    wide = simd.splat(scale)
    for d in range(0, latent, 16):
        simd.store_f32(work + 4 * d, simd.mul(simd.load_f32(source + 4 * d), wide))


@inline
def write_latent(kind, work, elements, page, within, block, latent, dim):  # type: ignore[no-untyped-def]
    """A row's latent and rope key, rounded at `elements`, to its place in a page."""
    word = to_latent_elements(kind, work, elements, latent, dim)
    write_key(kind, elements, page, within, block, dim)
    if kind == INT8:
        write_key_word(word, page, within, block, dim)


def _latent_write(op: int, ctx: int, thread: int) -> None:
    """Arguments: kv, bytes between its rows, queries, bytes between their rows, queries in latent space, q, offset,
    bytes of a block, group, heads, latent, rope, nope, padded dim, block size, angles, scale, norm, eps, kind,
    transform widths of the latent (0: none) and of the rope key.
    """
    kv, ldkv, queries, ldq = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    absorbed, q = simd.get_i64(op + 40), simd.get_i64(op + 48)
    offset, block_bytes = simd.get_i64(op + 56), simd.get_i64(op + 64)
    table, heads, latent = simd.get_i64(op + 72), simd.get_i64(op + 80), simd.get_i64(op + 88)
    rope, nope, padded, block = (
        simd.get_i64(op + 96), simd.get_i64(op + 104), simd.get_i64(op + 112), simd.get_i64(op + 120))  # fmt: skip
    angles, scale, norm = simd.get_i64(op + 128), simd.as_f32(simd.get_i64(op + 136)), simd.get_i64(op + 144)
    eps, kind = simd.as_f32(simd.get_i64(op + 152)), simd.get_i64(op + 160)
    spread, rope_spread = simd.get_i64(op + 168), simd.get_i64(op + 176)
    positions, segment_of = simd.get_i64(ctx + 8 * POSITIONS), simd.get_i64(ctx + 8 * SEGMENT_OF)
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL) + offset
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    dim = latent + rope
    elements = work + dim * 4
    q_size = 4 if kind == FP32 else Q_SIZE
    q_kind = FP32 if q_size == 4 else BF16
    rows, chunk = num_rows(op, ctx), rows_chunk(op, ctx)
    while True:
        first = next_item(op) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            position = np.int64(simd.get_i32(positions + 4 * row))
            at = angles + position * rope * 4
            segment = np.int64(simd.get_i32(segment_of + 4 * row))
            number = np.int64(simd.get_i32(tables + segment * stride + position // block * 4))
            source = kv + row * ldkv
            norm_latent(source, latent, eps, norm, work)
            rotate(source + latent * 4, work + latent * 4, rope, rope, at, np.float32(1))
            spread_row(work, latent, rope, spread, rope_spread)
            write_latent(kind, work, elements, pool + number * block_bytes, position % block, block, latent, dim)
            for h in range(heads):
                scale_query(absorbed + (row * heads + h) * latent * 4, latent, scale, work)
                turned = queries + row * ldq + (h * (nope + rope) + nope) * 4
                rotate(turned, work + latent * 4, rope, rope, at, scale)
                spread_row(work, latent, rope, spread, rope_spread)
                to_floats(q_kind, work, q + (row * heads + h) * padded * q_size, dim)


LATENT_WRITE = Kernel("latent_write", _latent_write)


def latent_write(shape: AttentionShape, kv: np.ndarray, queries: np.ndarray, absorbed: np.ndarray, q: np.ndarray,
                 angles: np.ndarray, scale: float, norm: np.ndarray, eps: float) -> list[int]:  # fmt: skip
    """The op that norms and writes the latent and the rope key, and makes `q` of both parts of the queries (× scale).

    Types with `shape.spread` have the channels of all transformed.

    kv: float32[rows, ≥ latent + rope]; queries: float32[rows, heads · (nope + rope)]; absorbed: float32[rows, heads ·
    latent], the first part of the queries in the latent's space.
    """
    rope = angles.shape[1]
    nope = queries.shape[1] // shape.heads - rope
    return [
        LATENT_WRITE.address, kv.ctypes.data, kv.strides[0], queries.ctypes.data, queries.strides[0],
        absorbed.ctypes.data, q.ctypes.data, shape.offset, shape.stride, shape.group, shape.heads, shape.latent, rope,
        nope, shape.padded_dim, shape.block_size, angles.ctypes.data, float_bits(scale), norm.ctypes.data,
        float_bits(eps), KINDS[shape.kind], shape.spread, shape.rope_spread,
    ]  # fmt: skip
