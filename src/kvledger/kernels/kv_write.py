"""Rope, and writing keys and values to their pages: what stands between the q/k/v product and attention."""

from __future__ import annotations

from typing import Any

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
from kvledger.kernels.jit import Kernel, inline, rebound
from kvledger.kernels.kv_pages import (
    BF16,
    BF16_MAX,
    FP32,
    INT8,
    KINDS,
    SPREAD,
    ZERO_BITS,
    AttentionShape,
    ask_for_token,
    cut,
    element_bytes,
    query_size,
    to_floats,
    to_int8,
    write_bf16_values,
    write_key_word,
    write_keys,
    write_value_word,
    write_values,
)
from kvledger.kernels.kv_round import round_bytes, round_for_queries, work_bytes
from kvledger.kernels.matmul import SCRATCH, SCRATCH_BYTES, num_rows
from kvledger.kernels.simd import float_bits
from kvledger.kernels.team import next_item

Q_SIZE = query_size(2)
KIND, Q_KIND = BF16, FP32 if Q_SIZE == 4 else BF16
ONE = np.float32(1)


@inline
def turn(source, angles, half, d, scale):  # type: ignore[no-untyped-def]
    """16 channels from d on, and those they are paired with, rotated · scale."""
    c, s = simd.load_f32(angles + 4 * d), simd.load_f32(angles + 4 * (half + d))
    a, b = simd.load_f32(source + 4 * d), simd.load_f32(source + 4 * (half + d))
    x, y = simd.sub(simd.mul(a, c), simd.mul(b, s)), simd.fma(a, s, simd.mul(b, c))
    return simd.mul(x, scale), simd.mul(y, scale)


@inline
def write_normed(source, target, dim, norm, eps):  # type: ignore[no-untyped-def]
    """target = RMSNorm(source) · norm."""
    inverse = simd.splat(inverse_rms(source, dim, eps))
    for d in range(0, dim, 16):
        normed = simd.mul(simd.load_f32(source + 4 * d), inverse)
        simd.store_f32(target + 4 * d, simd.mul(normed, simd.load_f32(norm + 4 * d)))


@inline
def rotate(source, target, dim, rope_dim, angles, scale):  # type: ignore[no-untyped-def]
    """One head: target = rope(source) · scale; halves paired (channel j with j + rope_dim / 2).

    `angles`: cosines, then sines, of this position. Su et al., arXiv:2104.09864.
    """
    half = rope_dim // 2
    factor = scale
    if half % 16 == 0:
        for d in range(0, half, 16):
            x, y = turn(source, angles, half, d, simd.splat(factor))
            simd.store_f32(target + 4 * d, x)
            simd.store_f32(target + 4 * (half + d), y)
    else:
        for d in range(half):
            c, s = simd.get_f32(angles + 4 * d), simd.get_f32(angles + 4 * (half + d))
            a, b = simd.get_f32(source + 4 * d), simd.get_f32(source + 4 * (half + d))
            simd.put_f32(target + 4 * d, (a * c - b * s) * factor)
            simd.put_f32(target + 4 * (half + d), (a * s + b * c) * factor)
    for d in range(rope_dim, dim):
        simd.put_f32(target + 4 * d, simd.get_f32(source + 4 * d) * factor)


@inline
def turn_head(source, target, dim, rope_dim, angles, norm, eps, scale):  # type: ignore[no-untyped-def]
    """One head: target = rope(RMSNorm(source) · norm) · scale; `norm` 0: no norm."""
    if norm != 0:
        write_normed(source, target, dim, norm, eps)
        source = target
    rotate(source, target, dim, rope_dim, angles, scale)


@inline
def turn_heads(  # type: ignore[no-untyped-def]
    kind, count, source, apart, target, target_apart, work, dim, angles, angles_apart, norm, eps, scale
):
    """`turn_head`, then `to_floats` of bf16 or fp32, of `count` heads; `apart`: bytes from each to the next.

    All channels turn, and stay in registers.
    """
    half, wide = dim // 2, simd.splat(scale)
    for _ in range(count):
        head = source
        if norm != 0:
            write_normed(source, work, dim, norm, eps)
            head = work
        for d in range(0, half, 16):
            x, y = turn(head, angles, half, d, wide)
            x, y = cut(x, BF16_MAX), cut(y, BF16_MAX)
            if kind == FP32:
                simd.store_f32(target + 4 * d, x)
                simd.store_f32(target + 4 * (half + d), y)
            else:
                simd.store_bf16(target + 2 * d, x)
                simd.store_bf16(target + 2 * (half + d), y)
        source += apart
        target += target_apart
        angles += angles_apart


@inline
def copy_head(source, to, dim):  # type: ignore[no-untyped-def]
    """float32[dim] from `source` to `to`."""
    for d in range(0, dim, 16):
        simd.store_f32(to + 4 * d, simd.load_f32(source + 4 * d))


