"""Tensor names of Hugging Face models → GGUF names and layouts, as llama.cpp's convert_hf_to_gguf.py makes them.

What changes besides the name: Llama's query and key rows (GGUF rotates neighbouring channels, Hugging Face the two
halves of a head), experts (stacked), MLA's kv_b (split into what absorbs into the query and what unfolds the value),
and Gemma's norms (GGUF stores 1 + w).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.spec.from_gguf import Facts

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_OUTSIDE = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
}  # fmt: skip
_IN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(\w+)")
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_IGNORED = re.compile(r"vision_tower|multi_modal_projector|visual\.|audio_tower|rotary_emb\.inv_freq")


@dataclass(slots=True)
class Recipe:
    """How a GGUF tensor is made: of which stored tensors, and by what function of them."""

    sources: list[str] = field(default_factory=list)
    make: Callable[[list[Array]], Array] = lambda parts: parts[0]
    shape: Callable[[list[Shape]], Shape] = lambda shapes: shapes[0]
    as_f32: bool = False


def recipes_of(metadata: Mapping[str, object], shapes: Mapping[str, Shape]) -> dict[str, Recipe]:
    """GGUF name → recipe, for all stored tensors but those of other senses (vision).

    Raises UnsupportedModel for a name without a counterpart, DamagedFile where experts are missing.
    """
    facts = Facts(str(metadata["general.architecture"]), metadata)
    num_layers = facts.positive("block_count")
    recipes: dict[str, Recipe] = {}
    experts: dict[str, dict[int, str]] = {}
    for name in shapes:
        short = _without_prefix(name)
        match = _LAYER.fullmatch(short)
        if _IGNORED.search(name) or (match and int(match[1]) >= num_layers):  # draft layers of DeepSeek-V3
            continue
        if match and (expert := _EXPERT.fullmatch(match[2])):
            part = _EXPERT_PARTS.get(expert[2], expert[2])
            experts.setdefault(f"blk.{match[1]}.ffn_{part}_exps.weight", {})[int(expert[1])] = name
        else:
            recipes.update(_plain(facts, short, name))
    if facts.metadata.get("kvledger.tied_embedding") and "output.weight" in recipes:
        del recipes["output.weight"]
    if facts.has("rope.scaling.llama3"):
        recipes["rope_freqs.weight"] = _rope_freqs(facts)
    return recipes | {name: _stack(name, parts) for name, parts in experts.items()}


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)


def _plain(facts: Facts, short: str, name: str) -> dict[str, Recipe]:
    gemma = facts.arch.startswith("gemma")
    if short in _OUTSIDE:
        return {_OUTSIDE[short]: _norm_recipe(name, gemma and short == "norm.weight")}
    if short.endswith("e_score_correction_bias") and (match := re.match(r"layers\.(\d+)\.", short)):
        return {f"blk.{match[1]}.exp_probs_b.bias": Recipe([name], as_f32=True)}
    match = _LAYER.fullmatch(short)
    if match and match[2] == "self_attn.kv_b_proj":
        return _split_kv_b(facts, match[1], name)
    table = _IN_LAYER | _GEMMA if gemma else _IN_LAYER
    if match is None or match[2] not in table:
        raise UnsupportedModel(f"tensor {name!r} of a {facts.arch} model is not known here")
    part = table[match[2]]
    target = f"blk.{match[1]}.{part}.{match[3]}"
    if facts.arch == "llama" and part in ("attn_q", "attn_k"):
        heads = facts.positive("attention.head_count" if part == "attn_q" else "attention.head_count_kv")
        return {target: Recipe([name], lambda parts: pairs_from_halves(parts[0], heads))}
    if part == "ffn_gate_inp":
        return {target: Recipe([name], as_f32=True)}
    return {target: _norm_recipe(name, gemma and part.endswith("norm"))}


def _norm_recipe(name: str, plus_one: bool) -> Recipe:
    return Recipe([name], lambda parts: parts[0] + np.float32(1), as_f32=True) if plus_one else Recipe([name])


def pairs_from_halves(rows: Array, heads: int) -> Array:
    """Rows (or biases) of each head from the order a₀…aₙ b₀…bₙ to a₀ b₀ a₁ b₁ …"""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])  # [heads, half, dim / 2, …]
    return split.swapaxes(1, 2).reshape(rows.shape)


def _stack(name: str, parts: Mapping[int, str]) -> Recipe:
    missing = next((i for i in range(len(parts)) if i not in parts), None)
    if missing is not None:
        raise DamagedFile(f"{name}: expert {missing} is missing")

    def shape(shapes: list[Shape]) -> Shape:
        for index, found in enumerate(shapes):
            if found != shapes[0]:
                raise DamagedFile(f"tensor {parts[index]!r} has shape {found}, expert 0 has {shapes[0]}")
        return (len(shapes), *shapes[0])

    return Recipe([parts[i] for i in range(len(parts))], np.stack, shape)


def _split_kv_b(facts: Facts, layer: str, name: str) -> dict[str, Recipe]:
    """[heads × (nope + value), latent] → k_b [heads, latent, nope] and v_b [heads, value, latent]."""
    heads, latent = facts.positive("attention.head_count"), facts.positive("attention.kv_lora_rank")
    value = facts.positive("attention.value_length_mla")
    nope = facts.positive("attention.key_length_mla") - facts.positive("rope.dimension_count")

    def k_b(parts: list[Array]) -> Array:
        return parts[0].reshape(heads, nope + value, latent)[:, :nope].swapaxes(1, 2)

    def v_b(parts: list[Array]) -> Array:
        return parts[0].reshape(heads, nope + value, latent)[:, nope:]

    def checked(shapes: list[Shape], result: Shape) -> Shape:
        whole = (heads * (nope + value), latent)
        if nope < 1 or shapes[0] != whole:
            raise DamagedFile(f"tensor {name!r} has shape {shapes[0]}; config.json announces {whole}")
        return result

    return {
        f"blk.{layer}.attn_k_b.weight": Recipe([name], k_b, lambda shapes: checked(shapes, (heads, latent, nope))),
        f"blk.{layer}.attn_v_b.weight": Recipe([name], v_b, lambda shapes: checked(shapes, (heads, value, latent))),
    }


def _rope_freqs(facts: Facts) -> Recipe:
    """Llama 3.1's stretched rope as GGUF has it: what each frequency is divided by.

    Wavelengths below trained / high are left alone, those above trained / low are stretched by `factor`, the ones
    between partly (transformers, modeling_rope_utils, `_compute_llama3_parameters`).
    """
    dim = facts.positive("rope.dimension_count")
    base: Any = facts.metadata[f"{facts.arch}.rope.freq_base"]
    given: Any = facts.metadata[f"{facts.arch}.rope.scaling.llama3"]
    factor, low, high, trained = given
    wavelength = 2 * np.pi * float(base) ** (np.arange(0, dim, 2) / dim)
    kept = np.clip((trained / wavelength - low) / (high - low), 0, 1)  # 1: left alone, 0: stretched
    factors = (1 / ((1 - kept) / factor + kept)).astype(np.float32)
    return Recipe([], lambda _: factors, lambda _: (dim // 2,), as_f32=True)
