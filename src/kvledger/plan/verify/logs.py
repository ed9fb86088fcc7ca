"""Start-up logs of vLLM, SGLang, llama.cpp and TensorRT-LLM as records. Any line may be missing, cut or hostile.

Each engine has a table of (pattern, what it sets). Lines are cut at 8 KiB and a file is read up to 64 MiB, so a huge
or endless file costs bounded time and memory. Knows no rules of engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvledger.errors import DamagedFile
from kvledger.plan.verify.log_patterns import (
    LLAMA_CACHE,
    LLAMA_OLD,
    SGLANG_POOL,
    SIGNS,
    TABLES,
    WORDS,
    Facts,
    number,
    whole,
)
from kvledger.plan.verify.record import Record, kv_dtype_of

MAX_LINE = 8192
MAX_BYTES = 64 << 20
MAX_KEPT = 4 << 20  # characters per engine that are looked at closely; start-up comes first in a log


@dataclass(frozen=True, slots=True)
class CacheLine:
    """One cache as llama.cpp prints it; `streams` caches of `cells` each."""

    cells: int
    layers: int
    streams: int
    kv_dtype: str
    mib: float
    key_mib: float
    value_mib: float


@dataclass(frozen=True, slots=True)
class Log:
    """What a log said: the engine, one record per pool, and every figure by name."""

    engine: str
    records: tuple[Record, ...]
    facts: Facts = field(default_factory=dict)
    caches: tuple[CacheLine, ...] = ()
    num_lines: int = 0


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, each cut to `MAX_LINE`, at most `MAX_BYTES` in all. Raises DamagedFile."""
    if not path.is_file():
        raise DamagedFile(f"{path} is not a file")
    left = MAX_BYTES
    with path.open("rb") as file:
        while left > 0 and (chunk := file.readline(MAX_LINE)):
            left -= len(chunk)
            yield chunk.decode("utf-8", errors="replace").rstrip("\r\n")


def parse_log(lines: Iterable[str]) -> Log:
    """The figures of a start-up log. Raises DamagedFile where no engine can be recognised."""
    kept: dict[str, list[str]] = {name: [] for name in TABLES}
    votes: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    count = 0
    for count, line in enumerate(lines, start=1):  # noqa: B007 (counted for the message)
        for name, sign in SIGNS.items():
            if sizes[name] < MAX_KEPT and _tells(line, name):
                kept[name].append(line)
                sizes[name] += len(line)
                votes[name] += sign.search(line) is not None
    if not any(votes.values()):
        raise DamagedFile(f"none of {count:,} lines is a start-up line of vLLM, SGLang, llama.cpp or TensorRT-LLM")
    engine = _winner(votes)
    return _build(engine, kept[engine], count)


def _tells(line: str, engine: str) -> bool:
    return any(word in line for word in WORDS[engine])


def _winner(votes: Counter[str]) -> str:
    """The engine with most lines; TensorRT-LLM and SGLang before vLLM, whose words they borrow."""
    order = ("tensorrt-llm", "sglang", "llama.cpp", "vllm")
    return max(order, key=lambda name: (votes[name], -order.index(name)))


def _build(engine: str, lines: list[str], count: int) -> Log:
    facts: Facts = {}
    for line in lines:
        for pattern, setter in TABLES[engine]:
            found = pattern.search(line)
            if found:
                setter(facts, found)
    caches = tuple(_caches(lines, facts)) if engine == "llama.cpp" else ()
    base = _record(engine, facts)
    if engine == "sglang":
        records = _sglang_records(base, lines, facts)
    elif engine == "llama.cpp":
        records = tuple(_llama_record(base, c, caches, facts) for c in caches) or (base,)
    else:
        records = (base,)
    return Log(engine, records, facts, caches, count)


