"""Attention over paged keys and values, for any mix of prompt and decode rows; and the KV write that precedes it.

A page holds one layer's part of a block. Per KV head it keeps the keys, in tiles of 16 tokens laid out as pairs of
channels ([D/2][16][2]), then the values as pairs of tokens ([tokens/2][D][2]): both are operands of a bf16 dot product
as they stand. Query rows of one KV head (tokens × heads that share it) are computed together.

Keys are taken in spans of 256 at fixed positions. Each span gives (max, sum, output) from nothing, and spans are merged
in ascending order (online softmax, Milakov & Gimelshein, arXiv:1805.02867). So a row's result depends neither on the
rows beside it, nor on how the prompt was cut, nor on which thread took which span. Masked keys add exact zeros; the
pool never holds anything but finite numbers. Products of weights and samplers are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.elementwise import (
    BF16_MAX,
    NUM_BLOCKS,
    POOL,
    POSITIONS,
    SEGMENT_OF,
    TABLE_STRIDE,
    TABLES,
    inverse_rms,
    rows_chunk,
    tanh,
)  # fmt: skip
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import SCRATCH, SCRATCH_BYTES
from kvledger.kernels.simd import I32, I64, VF32, VI32, Emit, Val, emitted, float_bits
from kvledger.kernels.team import next_item

SPAN = 256  # keys per span
MAX_ROWS = 64  # query rows per unit of work
SPLIT_ROWS = 16  # most query rows of a unit whose spans are dealt out to threads
NO_SCORE = -1e30  # running maximum before any key
MASKED = -3e38  # score of a key that a row may not see: e^(MASKED − anything) is 0

# ctx words of attention
SEGMENTS, UNITS, NUM_UNITS, PARTIALS, MERGES, NUM_MERGES = 10, 11, 12, 13, 14, 15
SEGMENT_WORDS = 4  # first row, rows, position of the first row, –
UNIT_WORDS = 6  # segment, first query row within it, query rows, first span, spans, index of the first partial or −1
MERGE_WORDS = 5  # segment, first query row, query rows, index of the first partial, spans


# ---------------------------------------------------------------------------------------------- inner loops


def _scores_rows(rows: int) -> Any:
    """Scores of `rows` query rows against one tile of 16 keys."""

    def emit(e: Emit, q: Val, ldq: Val, keys: Val, pairs: Val, out: Val) -> None:
        sums = [e.var(e.const(VF32, 0.0)) for _ in range(rows)]
        with e.loop(pairs) as p:
            k = e.load(VI32, keys + p * 64)
            for r in range(rows):
                sums[r].set(e.dot_bf16(sums[r].get(), k, e.load_splat(I32, q + ldq * r + p * 4)))
        for r in range(rows):
            e.store(sums[r].get(), out, r * SPAN * 4)

    return emitted(types.void, [types.int64] * 5, emit)


def _mix_rows(rows: int, width: int) -> Any:
    """out[rows, 16·width] = P · V over `tiles` tiles of 16 keys whose values lie at `addresses`."""

    def emit(e: Emit, p: Val, addresses: Val, tiles: Val, offset: Val, ldv: Val, out: Val, ldo: Val) -> None:
        sums = [[e.var(e.const(VF32, 0.0)) for _ in range(width)] for _ in range(rows)]
        with e.loop(tiles) as t:
            values = e.load(I64, addresses + t * 8) + offset
            for pair in range(8):
                v = [e.load(VI32, values + ldv * pair, c * 64) for c in range(width)]
                for r in range(rows):
                    weight = e.load_splat(I32, p + t * 32, r * SPAN * 2 + pair * 4)
                    for c in range(width):
                        sums[r][c].set(e.dot_bf16(sums[r][c].get(), v[c], weight))
        for r in range(rows):
            for c in range(width):
                e.store(sums[r][c].get(), out + ldo * r, c * 64)

    return emitted(types.void, [types.int64] * 7, emit)


def _scores_amx(e: Emit, q: Val, ldq: Val, keys: Val, blocks: Val, out: Val) -> None:
    """Scores of 16 query rows against one tile of 16 keys, 32 channels at a time."""
    e.tile_zero(0)
    with e.loop(blocks) as d:
        e.tile_load(4, q + d * 64, ldq)
        e.tile_load(5, keys + d * 1024, e.i64(64))
        e.tile_dot("bf16ps", 0, 4, 5)
    e.tile_store(0, out, e.i64(SPAN * 4))


def _mix_amx(width: int) -> Any:
    """As `_mix_rows` for 16 rows."""

    def emit(e: Emit, p: Val, addresses: Val, tiles: Val, offset: Val, ldv: Val, out: Val, ldo: Val) -> None:
        for c in range(width):
            e.tile_zero(c)
        with e.loop(tiles) as t:
            values = e.load(I64, addresses + t * 8) + offset
            e.tile_load(6, p + t * 32, e.i64(SPAN * 2))
            for c in range(width):
                e.tile_load(7, values + c * 64, ldv)
                e.tile_dot("bf16ps", c, 6, 7)
        for c in range(width):
            e.tile_store(c, out + c * 64, ldo)

    return emitted(types.void, [types.int64] * 7, emit)


def _config() -> np.ndarray:
    """AMX tiles: 0–3 results, 4 queries, 5 keys, 6 weights of 16 keys, 7 values of 16 keys."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (rows, row_bytes) in enumerate([(16, 64)] * 6 + [(16, 32), (8, 64)]):
        config[48 + tile], config[16 + 2 * tile] = rows, row_bytes
    return config


