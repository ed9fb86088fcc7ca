"""Answers of vLLM's own KV allocator, for the settings in a JSON-lines file: no weights, no GPU.

Each model is built by vLLM's model code on PyTorch's meta device, with parallel groups that only know their size, so
layers, heads, windows and states are what vLLM makes of the configuration; then `get_kv_cache_configs` is asked. Rows
keep their settings (model, tp, kv_cache_dtype, block_size, available_kv_bytes, max_model_len,
max_num_batched_tokens) and get `groups`, `num_blocks`, `kv_tokens` and `max_concurrency`. Wants vLLM 0.32 (the CPU
wheel will do) beside kvledger: `python scripts/make_vllm_rows.py tests/data/vllm_kv_blocks_more.jsonl`.

Not vLLM's own: where TP does not divide a model, heads are divided rounding down, at least one; the platform's answer
to how a block grows over a state is restated here, because the CPU answers otherwise than CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
try:
    import torch
    import vllm.distributed.parallel_state as parallel
    import vllm.v1.core.kv_cache_utils as allocator
    import vllm.v1.kv_cache_interface as kv
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError as error:
    raise SystemExit(f"vLLM is needed to ask its allocator: {error}") from None

from kvledger.data.catalogue import find

OTHER_CLASSES = {"kimi_k2": "DeepseekV3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}
TYPES = {"bf16": torch.bfloat16, "fp8": torch.uint8}
DROPPED = ("rope_scaling", "rope_parameters", "quantization_config", "vision_config", "text_config", "audio_config")


def text_config(model: str) -> dict[str, Any]:
    """The catalogue's configuration of the language part, with the class that vLLM knows it by."""
    whole = find(model).row.config
    config = {k: v for k, v in {**whole, **whole.get("text_config", {})}.items() if k not in DROPPED}
    kind = config["model_type"]
    names = OTHER_CLASSES.get(kind) or CAUSAL[kind]
    if kind == "mistral":
        config.setdefault("sliding_window", None)  # transformers' default is the first Mistral's
    return {**config, "architectures": [names if isinstance(names, str) else names[0]], "torch_dtype": "bfloat16"}


def set_groups(tp: int) -> None:
    """Parallel groups without processes: rank 0 of `tp`, alone in every other dimension."""
    for name in ("_WORLD", "_PP", "_DP", "_DCP", "_PCP", "_EP", "_ETP", "_EPLB", "_INNER_DP_WORLD", "_TP"):
        size = tp if name == "_TP" else 1
        group = MagicMock(world_size=size, rank_in_group=0, rank=0, is_first_rank=True, is_last_rank=True)
        setattr(parallel, name, group)


def keep_state_types() -> None:
    """The CPU would force float32 states; CUDA keeps what the model's configuration asks for."""
    update = CpuPlatform.check_and_update_config.__func__

    def kept(cls: type, config: Any) -> None:
        before = config.cache_config.mamba_ssm_cache_dtype
        update(cls, config)
        config.cache_config.mamba_ssm_cache_dtype = before

    CpuPlatform.check_and_update_config = classmethod(kept)


@cache
def built(model: str, tp: int) -> dict[str, Any]:
    """Layer name → spec, of vLLM's own model code; layers that share another's cache are left out."""
    set_groups(tp)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(text_config(model)))
        args = EngineArgs(model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True)
        config = args.create_engine_config()
        config.parallel_config.tensor_parallel_size = tp
        torch.set_default_dtype(torch.bfloat16)
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config)
    torch.set_default_dtype(torch.float32)
    layers = config.compilation_config.static_forward_context
    own = {n: x for n, x in layers.items() if not getattr(x, "kv_sharing_target_layer_name", None)}
    return {n: x.get_kv_cache_spec(config) for n, x in own.items() if isinstance(x, AttentionLayerBase)}


def layers_of(model: str, tp: int) -> dict[str, Any]:
    """`built`, or heads divided by hand where vLLM refuses that TP."""
    try:
        return built(model, tp)
    except (AssertionError, NotImplementedError, ZeroDivisionError):
        whole = built(model, 1)
        if any(isinstance(s, kv.MambaSpec) for s in whole.values()):
            raise
        return {n: kv.replace(s, num_kv_heads=max(1, s.num_kv_heads // tp)) for n, s in whole.items()}


def state_pages(specs: dict[str, Any], dtype: torch.dtype, block_size: int) -> tuple[int, int | None]:
    """(tokens per block, padded bytes of a state): an attention page covers a state, as on CUDA."""
    states = [s.page_size_bytes for s in specs.values() if isinstance(s, kv.MambaSpec)]
    attention = [s for s in specs.values() if not isinstance(s, kv.MambaSpec)]
    if not states or not attention:
        return block_size, None
    token = kv.replace(attention[0], block_size=1, dtype=dtype).page_size_bytes
    step = max(128, block_size) if isinstance(attention[0], kv.MLAAttentionSpec) else block_size
    size = max(block_size, step * -(-max(states) // (step * token)))
    return size, size * token


def ask(row: dict[str, Any]) -> dict[str, Any]:
    """The row with vLLM's answers."""
    dtype, mode = TYPES[row["kv_cache_dtype"]], kv.get_kv_quant_mode(row["kv_cache_dtype"])
    specs = layers_of(row["model"], row["tp"])
    size, padded = state_pages(specs, dtype, row["block_size"])
    asked = {
        name: kv.replace(s, block_size=size, page_size_padded=padded, mamba_cache_mode="align")
        if isinstance(s, kv.MambaSpec)
        else kv.replace(s, block_size=size, dtype=dtype, kv_quant_mode=mode)
        for name, s in specs.items()
    }
    config = settings(row)
    answer = allocator.get_kv_cache_configs(config, [asked], [row["available_kv_bytes"]])[0]
    tokens, concurrency = allocator.get_kv_cache_capacity(config, answer)
    groups = [[type(g.kv_cache_spec).__name__, len(g.layer_names)] for g in answer.kv_cache_groups]
    return {**row, "groups": groups, "num_blocks": answer.num_blocks, "kv_tokens": tokens,
            "max_concurrency": round(concurrency, 4)}  # fmt: skip


def settings(row: dict[str, Any]) -> Any:
    """As much of a VllmConfig as the allocator reads. One batch is in flight; layers lie side by side."""
    length, budget, space = row["max_model_len"], row["max_num_batched_tokens"], SimpleNamespace
    return space(
        model_config=space(max_model_len=length, original_max_model_len=length),
        scheduler_config=space(max_num_batched_tokens=budget, disable_hybrid_kv_cache_manager=False),
        max_in_flight_tokens=budget, num_prefill_lookahead_tokens=0, num_speculative_tokens=0,
        speculative_config=None, attention_config=space(hisparse_config=None),
        parallel_config=space(decode_context_parallel_size=1, tensor_parallel_size=row["tp"]),
        cache_config=space(num_gpu_blocks_override=None, mamba_cache_mode="align", enable_prefix_caching=True,
                           prefix_cache_retention_interval=None,
                           get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC),
    )  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1])
    keep_state_types()
    answers = [ask(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in answers))


if __name__ == "__main__":
    main()
