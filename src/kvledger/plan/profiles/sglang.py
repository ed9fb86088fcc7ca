"""SGLang's rules: no profiling pass, a fixed share of the memory free at start, separate pools by kind of layer.

KV bytes = free after loading − (1 − mem_fraction_static) × free at start. Pages of one token by default. Full layers,
window layers (`swa_full_tokens_ratio` tokens per full token) and states (`mamba_full_memory_ratio` bytes per KV byte)
each have a pool of their own. Read in model_runner_kv_cache_mixin.py and server_args.py (0.5.x).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    remaining,
    required,
)
from kvledger.plan.profiles.overhead import cuda_bytes
from kvledger.plan.profiles.vllm import draft_specs, pipeline_stages, storage_of
from kvledger.plan.profiles.vllm_groups import shard_spec, without_window
from kvledger.plan.profiles.weights import stage_weights
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import CacheSpec, FullKV, KVStorage, LatentKV, LayerGroup, StateKV
from kvledger.spec.model import ModelSpec
from kvledger.units import GIB, MIB, format_bytes

WINDOW_RATIO = 0.8  # swa_full_tokens_ratio
STATE_RATIO = 0.9  # mamba_full_memory_ratio
STATES_PER_REQUEST = 3  # a running request and two prefix-cache checkpoints

# Device memory below which (chunked prefill tokens, largest CUDA graph batch) are chosen: server_args, 0.5.
_STEPS = ((20, 2048, 8), (35, 2048, 24), (60, 4096, 32), (90, 8192, 256), (100, 8192, 256), (160, 8192, 256))


@dataclass(frozen=True, slots=True)
class SglangProfile:
    """SGLang at `version`."""

    version: str = "0.5"
    name: str = "sglang"

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """See `Profile.allocate`. The first pool is that of the full layers."""
        length = setup.max_model_len or model.max_context
        budget, terms, available = _budget(model, device, setup)
        kinds = _layers(model, setup)
        pools = share(available.mid, kinds, setup.prefix_caching)
        if pools[0].num_blocks < 1:
            raise DoesNotFit(
                f"SGLang finds {left_for_kv(available.mid)} for KV, less than one token of "
                f"{format_bytes(pools[0].block_bytes)}; raise --mem-fraction-static or use more devices",
                pools[0].block_bytes - available.mid,
            )
        total = cuda_bytes(device) if device else 0
        concurrency = min(p.concurrency(length) for p in pools)
        return Allocation(
            self.name, self.version, length, total, budget, terms, available, pools, pools[0].num_blocks, concurrency,
            _lines(pools), tuple(_reasons(pools)),
        )  # fmt: skip


def static_fraction(device: DeviceSpec, setup: Setup) -> float:
    """mem_fraction_static where the user gives none: what prefill and graphs are thought to need stays out."""
    if setup.memory_fraction:
        return setup.memory_fraction
    total = device.memory_bytes / GIB
    chunk, graphs = next(((c, g) for limit, c, g in _STEPS if total < limit), (16384, 512))
    if setup.tp >= 4 and graphs >= 24:
        graphs = {24: 80, 32: 160}.get(graphs, 512)
    reserved = 512 + 1.5 * max(setup.max_num_batched_tokens or chunk, 2048) + 2 * graphs
    reserved += setup.tp * setup.pp / 8 * 1024
    if total > 60:
        reserved = max(reserved, 10 * 1024)
    return round(1 - reserved * MIB / device.memory_bytes, 3)


def _budget(model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> tuple[int, tuple[Term, ...], Band]:
    if setup.available_bytes is not None:
        return 0, (), Band.exactly(setup.available_bytes)
    device = required(device)
    total, fraction = cuda_bytes(device), static_fraction(device, setup)
    context = int((0.6 if setup.tp == 1 else 1.5) * GIB)
    runtime = Term("non_torch", Band(context // 2, context, 2 * context), "assumed", "context, NCCL and libraries")
    weights = max(stage_weights(model, setup), key=lambda t: t.size.mid)
    budget = int(total * fraction)
    terms = (weights, runtime)
    return budget, terms, remaining(budget, terms)


def _layers(model: ModelSpec, setup: Setup) -> dict[str, list[LayerGroup]]:
    """Layers of the stage that keeps most, by pool: `full`, `window`, `state`."""
    storage = storage_of(model, setup.kv_dtype)
    specs: list[CacheSpec | None] = [None if x.cache is None else shard_spec(x.cache, setup.tp) for x in model.layers]
    specs += draft_specs(specs, setup.draft_layers)
    if not setup.hybrid:
        specs = [None if s is None else without_window(s) for s in specs]
    stages = pipeline_stages(model.num_layers, setup.pp, setup.draft_layers)
    return max((_by_pool(specs, stage, storage, setup.block_size or 1) for stage in stages), key=_weight)


def _by_pool(
    specs: Sequence[CacheSpec | None], stage: range, storage: KVStorage, page: int
) -> dict[str, list[LayerGroup]]:
    found: dict[CacheSpec, list[int]] = {}
    for i in stage:
        spec = specs[i]
        if spec is not None:
            found.setdefault(spec, []).append(i)
    pools: dict[str, list[LayerGroup]] = {}
    for spec, layers in found.items():
        # chunked layers go to the full pool: SGLang frees nothing behind a chunk
        kind = {"window": "window", "state": "state"}.get(spec.kind, "full")
        pools.setdefault(kind, []).append(LayerGroup(without_chunk(spec), tuple(layers), storage, page))
    return pools


def without_chunk(spec: CacheSpec) -> CacheSpec:
    """Chunked layers kept as full ones; anything else unchanged."""
    return without_window(spec) if spec.kind == "chunked" else spec


def _weight(pools: dict[str, list[LayerGroup]]) -> int:
    return sum(_bytes(parts) for kind, parts in pools.items() if kind != "state")


def _bytes(parts: Sequence[LayerGroup]) -> int:
    return sum(len(p.layers) * p.page_bytes for p in parts)


def share(available: int, kinds: dict[str, list[LayerGroup]], prefix_caching: bool = True) -> tuple[Pool, ...]:
    """Deal `available` bytes out to the pools."""
    state, full, window = (kinds.get(k, []) for k in ("state", "full", "window"))
    pools: list[Pool] = []
    if state and (full or window):
        slots = int(available * STATE_RATIO / (1 + STATE_RATIO)) // _bytes(state)
        extra = STATES_PER_REQUEST - 1 if prefix_caching else 0
        pools.append(_pool("states", state, slots, extra))
        available -= (slots + 1) * _bytes(state)  # one slot more is kept for padding
    elif state:
        pools.append(_pool("states", state, available // _bytes(state), 0))
    if full and window:
        tokens = int(available / (_bytes(full) + WINDOW_RATIO * _bytes(window)))
        pools = [_pool("full", full, tokens), _pool("window", window, int(tokens * WINDOW_RATIO)), *pools]
    elif full or window:
        only = full or window
        pools.insert(0, _pool("full" if full else "window", only, max(0, available) // _bytes(only)))
    return tuple(pools)


def _pool(name: str, parts: Sequence[LayerGroup], num_pages: int, extra: int = 0) -> Pool:
    return Pool(name, (BlockGroup(tuple(parts), extra_blocks=extra),), num_pages, _bytes(parts))


def _lines(pools: Sequence[Pool]) -> tuple[str, ...]:
    return tuple(_line(p) for p in pools)


def _line(pool: Pool) -> str:
    parts = pool.groups[0].parts
    if isinstance(parts[0].spec, StateKV):
        return f"Mamba Cache is allocated. max_mamba_cache_size: {pool.num_blocks}"
    tokens = pool.num_blocks * pool.block_size
    if isinstance(parts[0].spec, LatentKV):
        size = pool.pool_bytes / GIB
        return f"KV Cache is allocated. #tokens: {tokens}, KV size: {size:.2f} GB"
    keys = sum(key_bytes(p) for p in parts) * pool.num_blocks
    values = pool.pool_bytes - keys
    return f"KV Cache is allocated. #tokens: {tokens}, K size: {keys / GIB:.2f} GB, V size: {values / GIB:.2f} GB"


def key_bytes(part: LayerGroup) -> int:
    """Bytes of the keys in one block of `part`."""
    if not isinstance(part.spec, FullKV):
        return part.page_bytes * len(part.layers)
    keys = FullKV(part.spec.num_kv_heads, part.spec.key_dim, 0)
    return len(part.layers) * keys.tile_bytes(part.block_size, part.storage)


def _reasons(pools: Sequence[Pool]) -> list[str]:
    if len(pools) == 1:
        return ["one pool, one token per page: no block is left half empty"]
    parts = ", ".join(f"{p.name} {format_bytes(p.pool_bytes)} ({p.num_blocks:,} slots)" for p in pools)
    return [f"memory is divided once, at start: {parts}; the scarcest pool decides"]
