"""A Hugging Face config.json → ModelSpec. The only reader of those keys; standard library only.

The file says which family it is (`model_type`); `families/` knows what that means. Multimodal files keep the text
model in a section of its own: that is what is counted, with the vision tower beside it where its shape is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvledger.errors import ConfigError
from kvledger.spec.config_fields import Fields, read_config
from kvledger.spec.families import FAMILIES
from kvledger.spec.families.assumed import assumed
from kvledger.spec.families.parts import Body, hidden_size, vocab_size
from kvledger.spec.families.vision import vision_weights
from kvledger.spec.model import ModelSpec

_TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_MAX_DEPTH = 3  # thinker_config.text_config of the Omni models is 2
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_CONTEXT = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx",
    "model_max_length", "max_seq_length",
    "max_context_length",
)  # fmt: skip

# What transformers' configuration classes fill in, for families whose published files rely on it.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "max_position_embeddings": 131072,
    },
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
    "llama4_text": {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    **{x: {"max_position_embeddings": 1 << 20} for x in ("mamba", "mamba2", "falcon_mamba")},  # nothing grows with it
    "bloom": {"max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048},
}  # fmt: skip

# The same for text parts of multimodal files, which leave out what equals their class's defaults.
_NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
}  # fmt: skip

# Text parts and re-issues that are built like a family under another name.
_SAME_AS = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "mistral3": "mistral", "mllama": "mllama_text_model",
    "kimi_vl": "deepseek_v3", "kimi_k25": "deepseek_v3", "deepseek_vl_v2": "deepseek_v2",
    "ernie4_5_moe_vl": "ernie4_5_moe", "minimax_text_01": "minimax", "minimax_m1": "minimax",
    "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "internlm": "llama", "mimo": "qwen2", "dots": "dots1",
    "gemma4_unified_text": "gemma4_text", "cohere2_vision": "cohere2", "deci": "nemotron-nas", "solar": "llama",
    "glm4v_moe": "glm4_moe", "phi4mm": "phi3",
    "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe", "qwen3_omni_moe": "qwen3_moe",
}  # fmt: skip


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """The model that `config` (the object of a config.json) describes; `source` names the file in messages.

    A family that is not known is counted as a decoder of the usual plan where nothing speaks against it, with a note
    that says so. Raises ConfigError naming the field, or UnsupportedModel naming the nearest known families.
    """
    whole = Fields(config, source)
    f, family = _text_part(whole)
    f = f.with_defaults(DEFAULTS.get(family, {}))
    body = FAMILIES[family](f) if family in FAMILIES else assumed(family, dict(FAMILIES), f)
    return _assemble(f, whole, family, body, name, source)


def load_config(path: Path, name: str | None = None) -> ModelSpec:
    """A config.json, or a folder with one → model. Raises ConfigError, UnsupportedModel."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: no config.json there")
    label = name or (file.parent.name if file.name == "config.json" else file.stem)
    return model_from_config(read_config(file), label, str(file))


def _text_part(whole: Fields, depth: int = 0) -> tuple[Fields, str]:
    """The object that describes the text model, and its family."""
    for section in _TEXT_SECTIONS:
        inner = whole.section(section)
        if inner is not None:
            if depth == _MAX_DEPTH:
                raise whole.fail(section, f"is nested {depth} deep; a file has one text model")
            part, family = _text_part(inner.with_defaults({"model_type": whole.text("model_type")}), depth + 1)
            shared = whole.only("tie_word_embeddings", "torch_dtype", "dtype")
            return part.with_defaults({**_NESTED_DEFAULTS.get(family, {}), **shared}), family
    family = whole.text("model_type")
    if not family:
        raise whole.fail("model_type", "is missing; it says which family the model is of")
    return whole, _family(family) or family


def _family(model_type: str) -> str | None:
    """The row of FAMILIES for a model_type: itself, its text part, or a family it is built like."""
    base = model_type.removesuffix("_text")
    for name in (model_type, f"{model_type}_text", base, _SAME_AS.get(model_type), _SAME_AS.get(base)):
        if name in FAMILIES:
            return name
    return None


def _assemble(f: Fields, whole: Fields, family: str, body: Body, name: str, source: str) -> ModelSpec:
    tower, uncounted = vision_weights(whole, hidden_size(f))
    outer = [*body.outer, *tower]
    trained, context = _contexts(f)
    activation = _DTYPES.get(f.text("dtype", "torch_dtype"), "bf16")
    return ModelSpec(
        name=name,
        architecture=family,
        hidden_size=hidden_size(f),
        vocab_size=vocab_size(f),
        max_context=context,
        layers=tuple(body.layers),
        num_heads=body.num_heads,
        embedding_params=sum(w.params for w in outer if w.part == "embedding"),
        head_params=sum(w.params for w in outer if w.part == "head"),
        other_params=sum(w.params for w in outer if w.part not in ("embedding", "head")),
        dtype=_weight_scheme(whole, activation),
        trained_context=trained,
        draft_layers=body.draft_layers,
        source=source,
        notes=(*body.notes, uncounted) if uncounted else body.notes,
        activation_dtype=activation,
        outer_weights=tuple(outer),
    )


def _contexts(f: Fields) -> tuple[int | None, int]:
    """(context before rope scaling if the file says, context after it). YaRN stretches the former by its factor."""
    rope = f.section("rope_scaling") or f.section("rope_parameters")
    context, name = f.count(*_CONTEXT), "original_max_position_embeddings"
    if rope is None:
        return f.maybe_count(name), context
    trained = rope.maybe_count(name) or f.maybe_count(name)
    if trained and rope.text("rope_type", "type") == "yarn":
        context = max(context, int(trained * rope.number_or(1.0, "factor")))
    return trained, context


def _weight_scheme(whole: Fields, activation: str) -> str:
    """How the published weights are stored: the quantisation that the file announces, else their float type."""
    quant = whole.section("quantization_config")
    if quant is None:
        return activation
    return quantisation_scheme(quant) or activation


def quantisation_scheme(quant: Fields) -> str | None:
    """Name in spec/schemes.py of what `quantization_config` describes, None where it is not known there."""
    method, bits = quant.text("quant_method", "quant_algo").lower(), quant.count_or(0, "bits", "w_bit")
    if method in ("awq", "gptq"):
        return {4: method, 8: "int8"}.get(bits or 4)
    if method == "compressed-tensors":
        return _compressed_tensors(quant)
    if method == "fp8" and quant.has("weight_block_size"):
        return "fp8_block"
    if method == "bitsandbytes" and quant.flag("load_in_8bit"):
        return "int8"
    if method == "modelopt":
        method = quant.text("quant_algo").lower()
    plain = {"fbgemm_fp8": "fp8_channel", "bitsandbytes": "bnb4"}
    return plain.get(method) or (method if method in ("fp8", "mxfp4", "nvfp4") else None)


def _compressed_tensors(quant: Fields) -> str | None:
    """The scheme of the first group of weights that the file describes."""
    groups = quant.section("config_groups")
    group = groups.section("group_0") if groups else None
    weights = group.section("weights") if group else None
    if weights is None:
        return None
    bits, kind = weights.count_or(0, "num_bits"), weights.text("type", default="int")
    if kind == "float":
        wide = {"block": "fp8_block", "channel": "fp8_channel"}.get(weights.text("strategy"), "fp8")
        return {8: wide, 4: "mxfp4" if weights.count_or(16, "group_size") == 32 else "nvfp4"}.get(bits)
    return {8: "int8", 4: "int4_g32" if weights.count_or(128, "group_size") == 32 else "int4"}.get(bits)
