"""kvledger's own rules: the pool that `serve` builds, by the very function that builds it (`plan.pool`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.errors import ConfigError
from kvledger.plan.pool import RUNTIME_BYTES, local_pool, weights_in_memory
from kvledger.plan.profiles.base import Allocation, Band, BlockGroup, Pool, Setup, Term, required
from kvledger.spec.config import CacheConfig, EngineConfig, kv_dtype_meant
from kvledger.spec.device import DeviceSpec
from kvledger.spec.model import ModelSpec
from kvledger.units import GIB


@dataclass(frozen=True, slots=True)
class KvledgerProfile:
    """This package. One process, no tensor parallelism."""

    version: str = "0.1"
    name: str = "kvledger"

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """See `Profile.allocate`."""
        if setup.tp > 1 or setup.pp > 1:
            raise ConfigError(f"kvledger runs on one machine: TP = {setup.tp}, PP = {setup.pp}; use 1 (or replicas)")
        if setup.available_bytes is None:
            required(device, "local")
        total = device.memory_bytes if device else 0
        length = setup.max_model_len or model.max_context
        plan = local_pool(model, _config(setup), total, total)
        groups = tuple(BlockGroup((g,)) for g in plan.layout.groups)
        # one token in flight: the scheduler cuts a chunk to the blocks that are free, so windows need no more
        pool = Pool("blocks", groups, plan.num_blocks, plan.layout.block_bytes, in_flight=1)
        weights = weights_in_memory(model) if setup.weights_bytes is None else setup.weights_bytes
        terms = (
            Term("weights", Band.exactly(weights), "computed", "as stored in the file"),
            Term("runtime", Band(RUNTIME_BYTES // 2, RUNTIME_BYTES, RUNTIME_BYTES), "assumed", "kernels and buffers"),
        )
        tokens, concurrency = plan.kv_tokens, pool.concurrency(length)
        line = f"KV pool: {plan.num_blocks} blocks of {pool.block_size} tokens, {plan.pool_bytes / GIB:.2f} GiB"
        return Allocation(
            self.name, self.version, length, total, total, terms, Band.exactly(plan.budget_bytes), (pool,), tokens,
            concurrency, (line,), (f"budget: {plan.reason}",),
        )  # fmt: skip


def _config(setup: Setup) -> EngineConfig:
    cache = CacheConfig(setup.block_size, kv_dtype_meant(setup.kv_dtype), setup.available_bytes)
    return EngineConfig(cache=cache, max_model_len=setup.max_model_len)
