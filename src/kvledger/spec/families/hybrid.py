"""Hybrids: a few attention layers among many that keep only a state.

Qwen3-Next and 3.5, Kimi Linear, Jamba, Bamba, Granite 4, Nemotron-H, Falcon-H1, MiniMax-Text-01, LFM2, and plain
Mamba. The mixers are in `state.py`; here is which layer has which, and what stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.decoder import FeedForward
from kvledger.spec.families.latent import absorbed, latent_attention, latent_cache, latent_heads
from kvledger.spec.families.moe import after_dense, moe, shared_size, sparse_step
from kvledger.spec.families.parts import Body, Heads, Weights, linear, norm
from kvledger.spec.families.state import delta_net, kimi_delta, lightning, mamba1, mamba2, short_convolution
from kvledger.spec.kv import StateKV
from kvledger.spec.model import Layer, Weight

Mixer = Callable[[Fields], tuple[Weights, StateKV]]
_STATE_KINDS = ("linear_attention", "mamba", "conv", "lightning")


def hybrid(
    mixer: Mixer,
    ffn: FeedForward,
    pattern: Callable[[Fields, int], str],
    attention: Callable[[Fields, Heads], Weights],
    *,
    tied: bool = False,
) -> parts.Builder:
    """A builder: `pattern` says by index where the config lists no kinds, `attention` gives an attention layer."""

    def build(f: Fields) -> Body:
        count, heads, hidden = parts.num_layers(f), parts.read_heads(f), parts.hidden_size(f)
        state_weights, state = mixer(f)
        attends = attention(f, heads)
        layers: list[Layer] = []
        for index, kind in enumerate(parts.layer_kinds(f, count, lambda i: pattern(f, i))):
            feed, per_token = ffn(f, index)
            rest = norm(hidden, 2) + feed
            if kind in _STATE_KINDS:
                layers.append(parts.make_layer(state, state_weights + rest, None, per_token))
            else:
                cache = parts.attention_cache(f, "full_attention" if kind == "attention" else kind, heads)
                layers.append(parts.make_layer(cache, attends + rest, heads, per_token))
        return Body(layers, parts.outer_weights(f, tied=tied), heads.num, f.count_or(0, "mtp_num_hidden_layers"))

    return build


def _every_nth(default: int, *names: str) -> Callable[[Fields, int], str]:
    def kind(f: Fields, index: int) -> str:
        period = f.count_or(default, *names, low=1)
        return "linear_attention" if (index + 1) % period else "full_attention"

    return kind


def _gated_attention(f: Fields, heads: Heads) -> Weights:
    """Qwen3-Next: an output gate as wide as the query, norms on queries and keys."""
    bias = f.flag("attention_bias")
    weights = parts.attention(parts.hidden_size(f), heads, qkv_bias=bias, out_bias=bias, q_factor=2)
    return weights + norm(heads.key_dim, 2)


def _plain_attention(f: Fields, heads: Heads) -> Weights:
    bias = f.flag("attention_bias")
    return parts.attention(parts.hidden_size(f), heads, qkv_bias=bias, out_bias=bias)


def _dense(f: Fields, index: int) -> tuple[Weights, int]:
    return parts.mlp(parts.hidden_size(f), f.count("intermediate_size"), bias=f.flag("mlp_bias")), 0


_qwen_moe = moe(
    sparse=sparse_step, shared=shared_size("shared_expert_intermediate_size"), shared_gate=True
)  # fmt: skip


def _jamba_kind(f: Fields, index: int) -> str:
    is_attention = index % f.count("attn_layer_period") == f.count_or(0, "attn_layer_offset")
    return "attention" if is_attention else "mamba"


def _jamba_sparse(f: Fields, index: int) -> bool:
    is_sparse = index % f.count("expert_layer_period") == f.count_or(0, "expert_layer_offset")
    return is_sparse and f.count("num_experts") > 1


def _jamba_mixer(f: Fields) -> tuple[Weights, StateKV]:
    return mamba1(f, inner_norms=True)


def _bamba_kind(f: Fields, index: int) -> str:
    return "attention" if index in (f.counts("attn_layer_indices") or []) else "mamba"


def _granite_ffn(f: Fields, index: int) -> tuple[Weights, int]:
    """Granite 4: an MLP for every token, and experts beside it in the larger models."""
    shared = parts.mlp(parts.hidden_size(f), f.count("shared_intermediate_size"))
    if not f.count_or(0, "num_local_experts"):
        return shared, 0
    experts, per_token = moe(inner=("intermediate_size",))(f, index)
    return experts + shared, per_token


def _lfm2_inner(f: Fields) -> int:
    """LFM2 writes the size before the two-thirds rule and rounds up (as Llama 1 did)."""
    inner = f.count("block_ff_dim", "intermediate_size")
    if not f.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    scaled = int(f.number_or(1.0, "block_ffn_dim_multiplier") * (2 * inner // 3))
    multiple = f.count_or(256, "block_multiple_of", low=1)
    return -(-scaled // multiple) * multiple


def _lfm2_ffn(f: Fields, index: int) -> tuple[Weights, int]:
    return parts.mlp(parts.hidden_size(f), _lfm2_inner(f)), 0


def _lfm2_moe_ffn(f: Fields, index: int) -> tuple[Weights, int]:
    if index < f.count_or(0, "num_dense_layers"):
        return _dense(f, index)
    return moe(correction=f.flag("use_expert_bias", default=True))(f, index)


def _lfm2_kind(f: Fields, index: int) -> str:
    indices = f.counts("full_attn_idxs")
    return "full_attention" if indices is None or index in indices else "conv"


def _normed_attention(f: Fields, heads: Heads) -> Weights:
    return parts.attention(parts.hidden_size(f), heads) + norm(heads.key_dim, 2)


def _minimax_kind(f: Fields, index: int) -> str:
    kinds = f.counts("attn_type_list")
    if kinds is not None and index < len(kinds):
        return "full_attention" if kinds[index] else "lightning"
    return "full_attention" if (index + 1) % 2 else "lightning"


def kimi_linear(f: Fields) -> Body:
    """Kimi Linear: three KDA layers to one MLA layer without positions; DeepSeek's experts."""
    count, heads, hidden = parts.num_layers(f), latent_heads(f), parts.hidden_size(f)
    section = f.section("linear_attn_config")
    full = section.counts("full_attn_layers") if section else None
    kinds = parts.layer_kinds(f, count, lambda i: "full_attention" if full and i + 1 in full else "linear_attention")
    ffn = moe(sparse=after_dense, shared=_kimi_shared, correction=True)
    state_weights, state = kimi_delta(f)
    layers = []
    for index, kind in enumerate(kinds):
        feed, per_token = ffn(f, index)
        rest = norm(hidden, 2) + feed
        if kind == "full_attention":
            mixer = latent_attention(f, heads, bias=f.flag("attention_bias"))
            layers.append(parts.make_layer(latent_cache(f, False), mixer + rest, heads, per_token, absorbed(f, heads)))
        else:
            layers.append(parts.make_layer(state, state_weights + rest, None, per_token))
    return Body(layers, parts.outer_weights(f), heads.num)


