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
from kvledger.kernels.packed import GROUP, SCALES_BYTES, TILE, bytes_of_terms, group_bytes, x_bytes
from kvledger.kernels.simd import emitted
from kvledger.kernels.turned import MANY, turning

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


def _scaled(e: Emit, total: Any, dot: Val, d: Val, m: Val, xs: Val, row: int) -> None:
    """total += dot · (d · scale) + m · sum: one group's share, the same roundings on every path."""
    lanes = dot.v.type.count
    scale, x_sum = (e.load_splat(F32, xs, start + row * 4, lanes) for start in (0, 64))
    partial = e.fma(e.to_f32(dot), d * scale, total.get())
    total.set(e.fma(m, x_sum, partial))


def start_sums(e: Emit, rows: int, bias: Val, y: Val, ldy: Val, origin: Val, lanes: int = TILE) -> list[list[Any]]:
    """Sums [row][part of 16 outputs] that begin at `bias`, at y + bias (`origin` 1) or at y (2)."""
    kind, parts = vec(F32, lanes), range(TILE // lanes)
    sums = [[e.var(e.load(kind, bias, 4 * lanes * i)) for i in parts] for _ in range(rows)]
    with e.b.if_then(e.b.icmp_signed("!=", origin.v, e.i64(0).v)):
        is_new = e.b.icmp_signed("==", origin.v, e.i64(1).v)
        for r, row in enumerate(sums):
            for i, total in enumerate(row):
                there = e.load(kind, y + ldy * r, 4 * lanes * i)
                total.set(Val(e, e.b.select(is_new, (there + total.get()).v, there.v)))
    return sums


def store_sums(e: Emit, sums: list[list[Any]], y: Val, ldy: Val) -> None:
    """y = sums, as `start_sums` gives them."""
    for r, row in enumerate(sums):
        for i, total in enumerate(row):
            e.store(total.get(), y + ldy * r, TILE * 4 // len(row) * i)


def _prefetch_group(e: Emit, group: Val, size: int) -> None:
    for line in range(0, size, 64):
        e.prefetch(group, PREFETCH_BYTES + line)


def terms_loop(bits: int, wide: bool, terms: int, rows: int) -> Any:
    """Activations as one or two 8-bit terms, with VNNI. `xs`: scales and sums of the rows."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales, row_bytes = scale_loader(wide), x_bytes("int8" if terms == 1 else "int8x2")

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, shift: Val,
             origin: Val) -> None:  # fmt: skip
        sums = start_sums(e, rows, bias, y, ldy, origin)
        shifts = e.splat(Val(e, e.b.trunc(shift.v, I32)))
        with e.loop(groups) as g:
            group = w + g * size
            _prefetch_group(e, group, size)
            high = [e.const(VI32, 0)] * rows
            low = [e.const(VI32, 0)] * rows
            for quad, u in weight_quads(e, bits, group):
                for r in range(rows):
                    at = x + (g * (16 * row_bytes) + r * row_bytes)
                    high[r] = e.dot_u8s8(high[r], u, e.load_splat(I32, at, quad * 4))
                    if terms == 2:
                        low[r] = e.dot_u8s8(low[r], u, e.load_splat(I32, at, GROUP + quad * 4))
            d = scales(e, group, weights)
            m = scales(e, group, weights + (size - weights) // 2)
            for r in range(rows):
                dot = (high[r] << shifts) + low[r] if terms == 2 else high[r]
                _scaled(e, sums[r][0], dot, d, m, xs + g * SCALES_BYTES, r)
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 9, emit)


def _row_bytes(is_pairs: bool) -> int:
    return x_bytes("int16" if is_pairs else "int8")


Halves = Callable[[int], list[Val]]  # number within a part → two halves of 8 outputs


def _dots(e: Emit, is_pairs: bool, rows: int, x: Val, parts: Val, weights: Callable[[Val], Halves]) -> list[list[Val]]:
    """A group's dot products [row][half]. `parts` is PARTS, hidden from LLVM: it would unroll the loop and spill."""
    words, kind = vec(I32, HALF), vec(I32, HALF) if is_pairs else vec(I16, 2 * HALF)
    count, dot_of = (4, e.dot_i16) if is_pairs else (2, e.dot_u8s8_i16)
    row_bytes = _row_bytes(is_pairs)
    dots = [[e.var(e.const(kind, 0)) for _ in range(2)] for _ in range(rows)]
    with e.loop(parts) as p:
        at, halves = x + p * (4 * count), weights(p)
        for i in range(count):
            two = halves(i)
            for r in range(rows):
                word = e.load_splat(I32, at, r * row_bytes + i * 4, HALF)
                for dot, u in zip(dots[r], two, strict=True):
                    dot.set(dot_of(dot.get(), u, word))
    if is_pairs:
        return [[dot.get() for dot in row] for row in dots]
    zero, ones = e.const(words, 0), e.bitcast(e.const(kind, 1), words)
    return [[e.dot_i16(zero, e.bitcast(dot.get(), words), ones) for dot in row] for row in dots]


def _packed(e: Emit, bits: int, is_pairs: bool, group: Val) -> Callable[[Val], Halves]:
    """Weights as `dots` takes them, from packed ones: bytes, or pairs in ORDER."""
    words, shorts = vec(I32, HALF), vec(I16, 2 * HALF)

    def part(p: Val) -> Halves:
        at = group + p * (64 * bits // 4)
        raw = [[e.load(words, at, 64 * q + 32 * h) for h in range(2)] for q in range(bits // 4)]
        if not is_pairs:
            return lambda i: [(v >> 4 if i else v) & 0x0F0F0F0F for v in raw[0]]
        shift, mask = (4, 0x000F000F) if bits == 4 else (8, 0x00FF00FF)

        def pairs(i: int) -> list[Val]:
            step = i if bits == 4 else i // 2
            source = raw[0] if bits == 4 else raw[i % 2]
            if step == 16 // shift - 1:  # the uppermost bits: nothing to mask
                return [e.bitcast(e.bitcast(v, shorts) >> (16 - shift), words) for v in source]
            return [(v >> shift * step if step else v) & mask for v in source]

        return pairs

    return part


def halves_loop(bits: int, wide: bool, is_pairs: bool, rows: int) -> Any:
    """As `terms_loop` in vectors of eight outputs; activations as 16-bit pairs or, with AVX2, one 8-bit term."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales, scale_bytes = scale_loader(wide, HALF), 4 if wide else 2
    block = 16 * _row_bytes(is_pairs)

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, parts: Val,
             origin: Val) -> None:  # fmt: skip
        sums = start_sums(e, rows, bias, y, ldy, origin, HALF)
        with e.loop(groups) as g:
            group = w + g * size
            _prefetch_group(e, group, size)
            dots = _dots(e, is_pairs, rows, x + g * block, parts, _packed(e, bits, is_pairs, group))
            for h in range(2):
                d, m = (scales(e, group, at + HALF * scale_bytes * h) for at in (weights, (size + weights) // 2))
                for r in range(rows):
                    _scaled(e, sums[r][h], dots[r][h], d, m, xs + g * SCALES_BYTES, r)
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 9, emit)


# ---------------------------------------------------------------------------------------------- panels


def panel_bytes(is_pairs: bool) -> int:
    """Bytes of a tile's group unpacked: its weights as `_dots` takes them, then scales and minima in float32."""
    return TILE * GROUP * (2 if is_pairs else 1) + 2 * TILE * 4


def unpack_loop(bits: int, wide: bool, is_pairs: bool) -> Any:
    """Unpack `groups` groups of a tile to a panel, for many rows to read."""
    size, weights = group_bytes(bits, wide), TILE * GROUP * bits // 8
    scales, count, end = scale_loader(wide), 4 if is_pairs else 2, panel_bytes(is_pairs) - 2 * TILE * 4

    def emit(e: Emit, w: Val, panel: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            group, to = w + g * size, panel + g * panel_bytes(is_pairs)
            _prefetch_group(e, group, size)
            part = _packed(e, bits, is_pairs, group)
            for p in range(PARTS):
                halves = part(e.i64(p))
                for i in range(count):
                    for h, half in enumerate(halves(i)):
                        e.store(half, to, ((p * count + i) * 2 + h) * 32)
            for i, at in enumerate((weights, (size + weights) // 2)):
                e.store(scales(e, group, at), to, end + i * 64)

    return emitted(types.void, [types.int64] * 3, emit)


def panel_loop(is_pairs: bool, rows: int) -> Any:
    """As `halves_loop` from a panel."""
    size, count = panel_bytes(is_pairs), 4 if is_pairs else 2
    end, words, floats = size - 2 * TILE * 4, vec(I32, HALF), vec(F32, HALF)
    block = 16 * _row_bytes(is_pairs)

    def emit(e: Emit, x: Val, xs: Val, panel: Val, bias: Val, y: Val, ldy: Val, groups: Val, parts: Val,
             origin: Val) -> None:  # fmt: skip
        sums = start_sums(e, rows, bias, y, ldy, origin, HALF)
        with e.loop(groups) as g:
            group = panel + g * size

            def part(p: Val) -> Halves:
                at = group + p * (64 * count)
                return lambda i: [e.load(words, at, (2 * i + h) * 32) for h in range(2)]

            dots = _dots(e, is_pairs, rows, x + g * block, parts, part)
            for h in range(2):
                d, m = (e.load(floats, group, end + 64 * i + 32 * h) for i in range(2))
                for r in range(rows):
                    _scaled(e, sums[r][h], dots[r][h], d, m, xs + g * SCALES_BYTES, r)
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 9, emit)


# ---------------------------------------------------------------------------------------------- turned

TURNED_BYTES = TILE * GROUP + 2 * TILE * 4  # of a tile's group: bytes, then scales and minima in float32


def _turned_to(e: Emit, group: Val, to: Val) -> Iterator[None]:
    """A tile's group of 4-bit weights, turned, stored at `to`; yields as `turning` does."""
    turned: list[Val] = []
    yield from turning(e, (u for _, u in weight_quads(e, 4, group)), turned)
    for quad, u in enumerate(turned):
        e.store(u, to, quad * 64)
        yield


def turn_loop(wide: bool) -> Any:
    """Turn the 4-bit weights of `groups` groups of a tile to a panel (`turned.py`)."""
    size, weights, scales = group_bytes(4, wide), TILE * GROUP // 2, scale_loader(wide)

    def emit(e: Emit, w: Val, panel: Val, groups: Val) -> None:
        with e.loop(groups) as g:
            group, to = w + g * size, panel + g * TURNED_BYTES
            _prefetch_group(e, group, size)
            for _ in _turned_to(e, group, to):
                pass
            for i, at in enumerate((weights, (size + weights) // 2)):
                e.store(scales(e, group, at), to, TILE * GROUP + i * 64)

    return emitted(types.void, [types.int64] * 3, emit)


def _turned_dots(e: Emit, rows: int, x: Val, scales: Val, weights: Val, steps: Iterator[None] = iter(())) -> list[Val]:
    """A group's dot products from turned weights; `steps` are taken between them, what is left of them after."""
    row_bytes = bytes_of_terms(MANY)
    dots = [e.load_splat(I32, scales, 128 + r * 4) for r in range(rows)]
    for quad in range(8):
        u = e.load(VI32, weights, quad * 64)
        for r in range(rows):
            dots[r] = e.dot_u8s8(dots[r], u, e.load_splat(I32, x, r * row_bytes + quad * 4))
            if r % 2:
                next(steps, None)
    for _ in steps:
        pass
    return dots


def turned_loop(wide: bool, rows: int) -> Any:
    """As `terms_loop` of one term, from a panel of turned weights; asks for as many packed ones at `ahead`."""
    size, block = group_bytes(4, wide), 16 * bytes_of_terms(MANY)

    def emit(e: Emit, x: Val, xs: Val, panel: Val, bias: Val, y: Val, ldy: Val, groups: Val, ahead: Val,
             origin: Val) -> None:  # fmt: skip
        sums = start_sums(e, rows, bias, y, ldy, origin)
        with e.loop(groups) as g:
            group, scales = panel + g * TURNED_BYTES, xs + g * SCALES_BYTES
            for line in range(0, size, 64):
                e.prefetch(ahead + g * size, line, 2)
            dots = _turned_dots(e, rows, x + g * block, scales, group)
            d, m = (e.load(VF32, group, TILE * GROUP + i * 64) for i in range(2))
            for r in range(rows):
                _scaled(e, sums[r][0], dots[r], d, m, scales, r)
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 9, emit)


def turning_loop(wide: bool, rows: int) -> Any:
    """As `turned_loop` from packed weights: a group's are turned, to a place in `buffer`, between the dot products of
    the group before.
    """
    size, block, weights = group_bytes(4, wide), 16 * bytes_of_terms(MANY), TILE * GROUP // 2
    scales, each = scale_loader(wide), TILE * GROUP

    def emit(e: Emit, x: Val, xs: Val, w: Val, bias: Val, y: Val, ldy: Val, groups: Val, buffer: Val,
             origin: Val) -> None:  # fmt: skip
        sums = start_sums(e, rows, bias, y, ldy, origin)
        for _ in _turned_to(e, w, buffer):
            pass
        with e.loop(groups) as g:
            group, xg = w + g * size, xs + g * SCALES_BYTES
            _prefetch_group(e, group, size)
            here, there = buffer + (g & 1) * each, buffer + ((g + 1) & 1) * each
            is_last = Val(e, e.b.icmp_signed("==", (g + 1).v, groups.v))
            steps = _turned_to(e, e.select(is_last, group, group + size), there)
            dots = _turned_dots(e, rows, x + g * block, xg, here, steps)
            d, m = scales(e, group, weights), scales(e, group, (size + weights) // 2)
            for r in range(rows):
                _scaled(e, sums[r][0], dots[r], d, m, xg, r)
        store_sums(e, sums, y, ldy)

    return emitted(types.void, [types.int64] * 9, emit)
