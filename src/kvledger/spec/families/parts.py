"""The building blocks that model families share: attention, MLP, experts, norms as weight shapes, and the layer.

Each function returns shapes; which of them a family has, and how many, is the family's business. Sizes are in
elements. Split rules follow Megatron (arXiv:1909.08053): first matrix by rows, second by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvledger.spec.config_fields import MAX_LAYERS, Fields
from kvledger.spec.kv import CacheSpec, ChunkedKV, FullKV, WindowKV
from kvledger.spec.model import Layer, Part, Weight

Weights = list[Weight]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the dimensions of keys (= queries) and values."""

    num: int
    num_kv: int
    key_dim: int
    value_dim: int

    @property
    def cache(self) -> FullKV:
        return FullKV(self.num_kv, self.key_dim, self.value_dim)

    def window(self, window: int) -> WindowKV:
        return WindowKV(self.num_kv, self.key_dim, self.value_dim, window)

    def chunked(self, chunk: int) -> ChunkedKV:
        return ChunkedKV(self.num_kv, self.key_dim, self.value_dim, chunk)


@dataclass(frozen=True, slots=True)
class Body:
    """What a family makes of a config: the layers, the weights outside them, and what to say about it."""

    layers: Sequence[Layer]
    outer: Weights
    num_heads: int
    draft_layers: int = 0
    notes: tuple[str, ...] = ()


Builder = Callable[[Fields], Body]


def num_layers(f: Fields) -> int:
    """Layers of the text model."""
    return f.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers", high=MAX_LAYERS)


def hidden_size(f: Fields) -> int:
    """Channels of the residual stream."""
    return f.count("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim")


def vocab_size(f: Fields) -> int:
    """Rows of the embedding."""
    return f.count("vocab_size", "padded_vocab_size")