def _kimi_shared(f: Fields) -> int:
    return f.count_or(1, "num_shared_experts", "n_shared_experts") * f.count("moe_intermediate_size")


# ---------------------------------------------------------------------------------------------- Nemotron-H, Falcon-H1

_NEMOTRON_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _nemotron_kinds(f: Fields) -> list[str]:
    pattern = f.text("hybrid_override_pattern")
    if pattern:
        if set(pattern) - set(_NEMOTRON_LETTERS):
            raise f.fail("hybrid_override_pattern", f"has letters other than {', '.join(_NEMOTRON_LETTERS)}")
        return [_NEMOTRON_LETTERS[letter] for letter in pattern]
    kinds = f.texts("layers_block_type")
    if not kinds:
        raise f.fail("hybrid_override_pattern", "is missing (also spelled 'layers_block_type')")
    legacy = {"mamba": "linear_attention", "attention": "full_attention"}
    return [legacy.get(kind, kind) for kind in kinds]


def _nemotron_moe(f: Fields) -> tuple[Weights, int]:
    """Experts without a gate, in a latent of their own where the config names its size."""
    hidden, count = parts.hidden_size(f), f.count("n_routed_experts", high=1 << 16)
    latent = f.maybe_count("moe_latent_size")
    weights = parts.experts(latent or hidden, f.count("moe_intermediate_size"), count, gated=False)
    weights += [*parts.router(hidden, count), Weight("router", count)]
    if latent:
        weights += linear("mlp", latent, hidden) + linear("mlp", hidden, latent)
    shared = f.count("moe_shared_expert_intermediate_size")
    return weights + parts.mlp(hidden, shared, gated=False, part="shared_experts"), f.count("num_experts_per_tok")


