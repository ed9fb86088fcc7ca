"""Decoders of the usual plan: attention and MLP (or experts) in every layer. A family is a row of `TRAITS`.

What differs between them is data: biases, norms, positions, which layers slide, where the experts are.
Latent attention, state-space layers and Gemma's extras are in the neighbouring files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.parts import Body, Weights
from kvledger.spec.model import Weight

FeedForward = Callable[[Fields, int], tuple[Weights, int]]  # (fields, layer index) → weights, experts per token


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family adds to or leaves out of a Llama layer."""

    qkv_bias: bool = False
    k_bias: bool | None = None  # None: as qkv_bias
    v_bias: bool | None = None
    out_bias: bool = False
    gated: bool = True
    mlp_bias: bool = False
    norms: int = 2  # per layer, over the hidden size
    norm_bias: bool = False
    final_norms: int = 1
    qk_norm: str = ""  # "head": one norm shared by all heads; "heads": one per head; "all": over the joined heads
    qk_norm_bias: bool = False
    sinks: bool = False  # one learned logit per query head (gpt-oss)
    gate: bool = False  # an output gate as wide as the query, projected on its own
    positions: int = 0  # learned absolute positions
    tied: bool = False  # where the config does not say
    head_bias: bool = False
    inner: int = 0  # MLP size where the config leaves it to the family
    window: Callable[[Fields, int], bool] | None = None  # does layer i slide, where layer_types is not given


def dense_ffn(traits: Traits) -> FeedForward:
    """The same MLP in every layer."""

    def ffn(f: Fields, index: int) -> tuple[Weights, int]:
        inner = traits.inner or f.count("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        return parts.mlp(parts.hidden_size(f), inner, gated=traits.gated, bias=traits.mlp_bias), 0

    return ffn


def qk_norms(heads: parts.Heads, traits: Traits) -> Weights:
    """Norms on queries and keys."""
    if traits.qk_norm == "head":
        return parts.norm(heads.key_dim, 2, bias=traits.qk_norm_bias)
    if traits.qk_norm == "heads":
        return parts.norm(heads.key_dim, heads.num + heads.num_kv, bias=traits.qk_norm_bias)
    if traits.qk_norm == "all":
        query, key = (parts.norm(n * heads.key_dim, bias=traits.qk_norm_bias) for n in (heads.num, heads.num_kv))
        return query + key
    return []


def sliding_kind(f: Fields, traits: Traits) -> Callable[[int], str]:
    """Layer kind by index where the config lists none: sliding where it has a window and the family says so.

    Llama 4 attends within chunks wherever it has rope: as listed, or in all but each `no_rope_layer_interval`-th layer.
    """
    slides, each = traits.window, f.count_or(0, "no_rope_layer_interval")
    if each and f.count_or(0, "attention_chunk_size"):
        listed = f.counts("no_rope_layers") or []  # 1: with rope
        has_rope = [bool(x) for x in listed] or [True] * (each - 1) + [False]
        return lambda index: "chunked_attention" if has_rope[index % len(has_rope)] else "full_attention"
    if slides is None or not f.has("sliding_window") or not f.count_or(0, "sliding_window"):
        return lambda index: "full_attention"
    return lambda index: "sliding_attention" if slides(f, index) else "full_attention"


def decoder(traits: Callable[[Fields], Traits], ffn: FeedForward | None = None) -> parts.Builder:
    """A builder for the family with these traits. `ffn` replaces the dense MLP (experts)."""

    def build(f: Fields) -> Body:
        t, heads, hidden, count = traits(f), parts.read_heads(f), parts.hidden_size(f), parts.num_layers(f)
        feed = ffn or dense_ffn(t)
        mixer = parts.attention(
            hidden, heads, qkv_bias=t.qkv_bias, out_bias=t.out_bias, q_factor=2 if t.gate else 1,
            k_bias=t.k_bias, v_bias=t.v_bias,
        )  # fmt: skip
        mixer += qk_norms(heads, t) + parts.norm(hidden, t.norms, bias=t.norm_bias)
        if t.sinks:
            mixer.append(Weight("other", heads.num, split="rows"))
        layers = []
        for index, kind in enumerate(parts.layer_kinds(f, count, sliding_kind(f, t))):
            weights, per_token = feed(f, index)
            layers.append(parts.make_layer(parts.attention_cache(f, kind, heads), mixer + weights, heads, per_token))
        outer = parts.outer_weights(
            f, tied=t.tied, final_norms=t.final_norms, norm_bias=t.norm_bias, head_bias=t.head_bias,
            positions=t.positions,
        )  # fmt: skip
        return Body(layers, outer, heads.num)

    return build
