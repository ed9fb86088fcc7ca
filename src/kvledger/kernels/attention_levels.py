"""Attention over int8 pages in integers: queries and weights become levels too, and VNNI multiplies bytes by bytes.

A key is scale · (level − zero). A query is cut to step · (128 · high + low), two signed bytes per channel; so are a
span's weights, each times the scale of its value. Scores and mixes are then sums of integers, exact in 32 bits, and the
zeros come off at the end: Σ q · (level − zero) = Σ q · level − zero · Σ q. That is 15 bits for queries and 14 for
weights, where bfloat16 has 8; and pages are read as they lie, while bfloat16 had to be made of them first.

Knows pages of int8 and what a span needs of them, no units of work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.attention_loops import AHEAD, MAX_ROWS, SPAN, bound_mixes, bound_scores
from kvledger.kernels.emit import I8, I16, I32, I64, VI32, Emit, Val, vec
from kvledger.kernels.jit import inline
from kvledger.kernels.kv_pages import INT8, ZERO_BITS, as_scale, page_at, values_at
from kvledger.kernels.packed import MAX_LEVEL, TERM_BITS
from kvledger.kernels.simd import emitted
from kvledger.kernels.softmax import softmax

MOST, LOW_BITS = MAX_LEVEL["int8x2"], TERM_BITS["int8x2"]
_PAIRS = vec(I16, 32)  # of neighbouring bytes
_HALF = vec(I16, 16)

# What a thread keeps for a span, behind the pages of blocks too small to be read in place: queries, then words
_SCALES, _ZEROS = 0, SPAN * 4  # of keys; those of values are _VALUES further
_VALUES = SPAN * 8
_ROWS = SPAN * 16  # for each row a query's step and Σ, and a span's weights' step and Σ weight · zero
ROW_BYTES = 16
_MIX = 8  # from a row's query to its weights


@inline
def queries_at(staged, dim):  # type: ignore[no-untyped-def]
    """Where a unit's queries lie: 2 · dim bytes each."""
    return staged + SPAN * 2 * dim


@inline
def words_at(staged, dim):  # type: ignore[no-untyped-def]
    """Where a span's scales and zeros lie, and then what is known of each row."""
    return queries_at(staged, dim) + MAX_ROWS * 2 * dim


def levels_bytes(dim: int) -> int:
    """Bytes that a thread needs for a span and a unit's queries."""
    return SPAN * 2 * dim + MAX_ROWS * 2 * dim + _ROWS + MAX_ROWS * ROW_BYTES


