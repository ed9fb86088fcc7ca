"""A family that nobody described: counted as a decoder of the usual plan, and said to be an assumption.

Most new families are that, and their caches come out right. A config that hints at anything else (latents, states,
chunks, searched blocks) is refused, because a wrong plan is worse than none.
"""

from __future__ import annotations

from kvledger.errors import UnsupportedModel, nearest
from kvledger.spec.config_fields import Fields
from kvledger.spec.families.decoder import FeedForward, Traits, decoder, dense_ffn
from kvledger.spec.families.dense import every
from kvledger.spec.families.moe import NUM_EXPERTS, after_dense, moe
from kvledger.spec.families.parts import Body

# Parts of field names that only other plans have.
_OTHER_PLANS = (
    "lora_rank", "linear_", "mamba", "ssm", "state_size", "conv_", "chunk", "block_configs", "hybrid", "attn_type",
    "compress", "index_", "kv_shared", "cross_attention", "num_global", "swa_", "rwkv", "is_encoder_decoder",
    "layers_block_type", "mixer", "recurrent",
)  # fmt: skip


def assumed(model_type: str, known: dict[str, object], f: Fields) -> Body:
    """Layers of an unknown family. Raises UnsupportedModel where the fields hint at another plan."""
    odd = sorted(name for name in f.names() if any(word in name for word in _OTHER_PLANS) and f.has(name))
    if odd or not f.has("intermediate_size"):
        why = f"and its field {odd[0]!r} is of no usual decoder" if odd else "and it has no 'intermediate_size'"
        hint = ", ".join(nearest(model_type, known)) or "none; docs/layout.md says how to add one"
        raise UnsupportedModel(
            f"{f.source}: model_type {model_type[:60]!r} is not a family known here, {why}; nearest: {hint}"
        )
    traits, ffn = _traits(f), _ffn(f)
    body = decoder(lambda _: traits, ffn)(f)
    note = f"model_type {model_type[:60]!r} is not known here: counted as a decoder of the usual plan, which is assumed"
    return Body(body.layers, body.outer, body.num_heads, body.draft_layers, (note,))


def _traits(f: Fields) -> Traits:
    bias = f.flag("attention_bias") or f.flag("qkv_bias")
    slides = every if f.flag("use_sliding_window", default=True) else None
    norms = "head" if f.flag("use_qk_norm") or f.flag("qk_layernorm") else ""
    return Traits(
        qkv_bias=bias, out_bias=f.flag("attention_bias"), mlp_bias=f.flag("mlp_bias"), qk_norm=norms, window=slides
    )


def _ffn(f: Fields) -> FeedForward:
    if not f.has(*NUM_EXPERTS):
        return dense_ffn(_traits(f))
    inner = "moe_intermediate_size" if f.has("moe_intermediate_size") else "intermediate_size"
    return moe(
        inner=(inner,), sparse=after_dense,
        shared=lambda g: g.count_or(0, "n_shared_experts", "num_shared_experts") * g.count(inner),
    )  # fmt: skip
