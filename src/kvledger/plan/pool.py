"""From a byte budget to a block pool. The plan prints these numbers and the engine builds exactly this pool.

Errors name no option: whoever asks may be a command that has it, one that has not, or a program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvledger.errors import DoesNotFit
from kvledger.spec.config import EngineConfig, SchedulerConfig
from kvledger.spec.kv import KVLayout
from kvledger.spec.kv_computed import kind_of
from kvledger.spec.model import ModelSpec
from kvledger.units import MIB, cdiv, format_bytes

RUNTIME_BYTES = 350 * MIB  # interpreter, compiled kernels, buffers of a step: the bound the benchmarks hold us to


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool of `num_blocks` equal blocks over `layout`; `reason` says where the budget came from."""

    layout: KVLayout
    budget_bytes: int
    num_blocks: int
    reason: str

    @property
    def pool_bytes(self) -> int:
        """Bytes really allocated: blocks × block bytes."""
        return self.num_blocks * self.layout.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Longest single sequence that could lie in the pool with a block for each of its tokens."""
        return self.longest(self.num_blocks * self.layout.block_size)

    def longest(self, most: int) -> int:
        """Longest single sequence, of at most `most` tokens, that the pool could serve."""
        return self.layout.longest_in(self.num_blocks, most)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that one request holds; the scheduler cuts a chunk to the blocks that are free."""
        return self.layout.blocks_for(num_tokens)

    def requests_at(self, context: int, in_flight: int = 1) -> int:
        """Sequences of `context` tokens that fit side by side, block rounding included."""
        return self.num_blocks // max(1, self.layout.blocks_for(context, in_flight))


def plan_pool(layout: KVLayout, budget_bytes: int, reason: str = "given") -> PoolPlan:
    """The pool that `budget_bytes` buy. Raises DoesNotFit when not even one block fits."""
    num_blocks = layout.blocks_in(budget_bytes)
    if num_blocks < 1:
        need = layout.block_bytes
        raise DoesNotFit(
            f"{format_bytes(budget_bytes)} of KV memory hold no block: one block of {layout.block_size} tokens needs "
            f"{format_bytes(need)}; nearest that fits: {cdiv(need, MIB)}MiB of KV memory",
            need - budget_bytes,
        )
    return PoolPlan(layout, budget_bytes, num_blocks, reason)


def auto_budget(total_bytes: int, available_bytes: int, weights_bytes: int) -> tuple[int, str]:
    """KV bytes when nobody says: a quarter of the memory, or half of what weights and run time leave if less.

    Returns (bytes, reason). Never more than half of what is free, so that the machine does not swap.
    """
    quarter = total_bytes // 4
    half_left = max(0, available_bytes - weights_bytes - RUNTIME_BYTES) // 2
    if quarter <= half_left:
        return quarter, f"a quarter of {format_bytes(total_bytes)} of memory"
    return half_left, f"half of the {format_bytes(2 * half_left)} that weights and run time leave free"


def weights_in_memory(model: ModelSpec) -> int:
    """Bytes that the weights of `model` take in this machine's memory: the file's own, else two per weight."""
    return model.weight_bytes if model.weight_bytes is not None else 2 * model.num_params


def check_memory(model: ModelSpec, config: EngineConfig, total_bytes: int) -> None:
    """Raises DoesNotFit where weights, or the pool that was asked for beside them, are more than this machine has."""
    weights, asked = weights_in_memory(model), config.cache.kv_memory_bytes or 0
    missing = weights + asked - total_bytes
    if missing <= 0:
        return
    has = f"this machine's {format_bytes(total_bytes)} of memory"
    if weights >= total_bytes:
        raise DoesNotFit(f"{format_bytes(weights)} of weights are more than {has}", missing)
    raise DoesNotFit(
        f"{format_bytes(asked)} for the KV pool and {format_bytes(weights)} of weights are more than {has}; "
        f"nearest that fits: {(total_bytes - weights) // MIB}MiB of KV memory",
        missing,
    )


def local_pool(model: ModelSpec, config: EngineConfig, total_bytes: int, available_bytes: int) -> PoolPlan:
    """The pool of this machine: `plan --device local` prints it and `serve` builds it by this call alone.

    `total_bytes` and `available_bytes` are `data.host.host_memory()`, read before any weights are loaded. Raises
    DoesNotFit, and ConfigError or UnsupportedModel where no kernel computes with such a cache.
    """
    layout = model.kv_layout(config.cache.kv_dtype, config.cache.tokens_per_block)
    kind_of(layout)
    if config.cache.kv_memory_bytes is not None:
        plan = plan_pool(layout, config.cache.kv_memory_bytes, "as given")
    else:
        plan = plan_pool(layout, *auto_budget(total_bytes, available_bytes, weights_in_memory(model)))
    return _capped(plan, config.max_model_len or model.max_context, config.sched)


def _capped(plan: PoolPlan, context: int, sched: SchedulerConfig) -> PoolPlan:
    """No more blocks than the allowed sequences can hold at their full length."""
    most = sched.max_num_seqs * plan.layout.blocks_for(context, sched.max_num_batched_tokens)
    if plan.num_blocks <= most:
        return plan
    reason = f"{plan.reason}; {sched.max_num_seqs} sequences of {context} tokens can use {most} blocks of it"
    return replace(plan, num_blocks=most, reason=reason)
