"""Families whose layers differ one by one: Mllama (cross-attention), Nemotron-NAS (searched blocks), OpenELM.

A layer that attends to the image keeps keys and values of the image, not of the text: it has no cache that grows.
"""

from __future__ import annotations

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.parts import Body, Heads, linear, norm
from kvledger.spec.model import Layer, Weight

_MLLAMA_CROSS = [3, 8, 13, 18, 23, 28, 33, 38]  # transformers' default, the 11B model


def mllama(f: Fields) -> Body:
    """Llama 3.2 Vision's text model: every fifth layer is cross-attention over the image."""
    count, heads, hidden = parts.num_layers(f), parts.read_heads(f), parts.hidden_size(f)
    cross = f.counts("cross_attention_layers") or _MLLAMA_CROSS
    both = parts.attention(hidden, heads) + norm(hidden, 2) + parts.mlp(hidden, f.count("intermediate_size"))
    over_image = both + norm(heads.key_dim, 2) + [Weight("other", 1, count=2)]
    layers = [
        parts.make_layer(None, over_image, heads) if i in cross else parts.make_layer(heads.cache, both, heads)
        for i in range(count)
    ]
    outer = parts.outer_weights(f) + linear("embedding", 8, hidden)  # eight rows for image tokens, without a head
    note = f"{len(cross)} cross-attention layers keep the image's keys and values, which do not grow with the text"
    return Body(layers, outer, heads.num, notes=(note,))


def nemotron_nas(f: Fields) -> Body:
    """Llama-Nemotron Ultra and Super (arXiv:2411.19146): per block, its own KV heads and MLP size, or neither."""
    base, hidden = parts.read_heads(f), parts.hidden_size(f)
    blocks = f.sections("block_configs")
    if blocks is None:
        raise f.fail("block_configs", "is missing; it says what each block has")
    return Body([_nas_block(f, b, base, hidden) for b in blocks], parts.outer_weights(f), base.num)


def _nas_block(f: Fields, block: Fields, base: Heads, hidden: int) -> Layer:
    """One searched block. A linear replacement is one square matrix; no-op is nothing, not even a norm."""
    mixer, feed = block.section("attention"), block.section("ffn")
    cache, weights, heads = None, [], None
    if mixer is not None and mixer.flag("replace_with_linear"):
        weights += linear("mlp", hidden, hidden) + norm(hidden)
    elif mixer is not None and not mixer.flag("no_op"):
        group = mixer.count("n_heads_in_group")
        heads = Heads(base.num, max(1, base.num // group), base.key_dim, base.value_dim)
        cache = heads.cache
        weights += parts.attention(hidden, heads) + norm(hidden)
    if feed is not None and feed.flag("replace_with_linear"):
        weights += linear("mlp", hidden, hidden) + norm(hidden)
    elif feed is not None and not feed.flag("no_op"):
        weights += parts.mlp(hidden, _nas_inner(f, feed, hidden)) + norm(hidden)
    return parts.make_layer(cache, weights, heads)


def _nas_inner(f: Fields, feed: Fields, hidden: int) -> int:
    """MLP size from its multiplier: two thirds of four times, rounded up to 256 (Llama's rule)."""
    if feed.has("intermediate_size"):
        return feed.count("intermediate_size")
    inner = int(2 * feed.number_or(1.0, "ffn_mult") * hidden / 3)
    return -(-inner // 256) * 256


def openelm(f: Fields) -> Body:
    """OpenELM (arXiv:2404.14619): heads and MLP size grow from layer to layer; embedding tied."""
    count, hidden, dim = parts.num_layers(f), f.count("model_dim"), f.count("head_dim")
    queries, kvs = f.per_layer(count, "num_query_heads"), f.per_layer(count, "num_kv_heads")
    factors, divisor = f.numbers("ffn_multipliers") or [], f.count_or(256, "ffn_dim_divisor", low=1)
    if len(factors) < count:
        raise f.fail("ffn_multipliers", f"has {len(factors)} entries for {count} layers")
    layers = []
    for num, num_kv, factor in zip(queries, kvs, factors, strict=False):
        heads, inner = Heads(num, num_kv, dim, dim), _make_divisible(factor * hidden, divisor)
        weights = parts.attention(hidden, heads) + norm(dim, 2 if f.flag("normalize_qk_projections") else 0)
        weights += parts.mlp(hidden, inner) + norm(hidden, 2)
        layers.append(parts.make_layer(heads.cache, weights, heads))
    tied = f.flag("share_input_output_layers", default=True)
    return Body(layers, parts.outer_weights(f, tied=tied), max(queries))


def _make_divisible(value: float, divisor: int) -> int:
    """Nearest multiple of `divisor`, but never below nine tenths of the value (MobileNet's rule)."""
    near = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return near + divisor if near < 0.9 * value else near


NESTED_FAMILIES: dict[str, parts.Builder] = {
    "mllama_text_model": mllama, "nemotron-nas": nemotron_nas, "openelm": openelm,
}  # fmt: skip
