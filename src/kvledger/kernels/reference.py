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


def turn(x: Array) -> Array:
    """Each 32 numbers times two Hadamard matrices of 16, unscaled: channels whose numbers differ in bits 4, 1, 2, 3.

    Sums in the kernels' order, so that what is rounded afterwards is the same.
    """
    y = x.reshape(-1, 32)
    index = np.arange(32)
    for distance in (16, 2, 4, 8):
        partner = y[:, index ^ distance]
        y = np.where(index & distance, partner - y, y + partner)
    return y.reshape(x.shape)


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


def hadamard(x: Array) -> Array:
    """Runs of channels (the largest power of two that divides them) times Sylvester's matrix / √run."""
    run = x.shape[-1] & -x.shape[-1]
    index = np.arange(run)
    sign = np.where(np.bitwise_count(index[:, None] & index) % 2, -1, 1)
    return np.asarray((x.reshape(-1, run) @ (sign / np.sqrt(run)).astype(np.float32)).reshape(x.shape))


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


def _int8_levels(x: Array, spare: int = 8) -> tuple[Array, Array, Array]:
    """Level, zero and scale (float32 less its `spare` last bits) of each token and head: x ≈ scale · (level − zero)."""
    low, high = np.minimum(x.min(-1, keepdims=True), 0), np.maximum(x.max(-1, keepdims=True), 0)
    scale = ((high - low) / np.float32(255)).astype(np.float32)
    scale = (scale.view(np.uint32) >> spare << spare).view(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    zero = np.minimum(np.floor(np.float32(0.5) - low * inverse), 255)
    return (np.rint(x * inverse) + zero).clip(0, 255), zero, scale


def through_int8(x: Array, spare: int = 8) -> Array:
    """As the int8 cache keeps values: to the nearest level."""
    level, zero, scale = _int8_levels(x, spare)
    return np.asarray((level - zero) * scale)


def keys_through_int8(k: Array, q: Array) -> Array:
    """As the int8 cache keeps keys [rows, heads, dim] beside the same tokens' queries [rows, heads · ratio, dim]:
    levels are moved by one, at most four of a key and each time the one that most lessens Σ (q·e)² + w·|e|² over the
    queries that read this head; w: the mean of Σ q².
    """
    level, zero, scale = _int8_levels(k)
    error = np.divide(k, scale, out=np.zeros_like(k), where=scale > 0) - (level - zero)
    queries = q.reshape(*k.shape[:2], -1, k.shape[2])
    for at in np.ndindex(*k.shape[:2]):
        curve = queries[at].T @ queries[at]
        curve += np.trace(curve) / np.float32(len(curve)) * np.eye(len(curve), dtype=np.float32)
        for _ in range(4):
            slope = curve @ error[at]
            step = np.where(slope > 0, 1, -1)
            gain = np.diagonal(curve) - 2 * np.abs(slope)
            gain[(level[at] + step < 0) | (level[at] + step > 255)] = 0
            best = gain.argmin()
            if gain[best] < 0:
                level[at][best] += step[best]
                error[at][best] -= step[best]
    return np.asarray((level - zero) * scale)


def through_latent_int8(x: Array, latent: int) -> Array:
    """As the int8 cache keeps a latent and its rope key: one head, but the rope key in steps 2^−4 to 2^11 as wide."""
    top, rope_top = (np.abs(part).max(-1, keepdims=True) for part in (x[..., :latent], x[..., latent:]))
    mantissa, exponent = np.frexp(rope_top / np.maximum(top, np.float32(1e-30)))
    step = np.exp2(np.clip(exponent - (mantissa == 0.5), -4, 11)).astype(np.float32)
    kept = through_int8(np.concatenate([x[..., :latent], x[..., latent:] / step], axis=-1), spare=12)
    return np.concatenate([kept[..., :latent], kept[..., latent:] * step], axis=-1)


def through_e4m3(x: Array) -> Array:
    """The nearest fp8 e4m3 (three mantissa bits, least exponent −6, largest 448)."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6)
    step = (2.0 ** (exponent - 3)).astype(np.float32)
    return np.clip(np.rint(x / step) * step, -448, 448)


STORED = {"bf16": to_bf16, "int8": through_int8, "fp8_e4m3": through_e4m3, "fp32": lambda x: x}


def through_int4(x: Array) -> Array:
    """Groups of 32 along the last axis in 4 bits, with an fp16 scale and zero each (KIVI, arXiv:2402.02750)."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    zero = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((groups.max(-1, keepdims=True) - zero) / np.float32(15)).astype(np.float16).astype(np.float32)
    level = np.rint(np.divide(groups - zero, scale, out=np.zeros_like(groups), where=scale > 0)).clip(0, 15)
    return to_bf16(zero + scale * level).reshape(x.shape)


def attention_int4(q: Array, k: Array, v: Array, residual: int, window: int = 0, cap: float = 0.0) -> Array:
    """As `attention` from position 0 on, over what a cache in int4 holds: each query sees older keys and values in
    4 bits, whole groups of 32 tokens, and the newest, `residual` at most, in bf16.
    """
    k, v = to_bf16(k), to_bf16(v)
    whole = len(k) // 32 * 32
    old_k = np.moveaxis(through_int4(np.moveaxis(k[:whole], 0, -1)), -1, 0)
    old_v = through_int4(v[:whole])
    outs = []
    for start in range(0, len(q), 32):
        old = max(0, start + 32 - residual)
        keys, values = (np.concatenate([a[:old], b[old : start + 32]]) for a, b in ((old_k, k), (old_v, v)))
        outs.append(attention(q[start : start + 32], keys, values, start, window, cap))
    return np.concatenate(outs)
