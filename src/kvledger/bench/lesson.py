"""The lesson measured: all its claims in one run, as values, as tables and as JSON.

The counted part needs no kernels: it runs the scheduler over the simulated executor, with the set-up of the
PagedAttention paper (OPT-13B on an A100 of 40 GB, 12 GiB of KV, ShareGPT's lengths), so its figures can be compared
with published ones. The measured part runs on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvledger.bench.common import plain
from kvledger.bench.engine import load_for
from kvledger.bench.phases import Point, decode_by_batch, decode_by_context
from kvledger.bench.policies import (
    BlockSizeRun,
    ChunkRun,
    PolicyRun,
    Setup,
    compare_chunking,
    compare_policies,
    measure_policies,
    skewed_trace,
    sweep_block_sizes,
)
from kvledger.bench.recompute import Forwards, count_forwards, time_forwards
from kvledger.bench.sharing import PrefixHit, Sharing, count_beam_sharing, count_sample_sharing, measure_prefix_hit
from kvledger.data.catalogue import model as catalogue_model
from kvledger.data.devices import find_device
from kvledger.plan.roofline import Roofline
from kvledger.plan.workload import find_workload
from kvledger.units import GIB, format_count, format_seconds

PAPER_MODEL, PAPER_DEVICE, PAPER_KV_BYTES = "opt-13b", "a100-40gb", 12 * GIB
CHUNK_MODEL, CHUNK_DEVICE = "mistral-7b-v0.1", "a100-80gb"
Rows = list[Sequence[object]]


@dataclass(frozen=True, slots=True)
class Lesson:
    """Everything counted; what is measured is empty until it was."""

    forwards: Forwards
    policies: tuple[PolicyRun, ...]
    block_sizes: tuple[BlockSizeRun, ...]
    chunking: tuple[ChunkRun, ...] = ()
    timed_forwards: Forwards | None = None
    by_context: tuple[Point, ...] = ()
    by_batch: tuple[Point, ...] = ()
    local_policies: tuple[PolicyRun, ...] = ()
    prefix_hit: PrefixHit | None = None
    sharing: tuple[Sharing, ...] = ()
    notes: tuple[str, ...] = ()  # what the user should know of the model that was measured, as `Loaded` has it

    def as_json(self) -> dict[str, Any]:
        """Plain values, derived ones included; times of single requests left out."""
        found: dict[str, Any] = plain(self)
        return found

    def tables(self) -> Iterator[tuple[str, Rows]]:
        """(title, rows) of everything that is there."""
        yield "Token forwards for n = m = 1000", _forward_rows(self.forwards)
        where = f"{PAPER_MODEL} on {PAPER_DEVICE}, 12 GiB of KV, ShareGPT's lengths (simulated)"
        yield where, _policy_rows(self.policies)
        yield "The same by block size, paged + chunked (simulated)", _block_rows(self.block_sizes)
        if self.chunking:
            where = f"{CHUNK_MODEL} on {CHUNK_DEVICE}, four long prompts a second (simulated)"
            yield where, _chunk_rows(self.chunking)
        if self.timed_forwards is not None:
            yield "Forwards on this machine, n = m = 64", _forward_rows(self.timed_forwards)
            yield "A decode step by context, one sequence", _point_rows(self.by_context)
            yield "Decode by batch", _point_rows(self.by_batch)
            yield "Policies on this machine", _policy_rows(self.local_policies)
            yield "Sharing", _sharing_rows(self.prefix_hit, self.sharing)


def count_lesson(requests: int = 300) -> Lesson:
    """The part that needs no kernels."""
    spec = catalogue_model(PAPER_MODEL)
    setup = Setup(spec, Roofline(spec, find_device(PAPER_DEVICE), spec.kv_layout("fp16")), PAPER_KV_BYTES)
    trace = skewed_trace(spec, count=requests)
    counted = Lesson(count_forwards(spec), compare_policies(setup, trace), sweep_block_sizes(setup, trace))
    return replace(counted, chunking=_chunking(max(1, requests // 5)))


def _chunking(requests: int) -> tuple[ChunkRun, ...]:
    """Sarathi-Serve's lengths (openchat), Poisson arrivals at four a second."""
    spec, lengths = catalogue_model(CHUNK_MODEL), find_workload("openchat-sharegpt4")
    setup = Setup(spec, Roofline(spec, find_device(CHUNK_DEVICE), spec.kv_layout()), 40 * GIB, 8192)
    return compare_chunking(setup, skewed_trace(spec, lengths, requests, 4.0, 8192))


