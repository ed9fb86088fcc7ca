"""Inner loops of products with quantised weights: a tile of 16 outputs for some rows of integer activations.

Three ways to the same exact integer per group of 32, by what the CPU multiplies: bytes into 32 bits (VNNI, 16 outputs
at once), 16-bit pairs (anywhere, 8 outputs at once), and bytes into 16 bits (AVX2: 4-bit weights times one 8-bit term;
16 products of at most 15 · 127 fit). Groups are then added in ascending order in float32, with the same roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from numba.core import types

from kvledger.kernels.emit import F32, I16, I32, VF32, VI32, Emit, Val, vec
from kvledger.kernels.packed import GROUP, SCALES_BYTES, TILE, X_BYTES, group_bytes
from kvledger.kernels.simd import emitted

PREFETCH_BYTES = 2048  # how far ahead weights are asked for: the hardware stops at every 4 KiB
PARTS = 4  # of a group, of 8 inputs each
HALF = 8  # outputs of a vector of 8 lanes: 4 rows × 2 such sums and what they need fit 16 registers


def scale_loader(wide: bool, lanes: int = TILE) -> Callable[[Emit, Val, int], Val]:
    """How scales and minima are read."""
    if wide:
        return lambda e, address, offset: e.load(vec(F32, lanes), address, offset)
    return lambda e, address, offset: e.load_f16(address, offset, lanes)


def weight_quads(e: Emit, bits: int, group: Val, lanes: int = TILE) -> Iterator[tuple[int, Val]]:
    """Yields (quad, `lanes` outputs × 4 weights as bytes) for the eight quads of a group."""
    words = vec(I32, lanes)
    if bits == 8:
        for quad in range(8):
            yield quad, e.load(words, group, quad * 64)
        return
    for pair in range(4):
        both = e.load(words, group, pair * 64)
        yield 2 * pair, both & 0x0F0F0F0F
        yield 2 * pair + 1, (both >> 4) & 0x0F0F0F0F


def weight_pairs(e: Emit, bits: int, part: Val) -> Iterator[tuple[int, list[Val]]]:
    """Yields (place, two halves of 8 outputs × 2 weights as int16) for four pairs in ORDER: a quarter of a group."""
    words = vec(I32, HALF)
    if bits == 4:
        both = [e.load(words, part, 32 * h) for h in range(2)]
        for i in range(4):
            yield i, [(v >> 4 * i if i else v) & 0x000F000F for v in both]
    else:
        quads = [[e.load(words, part, 64 * q + 32 * h) for h in range(2)] for q in range(2)]
        for i in range(4):
            yield i, [(v >> 8 if i > 1 else v) & 0x00FF00FF for v in quads[i % 2]]


def store_sums(e: Emit, sums: list[Any], y: Val, ldy: Val, add: Val) -> None:
    """y = sums, or y += sums."""
    for r, total in enumerate(sums):
        where = y + ldy * r
        with e.b.if_else(e.b.icmp_signed("!=", add.v, e.i64(0).v)) as (then, otherwise):
            with then:
                e.store(e.load(total.get().v.type, where) + total.get(), where)
            with otherwise:
                e.store(total.get(), where)


def _scaled(e: Emit, total: Any, dot: Val, d: Val, m: Val, xs: Val, row: int) -> None:
    """total += dot · (d · scale) + m · sum: one group's share, the same roundings on every path."""
    lanes = dot.v.type.count
    scale, x_sum = (e.load_splat(F32, xs, start + row * 4, lanes) for start in (0, 64))
    partial = e.fma(e.to_f32(dot), d * scale, total.get())
    total.set(e.fma(m, x_sum, partial))


