"""TensorRT-LLM's rules: after weights, engine buffers and a warm-up, a fraction of what is free becomes blocks.

blocks of 32 tokens (PyTorch backend; 64 with a compiled engine before 1.0), `free_gpu_memory_fraction` 0.9. Layers of
different window have pools of their own, memory shared in proportion to bytes per token. Buffers are an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.errors import DoesNotFit
from kvledger.plan.profiles.base import (
    Allocation,
    Band,
    BlockGroup,
    Pool,
    Setup,
    Term,
    left_for_kv,
    parse_version,
    remaining,
    required,
)
from kvledger.plan.profiles.overhead import cuda_bytes, forward_bytes
from kvledger.plan.profiles.vllm import draft_specs, pipeline_stages
from kvledger.plan.profiles.vllm_groups import without_window
from kvledger.plan.profiles.weights import stage_weights
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import CacheSpec, KVStorage, LayerGroup, StateKV
from kvledger.spec.model import ModelSpec
from kvledger.units import GIB, format_bytes

FREE_FRACTION = 0.9
MAX_TOKENS = 8192  # max_num_tokens
MAX_BATCH = 2048


@dataclass(frozen=True, slots=True)
class TensorRtProfile:
    """TensorRT-LLM at `version`."""

    version: str = "1.0"
    name: str = "tensorrt-llm"

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """See `Profile.allocate`."""
        length = setup.max_model_len or model.max_context
        page = setup.block_size or (32 if parse_version(self.version) >= (1, 0, 0) else 64)
        groups = window_groups(model, setup, page)
        budget, terms, available = _budget(model, device, setup)
        states = [g for g in groups if g.kind == "state"]
        batch = setup.max_num_seqs or MAX_BATCH
        kept = available.mid - sum(g.block_bytes * batch for g in states)
        paged = [g for g in groups if g.kind != "state"]
        per_token = sum(g.block_bytes for g in paged)
        if not paged or kept < per_token:
            need = per_token + available.mid - kept
            raise DoesNotFit(
                f"TensorRT-LLM finds {left_for_kv(available.mid)} for KV and needs {format_bytes(need)} for one block "
                f"and the states of {batch} requests; lower max_batch_size or use more devices",
                need - available.mid,
            )
        in_flight = setup.max_num_batched_tokens or MAX_TOKENS
        # every pool gets memory in proportion to its bytes per token, so all have the same number of blocks
        pools = [Pool(g.kind, (g,), kept // per_token, g.block_bytes, in_flight) for g in paged]
        pools += [Pool("states", (g,), batch, g.block_bytes) for g in states]
        tokens = pools[0].num_blocks * page
        concurrency = min(p.concurrency(length) for p in pools)
        total = cuda_bytes(device) if device else 0
        return Allocation(
            self.name, self.version, length, total, budget, terms, available, tuple(pools), tokens, concurrency,
            tuple(_line(p) for p in pools if p.name != "states"), tuple(_reasons(pools)),
        )  # fmt: skip


def window_groups(model: ModelSpec, setup: Setup, page: int) -> list[BlockGroup]:
    """Groups of the fullest stage, one per window; heads must be divisible or are replicated (`CacheSpec.shard`)."""
    storage = KVStorage.of(model.activation_dtype if setup.kv_dtype == "auto" else setup.kv_dtype)
    specs: list[CacheSpec | None] = [None if x.cache is None else x.cache.shard(setup.tp) for x in model.layers]
    specs += draft_specs(specs, setup.draft_layers)
    stages = pipeline_stages(model.num_layers, setup.pp, setup.draft_layers)
    return max((_stage_groups(specs, s, storage, page, setup.hybrid) for s in stages),
               key=lambda groups: sum(g.block_bytes for g in groups if g.kind != "state"))  # fmt: skip


def _stage_groups(
    specs: list[CacheSpec | None], stage: range, storage: KVStorage, page: int, hybrid: bool
) -> list[BlockGroup]:
    found: dict[tuple[str, int], dict[CacheSpec, list[int]]] = {}
    for i in stage:
        spec = specs[i]
        if spec is None:
            continue
        kept = spec if hybrid and spec.kind != "chunked" else without_window(spec)
        key = ("state" if isinstance(kept, StateKV) else "paged", getattr(kept, "window", 0))
        found.setdefault(key, {}).setdefault(kept, []).append(i)
    ordered = sorted(found.items(), key=lambda item: (item[0][0] == "state", item[0][1]))
    return [
        BlockGroup(tuple(LayerGroup(s, tuple(layers), storage, page) for s, layers in parts.items()))
        for _, parts in ordered
    ]


def _budget(model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> tuple[int, tuple[Term, ...], Band]:
    if setup.available_bytes is not None:
        return 0, (), Band.exactly(setup.available_bytes)
    device = required(device)
    total = cuda_bytes(device)
    weights = max(stage_weights(model, setup), key=lambda t: t.size.mid)
    peak = int(forward_bytes(model, setup.tp, setup.max_num_batched_tokens or MAX_TOKENS))
    buffers = Term("activation", Band(peak // 2, peak, 2 * peak), "assumed", "peak of the warm-up pass")
    context = int((0.7 if setup.tp == 1 else 1.7) * GIB)
    runtime = Term("non_torch", Band(context // 2, context, 2 * context), "assumed", "context, engine and NCCL buffers")
    terms, fraction = (weights, buffers, runtime), setup.memory_fraction or FREE_FRACTION
    free = remaining(total, terms)
    return total, terms, Band(*(int(fraction * size) for size in (free.low, free.mid, free.high)))


def _line(pool: Pool) -> str:
    tokens = pool.num_blocks * pool.block_size
    return f"[MemUsageChange] Allocated {pool.pool_bytes / GIB:.2f} GiB for max tokens in paged KV cache ({tokens})."


def _reasons(pools: list[Pool]) -> list[str]:
    reasons = ["a fraction of the memory left after warm-up, not of the total"]
    if len(pools) > 1:
        reasons.append(f"{len(pools)} pools, sized in proportion to bytes per token, not to what windows can use")
    return reasons
