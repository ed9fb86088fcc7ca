"""Quantised weights ↔ float32: one decode function per tensor type, in numpy, whole arrays at a time.

The obvious version of what kernels do with packed weights, and the way in for types no kernel reads. Formats from
ggml-common.h and ggml-quants.c; tests compare with the `gguf` package, which also decodes the rarer types (IQ…, TQ…).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvledger.errors import UnsupportedModel
from kvledger.weights.ggml_types import GGML_TYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_CHUNK_BLOCKS = 1 << 16  # decoded at a time: peak memory stays near that of the result


def dequantise(data: Bytes, ggml_type: str, shape: tuple[int, ...]) -> Floats:
    """The exact bytes of a tensor → float32 of `shape`. Raises UnsupportedModel, naming the types that decode."""
    kind = GGML_TYPES.get(ggml_type)
    if kind is None or (ggml_type not in DECODERS and ggml_type not in _by_gguf()):
        raise UnsupportedModel(f"tensor type {ggml_type!r} is not decoded; decoded: {', '.join(decoded_types())}")
    blocks = np.asarray(data).reshape(-1, kind.block_bytes)
    decode = DECODERS.get(ggml_type) or _by_gguf()[ggml_type]
    out = np.empty((len(blocks), kind.block_elements), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        out[part] = decode(np.ascontiguousarray(blocks[part])).reshape(-1, kind.block_elements)
    return out.reshape(shape)


def decoded_types() -> tuple[str, ...]:
    """Names of all types that `dequantise` takes."""
    return (*DECODERS, *_by_gguf())


def _by_gguf() -> dict[str, Callable[[Bytes], Floats]]:
    """Types that only the gguf package decodes."""
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits, dequantize

    return {
        kind.name: lambda blocks, kind=kind: np.asarray(dequantize(blocks, kind), np.float32)  # type: ignore[misc]
        for kind in _type_traits
        if kind.name in GGML_TYPES and kind.name not in DECODERS and isinstance(kind, GGMLQuantizationType)
    }


# ---------------------------------------------------------------------------------------------- pieces of blocks


def _f16(block: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block → float32[blocks, 1]."""
    return np.ascontiguousarray(block[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves, then high halves: uint8[…, n] → uint8[…, 2, n]."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-2)


def _fifth_bits(block: Bytes, at: int) -> Bytes:
    """32 bits at byte `at`, one per weight, as 0 or 16 → uint8[blocks, 32]."""
    return np.unpackbits(block[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _pairs(packed: Bytes) -> Bytes:
    """Four 2-bit fields of each byte, low first: uint8[…, n] → uint8[…, 4, n]."""
    return np.stack([(packed >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-2)


def scales_6bit(packed: Bytes) -> tuple[Floats, Floats]:
    """Q4_K's and Q5_K's 12 bytes → eight scales and eight minima of six bits each, float32[blocks, 8]."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([low & 63, (high & 0x0F) | (low >> 6 << 4)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


# ---------------------------------------------------------------------------------------------- one function per type


def _plain(dtype: type[np.generic]) -> Callable[[Bytes], Floats]:
    return lambda block: block.view(dtype).astype(np.float32)


def _bf16(block: Bytes) -> Floats:
    return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(block: Bytes) -> Floats:
    return _f16(block, 0) * block[:, 2:].view(np.int8)


def _q4_0(block: Bytes) -> Floats:
    levels = _nibbles(block[:, 2:]).reshape(-1, 32).astype(np.int8) - 8
    return np.asarray(_f16(block, 0) * levels, np.float32)


def _q4_1(block: Bytes) -> Floats:
    return _f16(block, 0) * _nibbles(block[:, 4:]).reshape(-1, 32) + _f16(block, 2)


def _q5_0(block: Bytes) -> Floats:
    levels = _nibbles(block[:, 6:]).reshape(-1, 32) | _fifth_bits(block, 2)
    return _f16(block, 0) * (levels.astype(np.int8) - 16)


def _q5_1(block: Bytes) -> Floats:
    levels = _nibbles(block[:, 8:]).reshape(-1, 32) | _fifth_bits(block, 4)
    return _f16(block, 0) * levels + _f16(block, 2)


def _q2_k(block: Bytes) -> Floats:
    """Bytes: 16 scale and minimum (4 bits each), 64 levels, d, dmin."""
    scale = _f16(block, 80) * (block[:, :16] & 0x0F)
    minimum = _f16(block, 82) * (block[:, :16] >> 4)
    levels = _pairs(block[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16).astype(np.float32)
    return scale[:, :, None] * levels - minimum[:, :, None]


def _q3_k(block: Bytes) -> Floats:
    """Bytes: 32 high bits, 64 levels, 12 scales (6 bits each), d. A level without its high bit is 4 lower."""
    packed = block[:, 96:108]
    low = _nibbles(packed[:, :8]).reshape(-1, 16)
    high = _pairs(packed[:, 8:]).reshape(-1, 16)
    scale = _f16(block, 108) * ((low | high << 4).astype(np.int8) - 32)
    bits = np.stack([block[:, :32] >> i & 1 for i in range(8)], axis=1).reshape(-1, 16, 16)
    levels = _pairs(block[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 16, 16).astype(np.int8)
    signed = levels - (1 - bits.astype(np.int8)) * np.int8(4)
    return np.asarray(scale[:, :, None] * signed, np.float32)


def _q4_k(block: Bytes) -> Floats:
    """Bytes: d, dmin, 12 scales and minima, 128 levels."""
    scale, minimum = scales_6bit(block[:, 4:16])
    levels = _nibbles(block[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (_f16(block, 0) * scale)[:, :, None] * levels - (_f16(block, 2) * minimum)[:, :, None]


def _q5_k(block: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits before the levels: bit i of byte j belongs to weight j of group i."""
    scale, minimum = scales_6bit(block[:, 4:16])
    bits = np.stack([block[:, 16:48] >> i & 1 for i in range(8)], axis=1)
    levels = (_nibbles(block[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | bits << 4).astype(np.float32)
    scale, minimum = _f16(block, 0) * scale, _f16(block, 2) * minimum
    return np.asarray(scale[:, :, None] * levels - minimum[:, :, None], np.float32)


def _q6_k(block: Bytes) -> Floats:
    """Bytes: 128 low halves, 64 high pairs, 16 scales (int8), d."""
    low = _nibbles(block[:, :128].reshape(-1, 2, 64)).reshape(-1, 16, 16)
    high = _pairs(block[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 16, 16)
    scale = _f16(block, 208) * block[:, 192:208].view(np.int8)
    return np.asarray(scale[:, :, None] * ((low | high << 4).astype(np.int8) - 32), np.float32)


DECODERS: dict[str, Callable[[Bytes], Any]] = {
    "F32": _plain(np.float32), "F16": _plain(np.float16), "BF16": _bf16, "F64": _plain(np.float64),
    "I8": _plain(np.int8), "I16": _plain(np.int16), "I32": _plain(np.int32), "I64": _plain(np.int64),
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- the other way


def quantise_q8(weights: Floats) -> Bytes:
    """float32[…, 32 n] → bytes of Q8_0: a float16 scale and 32 int8 per block, |error| at most half a level."""
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    levels = np.rint(blocks * _inverse(scale)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), levels.view(np.uint8)], axis=1).reshape(-1)


def quantise_q4(weights: Floats) -> Bytes:
    """float32[…, 32 n] → bytes of Q4_1: scale, minimum and 16 levels between the least and the largest weight."""
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, 32)
    minimum = blocks.min(axis=1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(axis=1, keepdims=True) - minimum.astype(np.float32)) / 15).astype(np.float16)
    levels = np.rint((blocks - minimum.astype(np.float32)) * _inverse(scale)).clip(0, 15).astype(np.uint8)
    packed = levels[:, :16] | levels[:, 16:] << 4
    return np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), packed], axis=1).reshape(-1)


def _inverse(scale: NDArray[np.float16]) -> Floats:
    wide = scale.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
