"""What the cache saves: token forwards with and without it, counted step by step and timed at a smaller size.

The counts come from the steps that the scheduler really makes, not from a formula; `plan.recompute` has the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.bench.common import Instant, exactly, run_to_end, simulated
from kvledger.build import Loaded
from kvledger.engine import Engine
from kvledger.plan.pool import plan_pool
from kvledger.sched.sequence import Request
from kvledger.spec.config import CacheConfig, EngineConfig, SchedulerConfig
from kvledger.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Forwards:
    """Token forwards to answer `output` tokens after `prompt`, with and without a cache; seconds where measured."""

    prompt: int
    output: int
    with_cache: int
    without_cache: int
    with_cache_s: float | None = None
    without_cache_s: float | None = None


def count_forwards(spec: ModelSpec, prompt: int = 1000, output: int = 1000) -> Forwards:
    """Run both ways through the scheduler and count the tokens of every step."""
    layout = spec.kv_layout()
    pool = plan_pool(layout, (layout.blocks_for(prompt + output + 1) + 1) * layout.block_bytes)
    config = EngineConfig(CacheConfig(prefix_caching=False), SchedulerConfig())
    engine = simulated(spec, pool, Instant(), config)
    return Forwards(prompt, output, *_both_ways(engine, prompt, output)[:2])


def time_forwards(loaded: Loaded, prompt: int = 64, output: int = 64) -> Forwards:
    """The same on this machine's kernels, with the seconds it took. The engine must run without a prefix cache.

    One prompt goes first, untimed: what an engine does once would all count against the way with a cache.
    """
    run_to_end(loaded.engine, [Request("first", (1,) * prompt, exactly(2))])
    return Forwards(prompt, output, *_both_ways(loaded.engine, prompt, output))


def _both_ways(engine: Engine, prompt: int, output: int) -> tuple[int, int, float, float]:
    """(tokens with cache, tokens without, seconds with, seconds without)."""
    text = [1] * prompt
    cached = run_to_end(engine, [Request("cached", tuple(text), exactly(output))])
    totals = [0, 0.0]
    for index in range(output):  # no cache: the whole text again for every token
        again = run_to_end(engine, [Request(f"again-{index}", tuple(text + [1] * index), exactly(1))])
        totals[0] += sum(step.num_tokens for step in again.steps)
        totals[1] += again.totals.busy_s
    return sum(s.num_tokens for s in cached.steps), int(totals[0]), cached.totals.busy_s, totals[1]
