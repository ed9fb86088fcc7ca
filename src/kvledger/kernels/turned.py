"""Turned activations: 8 bits after a Hadamard matrix within each group, multiplied exactly by 4-bit weights.

x ≈ s · H a, where a = round(H x / 16 s) are bytes and H turns a group's 16 even channels with each other, and its odd
ones: an outlier is spread over sixteen levels instead of making one scale too coarse for its neighbours (QuaRot,
arXiv:2404.00456, does so for whole rows). Since H is symmetric, Σ q · H a = Σ H q · a, in integers: few rows bring
L = H a (12 bits, two terms) to the packed weights q; for many rows the weights of a tile are turned once, into bytes,
and a is one term. Both give the same integers, hence the same bits.

A sum of 16 levels of 4 bits is 0 … 240, what else H makes of them −120 … 120: 128 is added to the latter, and 128 times
the Σ a of their places taken away beforehand (`start`). Knows how one group is turned; rows, tiles and memory are the
products' (`matmul.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from llvmlite import ir

from kvledger.kernels.emit import I1, I8, LANES, VI32, Emit, Val, vec

TURN = 16  # channels turned with each other
DISTANCES = (2, 4, 8)  # within a vector of 16 channels; the fourth is between a group's two
TERM_SHIFT = 7  # between the two terms of L
FEW, MANY = -4, -5  # the two forms, as `packed.TERM_BITS` names those of other activations
MANY_ROWS = 6  # from here on weights are turned: less work than a second term for every row
OFFSET_BYTE = -128  # 128 as LLVM writes a byte
_SUMS = (0, 1)  # places of the two sums of sixteen among a group's 32
_BYTES = vec(I8, 64)


def turn(e: Emit, x: Val, y: Val) -> list[Val]:
    """H of a group's 32 channels, unscaled; float32 or int32, 16 in each of x and y. Its square is 16."""
    turned = [x + y, x - y]
    for distance in DISTANCES:
        turned = [e.with_partner(v, distance) for v in turned]
    return turned


def sum_of_turned(e: Emit, a: Val) -> Val:
    """Lanes whose sum is that of H a, from the first 16 of a."""
    return _where_sums(e, a, e.const(VI32, 0)) << (TURN.bit_length() - 1)


def start(e: Emit, a: Val, b: Val) -> Val:
    """Lanes whose sum makes up for what is added to differences, from the 32 levels of a row's group."""
    return e.const(VI32, 0) - ((_where_sums(e, e.const(VI32, 0), a) + b) << 7)


def _where_sums(e: Emit, yes: Val, no: Val) -> Val:
    return e.select(Val(e, ir.Constant(vec(I1), [int(i in _SUMS) for i in range(LANES)])), yes, no)


def turning(e: Emit, quads: Iterable[Val], v: list[Val]) -> Iterator[None]:
    """H q of a tile's group as bytes, in v, from q as `matmul_loops.weight_quads` gives it: eight quads of 16 outputs ×
    4 inputs. Yields after every few instructions, so that others can stand between them.
    """
    for quad in quads:
        v.append(e.with_partner(e.bitcast(quad, _BYTES), DISTANCES[0]))
        yield
    v[0] = v[0] + OFFSET_BYTE  # what is added to the first quad comes out in all …
    for distance in (1, 2, 4):
        for i in (i for i in range(8) if i & distance == 0):
            v[i], v[i + distance] = v[i] + v[i + distance], v[i] - v[i + distance]
            yield
    at_sums = ir.Constant(_BYTES, [OFFSET_BYTE if i % 4 in _SUMS else 0 for i in range(64)])
    v[0] = v[0] + Val(e, at_sums)  # … but the sums need none: twice 128 is nothing


def form_of(shift: int, rows: int) -> Any:
    """Turned activations of `rows` rows are in one of two forms. Plain enough for Numba."""
    return (MANY if rows >= MANY_ROWS else FEW) if shift == FEW else shift
