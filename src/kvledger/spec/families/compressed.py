"""DeepSeek-V4: attention over compressed tokens, and the neighbouring families with two kinds of heads or attentions.

A V4 layer keeps the latents of a short window, and beside them one latent per 4 (CSA) or 128 (HCA) tokens; CSA layers
also keep a small indexer key per compressed token. As a `Layer` has one cache, a block with both is listed as two.
The partly filled compression windows, a few rows per sequence, are not counted.
"""

from __future__ import annotations

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.latent import INDEX_SCALE_BYTES, absorbed, latent_attention, latent_cache, latent_heads
from kvledger.spec.families.moe import after_dense, moe, shared_of
from kvledger.spec.families.parts import Body, Heads, Weights, linear, norm
from kvledger.spec.kv import LatentKV
from kvledger.spec.model import Layer, Weight

_CSA, _HCA, _SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_RATIO_KINDS = {0: _SLIDING, 4: _CSA, 128: _HCA}


# ---------------------------------------------------------------------------------------------- DeepSeek-V4


def _v4_kinds(f: Fields, count: int) -> list[str]:
    ratios = f.counts("compress_ratios")
    if ratios is None:
        return parts.layer_kinds(f, count, lambda i: _HCA if i < 2 or i % 2 == 0 else _CSA)
    if len(ratios) < count or set(ratios) - set(_RATIO_KINDS):
        raise f.fail("compress_ratios", f"must give 0, 4 or 128 for each of {count} layers")
    return [_RATIO_KINDS[r] for r in ratios[:count]]


