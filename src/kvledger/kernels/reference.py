"""What the kernels compute, slowly and obviously, in float32 (or whatever is passed). The tests compare with this."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def dequantise(level: Array, scale: Array, minimum: Array) -> Array:
    """w[n, k] = scale[n, k/32] · level[n, k] + minimum[n, k/32]."""
    n, k = level.shape
    groups = level.reshape(n, -1, 32).astype(scale.dtype)
    return (groups * scale[..., None] + minimum[..., None]).reshape(n, k)


def quantise(x: Array, low_bits: int) -> tuple[Array, Array]:
    """Per group of 32: integers of at most 127 · 2^bits + 2^(bits − 1) − 1, and their scale. x: [rows, k]."""
    largest = 127 * (1 << low_bits) + ((1 << low_bits) >> 1) - (1 if low_bits else 0)
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1)
    inverse = np.divide(np.float32(largest), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(groups * inverse[..., None]).astype(np.int32).reshape(x.shape), top / np.float32(largest)


def to_bf16(x: Array) -> Array:
    """Nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / √(mean x² + eps) · weight over the last axis."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def rope(x: Array, angles: Array) -> Array:
    """x[..., rows, heads, dim] turned: channel j with j + turn / 2. angles[rows, turn]: cosines, then sines."""
    turn = angles.shape[-1]
    cosine, sine = angles[..., None, : turn // 2], angles[..., None, turn // 2 :]
    a, b, rest = x[..., : turn // 2], x[..., turn // 2 : turn], x[..., turn:]
    return np.concatenate([a * cosine - b * sine, a * sine + b * cosine, rest], axis=-1)


def silu(x: Array) -> Array:
    """x / (1 + e^−x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """The tanh form."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    weight = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(weight / weight.sum(-1, keepdims=True))


def attention(q: Array, k: Array, v: Array, start: int, window: int = 0, cap: float = 0.0) -> Array:
    """Causal attention. q[rows, heads, dim] (already scaled) at positions start, start + 1 …;
    k, v[keys, KV heads, dim] at positions 0, 1 …; returns [rows, heads, dim].
    """
    rows, heads, _ = q.shape
    ratio = heads // k.shape[1]
    score = np.einsum("rhd,khd->hrk", q, np.repeat(k, ratio, axis=1))
    if cap:
        score = cap * np.tanh(score / cap)
    at, key = start + np.arange(rows)[:, None], np.arange(len(k))[None, :]
    seen = (key <= at) & ((key > at - window) if window else True)
    return np.asarray(np.einsum("hrk,khd->rhd", softmax(np.where(seen, score, -np.inf)), np.repeat(v, ratio, axis=1)))


def through_int8(x: Array) -> Array:
    """As the int8 cache keeps it: a scale per token and head."""
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.asarray(np.rint(x / np.where(scale > 0, scale, 1)) * scale)


def through_e4m3(x: Array) -> Array:
    """The nearest fp8 e4m3 (three mantissa bits, least exponent −6, largest 448)."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6)
    step = (2.0 ** (exponent - 3)).astype(np.float32)
    return np.clip(np.rint(x / step) * step, -448, 448)


STORED = {"bf16": to_bf16, "int8": through_int8, "fp8_e4m3": through_e4m3, "fp32": lambda x: x}
