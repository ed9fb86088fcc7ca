"""How weights and activations lie in memory for the products, and packing weights into that form.

Weights lie in tiles of 16 outputs; per group of 32 inputs a tile holds its bytes ready for the dot product, then 16
scales and 16 minima. Activations lie by blocks of 16 rows, as [block][group][row][`x_bytes`]: 32 terms, or 32 high ones
and then 32 low ones, with x = scale · (high · 2^shift + low), or 32 numbers of 16 bits in ORDER; scales, scale × Σ, and
what `turned.py` starts from, as [block][group][scales, sums, starts][row]. Knows no kernels, models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvledger.kernels.isa import ISA
from kvledger.kernels.turned import FEW, MANY

GROUP = 32  # inputs that share a scale
TILE = 16  # outputs computed together
SCALES_BYTES = 192  # of a group of 16 rows: their scales, their sums, and starts (turned only)
# How activations are kept: bits of the low of two 8-bit terms, or below 0: bfloat16 as `matmul_amx` reads it, float32
# as `matmul_f32` does, 16-bit integers, 8-bit ones turned (`turned.py`).
TERM_BITS = {"int8": 0, "int8x2": 7, "bf16": -1, "fp32": -2, "int16": -3, "turned": FEW}
TURNING, FIFTEEN_BITS = 1, 2  # what a product may be worth in `mixed`
EITHER = TURNING | FIFTEEN_BITS
FLOAT_MODES = ("bf16", "fp32")  # of activations that are no integers and have no scales
# Largest integer activation. 15 bits in both forms, so that they give the same numbers.
MAX_LEVEL = {"int8": 127, "turned": 127, "int8x2": 127 * 128 + 63, "int16": 127 * 128 + 63}
# Place i of a group's 32 inputs in 16-bit forms holds input ORDER[i]: as nibbles and bytes fall out of 16-bit lanes.
ORDER = [8 * p + k for p in range(4) for k in (0, 2, 4, 6, 1, 3, 5, 7)]


def bytes_of_terms(term_bits: int) -> int:
    """Bytes of a row's group of activations kept as `TERM_BITS` or `turned.MANY` tells. Plain enough for Numba."""
    return 32 if term_bits in (0, MANY) else 128 if term_bits == -2 else 64


def x_bytes(mode: str) -> int:
    """Bytes of a row's group of activations."""
    return bytes_of_terms(TERM_BITS[mode])


def integer_mode(mode: str, bits: int, worth: int = 0) -> str:
    """`int8`, `int8x2`, `turned` or `mixed` as this CPU multiplies it best by weights of `bits` bits.

    Without dot products of bytes (VNNI) 16-bit integers take no longer than two terms, nor than one by 8-bit weights.
    `mixed` goes by what a product is `worth`: turning, where that is possible (4-bit weights, with VNNI), or else 15
    bits; 8 bits otherwise.
    """
    turns = bits == 4 and ISA.vnni
    if mode == "mixed":
        mode = "turned" if worth & (TURNING if turns else FIFTEEN_BITS) else "int8"
    if mode == "turned" and not turns:
        mode = "int8x2"
    if ISA.vnni or (mode == "int8" and bits == 4 and ISA.name == "avx2"):
        return mode
    return "int16"


def group_bytes(bits: int, wide: bool) -> int:
    """Bytes of a tile's group: 512 weights, then scales and minima (float32 if `wide`, else float16) below 16 bits."""
    return TILE * GROUP * bits // 8 + (0 if bits >= 16 else 2 * TILE * (4 if wide else 2))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights of `rows` outputs × `cols` inputs, ready for the kernels. `data` is uint8, 64 bytes aligned."""

    rows: int
    cols: int
    bits: int  # 4 or 8: levels; 16: bfloat16; 32: float32
    wide: bool  # float32 scales: where float16 would not be exact
    data: np.ndarray

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // TILE)

    @property
    def num_groups(self) -> int:
        return self.cols // GROUP


