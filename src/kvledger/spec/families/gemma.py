"""Gemma 1 to 4: GeGLU, four norms, windows between full layers, layers that read another layer's cache.

Gemma 3n and 4 E-models add a small embedding per layer; 3n carries four residual streams (AltUp) and a low-rank
shortcut (Laurel). Sizes follow the published configurations.
"""

from __future__ import annotations

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.decoder import Traits, decoder
from kvledger.spec.families.dense import all_but_each
from kvledger.spec.families.parts import Body, Heads, Weights, linear, norm
from kvledger.spec.model import Weight


def _gemma(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, tied=True)


def _gemma2(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, norms=4, tied=True, window=lambda f, index: index % 2 == 0)


def _gemma3(f: Fields) -> Traits:
    slides = all_but_each(6, "sliding_window_pattern", "_sliding_window_pattern")
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, norms=4, qk_norm="head", tied=True, window=slides)


def _shares(f: Fields, count: int) -> list[bool]:
    """The last `num_kv_shared_layers` layers read the cache of an earlier layer of their kind."""
    own = count - f.count_or(0, "num_kv_shared_layers", high=count)
    return [index >= own > 0 for index in range(count)]


def _per_layer_inputs(f: Fields, count: int) -> Weights:
    """The table of small per-layer embeddings, its projection from the main one, and its norm."""
    size = f.count_or(0, "hidden_size_per_layer_input")
    if not size:
        return []
    table = linear("embedding", f.count("vocab_size_per_layer_input"), count * size)
    return table + linear("other", count * size, parts.hidden_size(f)) + norm(size)


def _per_layer_gate(f: Fields) -> Weights:
    size, hidden = f.count_or(0, "hidden_size_per_layer_input"), parts.hidden_size(f)
    return linear("mlp", size, hidden) + linear("mlp", hidden, size) + norm(hidden) if size else []


def _altup(f: Fields) -> Weights:
    """AltUp (arXiv:2301.13310): coefficients per layer that mix the residual streams, and Laurel's low-rank path."""
    hidden, streams, rank = parts.hidden_size(f), f.count("altup_num_inputs"), f.count("laurel_rank")
    mixing = [Weight("other", hidden), *linear("other", streams, streams), *linear("other", streams**2, streams)]
    router = linear("router", streams, hidden) + norm(hidden)
    return mixing + router + linear("mlp", rank, hidden) + linear("mlp", hidden, rank) + norm(hidden)


def gemma3n(f: Fields) -> Body:
    """Gemma 3n: MLP size per layer, AltUp, Laurel, per-layer embeddings, shared KV at the end."""
    count, heads, hidden = parts.num_layers(f), parts.read_heads(f), parts.hidden_size(f)
    inner = f.per_layer(count, "intermediate_size")
    kinds = parts.layer_kinds(f, count, lambda i: "full_attention" if (i + 1) % 5 == 0 else "sliding_attention")
    mixer = parts.attention(hidden, heads) + norm(heads.key_dim, 2) + norm(hidden, 4)
    extra = _altup(f) + _per_layer_gate(f)
    layers = []
    for kind, shared, size in zip(kinds, _shares(f, count), inner, strict=True):
        cache = None if shared else parts.attention_cache(f, kind, heads)
        layers.append(parts.make_layer(cache, mixer + extra + parts.mlp(hidden, size), heads))
    outer = parts.outer_weights(f, tied=True) + _per_layer_inputs(f, count)
    for _ in range(2 * (f.count("altup_num_inputs") - 1)):  # streams split from the embedding, joined before the head
        outer += linear("other", hidden, hidden)
    note = "layers that share KV keep their own key and value weights in the published files, though unused"
    return Body(layers, outer, heads.num, notes=(note,))


def _gemma4_heads(f: Fields, kind: str) -> Heads:
    """Full layers have larger and (with `attention_k_eq_v`) fewer KV heads than sliding ones."""
    base = parts.read_heads(f)
    if kind != "full_attention":
        return base
    dim = f.count_or(base.key_dim, "global_head_dim", low=1)
    num_kv = base.num_kv
    if f.flag("attention_k_eq_v"):
        num_kv = f.count_or(num_kv, "num_global_key_value_heads", low=1)
    return Heads(base.num, num_kv, dim, dim)


def _gemma4_ffn(f: Fields, shared: bool) -> tuple[Weights, int]:
    """MLP (twice as wide where KV is shared, if asked) and, beside it, experts with norms of their own."""
    hidden = parts.hidden_size(f)
    wide = 2 if shared and f.flag("use_double_wide_mlp") else 1
    weights = parts.mlp(hidden, f.count("intermediate_size") * wide)
    if not f.flag("enable_moe_block"):
        return weights, 0
    count = f.count("num_experts", high=1 << 16)
    weights += parts.experts(hidden, f.count("moe_intermediate_size"), count) + parts.router(hidden, count)
    weights += [Weight("router", hidden), Weight("router", count), *norm(hidden, 3)]
    return weights, f.count("top_k_experts", "num_experts_per_tok")


def gemma4(f: Fields) -> Body:
    """Gemma 4: two shapes of heads, values equal to keys in full layers (still two caches), shared KV in E-models."""
    count, hidden = parts.num_layers(f), parts.hidden_size(f)
    kinds = parts.layer_kinds(f, count, lambda i: "sliding_attention" if (i + 1) % 6 else "full_attention")
    kinds[-1] = "full_attention"  # the last layer always sees everything
    layers = []
    for kind, shared in zip(kinds, _shares(f, count), strict=True):
        heads = _gemma4_heads(f, kind)
        tied_values = kind == "full_attention" and f.flag("attention_k_eq_v")
        mixer = parts.attention(hidden, heads, key=not shared, value=not shared and not tied_values)
        mixer += norm(heads.key_dim, 1 if shared else 2) + norm(hidden, 4) + [Weight("other", 1)]
        feed, per_token = _gemma4_ffn(f, shared)
        cache = None if shared else parts.attention_cache(f, kind, heads)
        layers.append(parts.make_layer(cache, mixer + _per_layer_gate(f) + feed, heads, per_token))
    outer = parts.outer_weights(f, tied=True) + _per_layer_inputs(f, count)
    return Body(layers, outer, parts.read_heads(f).num)


GEMMA_FAMILIES: dict[str, parts.Builder] = {
    "gemma": decoder(_gemma), "gemma2": decoder(_gemma2),
    "gemma3_text": decoder(_gemma3), "gemma3n_text": gemma3n, "gemma4_text": gemma4,
}  # fmt: skip
