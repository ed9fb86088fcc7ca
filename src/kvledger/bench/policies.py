"""Four ways to give out the same memory, on the same arrivals: what each wastes, how many run together, how fast.

The simulator runs the scheduler that serves; `measure_policies` spends the time on this machine's kernels instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvledger.bench.common import simulated
from kvledger.bench.engine import run_batch
from kvledger.exec.simulated import StepTimer
from kvledger.plan.pool import plan_pool
from kvledger.plan.workload import Workload, find_workload
from kvledger.simulate.replay import Arrival, Replay, poisson, replay
from kvledger.spec.config import CacheConfig, EngineConfig, SchedulerConfig
from kvledger.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvledger.build import Progress

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


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: a model, the seconds of its steps, the memory for its KV, and the longest request."""

    spec: ModelSpec
    timer: StepTimer
    kv_bytes: int
    context: int = 2048
    max_num_seqs: int = 256

    def run(self, arrivals: Sequence[Arrival], block_size: int = 16, **sched: Any) -> Replay:
        """The trace under one policy."""
        cache = CacheConfig(block_size, prefix_caching=False)
        chosen = SchedulerConfig(max_num_seqs=self.max_num_seqs, **sched)
        pool = plan_pool(self.spec.kv_layout(block_size=block_size), self.kv_bytes)
        config = EngineConfig(cache, chosen, max_model_len=min(self.context, self.spec.max_context))
        return replay(simulated(self.spec, pool, self.timer, config), arrivals)


def skewed_trace(
    spec: ModelSpec, workload: Workload | None = None, count: int = 200, rate_per_s: float = 0.0, context: int = 2048
) -> tuple[Arrival, ...]:
    """Requests with the lengths of a chat service (ShareGPT's means): most answers are short, some are long.

    Nobody says how long an answer will be, so what reserves must reserve the whole context.
    """
    half = context // 2 - 1
    return poisson(
        workload or find_workload("sharegpt"), count, rate_per_s, None, max_prompt=half, max_output=half,
        vocab_size=spec.vocab_size,
    )  # fmt: skip


def compare_policies(setup: Setup, arrivals: Sequence[Arrival]) -> tuple[PolicyRun, ...]:
    """The same arrivals on the same KV memory under each policy, in the simulator."""
    return _beside_the_first([(name, setup.run(arrivals, **options)) for name, options in POLICIES])


def measure_policies(
    model: str, arrivals: Sequence[Arrival], kv_memory: int, context: int, progress: Progress | None = None,
    **options: Any,
) -> tuple[PolicyRun, ...]:  # fmt: skip
    """The same on this machine's kernels: one engine per policy, one after the other."""
    from kvledger.build import build_engine
    from kvledger.llm import engine_config

    given = {"kv_memory": kv_memory, "max_model_len": context, "prefix_caching": False} | options
    results = []
    for name, chosen in POLICIES:
        loaded = build_engine(model, engine_config(**given, **chosen), progress)
        run_batch(loaded, 2, 16, 2)
        results.append((name, replay(loaded.engine, arrivals)))
        loaded.engine.close()
    return _beside_the_first(results)


def _beside_the_first(results: Sequence[tuple[str, Replay]]) -> tuple[PolicyRun, ...]:
    first = results[0][1].tokens_per_s
    return tuple(PolicyRun(name, result, result.tokens_per_s / first) for name, result in results)


@dataclass(frozen=True, slots=True)
class BlockSizeRun:
    """The trace with blocks of `block_size` tokens on the same KV memory."""

    block_size: int
    result: Replay


def sweep_block_sizes(
    setup: Setup, arrivals: Sequence[Arrival], sizes: Sequence[int] = (8, 16, 32, 64, 128, 256)
) -> tuple[BlockSizeRun, ...]:
    """Larger blocks waste more of their last one, so fewer sequences run together."""
    return tuple(BlockSizeRun(size, setup.run(arrivals, size)) for size in sizes)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """The trace with prompts computed whole, or in chunks of what a step may compute."""

    name: str
    result: Replay


def compare_chunking(
    setup: Setup, arrivals: Sequence[Arrival], budgets: Sequence[int] = (2048, 512)
) -> tuple[ChunkRun, ...]:
    """A long prompt computed whole holds up every answer; in chunks it does not (Sarathi-Serve, OSDI 2024)."""
    whole = setup.run(arrivals, chunked_prefill=False, max_num_batched_tokens=setup.context)
    chunked = [ChunkRun(str(b), setup.run(arrivals, max_num_batched_tokens=b)) for b in budgets]
    return (ChunkRun("whole prompts", whole), *chunked)