def terms_loop(bits: int, wide: bool, terms: int, rows: int) -> Any:
    """Activations as one or two 8-bit terms, with VNNI. `xs`: scales and sums of the rows."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales = scale_loader(wide)

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, shift: Val,
             add: Val) -> None:  # fmt: skip
        first = e.load(VF32, bias)
        sums = [e.var(first) for _ in range(rows)]
        shifts = e.splat(Val(e, e.b.trunc(shift.v, I32)))
        with e.loop(groups) as g:
            group = w + g * size
            for line in range(0, size, 64):
                e.prefetch(group, PREFETCH_BYTES + line)
            high = [e.const(VI32, 0)] * rows
            low = [e.const(VI32, 0)] * rows
            for quad, u in weight_quads(e, bits, group):
                for r in range(rows):
                    at = x + (g * 1024 + r * X_BYTES)
                    high[r] = e.dot_u8s8(high[r], u, e.load_splat(I32, at, quad * 4))
                    if terms == 2:
                        low[r] = e.dot_u8s8(low[r], u, e.load_splat(I32, at, GROUP + quad * 4))
            d = scales(e, group, weights)
            m = scales(e, group, weights + (size - weights) // 2)
            for r in range(rows):
                dot = (high[r] << shifts) + low[r] if terms == 2 else high[r]
                _scaled(e, sums[r], dot, d, m, xs + g * SCALES_BYTES, r)
        store_sums(e, sums, y, ldy, add)

    return emitted(types.void, [types.int64] * 9, emit)


def _pair_dots(e: Emit, bits: int, rows: int, group: Val, x: Val, parts: Val) -> list[list[Val]]:
    """A group's dot products [row][half] from 16-bit pairs. `parts` is PARTS, hidden from LLVM: it would unroll."""
    kind = vec(I32, HALF)
    dots = [[e.var(e.const(kind, 0)) for _ in range(2)] for _ in range(rows)]
    with e.loop(parts) as p:
        for place, halves in weight_pairs(e, bits, group + p * (64 * bits // 4)):
            for r in range(rows):
                pair = e.load_splat(I32, x + p * 16, r * X_BYTES + place * 4, HALF)
                for dot, u in zip(dots[r], halves, strict=True):
                    dot.set(e.dot_i16(dot.get(), u, pair))
    return [[dot.get() for dot in row] for row in dots]


def _byte_dots(e: Emit, bits: int, rows: int, group: Val, x: Val, parts: Val) -> list[list[Val]]:
    """As `_pair_dots` from 4-bit weights and one 8-bit term."""
    kind, words = vec(I16, 2 * HALF), vec(I32, HALF)
    dots = [[e.var(e.const(kind, 0)) for _ in range(2)] for _ in range(rows)]
    with e.loop(parts) as p:
        both = [e.load(words, group + p * 64, 32 * h) for h in range(2)]
        for quad in range(2):
            halves = [(v >> 4 if quad else v) & 0x0F0F0F0F for v in both]
            for r in range(rows):
                four = e.load_splat(I32, x + p * 8, r * X_BYTES + quad * 4, HALF)
                for dot, u in zip(dots[r], halves, strict=True):
                    dot.set(e.dot_u8s8_i16(dot.get(), u, four))
    zero, ones = e.const(words, 0), e.bitcast(e.const(kind, 1), words)
    return [[e.dot_i16(zero, e.bitcast(dot.get(), words), ones) for dot in row] for row in dots]


def halves_loop(bits: int, wide: bool, is_pairs: bool, rows: int) -> Any:
    """As `terms_loop` in vectors of eight outputs; activations as 16-bit pairs or, with AVX2, one 8-bit term."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales, dots_of = scale_loader(wide, HALF), _pair_dots if is_pairs else _byte_dots
    scale_bytes = 4 if wide else 2

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, parts: Val,
             add: Val) -> None:  # fmt: skip
        sums = [[e.var(e.load(vec(F32, HALF), bias, 32 * h)) for h in range(2)] for _ in range(rows)]
        with e.loop(groups) as g:
            group = w + g * size
            for line in range(0, size, 64):
                e.prefetch(group, PREFETCH_BYTES + line)
            dots = dots_of(e, bits, rows, group, x + g * 1024, parts)
            for h in range(2):
                d, m = (scales(e, group, at + HALF * scale_bytes * h) for at in (weights, (size + weights) // 2))
                for r in range(rows):
                    _scaled(e, sums[r][h], dots[r][h], d, m, xs + g * SCALES_BYTES, r)
        for h in range(2):
            store_sums(e, [row[h] for row in sums], y + 32 * h, ldy, add)

    return emitted(types.void, [types.int64] * 9, emit)
