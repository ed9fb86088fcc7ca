"""The answer to a `Query` in bare numbers: memory, blocks, requests, speed. What plans, levers and the search share.

Memory follows the engine's profile, or for kvledger on this machine the very function that builds its pool. Figures
with their accounts are made of this in `plan.planner`; nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvledger.data.devices import LOCAL
from kvledger.data.host import host_memory
from kvledger.errors import ConfigError, DoesNotFit
from kvledger.plan.concurrency import Blocks, requests_in
from kvledger.plan.cost import cost_per_million
from kvledger.plan.explain import Basis
from kvledger.plan.pool import RUNTIME_BYTES, check_memory, local_pool, weights_in_memory
from kvledger.plan.profiles.base import Allocation, Band, Term, get_profile
from kvledger.plan.profiles.vllm import storage_of
from kvledger.plan.query import Query, check, unsplit_attention
from kvledger.plan.timing import Speed, Timing, rank_weights, speed
from kvledger.spec.config import CacheConfig, EngineConfig, SchedulerConfig, kv_dtype_meant
from kvledger.spec.kv import KVLayout, KVStorage
from kvledger.spec.model import ModelSpec, pipeline_stages
from kvledger.spec.weights import WeightBytes, stage_weights
from kvledger.units import format_bytes

MOST_SEQS = 256  # requests timed together where neither the person nor the engine's default says


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A pool with another number of blocks."""

    pool: Blocks
    num_blocks: int

    def blocks_for(self, num_tokens: int) -> int:
        return self.pool.blocks_for(num_tokens)


@dataclass(frozen=True, slots=True)
class Memory:
    """One device's memory: `terms` taken off `budget_bytes`, the rest in `pools`; as the engine would say it."""

    total_bytes: int
    budget_bytes: int
    terms: tuple[Term, ...]
    available: Band
    pools: tuple[Blocks, ...]
    num_blocks: int
    block_size: int
    block_bytes: int
    pool_bytes: int
    kv_tokens: int
    max_concurrency: float
    max_num_seqs: int
    lines: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on this device."""
        return sum(t.size.mid for t in self.terms if t.name == "weights")

    @property
    def basis(self) -> Basis:
        """What the blocks rest on: `assumed` where overheads are fitted or assumed."""
        return "assumed" if any(t.basis in ("assumed", "fitted") and t.size.mid for t in self.terms) else "derived"

    @property
    def dominant(self) -> Term | None:
        """The term whose uncertainty makes most of the band; None where everything is exact."""
        widest = max(self.terms, key=lambda t: t.size.spread, default=None)
        return widest if widest is not None and widest.size.spread else None

    def pools_at(self, kv_bytes: int) -> tuple[Blocks, ...]:
        """The pools as they would be with `kv_bytes` instead of the likeliest budget."""
        share = kv_bytes / self.available.mid if self.available.mid else 1.0
        return tuple(_Scaled(pool, int(pool.num_blocks * share)) for pool in self.pools)

    @property
    def overhead_bytes(self) -> int:
        """What neither weights nor KV take."""
        return sum(t.size.mid for t in self.terms if t.name != "weights")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A query answered. `requests` and `speed` are one replica's, all its ranks together."""

    query: Query
    memory: Memory
    timing: Timing
    requests: int
    speed: Speed
    warnings: tuple[str, ...]

    @property
    def rank_layout(self) -> KVLayout:
        """The KV layout of the device that keeps most: of one TP rank, of the pipeline stage with the most bytes."""
        query = self.query
        if query.pp == 1:
            return self.timing.layout
        specs = [None if x.cache is None else x.cache.shard(query.tp) for x in query.model.layers]
        storage, size = KVStorage.of(kv_dtype_of(query)), self.timing.layout.block_size
        stages = [specs[r.start : r.stop] for r in pipeline_stages(query.model.num_layers, query.pp)]
        layouts = [KVLayout.of(stage, storage, size) for stage in stages if any(stage)]
        return max(layouts, key=lambda layout: layout.bytes_for(query.context))

    @property
    def requests_band(self) -> tuple[int, int]:
        """Requests of all replicas at the least and the most KV memory that is likely."""
        memory, query = self.memory, self.query
        ends = (memory.pools_at(size) for size in (memory.available.low, memory.available.high))
        low, high = (requests_in(pools, query.context, query.prefix, query.hit_rate) for pools in ends)
        return query.dp * query.ranks * low, query.dp * query.ranks * high

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all replicas."""
        return self.query.dp * self.speed.tokens_per_s

    @property
    def total_requests(self) -> int:
        """Requests of all replicas."""
        return self.query.dp * self.requests

    @property
    def price_per_hour(self) -> float | None:
        """Dollars per hour of all devices."""
        query = self.query
        price = query.price_per_hour if query.price_per_hour is not None else query.device.price_per_hour
        return None if price is None else price * query.num_devices

    @property
    def cost_per_million(self) -> float | None:
        """Dollars per million output tokens."""
        price = self.price_per_hour
        return None if price is None else cost_per_million(price, 1, self.tokens_per_s)


def is_local(query: Query) -> bool:
    """Whether the plan is for kvledger's own engine on this machine."""
    return query.device.name == LOCAL and query.engine == "kvledger"