def read_heads(f: Fields) -> Heads:
    """Heads of plain attention. `head_dim` where given, else hidden / heads; KV heads as many as heads if unsaid."""
    num = f.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    num_kv = f.count_or(num, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", low=1)
    if not f.has("head_dim") and hidden_size(f) % num:
        raise f.fail("num_attention_heads", f"is {num}, which does not divide the hidden size {hidden_size(f)}")
    dim = f.count_or(hidden_size(f) // num, "head_dim", "attention_head_dim", "kv_channels", low=1)
    if num % num_kv:
        raise f.fail("num_key_value_heads", f"is {num_kv}, which does not divide the {num} attention heads")
    return Heads(num, num_kv, dim, f.count_or(dim, "v_head_dim", low=1))


def linear(
    part: Part, rows: int, cols: int, *, bias: bool = False, split: str = "", units: int = 0, name: str = ""
) -> Weights:
    """One matrix and, if asked, its bias; a bias is cut with the rows."""
    if split not in ("", "rows", "cols"):
        raise AssertionError(split)
    weights = [Weight(part, rows, cols, split=split, units=units, name=name)]  # type: ignore[arg-type]
    if bias:
        cut = split == "rows"
        weights.append(Weight("bias", rows, split="rows" if cut else "", units=units if cut else 0))
    return weights


def norm(size: int, count: int = 1, *, bias: bool = False) -> Weights:
    """`count` norms over `size` channels: RMSNorm, or LayerNorm where there is a bias."""
    if not count:
        return []
    return [Weight("norm", size, count=count)] + ([Weight("bias", size, count=count)] if bias else [])


def attention(
    hidden: int, heads: Heads, *, qkv_bias: bool = False, out_bias: bool = False, q_factor: int = 1,
    key: bool = True, value: bool = True, v_bias: bool | None = None, k_bias: bool | None = None,
) -> Weights:  # fmt: skip
    """Query, key, value and output projections. `q_factor` 2: an output gate is projected beside the query.

    `key` or `value` False: the layer reads another layer's, or values are the keys.
    """
    query, kv = heads.num * heads.key_dim * q_factor, heads.num_kv
    weights = linear("attention", query, hidden, bias=qkv_bias, split="rows", units=heads.num)
    if key:
        with_bias = qkv_bias if k_bias is None else k_bias
        weights += linear("attention", kv * heads.key_dim, hidden, bias=with_bias, split="rows", units=kv)
    if value:
        with_bias = qkv_bias if v_bias is None else v_bias
        weights += linear("attention", kv * heads.value_dim, hidden, bias=with_bias, split="rows", units=kv, name="v")
    mixed = heads.num * heads.value_dim
    return weights + linear("attention", hidden, mixed, bias=out_bias, split="cols", units=heads.num)


def mlp(
    hidden: int, inner: int, *, gated: bool = True, bias: bool = False, part: Part = "mlp", out: int = 0
) -> Weights:
    """Feed-forward network: gate (if any), up, down. `out` is its output size where that is not `hidden`."""
    up = linear(part, inner, hidden, bias=bias, split="rows")
    return up * (2 if gated else 1) + linear(part, out or hidden, inner, bias=bias, split="cols", name="down")


def experts(hidden: int, inner: int, count: int, *, gated: bool = True, bias: bool = False) -> Weights:
    """`count` routed experts. Their biases are routed with them."""
    ups = 2 if gated else 1
    weights = [
        *[Weight("experts", inner, hidden, count, "rows")] * ups,
        Weight("experts", hidden, inner, count, "cols", name="down"),
    ]
    if bias:
        weights += [*[Weight("experts", inner, 0, count, "rows")] * ups, Weight("experts", hidden, 0, count)]
    return weights


def router(hidden: int, count: int, *, bias: bool = False) -> Weights:
    """One score per expert."""
    return linear("router", count, hidden, bias=bias)


def make_layer(
    cache: CacheSpec | None,
    weights: Weights,
    heads: Heads | None = None,
    experts_per_token: int = 0,
    latent: tuple[int, int] = (0, 0),
) -> Layer:
    """A layer of these weights. `heads` None: it does not attend (state-space, MLP only)."""
    routed = [w for w in weights if w.part == "experts"]
    count = max((w.count for w in routed), default=0)
    return Layer(
        cache=cache,
        params=sum(w.params for w in weights),
        score_dims=heads.num * heads.key_dim if heads else 0,
        mix_dims=heads.num * heads.value_dim if heads else 0,
        num_experts=count,
        experts_per_token=min(experts_per_token, count),
        expert_params=sum(w.params for w in routed) // count if count else 0,
        weights=tuple(weights),
        latent_score_dims=latent[0],
        latent_mix_dims=latent[1],
    )


def outer_weights(
    f: Fields,
    *,
    tied: bool = False,
    final_norms: int = 1,
    norm_bias: bool = False,
    head_bias: bool = False,
    positions: int = 0,
) -> Weights:
    """Embedding, learned positions, final norm, and the output head unless it is the embedding (`tied`: default)."""
    hidden, vocab = hidden_size(f), vocab_size(f)
    weights = linear("embedding", vocab, hidden, split="rows")
    if positions:
        weights += linear("embedding", positions, hidden)
    weights += norm(hidden, final_norms, bias=norm_bias)
    if not f.flag("tie_word_embeddings", default=tied):
        weights += linear("head", vocab, hidden, split="rows")
    if head_bias:
        weights.append(Weight("bias", vocab, split="rows"))
    return weights


def layer_kinds(f: Fields, layers: int, pattern: Callable[[int], str]) -> list[str]:
    """Kind of every layer: `layer_types` of the config where given, else `pattern(index)`."""
    kinds = f.texts("layer_types")
    if kinds is None:
        return [pattern(i) for i in range(layers)]
    if len(kinds) < layers:
        raise f.fail("layer_types", f"has {len(kinds)} entries for {layers} layers")
    return kinds[:layers]


def attention_cache(f: Fields, kind: str, heads: Heads) -> FullKV:
    """Cache of an attention layer of `kind`: full_attention, sliding_attention or chunked_attention."""
    if kind == "sliding_attention":
        return heads.window(f.count("sliding_window", "sliding_window_size"))
    if kind == "chunked_attention":
        return heads.chunked(f.count("attention_chunk_size"))
    if kind != "full_attention":
        raise f.fail("layer_types", f"names {kind[:40]!r}, which this family does not have")
    return heads.cache
