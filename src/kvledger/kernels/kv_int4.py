"""Keys and values in 4 bits: how a sealed group of 32 tokens lies in a page, sealing one, and reading it back.

KIVI (arXiv:2402.02750): keys take a scale and a zero per channel over 32 tokens, because their outliers are channels;
values per token over 32 channels. x = zero + scale · level, level 0 … 15, both numbers fp16. A token is first written
to the residual's page in bf16; the pass that writes the last token of a group *seals* the group here, for every later
reader. So a number depends on positions alone, never on how a prompt was cut.

A head of a page is its groups one after another, 40 · D bytes each:

    keys     [D][16]     a byte: tokens k and 16 + k         [D][scale, zero]
    values   [16][D]     a byte: tokens 2p and 2p + 1        [32][D/32][scale, zero]
"""

from __future__ import annotations

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.elementwise import POOL, POSITIONS, SEGMENT_OF, TABLE_STRIDE, TABLES, rows_chunk
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.kv_pages import SEALED_TOKENS, AttentionShape
from kvledger.kernels.matmul import num_rows
from kvledger.kernels.team import next_item

TOP = np.float32(15)


# ---------------------------------------------------------------------------------------------- sealing


@inline
def fit_levels(a, b, to):  # type: ignore[no-untyped-def]
    """Write scale and zero of 32 numbers to `to`."""
    low = simd.reduce_min(simd.minimum(a, b))
    high = simd.reduce_max(simd.maximum(a, b))
    simd.put_f16(to + 2, low)
    simd.put_f16(to, (high - simd.get_f16(to + 2)) / TOP)


@inline
def to_levels(x, at):  # type: ignore[no-untyped-def]
    """16 numbers → levels under the scale and zero at `at`."""
    scale = simd.get_f16(at)
    inverse = simd.splat(np.float32(1) / scale if scale > np.float32(0) else np.float32(0))
    level = simd.mul(simd.sub(x, simd.splat(simd.get_f16(at + 2))), inverse)
    return simd.round_i32(simd.minimum(simd.maximum(level, simd.splat(np.float32(0))), simd.splat(TOP)))


@inline
def store_nibbles(to, low, high):  # type: ignore[no-untyped-def]
    """16 bytes of two levels each."""
    simd.store_i8(to, simd.add_i32(low, simd.shl_i32(high, simd.splat_i32(np.int32(4)))))


