"""Rounding a key with its readers in mind: a few levels move by one, so that its own token's queries score it right.

To the nearest level each is the least error, but not the least error of scores: what counts of an error e is q·e, and
the queries of a head lie close together. The next tokens' queries, which read a key most, resemble its own token's,
and those are at hand when the key is written. So levels move while that lessens

    Σ over the token's queries (q·e)² + w·|e|²        w: the mean over channels of Σ q², so that both count alike

one channel at a time, whichever gains most (greedy descent on a lattice; two moves on average). Bytes and readers
stay as they are, and a key depends on its own token alone. Knows int8's levels and words, no pages.
"""

from __future__ import annotations

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.jit import inline
from kvledger.kernels.kv_pages import INT8_MAX, ZERO_BITS, as_scale, clamped

MOST_MOVES = 4  # eight gain nothing more
NEVER = np.float32(1e38)  # the price of a move that would leave 0 … 255


@inline
def load_query(query, d, size):  # type: ignore[no-untyped-def]
    """16 channels from d on of a query whose numbers have `size` bytes, as float32."""
    if size == 4:
        return simd.load_f32(query + 4 * d)
    return simd.load_bf16(query + 2 * d)


@inline
def get_query(query, channel, size):  # type: ignore[no-untyped-def]
    """As `load_query`, one channel."""
    if size == 4:
        return simd.get_f32(query + 4 * channel)
    return simd.as_f32(np.int64(simd.get_u16(query + 2 * channel)) << 16)


@inline
def write_errors(key, word, levels, dim, errors):  # type: ignore[no-untyped-def]
    """errors[dim] = key − what its levels say, in levels."""
    scale = as_scale(word, ZERO_BITS)
    inverse = simd.splat(np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0))
    zero = simd.splat_i32(word & np.int32(255))
    for d in range(0, dim, 16):
        level = simd.to_f32(simd.sub_i32(simd.load_u8(levels + d), zero))
        exact = simd.mul(clamped(key + 4 * d, INT8_MAX), inverse)
        simd.store_f32(errors + 4 * d, simd.sub(exact, level))


@inline
def write_slope(queries, stride, count, size, dim, errors, slope, price):  # type: ignore[no-untyped-def]
    """slope[dim] = half the gradient of what is to be lessened; price[dim]: half its second derivative, by channel.

    Returns w.
    """
    nothing = simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        simd.store_f32(slope + 4 * d, nothing)
        simd.store_f32(price + 4 * d, nothing)
    squares = nothing
    for j in range(count):
        query, wrong = queries + j * stride, nothing
        for d in range(0, dim, 16):
            wrong = simd.fma(load_query(query, d, size), simd.load_f32(errors + 4 * d), wrong)
        score = simd.splat(simd.reduce_add(wrong))
        for d in range(0, dim, 16):
            q = load_query(query, d, size)
            squares = simd.fma(q, q, squares)
            simd.store_f32(slope + 4 * d, simd.fma(q, score, simd.load_f32(slope + 4 * d)))
            simd.store_f32(price + 4 * d, simd.fma(q, q, simd.load_f32(price + 4 * d)))
    weight = simd.reduce_add(squares) / np.float32(dim)
    wide = simd.splat(weight)
    for d in range(0, dim, 16):
        simd.store_f32(slope + 4 * d, simd.fma(simd.load_f32(errors + 4 * d), wide, simd.load_f32(slope + 4 * d)))
        simd.store_f32(price + 4 * d, simd.add(simd.load_f32(price + 4 * d), wide))
    return weight


@inline
def best_move(slope, price, dim, gains):  # type: ignore[no-untyped-def]
    """The first channel where moving by one lessens most; −1 where none does. A NaN is no gain."""
    two, least = simd.splat(np.float32(2)), simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        steep = simd.mul(simd.absolute(simd.load_f32(slope + 4 * d)), two)
        gain = simd.sub(simd.load_f32(price + 4 * d), steep)
        simd.store_f32(gains + 4 * d, gain)
        least = simd.minimum(least, gain)
    best, channel = simd.reduce_min(least), np.int64(-1)
    if best < np.float32(0):
        for d in range(dim - 16, -1, -16):  # all of them: to stop at the right one costs more than it saves
            lane = simd.first_equal(simd.load_f32(gains + 4 * d), best)
            channel = d + lane if lane < 16 else channel
    return channel


@inline
def follow_move(queries, stride, count, size, dim, channel, step, weight, slope):  # type: ignore[no-untyped-def]
    """The slope once the level of `channel` has moved by `step`."""
    own = simd.splat(-step * weight)
    for d in range(0, dim, 16):
        at = simd.load_f32(slope + 4 * d)
        at = simd.at_lane(channel - d, simd.add(at, own), at)
        for j in range(count):
            query = queries + j * stride
            at = simd.fma(load_query(query, d, size), simd.splat(-step * get_query(query, channel, size)), at)
        simd.store_f32(slope + 4 * d, at)


def work_bytes(dim: int) -> int:
    """What `round_for_queries` works with, at a multiple of 64. Plain enough for Numba."""
    return 16 * dim


round_bytes = inline(work_bytes)


@inline
def round_for_queries(key, word, levels, queries, stride, count, size, dim, work):  # type: ignore[no-untyped-def]
    """Move some of levels[dim] of the float32[dim] at `key`. `word`: their scale and zero; `work`: `work_bytes`.

    `queries`: `count` of them, `stride` bytes apart, in numbers of `size` bytes.
    """
    errors, slope, price = work, work + 4 * dim, work + 8 * dim
    write_errors(key, word, levels, dim, errors)
    weight = write_slope(queries, stride, count, size, dim, errors, slope, price)
    for _ in range(MOST_MOVES):
        channel = best_move(slope, price, dim, work + 12 * dim)
        if channel < 0:
            break
        steep = simd.get_f32(slope + 4 * channel)
        step = np.int64(steep > np.float32(0)) * 2 - 1  # no branch: it would be guessed wrong half the time
        level = np.int64(simd.get_u8(levels + channel)) + step
        if level < 0 or level > 255:
            simd.put_f32(price + 4 * channel, NEVER)
            continue
        simd.put_u8(levels + channel, np.uint8(level))
        follow_move(queries, stride, count, size, dim, channel, np.float32(step), weight, slope)
