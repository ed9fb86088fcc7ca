"""What the program and its kernels take for granted of a model, checked before anything is packed.

`spec.gguf_shapes` has compared tensors with the metadata; this compares the metadata with what `decoder` computes: all
layers alike, whole vectors and groups of channels, sizes known. A model beyond it is refused, not computed wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.kernels.packed import GROUP
from kvledger.model.decoder import Decoder
from kvledger.spec.from_gguf import Facts
from kvledger.spec.kv import CacheSpec, ChunkedKV, FullKV, LatentKV
from kvledger.spec.model import ModelSpec

LANES = 16
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length")
_OPTIONAL = ("attn_q.bias", "attn_q_norm.weight", "attn_k_norm.weight", "attn_output.bias", "ffn_down.bias")
_OF_EXPERTS = ("exp_probs_b.bias", "ffn_gate_shexp.weight", "ffn_gate_inp_shexp.weight")
_DENSE_PARTS = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_EXPERT_PARTS = ("ffn_norm", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_NORMED = ("attn_q_norm.weight", "attn_k_norm.weight")
_NEEDED = {"qwen2": ("attn_q.bias",), "qwen3": _NORMED, "qwen3moe": _NORMED, "gemma3": _NORMED}
_GATING = (0, 1, 2)  # not said, softmax, sigmoid
# Frequencies of rope (from the metadata, or read with it), MLA's kv_b beside its two halves, heads of classifiers
_NEEDLESS = re.compile(
    r"rope_freqs\.weight|(blk\.\d+\.)?.*(attn_rot_embd|inv_freq).*|blk\.\d+\.attn_kv_b\.weight|cls\..+"
)
_LAYER = re.compile(r"blk\.(\d+)\.")


def check(facts: Facts, spec: ModelSpec, d: Decoder, names: Container[str]) -> None:
    """Raises UnsupportedModel for what is not computed here, DamagedFile where a size or a tensor is missing.

    `names`: of the file's tensors.
    """
    _check_feed_forward(facts, d)
    for name in _required(d):
        if name not in names:
            raise DamagedFile(f"there is no tensor {name!r}")
    _check_optional(facts, d, names)
    for key in _PER_LAYER:
        _check_alike(facts, key, d.num_layers)
    _check_channels(d)
    for layer, kept in enumerate(spec.layers):
        _check_cache(layer, kept.cache, d)


def _check_feed_forward(facts: Facts, d: Decoder) -> None:
    if d.experts is None or d.dense_layers:
        facts.positive("feed_forward_length")
    if d.experts is not None and (gating := facts.count("expert_gating_func", 1)) not in _GATING:
        raise UnsupportedModel(f"'{facts.arch}.expert_gating_func' {gating} is not computed here; 1 and 2 are")


def _required(d: Decoder) -> Iterator[str]:
    """Tensors that the program reads whatever is found. That they are there means that sizes have been compared."""
    yield from ("token_embd.weight", "output_norm.weight")
    for layer in range(d.num_layers):
        attention = _attention_parts(d)
        feed_forward = _EXPERT_PARTS if d.experts is not None and layer >= d.dense_layers else _DENSE_PARTS
        yield from (f"blk.{layer}.{part}.weight" for part in (*attention, *feed_forward))


def _attention_parts(d: Decoder) -> tuple[str, ...]:
    if d.latent is None:
        return ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", *(("post_attention_norm",) * d.post_norms))
    queries = ("attn_q_a", "attn_q_a_norm", "attn_q_b") if d.latent.query_rank else ("attn_q",)
    return ("attn_norm", *queries, "attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")


def _check_optional(facts: Facts, d: Decoder, names: Container[str]) -> None:
    """What the program computes where it finds a tensor for it is in all layers or in none; some models need it."""
    needed = set(_NEEDED.get(facts.arch, ()))
    if d.experts is not None and d.experts.shared_inner:
        needed |= {"ffn_gate_shexp.weight"}
    for part in (*_OPTIONAL, *_OF_EXPERTS):
        layers = range(d.dense_layers if part in _OF_EXPERTS else 0, d.num_layers)
        absent = [i for i in layers if f"blk.{i}.{part}" not in names]
        if absent and (part in needed or len(absent) < len(layers)):
            raise DamagedFile(f"there is no tensor 'blk.{absent[0]}.{part}'")


def _check_alike(facts: Facts, key: str, num_layers: int) -> None:
    values = sorted({facts.count(key, 0, layer) for layer in range(num_layers)})
    if len(values) > 1:
        listed = ", ".join(map(str, values[:4]))
        raise UnsupportedModel(f"'{facts.arch}.{key}' varies from layer to layer ({listed}); here all layers are alike")


def _check_channels(d: Decoder) -> None:
    sizes = {"an attention head": d.head_dim}
    if d.latent:
        sizes = {"the latent": d.latent.dim, "the rope key": d.latent.rope, "a value head": d.latent.value}
    for what, size in sizes.items():
        if size % LANES:
            raise UnsupportedModel(f"{what} of {size} channels is not computed here; multiples of {LANES} are")
    for what, size in {"a hidden state": d.hidden, "a feed-forward layer": d.inner}.items():
        if size % GROUP:
            raise UnsupportedModel(f"{what} of {size} channels is not computed here; multiples of {GROUP} are")
    turned = d.ropes[0].dim
    if d.pairs and not d.latent and turned != d.head_dim:
        raise UnsupportedModel(
            f"rope on {turned} of {d.head_dim} channels, by pairs, is not computed here; on all it is"
        )


def _check_cache(layer: int, cache: CacheSpec | None, d: Decoder) -> None:
    """The pages that the layout counts are those that the kernels fill."""
    kept: tuple[int, ...]
    computed: tuple[int, ...]
    if isinstance(cache, LatentKV) and d.latent:
        kept, computed = (cache.latent_dim, cache.rope_dim), (d.latent.dim, d.latent.rope)
    elif isinstance(cache, FullKV) and not isinstance(cache, ChunkedKV) and not d.latent:
        kept, computed = (cache.num_kv_heads, cache.key_dim, cache.value_dim), (d.kv_heads, d.head_dim, d.head_dim)
    else:
        raise UnsupportedModel(f"layer {layer} keeps {cache}, which is not computed here")
    if kept != computed:
        raise UnsupportedModel(
            f"layer {layer} keeps heads and channels {kept}; computed here are {computed} in all layers"
        )


def unexplained(unread: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Of the tensors that no op reads those without which the answers may be wrong.

    Layers beyond the model's are drafts of tokens further on (DeepSeek-V3).
    """
    layers = ((name, _LAYER.match(name)) for name in unread if not _NEEDLESS.fullmatch(name))
    return tuple(name for name, layer in layers if layer is None or int(layer[1]) < num_layers)
