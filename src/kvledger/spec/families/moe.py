"""Mixtures of experts: which layers have them, how many, how large, and what works beside them.

A family is one call of `moe`. Experts that a token does not choose still lie in memory; `Layer` counts both.
"""

from __future__ import annotations

from collections.abc import Callable

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.decoder import FeedForward, Traits, decoder
from kvledger.spec.families.dense import all_but_each, every, exaone4_traits, qwen2_window
from kvledger.spec.families.parts import Weights
from kvledger.spec.model import Weight

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
MAX_EXPERTS = 1 << 16


def every_layer(f: Fields, index: int) -> bool:
    """Experts everywhere."""
    return True


def after_dense(f: Fields, index: int) -> bool:
    """DeepSeek's rule: the first layers are dense, then every `moe_layer_freq`-th has experts."""
    kinds = f.texts("mlp_layer_types")
    if kinds is not None:
        return index < len(kinds) and kinds[index] == "sparse"
    first = f.count_or(0, "first_k_dense_replace", "num_dense_layers")
    return index >= first and index % f.count_or(1, "moe_layer_freq", low=1) == 0


def sparse_step(f: Fields, index: int) -> bool:
    """Qwen's rule: every `decoder_sparse_step`-th layer, but not those of `mlp_only_layers`."""
    step = f.count_or(1, "decoder_sparse_step", low=1)
    return index not in (f.counts("mlp_only_layers") or []) and (index + 1) % step == 0


def interleaved(f: Fields, index: int) -> bool:
    """Llama 4's rule: listed in `moe_layers`, or the last of every `interleave_moe_layer_step` layers."""
    listed = f.counts("moe_layers")
    if listed is not None:
        return index in listed
    step = f.count_or(1, "interleave_moe_layer_step")
    return step > 0 and (index + 1) % step == 0


def ernie_interval(f: Fields, index: int) -> bool:
    """Ernie's rule: from a start layer to an end layer, every `moe_layer_interval`-th."""
    last = f.maybe_count("moe_layer_end_index", low=-1)
    start = f.count_or(1, "moe_layer_start_index")
    inside = start <= index and (last in (None, -1) or index <= (last or 0))
    return inside and (index + 1) % f.count_or(1, "moe_layer_interval", low=1) == 0


