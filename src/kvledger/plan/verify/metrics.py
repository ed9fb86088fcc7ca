"""A running server's `/metrics` as a record: vLLM's `cache_config_info` labels, or kvledger's own gauges.

One GET, bounded in time and bytes. Knows no rules.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request

from kvledger.errors import DamagedFile, FetchError
from kvledger.plan.verify.log_patterns import Facts
from kvledger.plan.verify.logs import Log
from kvledger.plan.verify.record import Record, kv_dtype_of

TIMEOUT_S = 5.0
MAX_BYTES = 8 << 20
_INFO = re.compile(r"^vllm[:_]cache_config_info\{(.{1,20000}?)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w{1,60})="((?:[^"\\]|\\.){0,300})"')
_STATES = r'^kvledger:kv_bytes\{[^}\n]{0,500}?state="(?:used|cached|free)"[^}\n]{0,500}?\} ([\d.e+]{1,30})'
_POOL = re.compile(_STATES, re.MULTILINE)
_MODEL = re.compile(r'model_name="([^"]{1,200})"')


def scrape(url: str) -> Log:
    """Fetch and read `url`. Raises FetchError, DamagedFile."""
    if not url.startswith(("http://", "https://")):
        raise FetchError(f"{url!r} is not an http address; give for example http://localhost:8000/metrics")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            text = reply.read(MAX_BYTES).decode("utf-8", errors="replace")
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise FetchError(f"{url} does not answer: {error}") from None
    return parse_metrics(text)


def parse_metrics(text: str) -> Log:
    """Prometheus text → one record. Raises DamagedFile where no cache configuration is in it."""
    info = _INFO.search(text)
    if info is None:
        raise DamagedFile("no cache_config_info among the metrics: neither vLLM nor kvledger answers here")
    labels: Facts = dict(_LABEL.findall(info[1]))
    model = _MODEL.search(text)
    pool = sum(int(float(size)) for size in _POOL.findall(text))
    if not pool and "kvledger:" in text:
        pool = _count(labels, "kv_cache_memory_bytes") or 0
    engine = "kvledger" if pool else "vllm"
    record = Record(
        engine=engine,
        available_bytes=pool or None,
        is_exact=engine == "kvledger",
        model=model[1] if model else "",
        kv_dtype=kv_dtype_of(labels.get("cache_dtype")),
        block_size=_count(labels, "block_size"),
        num_blocks=_count(labels, "num_gpu_blocks"),
        cpu_blocks=_count(labels, "num_cpu_blocks"),
        kv_tokens=_count(labels, "kv_cache_size_tokens"),
        max_concurrency=_number(labels, "kv_cache_max_concurrency"),
        memory_fraction=_number(labels, "gpu_memory_utilization"),
        prefix_caching=labels.get("enable_prefix_caching") != "False",
    )
    return Log(engine, (record,), labels, (), text.count("\n"))


def _number(labels: Facts, name: str) -> float | None:
    try:
        return float(labels[name])
    except (KeyError, ValueError):
        return None


def _count(labels: Facts, name: str) -> int | None:
    value = _number(labels, name)
    return int(value) if value is not None and 0 < value < 1e15 else None
