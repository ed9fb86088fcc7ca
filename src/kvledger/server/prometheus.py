"""`/metrics`: vLLM's names, labels and bucket edges, so that its dashboards work, and kvledger's own beside them.

Below vLLM's edges stand finer ones: a small model's token takes about a millisecond, and vLLM's first edge is ten.
All calls come from the event loop's thread, so nothing is locked. Families of things that this engine does not have
(external cache, multimodal cache, sleeping) are exported with zero, because dashboards ask for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

LABELS = ("model_name", "engine")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# vLLM's edges, with finer ones of ours below: a token of 10 ms, a request of 0.3 s are its first
_TTFT = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)  # fmt: skip
_TOKEN_TIME = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
    5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_TIME = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)  # fmt: skip
_STEP_TOKENS = tuple(float(1 << i) for i in (0, *range(3, 15)))  # 1 8 16 … 16384
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

# (name, what it counts, extra labels); vLLM's counters first, then ours
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", ()),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache; recompute after preemption never counts", ()),
    ("vllm:external_prefix_cache_queries", "Tokens looked up in an external cache (none here: always 0)", ()),
    ("vllm:external_prefix_cache_hits", "Tokens found in an external cache (none here: always 0)", ()),
    ("vllm:mm_cache_queries", "Look-ups in a multimodal cache (none here: always 0)", ()),
    ("vllm:mm_cache_hits", "Hits in a multimodal cache (none here: always 0)", ()),
    ("vllm:num_preemptions", "Sequences that had to give their blocks back and run again", ()),
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests", ()),
    ("vllm:prompt_tokens_by_source", "Prompt tokens by where their K/V came from", ("source",)),
    ("vllm:prompt_tokens_cached", "Prompt tokens whose K/V came from a cache", ()),
    ("vllm:generation_tokens", "Tokens generated", ()),
    ("vllm:request_success", "Requests ended, by reason", ("finished_reason",)),
    ("vllm:admission_rejections", "Requests refused at the door", ("reason",)),
    ("vllm:estimated_flops_per_gpu", "FLOPs of all steps, by the planner's model of their cost; not measured", ()),
    ("vllm:estimated_read_bytes_per_gpu", "Weights and K/V read by all steps, by the same model", ()),
    ("vllm:estimated_write_bytes_per_gpu", "K/V written by all steps, by the same model", ()),
    ("kvledger:http_requests", "HTTP requests answered, by route and status", ("route", "status")),
    ("kvledger:engine_steps", "Forward passes", ()),
    ("kvledger:engine_busy_seconds", "Seconds spent in forward passes", ()),
    ("kvledger:engine_restarts", "Times the engine was rebuilt after dying", ()),
)  # fmt: skip

# (name, what it measures, upper edges)
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token", _TTFT),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence", _TOKEN_TIME),
    ("vllm:request_time_per_output_token_seconds", "Decode time by output tokens after the first", _TOKEN_TIME),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_TIME),
    ("vllm:request_queue_time_seconds", "Arrival to first scheduling", _REQUEST_TIME),
    ("vllm:request_inference_time_seconds", "First scheduling to last token", _REQUEST_TIME),
    ("vllm:request_prefill_time_seconds", "First scheduling to first token", _REQUEST_TIME),
    ("vllm:request_decode_time_seconds", "First to last token", _REQUEST_TIME),
    ("vllm:request_prompt_tokens", "Prompt length", ()),
    ("vllm:request_generation_tokens", "Output length", ()),
    ("vllm:request_max_num_generation_tokens", "Longest output of a request's choices", ()),
    ("vllm:request_params_max_tokens", "max_tokens asked for", ()),
    ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens really computed (not from the cache)", ()),
    ("vllm:iteration_tokens_total", "Tokens of a forward pass", _STEP_TOKENS),
    ("vllm:request_params_n", "n asked for", _CHOICES),
    ("vllm:request_num_preemptions", "Preemptions of a request", _PREEMPTIONS),
    ("kvledger:step_seconds", "Duration of a forward pass", _TOKEN_TIME),
)  # fmt: skip

# (name, what it shows, extra labels)
GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm:num_requests_running", "Sequences that have blocks and run", ()),
    ("vllm:num_requests_waiting", "Sequences that wait", ()),
    ("vllm:num_requests_waiting_by_reason", "Sequences that wait, by reason", ("reason",)),
    ("vllm:kv_cache_usage_perc", "Share of the pool's blocks that sequences hold, 0 to 1", ()),
    ("vllm:engine_sleep_state", "1 at the state the engine is in; it never sleeps", ("sleep_state",)),
    (
        "kvledger:kv_blocks",
        "Blocks of the pool by state: used, cached and free make up the pool; shared ones are among the used",
        ("state",),
    ),
    ("kvledger:kv_bytes", "Bytes of the pool by state", ("state",)),
    ("kvledger:tier_blocks", "Blocks beyond the pool, by tier: host (preempted sequences), disk (prefixes)", ("tier",)),
    ("kvledger:tier_failed", "1 once the disk tier could not be written and saves nothing more", ("tier",)),
)


def token_edges(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `max_model_len`, as vLLM counts tokens."""
    edges, decade = [], 1
    while decade <= max_model_len:
        edges += [float(m * decade) for m in (1, 2, 5) if m * decade <= max_model_len]
        decade *= 10
    return tuple(edges)


