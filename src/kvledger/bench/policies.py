"""Four ways to give out the same memory, on the same arrivals: what each wastes, how many run together, how fast.

The simulator runs the scheduler that serves; `measure_policies` spends the time on this machine's kernels instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvledger.bench.common import simulated
from kvledger.bench.engine import run_batch
from kvledger.exec.simulated import StepTimer
from kvledger.plan.pool import PoolPlan, plan_pool
from kvledger.plan.workload import Workload, find_workload
from kvledger.simulate.replay import Arrival, Replay, poisson, replay
from kvledger.spec.config import CacheConfig, EngineConfig, SchedulerConfig
from kvledger.spec.model import ModelSpec

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("static + reserved", {"policy": "static"}),
    ("orca", {"policy": "orca"}),
    ("paged", {"policy": "continuous", "chunked_prefill": False}),
    ("paged + chunked", {"policy": "continuous"}),
)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What one policy made of the trace; `times` is its throughput by the first one's."""

    name: str
    result: Replay
    times: float


def skewed_trace(
    spec: ModelSpec, workload: Workload | None = None, count: int = 200, max_tokens: int = 1024, rate_per_s: float = 0.0
) -> tuple[Arrival, ...]:
    """Requests with the lengths of a chat service (ShareGPT's means): most answers are short, some are long."""
    lengths = workload or find_workload("sharegpt")
    vocab, longest = spec.vocab_size, max(1, spec.max_context // 2 - 1)
    return poisson(lengths, count, rate_per_s, max_tokens, max_prompt=min(1024, longest), vocab_size=vocab)


def compare_policies(
    spec: ModelSpec, timer: StepTimer, kv_bytes: int, arrivals: Sequence[Arrival], block_size: int = 16
) -> tuple[PolicyRun, ...]:
    """The same arrivals on the same KV memory under each policy, in the simulator."""
    pool = plan_pool(spec.kv_layout(block_size=block_size), kv_bytes)
    runs: list[PolicyRun] = []
    for name, options in POLICIES:
        config = EngineConfig(
            CacheConfig(block_size, prefix_caching=False), SchedulerConfig(max_num_seqs=256, **options)
        )
        result = replay(simulated(spec, pool, timer, config), arrivals)
        first = runs[0].result.tokens_per_s if runs else result.tokens_per_s
        runs.append(PolicyRun(name, result, result.tokens_per_s / first))
    return tuple(runs)


def measure_policies(
    model: str, arrivals: Sequence[Arrival], kv_memory: int, context: int, **options: Any
) -> tuple[PolicyRun, ...]:
    """The same on this machine's kernels: one engine per policy, one after the other."""
    from kvledger.build import build_engine
    from kvledger.llm import engine_config

    runs: list[PolicyRun] = []
    for name, chosen in POLICIES:
        given = {"kv_memory": kv_memory, "max_model_len": context, "prefix_caching": False, "max_num_seqs": 64}
        loaded = build_engine(model, engine_config(**given, **chosen, **options))
        run_batch(loaded, 2, 16, 2)
        result = replay(loaded.engine, arrivals)
        loaded.engine.close()
        first = runs[0].result.tokens_per_s if runs else result.tokens_per_s
        runs.append(PolicyRun(name, result, result.tokens_per_s / first))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class BlockSizeRun:
    """The trace with blocks of `block_size` tokens on the same KV memory."""

    block_size: int
    result: Replay


def sweep_block_sizes(
    spec: ModelSpec,
    timer: StepTimer,
    kv_bytes: int,
    arrivals: Sequence[Arrival],
    sizes: Sequence[int] = (8, 16, 32, 64, 128, 256),
) -> tuple[BlockSizeRun, ...]:
    """Larger blocks waste more of their last one, so fewer sequences run together."""
    return tuple(
        BlockSizeRun(size, compare_one(spec, timer, plan_pool(spec.kv_layout(block_size=size), kv_bytes), arrivals))
        for size in sizes
    )


def compare_one(spec: ModelSpec, timer: StepTimer, pool: PoolPlan, arrivals: Sequence[Arrival]) -> Replay:
    """The trace under continuous batching with chunked prefill."""
    config = EngineConfig(CacheConfig(pool.layout.block_size, prefix_caching=False), SchedulerConfig(max_num_seqs=256))
    return replay(simulated(spec, pool, timer, config), arrivals)
