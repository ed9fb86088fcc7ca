"""Do the tensors of a GGUF file have the shapes that its metadata announces? Asked before anything is computed.

Kernels take sizes from the metadata and data from the tensors; a file in which the two disagree must not get that
far. Only for architectures that are computed here, whose tensors are laid out as below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvledger.errors import DamagedFile

if TYPE_CHECKING:
    from kvledger.spec.from_gguf import Facts, TensorFacts

Shape = tuple[int | None, ...]  # None: any size

MAX_WIDTH = 1 << 20
CHECKED = ("llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "deepseek2")


def check_shapes(facts: Facts, tensors: Mapping[str, TensorFacts], num_layers: int) -> None:
    """Raises DamagedFile naming the first tensor that is not as announced."""
    if facts.arch not in CHECKED:
        return
    _check_rope(facts, num_layers)
    _check_experts(facts)
    _compare(tensors, "", _outside(facts, tensors))
    for i in range(num_layers):
        attention = _latent(facts) if facts.arch == "deepseek2" else _heads(facts, i)
        _compare(tensors, f"blk.{i}.", attention | _feed_forward(facts, i))


def _compare(tensors: Mapping[str, TensorFacts], prefix: str, expected: Mapping[str, Shape]) -> None:
    for name, shape in expected.items():
        found = tensors[prefix + name][0] if prefix + name in tensors else None
        if found is None:
            continue  # what is needed and missing is reported where it is needed
        if len(found) == len(shape) + 1 and found[0] == 1:
            found = found[1:]  # a matrix of one row may be a vector
        if len(found) != len(shape) or any(b is not None and a != b for a, b in zip(found, shape, strict=True)):
            announced = ", ".join("any" if n is None else str(n) for n in shape)
            raise DamagedFile(f"tensor {prefix + name!r} has shape {found}; the metadata announces ({announced})")


def _check_rope(facts: Facts, num_layers: int) -> None:
    for i in range(num_layers):
        dim = facts.count("attention.key_length_mla", facts.key_dim(i))
        rope = facts.count("rope.dimension_count", dim)
        if rope % 2 or not 0 < rope <= dim:
            raise DamagedFile(f"'{facts.arch}.rope.dimension_count' is {rope}; it must be even and at most {dim}")


def _check_experts(facts: Facts) -> None:
    """Groups of equal size, no more chosen than there are."""
    experts, used = facts.count("expert_count", 0), facts.count("expert_used_count", 0)
    groups, kept = facts.count("expert_group_count", 1) or 1, facts.count("expert_group_used_count", 1)
    reachable = experts // groups * kept if groups > 1 else experts
    if experts and (not 0 < used <= reachable or experts % groups or not kept <= groups):
        raise DamagedFile(f"{used} of {experts} experts from {kept} of {groups} groups cannot be chosen")


def _outside(facts: Facts, tensors: Mapping[str, TensorFacts]) -> dict[str, Shape]:
    hidden = facts.positive("embedding_length")
    rope = facts.count("rope.dimension_count", facts.key_dim(0))
    vocab = tensors["token_embd.weight"][0][0] if "token_embd.weight" in tensors else None
    return {
        "token_embd.weight": (None, hidden),
        "output.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
        "rope_freqs.weight": (rope // 2,),
    }


def _heads(facts: Facts, layer: int) -> dict[str, Shape]:
    """Attention with separate keys and values."""
    hidden, heads = facts.positive("embedding_length"), facts.positive("attention.head_count", layer=layer)
    kv_heads = facts.positive("attention.head_count_kv", heads, layer)
    if heads % kv_heads:
        raise DamagedFile(f"{heads} query heads of layer {layer} do not share {kv_heads} KV heads evenly")
    key, value = facts.key_dim(layer), facts.value_dim(layer)
    return {
        "attn_q.weight": (heads * key, hidden), "attn_q.bias": (heads * key,), "attn_q_norm.weight": (key,),
        "attn_k.weight": (kv_heads * key, hidden), "attn_k.bias": (kv_heads * key,), "attn_k_norm.weight": (key,),
        "attn_v.weight": (kv_heads * value, hidden), "attn_v.bias": (kv_heads * value,),
        "attn_output.weight": (hidden, heads * value), "attn_output.bias": (hidden,), "attn_norm.weight": (hidden,),
    }  # fmt: skip


def _latent(facts: Facts) -> dict[str, Shape]:
    """MLA, with kv_b whole (older files) or split."""
    hidden, heads = facts.positive("embedding_length"), facts.positive("attention.head_count")
    latent, rope = facts.positive("attention.kv_lora_rank"), facts.positive("rope.dimension_count")
    key = facts.positive("attention.key_length_mla", facts.key_dim(0))
    value = facts.positive("attention.value_length_mla", facts.value_dim(0))
    low = facts.count("attention.q_lora_rank", 0) or None
    return {
        "attn_q.weight": (heads * key, hidden), "attn_q_a.weight": (low, hidden), "attn_q_a_norm.weight": (low,),
        "attn_q_b.weight": (heads * key, low), "attn_kv_a_mqa.weight": (latent + rope, hidden),
        "attn_kv_a_norm.weight": (latent,), "attn_kv_b.weight": (heads * (key - rope + value), latent),
        "attn_k_b.weight": (heads, latent, key - rope), "attn_v_b.weight": (heads, value, latent),
        "attn_output.weight": (hidden, heads * value), "attn_norm.weight": (hidden,),
    }  # fmt: skip


def _feed_forward(facts: Facts, layer: int) -> dict[str, Shape]:
    """Dense, routed and shared experts; a size that the file does not give may be any."""
    hidden = facts.positive("embedding_length")
    inner = facts.positive("feed_forward_length", layer=layer) if facts.has("feed_forward_length") else None
    if inner and inner > MAX_WIDTH:
        raise DamagedFile(f"'{facts.arch}.feed_forward_length' is {inner:,}; {MAX_WIDTH:,} are accepted")
    routed = facts.count("expert_feed_forward_length", 0, layer) or inner
    num_shared = facts.count("expert_shared_count", 0)
    shared = facts.count("expert_shared_feed_forward_length", num_shared * (routed or 0))
    if shared > MAX_WIDTH:
        raise DamagedFile(f"the shared experts of {facts.arch!r} are {shared:,} wide; {MAX_WIDTH:,} are accepted")
    experts = facts.count("expert_count", 0) or None
    shapes: dict[str, Shape] = {
        "ffn_norm.weight": (hidden,), "post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,),
        "ffn_gate_inp.weight": (experts, hidden), "exp_probs_b.bias": (experts,), "ffn_down.bias": (hidden,),
        "ffn_gate_inp_shexp.weight": (hidden,),
    }  # fmt: skip
    for part in ("gate", "up"):
        shapes[f"ffn_{part}.weight"] = (inner, hidden)
        shapes[f"ffn_{part}_exps.weight"] = (experts, routed, hidden)
        shapes[f"ffn_{part}_shexp.weight"] = (shared, hidden)
    return shapes | {
        "ffn_down.weight": (hidden, inner),
        "ffn_down_exps.weight": (experts, hidden, routed),
        "ffn_down_shexp.weight": (hidden, shared),
    }
