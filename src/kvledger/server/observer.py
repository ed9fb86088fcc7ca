"""Turns what the engine tells into Prometheus' metrics. A listener: it changes nothing and runs in the loop's thread.

The times of a request are those of `kvledger.metrics`; here they only find their way into histograms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvledger.engine import StepReport
from kvledger.metrics import Metrics as Times
from kvledger.metrics import RequestTimes
from kvledger.sched.events import Admitted, Event, Finished, Preempted, TokenEvent
from kvledger.sched.scheduler import Scheduler
from kvledger.sched.sequence import Request
from kvledger.server.prometheus import Metrics
from kvledger.server.served import StepCosts


@dataclass(slots=True)
class _Watched:
    """A request whose answer is under way."""

    request: Request
    times: RequestTimes
    num_gaps_seen: int = 0
    lengths: list[int] = field(default_factory=list)  # of the choices that have ended


class Observer:
    """Keeps `metrics`. `opened` when a request is submitted; `dropped` when nobody waits for its end any more."""

    def __init__(self, metrics: Metrics, step_cost: StepCosts) -> None:
        self.metrics, self._step_cost = metrics, step_cost
        self._times = Times(keep=1)
        self._watched: dict[str, _Watched] = {}

    def opened(self, request: Request, arrival_s: float) -> RequestTimes:
        """A request arrived at `arrival_s` and is being submitted."""
        self._times.added(request, arrival_s)
        times = self._times.live[request.request_id]
        self._watched[request.request_id] = _Watched(request, times)
        return times

    def dropped(self, request_id: str, reason: str) -> None:
        """The answer was given up for `reason` before the engine ended it. Unknown ids are ignored."""
        if self._watched.pop(request_id, None) is not None:
            self._times.live.pop(request_id, None)
            self.metrics.inc("vllm:request_success", 1, reason)

    def died(self) -> None:
        """The engine is gone, and with it everything that ran."""
        for request_id in list(self._watched):
            self.dropped(request_id, "error")

    def stepped(self, report: StepReport, events: Sequence[Event]) -> None:
        """The events of one step."""
        self._times.stepped(report, events)
        self._step(report, sum(isinstance(event, TokenEvent) for event in events))
        for event in events:
            if isinstance(event, Preempted):
                self.metrics.inc("vllm:num_preemptions")
            if (watched := self._watched.get(event.request_id)) is not None:
                self._note(event, watched)

    def measure(self, scheduler: Scheduler) -> None:
        """Set the pool's gauges. Reads single counters only, so it may run beside the engine's thread."""
        pool, plan, metrics = scheduler.pool, scheduler.plan, self.metrics
        blocks = {"used": pool.num_used, "cached": pool.num_idle, "shared": pool.num_shared}
        blocks["free"] = plan.num_blocks - blocks["used"] - blocks["cached"]
        for state, count in blocks.items():
            metrics.set("kvledger:kv_blocks", count, state)
            metrics.set("kvledger:kv_bytes", count * plan.layout.block_bytes, state)
        metrics.set("vllm:kv_cache_usage_perc", blocks["used"] / plan.num_blocks)
        metrics.set("kvledger:tier_blocks", scheduler.tiers.num_host_used, "host")
        if (disk := scheduler.tiers.disk) is not None:
            metrics.set("kvledger:tier_blocks", len(disk), "disk")
            metrics.set("kvledger:tier_failed", float(not disk.can_save), "disk")

    def _step(self, report: StepReport, num_output: int) -> None:
        self.metrics.set("vllm:num_requests_running", report.num_running)
        self.metrics.set("vllm:num_requests_waiting", report.num_waiting)
        self.metrics.set("vllm:num_requests_waiting_by_reason", report.num_waiting, "capacity")
        if not report.num_seqs:
            return
        seconds = report.ended_s - report.started_s
        self.metrics.inc("kvledger:engine_steps")
        self.metrics.inc("kvledger:engine_busy_seconds", seconds)
        self.metrics.inc("vllm:generation_tokens", num_output)
        self.metrics.observe("kvledger:step_seconds", seconds)
        self.metrics.observe("vllm:iteration_tokens_total", report.num_tokens)
        costs = zip(("flops", "read_bytes", "write_bytes"), self._step_cost(report.shape), strict=True)
        for what, amount in costs:
            self.metrics.inc(f"vllm:estimated_{what}_per_gpu", amount)

    def _note(self, event: Event, watched: _Watched) -> None:
        if isinstance(event, TokenEvent):
            self._token(event, watched)
        elif isinstance(event, Admitted) and event.is_first and event.choice == 0:
            self._admitted(watched.times)
        elif isinstance(event, Finished):
            watched.lengths.append(event.num_output)
            if len(watched.lengths) == watched.request.params.n:
                del self._watched[event.request_id]
                self._ended(watched, event.finish_reason)

    def _token(self, event: TokenEvent, watched: _Watched) -> None:
        times = watched.times
        if event.num_output == 1 and event.choice == 0 and times.ttft_s is not None:
            self.metrics.observe("vllm:time_to_first_token_seconds", times.ttft_s)
        for gap_s in times.gaps_s[watched.num_gaps_seen :]:
            self.metrics.observe("vllm:inter_token_latency_seconds", gap_s)
        watched.num_gaps_seen = len(times.gaps_s)

    def _admitted(self, times: RequestTimes) -> None:
        metrics, computed = self.metrics, times.num_prompt - times.num_cached
        metrics.observe("vllm:request_queue_time_seconds", times.queue_s or 0.0)
        metrics.inc("vllm:prompt_tokens", times.num_prompt)
        metrics.inc("vllm:prefix_cache_queries", times.num_prompt)
        metrics.inc("vllm:prefix_cache_hits", times.num_cached)
        metrics.inc("vllm:prompt_tokens_cached", times.num_cached)
        metrics.inc("vllm:prompt_tokens_by_source", computed, "local_compute")
        metrics.inc("vllm:prompt_tokens_by_source", times.num_cached, "local_cache_hit")
        metrics.observe("vllm:request_prefill_kv_computed_tokens", computed)

    def _ended(self, watched: _Watched, reason: str) -> None:
        observe, times, params = self.metrics.observe, watched.times, watched.request.params
        self.metrics.inc("vllm:request_success", 1, reason)
        observe("vllm:e2e_request_latency_seconds", times.e2e_s or 0.0)
        observe("vllm:request_prompt_tokens", times.num_prompt)
        observe("vllm:request_generation_tokens", sum(watched.lengths))
        observe("vllm:request_max_num_generation_tokens", max(watched.lengths))
        observe("vllm:request_params_n", params.n)
        observe("vllm:request_num_preemptions", times.num_preemptions)
        if params.max_tokens is not None:
            observe("vllm:request_params_max_tokens", params.max_tokens)
        self._phases(times)

    def _phases(self, times: RequestTimes) -> None:
        """How the request's time was spent; nothing for one that never got a token."""
        if times.admitted_s is None or times.first_token_s is None or times.ended_s is None:
            return
        observe = self.metrics.observe
        observe("vllm:request_inference_time_seconds", times.ended_s - times.admitted_s)
        observe("vllm:request_prefill_time_seconds", times.first_token_s - times.admitted_s)
        observe("vllm:request_decode_time_seconds", times.ended_s - times.first_token_s)
        if times.tpot_s is not None:
            observe("vllm:request_time_per_output_token_seconds", times.tpot_s)
