"""Options that plan, ledger and deploy share, and how they become a `Query`. One place for names, help and parsing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvledger.data.devices import LOCAL
from kvledger.plan.query import Query
from kvledger.units import parse_bytes, parse_count

_TOKENS: dict[str, Any] = {"metavar": "TOKENS"}
_COUNTS = ("context", "output", "prefix", "max_num_batched_tokens")

Model = Annotated[str, typer.Argument(help="Catalogue name, hub id, config.json, folder or GGUF file.")]
OptionalModel = Annotated[str | None, typer.Argument(help="Catalogue name, hub id, config.json, folder or GGUF file.")]
Device = Annotated[str, typer.Option("--device", help="A name of `kvledger devices`; local is this machine.")]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline stages.")]
Dp = Annotated[int, typer.Option("--dp", help="Replicas.")]
Context = Annotated[str | None, typer.Option("--context", help="Prompt and output together: 8192, 8k.", **_TOKENS)]
Output = Annotated[str | None, typer.Option("--output", help="Tokens written of these.", **_TOKENS)]
Prefix = Annotated[str, typer.Option("--prefix", help="Prompt tokens that requests share.", **_TOKENS)]
HitRate = Annotated[float, typer.Option("--hit-rate", help="Share of requests that start with the prefix.")]
Batch = Annotated[int | None, typer.Option("--batch", help="Requests per replica to time; as many as fit otherwise.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="bf16, fp8, int8, int4, q8_0/q4_0 …")]
Weights = Annotated[str | None, typer.Option("--weights", help="fp8, awq, q4_k_m …; as published otherwise.")]
Engine = Annotated[str | None, typer.Option("--engine", help="vllm, sglang, llama.cpp, tensorrt-llm or kvledger.")]
Version = Annotated[str | None, typer.Option("--engine-version", help="Rules of that version.")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Tokens per block.")]
Fraction = Annotated[float | None, typer.Option("--memory-fraction", help="Share of memory the engine may use.")]
KvMemory = Annotated[str | None, typer.Option("--kv-memory", help="KV bytes per device: 8GiB, 8GB.", metavar="SIZE")]
MaxSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Requests in a step.")]
MaxTokens = Annotated[str | None, typer.Option("--max-num-batched-tokens", help="New tokens in a step.", **_TOKENS)]
Efficiency = Annotated[float, typer.Option("--efficiency", help="Share of peaks reached; 1 gives floors.")]
Price = Annotated[float | None, typer.Option("--price", help="Dollars per device and hour.")]
LongContext = Annotated[bool, typer.Option("--allow-long-context", help="Count a context beyond the model's own.")]
DpAttention = Annotated[bool, typer.Option("--dp-attention", help="TP ranks keep latents of different requests.")]
AsLesson = Annotated[bool, typer.Option("--as-lesson", help="Count as the lesson does: GB ÷ GiB, n + m forwards.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Explain = Annotated[bool, typer.Option("--explain", help="Formula, inputs, substitution and source of every figure.")]


def query_of(model: str, device: str, **options: Any) -> Query:
    """Texts read, names looked up, options checked. Raises what the resolver and `Query` raise."""
    from kvledger.models import resolve_model
    from kvledger.plan.planner import make_query

    for name in _COUNTS:
        if isinstance(options.get(name), str):
            options[name] = parse_count(options[name])
    if isinstance(options.get("kv_memory_bytes"), str):
        options["kv_memory_bytes"] = parse_bytes(options["kv_memory_bytes"])
    if options.get("kv_dtype"):
        options["kv_dtype"] = options["kv_dtype"].strip().lower()
    local = device == LOCAL and options.get("engine") in (None, "kvledger") and options.get("weights") is None
    found = _fetched(model) if local else None
    return make_query(found or resolve_model(model), device, **options)


def _fetched(name: str) -> Any:
    """The model's own file where it has been fetched: what `serve` would load. None otherwise."""
    from kvledger.errors import ConfigError, UnknownName
    from kvledger.models import model_at
    from kvledger.weights import store

    try:
        path = store.find(name)
    except (UnknownName, ConfigError):
        return None
    return None if path is None else model_at(path)
