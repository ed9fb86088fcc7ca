"""The families before Llama: GPT-2, OPT, Bloom, MPT, GPT-J, GPT-NeoX, Falcon, StarCoder 1, GPT-Neo.

Learned or no positions, LayerNorm with bias, MLP without a gate; each spells its fields in its own way.
"""

from __future__ import annotations

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.parts import Body, Heads, Weights, linear, norm


def _same_layers(f: Fields, heads: Heads, weights: Weights, outer: Weights) -> Body:
    layer = parts.make_layer(heads.cache, weights, heads)
    return Body([layer] * parts.num_layers(f), outer, heads.num)


def _plain(f: Fields, heads: Heads, outer: Weights, *, norms: int = 2, attention_bias: bool = True,
           mlp_bias: bool = True, inner: int | None = None) -> Body:  # fmt: skip
    """Attention, LayerNorms and a plain MLP, four times the hidden size unless the config says otherwise."""
    hidden = parts.hidden_size(f)
    size = inner or f.count_or(4 * hidden, "n_inner", "intermediate_size", "ffn_hidden_size", low=1)
    weights = parts.attention(hidden, heads, qkv_bias=attention_bias, out_bias=attention_bias)
    weights += parts.mlp(hidden, size, gated=False, bias=mlp_bias) + norm(hidden, norms, bias=True)
    return _same_layers(f, heads, weights, outer)


def _positions(f: Fields) -> int:
    return f.count("n_positions", "max_position_embeddings", "n_ctx")


def gpt2(f: Fields) -> Body:
    """GPT-2, and StarCoder 1 (`gpt_bigcode`), which is the same with one KV head."""
    heads = parts.read_heads(f)
    if f.text("model_type") == "gpt_bigcode" and f.flag("multi_query", default=True):
        heads = Heads(heads.num, 1, heads.key_dim, heads.value_dim)
    return _plain(f, heads, parts.outer_weights(f, tied=True, norm_bias=True, positions=_positions(f)))


def gpt_neo(f: Fields) -> Body:
    """As GPT-2 without biases on queries, keys and values; local and global layers take turns."""
    heads, hidden = parts.read_heads(f), parts.hidden_size(f)
    weights = parts.attention(hidden, heads, out_bias=True) + norm(hidden, 2, bias=True)
    weights += parts.mlp(hidden, f.count_or(4 * hidden, "intermediate_size", low=1), gated=False, bias=True)
    window = heads.window(f.count_or(256, "window_size", low=1))
    kinds = f.texts("attention_layers") or [("global", "local")[i % 2] for i in range(parts.num_layers(f))]
    layers = [parts.make_layer(window if k == "local" else heads.cache, weights, heads) for k in kinds]
    outer = parts.outer_weights(f, tied=True, norm_bias=True, positions=_positions(f))
    return Body(layers[: parts.num_layers(f)], outer, heads.num)


def opt(f: Fields) -> Body:
    """OPT keeps two unused rows of positions, and in the 350M model embeds in fewer dimensions than it thinks."""
    heads, hidden, vocab = parts.read_heads(f), parts.hidden_size(f), parts.vocab_size(f)
    word = f.count_or(hidden, "word_embed_proj_dim", low=1)
    outer = linear("embedding", vocab, word, split="rows") + linear("embedding", _positions(f) + 2, hidden)
    if word != hidden:
        outer += linear("other", hidden, word) + linear("other", word, hidden)
    if f.flag("do_layer_norm_before", default=True) and not f.flag("_remove_final_layer_norm"):
        outer += norm(hidden, bias=True)
    if not f.flag("tie_word_embeddings", default=True):
        outer += linear("head", vocab, word, split="rows")
    return _plain(f, heads, outer, inner=f.count("ffn_dim"))


def bloom(f: Fields) -> Body:
    """ALiBi instead of positions; a LayerNorm right after the embedding."""
    heads, hidden = parts.read_heads(f), parts.hidden_size(f)
    return _plain(f, heads, parts.outer_weights(f, tied=True, final_norms=2, norm_bias=True), inner=4 * hidden)


def mpt(f: Fields) -> Body:
    """No biases anywhere; multi-query where `attn_config.kv_n_heads` says so."""
    hidden, heads = parts.hidden_size(f), parts.read_heads(f)
    section = f.section("attn_config")
    num_kv = section.count_or(heads.num, "kv_n_heads", low=1) if section else heads.num
    heads = Heads(heads.num, num_kv, heads.key_dim, heads.value_dim)
    bias = not f.flag("no_bias", default=True)
    inner = f.count_or(4, "expansion_ratio", low=1) * hidden
    weights = parts.attention(hidden, heads, qkv_bias=bias, out_bias=bias) + norm(hidden, 2, bias=bias)
    weights += parts.mlp(hidden, inner, gated=False, bias=bias)
    outer = parts.outer_weights(f, tied=True, norm_bias=bias)
    learned = section is not None and not section.flag("alibi") and not section.flag("rope")
    return _same_layers(f, heads, weights, outer + (linear("embedding", f.count("max_seq_len"), hidden) if learned
                                                    and f.flag("learned_pos_emb", default=True) else []))  # fmt: skip


def gptj(f: Fields) -> Body:
    """Attention and MLP side by side under one norm; no attention bias, but one on the head."""
    outer = parts.outer_weights(f, norm_bias=True, head_bias=True)
    return _plain(f, parts.read_heads(f), outer, norms=1, attention_bias=False)


def gpt_neox(f: Fields) -> Body:
    """Rotary positions, biases everywhere but on the head (Pythia, GPT-NeoX-20B)."""
    bias = f.flag("attention_bias", default=True)
    return _plain(f, parts.read_heads(f), parts.outer_weights(f, norm_bias=True), attention_bias=bias)


def falcon(f: Fields) -> Body:
    """Falcon 7B: multi-query; 40B and 180B (`new_decoder_architecture`): grouped, with two norms side by side."""
    base, new = parts.read_heads(f), f.flag("new_decoder_architecture")
    many = new or not f.flag("multi_query", default=True)
    num_kv = f.count_or(base.num, "num_kv_heads", "n_head_kv", low=1) if many else 1
    heads = Heads(base.num, num_kv, base.key_dim, base.value_dim)
    norms = f.count_or(2 if new else 1, "num_ln_in_parallel_attn", low=1)
    if not new and not f.flag("parallel_attn", default=True):
        norms = 2
    bias = f.flag("bias")
    outer = parts.outer_weights(f, tied=True, norm_bias=True)
    inner = f.count_or(4 * parts.hidden_size(f), "ffn_hidden_size", low=1)
    return _plain(f, heads, outer, norms=norms, attention_bias=bias, mlp_bias=bias, inner=inner)


OLDER_FAMILIES: dict[str, parts.Builder] = {
    "gpt2": gpt2, "gpt_bigcode": gpt2, "gpt_neo": gpt_neo, "opt": opt, "bloom": bloom, "mpt": mpt,
    "gptj": gptj, "codegen": gptj, "gpt_neox": gpt_neox, "falcon": falcon, "RefinedWeb": falcon,
    "RefinedWebModel": falcon,
}  # fmt: skip