def moe(
    *,
    inner: tuple[str, ...] = ("moe_intermediate_size",),
    dense_inner: tuple[str, ...] = ("intermediate_size",),
    sparse: Callable[[Fields, int], bool] = every_layer,
    shared: Callable[[Fields], int] | None = None,
    shared_gate: bool = False,
    bias: bool = False,
    router_bias: bool = False,
    correction: bool = False,
) -> FeedForward:
    """A feed-forward rule. `shared` gives the joined size of the experts every token uses; `correction`: one number
    per expert that balances the load (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    def ffn(f: Fields, index: int) -> tuple[Weights, int]:
        hidden = parts.hidden_size(f)
        if not sparse(f, index):
            return parts.mlp(hidden, f.count(*dense_inner)), 0
        count = f.count(*NUM_EXPERTS, high=MAX_EXPERTS)
        weights = parts.experts(hidden, f.count(*inner), count, bias=bias)
        weights += parts.router(hidden, count, bias=router_bias)
        if correction:
            weights.append(Weight("router", count))
        if shared is not None and (size := shared(f)):
            weights += parts.mlp(hidden, size, part="shared_experts")
            if shared_gate:
                weights += parts.linear("router", 1, hidden)
        return weights, f.count(*PER_TOKEN)

    return ffn


def shared_of(count: str, size: str = "moe_intermediate_size") -> Callable[[Fields], int]:
    """Joined size of `count` shared experts of the size of a routed one."""
    return lambda f: f.count_or(0, count) * f.count(size)


def shared_size(name: str) -> Callable[[Fields], int]:
    """Joined size of the shared experts, given by one field."""
    return lambda f: f.count_or(0, name)


deepseek_ffn = moe(sparse=after_dense, shared=shared_of("n_shared_experts"), correction=True)
softmax_ffn = moe(sparse=after_dense, shared=shared_of("n_shared_experts"))  # DeepSeek-V2: no correction


def _ernie_shared(f: Fields) -> int:
    return f.count_or(0, "moe_num_shared_experts") * f.count("moe_intermediate_size")


def _alternate(f: Fields, index: int) -> bool:
    return index % 2 == 0


def _hunyuan_experts(f: Fields, index: int) -> tuple[Weights, int]:
    """HunYuan gives counts per layer, as lists or single numbers."""
    layers, hidden = parts.num_layers(f), parts.hidden_size(f)
    count = f.per_layer(layers, *NUM_EXPERTS)[index]
    size = f.per_layer(layers, "moe_intermediate_size", "intermediate_size")[index]
    shared = f.per_layer(layers, "num_shared_expert", default=1)[index]
    weights = parts.experts(hidden, size, count) + parts.router(hidden, count)
    weights += parts.mlp(hidden, f.count("intermediate_size") * shared, part="shared_experts")
    return weights, f.per_layer(layers, "moe_topk", "num_experts_per_tok")[index]


def _dbrx(f: Fields) -> parts.Body:
    """DBRX keeps its attention and its experts in sections of their own."""
    heads, experts = f.section("attn_config"), f.section("ffn_config")
    inner = {} if experts is None else experts.only("ffn_hidden_size", "moe_num_experts", "moe_top_k")
    kv = heads.maybe_count("kv_n_heads") if heads else None
    build = decoder(lambda f: Traits(), moe(inner=("ffn_hidden_size",)))
    return build(f.with_defaults({**inner, "num_key_value_heads": kv}))


def _olmo_moe(f: Fields) -> Traits:
    return Traits(qk_norm="all", qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias"))


_QWEN3 = Traits(qk_norm="head")

MOE_FAMILIES: dict[str, parts.Builder] = {
    "mixtral": decoder(lambda f: Traits(window=every), moe(inner=("intermediate_size",))),
    "qwen2_moe": decoder(
        lambda f: Traits(qkv_bias=f.flag("qkv_bias", default=True), window=qwen2_window),
        moe(sparse=sparse_step, shared=shared_size("shared_expert_intermediate_size"), shared_gate=True),
    ),
    "qwen3_moe": decoder(
        lambda f: Traits(qk_norm="head", qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias")),
        moe(sparse=sparse_step),
    ),
    "gpt_oss": decoder(
        lambda f: Traits(qkv_bias=True, out_bias=True, sinks=True, window=_alternate),
        moe(inner=("intermediate_size",), bias=True, router_bias=True),
    ),
    "llama4_text": decoder(
        lambda f: Traits(qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias")),
        moe(inner=("intermediate_size",), dense_inner=("intermediate_size_mlp",), sparse=interleaved,
            shared=shared_size("intermediate_size")),
    ),
    "glm4_moe": decoder(
        lambda f: Traits(qkv_bias=f.flag("attention_bias"), qk_norm="head" if f.flag("use_qk_norm") else ""),
        deepseek_ffn,
    ),
    "dots1": decoder(
        lambda f: Traits(qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias"), qk_norm="head",
                         window=qwen2_window),
        deepseek_ffn,
    ),
    "exaone_moe": decoder(
        exaone4_traits, moe(sparse=after_dense, shared=shared_of("num_shared_experts"), correction=True)
    ),
    "hy_v3": decoder(
        lambda f: Traits(qk_norm="head", qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias")),
        moe(sparse=after_dense, shared=shared_of("num_shared_experts"), correction=True),
    ),
    "solar_open": decoder(lambda f: Traits(qkv_bias=f.flag("attention_bias")), deepseek_ffn),
    "minimax_m2": decoder(
        lambda f: Traits(qk_norm="all"), moe(inner=("intermediate_size",), correction=True)
    ),
    "olmoe": decoder(_olmo_moe, moe(inner=("intermediate_size",))),
    "phimoe": decoder(
        lambda f: Traits(qkv_bias=f.flag("attention_bias"), out_bias=f.flag("attention_bias"), norm_bias=True,
                         head_bias=f.flag("lm_head_bias"), window=every),
        moe(inner=("intermediate_size",)),
    ),
    "granitemoe": decoder(lambda f: Traits(tied=True), moe(inner=("intermediate_size",))),
    "granitemoeshared": decoder(
        lambda f: Traits(tied=True), moe(inner=("intermediate_size",), shared=shared_size("shared_intermediate_size"))
    ),
    "ernie4_5_moe": decoder(
        lambda f: Traits(qkv_bias=f.flag("use_bias"), out_bias=f.flag("use_bias"), tied=True),
        moe(sparse=ernie_interval, shared=_ernie_shared, correction=True),
    ),
    "hunyuan_v1_moe": decoder(lambda f: _QWEN3, _hunyuan_experts),
    "deepseek": decoder(lambda f: Traits(), softmax_ffn),
    "grok-1": decoder(lambda f: Traits(norms=4, tied=True), moe(inner=("intermediate_size",))),
    "dbrx": _dbrx,
    "afmoe": decoder(
        lambda f: Traits(qk_norm="head", norms=4, gate=True, window=all_but_each(4, "global_attn_every_n_layers")),
        moe(sparse=after_dense, shared=shared_of("num_shared_experts"), correction=True),
    ),
}  # fmt: skip