def _terms(e: Emit, address: Val, level: Val) -> None:
    """16 levels → of each four their high bytes, then their low ones."""
    high = (level + (1 << LOW_BITS >> 1)).sra(LOW_BITS)
    terms = [Val(e, e.b.trunc(term.v, vec(I8))) for term in (high, level - (high << LOW_BITS))]
    highs, lows = (e.bitcast(term, vec(I32, 4)) for term in terms)
    e.store(e.shuffle(highs, lows, [i // 2 + i % 2 * 4 for i in range(8)]), address)


def _split(e: Emit, words: Val, scales: Val) -> None:
    """16 words of int8's → scales, and the zeros where they belong."""
    word = e.load(VI32, words)
    zero = word & ((1 << ZERO_BITS) - 1)
    e.store(word - zero, scales)
    e.store(zero, scales, _ZEROS - _SCALES)


store_terms = emitted(types.void, [types.int64, simd.i32x16], _terms)
split_words = emitted(types.void, [types.int64] * 2, _split)
copy_16 = emitted(types.void, [types.int64] * 2, lambda e, to, x: e.store(e.load(vec(I8), x), to))


# ---------------------------------------------------------------------------------------------- loops


def _in_fours(e: Emit, a: Val, b: Val, first: int = 0) -> Val:
    """Sixteen pairs of bytes of a, from `first` on, each beside b's."""
    count = a.v.type.count
    return e.bitcast(e.shuffle(a, b, [first + i // 2 + i % 2 * count for i in range(32)]), VI32)


def _scores(rows: int, *, asks: bool = True) -> Any:
    """Scores of `rows` rows of levels against one tile of 16 keys, as integers. Arguments as of the other forms'."""

    def emit(e: Emit, q: Val, ldq: Val, keys: Val, pairs: Val, out: Val, ahead: Val) -> None:
        sums = [[e.var(e.const(VI32, 0)) for _ in range(2)] for _ in range(rows)]
        with e.loop(pairs.sra(1)) as four:
            if asks:
                e.prefetch(ahead + four * 64, 0, locality=2)
            low, high = e.load(_HALF, keys + four * 64), e.load(_HALF, keys + four * 64, 32)
            key = _in_fours(e, low, high)
            for r in range(rows):
                for term in range(2):
                    word = e.load_splat(I32, q + ldq * r + four * 8, 4 * term)
                    sums[r][term].set(e.dot_u8s8(sums[r][term].get(), key, word))
        for r in range(rows):
            e.store(_joined(sums[r]), out, r * SPAN * 4)

    return emitted(types.void, [types.int64] * 6, emit)


def _joined(terms: list[Any]) -> Val:
    high, low = (term.get() for term in terms)
    joined: Val = (high << LOW_BITS) + low
    return joined


def _columns(e: Emit, values: Val, apart: Val, width: int) -> list[Val]:
    """16 · width channels of four tokens, whose two pairs lie `apart`."""
    if width == 1:
        return [_in_fours(e, e.load(_HALF, values), e.load(_HALF, values + apart))]
    found = []
    for line in range(0, 32 * width, 64):
        a, b = e.load(_PAIRS, values, line), e.load(_PAIRS, values + apart, line)
        found += [_in_fours(e, a, b, first) for first in (0, 16)]
    return found


def _mix(rows: int, width: int) -> Any:
    """Sums of weights times values over tiles of 16 keys, as integers. Arguments as of the other forms', whose values
    are twice as large.
    """

    def emit(e: Emit, p: Val, addresses: Val, tiles: Val, offset: Val, ldv: Val, out: Val, ldo: Val) -> None:
        sums = [[[e.var(e.const(VI32, 0)) for _ in range(2)] for _ in range(width)] for _ in range(rows)]
        offset, ldv = offset.sra(1), ldv.sra(1)
        with e.loop(tiles) as t:
            values, ahead = (e.load(I64, addresses + t * 8, 8 * tile) + offset for tile in (0, AHEAD))
            for four in range(4):
                for pair in (2 * four, 2 * four + 1):
                    for line in range(0, 32 * width, 64):
                        e.prefetch(ahead + ldv * pair, line, locality=2)
                columns = _columns(e, values + ldv * (2 * four), ldv, width)
                for r in range(rows):
                    for term in range(2):
                        weight = e.load_splat(I32, p + t * 32, r * SPAN * 2 + four * 8 + 4 * term)
                        for c in range(width):
                            sums[r][c][term].set(e.dot_u8s8(sums[r][c][term].get(), columns[c], weight))
        for r in range(rows):
            for c in range(width):
                e.store(_joined(sums[r][c]), out + ldo * r, c * 64)

    return emitted(types.void, [types.int64] * 7, emit)


scores_of_levels = bound_scores("levels", 8, _scores)
mixes_of_levels = bound_mixes("levels", (4, 4, 2, 2), _mix, p_size=2)


# ---------------------------------------------------------------------------------------------- rows


@inline
def queries_to_levels(q, ldq, rows, dim, staged):  # type: ignore[no-untyped-def]
    """A unit's float32 queries → levels, with their steps and sums. Returns where they lie and how far apart."""
    to, row_at = queries_at(staged, dim), words_at(staged, dim) + _ROWS
    for r in range(rows):
        row, top = q + r * ldq, simd.splat(np.float32(0))
        for d in range(0, dim, 16):
            top = simd.maximum(top, simd.absolute(simd.load_f32(row + 4 * d)))
        step = simd.reduce_max(top) / np.float32(MOST)
        inverse = simd.splat(np.float32(1) / step if step > np.float32(0) else np.float32(0))
        total = simd.splat_i32(np.int32(0))
        for d in range(0, dim, 16):
            level = simd.round_i32(simd.mul(simd.load_f32(row + 4 * d), inverse))
            total = simd.add_i32(total, level)
            store_terms(to + r * 2 * dim + 2 * d, level)
        simd.put_f32(row_at + r * ROW_BYTES, step)
        simd.put_i32(row_at + r * ROW_BYTES + 4, simd.reduce_add_i32(total))
    return to, 2 * dim


@inline
def scores_to_floats(scores, rows, first, tiles, words):  # type: ignore[no-untyped-def]
    """Rows' integers over tiles [first, tiles) → scores, in place."""
    for r in range(rows):
        at, row = scores + r * SPAN * 4, words + _ROWS + r * ROW_BYTES
        step, total = simd.splat(simd.get_f32(row)), simd.splat_i32(simd.get_i32(row + 4))
        for t in range(first, tiles):
            zeros, scales = simd.load_i32(words + _ZEROS + t * 64), simd.load_f32(words + _SCALES + t * 64)
            whole = simd.sub_i32(simd.load_i32(at + t * 64), simd.mul_i32(zeros, total))
            simd.store_f32(at + t * 64, simd.mul(simd.to_f32(whole), simd.mul(step, scales)))


@inline
def weights_to_levels(weights, p, rows, first, tiles, words):  # type: ignore[no-untyped-def]
    """Rows' float32 weights over tiles [first, tiles), times their values' scales, → levels at p."""
    scales, zeros = words + _VALUES + _SCALES, words + _VALUES + _ZEROS
    for r in range(rows):
        at, to, row = weights + r * SPAN * 4, p + r * SPAN * 2, words + _ROWS + r * ROW_BYTES + _MIX
        top = simd.splat(np.float32(0))
        for t in range(first, tiles):
            weight = simd.mul(simd.load_f32(at + t * 64), simd.load_f32(scales + t * 64))
            simd.store_f32(at + t * 64, weight)
            top = simd.maximum(top, weight)
        step = simd.reduce_max(top) / np.float32(MOST)
        inverse = simd.splat(np.float32(1) / step if step > np.float32(0) else np.float32(0))
        total = simd.splat_i32(np.int32(0))
        for t in range(first, tiles):
            level = simd.round_i32(simd.mul(simd.load_f32(at + t * 64), inverse))
            total = simd.add_i32(total, simd.mul_i32(level, simd.load_i32(zeros + t * 64)))
            store_terms(to + t * 32, level)
        simd.put_f32(row, step)
        simd.put_i32(row + 4, simd.reduce_add_i32(total))


@inline
def weights_of_levels(scores, p, rows, first, tiles, sees, cap, words, sums, apart, size):  # type: ignore[no-untyped-def]
    """As `softmax`, from integers to levels."""
    scores_to_floats(scores, rows, first, tiles, words)
    softmax(scores, scores, rows, first, tiles, sees, cap, np.int64(0), sums, apart, 4)
    weights_to_levels(scores, p, rows, first, tiles, words)


@inline
def mix_to_floats(part, rows, dim, words):  # type: ignore[no-untyped-def]
    """Rows' integers of a span → its part of their output, in place."""
    for r in range(rows):
        row = words + _ROWS + r * ROW_BYTES + _MIX
        step, total = simd.splat(simd.get_f32(row)), simd.splat_i32(simd.get_i32(row + 4))
        for at in range(part + r * dim * 4, part + (r + 1) * dim * 4, 64):
            simd.store_f32(at, simd.mul(simd.to_f32(simd.sub_i32(simd.load_i32(at), total)), step))


# ---------------------------------------------------------------------------------------------- pages


@inline
def split_words_of(base, within, block, dim, words):  # type: ignore[no-untyped-def]
    """Scales and zeros of a tile's keys and values, from a head's page."""
    at = base + block * dim + within * 4
    split_words(at, words + _SCALES)
    split_words(at + values_at(INT8, block, dim), words + _VALUES + _SCALES)


@inline
def words_of_tiles(place, first, tiles, start, block, dim, words):  # type: ignore[no-untyped-def]
    """The scales and zeros of a span's tiles, which are read in place."""
    for t in range(first, tiles):
        at = start + t * 16
        split_words_of(page_at(place, at, block), at % block, block, dim, words + t * 64)


@inline
def ask_for_words_of(place, first, tiles, start, block, dim):  # type: ignore[no-untyped-def]
    """Ask for what `words_of_tiles` will read."""
    for t in range(first, tiles):
        at = start + t * 16
        words = page_at(place, at, block) + block * dim + at % block * 4
        simd.prefetch(words)
        simd.prefetch(words + values_at(INT8, block, dim))


@inline
def copy_half(base, dim, half, keys, values, words):  # type: ignore[no-untyped-def]
    """A block of 8 tokens → half a tile, and its words."""
    source = base + values_at(INT8, 8, dim)
    for pair in range(dim // 2):
        copy_16(keys + pair * 32 + half * 16, base + pair * 16)
    for at in range(0, 8 * dim, 16):
        copy_16(values + half * 8 * dim + at, source + at)
    for i in range(8):
        to = words + (half * 8 + i) * 4
        for word, where in (
            (simd.get_i32(base + 8 * dim + i * 4), to), (simd.get_i32(source + 8 * dim + i * 4), to + _VALUES)
        ):  # fmt: skip
            simd.put_f32(where + _SCALES, as_scale(word, ZERO_BITS))
            simd.put_i32(where + _ZEROS, word & np.int32(255))


@inline
def tiles_of_halves(kind, size, place, first, tiles, start, newest, block, dim, vdim, keys, values, staged):  # type: ignore[no-untyped-def]
    """As `attention.tiles_in_place`, of blocks of 8 tokens, two of which are brought together for a tile."""
    words = words_at(staged, dim)
    for t in range(first, tiles):
        at, to_k, to_v = start + t * 16, staged + t * 16 * dim, staged + (SPAN + t * 16) * dim
        simd.put_i64(keys + 8 * t, to_k)
        simd.put_i64(values + 8 * t, to_v)
        for half in range(2):
            key = at + 8 * half if at + 8 * half < newest else at  # past the end: anything finite, it has no weight
            copy_half(page_at(place, key, block), dim, half, to_k, to_v, words + t * 64)
