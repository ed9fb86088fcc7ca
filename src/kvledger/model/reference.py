"""The whole decoder in NumPy float32 on the dequantised weights: what every fast path is compared with. Slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvledger.kernels import reference as ref
from kvledger.model.decoder import Decoder
from kvledger.model.packing import Tensor, dense, halves_from_pairs, levels_of

Array = np.ndarray[Any, Any]


def _matrix(tensors: Mapping[str, Tensor], name: str) -> Array:
    t = tensors[name]
    if t.ggml_type in ("F32", "F16", "BF16"):
        return dense(t)
    level, scale, minimum, _ = levels_of(t)
    return ref.dequantise(level, scale, minimum)


def forward(d: Decoder, tensors: Mapping[str, Tensor], token_ids: Array) -> Array:
    """float32[tokens, vocabulary]: logits of every position of one sequence."""
    get = lambda name: _matrix(tensors, name)  # noqa: E731
    embedding = get("token_embd.weight")
    x = embedding[token_ids] * np.float32(d.embed_scale)
    angles = {rope: rope.angles(len(token_ids)) for rope in set(d.ropes)}
    for layer in range(d.num_layers):
        x = _layer(d, tensors, layer, x, angles[d.ropes[layer]])
    head = get("output.weight") if "output.weight" in tensors else embedding
    return ref.rms_norm(x, dense(tensors["output_norm.weight"]), d.eps) @ head.T


def _layer(d: Decoder, tensors: Mapping[str, Tensor], layer: int, x: Array, angles: Array) -> Array:
    get = lambda name: _matrix(tensors, f"blk.{layer}.{name}.weight")  # noqa: E731
    vector = lambda name: dense(tensors[f"blk.{layer}.{name}"]).reshape(-1)  # noqa: E731
    has = lambda name: f"blk.{layer}.{name}" in tensors  # noqa: E731
    n, dim = len(x), d.head_dim
    h = ref.rms_norm(x, vector("attn_norm.weight"), d.eps)
    qkv = []
    for name, heads in (("q", d.heads), ("k", d.kv_heads), ("v", d.kv_heads)):
        y = h @ get(f"attn_{name}").T + (vector(f"attn_{name}.bias") if has(f"attn_{name}.bias") else 0)
        if d.pairs and name != "v":
            y = y[:, halves_from_pairs(heads, dim)]
        y = y.reshape(n, heads, dim)
        if has(f"attn_{name}_norm.weight"):
            y = ref.rms_norm(y, vector(f"attn_{name}_norm.weight"), d.eps)
        qkv.append(ref.rope(y, angles) if name != "v" else y)
    scale = np.float32(dim**-0.5 if d.query_scale is None else d.query_scale)
    mixed = ref.attention(qkv[0] * scale, qkv[1], qkv[2], 0, d.windows[layer])
    x = x + mixed.reshape(n, -1) @ get("attn_output").T
    h = ref.rms_norm(x, vector("ffn_norm.weight"), d.eps)
    gate = {"silu": ref.silu, "gelu": ref.gelu}[d.activation](h @ get("ffn_gate").T)
    return x + (gate * (h @ get("ffn_up").T)) @ get("ffn_down").T
