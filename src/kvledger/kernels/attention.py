"""Attention over paged keys and values, for any mix of prompt and decode rows.

Pages are laid out as `kv_pages.py` says. What is stored in bf16 in blocks of 16 tokens or more is an operand of the
dot product as it stands, and so are int8's levels where bytes have dot products (`attention_levels`); other types and
smaller blocks are brought into such a form first, a span at a time. Query rows of one KV head (tokens × heads that
share it) are computed together.

Keys are taken in spans of 256 at fixed positions. Each span gives (max, sum, output) from nothing, and spans are merged
in ascending order (online softmax, Milakov & Gimelshein, arXiv:1805.02867). So a row's result depends neither on the
rows beside it, nor on how the prompt was cut, nor on which thread took which span. Masked keys add exact zeros; the
pool never holds anything but finite numbers. Products of weights and samplers are unknown here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.attention_levels import (
    ask_for_words_of,
    levels_bytes,
    mix_to_floats,
    mixes_of_levels,
    queries_to_levels,
    scores_of_levels,
    tiles_of_halves,
    weights_of_levels,
    words_at,
    words_of_tiles,
)
from kvledger.kernels.attention_loops import (
    AHEAD,
    LOOPS,
    MAX_ROWS,
    SPAN,
    SPLIT_ROWS,
    TILE_SHAPES,
)
from kvledger.kernels.elementwise import POOL, TABLE_STRIDE, TABLES
from kvledger.kernels.hadamard import transform
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.kv_int4 import copy_seen_values, stage_sealed_keys, stage_sealed_values
from kvledger.kernels.kv_pages import (
    INT8,
    KINDS,
    SEALED_TOKENS,
    AttentionShape,
    page_at,
    query_size,
    stage_keys,
    stage_latent,
    stage_values,
    values_at,
)
from kvledger.kernels.matmul import NUM_THREADS, SCRATCH, SCRATCH_BYTES
from kvledger.kernels.simd import float_bits
from kvledger.kernels.softmax import NO_SCORE, softmax
from kvledger.kernels.team import next_item

# ctx words of attention
SEGMENTS, UNITS, NUM_UNITS, PARTIALS, MERGES, NUM_MERGES = 10, 11, 12, 13, 14, 15
SEGMENT_WORDS = 4  # first row, rows, position of the first row, –
UNIT_WORDS = 6  # segment, first query row within it, query rows, first span, spans, index of the first partial or −1
MERGE_WORDS = 5  # segment, first query row, query rows, index of the first partial, spans


@inline
def merge_rows(state, out, sums, parts, rows, dim, apart):  # type: ignore[no-untyped-def]
    """Merge a span's outputs, float32[rows, dim] at `parts`, into `out`: sixteen rows' factors are found at once.

    `state` and `sums`: largest scores of rows, MAX_ROWS · 4 and `apart` bytes later their sums, of all spans before and
    of this one. Where `sums` were the factors are kept meanwhile.
    """
    for r in range(0, rows * 4, 64):
        old, best = simd.load_f32(state + r), simd.load_f32(sums + r)
        new = simd.maximum(old, best)
        keep, take = simd.exp(simd.sub(old, new)), simd.exp(simd.sub(best, new))
        total = simd.mul(simd.load_f32(sums + apart + r), take)
        simd.store_f32(state + r, new)
        at = state + MAX_ROWS * 4 + r
        simd.store_f32(at, simd.fma(simd.load_f32(at), keep, total))
        simd.store_f32(sums + r, keep)
        simd.store_f32(sums + apart + r, take)
    for r in range(rows):
        keep, take = simd.splat(simd.get_f32(sums + 4 * r)), simd.splat(simd.get_f32(sums + apart + 4 * r))
        for at in range(r * dim * 4, (r + 1) * dim * 4, 64):
            part = simd.mul(simd.load_f32(parts + at), take)
            simd.store_f32(out + at, simd.fma(simd.load_f32(out + at), keep, part))


@inline
def clear_rows(state, out, rows, dim):  # type: ignore[no-untyped-def]
    """No key seen yet."""
    for r in range(0, rows * 4, 64):
        simd.store_f32(state + r, simd.splat(np.float32(NO_SCORE)))
        simd.store_f32(state + MAX_ROWS * 4 + r, simd.splat(np.float32(0)))
    for at in range(0, rows * dim * 4, 64):
        simd.store_f32(out + at, simd.splat(np.float32(0)))


@inline
def write_row(total, source, out, dim, spread):  # type: ignore[no-untyped-def]
    """out = source / the sum at `total`, transformed back where values are kept transformed."""
    inverse = simd.splat(np.float32(1) / simd.get_f32(total))
    for d in range(0, dim, 16):
        simd.store_f32(out + 4 * d, simd.mul(simd.load_f32(source + 4 * d), inverse))
    if spread > 0:
        transform(out, dim, spread)


@inline
def write_rows(state, total, rows, row, row0, heads, head, ratio, out, dim, spread):  # type: ignore[no-untyped-def]
    """The merged outputs of a segment's query rows [row0, row0 + rows) of one KV head; `row` is its first token's."""
    for r in range(rows):
        token, shared = row + (row0 + r) // ratio, (row0 + r) % ratio
        to = out + ((token * heads + head) * ratio + shared) * dim * 4
        write_row(state + (MAX_ROWS + r) * 4, total + r * dim * 4, to, dim, spread)


# ---------------------------------------------------------------------------------------------- the kernels

# names bound per variant
tiles_of: Any = None
queries_of: Any = None
scores_of: Any = None
weights_of: Any = None
mixes_of: Any = None
mix_of: Any = None
SIZE = 2  # bytes of a key's or value's number in the form that is computed with
Q_SIZE = 2  # of a query's number
P_SIZE = 2  # of a weight
IN_PLACE = True  # tiles are read where they lie in the pool
HAS_AMX = False  # scores and mixes are taken by tiles

NAMES_BYTES = 256  # room for the addresses of a span's tiles and of the first of those to be read next
assert (SPAN // 16 + 2 * AHEAD) * 8 <= NAMES_BYTES


@inline
def tiles_in_place(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged):  # type: ignore[no-untyped-def]
    """Addresses of the span's tiles of keys and values. Nothing is moved: pages are in the form already.

    `place`: block table, pool, bytes of a block, offset of the head; the same of the residual, and how many tokens are
    read sealed (0 of all that where there is none).
    """
    for t in range(first, tiles):
        at = start + t * 16
        base, within = page_at(place, at, block), at % block
        simd.put_i64(keys + 8 * t, base + within * dim * size)
        simd.put_i64(values + 8 * t, base + values_at(kind, block, dim * size) + within * vdim * size)


@inline
def tiles_of_levels(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged):  # type: ignore[no-untyped-def]
    """As `tiles_in_place`, and their words."""
    tiles_in_place(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged)
    words_of_tiles(place, first, tiles, start, block, dim, words_at(staged, dim))


@inline
def tiles_staged(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged):  # type: ignore[no-untyped-def]
    """As `tiles_in_place`, every tile brought into form at `staged`. Values that are part of a key come of it."""
    scales = staged + SPAN * (dim + vdim) * size
    latent = vdim if vdim < dim else 0
    for t in range(first, tiles):
        at = start + t * 16
        to_k, to_v = staged + t * 16 * dim * size, staged + (SPAN * dim + t * 16 * vdim) * size
        simd.put_i64(keys + 8 * t, to_k)
        simd.put_i64(values + 8 * t, to_v)
        for half in range(16 // min(16, block)):
            key = at + 8 * half if at + 8 * half < newest else at  # past the end: anything finite, it has no weight
            base = page_at(place, key, block)
            to_scales = scales + (t * 16 + half * 8) * 4
            stage_keys(kind, base, key % block, block, dim, latent, half, to_k, to_scales)
            if latent == 0:
                stage_values(kind, base, key % block, block, dim, half, to_v, to_scales + SPAN * 4)
        if latent > 0:
            stage_latent(kind, to_k, vdim, to_v)
            if kind == INT8:
                simd.store_f32(scales + (SPAN + t * 16) * 4, simd.load_f32(scales + t * 64))


@inline
def tiles_sealed(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged):  # type: ignore[no-untyped-def]
    """As `tiles_in_place`: sealed tokens are brought into form at `staged`, the residual's are in it."""
    _, pool, block_bytes, _, newest_blocks, newest_offset, sealed = place
    residual = newest_blocks, pool, block_bytes, newest_offset
    for t in range(first, tiles):
        at = start + t * 16
        to_k, to_v = staged + t * 16 * dim * size, staged + (SPAN * dim + t * 16 * vdim) * size
        if at < sealed:
            group = page_at(place, at, block) + at % block // SEALED_TOKENS * 40 * dim
            stage_sealed_keys(group, at // 16 % 2, dim, to_k)
            stage_sealed_values(group + 20 * dim, at // 16 % 2, dim, to_v)
        else:
            to_k = page_at(residual, at, block) + at % block * dim * 2
            source = to_k + block * dim * 2
            if at + 16 <= newest:
                to_v = source
            else:
                copy_seen_values(source, newest - at, dim, to_v)
        simd.put_i64(keys + 8 * t, to_k)
        simd.put_i64(values + 8 * t, to_v)


@inline
def partial_at(partials, index, dim):  # type: ignore[no-untyped-def]
    """Where a span's largest scores, sums and outputs of up to SPLIT_ROWS rows are kept for `_merge`."""
    return partials + index * SPLIT_ROWS * (dim + 16) * 4


@inline
def num_sealed(position, residual):  # type: ignore[no-untyped-def]
    """Keys that the query at `position` reads sealed: `KVStorage.num_quantised(position + 1)`."""
    if residual == 0:
        return np.int64(0)
    return max(np.int64(0), (position // SEALED_TOKENS - residual // SEALED_TOKENS + 1) * SEALED_TOKENS)


@inline
def unit_of(item, work):  # type: ignore[no-untyped-def]
    """(head, unit, segment, first row, rows, first key that a row sees, end of the keys) of an item of work."""
    heads, ratio, window, units, segments = work
    head, unit = item % heads, units + item // heads * UNIT_WORDS * 8
    segment = segments + simd.get_i64(unit) * SEGMENT_WORDS * 8
    row0, rows, position = simd.get_i64(unit + 8), simd.get_i64(unit + 16), simd.get_i64(segment + 16)
    oldest = max(0, position + row0 // ratio + 1 - window) if window > 0 else 0
    return head, unit, segment, row0, rows, oldest, position + (row0 + rows - 1) // ratio + 1


@inline
def tiles_seen(start, oldest, newest):  # type: ignore[no-untyped-def]
    """Tiles [first, end) of the span at `start` that hold keys from `oldest` to before `newest`."""
    return max(0, oldest - start) // 16, (min(SPAN, newest - start) + 15) // 16


@inline
def repeat_last(first, tiles, keys, values):  # type: ignore[no-untyped-def]
    """Behind a span's addresses the last one again: loops that ask AHEAD tiles further ask for what is there."""
    for t in range(tiles, max(tiles, first + AHEAD) + AHEAD):
        simd.put_i64(keys + 8 * t, simd.get_i64(keys + 8 * tiles - 8))
        simd.put_i64(values + 8 * t, simd.get_i64(values + 8 * tiles - 8))


@inline
def name_following(kind, size, place, start, oldest, newest, shape, first, tiles, keys, values):  # type: ignore[no-untyped-def]
    """Behind the addresses of tiles [first, tiles) those of the span at `start`, which is read next.

    `shape`: block size, dim, value dim. Where a span has few tiles, the first to be asked for is AHEAD further.
    """
    repeat_last(first, tiles, keys, values)
    block, dim, vdim = shape
    first2, tiles2 = tiles_seen(start, oldest, newest)
    behind = 8 * (max(tiles, first + AHEAD) - first2)
    end = min(tiles2, first2 + AHEAD)
    tiles_in_place(kind, size, place, first2, end, start, newest, block, dim, vdim, keys + behind, values + behind, 0)
    if kind == INT8:
        ask_for_words_of(place, first2, end, start, block, dim)


@inline
def name_item(kind, size, item, work, pages, place, shape, first, tiles, keys, values):  # type: ignore[no-untyped-def]
    """As `name_following`, of another item's first span. `pages`: tables, bytes of a table, offset, bytes of a head."""
    head, unit, _, _, _, oldest, newest = unit_of(item, work)
    tables, stride, offset, head_bytes = pages
    there = tables + simd.get_i64(unit) * stride, place[1], place[2], offset + head * head_bytes
    start = simd.get_i64(unit + 24) * SPAN
    name_following(kind, size, there + place[4:], start, oldest, newest, shape, first, tiles, keys, values)


@inline
def name_next(kind, size, span, ends, item, work, pages, place, shape, first, tiles, keys, values):  # type: ignore[no-untyped-def]
    """As `name_following`, whatever is read next: the unit's next span, else what this thread is likely to take.

    `ends`: end of the unit's spans, first key that a row sees, end of the keys, number of items, threads.
    """
    end, oldest, newest, num_items, threads = ends
    if span + 1 < end:
        name_following(kind, size, place, (span + 1) * SPAN, oldest, newest, shape, first, tiles, keys, values)
    else:
        other = min(item + threads, num_items - 1)
        name_item(kind, size, other, work, pages, place, shape, first, tiles, keys, values)


@inline
def scratch_of(thread, ctx, q_size, vdim):  # type: ignore[no-untyped-def]
    """A thread's scratch (`scratch_bytes`): scores, weights, addresses of keys' and of values' tiles; largest scores of
    rows, then their sums, of a span and of all spans so far; the output of all spans and of one; a span in form.
    """
    scores = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    p = scores + MAX_ROWS * SPAN * 4
    keys = p + MAX_ROWS * SPAN * q_size
    values = keys + NAMES_BYTES
    sums = values + NAMES_BYTES
    state = sums + MAX_ROWS * 8
    total = state + MAX_ROWS * 8
    part = total + MAX_ROWS * vdim * 4
    return scores, p, keys, values, sums, state, total, part, part + MAX_ROWS * vdim * 4


def _attention(op: int, ctx: int, thread: int) -> None:
    """Arguments: q, out, offset, bytes of a block, group, KV heads, ratio, dim, padded dim, block size, window, cap,
    rows allocated, tile configuration, kind, value dim, bytes of a head; group, offset, bytes of a head and tokens of
    the residual; transform width of values (0: none).
    """
    q, out = simd.get_i64(op + 8), simd.get_i64(op + 16)
    offset, block_bytes = simd.get_i64(op + 24), simd.get_i64(op + 32)
    table, heads, ratio = simd.get_i64(op + 40), simd.get_i64(op + 48), simd.get_i64(op + 56)
    dim, ldq, block = simd.get_i64(op + 64), simd.get_i64(op + 72) * Q_SIZE, simd.get_i64(op + 80)
    window, cap = simd.get_i64(op + 88), simd.as_f32(simd.get_i64(op + 96))
    max_rows, kind, vdim, head_bytes = (
        simd.get_i64(op + 104), simd.get_i64(op + 120), simd.get_i64(op + 128), simd.get_i64(op + 136))  # fmt: skip
    tables = simd.get_i64(ctx + 8 * (TABLES + table))
    stride = simd.get_i64(ctx + 8 * TABLE_STRIDE) * 4
    pool = simd.get_i64(ctx + 8 * POOL)
    newest_tables, newest_offset = simd.get_i64(ctx + 8 * (TABLES + simd.get_i64(op + 144))), simd.get_i64(op + 152)
    newest_head, residual, spread = simd.get_i64(op + 160), simd.get_i64(op + 168), simd.get_i64(op + 176)
    segments, units = simd.get_i64(ctx + 8 * SEGMENTS), simd.get_i64(ctx + 8 * UNITS)
    partials = simd.get_i64(ctx + 8 * PARTIALS)
    scores, p, keys, values, own_sums, state, total, own_part, staged = scratch_of(thread, ctx, Q_SIZE, vdim)
    scales = words_at(staged, dim) if SIZE == 1 else staged + SPAN * (dim + vdim) * SIZE if kind == INT8 else 0
    shape, work = (block, dim, vdim), (heads, ratio, window, units, segments)
    pages = tables, stride, offset, head_bytes
    num_items, threads = simd.get_i64(ctx + 8 * NUM_UNITS) * heads, simd.get_i64(ctx + 8 * NUM_THREADS)
    if HAS_AMX:
        simd.tile_config(simd.get_i64(op + 112))
    while True:
        item = next_item(op)
        if item >= num_items:
            break
        head, unit, segment, row0, rows, oldest, newest = unit_of(item, work)
        span0, num_spans, partial = simd.get_i64(unit + 24), simd.get_i64(unit + 32), simd.get_i64(unit + 40)
        first_row, position = simd.get_i64(segment), simd.get_i64(segment + 16)
        entry = simd.get_i64(unit) * stride
        place = (
            tables + entry, pool, block_bytes, offset + head * head_bytes,
            newest_tables + entry, newest_offset + head * newest_head, num_sealed(position + row0 // ratio, residual),
        )  # fmt: skip
        qr = q + (head * max_rows * ratio + first_row * ratio + row0) * ldq
        qr, q_bytes = queries_of(qr, ldq, rows, dim, staged)
        if partial < 0:
            clear_rows(state, total, rows, vdim)
        for span in range(span0, span0 + num_spans):
            start = span * SPAN
            sums, part, apart = own_sums, own_part, MAX_ROWS * 4
            if partial >= 0:  # kept for `_merge`
                sums = partial_at(partials, (partial + span - span0) * heads + head, vdim)
                part, apart = sums + SPLIT_ROWS * 8, SPLIT_ROWS * 4
            first, tiles = tiles_seen(start, oldest, newest)
            if first < tiles:
                tiles_of(kind, SIZE, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged)
                if IN_PLACE:
                    ends = span0 + num_spans, oldest, newest, num_items, threads
                    name_next(kind, SIZE, span, ends, item, work, pages, place, shape, first, tiles, keys, values)
                else:
                    repeat_last(first, tiles, keys, values)
                scores_of(qr, q_bytes, rows, keys, values, first, tiles, dim, scores)
            sees = position - start, row0, ratio, window
            weights_of(scores, p, rows, first, tiles, sees, cap, scales, sums, apart, P_SIZE)
            mixes_of(p + first * 16 * P_SIZE, values + first * 8, tiles - first, vdim, rows, part)
            mix_of(part, rows, vdim, scales)
            if partial < 0:
                merge_rows(state, total, sums, part, rows, vdim, apart)
        if partial < 0:
            write_rows(state, total, rows, first_row, row0, heads, head, ratio, out, vdim, spread)
    if HAS_AMX:
        simd.tile_release(0)


def _merge(op: int, ctx: int, thread: int) -> None:
    """Merge the spans of split units. Arguments: out, KV heads, ratio, dim, transform width of values."""
    out, heads, ratio, dim = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    spread = simd.get_i64(op + 40)
    segments, merges = simd.get_i64(ctx + 8 * SEGMENTS), simd.get_i64(ctx + 8 * MERGES)
    partials = simd.get_i64(ctx + 8 * PARTIALS)
    state = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    total = state + MAX_ROWS * 8
    num_items = simd.get_i64(ctx + 8 * NUM_MERGES) * heads
    while True:
        item = next_item(op)
        if item >= num_items:
            break
        head, merge = item % heads, merges + item // heads * MERGE_WORDS * 8
        first_row = simd.get_i64(segments + simd.get_i64(merge) * SEGMENT_WORDS * 8)
        row0, rows = simd.get_i64(merge + 8), simd.get_i64(merge + 16)
        partial, num_spans = simd.get_i64(merge + 24), simd.get_i64(merge + 32)
        clear_rows(state, total, rows, dim)
        for span in range(num_spans):
            sums = partial_at(partials, (partial + span) * heads + head, dim)
            merge_rows(state, total, sums, sums + SPLIT_ROWS * 8, rows, dim, SPLIT_ROWS * 4)
        write_rows(state, total, rows, first_row, row0, heads, head, ratio, out, dim, spread)


@inline
def as_they_are(q, ldq, rows, dim, staged):  # type: ignore[no-untyped-def]
    """Queries and the bytes from one to the next: they are written in the form already."""
    return q, ldq


@inline
def float_mix(part, rows, dim, scales):  # type: ignore[no-untyped-def]
    """The rows' part of the output is what it should be."""


TILES = {
    "in_place": tiles_in_place, "staged": tiles_staged, "sealed": tiles_sealed, "levels": tiles_of_levels,
    "halves": tiles_of_halves,
}  # fmt: skip
IN_LEVELS = {"queries_of": queries_to_levels, "weights_of": weights_of_levels, "mix_of": mix_to_floats}
IN_FLOATS = {"queries_of": as_they_are, "weights_of": softmax, "mix_of": float_mix}
FORMS = [(2, "in_place"), (2, "staged"), (2, "sealed"), (4, "in_place"), (4, "staged")]
FORMS += [(1, "levels"), (1, "halves")] if ISA.vnni else []


def _variant(size: int, form: str) -> Kernel:
    scores, mixes = (scores_of_levels, mixes_of_levels) if size == 1 else LOOPS[size]
    bound = {"scores_of": scores, "mixes_of": mixes, "tiles_of": TILES[form], "SIZE": size}
    bound |= IN_LEVELS if size == 1 else IN_FLOATS
    bound |= {"Q_SIZE": query_size(size), "P_SIZE": 2 if size == 1 else query_size(size)}
    bound |= {"IN_PLACE": form in ("in_place", "levels"), "HAS_AMX": ISA.amx and size == 2}
    return Kernel(f"attention_{form}_{8 * size}", _attention, **bound)


KERNELS = {key: _variant(*key) for key in FORMS}
MERGE = Kernel("attention_merge", _merge)


def scratch_bytes(dim: int, value_dim: int, size: int = 2) -> int:
    """Per thread: scores, weights, addresses, two outputs of a unit, and a span brought into form with its scales."""
    unit = MAX_ROWS * (SPAN * (4 + query_size(size)) + 16 + value_dim * 8)
    return unit + 2 * NAMES_BYTES + 64 + (levels_bytes(dim) if size == 1 else SPAN * ((dim + value_dim) * size + 8))


def attention(shape: AttentionShape, q: np.ndarray, out: int, max_rows: int) -> list[list[int]]:
    """The two ops out[row, head, value dim] = softmax(q kᵀ) v: spans, then the merge of those dealt out to threads."""
    newest = shape.newest
    residual = [0, 0, 0, 0] if newest is None else [newest.group, newest.offset, newest.head_bytes, shape.residual]
    spans = [
        kernel_of(shape).address, q.ctypes.data, out, shape.offset, shape.stride, shape.group,
        shape.kv_heads, shape.ratio, shape.dim, shape.padded_dim, shape.block_size, shape.window,
        float_bits(shape.cap), max_rows, TILE_SHAPES.ctypes.data, KINDS[shape.kind], shape.value_dim, shape.head_bytes,
        *residual, shape.spread,
    ]  # fmt: skip
    return [spans, [MERGE.address, out, shape.kv_heads, shape.ratio, shape.value_dim, shape.spread]]


def kernel_of(shape: AttentionShape) -> Kernel:
    """The variant for a layer, `MERGE` besides."""
    return KERNELS[shape.size, _form(shape)]


def _form(shape: AttentionShape) -> str:
    """How tiles of 16 keys come to be."""
    if shape.newest is not None:
        return "sealed"
    if shape.size == 1:
        return "levels" if shape.block_size >= 16 else "halves"
    as_stored = shape.kind in ("bf16", "fp32") and shape.block_size >= 16 and not shape.latent
    return "in_place" if as_stored else "staged"
