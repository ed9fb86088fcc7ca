"""The lines that vLLM, SGLang, llama.cpp and TensorRT-LLM print at start, as tables of (pattern, fact it sets).

Every quantifier is bounded, so a hostile line costs no more than its length. Knows no files and no rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
Setter = Callable[[Facts, re.Match[str]], None]
Pattern = tuple[re.Pattern[str], Setter]


def number(text: str) -> float:
    """`1,234.5` → 1234.5."""
    return float(text.replace(",", ""))


def _set(*names: str, kind: Callable[[str], Any] = str) -> Setter:
    """Group i of the match is fact i; the last line that matches wins."""

    def setter(facts: Facts, match: re.Match[str]) -> None:
        for name, text in zip(names, match.groups(), strict=False):
            if text is not None:
                facts[name] = kind(text)

    return setter


def _first(*names: str, kind: Callable[[str], Any] = str) -> Setter:
    """The same where the first line that matches counts (rank 0 prints first)."""

    def setter(facts: Facts, match: re.Match[str]) -> None:
        for name, text in zip(names, match.groups(), strict=False):
            if text is not None:
                facts.setdefault(name, kind(text))

    return setter


def _least(name: str) -> Setter:
    """All ranks print; the first and the least are kept."""

    def setter(facts: Facts, match: re.Match[str]) -> None:
        value = number(match[1])
        facts.setdefault(name, value)
        facts[f"{name}_least"] = min(value, facts.get(f"{name}_least", value))

    return setter


def whole(text: str) -> int:
    """`1,234` → 1234."""
    return int(number(text))


def _compile(*rows: tuple[str, Setter]) -> tuple[Pattern, ...]:
    return tuple((re.compile(text), setter) for text, setter in rows)


_N = r"(\d[\d,]{0,19})"
_F = r"(-?\d[\d,]{0,11}(?:\.\d{1,6})?)"
_NAME = r"['\"]?([\w./:+-]{1,200})['\"]?"

_VLLM = _compile(
    (r"(?i)vllm(?: api server)? version (\d[\w.+]{0,30})", _first("version")),
    (r"LLM engine \(v(\d[\w.+]{0,30})\)", _first("version")),
    (r"(?:[,{ ('\"]|^)model(?:_tag)?['\"]?[=:]\s?" + _NAME, _first("model")),
    (r"tensor_parallel_size['\"]?[=:]\s?" + _N, _set("tp", kind=whole)),
    (r"pipeline_parallel_size['\"]?[=:]\s?" + _N, _set("pp", kind=whole)),
    (r"decode_context_parallel_size['\"]?[=:]\s?" + _N, _set("dcp", kind=whole)),
    (r"kv_cache_dtype['\"]?[=:]\s?['\"]?(\w{2,30})", _set("kv_dtype")),
    (r"(?:max_seq_len|max_model_len)['\"]?[=:]\s?" + _N, _set("max_model_len", kind=whole)),
    (r"max_num_batched_tokens['\"]?[=:]\s?" + _N, _set("max_num_batched_tokens", kind=whole)),
    (r"max_num_seqs['\"]?[=:]\s?" + _N, _set("max_num_seqs", kind=whole)),
    (r"gpu_memory_utilization['\"]?[=:]?\s?\(?(0?\.\d{1,6}|1\.0)", _set("memory_fraction", kind=number)),
    (r"Desired GPU memory utilization is \((0?\.\d{1,6}|1\.0)", _set("memory_fraction", kind=number)),
    (r"(?:Starting to load|Loading) model " + _NAME, _first("model")),
    (r"(?:[,{ ('\"]|^)block_size['\"]?[=:]\s?" + _N, _set("block_size", kind=whole)),
    (r"attention block size to " + _N + " tokens", _set("block_size", kind=whole)),
    (r"enable_prefix_caching['\"]?[=:]\s?(True|False)", _set("prefix_caching", kind=lambda t: t == "True")),
    (r"(?<!\w)dtype['\"]?[=:]\s?(torch\.\w{3,12})", _set("model_dtype")),
    (r"num_speculative_tokens['\"]?[=:]\s?" + _N, _set("draft_tokens", kind=whole)),
    (r"(?i)(?:method|speculative_config)['\"]?[=:]\s?.{0,80}?(mtp|eagle3?)\b", _set("speculative")),
    (r"Model loading took " + _F + r" ?Gi?B", _first("weights_gib", kind=number)),
    (r"model weights take " + _F + " ?GiB", _first("weights_gib", kind=number)),
    (_F + r" GiB for weight", _first("weights_gib", kind=number)),
    (r"(?:activation peak memory takes) " + _F + " ?GiB", _first("activation_gib", kind=number)),
    (_F + r" GiB for peak activation", _first("activation_gib", kind=number)),
    (r"non_torch_memory takes " + _F + " ?GiB", _first("non_torch_gib", kind=number)),
    (_F + r" GiB for non-torch", _first("non_torch_gib", kind=number)),
    (r"[Gg]raph capturing finished in .{1,20}?took " + _F + " ?GiB", _first("cuda_graph_gib", kind=number)),
    (r"total_gpu_memory \(" + _F + r"GiB\)", _first("total_gib", kind=number)),
    (r"Free memory on device \([\d.]{1,9}/" + _F + r" GiB\)", _first("total_gib", kind=number)),
    (r"Available KV cache memory: " + _F + " GiB", _least("available_gib")),
    (r"reserved for KV Cache is " + _F + " ?GiB", _least("available_gib")),
    (r"available KV cache memory \(" + _F + " GiB\\)", _least("available_gib")),
    (r"KV cache size: " + _N + " tokens", _set("kv_tokens", kind=whole)),
    (r"# (?:GPU|cuda|CUDA) blocks: " + _N, _set("num_blocks", kind=whole)),
    (r"# CPU blocks: " + _N, _set("cpu_blocks", kind=whole)),
    (r"num_gpu_blocks['\"]?(?:[=:]| is:?)\s?" + _N, _set("num_blocks", kind=whole)),
    (r"Maximum concurrency for " + _N + r" tokens per request: [\d.,]{1,20}x", _set("max_model_len", kind=whole)),
    (r"Maximum concurrency for [\d,]{1,20} tokens per request: " + _F + "x", _set("max_concurrency", kind=number)),
    (r"Add " + _N + " padding layers", _set("padding_layers", kind=whole)),
    (r"Padding mamba page size by " + _F + "%", _set("state_padding_percent", kind=number)),
)  # fmt: skip
_SGLANG = _compile(
    (r"(?i)sglang (?:version )?v?(\d+\.\d[\w.]{0,20})", _first("version")),
    (r"model_path=" + _NAME, _first("model")),
    (r"(?<![a-z_])tp_size=" + _N, _set("tp", kind=whole)),
    (r"(?<![a-z_])pp_size=" + _N, _set("pp", kind=whole)),
    (r"mem_fraction_static=(0?\.\d{1,6})", _set("memory_fraction", kind=number)),
    (r"kv_cache_dtype='?(\w{2,30})", _set("kv_dtype")),
    (r"(?<!\w)context_len(?:gth)?=" + _N, _set("max_model_len", kind=whole)),
    (r"(?<!\w)page_size=" + _N, _set("block_size", kind=whole)),
    (r"Load weight end.{0,120}?mem usage=" + _F + " ?GB", _first("weights_gib", kind=number)),
    (r"max_total_num_tokens=" + _N, _set("max_total_tokens", kind=whole)),
    (r"full_layer_tokens=" + _N + r", swa_layer_tokens=" + _N, _set("full_tokens", "window_tokens", kind=whole)),
    (r"max_mamba_cache_size: " + _N, _set("state_slots", kind=whole)),
    (r"conv_state size: " + _F + " ?GB", _set("conv_gib", kind=number)),
    (r"ssm_state size: " + _F + " ?GB", _set("ssm_gib", kind=number)),
    (r"speculative_algorithm='(EAGLE3?|NEXTN|STANDALONE)", _set("speculative")),
)  # fmt: skip
_TRT = _compile(
    (r"TensorRT-LLM (?:version:?|LLM API version) ?v?(\d+\.\d[\w.]{0,20})", _first("version")),
    (r"\[TensorRT-LLM\] TensorRT-LLM version: (\d+\.\d[\w.]{0,20})", _first("version")),
    (r"(?:model|model_dir|hf_model_dir)['\"]?[=:]\s?" + _NAME, _first("model")),
    (r"tensor_parallel_size['\"]?[=:]\s?" + _N, _set("tp", kind=whole)),
    (r"Number of tokens per block: " + _N, _set("block_size", kind=whole)),
    (r"KV cache primary pool: " + _N, _set("num_blocks", kind=whole)),
    (r"Allocated " + _F + r" GiB for max tokens in paged KV cache \(" + _N + r"\)",
     _set("available_gib", "kv_tokens", kind=number)),
    (r"paged kv cache: total: " + _F + " GiB, available: " + _F, _set("total_gib", "free_gib", kind=number)),
    (r"(?<!\w)max_seq_len=" + _N, _set("max_model_len", kind=whole)),
    (r"free_gpu_memory_fraction['\"]?[=:]\s?(0?\.\d{1,6}|1\.0)", _set("memory_fraction", kind=number)),
)  # fmt: skip
_LLAMA = _compile(
    (r"^build:? (\d{3,6}) ", _first("version")),
    (r"general\.name\s{1,30}(?:str\s{1,10}= |= )(.{1,120})$", _first("model")),
    (r"general\.architecture\s{1,30}(?:str\s{1,10}= |= )([\w-]{1,40})", _first("arch")),
    (r"print_info: arch\s{1,30}= ([\w-]{1,40})", _first("arch")),
    (r"(?:print_info|llm_load_print_meta): n_layer\s{1,30}= " + _N, _first("n_layer", kind=whole)),
    (r"(?:print_info|llm_load_print_meta): n_head_kv\s{1,30}= (\d{1,4})\s*$", _first("n_head_kv", kind=whole)),
    (r"n_embd_head_k\s{1,30}= " + _N, _first("key_dim", kind=whole)),
    (r"n_embd_head_v\s{1,30}= " + _N, _first("value_dim", kind=whole)),
    (r"(?:print_info|llm_load_print_meta): n_swa\s{1,30}= " + _N, _first("window", kind=whole)),
    (r"(?:llama_context|llama_new_context_with_model): n_ctx\s{1,30}= " + _N, _first("n_ctx", kind=whole)),
    (r"n_seq_max\s{1,30}= " + _N, _first("num_seqs", kind=whole)),
    (r"n_ubatch\s{1,30}= " + _N, _first("ubatch", kind=whole)),
    (r"file size\s{1,30}= " + _F + " GiB", _first("weights_gib", kind=number)),
    (r"llama_memory_recurrent: size =\s{1,10}" + _F + " MiB", _set("state_mib", kind=number)),
)  # fmt: skip
SGLANG_POOL = re.compile(
    r"KV Cache is allocated\.(?: dtype: [\w.]{1,30},)? #tokens: " + _N
    + r"(?:, K size: " + _F + " GB, V size: " + _F + " GB|, KV size: " + _F + " GB)"
)  # fmt: skip
LLAMA_CACHE = re.compile(
    r"llama_kv_cache\w{0,20}: size =\s{1,10}" + _F + r" MiB \(\s{0,10}" + _N + r" cells,\s{1,10}" + _N
    + r" layers,\s{1,10}(\d{1,6})(?:/\s{0,5}(\d{1,6}))? seqs\), K \((\w{1,20})\):\s{1,10}" + _F
    + r" MiB, V \((\w{1,20})\):\s{1,10}" + _F + " MiB"
)  # fmt: skip
LLAMA_OLD = re.compile(
    r"KV self size\s{1,5}=\s{1,10}" + _F + r" MiB, K \((\w{1,20})\):\s{1,10}" + _F
    + r" MiB, V \((\w{1,20})\):\s{1,10}" + _F
)  # fmt: skip

# A line without any of these is looked at no further.
WORDS = {
    "vllm": ("vllm", "vLLM", "LLM engine", "args", "model", "Model", "GiB", "GB", "blocks", "KV cache", "concurrency",
             "padding layers", "mamba page", "block size", "max_num", "max_seq_len", "max_model_len"),
    "sglang": ("sglang", "SGLang", "ServerArgs", "server_args", "Load weight", "KV Cache is allocated", "layer_tokens",
               "max_total_num_tokens", "amba", "ssm_state"),
    "tensorrt-llm": ("TensorRT-LLM", "TRT-LLM", "KV cache", "kv cache", "tokens per block", "max_seq_len", "model"),
    "llama.cpp": ("build", "general.", "print_info", "llm_load", "llama_", "n_ctx", "n_seq_max", "n_ubatch", "KV self"),
}  # fmt: skip
TABLES = {"vllm": _VLLM, "sglang": _SGLANG, "tensorrt-llm": _TRT, "llama.cpp": _LLAMA}
SIGNS = {
    "vllm": re.compile(r"vllm|vLLM|GPU KV cache size|# (?:GPU|cuda) blocks|Available KV cache memory"),
    "sglang": re.compile(r"sglang|SGLang|KV Cache is allocated|max_total_num_tokens|mem_fraction_static"),
    "tensorrt-llm": re.compile(r"TensorRT-LLM|TRT-LLM|paged KV cache"),
    "llama.cpp": re.compile(r"llama_kv_cache|llama_context|print_info:|llm_load_print_meta|llama_model_loader|KV self"),
}
