"""y = x Wᵀ with quantised weights of 4 or 8 bits, a scale and a minimum per 32; activations of 8 or 15 bits, or turned.

How both lie: `packed.py`. A group's dot product is an exact integer, and groups are added in ascending order in
float32, so the number of rows cannot change a bit of any of them. The AMX path, which computes otherwise, is in
`matmul_amx.py`. Attention, models and files are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel, inline, rebound
from kvledger.kernels.matmul_loops import (
    PARTS,
    TURNED_BYTES,
    halves_loop,
    panel_bytes,
    panel_loop,
    terms_loop,
    turn_loop,
    turned_loop,
    turning_loop,
    unpack_loop,
)
from kvledger.kernels.packed import (
    SCALES_BYTES,
    TERM_BITS,
    TILE,
    Activations,
    PackedMatrix,
    bytes_of_terms,
    group_bytes,
    integer_mode,
    x_bytes,
)
from kvledger.kernels.team import next_item
from kvledger.kernels.turned import MANY, MANY_ROWS, TERM_SHIFT

# ctx words that every kernel may read
ROWS, SCRATCH, SCRATCH_BYTES, NUM_THREADS = 0, 1, 2, 3


ROWS_AT = 23 * 8  # byte offset in an op of the address of its number of rows; 0: the step's


@inline
def num_rows(op: int, ctx: int) -> Any:
    """Rows that an op works on."""
    at = simd.get_i64(op + ROWS_AT)
    return simd.get_i64(ctx + 8 * ROWS) if at == 0 else simd.get_i64(at)


# ---------------------------------------------------------------------------------------------- kernels

# names bound per variant
rows_many: Any = None
ROW_BYTES = 64  # of a row's group of activations
MOST = 8  # rows that `rows_many` takes: 8, or 4 where registers are few
rows4: Any = None
rows2: Any = None
rows1: Any = None
unpack: Any = None
from_packed: Any = None
from_panel: Any = None
turning: Any = None
multiply_tile: Any = None
STRIDE = 0  # bytes of a tile's group
CHUNK = 0  # groups unpacked to a panel
PANEL_ROWS = 12  # from here on a panel is read often enough to be worth its making

PANEL_BYTES = 16 << 10  # half of an L1 cache


def _all_rows(x, xs, w, bias, y, ldy, rows, first, groups, count, shift, origin):  # type: ignore[no-untyped-def]
    """Groups [first, first + count) of all rows for one tile, whose weights of these groups are at w."""
    for r0 in range(0, rows, 16):
        at = r0 // 16 * groups + first
        xr, sr, yr = x + at * 16 * ROW_BYTES, xs + at * SCALES_BYTES, y + r0 * ldy
        r, end = 0, min(16, rows - r0)
        while end - r >= MOST:
            rows_many(xr + r * ROW_BYTES, sr + r * 4, w, bias, yr + r * ldy, ldy, count, shift, origin)
            r += MOST
        if MOST > 4 and end - r >= 4:
            rows4(xr + r * ROW_BYTES, sr + r * 4, w, bias, yr + r * ldy, ldy, count, shift, origin)
            r += 4
        if end - r >= 2:
            rows2(xr + r * ROW_BYTES, sr + r * 4, w, bias, yr + r * ldy, ldy, count, shift, origin)
            r += 2
        if end - r >= 1:
            rows1(xr + r * ROW_BYTES, sr + r * 4, w, bias, yr + r * ldy, ldy, count, shift, origin)


def _direct(x, xs, w, bias, y, ldy, rows, groups, shift, add, panel):  # type: ignore[no-untyped-def]
    """One tile from packed weights."""
    from_packed(x, xs, w, bias, y, ldy, rows, 0, groups, groups, shift, add)


def _by_panels(x, xs, w, bias, y, ldy, rows, groups, shift, add, panel):  # type: ignore[no-untyped-def]
    """One tile; many rows read its weights unpacked, some groups at a time, and go on from the sums in y."""
    if rows < PANEL_ROWS:
        from_packed(x, xs, w, bias, y, ldy, rows, 0, groups, groups, shift, add)
        return
    for first in range(0, groups, CHUNK):
        count = min(CHUNK, groups - first)
        unpack(w + first * STRIDE, panel, count)
        from_panel(x, xs, panel, bias, y, ldy, rows, first, groups, count, shift, add if first == 0 else 2)


def _turned(x, xs, w, bias, y, ldy, rows, groups, shift, add, panel):  # type: ignore[no-untyped-def]
    """As `_by_panels`; the first 16 rows ask for the weights that are turned next. A single loop needs no panel."""
    if rows < MANY_ROWS:
        from_packed(x, xs, w, bias, y, ldy, rows, 0, groups, groups, shift, add)
        return
    if rows == MOST:
        turning(x, xs, w, bias, y, ldy, groups, panel, add)
        return
    for first in range(0, groups, CHUNK):
        count = min(CHUNK, groups - first)
        unpack(w + first * STRIDE, panel, count)
        for r0 in range(0, rows, 16):
            at = r0 // 16 * groups * 16
            from_panel(
                x + at * ROW_BYTES, xs + at // 16 * SCALES_BYTES, panel, bias, y + r0 * ldy, ldy, min(16, rows - r0),
                first, groups, count, w + (first + count) * STRIDE if r0 == 0 else panel, add if first == 0 else 2,
            )  # fmt: skip


def _matmul(op: int, ctx: int, thread: int) -> None:
    """Arguments: x, scales, weights, bias, y, tiles, groups, ldy bytes, shift (or PARTS), add."""
    x, xs = simd.get_i64(op + 8), simd.get_i64(op + 16)
    w, bias, y = simd.get_i64(op + 24), simd.get_i64(op + 32), simd.get_i64(op + 40)
    num_tiles, groups, ldy = simd.get_i64(op + 48), simd.get_i64(op + 56), simd.get_i64(op + 64)
    shift, add = simd.get_i64(op + 72), simd.get_i64(op + 80)
    panel = simd.get_i64(ctx + 8 * SCRATCH) + thread * simd.get_i64(ctx + 8 * SCRATCH_BYTES)
    rows = num_rows(op, ctx)
    share = simd.get_i64(ctx + 8 * NUM_THREADS) * (8 if rows > 4 else 2)
    chunk = max(1, num_tiles // share)
    while True:
        first = next_item(op) * chunk
        if first >= num_tiles:
            break
        for t in range(first, min(first + chunk, num_tiles)):
            tile = w + t * groups * STRIDE
            multiply_tile(x, xs, tile, bias + t * 64, y + t * 64, ldy, rows, groups, shift, add, panel)


def _rows_of(name: str, row_bytes: int, loop: Callable[[int], Any], most: int) -> Any:
    """`_all_rows` over a loop for one, two, four (and eight) rows; `name` says which."""
    loops = {rows: loop(rows) for rows in (1, 2, 4, 8) if rows <= most}
    bound: dict[str, Any] = {f"rows{rows}": each for rows, each in loops.items()}
    bound |= {"rows_many": loops[most], "MOST": most, "ROW_BYTES": row_bytes}
    return inline(rebound(_all_rows, f"_all_rows_{name}", **bound))


def _tile(name: str, bits: int, wide: bool, mode: str) -> Any:
    """`multiply_tile` of a variant."""
    stride, is_pairs, size = group_bytes(bits, wide), mode == "int16", x_bytes(mode)
    if mode == "turned":
        packed = _rows_of(name, size, lambda rows: terms_loop(bits, wide, 2, rows), 8)
        panel = _rows_of(f"panel_{name}", bytes_of_terms(MANY), lambda rows: turned_loop(wide, rows), 8)
        bound = {"from_packed": packed, "from_panel": panel, "unpack": turn_loop(wide)}
        bound["turning"] = turning_loop(wide, MOST)
        return _paneled(_turned, name, stride, TURNED_BYTES, bound | {"ROW_BYTES": bytes_of_terms(MANY)})
    if ISA.vnni:
        packed = _rows_of(name, size, lambda rows: terms_loop(bits, wide, 1 if mode == "int8" else 2, rows), 8)
        return inline(rebound(_direct, f"_direct_{name}", from_packed=packed))
    packed = _rows_of(name, size, lambda rows: halves_loop(bits, wide, is_pairs, rows), 4)
    panel = _rows_of(f"panel_{name}", size, lambda rows: panel_loop(is_pairs, rows), 4)
    bound = {"from_packed": packed, "from_panel": panel, "unpack": unpack_loop(bits, wide, is_pairs)}
    return _paneled(_by_panels, name, stride, panel_bytes(is_pairs), bound)


def _paneled(template: Any, name: str, stride: int, panel_group: int, bound: dict[str, Any]) -> Any:
    """`template` with panels of `panel_group` bytes per group."""
    sizes = {"STRIDE": stride, "CHUNK": PANEL_BYTES // panel_group}
    return inline(rebound(template, f"{template.__name__}_{name}", **bound, **sizes))


class Variant(NamedTuple):
    """What a product binds: its name, one tile of it for all rows, bytes of a tile's group."""

    name: str
    multiply_tile: Any
    stride: int


