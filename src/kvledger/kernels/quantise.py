"""Float32 → activations as products take them: a row's group of 32, or sixteen groups at once.

The largest number and the sum of a group are trees of four steps, and its scale and inverse are divisions: one group
alone waits for them most of the time. Sixteen are transposed by the trees, so that each step works on all, and their
scales are one vector: as they lie, where the groups are those of 16 rows. Either way gives the same bits. How
activations lie: `packed.py`. Knows nothing of where they come from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import VF32, VI8, Emit, Val
from kvledger.kernels.jit import inline
from kvledger.kernels.matmul_amx import store_activations
from kvledger.kernels.packed import ORDER, SCALES_BYTES, TERM_BITS, bytes_of_terms, integer_mode

SIXTEEN = 16
GROUP_BYTES = np.int64(128)  # of a group in float32; of a literal Numba would compile a version of its own
# bytes into a thread's scratch, which begins with sixteen groups in float32
WORK_SCALES = 2048  # scales and sums on their way
WORK_FACTORS = WORK_SCALES + SCALES_BYTES  # 16 float32 of the caller's
WORK_BYTES = WORK_FACTORS + 64

row_bytes = inline(bytes_of_terms)


def _store(e: Emit, mode: str, q0: Val, q1: Val, at: Val) -> None:
    """A group's integers as `mode` keeps them."""
    if mode == "int16":
        e.store_i16_pairs(q0, q1, at, ORDER)
        return
    low = [q0, q1]
    if bits := TERM_BITS[mode]:
        high = [(q + (1 << bits >> 1)).sra(bits) for q in low]
        low = high + [q - (h << bits) for q, h in zip(low, high, strict=True)]
    for i, q in enumerate(low):
        e.store(Val(e, e.b.trunc(q.v, VI8)), at, 16 * i)


def _of_sixteen(mode: str) -> Any:
    """Sixteen groups `step` bytes apart → their integers, `to_step` apart, and 16 scales and 16 sums."""

    def emit(e: Emit, x: Val, step: Val, to: Val, to_step: Val, scales: Val, level: Val) -> None:
        def read(r: int) -> list[Val]:
            return [e.load(VF32, x + step * r, half) for half in (0, 64)]

        largest = e.reduce_rows([e.max(*map(e.abs, read(r))) for r in range(SIXTEEN)], e.max)
        levels, none = e.splat(level), e.const(VF32, 0.0)
        inverse, sums = e.select(none < largest, levels / largest, none), []
        for r in range(SIXTEEN):
            factor = e.shuffle(inverse, inverse, [r] * SIXTEEN)
            q0, q1 = (e.round_i32(v * factor) for v in read(r))
            _store(e, mode, q0, q1, to + to_step * r)
            sums.append(q0 + q1)
        scale = largest / levels
        e.store(scale, scales)
        e.store(scale * e.to_f32(e.reduce_rows(sums, lambda a, b: a + b)), scales, 64)

    return simd.emitted(types.void, [types.int64] * 5 + [types.float32], emit)


def _of_one(mode: str) -> Any:
    return simd.emitted(
        types.void, [types.int64, simd.i32x16, simd.i32x16], lambda e, to, q0, q1: _store(e, mode, q0, q1, to)
    )


FINE = integer_mode("int8x2", 8)  # of the forms of 15 bits the one that products take here
_sixteen_int8, _sixteen_fine = _of_sixteen("int8"), _of_sixteen(FINE)
_one_int8, _one_fine = _of_one("int8"), _of_one(FINE)


@inline
def has_scales(shift):  # type: ignore[no-untyped-def]
    """Whether these activations are integers."""
    return shift >= 0 or shift == -3


@inline
def quantise_group(v0, v1, out, row, group):  # type: ignore[no-untyped-def]
    """Two vectors, 32 activations of a row's group → `out`: (values, scales, groups, shift, level).

    `shift` is `TERM_BITS`' number: below 0 the forms without terms, of which only the integers have scales.
    """
    values, scales, groups, shift, level = out
    values += ((row // 16 * groups + group) * 16 + row % 16) * row_bytes(shift)
    if shift == -2:
        simd.store_f32(values, v0)
        simd.store_f32(values + 64, v1)
        return
    if shift == -1:
        store_activations(v0, v1, values)
        return
    scales += (row // 16 * groups + group) * SCALES_BYTES + row % 16 * 4
    largest = simd.reduce_max(simd.maximum(simd.absolute(v0), simd.absolute(v1)))
    scale = largest / level
    inverse = simd.splat(level / largest if largest > np.float32(0) else np.float32(0))
    q0, q1 = simd.round_i32(simd.mul(v0, inverse)), simd.round_i32(simd.mul(v1, inverse))
    if shift == 0:
        _one_int8(values, q0, q1)
    else:
        _one_fine(values, q0, q1)
    simd.put_f32(scales, scale)
    simd.put_f32(scales + 64, scale * np.float32(simd.reduce_add_i32(simd.add_i32(q0, q1))))


@inline
def _quantise_sixteen(x, step, values, to_step, scales, shift, level):  # type: ignore[no-untyped-def]
    if shift == 0:
        _sixteen_int8(x, step, values, to_step, scales, level)
    else:
        _sixteen_fine(x, step, values, to_step, scales, level)


@inline
def quantise_rows(x, step, out, block, group):  # type: ignore[no-untyped-def]
    """A group of each of a block's 16 rows, which lie `step` bytes apart at x."""
    values, scales, groups, shift, level = out
    at, size = block * groups + group, row_bytes(shift)
    _quantise_sixteen(x, step, values + at * 16 * size, size, scales + at * SCALES_BYTES, shift, level)


@inline
def quantise_groups(x, out, row, group, work):  # type: ignore[no-untyped-def]
    """Groups group … group + 15 of a row, which lie together at x."""
    values, scales, groups, shift, level = out
    at, size, kept = row // 16 * groups + group, row_bytes(shift), work + WORK_SCALES
    _quantise_sixteen(x, GROUP_BYTES, values + (at * 16 + row % 16) * size, 16 * size, kept, shift, level)
    scales += at * SCALES_BYTES + row % 16 * 4
    for i in range(SIXTEEN):
        simd.put_f32(scales + i * SCALES_BYTES, simd.get_f32(kept + 4 * i))
        simd.put_f32(scales + i * SCALES_BYTES + 64, simd.get_f32(kept + 64 + 4 * i))
