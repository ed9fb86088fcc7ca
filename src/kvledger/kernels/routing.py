"""Mixture of experts: choosing experts per token, and putting their answers together again. Knows no weights.

Tokens are dealt to experts as lists; an expert computes its list's rows together. A row's answers are added in the
order of their rank, so neither the batch nor the order of experts changes a bit.
"""

from __future__ import annotations

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.jit import Kernel, inline
from kvledger.kernels.matmul import num_rows
from kvledger.kernels.team import next_item

_USED = np.float32(-3e38)  # a score that has been taken
_LEAST = np.float32(-2e38)  # no score is lower: whatever is left is taken before anything twice


@inline
def probabilities(logits, out, num, sigmoid):  # type: ignore[no-untyped-def]
    """Softmax or, one by one, the logistic function of `num` logits → out."""
    top = np.float32(-3e38)
    for i in range(num):
        top = max(top, simd.get_f32(logits + 4 * i))
    total = np.float32(0)
    for i in range(num):
        x = simd.get_f32(logits + 4 * i)
        p = np.float32(1) / (np.float32(1) + np.exp(-x)) if sigmoid else np.exp(x - top)
        simd.put_f32(out + 4 * i, p)
        total += p
    if not sigmoid:
        for i in range(num):
            simd.put_f32(out + 4 * i, simd.get_f32(out + 4 * i) / total)


@inline
def best_of(scores, num):  # type: ignore[no-untyped-def]
    """Index of the largest; the first of equals."""
    best = 0
    for i in range(1, num):
        if simd.get_f32(scores + 4 * i) > simd.get_f32(scores + 4 * best):
            best = i
    return best


@inline
def keep_groups(choice, work, num, groups, kept, sigmoid):  # type: ignore[no-untyped-def]
    """Only experts of the `kept` best groups stay. A group counts its best score, with sigmoid its best two summed."""
    size = num // groups
    for g in range(groups):
        first, second = _USED, _USED
        for i in range(size):
            x = simd.get_f32(choice + 4 * (g * size + i))
            if x > first:
                first, second = x, first
            else:
                second = max(second, x)
        simd.put_f32(work + 4 * g, first + second if sigmoid else first)
    for _ in range(kept):
        simd.put_f32(work + 4 * best_of(work, groups), _USED)
    for i in range(num):
        if simd.get_f32(work + 4 * (i // size)) > _USED:
            simd.put_f32(choice + 4 * i, _LEAST)


def _route(op: int, ctx: int, thread: int) -> None:
    """Arguments: logits, bytes between rows, experts, used, sigmoid, bias, groups, groups kept, norm, scale, weights,
    counts, lists, list bytes, work.
    """
    if next_item(op) != 0:
        return
    logits, stride, num, used = (
        simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32))  # fmt: skip
    sigmoid, bias, groups, kept = (
        simd.get_i64(op + 40) != 0, simd.get_i64(op + 48), simd.get_i64(op + 56), simd.get_i64(op + 64))  # fmt: skip
    norm, scale, weights = simd.get_i64(op + 72), simd.as_f32(simd.get_i64(op + 80)), simd.get_i64(op + 88)
    counts, lists, list_bytes = simd.get_i64(op + 96), simd.get_i64(op + 104), simd.get_i64(op + 112)
    score = simd.get_i64(op + 120)
    choice, work = score + 4 * num, score + 8 * num
    for e in range(num):
        simd.put_i64(counts + 8 * e, 0)
    for row in range(num_rows(op, ctx)):
        probabilities(logits + row * stride, score, num, sigmoid)
        for e in range(num):
            extra = simd.get_f32(bias + 4 * e) if bias != 0 else np.float32(0)
            value = simd.get_f32(score + 4 * e) + extra
            simd.put_f32(choice + 4 * e, value if value > _LEAST else _LEAST)  # NaN, too
        if groups > 1:
            keep_groups(choice, work, num, groups, kept, sigmoid)
        total = np.float32(0)
        for rank in range(used):
            e = best_of(choice, num)
            simd.put_f32(choice + 4 * e, _USED)
            at = simd.get_i64(counts + 8 * e)
            simd.put_i32(lists + e * list_bytes + 4 * at, np.int32(row * used + rank))
            simd.put_i64(counts + 8 * e, at + 1)
            simd.put_f32(weights + 4 * (row * used + rank), simd.get_f32(score + 4 * e))
            total += simd.get_f32(score + 4 * e)
        for rank in range(used):
            w = simd.get_f32(weights + 4 * (row * used + rank))
            simd.put_f32(weights + 4 * (row * used + rank), (w / total if norm != 0 else w) * scale)


def _scatter(op: int, ctx: int, thread: int) -> None:
    """Arguments: y, list, slots, dim."""
    y, index, slots, dim = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24), simd.get_i64(op + 32)
    rows = num_rows(op, ctx)
    row = next_item(op)
    while row < rows:
        to = slots + np.int64(simd.get_i32(index + 4 * row)) * dim * 4
        for d in range(0, dim, 16):
            simd.store_f32(to + 4 * d, simd.load_f32(y + (row * dim + d) * 4))
        row = next_item(op)


def _combine(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, slots, weights, used, dim, shared (0: none), shared gate's logits (0: none), bytes between them."""
    x, slots, weights = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(op + 24)
    used, dim, shared = simd.get_i64(op + 32), simd.get_i64(op + 40), simd.get_i64(op + 48)
    gate, stride = simd.get_i64(op + 56), simd.get_i64(op + 64)
    rows = num_rows(op, ctx)
    row = next_item(op)
    while row < rows:
        share = np.float32(1)
        if gate != 0:
            share = np.float32(1) / (np.float32(1) + np.exp(-simd.get_f32(gate + row * stride)))
        for d in range(0, dim, 16):
            total = simd.splat(np.float32(0))
            for rank in range(used):
                slot = row * used + rank
                weight = simd.splat(simd.get_f32(weights + 4 * slot))
                total = simd.fma(weight, simd.load_f32(slots + (slot * dim + d) * 4), total)
            if shared != 0:
                total = simd.fma(simd.splat(share), simd.load_f32(shared + (row * dim + d) * 4), total)
            at = x + (row * dim + d) * 4
            simd.store_f32(at, simd.add(simd.load_f32(at), total))
        row = next_item(op)


ROUTE, SCATTER, COMBINE = Kernel("route", _route), Kernel("scatter", _scatter), Kernel("combine", _combine)