def _variant(bits: int, wide: bool, mode: str) -> Variant:
    name = f"q{bits}{'f' if wide else ''}_{mode}"
    return Variant(name, _tile(name, bits, wide, mode), group_bytes(bits, wide))


# by bits and `wide` of the weights and the activations' mode, as `integer_mode` gives it
VARIANTS: dict[tuple[int, bool, str], Variant] = {
    (bits, wide, mode): _variant(bits, wide, mode)
    for bits in (4, 8)
    for wide in (False, True)
    for mode in (("int8", "int8x2", "turned") if ISA.vnni else ("int8", "int16"))
    if mode == integer_mode(mode, bits)
}
KERNELS = {
    key: Kernel(f"matmul_{name}", _matmul, multiply_tile=tile, STRIDE=stride)
    for key, (name, tile, stride) in VARIANTS.items()
}


def shift_of(mode: str) -> int:
    """What loops are told of activations: bits of the low term, or PARTS."""
    return PARTS if not ISA.vnni else TERM_SHIFT if mode == "turned" else TERM_BITS[mode]


def matmul(x: Activations, w: PackedMatrix, y: int, ldy: int, mode: str, bias: np.ndarray, *, add: bool) -> list[int]:
    """The op y[row, n] (+)= Σ x w + bias. `y` is the address of float32 rows `ldy` bytes apart, padded to 16 rows.

    `bias` is float32[≥ padded N]; zeros for none.
    """
    assert x.cols == w.cols, f"{x.cols} activations meet rows of {w.cols} weights"
    assert len(bias) >= w.num_tiles * TILE
    return [
        KERNELS[w.bits, w.wide, mode].address, x.values.ctypes.data, x.scales.ctypes.data, w.data.ctypes.data,
        bias.ctypes.data, y, w.num_tiles, w.num_groups, ldy, shift_of(mode), int(add),
    ]  # fmt: skip
