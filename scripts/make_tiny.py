"""Writes tests/golden/tiny.json and tiny_logits.npz: a tiny random model per architecture and its float32 logits.

Run with a Python that has torch and transformers (they are no dependencies of the project), from the top folder:

    PYTHONPATH=src:tests python scripts/make_tiny.py

Weights are not stored: tests/golden_models.py makes them from the tensors' names.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from golden_models import GOLDEN, token_ids, write_folder
from kvledger.weights.open import open_weights
from reference_model import Reference

LEAST_LEAD = 0.05  # of a chosen expert's logit over the next
LEAST_LEAD_OF_SIGMOID = 0.004
BASE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
GEMMA = BASE | {
    "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 32, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
MLA = BASE | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 64, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama_linear": BASE | {"model_type": "llama", "tie_word_embeddings": True,
                            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 8},
    "qwen2": BASE | {"model_type": "qwen2"},
    "qwen3": BASE | {"model_type": "qwen3",
                     "rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")}},
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    "gemma3": GEMMA | {"model_type": "gemma3_text"},
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2moe": BASE | MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 160},
    "qwen3moe": BASE | MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "deepseek2": MLA | {"model_type": "deepseek_v2", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek2_yarn": MLA | {"model_type": "deepseek_v2", "q_lora_rank": 96, "n_group": 4, "topk_group": 2,
                             "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
                             "rope_parameters": YARN},
    "deepseek3": MLA | {"model_type": "deepseek_v3", "q_lora_rank": 96, "n_group": 4, "topk_group": 2,
                        "norm_topk_prob": True, "num_nextn_predict_layers": 0},
}  # fmt: skip


def describe(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json and the tensor names that transformers itself writes for such a model."""
    kind = config["model_type"]
    made = AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    return {"config": json.loads((folder / "config.json").read_text()), "shapes": shapes}


def seed_without_ties(name: str, row: dict[str, Any], folder: Path) -> str:
    """The first seed under which no expert is chosen by a hair, so that rounding does not change the choice."""
    for i in range(1000):
        seed = f"{name}/{i}"
        reference = Reference(open_weights(write_folder(folder, row | {"seed": seed})))
        reference.logits(token_ids(name, row["config"]["vocab_size"]))
        if reference.closest > (LEAST_LEAD_OF_SIGMOID if name == "deepseek3" else LEAST_LEAD):
            return seed
    raise AssertionError(f"{name}: no seed without near ties")


def run(folder: Path, ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy().astype(np.float32)


def main() -> None:
    described, arrays = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, config in MODELS.items():
            row = described[name] = describe(config, Path(temporary) / name / "shapes")
            row["seed"] = seed_without_ties(name, row, Path(temporary) / name / "seeds")
            folder = write_folder(Path(temporary) / name / "model", row)
            arrays[name] = run(folder, token_ids(name, config["vocab_size"]))
    (GOLDEN / "tiny.json").write_text(json.dumps(described, indent=None, separators=(",", ":")) + "\n")
    np.savez_compressed(GOLDEN / "tiny_logits.npz", **arrays)
    for name, values in arrays.items():
        print(f"{name:20} logits {values.std():.3f} ± , largest {np.abs(values).max():.2f}")


if __name__ == "__main__":
    main()
