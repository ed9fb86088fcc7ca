"""Counts the parameters of every catalogue row with transformers' own classes, on the meta device.

    python scripts/make_param_counts.py tests/data/param_counts.json

Needs torch and transformers, which kvledger itself does not; the result is committed so that tests need neither.
Counted are parameters, and the two buffers that published files store as weights (the load-balancing bias of routed
experts, Gemma 4's layer scalar). Vision towers count where kvledger counts them.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from kvledger.data import catalogue
from kvledger.spec.families.vision import TOWERS

STORED_BUFFERS = ("correction_bias", "layer_scalar")
# Re-issues that transformers has under another name.
SAME = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax", "mimo": "qwen2", "qwen": None}


def config_of(row: catalogue.ModelRow) -> transformers.PretrainedConfig | None:
    """transformers' configuration of a row; None where it has no class for it."""
    config = modern(row.config)
    name = SAME.get(config["model_type"], config["model_type"])
    text = config.get("text_config")
    if text is not None:
        inner = modern(text)
        inner["model_type"] = SAME.get(inner["model_type"], inner["model_type"])
        config["text_config"] = inner
        if "tie_word_embeddings" in inner:
            config.setdefault("tie_word_embeddings", inner["tie_word_embeddings"])
        if name not in TOWERS:
            return config_class(inner["model_type"], inner)
    return config_class(name, config)


def modern(config: dict) -> dict:
    """The fields that decide counts, in the spelling that today's classes read."""
    config = {k: v for k, v in config.items() if k not in ("quantization_config", "rope_scaling")}
    if "attn_type_list" in config:
        config["layer_types"] = ["full_attention" if x else "linear_attention" for x in config["attn_type_list"]]
    if config.get("model_type") == "gpt_neo":
        config["attention_types"] = [[["global", "local"], config["num_layers"] // 2]]
    if isinstance(config.get("sliding_window_pattern"), str):
        config["sliding_window_pattern"] = len(config["sliding_window_pattern"])
    return config


def config_class(name: str | None, config: dict) -> transformers.PretrainedConfig | None:
    if name not in CONFIG_MAPPING:
        return None
    return CONFIG_MAPPING[name].from_dict({**config, "model_type": name})


def count(config: transformers.PretrainedConfig) -> int:
    """Parameters of the model of `config`, each tensor once."""
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(config)
    tensors = {id(p): p.numel() for p in model.parameters()}
    tensors |= {id(b): b.numel() for n, b in model.named_buffers() if any(word in n for word in STORED_BUFFERS)}
    return sum(tensors.values())


def main(target: str) -> None:
    transformers.logging.set_verbosity_error()
    counts, skipped = {}, {}
    for row in catalogue.rows():
        try:
            config = config_of(row)
            if config is None:
                skipped[row.id] = "no class"
            else:
                counts[row.id] = count(config)
        except Exception as error:
            skipped[row.id] = f"{type(error).__name__}: {error}"[:120]
    body = {"transformers": transformers.__version__, "counts": counts, "skipped": skipped}
    Path(target).write_text(json.dumps(body, indent=1) + "\n")
    print(f"{len(counts)} counted, {len(skipped)} skipped", *skipped.items(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