@inline
def tile_begin(row, rows, positions, segment_of, tile):  # type: ignore[no-untyped-def]
    """The first row from `row` on where another tile of a page begins: threads that part there share no line."""
    while 0 < row < rows:
        if simd.get_i32(segment_of + 4 * row) != simd.get_i32(segment_of + 4 * row - 4):
            break
        if np.int64(simd.get_i32(positions + 4 * row)) % tile == 0:
            break
        row += 1
    return min(row, rows)


def _write_floats(  # type: ignore[no-untyped-def]
    source, width, count, heads, ratio, q, q_bytes, apart, page, head_bytes, within, block, work, dim, rope_dim, angles,
    scale, q_norm, k_norm, eps, spread,
):  # fmt: skip
    """Rows of one tile, `width` bytes apart: queries → elements at q, a KV head's `apart` bytes after the last's; keys
    and values → the tile's place in `page`, of types whose elements are those of single numbers.
    """
    in_registers = rope_dim == dim and dim % 32 == 0
    for row in range(count):
        head, at = source + row * width, angles + row * rope_dim * 4
        for h in range(heads):
            to = q + h * apart + row * ratio * q_bytes
            if in_registers:
                turn_heads(
                    Q_KIND, ratio, head, dim * 4, to, q_bytes, work, dim, at, np.int64(0), q_norm, eps, scale
                )  # fmt: skip
            else:
                for j in range(ratio):
                    turn_head(head + j * dim * 4, work, dim, rope_dim, at, q_norm, eps, scale)
                    to_floats(Q_KIND, work, to + j * q_bytes, dim)
            head += ratio * dim * 4
    size, elements = dim * element_bytes(KIND), work + dim * 4
    for h in range(heads):
        to, key = page + h * head_bytes, source + (heads * ratio + h) * dim * 4
        if in_registers:
            turn_heads(KIND, count, key, width, elements, size, work, dim, angles, dim * 4, k_norm, eps, ONE)
        else:
            for i in range(count):
                turn_head(key + i * width, work, dim, rope_dim, angles + i * rope_dim * 4, k_norm, eps, ONE)
                to_floats(KIND, work, elements + i * size, dim)
        write_keys(KIND, elements, size, count, to, within, block, dim)
        value = key + heads * dim * 4
        if KIND == BF16:
            write_bf16_values(value, width, count, to, within, block, dim)
        else:
            for i in range(count):
                to_floats(KIND, value + i * width, elements + i * size, dim)
            write_values(KIND, elements, size, count, to, within, block, dim)


def _write_spread(  # type: ignore[no-untyped-def]
    source, width, count, heads, ratio, q, q_bytes, apart, page, head_bytes, within, block, work, dim, rope_dim, angles,
    scale, q_norm, k_norm, eps, spread,
):  # fmt: skip
    """As `_write_floats`, of types whose channels are transformed.

    Step by step for all heads of a row: one head alone is a chain of operations that wait. `work`: `scratch_bytes`.
    """
    keys = work + heads * ratio * dim * 4
    elements = work + width  # of 16 tokens' keys, and of their values
    room = elements + heads * 32 * dim
    words = room + round_bytes(dim)  # behind all that vectors are read from, which begin at multiples of 64
    for row in range(count):
        head, at, own = source + row * width, angles + row * rope_dim * 4, q + row * ratio * q_bytes
        for d in range(0, heads * ratio * dim, dim):
            turn_head(head + 4 * d, work + 4 * d, dim, rope_dim, at, q_norm, eps, scale)
        for d in range(heads * ratio * dim, heads * (ratio + 1) * dim, dim):
            turn_head(head + 4 * d, work + 4 * d, dim, rope_dim, at, k_norm, eps, ONE)
        copy_head(head + heads * (ratio + 1) * dim * 4, keys + heads * dim * 4, heads * dim)
        transform(work, heads * (ratio + 2) * dim, spread)
        for h in range(heads):
            for j in range(ratio):
                to_floats(Q_KIND, work + (h * ratio + j) * dim * 4, own + h * apart + j * q_bytes, dim)
        for h in range(2 * heads):
            x, to = keys + h * dim * 4, elements + (h * 16 + row) * dim
            if KIND == INT8:
                simd.put_i32(words + 4 * h, np.int32(to_int8(x, to, dim, ZERO_BITS)))
            else:
                to_floats(KIND, x, to, dim)
        if KIND == INT8:
            for h in range(heads):
                x, key, to = keys + h * dim * 4, elements + (h * 16 + row) * dim, page + h * head_bytes
                word, value_word = simd.get_i32(words + 4 * h), simd.get_i32(words + 4 * (heads + h))
                round_for_queries(x, word, key, own + h * apart, q_bytes, ratio, Q_SIZE, dim, room)
                write_key_word(word, to, within + row, block, dim)
                write_value_word(value_word, to, within + row, block, dim)
    for h in range(heads):
        to, key = page + h * head_bytes, elements + h * 16 * dim
        write_keys(KIND, key, dim, count, to, within, block, dim)
        write_values(KIND, key + heads * 16 * dim, dim, count, to, within, block, dim)