class Histogram:
    """Counts per bucket; `edges` are upper bounds, the last bucket is open."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = list(edges)
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge as text, cumulative count), the last is +Inf."""
        total, found = 0, []
        for edge, count in zip([*map(repr, map(float, self.edges)), "+Inf"], self.counts, strict=True):
            total += count
            found.append((edge, float(total)))
        return found


class Metrics:
    """All families of one served model. A scrape reads them through `render`."""

    def __init__(self, model_name: str, max_model_len: int, cache_info: Mapping[str, object]) -> None:
        self._labels = (model_name, "0")
        self._info = {key: str(value) for key, value in cache_info.items()}
        self.counters: dict[str, dict[tuple[str, ...], float]] = {name: {} for name, _, _ in COUNTERS}
        self.gauges: dict[str, dict[tuple[str, ...], float]] = {name: {} for name, _, _ in GAUGES}
        tokens = token_edges(max_model_len)
        self.histograms = {name: Histogram(edges or tokens) for name, _, edges in HISTOGRAMS}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._zero()

    def _zero(self) -> None:
        """Series that exist from the start, so that a rate() over them never begins with a gap."""
        for name, _, labels in COUNTERS:
            if not labels:
                self.counters[name][()] = 0.0
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self.counters["vllm:request_success"][(reason,)] = 0.0
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self.counters["vllm:admission_rejections"][(reason,)] = 0.0
        for source in ("local_compute", "local_cache_hit"):
            self.counters["vllm:prompt_tokens_by_source"][(source,)] = 0.0
        for name, _, labels in GAUGES:
            if not labels:
                self.gauges[name][()] = 0.0
        for reason in ("capacity", "deferred"):
            self.gauges["vllm:num_requests_waiting_by_reason"][(reason,)] = 0.0
        for state in ("awake", "weights_offloaded", "discard_all"):
            self.gauges["vllm:engine_sleep_state"][(state,)] = float(state == "awake")

    def inc(self, name: str, amount: float = 1, *labels: str) -> None:
        series = self.counters[name]
        series[labels] = series.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self.gauges[name][labels] = value

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only by collecting."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What the client library asks for at a scrape."""
        for name, text, extra in COUNTERS:
            yield self._family(CounterMetricFamily(name, text, labels=(*LABELS, *extra)), self.counters[name])
        for name, text, extra in GAUGES:
            yield self._family(GaugeMetricFamily(name, text, labels=(*LABELS, *extra)), self.gauges[name])
        for name, text, _ in HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(self._labels, self.histograms[name].buckets(), self.histograms[name].sum)
            yield family
        info = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration", labels=("engine", *self._info))
        info.add_metric(("0", *self._info.values()), 1.0)
        yield info

    def _family(self, family: Any, series: Mapping[tuple[str, ...], float]) -> Metric:
        for labels, value in series.items():
            family.add_metric((*self._labels, *labels), value)
        return family  # type: ignore[no-any-return]
