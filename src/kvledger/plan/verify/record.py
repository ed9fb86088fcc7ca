"""What an engine said of its memory: one flat record, from a row of a case file or from a start-up log.

Figures keep the precision they were printed with. Knows no rules of engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvledger.errors import ConfigError
from kvledger.plan.profiles.base import parse_version
from kvledger.units import GIB

_ENGINES = (("vllm", "vllm"), ("sglang", "sglang"), ("llama", "llama.cpp"), ("ollama", "llama.cpp"),
            ("tensorrt", "tensorrt-llm"), ("trt", "tensorrt-llm"), ("kvledger", "kvledger"))  # fmt: skip
_BATCHED = re.compile(r"max_num_batched_tokens\s*=?\s*(\d{1,9})")
_MTP = re.compile(r"\bMTP\s*(off|on|=?\s*\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Record:
    """Figures of one start. None: not said. GiB and MiB are kept as printed (two decimals)."""

    engine: str
    model: str = ""
    engine_version: str | None = None
    gpu: str | None = None
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    memory_fraction: float | None = None
    weights_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    cuda_graph_gib: float | None = None
    available_bytes: int | None = None  # exact, where a case file gives bytes
    available_gib: float | None = None
    kv_tokens: int | None = None
    num_blocks: int | None = None
    max_concurrency: float | None = None
    cpu_blocks: int | None = None
    kv_mib: float | None = None
    key_mib: float | None = None
    value_mib: float | None = None
    state_slots: int | None = None  # SGLang's pool of states
    state_gib: float | None = None
    draft_layers: int = 0
    draft_tokens: int = 0
    prefix_caching: bool = True
    hybrid: bool = True
    concurrent_batches: int = 1
    part: str = ""  # full or window: figures of these layers alone
    formula: str = ""  # the plain formula that a case row carries
    groups: tuple[tuple[str, int], ...] = ()
    explanation: str = ""
    label: str = ""
    is_exact: bool = False  # an allocator was asked: figures must be equal
    is_fork: bool = False

    @property
    def kv_bytes(self) -> int | None:
        """Memory available to KV per device, in bytes."""
        if self.available_bytes is not None:
            return self.available_bytes
        return None if self.available_gib is None else int(self.available_gib * GIB)

    @property
    def version(self) -> str | None:
        """The version, where it can be read."""
        try:
            return self.engine_version if self.engine_version and parse_version(self.engine_version) else None
        except ConfigError:
            return None


def engine_of(name: str) -> tuple[str, bool]:
    """(profile name, whether it is a fork or a relative) of an engine as people write it.

    An engine without a profile here is taken to allocate token by token, as SGLang does.
    """
    folded = name.strip().lower()
    for start, profile in _ENGINES:
        if start in folded:
            plain = folded.split(" ")[0] in ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "trt-llm", "kvledger")
            return profile, not (plain and ("(" not in folded and "fork" not in folded and "+" not in folded))
    return "sglang", True


def from_row(row: Mapping[str, Any]) -> Record:
    """A row of `vllm_kv_blocks.jsonl` or `engine_logs.jsonl`. Raises ConfigError for an engine or a field not meant."""
    name = str(row.get("engine", ""))
    words, _, version = name.partition(" ")
    exact = "available_kv_bytes" in row
    engine, fork = engine_of(words if exact else name)
    model, text = str(row.get("model", "")), f"{row.get('notes') or ''} {row.get('formula') or ''}"
    batched = _BATCHED.search(text)
    draft = draft_layers(model, text)
    return Record(
        engine=engine,
        model=model,
        engine_version=version if exact else _text(row.get("engine_version")),
        gpu=_text(row.get("gpu")),
        tp=_count(row, "tp") or 1,
        pp=_count(row, "pp") or 1,
        dcp=_count(row, "dcp") or 1,
        kv_dtype=kv_dtype_of(_text(row.get("kv_cache_dtype")), _text(row.get("model_dtype"))),
        block_size=_count(row, "block_size"),
        max_model_len=_count(row, "max_model_len"),
        max_num_batched_tokens=_count(row, "max_num_batched_tokens") or (int(batched[1]) if batched else None),
        memory_fraction=_number(row, "gpu_memory_utilization"),
        weights_gib=_number(row, "weights_gib"),
        activation_gib=_number(row, "activation_gib"),
        non_torch_gib=_number(row, "non_torch_gib"),
        cuda_graph_gib=_number(row, "cuda_graph_actual_gib"),
        available_bytes=_count(row, "available_kv_bytes"),
        available_gib=_number(row, "available_kv_gib"),
        kv_tokens=_count(row, "kv_tokens"),
        num_blocks=_count(row, "num_blocks"),
        max_concurrency=_number(row, "max_concurrency"),
        cpu_blocks=_count(row, "cpu_blocks"),
        kv_mib=_number(row, "kv_size_mib_total"),
        key_mib=_number(row, "kv_size_mib_k"),
        value_mib=_number(row, "kv_size_mib_v"),
        state_slots=_count(row, "mamba_slots"),
        state_gib=_sum(row, "ssm_state_gb", "conv_state_gb"),
        draft_layers=draft,
        prefix_caching="prefix caching off" not in text,
        part="window" if "(SWA part" in model else "full" if "(full part" in model else "",
        formula=_text(row.get("formula")) or "",
        groups=_groups(row),
        explanation=_text(row.get("explanation")) or "",
        label=str(row.get("id", "")),
        is_exact=exact,
        is_fork=fork,
    )


def draft_layers(model: str, text: str) -> int:
    """Draft layers with KV of their own: EAGLE heads and MTP layers, unless the text says they are off."""
    if "eagle" in model.lower():
        return 1
    found = _MTP.search(f"{model} {text}")
    shares = "gemma" in model.lower()  # Gemma 4's MTP layers read the target's KV
    return 1 if found and (found[1] or "").lower() != "off" and not shares else 0


def kv_dtype_of(name: str | None, model_dtype: str | None = None) -> str:
    """A KV type as `KVStorage.of` takes it, from log words: `auto (bf16)`, `fp8 (fp8_ds_mla)`, `K q8_0, V f16`."""
    if not name or name.lower().startswith("auto"):
        inner = re.search(r"\(([a-z0-9_]+)\)", name or "")
        if inner:
            return inner[1]
        return "fp32" if model_dtype and model_dtype.endswith("float32") else "auto"
    pair = re.fullmatch(r"\s*K\s+(\w+)\s*,\s*V\s+(\w+)\s*", name)
    if pair:
        return f"{pair[1].lower()}/{pair[2].lower()}"
    inner = re.search(r"\((fp8_ds_mla|nvfp4_ds_mla)\)", name)
    return inner[1] if inner else name.split("(")[0].strip().lower()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:2000]


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}, which is not a number")
    if not abs(value) < 1e18:
        raise ConfigError(f"{name} is {value!r}; figures below 10¹⁸ are read")
    return float(value)


def _groups(row: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    value = row.get("groups") or ()
    try:
        return tuple((str(kind), int(layers)) for kind, layers in value)
    except (TypeError, ValueError):
        raise ConfigError(f"groups is {value!r:.100}, not a list of kind and layers") from None


def _sum(row: Mapping[str, Any], *names: str) -> float | None:
    """Sum of the fields, None where none is given."""
    values = [v for v in (_number(row, name) for name in names) if v is not None]
    return sum(values) if values else None


def _count(row: Mapping[str, Any], name: str) -> int | None:
    value = _number(row, name)
    if value is None:
        return None
    if value != int(value) or value < 0:
        raise ConfigError(f"{name} is {value!r}, which is not a count")
    return int(value)


ROUNDING_GIB = 0.005  # logs print GiB with two decimals