def memory_of(query: Query) -> Memory:
    """The device's memory as the engine would divide it. Raises DoesNotFit, ConfigError, UnknownName."""
    if is_local(query):
        return _local_memory(query)
    profile = get_profile(query.engine, query.engine_version)
    model = unsplit_attention(query.model) if query.dp_attention else query.model
    found = profile.allocate(model, query.device, query.setup())
    return _of_allocation(found if query.kv_memory_bytes is None else _with_weights(found, model, query), query)


def _with_weights(found: Allocation, model: ModelSpec, query: Query) -> Allocation:
    """An allocation of KV memory that was given: engines then ask nothing else. Raises DoesNotFit beyond the device."""
    weights = max(stage_weights(model, query.scheme, query.tp, query.pp), key=lambda stage: stage.total).total
    total = found.total_bytes or query.device.memory_bytes
    missing = weights + found.kv_bytes - total
    if missing > 0:
        raise DoesNotFit(
            f"{format_bytes(found.kv_bytes)} of KV and {format_bytes(weights)} of weights are more than the "
            f"{format_bytes(total)} of {query.device.name}: {format_bytes(missing)} are missing; "
            f"nearest that fits: {max(0, total - weights) >> 20}MiB of KV memory",
            missing,
        )
    term = Term("weights", Band.exactly(weights), "computed", f"spec.weights, {query.scheme}")
    return replace(
        found, terms=(term,), total_bytes=total, reasons=(*found.reasons, "KV memory as given: no overheads")
    )


def _of_allocation(found: Allocation, query: Query) -> Memory:
    return Memory(
        total_bytes=found.total_bytes,
        budget_bytes=found.budget_bytes,
        terms=found.terms,
        available=found.available,
        pools=found.pools,
        num_blocks=found.num_blocks,
        block_size=found.block_size,
        block_bytes=found.block_bytes,
        pool_bytes=found.kv_bytes,
        kv_tokens=found.kv_tokens,
        max_concurrency=found.max_concurrency,
        max_num_seqs=query.max_num_seqs or MOST_SEQS,
        lines=found.lines,
        reasons=found.reasons,
    )


def engine_config(query: Query) -> EngineConfig:
    """What `kvledger serve` would be told for this query."""
    sched = SchedulerConfig()
    return EngineConfig(
        cache=CacheConfig(query.block_size, kv_dtype_of(query), query.kv_memory_bytes),
        sched=SchedulerConfig(
            query.max_num_batched_tokens or sched.max_num_batched_tokens, query.max_num_seqs or sched.max_num_seqs
        ),
    )


