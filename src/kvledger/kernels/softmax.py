"""From a row's scores over a span of keys to weights: what is masked, the largest, e^(score − largest), their sum.

Knows nothing of pages, units and how scores came to be. A row is treated alone, its tiles of 16 keys in
ascending order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.attention_loops import SPAN
from kvledger.kernels.elementwise import tanh
from kvledger.kernels.emit import VF32, Emit, Val
from kvledger.kernels.jit import inline
from kvledger.kernels.simd import emitted, f32x16

NO_SCORE = -1e30  # running maximum before any key
MASKED = -3e38  # score of a key that a row may not see: e^(MASKED − anything) is 0
TOGETHER = 4  # rows whose largest scores are found before one is weighed


def _largest_of_four(e: Emit, top: Val, scores: Val, fours: Val) -> Val:
    """The larger of `top` and of 16 lanes each of 4 · `fours` tiles."""
    result = e.var(top)
    with e.loop(fours) as i:
        a, b, c, d = (e.load(VF32, scores + i * 256, 64 * t) for t in range(4))
        result.set(e.max(result.get(), e.max(e.max(a, b), e.max(c, d))))
    return result.get()


def _weights(size: int, together: int) -> Any:
    """`total` + the weights of `count` · `together` tiles, which are stored in `size` bytes each."""

    def emit(e: Emit, total: Val, scores: Val, count: Val, best: Val, to: Val) -> Val:
        result, base = e.var(total), e.splat(best)
        with e.loop(count) as i:
            at = scores + i * (64 * together)
            weights = e.exp_all([e.load(VF32, at, 64 * t) - base for t in range(together)])
            for t, weight in enumerate(weights):
                result.set(result.get() + weight)
                store = e.store if size == 4 else e.store_bf16
                store(weight, to + i * (16 * size * together), 16 * size * t)
        return result.get()

    return emitted(f32x16, [f32x16, types.int64, types.int64, types.float32, types.int64], emit)


largest_of_four = emitted(f32x16, [f32x16, types.int64, types.int64], _largest_of_four)
weights_f32, weights_f32_of_four = _weights(4, 1), _weights(4, 4)
weights_bf16, weights_bf16_of_four = _weights(2, 1), _weights(2, 4)


@inline
def scale_and_cap(scores, rows, first, tiles, cap, scales):  # type: ignore[no-untyped-def]
    """Scores times their keys' scales (0: none), then cut to ±cap by tanh (0: not)."""
    for at in range(scores, scores + rows * SPAN * 4, SPAN * 4):
        for t in range(first, tiles):
            s = simd.load_f32(at + t * 64)
            if scales != 0:
                s = simd.mul(s, simd.load_f32(scales + t * 64))
            if cap > np.float32(0):
                limit = simd.splat(cap)
                s = simd.mul(tanh(simd.div(s, limit)), limit)
            simd.store_f32(at + t * 64, s)


@inline
def mask_row(scores, first, tiles, low, high):  # type: ignore[no-untyped-def]
    """No score for keys below `low` and from `high` on: few tiles have any."""
    masked = simd.splat(np.float32(MASKED))
    for t in range(first, min(tiles, (low + 15) // 16)):
        simd.store_f32(scores + t * 64, simd.below(masked, np.int32(low - t * 16), simd.load_f32(scores + t * 64)))
    for t in range(max(first, high // 16), tiles):
        simd.store_f32(scores + t * 64, simd.below(simd.load_f32(scores + t * 64), np.int32(high - t * 16), masked))


@inline
def mask(scores, rows, first, tiles, sees):  # type: ignore[no-untyped-def]
    """`mask_row` of all rows, unless all see all. `sees`: see `softmax`."""
    before, row0, ratio, window = sees
    if before + row0 // ratio + 1 >= tiles * 16 and (window == 0 or before + (row0 + rows - 1) // ratio < window):
        return
    for r in range(rows):
        high = before + (row0 + r) // ratio + 1
        low = max(0, high - window) if window > 0 else 0
        mask_row(scores + r * SPAN * 4, first, tiles, low, high)


@inline
def find_largest(scores, rows, first, tiles, sums):  # type: ignore[no-untyped-def]
    """Each row's largest score, at least NO_SCORE, to its place at `sums`."""
    fours = max(0, tiles - first) // 4
    for r in range(rows):
        at = scores + r * SPAN * 4
        top = largest_of_four(simd.splat(np.float32(MASKED)), at + first * 64, fours)
        for t in range(first + 4 * fours, tiles):
            top = simd.maximum(top, simd.load_f32(at + t * 64))
        simd.put_f32(sums + r * 4, max(simd.reduce_max(top), np.float32(NO_SCORE)))


@inline
def weigh(scores, p, rows, first, tiles, sums, apart, size):  # type: ignore[no-untyped-def]
    """e^(score − largest) to p, and each row's sum before they are rounded to `size` bytes."""
    fours, left = max(0, tiles - first) // 4, max(0, tiles - first) % 4
    for r in range(rows):
        at, to = scores + (r * SPAN + first * 16) * 4, p + (r * SPAN + first * 16) * size
        best = simd.get_f32(sums + r * 4)
        total = simd.splat(np.float32(0))
        if size == 4:
            total = weights_f32_of_four(total, at, fours, best, to)
            total = weights_f32(total, at + fours * 256, left, best, to + fours * 256)
        else:
            total = weights_bf16_of_four(total, at, fours, best, to)
            total = weights_bf16(total, at + fours * 256, left, best, to + fours * 128)
        simd.put_f32(sums + apart + r * 4, simd.reduce_add(total))


@inline
def scale_weights(weights, p, rows, first, tiles, scales, size):  # type: ignore[no-untyped-def]
    """p = float32 weights times float32[SPAN] scales of the values, in `size` bytes."""
    for r in range(rows):
        for t in range(first, tiles):
            weight = simd.mul(simd.load_f32(weights + r * SPAN * 4 + t * 64), simd.load_f32(scales + t * 64))
            if size == 4:
                simd.store_f32(p + r * SPAN * 4 + t * 64, weight)
            else:
                simd.store_bf16(p + r * SPAN * 2 + t * 32, weight)


@inline
def softmax(scores, p, rows, first, tiles, sees, cap, scales, sums, apart, size):  # type: ignore[no-untyped-def]
    """Weights of rows of SPAN numbers over tiles [first, tiles) of a span.

    Scores become e^(score − max), stored in `size` bytes; the sum is taken before rounding. Each row's max goes to
    `sums`, its sum `apart` bytes further. `sees`: the first token's position less the span's, row 0's place from there,
    rows per token, window (0: all): a row sees the newest `window` keys up to its own. `scales` (0: none):
    float32[SPAN] of the keys, then of the values, which multiply scores and weights. Some rows' largest scores are
    found before they are weighed, so that none waits for its own.
    """
    if scales != 0 or cap > np.float32(0):
        scale_and_cap(scores, rows, first, tiles, cap, scales)
    mask(scores, rows, first, tiles, sees)
    for r in range(0, rows, TOGETHER):
        some, at, to, of_row = min(TOGETHER, rows - r), scores + r * SPAN * 4, p + r * SPAN * size, sums + r * 4
        find_largest(at, some, first, tiles, of_row)
        if scales == 0:
            weigh(at, to, some, first, tiles, of_row, apart, size)
        else:
            weigh(at, at, some, first, tiles, of_row, apart, 4)
            scale_weights(at, to, some, first, tiles, scales + SPAN * 4, size)
