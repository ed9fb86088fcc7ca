"""Inner loops of attention: scores of query rows against tiles of 16 keys, and weighted sums of their values.

Every loop treats its rows alike and apart, whether they are one, four, eight or a tile's sixteen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, I32, I64, VF32, VI32, Emit, Val
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import inline, rebound
from kvledger.kernels.simd import emitted

SPAN = 256  # keys per span
SPLIT_ROWS = 16  # most query rows of a unit whose spans are dealt out to threads; up to as many, memory binds


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


def _two_keys(e: Emit, keys: Val, pair: Val, size: int) -> list[Val]:
    """Channels 2·pair and 2·pair + 1 of 16 keys in float32, from keys of `size` bytes."""
    if size == 4:
        return [e.load(VF32, keys + pair * 128, 64 * i) for i in range(2)]
    both = e.load(VI32, keys + pair * 64)
    return [e.bitcast(both << 16, VF32), e.bitcast(both & -65536, VF32)]


def _scores_wide(rows: int, size: int, *, asks: bool = True) -> Any:
    """As `_scores_rows` with queries and sums in float32, where the CPU has no dot products of bfloat16.

    `asks`: on the way a line each is asked for at two addresses, for few rows wait for memory, and many at once
    would hold up the loads behind them.
    """

    def emit(e: Emit, q: Val, ldq: Val, keys: Val, pairs: Val, out: Val, next_keys: Val, values: Val) -> None:
        sums = [e.var(e.const(VF32, 0.0)) for _ in range(rows)]
        with e.loop(pairs) as p:
            if asks:
                e.prefetch(next_keys + p * 64, 0)
                e.prefetch(values + p * 64, 0)
            for i, k in enumerate(_two_keys(e, keys, p, size)):
                for r in range(rows):
                    sums[r].set(e.fma(k, e.load_splat(F32, q + ldq * r + p * 8, i * 4), sums[r].get()))
        for r in range(rows):
            e.store(sums[r].get(), out, r * SPAN * 4)

    return emitted(types.void, [types.int64] * 7, emit)


def _mix_wide(rows: int, size: int, width: int = 0) -> Any:
    """out[rows, 16·width] = P · V with weights in float32, over tiles of 16 keys whose values have `size` bytes.

    `width` 0: `WIDTH`. Few rows take more channels at once: enough sums that do not wait for each other, few enough
    for the registers.
    """
    width = width or WIDTH[rows]

    def emit(e: Emit, p: Val, addresses: Val, tiles: Val, offset: Val, ldv: Val, out: Val, ldo: Val) -> None:
        sums = [[e.var(e.const(VF32, 0.0)) for _ in range(width)] for _ in range(rows)]
        with e.loop(tiles) as t:
            values = e.load(I64, addresses + t * 8) + offset
            for pair in range(8):
                columns = [_two_values(e, values, ldv, pair, c, size) for c in range(width)]
                for i in range(2):
                    for r in range(rows):
                        weight = e.load_splat(F32, p + t * 64, r * SPAN * 4 + (2 * pair + i) * 4)
                        for c in range(width):
                            sums[r][c].set(e.fma(columns[c][i], weight, sums[r][c].get()))
        for r in range(rows):
            for c in range(width):
                e.store(sums[r][c].get(), out + ldo * r, c * 64)

    return emitted(types.void, [types.int64] * 7, emit)


def _two_values(e: Emit, values: Val, ldv: Val, pair: int, column: int, size: int) -> list[Val]:
    """16 channels of the values of keys 2·pair and 2·pair + 1, in float32."""
    if size == 4:
        return [e.load(VF32, values + ldv * (2 * pair + i), column * 64) for i in range(2)]
    both = e.load(VI32, values + ldv * pair, column * 64)
    return [e.bitcast(both << 16, VF32), e.bitcast(both & -65536, VF32)]


WIDTH = {1: 4, 2: 2, 3: 2, 4: 1}  # 16 channels of values at once, by rows


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


# names bound per size of keys and values
wide4: Any = None
wide3: Any = None
wide2: Any = None
wide1: Any = None
narrow1: Any = None
many4: Any = None


def _all_scores_wide(q, ldq, rows, keys, values, first, tiles, dim, out):  # type: ignore[no-untyped-def]
    """As `all_scores`, queries in float32."""
    pairs = dim // 2
    for t in range(first, tiles):
        address, to = simd.get_i64(keys + 8 * t), out + t * 64
        following, value = simd.get_i64(keys + 8 * min(t + 2, tiles - 1)), simd.get_i64(values + 8 * t)
        r = 0
        while rows - r >= 4:
            if r > 0:
                many4(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, 0, 0)
            else:
                wide4(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, following, value)
            r += 4
        if rows - r == 3:
            wide3(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, following, value)
        elif rows - r == 2:
            wide2(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, following, value)
        elif rows - r == 1:
            wide1(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, following, value)


def _all_mixes_wide(p, values, tiles, dim, rows, out):  # type: ignore[no-untyped-def]
    """As `all_mixes`, weights in float32."""
    ldo, ldv = dim * 4, dim * 4
    most = rows // 4 * 4
    for d in range(0, dim, 16):
        for r in range(0, most, 4):
            wide4(p + r * SPAN * 4, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
    at, to, d = p + most * SPAN * 4, out + most * ldo, 0
    while rows > most and d < dim:
        if rows - most == 3 and dim - d >= 32:
            wide3(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 32
        elif rows - most == 2 and dim - d >= 32:
            wide2(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 32
        elif rows - most == 1 and dim - d >= 64:
            wide1(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 64
        else:
            for r in range(rows - most):
                narrow1(at + r * SPAN * 4, values, tiles, d * 4, ldv, to + r * ldo + d * 4, ldo)
            d += 16


def _scores_over(size: int) -> Any:
    loops = {f"wide{rows}": _scores_wide(rows, size) for rows in WIDTH}
    many = _scores_wide(4, size, asks=False)
    return inline(rebound(_all_scores_wide, f"_all_scores_wide_{8 * size}", many4=many, **loops))


def _mixes_over(size: int) -> Any:
    loops = {f"wide{rows}": _mix_wide(rows, size) for rows in WIDTH}
    narrow = _mix_wide(1, size, 1)
    return inline(rebound(_all_mixes_wide, f"_all_mixes_wide_{8 * size}", narrow1=narrow, **loops))


all_scores_wide = {size: _scores_over(size) for size in (2, 4)}
all_mixes_wide = {size: _mixes_over(size) for size in (2, 4)}


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