def _record(engine: str, facts: Facts) -> Record:
    speculative = str(facts.get("speculative", "")).lower()
    gpu = f"({facts['total_gib']} GiB)" if "total_gib" in facts else None
    known: dict[str, Any] = {k: facts.get(k) for k in (
        "block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "memory_fraction", "weights_gib",
        "activation_gib", "non_torch_gib", "cuda_graph_gib", "available_gib", "num_blocks", "max_concurrency",
        "cpu_blocks")}  # fmt: skip
    tokens = facts.get("kv_tokens")
    return Record(
        engine=engine, model=str(facts.get("model", "")), engine_version=facts.get("version"), gpu=gpu,
        tp=max(1, facts.get("tp", 1)), pp=max(1, facts.get("pp", 1)), dcp=max(1, facts.get("dcp", 1)),
        kv_dtype=kv_dtype_of(facts.get("kv_dtype"), facts.get("model_dtype")),
        kv_tokens=None if tokens is None else int(tokens), prefix_caching=facts.get("prefix_caching", True),
        draft_layers=1 if speculative else 0, draft_tokens=facts.get("draft_tokens", 0) if speculative else 0,
        **known,
    )  # fmt: skip


def _sglang_records(base: Record, lines: list[str], facts: Facts) -> tuple[Record, ...]:
    """One record per pool line of rank 0; two pools are the full layers' and the windows'."""
    found: list[Record] = []
    for line in lines:
        match = SGLANG_POOL.search(line)
        if not match:
            continue
        tokens = whole(match[1])
        key, value, both = (None if t is None else 1024 * number(t) for t in match.groups()[1:])
        record = replace(
            base,
            state_slots=facts.get("state_slots"),
            state_gib=_states(facts),
            kv_tokens=tokens,
            key_mib=key,
            value_mib=value,
            kv_mib=both,
        )
        if record not in found:
            found.append(record)
    if len(found) == 2 and "window_tokens" in facts:
        found = [replace(r, part="window" if r.kv_tokens == facts["window_tokens"] else "full") for r in found]
    return tuple(found) or (base,)


def _states(facts: Facts) -> float | None:
    return facts["ssm_gib"] + facts.get("conv_gib", 0.0) if "ssm_gib" in facts else None


def _caches(lines: list[str], facts: Facts) -> Iterator[CacheLine]:
    for line in lines:
        match = LLAMA_CACHE.search(line)
        if match:
            size, cells, layers, _, streams, k, key, v, value = match.groups()
            count = int(streams) if streams else 1
            kv = f"{k.lower()}/{v.lower()}"
            yield CacheLine(whole(cells), whole(layers), max(1, count), kv, number(size), number(key), number(value))
            continue
        old = LLAMA_OLD.search(line)
        if old and facts.get("n_ctx"):
            size, k, key, v, value = old.groups()
            kv, layers_known = f"{k.lower()}/{v.lower()}", facts.get("n_layer", 0)
            yield CacheLine(facts["n_ctx"], layers_known, 1, kv, number(size), number(key), number(value))


def _llama_record(base: Record, cache: CacheLine, caches: tuple[CacheLine, ...], facts: Facts) -> Record:
    """With two caches the one of fewer cells is the windows'."""
    part = ""
    if len(caches) == 2 and caches[0].cells != caches[1].cells:
        part = "window" if cache.cells == min(c.cells for c in caches) else "full"
    return replace(
        base, kv_tokens=cache.cells * cache.streams, formula=_formula(cache, facts), kv_dtype=cache.kv_dtype, part=part,
        kv_mib=cache.mib, key_mib=cache.key_mib, value_mib=cache.value_mib,
    )  # fmt: skip


def _formula(cache: CacheLine, facts: Facts) -> str:
    """The plain formula from the header that llama.cpp prints, for models the catalogue does not know."""
    heads, key, value = (facts.get(k) for k in ("n_head_kv", "key_dim", "value_dim"))
    return f"{cache.layers}L x {heads} kv-heads x ({key}+{value}) x" if heads and key and value else ""
