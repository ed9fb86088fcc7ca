"""Rope, and writing keys and values to their pages: what stands between the q/k/v product and attention."""

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
    query_size,
    to_elements,
    write_key,
    write_value,
)
from kvledger.kernels.kv_round import round_for_queries
from kvledger.kernels.matmul import SCRATCH, SCRATCH_BYTES, num_rows
from kvledger.kernels.simd import f32_bits, float_bits
from kvledger.kernels.team import next_item

Q_SIZE = query_size(2)


@inline
def rotate(source, target, dim, rope_dim, angles, norm, eps, scale):  # type: ignore[no-untyped-def]
    """One head: target = rope(RMSNorm(source) · norm) · scale; halves paired (channel j with j + rope_dim / 2).

    `angles`: cosines, then sines, of this position; `norm` 0: no norm. Su et al., arXiv:2104.09864.
    """
    half = rope_dim // 2
    factor = scale
    if norm != 0:
        inverse = simd.splat(inverse_rms(source, dim, eps))
        for d in range(0, dim, 16):
            normed = simd.mul(simd.load_f32(source + 4 * d), inverse)
            simd.store_f32(target + 4 * d, simd.mul(normed, simd.load_f32(norm + 4 * d)))
        source = target
    if half % 16 == 0:
        wide = simd.splat(factor)
        for d in range(0, half, 16):
            c, s = simd.load_f32(angles + 4 * d), simd.load_f32(angles + 4 * (half + d))
            a, b = simd.load_f32(source + 4 * d), simd.load_f32(source + 4 * (half + d))
            x, y = simd.sub(simd.mul(a, c), simd.mul(b, s)), simd.fma(a, s, simd.mul(b, c))
            simd.store_f32(target + 4 * d, simd.mul(x, wide))
            simd.store_f32(target + 4 * (half + d), simd.mul(y, wide))
    else:
        for d in range(half):
            c, s = simd.get_f32(angles + 4 * d), simd.get_f32(angles + 4 * (half + d))
            a, b = simd.get_f32(source + 4 * d), simd.get_f32(source + 4 * (half + d))
            simd.put_f32(target + 4 * d, (a * c - b * s) * factor)
            simd.put_f32(target + 4 * (half + d), (a * s + b * c) * factor)
    for d in range(rope_dim, dim):
        simd.put_f32(target + 4 * d, simd.get_f32(source + 4 * d) * factor)


@inline
def copy_head(source, to, dim):  # type: ignore[no-untyped-def]
    """float32[dim] from `source` to `to`."""
    for d in range(0, dim, 16):
        simd.store_f32(to + 4 * d, simd.load_f32(source + 4 * d))


def _rope_write(op: int, ctx: int, thread: int) -> None:
    """Arguments: qkv, q, offset, bytes of a block, group, KV heads, ratio, dim, padded dim, block size, rope dim,
    angles, scale, query norm, key norm, eps, rows allocated, kind, bytes of a head, transform width (0: none).
    """
    qkv, q = simd.get_i64(op + 8), simd.get_i64(op + 16)
    offset, block_bytes = simd.get_i64(op + 24), simd.get_i64(op + 32)
    table, heads, ratio = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    dim, padded, block = simd.get_i64(op + 64), simd.get_i64(op + 72), simd.get_i64(op + 80)
    rope_dim, angles, scale = simd.get_i64(op + 88), simd.get_i64(op + 96), simd.as_f32(simd.get_i64(op + 104))
    q_norm, k_norm, eps = simd.get_i64(op + 112), simd.get_i64(op + 120), simd.as_f32(simd.get_i64(op + 128))
    max_rows, kind, head_bytes = simd.get_i64(op + 136), simd.get_i64(op + 144), simd.get_i64(op + 152)
    spread = simd.get_i64(op + 160)
    positions, segment_of = simd.get_i64(ctx + 8 * POSITIONS), simd.get_i64(ctx + 8 * SEGMENT_OF)
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL) + offset
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    elements = work + dim * 4
    q_size = 4 if kind == FP32 else Q_SIZE
    q_kind = FP32 if q_size == 4 else BF16
    rows, chunk = num_rows(op, ctx), rows_chunk(op, ctx)
    width = (ratio + 2) * heads * dim * 4
    while True:
        first = next_item(op) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            position = np.int64(simd.get_i32(positions + 4 * row))
            at = angles + position * rope_dim * 4
            segment = np.int64(simd.get_i32(segment_of + 4 * row))
            number = np.int64(simd.get_i32(tables + segment * stride + position // block * 4))
            source = qkv + row * width
            for h in range(heads * ratio):
                rotate(source, work, dim, rope_dim, at, q_norm, eps, scale)
                if spread > 0:
                    transform(work, dim, spread)
                to_elements(
                    q_kind, work, q + ((h // ratio * max_rows + row) * ratio + h % ratio) * padded * q_size, dim
                )
                source += dim * 4
            for h in range(heads):
                to = pool + number * block_bytes + h * head_bytes
                rotate(source, work, dim, rope_dim, at, k_norm, eps, np.float32(1))
                if spread > 0:
                    transform(work, dim, spread)
                key_scale = to_elements(kind, work, elements, dim)
                if kind == INT8:
                    own = q + (h * max_rows + row) * ratio * padded * q_size
                    to_round = elements + dim * 4
                    round_for_queries(
                        work, f32_bits(key_scale), elements, own, padded * q_size, ratio, q_size, dim, to_round
                    )
                write_key(kind, elements, key_scale, to, position % block, block, dim)
                value = source + heads * dim * 4
                if spread > 0:
                    copy_head(value, work, dim)
                    transform(work, dim, spread)
                    value = work
                value_scale = to_elements(kind, value, elements, dim)
                write_value(kind, elements, value_scale, to, position % block, block, dim)
                source += dim * 4


ROPE_WRITE = Kernel("rope_write", _rope_write)


def rope_write(shape: AttentionShape, qkv: int, q: np.ndarray, angles: np.ndarray, scale: float, max_rows: int,
               q_norm: np.ndarray | None = None, k_norm: np.ndarray | None = None,
               eps: float = 0.0) -> list[int]:  # fmt: skip
    """The op that rotates queries (× scale, into `q`) and keys, and writes keys and values to their pages.

    Types with `shape.spread` have the channels of all three transformed.

    qkv: float32[rows, (heads + 2 KV heads) · dim]; q: [KV heads, max_rows · ratio, padded dim], bf16
    or float32;
    angles: float32[positions, rope dim], cosines then sines.
    """
    norms = [0 if n is None else n.ctypes.data for n in (q_norm, k_norm)]
    return [
        ROPE_WRITE.address, qkv, q.ctypes.data, shape.offset, shape.stride, shape.group, shape.kv_heads, shape.ratio,
        shape.dim, shape.padded_dim, shape.block_size, angles.shape[1], angles.ctypes.data, float_bits(scale), *norms,
        float_bits(eps), max_rows, KINDS[shape.kind], shape.head_bytes, shape.spread,
    ]  # fmt: skip
