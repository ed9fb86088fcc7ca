"""A Hugging Face folder's JSON files → the metadata keys of a GGUF file, as convert_hf_to_gguf.py writes them.

Only for architectures whose tensors `hf_tensors` can rename. Unlike `spec.from_config`, which counts memory for any
model, this serves computing: rope, scales, routing, tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvledger.errors import ConfigError, UnsupportedModel
from kvledger.spec.config_fields import Fields, read_config

ARCHITECTURES = {  # model_type → general.architecture
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3": "gemma3", "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
MAX_TOKENIZER_BYTES = 128 << 20


def metadata_of(folder: Path, config: Mapping[str, Any]) -> dict[str, object]:
    """All keys of the model and its tokenizer. Raises UnsupportedModel, ConfigError."""
    whole = Fields(config, f"{folder.name}/config.json")
    f = whole.section("text_config") or whole
    kind = f.text("model_type") or whole.text("model_type")
    arch = ARCHITECTURES.get(kind)
    if arch is None:
        raise UnsupportedModel(f"safetensors of model_type {kind!r} are not read; read are {', '.join(ARCHITECTURES)}")
    if whole.has("quantization_config"):
        raise UnsupportedModel("safetensors that are quantised already are not read; take bf16 or a GGUF file")
    keys = _model(f, kind) | _experts(f, kind) | _rope(f, kind)
    tied = whole.flag("tie_word_embeddings", default=arch.startswith("gemma"))
    return {
        "general.architecture": arch,
        "general.name": folder.name,
        "kvledger.tied_embedding": tied,
        **{f"{arch}.{key}": value for key, value in keys.items() if value is not None},
        **_tokenizer(folder, f),
    }


def _model(f: Fields, kind: str) -> dict[str, object]:
    heads = f.count("num_attention_heads")
    head_dim = f.maybe_count("head_dim") or f.count("hidden_size") // heads
    keys: dict[str, object] = {
        "block_count": f.count("num_hidden_layers"),
        "context_length": f.count("max_position_embeddings"),
        "embedding_length": f.count("hidden_size"),
        "feed_forward_length": f.count("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": f.count_or(heads, "num_key_value_heads", low=1),
        "attention.layer_norm_rms_epsilon": f.number_or(1e-6, "rms_norm_eps"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "vocab_size": f.count("vocab_size"),
    }
    if kind.startswith("deepseek"):
        keys |= _latent(f)
    if kind in ("mistral", "mixtral", "gemma2", "gemma3", "gemma3_text"):
        keys["attention.sliding_window"] = f.maybe_count("sliding_window")
    return keys | (_gemma(f, head_dim) if kind.startswith("gemma") else {})


def _latent(f: Fields) -> dict[str, object]:
    latent, rope = f.count("kv_lora_rank"), f.count("qk_rope_head_dim")
    return {
        "attention.q_lora_rank": f.maybe_count("q_lora_rank"),
        "attention.kv_lora_rank": latent,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": f.count("qk_nope_head_dim") + rope,
        "attention.value_length_mla": f.count("v_head_dim"),
        "rope.dimension_count": rope,
        "leading_dense_block_count": f.count_or(0, "first_k_dense_replace"),
    }


def _gemma(f: Fields, head_dim: int) -> dict[str, object]:
    scalar = f.number_or(head_dim, "query_pre_attn_scalar")
    types = f.texts("layer_types")
    pattern = [kind == "sliding_attention" for kind in types] if types else None
    return {
        "attention.scale": scalar**-0.5 if scalar != head_dim else None,
        "attn_logit_softcapping": f.number_or(0, "attn_logit_softcapping") or None,
        "final_logit_softcapping": f.number_or(0, "final_logit_softcapping") or None,
        "attention.sliding_window_pattern": pattern or f.maybe_count("sliding_window_pattern"),
    }


def _experts(f: Fields, kind: str) -> dict[str, object]:
    count = f.maybe_count("num_local_experts", "num_experts", "n_routed_experts")
    if count is None:
        return {}
    inner = f.maybe_count("moe_intermediate_size")
    shared = f.maybe_count("n_shared_experts", low=0)
    return {
        "expert_count": count,
        "expert_used_count": f.count("num_experts_per_tok"),
        "expert_feed_forward_length": inner,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": f.maybe_count("shared_expert_intermediate_size"),
        "expert_weights_norm": True if kind == "mixtral" else f.flag("norm_topk_prob", default=kind == "deepseek_v3"),
        "expert_weights_scale": f.number_or(2.5 if kind == "deepseek_v3" else 1.0, "routed_scaling_factor"),
        "expert_gating_func": 2 if kind == "deepseek_v3" else 1,  # sigmoid, softmax
        "expert_group_count": f.maybe_count("n_group"),
        "expert_group_used_count": f.maybe_count("topk_group"),
    }


# ---------------------------------------------------------------------------------------------- rope


def _rope(f: Fields, kind: str) -> dict[str, object]:
    """Both ways of writing it: rope_theta with rope_scaling, and rope_parameters (transformers 5)."""
    parameters = f.section("rope_parameters")
    main = parameters.section("full_attention") if parameters else None
    local = parameters.section("sliding_attention") if parameters else None
    scaling = main or parameters or f.section("rope_scaling") or Fields({}, f.source)
    default = 1e6 if kind.startswith("gemma3") else 1e4
    keys: dict[str, object] = {"rope.freq_base": scaling.number_or(f.number_or(default, "rope_theta"), "rope_theta")}
    if kind.startswith("gemma3"):
        base = f.number_or(1e4, "rope_local_base_freq")
        keys["rope.freq_base_swa"] = local.number_or(base, "rope_theta") if local else base
    return keys | _rope_scaling(scaling)


def _rope_scaling(f: Fields) -> dict[str, object]:
    kind = f.text("rope_type", "type", default="default")
    if kind == "default":
        return {}
    factor = f.number_or(1.0, "factor")
    trained = f.maybe_count("original_max_position_embeddings")
    if kind == "llama3":
        bands = [f.number_or(1.0, "low_freq_factor"), f.number_or(4.0, "high_freq_factor")]
        return {"rope.scaling.llama3": [factor, *bands, trained or 8192]}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"rope scaling {kind!r} is not computed here; computed are linear, yarn and llama3")
    keys: dict[str, object] = {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = trained
        keys["rope.scaling.yarn_beta_fast"] = f.number_or(32, "beta_fast")
        keys["rope.scaling.yarn_beta_slow"] = f.number_or(1, "beta_slow")
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * f.number_or(0, "mscale_all_dim") or None
        keys["rope.scaling.attn_factor"] = f.number_or(0, "attention_factor") or None
    return keys


# ---------------------------------------------------------------------------------------------- tokenizer


def _tokenizer(folder: Path, f: Fields) -> dict[str, object]:
    """`tokenizer.huggingface.json` and what the files beside it add; nothing where there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ConfigError(f"{path.name} has {path.stat().st_size:,} bytes; {MAX_TOKENIZER_BYTES:,} are read")
    text = path.read_text(encoding="utf-8")
    settings = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    return {
        "tokenizer.huggingface.json": text,
        "tokenizer.ggml.bos_token_id": _token_id(text, settings.get("bos_token"), f.only("bos_token_id")),
        "tokenizer.ggml.eos_token_id": generation.get("eos_token_id")
        or _token_id(text, settings.get("eos_token"), f.only("eos_token_id")),
        **_templates(folder, settings),
    }


def _optional(path: Path) -> dict[str, Any]:
    return read_config(path) if path.is_file() else {}


def _token_id(tokenizer: str, named: Any, otherwise: Mapping[str, Any]) -> object:
    """The id of the token that tokenizer_config.json names, else the one that config.json gives."""
    name = named.get("content") if isinstance(named, dict) else named
    added = json.loads(tokenizer).get("added_tokens", [])
    found = (token["id"] for token in added if token.get("content") == name)
    return next(found, next(iter(otherwise.values()), None))


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, object]:
    """The chat template, from its own file or from tokenizer_config.json: one, or a list with names."""
    path = folder / "chat_template.jinja"
    given = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(given, str):
        return {"tokenizer.chat_template": given}
    rows = {row.get("name"): row.get("template") for row in given or [] if isinstance(row, dict)}
    named = {"tokenizer.chat_template": rows.get("default"), "tokenizer.chat_template.tool_use": rows.get("tool_use")}
    return {key: text for key, text in named.items() if isinstance(text, str)}
