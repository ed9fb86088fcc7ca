"""Inner loops of attention: scores of query rows against tiles of 16 keys, and weighted sums of their values.

Every loop treats its rows alike and apart, whether they are one, four, eight or a tile's sixteen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, I32, I64, VF32, VI32, Emit, Val
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import inline, rebound
from kvledger.kernels.simd import emitted

SPAN = 256  # keys per span
MAX_ROWS = 64  # query rows per unit of work
SPLIT_ROWS = 16  # most query rows of a unit whose spans are dealt out to threads; up to as many, memory binds
AHEAD = 6  # tiles: how far ahead keys and values are asked for. Behind a span's addresses there must be as many more


class Form(NamedTuple):
    """How two channels of 16 keys, or two keys' values, meet a row's two numbers.

    They are `operands` at an address (and so many bytes after it, where they lie apart), each met by one `word` of the
    row's `pair_bytes`. `widths`: columns of 16 values that loops of one to four rows take at once: enough sums that do
    not wait for each other, few enough for the registers.
    """

    name: str
    operands: Callable[[Emit, Val, Val], list[Val]]
    word: ir.Type
    dot: Callable[[Emit, Val, Val, Val], Val]
    pair_bytes: int
    size: int  # bytes of a key's or value's number
    many: int  # rows of scores at once
    widths: tuple[int, int, int, int]


def _both_channels(e: Emit, address: Val, apart: Val) -> list[Val]:
    return [e.load(VI32, address)]


def _upper_halves(e: Emit, address: Val, apart: Val) -> list[Val]:
    both = e.load(VI32, address)
    return [e.bitcast(both << 16, VF32), e.bitcast(both & -65536, VF32)]


def _two_vectors(e: Emit, address: Val, apart: Val) -> list[Val]:
    return [e.load(VF32, address), e.load(VF32, address + apart)]


def _multiply(e: Emit, total: Val, key: Val, word: Val) -> Val:
    return e.fma(key, word, total)


# dot products of bfloat16, float32 on bfloat16 where the CPU has none, float32 throughout
DOTS = Form("dots", _both_channels, I32, lambda e, s, k, w: e.dot_bf16(s, k, w), 4, 2, 8, (4, 4, 4, 4))
HALVES = Form("halves", _upper_halves, F32, _multiply, 8, 2, 4, (4, 2, 2, 1))
FLOATS = HALVES._replace(name="floats", operands=_two_vectors, size=4)


def _scores(form: Form, rows: int, *, asks: bool = True) -> Any:
    """Scores of `rows` query rows against one tile of 16 keys.

    `asks`: a line of another tile is asked for with each that is read, for few rows wait for memory, and many at
    once would hold up the loads behind them.
    """

    def emit(e: Emit, q: Val, ldq: Val, keys: Val, pairs: Val, out: Val, ahead: Val) -> None:
        sums = [e.var(e.const(VF32, 0.0)) for _ in range(rows)]
        with e.loop(pairs) as p:
            for line in range(form.size // 2 if asks else 0):
                e.prefetch(ahead + p * (32 * form.size), 64 * line, locality=2)
            for i, k in enumerate(form.operands(e, keys + p * (32 * form.size), e.i64(64))):
                for r in range(rows):
                    word = e.load_splat(form.word, q + ldq * r + p * form.pair_bytes, 4 * i)
                    sums[r].set(form.dot(e, sums[r].get(), k, word))
        for r in range(rows):
            e.store(sums[r].get(), out, r * SPAN * 4)

    return emitted(types.void, [types.int64] * 6, emit)


def _mix(form: Form, rows: int, width: int) -> Any:
    """out[rows, 16·width] = P · V over `tiles` tiles of 16 keys whose values lie at `addresses`."""
    row_bytes = SPAN * form.pair_bytes // 2

    def emit(e: Emit, p: Val, addresses: Val, tiles: Val, offset: Val, ldv: Val, out: Val, ldo: Val) -> None:
        sums = [[e.var(e.const(VF32, 0.0)) for _ in range(width)] for _ in range(rows)]
        with e.loop(tiles) as t:
            values, ahead = (e.load(I64, addresses + t * 8, 8 * tile) + offset for tile in (0, AHEAD))
            for pair in range(8):
                at = values + ldv * (pair * form.size // 2)
                for row in range(form.size // 2):
                    for c in range(width):
                        e.prefetch(ahead + ldv * (pair * form.size // 2 + row), 64 * c, locality=2)
                columns = [form.operands(e, at + 64 * c, ldv) for c in range(width)]
                for i in range(len(columns[0])):
                    for r in range(rows):
                        place = r * row_bytes + pair * form.pair_bytes + 4 * i
                        weight = e.load_splat(form.word, p + t * (8 * form.pair_bytes), place)
                        for c in range(width):
                            sums[r][c].set(form.dot(e, sums[r][c].get(), columns[c][i], weight))
        for r in range(rows):
            for c in range(width):
                e.store(sums[r][c].get(), out + ldo * r, c * 64)

    return emitted(types.void, [types.int64] * 7, emit)


# names bound per form
many: Any = None
four: Any = None
three: Any = None
two: Any = None
one: Any = None
narrow4: Any = None
narrow1: Any = None
MANY = 8
WIDTH1, WIDTH2, WIDTH3, WIDTH4 = 4, 4, 4, 4
P_SIZE = 2  # bytes of a weight


def _all_scores(q, ldq, rows, keys, values, first, tiles, dim, out):  # type: ignore[no-untyped-def]
    """Scores of all rows against tiles [first, tiles) of a span."""
    pairs = dim // 2
    for t in range(first, tiles):
        address, ahead, to = simd.get_i64(keys + 8 * t), simd.get_i64(keys + 8 * (t + AHEAD)), out + t * 64
        r = 0
        while rows - r >= 4:
            if r > 0 and rows - r >= MANY:
                many(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, 0)
                r += MANY
            else:
                four(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, ahead)
                r += 4
        if rows - r == 3:
            three(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, ahead)
        elif rows - r == 2:
            two(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, ahead)
        elif rows - r == 1:
            one(q + r * ldq, ldq, address, pairs, to + r * SPAN * 4, ahead)


def _all_mixes(p, values, tiles, dim, rows, out):  # type: ignore[no-untyped-def]
    """out[rows, dim] = P · V over the span's tiles."""
    ldo, ldv, row_bytes = dim * 4, dim * 4, SPAN * P_SIZE
    most, d = rows // 4 * 4, 0
    while most > 0 and d < dim:
        is_wide = dim - d >= 16 * WIDTH4
        for r in range(0, most, 4):
            if is_wide:
                four(p + r * row_bytes, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            else:
                narrow4(p + r * row_bytes, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
        d += 16 * WIDTH4 if is_wide else 16
    at, to, d = p + most * row_bytes, out + most * ldo, 0
    while rows > most and d < dim:
        if rows - most == 3 and dim - d >= 16 * WIDTH3:
            three(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 16 * WIDTH3
        elif rows - most == 2 and dim - d >= 16 * WIDTH2:
            two(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 16 * WIDTH2
        elif rows - most == 1 and dim - d >= 16 * WIDTH1:
            one(at, values, tiles, d * 4, ldv, to + d * 4, ldo)
            d += 16 * WIDTH1
        else:
            for r in range(rows - most):
                narrow1(at + r * row_bytes, values, tiles, d * 4, ldv, to + r * ldo + d * 4, ldo)
            d += 16


_COUNTS = ("one", "two", "three", "four")


def bound_scores(name: str, many: int, make: Callable[..., Any]) -> Any:
    """`_all_scores` with loops that `make` gives for a number of rows, `many` the most."""
    loops = {count: make(rows) for rows, count in enumerate(_COUNTS, 1)} | {"many": make(many, asks=False)}
    return inline(rebound(_all_scores, f"_all_scores_{name}", MANY=many, **loops))


def bound_mixes(name: str, widths: tuple[int, int, int, int], make: Callable[..., Any], p_size: int) -> Any:
    """`_all_mixes` with loops that `make` gives for rows and columns, `widths` for one to four rows; `p_size`: bytes of
    a weight.
    """
    loops = {count: make(rows, widths[rows - 1]) for rows, count in enumerate(_COUNTS, 1)}
    loops |= {"narrow4": make(4, 1), "narrow1": make(1, 1)}
    bound = {f"WIDTH{rows}": width for rows, width in enumerate(widths, 1)}
    return inline(rebound(_all_mixes, f"_all_mixes_{name}", P_SIZE=p_size, **bound, **loops))


# ---------------------------------------------------------------------------------------------- tiles (AMX)


def _scores_amx(e: Emit, q: Val, ldq: Val, keys: Val, blocks: Val, out: Val) -> None:
    """Scores of 16 query rows against one tile of 16 keys, 32 channels at a time."""
    e.tile_zero(0)
    with e.loop(blocks) as d:
        e.tile_load(4, q + d * 64, ldq)
        e.tile_load(5, keys + d * 1024, e.i64(64))
        e.tile_dot("bf16ps", 0, 4, 5)
    e.tile_store(0, out, e.i64(SPAN * 4))


def _mix_amx(width: int) -> Any:
    """As `_mix` for 16 rows."""

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
if ISA.amx:
    scores_amx = emitted(types.void, [types.int64] * 5, _scores_amx)
    mix_amx4, mix_amx1 = _mix_amx(4), _mix_amx(1)
else:
    scores_amx = emitted(types.void, [types.int64] * 5, lambda e, *args: None)
    mix_amx4 = mix_amx1 = emitted(types.void, [types.int64] * 7, lambda e, *args: None)


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
def scores_by_tiles(q, ldq, rows, keys, values, first, tiles, dim, out):  # type: ignore[no-untyped-def]
    """As `_all_scores`, sixteen rows at a time."""
    for t in range(first, tiles):
        address = simd.get_i64(keys + 8 * t)
        if rows <= SPLIT_ROWS:
            ask_ahead(keys, values, first, t, tiles, dim)
        for r in range(0, rows, 16):
            scores_amx(q + r * ldq, ldq, address, (dim + 31) // 32, out + (r * SPAN + t * 16) * 4)


@inline
def mixes_by_tiles(p, values, tiles, dim, rows, out):  # type: ignore[no-untyped-def]
    """As `_all_mixes`, sixteen rows at a time."""
    ldo, ldv = dim * 4, dim * 4
    d = 0
    while d < dim:
        is_wide = dim - d >= 64
        for r in range(0, rows, 16):
            if is_wide:
                mix_amx4(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
            else:
                mix_amx1(p + r * SPAN * 2, values, tiles, d * 4, ldv, out + r * ldo + d * 4, ldo)
        d += 64 if is_wide else 16


def _loops_over(form: Form) -> tuple[Any, Any]:
    """Scores and mixes of a form."""
    scores = bound_scores(form.name, form.many, partial(_scores, form))
    return scores, bound_mixes(form.name, form.widths, partial(_mix, form), form.pair_bytes // 2)


# scores and mixes by bytes of a key's number
LOOPS = {
    2: (scores_by_tiles, mixes_by_tiles) if ISA.amx else _loops_over(DOTS if ISA.bf16 else HALVES),
    4: _loops_over(FLOATS),
}