def _v4_attention(f: Fields) -> Weights:
    """Low-rank queries, one shared key-value vector, an output projected in groups, one sink per head."""
    hidden, dim, num, rank = parts.hidden_size(f), f.count("head_dim"), f.count("num_attention_heads"), _q_rank(f)
    groups, inner = f.count("o_groups"), f.count("o_lora_rank")
    weights = linear("attention", rank, hidden) + norm(rank)
    weights += linear("attention", num * dim, rank, split="rows", units=num)
    weights += linear("attention", dim, hidden) + norm(dim) + [Weight("other", num, split="rows")]
    weights += linear("attention", groups * inner, num * dim // groups, split="rows", units=groups)
    return weights + linear("attention", hidden, groups * inner, split="cols", units=groups)


def _q_rank(f: Fields) -> int:
    return f.count("q_lora_rank")


def _compressor(f: Fields, dim: int, ratio: int, overlap: int) -> Weights:
    """Values, gates and positions that turn `ratio` tokens into one; CSA's windows overlap (twice the width)."""
    width = overlap * dim
    weights = linear("indexer", width, parts.hidden_size(f)) * 2
    return [*weights, Weight("other", ratio, width), *norm(dim)]


def _v4_indexer(f: Fields, ratio: int) -> Weights:
    num, dim = f.count("index_n_heads"), f.count("index_head_dim")
    weights = _compressor(f, dim, ratio, 2) + linear("indexer", num * dim, _q_rank(f))
    return weights + linear("indexer", num, parts.hidden_size(f))


def _hyper(f: Fields) -> Weights:
    """Hyper-connections before attention and MLP: mixing weights over `hc_mult` copies of the stream."""
    copies, width = f.count("hc_mult", high=64), parts.hidden_size(f)
    mixes = (2 + copies) * copies
    one = [Weight("other", mixes, copies * width), Weight("other", mixes), Weight("other", 3)]
    return one * 2


def _v4_ffn(f: Fields, index: int) -> tuple[Weights, int]:
    """Experts everywhere; the first layers route by a table of token ids and have no balancing bias."""
    hashed = index < f.count_or(3, "num_hash_layers")
    kinds = f.texts("mlp_layer_types")
    if kinds is not None and index < len(kinds):
        hashed = kinds[index] == "hash_moe"
    return moe(shared=shared_of("n_shared_experts"), correction=not hashed)(f, index)


def deepseek_v4(f: Fields) -> Body:
    """DeepSeek-V4: see the module's text."""
    count, hidden, dim = parts.num_layers(f), parts.hidden_size(f), f.count("head_dim")
    rope = f.count_or(64, "qk_rope_head_dim", high=dim)
    num = f.count("num_attention_heads")
    heads, window = Heads(num, num, dim, dim), LatentKV(dim - rope, rope, window=f.count("sliding_window"))
    index_bytes = f.count("index_head_dim") + INDEX_SCALE_BYTES
    layers: list[Layer] = []
    for index, kind in enumerate(_v4_kinds(f, count)):
        feed, per_token = _v4_ffn(f, index)
        weights = _v4_attention(f) + _hyper(f) + norm(hidden, 2) + feed
        layers.append(parts.make_layer(window, weights, heads, per_token))
        if kind == _CSA:
            own = _compressor(f, dim, 4, 2) + _v4_indexer(f, 4)
            layers.append(parts.make_layer(LatentKV(dim - rope, rope, index_bytes, ratio=4), own))
        elif kind == _HCA:
            layers.append(parts.make_layer(LatentKV(dim - rope, rope, ratio=128), _compressor(f, dim, 128, 1)))
        elif kind != _SLIDING:
            raise f.fail("layer_types", f"names {kind[:40]!r}, which this family does not have")
    copies = f.count("hc_mult", high=64)
    joined = [Weight("other", copies, copies * hidden), Weight("other", copies), Weight("other", 1)]
    note = f"compressing blocks of the {count} are listed as two layers: the window and the compressed tokens"
    draft = f.count_or(0, "num_nextn_predict_layers")
    return Body(layers, parts.outer_weights(f) + joined, num, draft, (note,))


# ---------------------------------------------------------------------------------------------- MiMo, LongCat


def mimo_v2(f: Fields) -> Body:
    """MiMo-V2-Flash: sliding layers have twice the KV heads and a sink per head; keys are wider than values."""
    count, hidden, base = parts.num_layers(f), parts.hidden_size(f), parts.read_heads(f)
    slide = Heads(base.num, f.count_or(2 * base.num_kv, "swa_num_key_value_heads", low=1), base.key_dim, base.value_dim)
    ffn = moe(sparse=lambda g, i: after_dense(g, i) if g.has("mlp_layer_types") else i > 0, correction=True)
    window = f.count_or(0, "sliding_window_size") + 1 if f.has("sliding_window_size") else f.count("sliding_window")
    kinds = parts.layer_kinds(f, count, lambda i: "full_attention" if i == 0 or (i + 1) % 6 == 0 else _SLIDING)
    layers = []
    for index, kind in enumerate(kinds):
        slides = kind == _SLIDING
        heads = slide if slides else base
        feed, per_token = ffn(f, index)
        weights = parts.attention(hidden, heads, qkv_bias=f.flag("attention_bias")) + norm(hidden, 2) + feed
        weights += [Weight("other", base.num, split="rows")] if slides else []
        cache = heads.window(window) if slides else heads.cache
        layers.append(parts.make_layer(cache, weights, heads, per_token))
    return Body(layers, parts.outer_weights(f), base.num)


def longcat_flash(f: Fields) -> Body:
    """LongCat-Flash: two MLA attentions and two MLPs in every block, experts beside them; listed as two layers."""
    heads, hidden, count = latent_heads(f), parts.hidden_size(f), parts.num_layers(f)
    real = f.count("n_routed_experts", high=1 << 16)
    scored = real + f.count_or(0, "zero_expert_num")  # zero experts hand the token through
    half = latent_attention(f, heads, bias=f.flag("attention_bias")) + norm(hidden, 2)
    half += parts.mlp(hidden, f.count("ffn_hidden_size", "intermediate_size"))
    experts = parts.experts(hidden, f.count("expert_ffn_hidden_size", "moe_intermediate_size"), real)
    experts += [*linear("router", scored, hidden, bias=f.flag("router_bias")), Weight("router", scored)]
    cache, dims = latent_cache(f, False), absorbed(f, heads)
    block = [
        parts.make_layer(cache, half + experts, heads, f.count("moe_topk"), dims),
        parts.make_layer(cache, half, heads, 0, dims),
    ]
    note = f"each of the {count} blocks is listed as two layers, as it attends twice; zero experts cost nothing"
    return Body(block * count, parts.outer_weights(f), heads.num, notes=(note,))


COMPRESSED_FAMILIES: dict[str, parts.Builder] = {
    "deepseek_v4": deepseek_v4, "mimo_v2_flash": mimo_v2, "longcat_flash": longcat_flash,
}  # fmt: skip