def aligned_zeros(num_bytes: int) -> np.ndarray:
    """uint8[num_bytes] of zeros at a multiple of 64; pages are committed when first written.

    Zeros, because a masked place of a KV block is still multiplied (by 0): stale numbers are harmless, NaN is not.
    """
    buffer = np.zeros(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


def aligned(shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """As `aligned_zeros`, of a shape: no vector on two cache lines, and no line shared by two tiles of outputs."""
    return aligned_zeros(prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def pack(levels: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int) -> PackedMatrix:
    """uint8[N, K] levels < 2^bits, float32[N, K/32] scales and minima → tiles. w = scale · level + minimum.

    N is padded to a multiple of 16 with zeros; K must be a multiple of 32.
    """
    n, k = levels.shape
    if pad := -n % TILE:
        levels, scale, minimum = (np.pad(a, ((0, pad), (0, 0))) for a in (levels, scale, minimum))
    tiles, groups = levels.shape[0] // TILE, k // GROUP
    wide = not (_fits_f16(scale) and _fits_f16(minimum))
    kind: Any = np.float32 if wide else np.float16
    size = group_bytes(bits, wide)
    data = aligned_zeros(tiles * groups * size).reshape(tiles, groups, size)
    weights = TILE * GROUP * bits // 8
    quads = levels.reshape(tiles, TILE, groups, 8, 4).transpose(0, 2, 3, 1, 4)  # tile, group, quad, output, input
    if bits == 4:
        quads = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    data[:, :, :weights] = quads.reshape(tiles, groups, weights)
    half = (size - weights) // 2
    for start, values in ((weights, scale), (weights + half, minimum)):
        rows = np.ascontiguousarray(values.reshape(tiles, TILE, groups).transpose(0, 2, 1).astype(kind))
        data[:, :, start : start + half] = rows.view(np.uint8)
    return PackedMatrix(n, k, bits, wide, data.reshape(-1))


def pack_dense(w: np.ndarray, bits: int) -> PackedMatrix:
    """float32[N, K] → tiles of bfloat16 ([16 pairs][16 outputs][2] in ORDER) or float32 ([32 inputs][16 outputs])."""
    n, k = w.shape
    w = np.pad(w, ((0, -n % TILE), (0, 0)))
    tiles, groups = len(w) // TILE, k // GROUP
    data = aligned_zeros(tiles * groups * group_bytes(bits, False))
    grouped = w.reshape(tiles, TILE, groups, GROUP)
    if bits == 32:
        data.view(np.float32).reshape(tiles, groups, GROUP, TILE)[:] = grouped.transpose(0, 2, 3, 1)
    else:
        raw = np.ascontiguousarray(grouped, np.float32).view(np.uint32)
        half = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)[..., ORDER]
        pairs = half.reshape(tiles, TILE, groups, 16, 2).transpose(0, 2, 3, 1, 4)
        data.view(np.uint16).reshape(tiles, groups, 16, TILE, 2)[:] = pairs
    return PackedMatrix(n, k, bits, False, data)


def _fits_f16(x: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(x.astype(np.float16).astype(np.float32), x))


@dataclass(frozen=True, slots=True)
class Activations:
    """Where quantised activations of up to `max_rows` (a multiple of 16) × `cols` lie."""

    cols: int
    values: np.ndarray  # uint8[max_rows / 16, groups, 16, x_bytes]: signed terms, bfloat16 or float32
    scales: np.ndarray  # float32[max_rows / 16, groups, 3, 16]: scales, scale × Σ of the integers, starts (int32)

    @staticmethod
    def empty(max_rows: int, cols: int, mode: str) -> Activations:
        """Zeroed buffers."""
        blocks, groups, size = -(-max_rows // 16), cols // GROUP, x_bytes(mode)
        values, scales = aligned((blocks, groups, 16, size), np.uint8), aligned((blocks, groups, 3, 16))
        values[:] = 0
        scales[:] = 0
        return Activations(cols, values, scales)