# bound per variant
write_tile: Any = None


def _rope_write(op: int, ctx: int, thread: int) -> None:
    """Arguments: qkv, q, offset, bytes of a block, group, KV heads, ratio, dim, padded dim, block size, rope dim,
    angles, scale, query norm, key norm, eps, rows allocated, bytes of a head, transform width (0: none).

    Rows are taken by tiles: a run of rows of one tile has its keys and values written together.
    """
    qkv, q = simd.get_i64(op + 8), simd.get_i64(op + 16)
    offset, block_bytes = simd.get_i64(op + 24), simd.get_i64(op + 32)
    table, heads, ratio = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    dim, padded, block = simd.get_i64(op + 64), simd.get_i64(op + 72), simd.get_i64(op + 80)
    rope_dim, angles, scale = simd.get_i64(op + 88), simd.get_i64(op + 96), simd.as_f32(simd.get_i64(op + 104))
    q_norm, k_norm, eps = simd.get_i64(op + 112), simd.get_i64(op + 120), simd.as_f32(simd.get_i64(op + 128))
    max_rows, head_bytes, spread = simd.get_i64(op + 136), simd.get_i64(op + 144), simd.get_i64(op + 152)
    positions, segment_of = simd.get_i64(ctx + 8 * POSITIONS), simd.get_i64(ctx + 8 * SEGMENT_OF)
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL) + offset
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    rows, chunk, tile = num_rows(op, ctx), rows_chunk(op, ctx), min(block, 16)
    width, own_bytes = (ratio + 2) * heads * dim * 4, ratio * padded * Q_SIZE
    while True:
        item = next_item(op) * chunk
        if item >= rows:
            break
        row = tile_begin(item, rows, positions, segment_of, tile)
        last = tile_begin(min(item + chunk, rows), rows, positions, segment_of, tile)
        while row < last:
            count = tile_begin(row + 1, rows, positions, segment_of, tile) - row
            position = np.int64(simd.get_i32(positions + 4 * row))
            segment = np.int64(simd.get_i32(segment_of + 4 * row))
            number = np.int64(simd.get_i32(tables + segment * stride + position // block * 4))
            page, within = pool + number * block_bytes, position % block
            if count == 1:
                for h in range(heads):
                    ask_for_token(KIND, page + h * head_bytes, within, block, dim)
            write_tile(
                qkv + row * width, width, count, heads, ratio, q + row * own_bytes, padded * Q_SIZE,
                max_rows * own_bytes, page, head_bytes, within, block, work, dim, rope_dim,
                angles + position * rope_dim * 4, scale, q_norm, k_norm, eps, spread,
            )  # fmt: skip
            row += count


def variant(kind: str, q_size: int) -> Kernel:
    """The kernel for pages of a type and queries whose numbers have so many bytes."""
    name = f"{kind}_{8 * q_size}"
    bound = {"KIND": KINDS[kind], "Q_KIND": FP32 if q_size == 4 else BF16, "Q_SIZE": q_size}
    tile = _write_spread if kind in SPREAD else _write_floats
    write_tile = inline(rebound(tile, f"{tile.__name__}_{name}", **bound))
    return Kernel(f"rope_write_{name}", _rope_write, **bound, write_tile=write_tile)


_SIZES = {"fp32": (4,), "int8": (1, 2)}  # of the form that attention computes with, where it is not 2
KERNELS = {
    (kind, q_size): variant(kind, q_size)
    for kind in KINDS if kind != "int4"
    for q_size in {query_size(size) for size in _SIZES.get(kind, (2,))}
}  # fmt: skip


def kernel_of(shape: AttentionShape) -> Kernel:
    """The variant for a layer."""
    return KERNELS[shape.kind, query_size(shape.size)]


def scratch_bytes(heads: int, kv_heads: int, dim: int) -> int:
    """Per thread: a row's heads, a tile's keys and values in bytes with a row's words, and what rounding works with."""
    return (heads + 2 * kv_heads) * dim * 4 + kv_heads * (32 * dim + 8) + work_bytes(dim)


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
        kernel_of(shape).address, qkv, q.ctypes.data, shape.offset, shape.stride, shape.group, shape.kv_heads,
        shape.ratio, shape.dim, shape.padded_dim, shape.block_size, angles.shape[1], angles.ctypes.data,
        float_bits(scale), *norms, float_bits(eps), max_rows, shape.head_bytes, shape.spread,
    ]  # fmt: skip