def measure_lesson(counted: Lesson, model: str, kv_memory: int, say: Callable[[str], None]) -> Lesson:
    """The part that runs on this machine, added to what was counted. `say` is told of each loading."""
    loaded = load_for(model, [(32, 2100, 80)], say)
    try:
        found = replace(
            counted,
            timed_forwards=time_forwards(loaded),
            by_context=decode_by_context(loaded),
            by_batch=decode_by_batch(loaded),
            sharing=(count_sample_sharing(loaded), count_beam_sharing(loaded)),
            notes=loaded.notes,
        )
        trace = skewed_trace(loaded.model, count=40, context=512)
    finally:
        loaded.engine.close()
    cached = load_for(model, [(1, 2100, 8)], say, prefix_caching=True)
    try:
        found = replace(found, prefix_hit=measure_prefix_hit(cached))
    finally:
        cached.engine.close()
    return replace(found, local_policies=measure_policies(model, trace, kv_memory, 512, say))


# ---------------------------------------------------------------------------------------------- rows to print


def _forward_rows(f: Forwards) -> Rows:
    def seconds(value: float | None) -> str:
        return "" if value is None else format_seconds(value)

    return [
        ("with a cache", format_count(f.with_cache), seconds(f.with_cache_s)),
        ("without", format_count(f.without_cache), seconds(f.without_cache_s)),
        ("ratio", f"{f.without_cache / f.with_cache:,.1f} ×", ""),
    ]


def _policy_rows(runs: Sequence[PolicyRun]) -> Rows:
    head = ("", "tokens/s", "× the first", "mean batch", "waste", "pool taken", "preemptions")
    rows = [
        (
            run.name, f"{run.result.tokens_per_s:,.0f}", f"{run.times:.2f}", f"{run.result.mean_batch:.1f}",
            f"{run.result.mean_waste:.1%}", f"{run.result.mean_usage:.0%}", run.result.num_preemptions,
        )
        for run in runs
    ]  # fmt: skip
    return [head, *rows]


def _chunk_rows(runs: Sequence[ChunkRun]) -> Rows:
    head = ("tokens per step", "tokens/s", "first token, median", "between tokens, p99", "longest")
    rows = []
    for name, r in ((run.name, run.result) for run in runs):
        times = [format_seconds(value) for value in (r.ttft_s(50), r.gap_s(99), r.gap_s(100))]
        rows.append((name, f"{r.tokens_per_s:,.0f}", *times))
    return [head, *rows]


def _block_rows(runs: Sequence[BlockSizeRun]) -> Rows:
    head = ("tokens per block", "tokens/s", "mean batch", "waste")
    rows = [
        (size, f"{r.tokens_per_s:,.0f}", f"{r.mean_batch:.1f}", f"{r.mean_waste:.1%}")
        for size, r in ((run.block_size, run.result) for run in runs)
    ]
    return [head, *rows]


def _point_rows(points: Sequence[Point]) -> Rows:
    roofline = "roofline" if all(p.ceiling_measured for p in points) else "roofline, peaks assumed"
    rows: Rows = [("batch × context", "step", roofline, "bound by", "tokens/s")]
    for p in points:
        shape, rate = f"{p.batch} × {p.context}", f"{p.tokens_per_s:,.0f}"
        rows.append((shape, format_seconds(p.step_s), format_seconds(p.bound_s), p.bound, rate))
    return rows


def _sharing_rows(hit: PrefixHit | None, sharing: Sequence[Sharing]) -> Rows:
    rows: Rows = [
        (f"{s.n} {s.what}", f"{s.shared_blocks} blocks shared", f"{s.copied_blocks} copied", f"{s.saved:.0%} saved")
        for s in sharing
    ]
    if hit is not None:
        cold, warm = f"{format_seconds(hit.cold_s)} computed", f"{format_seconds(hit.hit_s)} found"
        rows.append((f"first token after {hit.prompt} tokens", warm, cold, f"{hit.times:.0f} ×"))
    return rows