TILE_SHAPES = _config()
HAS_AMX = ISA.amx
if ISA.amx:
    scores_amx = emitted(types.void, [types.int64] * 5, _scores_amx)
    mix_amx4, mix_amx1 = _mix_amx(4), _mix_amx(1)
else:
    scores_amx = emitted(types.void, [types.int64] * 5, lambda e, *args: None)
    mix_amx4 = mix_amx1 = emitted(types.void, [types.int64] * 7, lambda e, *args: None)
scores8, scores4, scores1 = _scores_rows(8), _scores_rows(4), _scores_rows(1)
mix4x4, mix4x1, mix1x4, mix1x1 = _mix_rows(4, 4), _mix_rows(4, 1), _mix_rows(1, 4), _mix_rows(1, 1)


def _prefetch(e: Emit, address: Val, lines: Val) -> None:
    with e.loop(lines) as i:
        e.prefetch(address + i * 64, 0)


prefetch = emitted(types.void, [types.int64] * 2, _prefetch)


@inline
def ask_ahead(keys, values, first, t, tiles, dim):  # type: ignore[no-untyped-def]
    """Few rows read keys and values once, at the memory's speed: ask for keys two tiles ahead, and for values now."""
    lines = dim // 2
    if t == first:
        for i in range(first, min(first + 2, tiles)):
            prefetch(simd.get_i64(keys + 8 * i), lines)
    if t + 2 < tiles:
        prefetch(simd.get_i64(keys + 8 * t + 16), lines)
    prefetch(simd.get_i64(values + 8 * t), lines)


