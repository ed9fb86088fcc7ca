"""The Walsh-Hadamard transform of a head's channels: what spreads an outlier over its neighbours before quantising.

Orthogonal, symmetric and its own inverse: queries and keys that are both transformed keep every score. Its use before
KV quantisation is QuaRot's (arXiv:2404.00456). Knows no pages and no types.
"""

from __future__ import annotations

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.emit import Emit, Val
from kvledger.kernels.jit import inline


def transform_width(dim: int) -> int:
    """Channels that are transformed together: the largest power of two that divides `dim`, a multiple of 16."""
    return dim & -dim


def _within(e: Emit, x: Val) -> Val:
    """The transform of a vector's 16 lanes, unscaled."""
    for distance in (1, 2, 4, 8):
        x = e.with_partner(x, distance)
    return x


transform_16 = simd.emitted(simd.f32x16, [simd.f32x16], _within)


@inline
def transform_64(x, factor):  # type: ignore[no-untyped-def]
    """64 channels at x, in registers: unscaled within 16, times `factor`, then four sixteens with each other."""
    a, b, c, d = (
        simd.mul(transform_16(simd.load_f32(x)), factor), simd.mul(transform_16(simd.load_f32(x + 64)), factor),
        simd.mul(transform_16(simd.load_f32(x + 128)), factor), simd.mul(transform_16(simd.load_f32(x + 192)), factor),
    )  # fmt: skip
    a, b, c, d = simd.add(a, b), simd.sub(a, b), simd.add(c, d), simd.sub(c, d)
    simd.store_f32(x, simd.add(a, c))
    simd.store_f32(x + 64, simd.add(b, d))
    simd.store_f32(x + 128, simd.sub(a, c))
    simd.store_f32(x + 192, simd.sub(b, d))


@inline
def transform(x, dim, width):  # type: ignore[no-untyped-def]
    """float32[dim] at x: each run of `width` (a power of two ≥ 16) channels times the Hadamard matrix / √width."""
    factor = simd.splat(np.float32(1) / np.sqrt(np.float32(width)))
    if width >= 64:
        for d in range(0, dim, 64):
            transform_64(x + 4 * d, factor)
    else:
        for d in range(0, dim, 16):
            simd.store_f32(x + 4 * d, simd.mul(transform_16(simd.load_f32(x + 4 * d)), factor))
    distance = 64 if width >= 64 else 16
    while distance < width:
        for run in range(0, dim, 2 * distance):
            for d in range(run, run + distance, 16):
                a, b = simd.load_f32(x + 4 * d), simd.load_f32(x + 4 * (d + distance))
                simd.store_f32(x + 4 * d, simd.add(a, b))
                simd.store_f32(x + 4 * (d + distance), simd.sub(a, b))
        distance *= 2
