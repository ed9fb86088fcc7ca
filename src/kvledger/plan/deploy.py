"""The command line that realises a plan: one function per engine, flags as of the versions named here. Text only."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from kvledger.errors import UnknownName
from kvledger.plan.outcome import Outcome, engine_config, is_local

VERSIONS = {"vllm": "0.32", "sglang": "0.5", "llama.cpp": "b6000", "kvledger": "0.1"}
_VLLM_KV = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "fp8_e4m3": "fp8_e4m3",
            "fp8_e5m2": "fp8_e5m2", "nvfp4": "nvfp4", "int8": "int8_per_token_head",
            "int8_per_token_head": "int8_per_token_head", "int4_per_token_head": "int4_per_token_head"}  # fmt: skip
_SGLANG_KV = {"auto": "auto", "bf16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2",
              "nvfp4": "fp4_e2m1"}  # fmt: skip
_LLAMA_KV = {"auto": "f16", "bf16": "bf16", "fp16": "f16", "fp32": "f32", "int8": "q8_0", "fp8": "q8_0", "int4": "q4_0"}
_VLLM_WEIGHTS = {"fp8": "fp8", "awq": "awq", "gptq": "gptq", "bnb4": "bitsandbytes", "mxfp4": "mxfp4"}
Pair = tuple[str, object]


def command(outcome: Outcome, model_path: str = "", engine: str | None = None) -> str:
    """The shell command that starts `engine` (None: the plan's own) as planned. Raises UnknownName."""
    name = engine or outcome.query.engine
    if name not in _COMMANDS:
        raise UnknownName("engine to deploy", name, _COMMANDS)
    start, pairs = _COMMANDS[name](outcome, model_path or outcome.query.model.name)
    flags = [f"{flag} {shlex.quote(str(value))}" if value != "" else flag for flag, value in pairs if value is not None]
    return " \\\n  ".join([start, *flags])


def _vllm(outcome: Outcome, model: str) -> tuple[str, list[Pair]]:
    query = outcome.query
    changed = query.weights if query.weights and query.weights != query.model.dtype else None
    return f"vllm serve {shlex.quote(model)}", [
        ("--tensor-parallel-size", 1 if query.dp_attention else query.tp),
        ("--pipeline-parallel-size", query.pp if query.pp > 1 else None),
        ("--data-parallel-size", query.dp * query.ranks if query.dp * query.ranks > 1 else None),
        ("--enable-expert-parallel" if query.dp_attention else "", "" if query.dp_attention else None),
        ("--max-model-len", query.context),
        ("--gpu-memory-utilization", _fraction(outcome)),
        ("--kv-cache-dtype", _named(_VLLM_KV, query.kv_dtype)),
        ("--quantization", _VLLM_WEIGHTS.get(changed) if changed else None),
        ("--block-size", query.block_size),
        ("--max-num-seqs", _batch(outcome)),
        ("--max-num-batched-tokens", query.max_num_batched_tokens),
        ("--enable-prefix-caching" if query.prefix else "", "" if query.prefix else None),
    ]


def _sglang(outcome: Outcome, model: str) -> tuple[str, list[Pair]]:
    query = outcome.query
    return f"python -m sglang.launch_server --model-path {shlex.quote(model)}", [
        ("--tp-size", query.tp),
        ("--pp-size", query.pp if query.pp > 1 else None),
        ("--dp-size", query.dp * query.ranks if query.dp * query.ranks > 1 else None),
        ("--enable-dp-attention" if query.dp_attention else "", "" if query.dp_attention else None),
        ("--context-length", query.context),
        ("--mem-fraction-static", _fraction(outcome)),
        ("--kv-cache-dtype", _named(_SGLANG_KV, query.kv_dtype)),
        ("--quantization", query.weights if query.weights in ("fp8", "awq", "gptq") else None),
        ("--page-size", query.block_size),
        ("--max-running-requests", _batch(outcome)),
        ("--chunked-prefill-size", query.max_num_batched_tokens),
    ]


def _llama_cpp(outcome: Outcome, model: str) -> tuple[str, list[Pair]]:
    query, slots = outcome.query, _batch(outcome)
    key, _, value = query.kv_dtype.partition("/")
    local = model.endswith(".gguf")
    return "llama-server", [
        ("--model" if local else "--hf-repo", model),
        ("--ctx-size", query.context * slots),
        ("--parallel", slots),
        ("--n-gpu-layers", 0 if query.device.kind == "cpu" else 999),
        ("--cache-type-k", _LLAMA_KV.get(key, key)),
        ("--cache-type-v", _LLAMA_KV.get(value or key, value or key)),
        ("--flash-attn", "on"),
        ("--split-mode", "row" if query.tp > 1 else "layer" if query.pp > 1 else None),
    ]


def _kvledger(outcome: Outcome, model: str) -> tuple[str, list[Pair]]:
    query, config = outcome.query, engine_config(outcome.query)
    memory = query.kv_memory_bytes
    if memory is None and not is_local(query):
        memory = outcome.memory.pool_bytes
    return f"kvledger serve {shlex.quote(model)}", [
        ("--max-model-len", query.context),
        ("--kv-memory", f"{memory // (1 << 20)}MiB" if memory else None),
        ("--kv-dtype", config.cache.kv_dtype),
        ("--block-size", config.cache.tokens_per_block),
        ("--max-num-seqs", config.sched.max_num_seqs),
        ("--max-num-batched-tokens", config.sched.max_num_batched_tokens),
    ]


_COMMANDS: dict[str, Callable[[Outcome, str], tuple[str, list[Pair]]]] = {
    "vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp, "kvledger": _kvledger,
}  # fmt: skip
ENGINES = tuple(_COMMANDS)


def _fraction(outcome: Outcome) -> float | None:
    if outcome.query.memory_fraction is not None:
        return outcome.query.memory_fraction
    memory = outcome.memory
    return round(memory.budget_bytes / memory.total_bytes, 3) if memory.total_bytes else None


def _batch(outcome: Outcome) -> int:
    """Requests that may run together: as many as the plan counts on."""
    return outcome.query.max_num_seqs or outcome.speed.batch


def _named(names: dict[str, str], kv_dtype: str) -> str:
    if kv_dtype not in names:
        raise UnknownName("KV type of this engine", kv_dtype, names)
    return names[kv_dtype]