def _local_memory(query: Query) -> Memory:
    if query.tp * query.pp > 1:
        raise ConfigError(f"kvledger runs on one machine: TP = {query.tp}, PP = {query.pp}; use 1")
    config, (total, available) = engine_config(query), host_memory()
    check_memory(query.model, config, total)
    pool = local_pool(query.model, config, total, available)
    weights = Term("weights", Band.exactly(weights_in_memory(query.model)), "computed", "as the file stores them")
    runtime = Term("run time", Band.exactly(RUNTIME_BYTES), "given", "interpreter, kernels, buffers: the bound kept")
    return Memory(
        total_bytes=total,
        budget_bytes=total,
        terms=(weights, runtime),
        available=Band.exactly(pool.budget_bytes),
        pools=(pool,),
        num_blocks=pool.num_blocks,
        block_size=pool.layout.block_size,
        block_bytes=pool.layout.block_bytes,
        pool_bytes=pool.pool_bytes,
        kv_tokens=pool.kv_tokens,
        max_concurrency=pool.num_blocks / max(1, pool.blocks_for(query.context)),
        max_num_seqs=config.sched.max_num_seqs,
        reasons=(f"KV memory: {pool.reason}",),
    )


def evaluate(query: Query, memory: Memory | None = None, timing: Timing | None = None) -> Outcome:
    """Answer `query`; `memory` and `timing` are taken from a caller that has them already.

    Raises ConfigError for what cannot be meant, DoesNotFit where weights or one request find no room.
    """
    warnings = check(query)
    memory = memory or memory_of(query)
    requests = query.ranks * requests_in(memory.pools, query.context, query.prefix, query.hit_rate)
    if requests < 1:
        raise too_long(query, memory)
    timing = timing or timing_of(query)
    batch = query.batch or min(requests, query.ranks * memory.max_num_seqs)
    if batch > requests:
        warnings += (f"a batch of {batch:,} does not fit: {requests:,} requests of {query.context:,} tokens do",)
    return Outcome(
        query, memory, timing, requests, speed(timing, batch, query.context, query.output, query.cached), warnings
    )


def timing_of(query: Query, layout: KVLayout | None = None, weights: WeightBytes | None = None) -> Timing:
    """Step times of one replica of `query`; `layout` and `weights` of a TP rank where the caller has them already."""
    layout = layout or query.model.kv_layout(kv_dtype_of(query), 16, query.tp)
    model = unsplit_attention(query.model) if query.dp_attention else query.model
    weights = weights or rank_weights(model, query.scheme, query.tp)
    return Timing(
        query.model, query.device, layout, weights, query.scheme, query.tp, query.pp, query.efficiency, query.ranks
    )


def kv_dtype_of(query: Query) -> str:
    """The KV type meant: `auto` is kvledger's default under kvledger, the type of the activations elsewhere."""
    if query.engine == "kvledger":
        return kv_dtype_meant(query.kv_dtype)
    if query.engine == "vllm":
        return storage_of(query.model, query.kv_dtype).name
    return query.model.activation_dtype if query.kv_dtype == "auto" else query.kv_dtype


def too_long(query: Query, memory: Memory) -> DoesNotFit:
    """The error that not even one request fits, with what is missing."""
    pool = memory.pools[0]
    need = pool.blocks_for(query.context)
    missing = max(0, need - pool.num_blocks) * memory.block_bytes
    return DoesNotFit(
        f"one request of {query.context:,} tokens needs {need:,} blocks of {format_bytes(memory.block_bytes)} and the "
        f"pool has {pool.num_blocks:,}: {format_bytes(missing)} are missing; "
        f"the longest that fits is {longest(memory.pools):,} tokens",
        missing,
    )


def longest(pools: Sequence[Blocks], most: int = 1 << 32) -> int:
    """Longest single request that `pools` hold (0: none)."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        fits = all(p.blocks_for(middle) <= p.num_blocks for p in pools)
        low, high = (middle, high) if fits else (low, middle)
    return low
