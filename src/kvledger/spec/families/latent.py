"""Multi-head latent attention: DeepSeek V2, V3, V3.2 (with its indexer), Kimi K2, GLM-4.7-Flash, GLM-5, Mistral 4.

Queries and keys are rebuilt from low-rank latents (arXiv:2405.04434, section 2.1); only the key-value latent and one
rope key are cached. A sparse-attention indexer (DeepSeek-V3.2) caches a small key of its own beside them.
"""

from __future__ import annotations

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.decoder import FeedForward
from kvledger.spec.families.moe import after_dense, deepseek_ffn, moe, shared_of, softmax_ffn
from kvledger.spec.families.parts import Body, Heads, Weights, linear, norm
from kvledger.spec.kv import LatentKV

INDEX_SCALE_BYTES = 4  # one fp32 scale beside the fp8 key of the indexer


def latent_attention(f: Fields, heads: Heads, *, bias: bool = False) -> Weights:
    """Weights of one MLA layer: (down, norm, up) of the query, unless it has no low rank, and of keys and values."""
    hidden, rank = parts.hidden_size(f), f.count("kv_lora_rank")
    rope = f.count("qk_rope_head_dim")
    query, q_rank = heads.num * heads.key_dim, f.maybe_count("q_lora_rank")
    if q_rank is None:
        weights = linear("attention", query, hidden, split="rows", units=heads.num)
    else:
        weights = linear("attention", q_rank, hidden, bias=bias) + norm(q_rank)
        weights += linear("attention", query, q_rank, split="rows", units=heads.num)
    weights += linear("attention", rank + rope, hidden, bias=bias) + norm(rank)
    nope = heads.key_dim - rope
    weights += linear("attention", heads.num * (nope + heads.value_dim), rank, split="rows", units=heads.num)
    return weights + linear("attention", hidden, heads.num * heads.value_dim, bias=bias, split="cols", units=heads.num)


def latent_heads(f: Fields) -> Heads:
    """Heads as computed before absorption; none of them is cached."""
    num = f.count("num_attention_heads")
    return Heads(num, num, f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim"), f.count("v_head_dim"))


def indexer(f: Fields) -> Weights:
    """Lightning indexer of DeepSeek-V3.2: queries from the query latent, one key with LayerNorm, head weights."""
    hidden, dim, num = parts.hidden_size(f), f.count("index_head_dim"), f.count("index_n_heads")
    weights = linear("indexer", num * dim, f.count("q_lora_rank"))
    weights += linear("indexer", dim, hidden) + norm(dim, bias=True)
    return weights + linear("indexer", num, hidden)


def indexer_layers(f: Fields, layers: int) -> list[bool]:
    """Which layers run an indexer of their own; the others reuse the choice of the one before (GLM-5.x)."""
    if not f.has("index_head_dim"):
        return [False] * layers
    kinds = f.texts("indexer_types")
    if kinds is None and f.text("index_topk_pattern"):
        kinds = ["full" if c == "F" else "shared" for c in f.text("index_topk_pattern")]
    if kinds is not None:
        if len(kinds) < layers:
            raise f.fail("indexer_types", f"has {len(kinds)} entries for {layers} layers")
        return [kind == "full" for kind in kinds[:layers]]
    period, offset = f.count_or(1, "index_topk_freq", low=1), f.count_or(2, "index_skip_topk_offset")
    return [max(i - offset + 1, 0) % period == 0 for i in range(layers)]


def latent_cache(f: Fields, with_index: bool) -> LatentKV:
    """The latent and rope key of a token, and the indexer's fp8 key with its scale where the layer has one."""
    index = f.count("index_head_dim") + INDEX_SCALE_BYTES if with_index else 0
    return LatentKV(f.count("kv_lora_rank"), f.count("qk_rope_head_dim"), index)


def absorbed(f: Fields, heads: Heads) -> tuple[int, int]:
    """Dimensions multiplied per cached token when decode works on the latent itself, all heads together."""
    rank = f.count("kv_lora_rank")
    return heads.num * (rank + f.count("qk_rope_head_dim")), heads.num * rank


def latent_decoder(ffn: FeedForward) -> parts.Builder:
    """A builder of MLA decoders with these feed-forward layers."""

    def build(f: Fields) -> Body:
        count, heads, hidden = parts.num_layers(f), latent_heads(f), parts.hidden_size(f)
        mixer = latent_attention(f, heads, bias=f.flag("attention_bias")) + norm(hidden, 2)
        layers = []
        for index, indexed in enumerate(indexer_layers(f, count)):
            weights, per_token = ffn(f, index)
            own = indexer(f) if indexed else []
            cache = latent_cache(f, indexed)
            layers.append(parts.make_layer(cache, mixer + own + weights, heads, per_token, absorbed(f, heads)))
        return Body(layers, parts.outer_weights(f), heads.num, f.count_or(0, "num_nextn_predict_layers"))

    return build


LATENT_FAMILIES: dict[str, parts.Builder] = {
    "deepseek_v2": latent_decoder(softmax_ffn),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"),
                    latent_decoder(deepseek_ffn)),
    "mistral4": latent_decoder(moe(sparse=after_dense, shared=shared_of("n_shared_experts"))),
}  # fmt: skip