@inline
def seal_keys(source, to, dim):  # type: ignore[no-untyped-def]
    """32 tokens' keys from a bf16 page (two tiles) → a group at `to`."""
    for pair in range(dim // 2):
        first, second = simd.load_i32(source + pair * 64), simd.load_i32(source + (dim // 2 + pair) * 64)
        levels, scales = to + pair * 32, to + 16 * dim + pair * 8
        a, b = simd.low_bf16(first), simd.low_bf16(second)
        fit_levels(a, b, scales)
        store_nibbles(levels, to_levels(a, scales), to_levels(b, scales))
        a, b = simd.high_bf16(first), simd.high_bf16(second)
        fit_levels(a, b, scales + 4)
        store_nibbles(levels + 16, to_levels(a, scales + 4), to_levels(b, scales + 4))


@inline
def seal_values(source, to, dim):  # type: ignore[no-untyped-def]
    """32 tokens' values from a bf16 page → the group's values at `to`."""
    runs = dim // 32
    for pair in range(16):
        for run in range(runs):
            at = source + (pair * dim + run * 32) * 4
            first, second = simd.load_i32(at), simd.load_i32(at + 64)
            even = to + 16 * dim + (2 * pair * runs + run) * 4
            odd = even + runs * 4
            fit_levels(simd.low_bf16(first), simd.low_bf16(second), even)
            fit_levels(simd.high_bf16(first), simd.high_bf16(second), odd)
            levels = to + pair * dim + run * 32
            store_nibbles(levels, to_levels(simd.low_bf16(first), even), to_levels(simd.high_bf16(first), odd))
            store_nibbles(levels + 16, to_levels(simd.low_bf16(second), even), to_levels(simd.high_bf16(second), odd))


def _seal(op: int, ctx: int, thread: int) -> None:
    """Arguments: group and offset of the residual, bytes of its heads; group, offset and bytes of heads of the sealed
    pages; KV heads, dim, block size, bytes of a block.
    """
    old_table, old_offset, old_head = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24)
    new_table, new_offset, new_head = simd.get_i64(op + 32), simd.get_i64(op + 40), simd.get_i64(op + 48)
    heads, dim = simd.get_i64(op + 56), simd.get_i64(op + 64)
    block, block_bytes = simd.get_i64(op + 72), simd.get_i64(op + 80)
    positions, segment_of = simd.get_i64(ctx + 8 * POSITIONS), simd.get_i64(ctx + 8 * SEGMENT_OF)
    old_tables, new_tables = simd.get_i64(ctx + 8 * (TABLES + old_table)), simd.get_i64(ctx + 8 * (TABLES + new_table))
    stride, pool = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4, simd.get_i64(ctx + 8 * POOL)
    rows, chunk = num_rows(op, ctx), rows_chunk(op, ctx)
    while True:
        first = next_item(op) * chunk
        if first >= rows:
            break
        for row in range(first, min(first + chunk, rows)):
            position = np.int64(simd.get_i32(positions + 4 * row))
            if position % SEALED_TOKENS != SEALED_TOKENS - 1:
                continue
            entry = np.int64(simd.get_i32(segment_of + 4 * row)) * stride + position // block * 4
            within = position % block // SEALED_TOKENS * SEALED_TOKENS
            source = pool + np.int64(simd.get_i32(old_tables + entry)) * block_bytes + old_offset + within * dim * 2
            to = pool + np.int64(simd.get_i32(new_tables + entry)) * block_bytes + new_offset
            to += within // SEALED_TOKENS * 40 * dim
            for h in range(heads):
                seal_keys(source + h * old_head, to + h * new_head, dim)
                seal_values(source + h * old_head + block * dim * 2, to + h * new_head + 20 * dim, dim)


SEAL = Kernel("seal", _seal)


def seal(shape: AttentionShape) -> list[int]:
    """The op that seals each group of 32 tokens whose last token is among the rows; they lie in bf16 already."""
    newest = shape.newest
    assert newest is not None
    return [
        SEAL.address, newest.group, newest.offset, newest.head_bytes, shape.group, shape.offset, shape.head_bytes,
        shape.kv_heads, shape.dim, shape.block_size, shape.stride,
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- reading


@inline
def from_levels(level, at):  # type: ignore[no-untyped-def]
    """zero + scale · level."""
    return simd.fma(simd.to_f32(level), simd.splat(simd.get_f16(at)), simd.splat(simd.get_f16(at + 2)))


@inline
def load_low(at):  # type: ignore[no-untyped-def]
    """16 levels from the lower halves of bytes."""
    both, four = simd.load_u8(at), simd.splat_i32(np.int32(4))
    return simd.sub_i32(both, simd.shl_i32(simd.sra_i32(both, four), four))


@inline
def load_high(at):  # type: ignore[no-untyped-def]
    """16 levels from the upper halves of bytes."""
    return simd.sra_i32(simd.load_u8(at), simd.splat_i32(np.int32(4)))


@inline
def stage_sealed_keys(group, half, dim, out):  # type: ignore[no-untyped-def]
    """The group's tile of keys (`half` 1: its later 16 tokens) → [D/2][16][2] bf16."""
    for pair in range(dim // 2):
        levels, scales = group + pair * 32, group + 16 * dim + pair * 8
        if half == 0:
            even, odd = load_low(levels), load_low(levels + 16)
        else:
            even, odd = load_high(levels), load_high(levels + 16)
        simd.store_bf16_pairs(out + pair * 64, from_levels(even, scales), from_levels(odd, scales + 4))


@inline
def stage_sealed_values(values, half, dim, out):  # type: ignore[no-untyped-def]
    """The tile of values of a group whose values begin at `values` → [8][D][2] bf16."""
    runs = dim // 32
    for pair in range(8):
        for d in range(0, dim, 16):
            levels = values + (half * 8 + pair) * dim + d
            even = values + 16 * dim + (2 * (half * 8 + pair) * runs + d // 32) * 4
            x, y = from_levels(load_low(levels), even), from_levels(load_high(levels), even + runs * 4)
            simd.store_bf16_pairs(out + (pair * dim + d) * 4, x, y)


@inline
def copy_seen_values(source, count, dim, out):  # type: ignore[no-untyped-def]
    """A tile of bf16 values, zero from key `count` on: a block may hold another group's bytes, which are no numbers."""
    nothing = simd.splat(np.float32(0))
    for pair in range(8):
        for d in range(0, dim, 16):
            at, to = source + (pair * dim + d) * 4, out + (pair * dim + d) * 4
            if 2 * pair + 1 < count:
                simd.store_f32(to, simd.load_f32(at))
            elif 2 * pair < count:
                simd.store_bf16_pairs(to, simd.low_bf16(simd.load_i32(at)), nothing)
            else:
                simd.store_f32(to, nothing)
