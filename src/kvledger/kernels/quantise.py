"""Float32 → activations as products take them: a row's group of 32, or sixteen groups at once.

The largest number and the sum of a group are trees of four steps, and its scale and inverse are divisions: one group
alone waits for them most of the time. Sixteen are transposed by the trees, so that each step works on all, and their
scales are one vector: as they lie, where the groups are those of 16 rows. Either way gives the same bits. How
activations lie: `packed.py`. Knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, VF32, VI8, Emit, Val
from kvledger.kernels.jit import inline
from kvledger.kernels.matmul_amx import store_activations
from kvledger.kernels.packed import ORDER, SCALES_BYTES, TERM_BITS, bytes_of_terms, integer_mode
from kvledger.kernels.turned import FEW, MANY, TERM_SHIFT, TURN, form_of, sum_of_turned, turn
from kvledger.kernels.turned import start as turned_start

SIXTEEN = 16
GROUP_BYTES = np.int64(128)  # of a group in float32; of a literal Numba would compile a version of its own
# bytes into a thread's scratch, which begins with sixteen groups in float32
WORK_SCALES = 2048  # scales and sums on their way
WORK_FACTORS = WORK_SCALES + SCALES_BYTES  # 16 float32 of the caller's
WORK_BYTES = WORK_FACTORS + 64

row_bytes, form = inline(bytes_of_terms), inline(form_of)


def _store_terms(e: Emit, integers: Sequence[Val], bits: int, at: Val) -> None:
    """A group's 32 integers as bytes, or as two of them with x = high · 2^bits + low."""
    parts = list(integers)
    if bits:
        high = [(q + (1 << bits >> 1)).sra(bits) for q in parts]
        parts = high + [q - (h << bits) for q, h in zip(parts, high, strict=True)]
    for i, q in enumerate(parts):
        e.store(Val(e, e.b.trunc(q.v, VI8)), at, 16 * i)


class Form(NamedTuple):
    """One of the forms of integer activations: what is made of a group's 32 numbers and of its 32 levels."""

    read: Callable[[Emit, Val, Val], list[Val]]
    store: Callable[[Emit, list[Val], Val], None]
    sums: Callable[[Emit, list[Val]], Val]  # lanes whose sum is that of the integers
    starts: Callable[[Emit, list[Val]], Val] | None = None


def _terms(bits: int) -> Form:
    return Form(lambda e, x, y: [x, y], lambda e, q, at: _store_terms(e, q, bits, at), lambda e, q: q[0] + q[1])


_PAIRS = _terms(0)._replace(store=lambda e, q, at: e.store_i16_pairs(q[0], q[1], at, ORDER))
_TURNED = Form(
    lambda e, x, y: turn(e, *(v * (1 / TURN) for v in (x, y))), lambda e, q, at: _store_terms(e, q, 0, at),
    lambda e, q: sum_of_turned(e, q[0]), lambda e, q: turned_start(e, *q),
)  # fmt: skip
_TURNED_BACK = _TURNED._replace(store=lambda e, q, at: _store_terms(e, turn(e, *q), TERM_SHIFT, at), starts=None)


def _of_sixteen(form: Form) -> Any:
    """Sixteen groups `step` bytes apart → their integers, `to_step` apart, and 16 scales, sums and starts."""

    def emit(e: Emit, x: Val, step: Val, to: Val, to_step: Val, scales: Val, level: Val) -> None:
        def read(r: int) -> list[Val]:
            return form.read(e, *(e.load(VF32, x + step * r, half) for half in (0, 64)))

        numbers = [read(r) for r in range(SIXTEEN)]
        largest = e.reduce_rows([e.max(*map(e.abs, each)) for each in numbers], e.max)
        levels, none = e.splat(level), e.const(VF32, 0.0)
        inverse, sums, starts = e.select(none < largest, levels / largest, none), [], []
        for r in range(SIXTEEN):
            factor = e.shuffle(inverse, inverse, [r] * SIXTEEN)
            q = [e.round_i32(v * factor) for v in numbers[r]]
            form.store(e, q, to + to_step * r)
            sums.append(form.sums(e, q))
            if form.starts:
                starts.append(form.starts(e, q))
        scale = largest / levels
        e.store(scale, scales)
        e.store(scale * e.to_f32(e.reduce_rows(sums, _add)), scales, 64)
        if starts:
            e.store(e.reduce_rows(starts, _add), scales, 128)

    return simd.emitted(types.void, [types.int64] * 5 + [types.float32], emit)


def _of_one(form: Form) -> Any:
    """A group → its integers, and its scale, sum and start where they lie for its row."""

    def emit(e: Emit, x: Val, y: Val, to: Val, scales: Val, level: Val) -> None:
        numbers = form.read(e, x, y)
        largest = e.halve(e.max(*map(e.abs, numbers)), e.max)
        none = Val(e, ir.Constant(F32, 0.0))
        inverse = e.splat(e.select(none < largest, level / largest, none))
        q = [e.round_i32(v * inverse) for v in numbers]
        form.store(e, q, to)
        scale = largest / level
        e.store(scale, scales)
        e.store(scale * e.to_f32(e.halve(form.sums(e, q), _add)), scales, 64)
        if form.starts:
            e.store(e.halve(form.starts(e, q), _add), scales, 128)

    return simd.emitted(types.void, [simd.f32x16] * 2 + [types.int64] * 2 + [types.float32], emit)


def _add(a: Val, b: Val) -> Val:
    return a + b


FINE = integer_mode("int8x2", 8)  # of the forms of 15 bits the one that products take here
_FORMS = {"int8": _terms(0), FINE: _PAIRS if FINE == "int16" else _terms(TERM_BITS[FINE])}
_sixteen_int8, _sixteen_fine = (_of_sixteen(form) for form in _FORMS.values())
_one_int8, _one_fine = (_of_one(form) for form in _FORMS.values())
_sixteen_turned, _sixteen_turned_back = _of_sixteen(_TURNED), _of_sixteen(_TURNED_BACK)
_one_turned, _one_turned_back = _of_one(_TURNED), _of_one(_TURNED_BACK)


@inline
def has_scales(shift):  # type: ignore[no-untyped-def]
    """Whether these activations are integers."""
    return shift >= 0 or shift < -2


@inline
def quantise_group(v0, v1, out, row, group):  # type: ignore[no-untyped-def]
    """Two vectors, 32 activations of a row's group → `out`: (values, scales, groups, shift, level).

    `shift` is `TERM_BITS`' number, or which of the two forms of turned ones (`form`).
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
    if shift == 0:
        _one_int8(v0, v1, values, scales, level)
    elif shift == MANY:
        _one_turned(v0, v1, values, scales, level)
    elif shift == FEW:
        _one_turned_back(v0, v1, values, scales, level)
    else:
        _one_fine(v0, v1, values, scales, level)


@inline
def _quantise_sixteen(x, step, values, to_step, scales, shift, level):  # type: ignore[no-untyped-def]
    if shift == 0:
        _sixteen_int8(x, step, values, to_step, scales, level)
    elif shift == MANY:
        _sixteen_turned(x, step, values, to_step, scales, level)
    elif shift == FEW:
        _sixteen_turned_back(x, step, values, to_step, scales, level)
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
        for each in range(0, SCALES_BYTES if shift == MANY else SCALES_BYTES - 64, 64):
            simd.put_f32(scales + i * SCALES_BYTES + each, simd.get_f32(kept + each + 4 * i))