@inline
def all_scores(q, ldq, rows, keys, values, first, tiles, dim, out):  # type: ignore[no-untyped-def]
    """Scores of all rows against tiles [first, tiles) of a span."""
    for t in range(first, tiles):
        address = simd.get_i64(keys + 8 * t)
        if rows <= SPLIT_ROWS:
            ask_ahead(keys, values, first, t, tiles, dim)
        r = 0
        if HAS_AMX:
            while r < rows:
                scores_amx(q + r * ldq, ldq, address, (dim + 31) // 32, out + (r * SPAN + t * 16) * 4)
                r += 16
        while rows - r >= 8:
            scores8(q + r * ldq, ldq, address, dim // 2, out + (r * SPAN + t * 16) * 4)
            r += 8
        while rows - r >= 4:
            scores4(q + r * ldq, ldq, address, dim // 2, out + (r * SPAN + t * 16) * 4)
            r += 4
        while rows - r >= 1:
            scores1(q + r * ldq, ldq, address, dim // 2, out + (r * SPAN + t * 16) * 4)
            r += 1


@inline
def all_mixes(p, values, tiles, dim, rows, out):  # type: ignore[no-untyped-def]
    """out[rows, dim] = P · V over the span's tiles."""
    ldo, ldv = dim * 4, dim * 4
    d = 0
    while d < dim:
        wide = dim - d >= 64
        r = 0
        if HAS_AMX:
            while r < rows:
                if wide:
                    mix_amx4(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
                else:
                    mix_amx1(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
                r += 16
        while rows - r >= 4:
            if wide:
                mix4x4(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            else:
                mix4x1(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            r += 4
        while rows - r >= 1:
            if wide:
                mix1x4(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            else:
                mix1x1(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            r += 1
        d += 64 if wide else 16


@inline
def softmax_row(scores, p, first, tiles, low, high, cap):  # type: ignore[no-untyped-def]
    """Weights of one row over tiles [first, tiles): keys [low, high) of the span count. Returns (max, sum).

    Scores become e^(score − max), stored as bf16; the sum is taken before rounding.
    """
    masked = simd.splat(np.float32(MASKED))
    top = masked
    for t in range(first, tiles):
        s = simd.load_f32(scores + t * 64)
        if cap > np.float32(0):
            limit = simd.splat(cap)
            s = simd.mul(tanh(simd.div(s, limit)), limit)
        if t * 16 + 16 > high:
            s = simd.below(s, np.int32(high - t * 16), masked)
        if t * 16 < low:
            s = simd.below(masked, np.int32(low - t * 16), s)
        simd.store_f32(scores + t * 64, s)
        top = simd.maximum(top, s)
    best = max(simd.reduce_max(top), np.float32(NO_SCORE))
    base, total = simd.splat(best), simd.splat(np.float32(0))
    for t in range(first, tiles):
        weight = simd.exp(simd.sub(simd.load_f32(scores + t * 64), base))
        simd.store_bf16(p + t * 32, weight)
        total = simd.add(total, weight)
    return best, simd.reduce_add(total)


@inline
def merge_row(state, out, best, total, part, dim):  # type: ignore[no-untyped-def]
    """Merge a span's (best, total, part[dim]) into a row's running (max, sum) at `state` and out[dim]."""
    old = simd.get_f32(state)
    new = max(old, best)
    keep, take = simd.exp(simd.splat(old - new)), simd.exp(simd.splat(best - new))
    simd.put_f32(state, new)
    sums = simd.fma(simd.splat(simd.get_f32(state + 4)), keep, simd.mul(simd.splat(total), take))
    simd.put_f32(state + 4, simd.reduce_max(sums))
    for d in range(0, dim, 16):
        part_v = simd.mul(simd.load_f32(part + 4 * d), take)
        simd.store_f32(out + 4 * d, simd.fma(simd.load_f32(out + 4 * d), keep, part_v))


@inline
def clear_row(state, out, dim):  # type: ignore[no-untyped-def]
    """No key seen yet."""
    simd.put_f32(state, np.float32(NO_SCORE))
    simd.put_f32(state + 4, np.float32(0))
    for d in range(0, dim, 16):
        simd.store_f32(out + 4 * d, simd.splat(np.float32(0)))


@inline
def write_row(state, source, out, dim):  # type: ignore[no-untyped-def]
    """out = source / sum."""
    inverse = simd.splat(np.float32(1) / simd.get_f32(state + 4))
    for d in range(0, dim, 16):
        simd.store_f32(out + 4 * d, simd.mul(simd.load_f32(source + 4 * d), inverse))


# ---------------------------------------------------------------------------------------------- the kernels


def _attention(op: int, ctx: int, thread: int) -> None:
    """Arguments: q, out, slot offset, page bytes, group, KV heads, ratio, dim, padded dim, block size, window, cap,
    rows allocated, tile configuration.
    """
    q, out, slot, page = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    table, heads, ratio = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    dim, ldq, block = simd.get_i64(op + 64), simd.get_i64(op + 72) * 2, simd.get_i64(op + 80)
    window, cap = simd.get_i64(op + 88), simd.as_f32(simd.get_i64(op + 96))
    max_rows = simd.get_i64(op + 104)
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL) + slot * simd.get_i64(ctx + 8 * NUM_BLOCKS) * page
    segments, units = simd.get_i64(ctx + 8 * SEGMENTS), simd.get_i64(ctx + 8 * UNITS)
    partials = simd.get_i64(ctx + 8 * PARTIALS)
    scores = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    p = scores + MAX_ROWS * SPAN * 4
    keys, values = p + MAX_ROWS * SPAN * 2, p + MAX_ROWS * SPAN * 2 + 256
    state = values + 256  # (max, sum) per row
    total = state + MAX_ROWS * 8
    part = total + MAX_ROWS * dim * 4
    num_items = simd.get_i64(ctx + 8 * NUM_UNITS) * heads
    head_bytes = block * dim * 4
    if HAS_AMX:
        simd.tile_config(simd.get_i64(op + 112))
    while True:
        item = next_item(op)
        if item >= num_items:
            break
        head, unit = item % heads, units + item // heads * UNIT_WORDS * 8
        segment = segments + simd.get_i64(unit) * SEGMENT_WORDS * 8
        row0, rows = simd.get_i64(unit + 8), simd.get_i64(unit + 16)
        span0, num_spans, partial = simd.get_i64(unit + 24), simd.get_i64(unit + 32), simd.get_i64(unit + 40)
        first_row, position = simd.get_i64(segment), simd.get_i64(segment + 16)
        blocks = tables + simd.get_i64(unit) * stride
        qr = q + (head * max_rows * ratio + first_row * ratio + row0) * ldq
        oldest = 0
        if window > 0:
            oldest = max(0, position + row0 // ratio + 1 - window)
        newest = position + (row0 + rows - 1) // ratio + 1
        if partial < 0:
            for r in range(rows):
                clear_row(state + r * 8, total + r * dim * 4, dim)
        for span in range(span0, span0 + num_spans):
            start = span * SPAN
            tiles = (min(SPAN, newest - start) + 15) // 16
            first = max(0, oldest - start) // 16
            for t in range(first, tiles):
                at = start + t * 16
                base = pool + np.int64(simd.get_i32(blocks + at // block * 4)) * page + head * head_bytes
                simd.put_i64(keys + 8 * t, base + at % block * dim * 2)
                simd.put_i64(values + 8 * t, base + block * dim * 2 + at % block * dim * 2)
            all_scores(qr, ldq, rows, keys, values, first, tiles, dim, scores)
            for r in range(rows):
                seen = position + (row0 + r) // ratio + 1
                low = max(0, seen - window - start) if window > 0 else 0
                best, weight = softmax_row(
                    scores + r * SPAN * 4, p + r * SPAN * 2, first, tiles, low, seen - start, cap
                )
                simd.put_f32(scores + r * SPAN * 4, best)  # the row's scores have served
                simd.put_f32(scores + r * SPAN * 4 + 4, weight)
            all_mixes(p + first * 32, values + first * 8, tiles - first, dim, rows, part)
            for r in range(rows):
                best, weight = simd.get_f32(scores + r * SPAN * 4), simd.get_f32(scores + r * SPAN * 4 + 4)
                if partial < 0:
                    merge_row(state + r * 8, total + r * dim * 4, best, weight, part + r * dim * 4, dim)
                else:
                    slot_at = partials + (((partial + span - span0) * heads + head) * SPLIT_ROWS + r) * (dim + 16) * 4
                    simd.put_f32(slot_at, best)
                    simd.put_f32(slot_at + 4, weight)
                    for d in range(0, dim, 16):
                        simd.store_f32(slot_at + 64 + d * 4, simd.load_f32(part + (r * dim + d) * 4))
        if partial < 0:
            for r in range(rows):
                row = first_row + (row0 + r) // ratio
                to = out + ((row * heads + head) * ratio + (row0 + r) % ratio) * dim * 4
                write_row(state + r * 8, total + r * dim * 4, to, dim)
    if HAS_AMX:
        simd.tile_release(0)


def _merge(op: int, ctx: int, thread: int) -> None:
    """Merge the spans of split units. Arguments: out, KV heads, ratio, dim."""
    out, heads, ratio, dim = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    segments, merges = simd.get_i64(ctx + 8 * SEGMENTS), simd.get_i64(ctx + 8 * MERGES)
    partials = simd.get_i64(ctx + 8 * PARTIALS)
    state = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    num_items = simd.get_i64(ctx + 8 * NUM_MERGES) * heads
    while True:
        item = next_item(op)
        if item >= num_items:
            break
        head, merge = item % heads, merges + item // heads * MERGE_WORDS * 8
        first_row = simd.get_i64(segments + simd.get_i64(merge) * SEGMENT_WORDS * 8)
        row0, rows = simd.get_i64(merge + 8), simd.get_i64(merge + 16)
        partial, num_spans = simd.get_i64(merge + 24), simd.get_i64(merge + 32)
        for r in range(rows):
            clear_row(state, state + 64, dim)
            for span in range(num_spans):
                at = partials + (((partial + span) * heads + head) * SPLIT_ROWS + r) * (dim + 16) * 4
                merge_row(state, state + 64, simd.get_f32(at), simd.get_f32(at + 4), at + 64, dim)
            row = first_row + (row0 + r) // ratio
            to = out + ((row * heads + head) * ratio + (row0 + r) % ratio) * dim * 4
            write_row(state, state + 64, to, dim)


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
def to_bf16(source, target, dim):  # type: ignore[no-untyped-def]
    """dim float32 → bf16, cut to finite numbers: a block outlives its sequence, and 0 · NaN is not 0."""
    top, bottom = simd.splat(np.float32(BF16_MAX)), simd.splat(np.float32(-BF16_MAX))
    for d in range(0, dim, 16):
        v = simd.load_f32(source + 4 * d)
        simd.store_bf16(target + 2 * d, simd.minimum(simd.maximum(v, bottom), top))


def _rope_write(op: int, ctx: int, thread: int) -> None:
    """Arguments: qkv, q, slot, page bytes, group, KV heads, ratio, dim, padded dim, block size, rope dim, angles,
    scale, query norm, key norm, eps, rows allocated.
    """
    qkv, q, slot, page = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    table, heads, ratio = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    dim, padded, block = simd.get_i64(op + 64), simd.get_i64(op + 72), simd.get_i64(op + 80)
    rope_dim, angles, scale = simd.get_i64(op + 88), simd.get_i64(op + 96), simd.as_f32(simd.get_i64(op + 104))
    q_norm, k_norm, eps = simd.get_i64(op + 112), simd.get_i64(op + 120), simd.as_f32(simd.get_i64(op + 128))
    max_rows = simd.get_i64(op + 136)
    positions, segment_of = simd.get_i64(ctx + 8 * POSITIONS), simd.get_i64(ctx + 8 * SEGMENT_OF)
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL) + slot * simd.get_i64(ctx + 8 * NUM_BLOCKS) * page
    work = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    half = work + dim * 4
    rows, chunk = simd.get_i64(ctx), rows_chunk(ctx)
    width = (ratio + 2) * heads * dim * 4
    one = np.float32(1)
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
                to = q + ((h // ratio * max_rows + row) * ratio + h % ratio) * padded * 2
                to_bf16(work, to, dim)
                source += dim * 4
            within = position % block
            tile = min(block, 16)
            for h in range(heads):
                to = pool + number * page + h * block * dim * 4
                rotate(source, work, dim, rope_dim, at, k_norm, eps, one)
                to_bf16(work, half, dim)
                to_k = to + within // tile * tile * dim * 2 + within % tile * 4
                for d in range(dim // 2):
                    simd.put_i32(to_k + d * tile * 4, simd.get_i32(half + 4 * d))
                to_bf16(source + heads * dim * 4, half, dim)
                to_v = to + block * dim * 2 + within // 2 * dim * 4 + within % 2 * 2
                for d in range(dim):
                    simd.put_u16(to_v + d * 4, simd.get_u16(half + 2 * d))
                source += dim * 4


ATTENTION = Kernel("attention", _attention)
MERGE = Kernel("attention_merge", _merge)
ROPE_WRITE = Kernel("rope_write", _rope_write)


def scratch_bytes(dim: int) -> int:
    """Per thread: scores, weights, addresses, and two outputs of a unit."""
    return MAX_ROWS * (SPAN * 6 + 8 + dim * 8) + 512 + 64


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention. `slot` and `group` place it in the pool; `window` 0: all keys; `cap` 0: none."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    page_bytes: int
    group: int
    slot: int
    window: int = 0
    cap: float = 0.0

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_dim(self) -> int:
        """Channels of a query row: whole AMX tiles of 32."""
        return -(-self.dim // 32) * 32


def rope_write(shape: AttentionShape, qkv: int, q: np.ndarray, angles: np.ndarray, scale: float, max_rows: int,
               q_norm: np.ndarray | None = None, k_norm: np.ndarray | None = None, eps: float = 0.0) -> list[int]:  # fmt: skip
    """The op that rotates queries (× scale, into `q`) and keys, and writes keys and values to their pages.

    qkv: float32[rows, (heads + 2 KV heads) · dim]; q: uint16[KV heads, max_rows · ratio, padded dim];
    angles: float32[positions, rope dim], cosines then sines.
    """
    norms = [0 if n is None else n.ctypes.data for n in (q_norm, k_norm)]
    return [
        ROPE_WRITE.address, qkv, q.ctypes.data, shape.slot, shape.page_bytes, shape.group, shape.kv_heads, shape.ratio,
        shape.dim, shape.padded_dim, shape.block_size, angles.shape[1], angles.ctypes.data, float_bits(scale), *norms,
        float_bits(eps), max_rows,
    ]  # fmt: skip


def attention(shape: AttentionShape, q: np.ndarray, out: int, max_rows: int) -> list[list[int]]:
    """The two ops out[row, head, dim] = softmax(q kᵀ) v: spans, then the merge of those dealt out to threads."""
    spans = [
        ATTENTION.address, q.ctypes.data, out, shape.slot, shape.page_bytes, shape.group, shape.kv_heads, shape.ratio,
        shape.dim, shape.padded_dim, shape.block_size, shape.window, float_bits(shape.cap), max_rows,
        TILE_SHAPES.ctypes.data,
    ]  # fmt: skip
    return [spans, [MERGE.address, out, shape.kv_heads, shape.ratio, shape.dim]]