def nemotron_h(f: Fields) -> Body:
    """Nemotron-H and Nemotron Nano 2/3: every layer is one of Mamba-2, attention, MLP or experts, with one norm."""
    heads, hidden = parts.read_heads(f), parts.hidden_size(f)
    state_weights, state = mamba2(f)
    feed = parts.mlp(hidden, f.count("intermediate_size"), gated=False, bias=f.flag("mlp_bias"))
    bias = f.flag("attention_bias")
    attends = parts.attention(hidden, heads, qkv_bias=bias, out_bias=bias)
    layers = []
    for kind in _nemotron_kinds(f):
        if kind == "linear_attention":
            layers.append(parts.make_layer(state, state_weights + norm(hidden)))
        elif kind == "full_attention":
            layers.append(parts.make_layer(heads.cache, attends + norm(hidden), heads))
        elif kind == "moe":
            experts, per_token = _nemotron_moe(f)
            layers.append(parts.make_layer(None, experts + norm(hidden), None, per_token))
        elif kind == "mlp":
            layers.append(parts.make_layer(None, feed + norm(hidden)))
        else:
            raise f.fail("layers_block_type", f"names {kind[:40]!r}, which this family does not have")
    return Body(layers, parts.outer_weights(f), heads.num, f.count_or(0, "num_nextn_predict_layers"))


def falcon_h1(f: Fields) -> Body:
    """Falcon-H1: attention and Mamba-2 side by side in every block; a block is listed as two layers here."""
    heads, hidden = parts.read_heads(f), parts.hidden_size(f)
    state_weights, state = mamba2(f)
    attends = _plain_attention(f, heads) + _dense(f, 0)[0] + norm(hidden, 2)
    block = [parts.make_layer(heads.cache, attends, heads), parts.make_layer(state, state_weights)]
    count = parts.num_layers(f)
    note = f"each of the {count} blocks is listed as two layers: attention with MLP, and state-space"
    return Body(block * count, parts.outer_weights(f), heads.num, notes=(note,))


def mamba(f: Fields) -> Body:
    """Mamba 1 and 2 without any attention: a state per layer, nothing grows."""
    weights, state = mamba2(f) if f.has("num_heads") else mamba1(f)
    layer = parts.make_layer(state, weights + norm(parts.hidden_size(f)))
    return Body([layer] * parts.num_layers(f), parts.outer_weights(f, tied=True), 1)


_qwen35 = _every_nth(4, "full_attention_interval")

HYBRID_FAMILIES: dict[str, parts.Builder] = {
    "qwen3_next": hybrid(delta_net, _qwen_moe, _qwen35, _gated_attention),
    "qwen3_5_text": hybrid(delta_net, _dense, _qwen35, _gated_attention),
    "qwen3_5_moe_text": hybrid(delta_net, _qwen_moe, _qwen35, _gated_attention),
    "jamba": hybrid(_jamba_mixer, moe(inner=("intermediate_size",), sparse=_jamba_sparse), _jamba_kind,
                    _plain_attention),
    "bamba": hybrid(mamba2, _dense, _bamba_kind, _plain_attention),
    "granitemoehybrid": hybrid(mamba2, _granite_ffn, _bamba_kind, _plain_attention, tied=True),
    "minimax": hybrid(lightning, moe(inner=("intermediate_size",)), _minimax_kind, _plain_attention),
    "lfm2": hybrid(short_convolution, _lfm2_ffn, _lfm2_kind, _normed_attention, tied=True),
    "lfm2_moe": hybrid(short_convolution, _lfm2_moe_ffn, _lfm2_kind, _normed_attention, tied=True),
    "kimi_linear": kimi_linear, "nemotron_h": nemotron_h, "falcon_h1": falcon_h1,
    "mamba": mamba, "mamba2": mamba, "falcon_mamba": mamba,
}  # fmt: skip
