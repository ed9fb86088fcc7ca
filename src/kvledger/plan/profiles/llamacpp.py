"""llama.cpp's rules: no pages; `--parallel` sequences of `--ctx-size` cells each, reserved at start.

Full layers get a cell per token, window layers min(context, window + ubatch) rounded up to 256 cells, recurrent layers
one state, per sequence. The margin of `--fit` (1 GiB) and the compute buffer stay free. A TP of n means n devices that
split the layers. Cells, rounding and types are exact; the compute buffer is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from kvledger.plan.profiles.overhead import cuda_bytes, forward_bytes
from kvledger.plan.profiles.sglang import key_bytes
from kvledger.plan.profiles.vllm import draft_specs
from kvledger.plan.profiles.vllm_groups import without_window
from kvledger.plan.profiles.weights import stage_weights
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import CacheSpec, ChunkedKV, KVStorage, LayerGroup, WindowKV
from kvledger.spec.model import ModelSpec
from kvledger.units import GIB, MIB, cdiv, format_bytes

CELLS = 256  # caches are rounded up to this many
UBATCH = 512
FIT_MARGIN = 1 * GIB  # what --fit leaves free


@dataclass(frozen=True, slots=True)
class LlamaCppProfile:
    """llama.cpp at `version` (a build such as b9000)."""

    version: str = "b9000"
    name: str = "llama.cpp"

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """See `Profile.allocate`. As many sequences as fit, or `max_num_seqs` of them."""
        length = setup.max_model_len or model.max_context
        ubatch = setup.max_num_batched_tokens or UBATCH
        groups = cache_groups(model, setup, ubatch)
        per_sequence = [(g, g.blocks_for(length, ubatch + 1)) for g in groups]
        need = sum(g.block_bytes * n for g, n in per_sequence)
        budget, terms, available = _budget(model, device, setup, ubatch)
        count = available.mid // need
        if setup.max_num_seqs:
            count = min(count, setup.max_num_seqs)
        if count < 1:
            raise DoesNotFit(
                f"one sequence of {length:,} cells needs {format_bytes(need)}, llama.cpp finds "
                f"{left_for_kv(available.mid)}: {format_bytes(need - available.mid)} are missing; "
                "try a smaller --ctx-size or --cache-type-k q8_0",
                need - available.mid,
            )
        pools = tuple(Pool(_NAMES[g.kind], (g,), count * n, g.block_bytes, ubatch + 1) for g, n in per_sequence)
        total, cells = cuda_bytes(device) if device else 0, count * cdiv(length, CELLS) * CELLS
        return Allocation(
            self.name, self.version, length, total, budget, terms, available, pools, cells, float(count),
            tuple(_line(p, count) for p in pools), tuple(_reasons(pools, count)),
        )  # fmt: skip


_NAMES = {
    "full": "full cells",
    "latent": "full cells",
    "window": "SWA cells",
    "chunked": "SWA cells",
    "state": "states",
}


def cache_groups(model: ModelSpec, setup: Setup, ubatch: int) -> list[BlockGroup]:
    """One group per kind of cache, blocks of 256 cells; full caches first."""
    storage, plain = _storage(model, setup.kv_dtype), _storage(model, "f16")
    specs: list[CacheSpec | None] = [x.cache for x in model.layers]
    specs += draft_specs(specs, setup.draft_layers)
    found: dict[str, dict[CacheSpec, list[int]]] = {}
    for index, spec in enumerate(specs):
        if spec is None:
            continue
        kept = spec if setup.hybrid else without_window(spec)
        kept = (
            WindowKV(kept.num_kv_heads, kept.key_dim, kept.value_dim, kept.chunk)
            if isinstance(kept, ChunkedKV)
            else kept
        )
        found.setdefault(kept.kind, {}).setdefault(kept, []).append(index)
    groups = []
    for kind in sorted(found, key=("full", "latent", "window", "state").index):
        own = plain if kind == "window" and storage != plain else storage  # windows stay f16 since #21277
        parts = tuple(LayerGroup(s, tuple(layers), own, CELLS) for s, layers in found[kind].items())
        groups.append(BlockGroup(parts, extra_blocks=-1 if kind == "window" else 0))
    return groups


def _as_window(spec: CacheSpec) -> CacheSpec:
    """Chunked attention lives in the SWA cache, with the chunk as window."""
    if isinstance(spec, ChunkedKV):
        return WindowKV(spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.chunk)
    return spec


def _storage(model: ModelSpec, name: str) -> KVStorage:
    return KVStorage.of("fp16" if name == "auto" else name)


def _budget(
    model: ModelSpec, device: DeviceSpec | None, setup: Setup, ubatch: int
) -> tuple[int, tuple[Term, ...], Band]:
    if setup.available_bytes is not None:
        return 0, (), Band.exactly(setup.available_bytes)
    device = required(device, "rtx-4090")
    single = replace(setup, tp=1, pp=1)
    weights = stage_weights(model, single)[0]
    shared = Term("weights", Band(*(b // setup.tp for b in (weights.size.low, weights.size.mid, weights.size.high))),
                  weights.basis, weights.note)  # fmt: skip
    logits = 4 * ubatch * model.vocab_size
    buffers = int(logits + 2 * forward_bytes(model, 1, ubatch)) + 64 * MIB
    compute = Term(
        "activation", Band(buffers // 2, buffers, 2 * buffers), "assumed", f"compute buffer of {ubatch} tokens"
    )
    context = Term("non_torch", Band(200 * MIB, 400 * MIB, 700 * MIB), "assumed", "device context and libraries")
    total = cuda_bytes(device)
    budget = int(total * setup.memory_fraction) if setup.memory_fraction else total - FIT_MARGIN
    terms = (shared, compute, context)
    return budget, terms, remaining(budget, terms)


def _line(pool: Pool, sequences: int) -> str:
    size, parts = pool.pool_bytes / MIB, pool.groups[0].parts
    layers, seqs = pool.groups[0].num_layers, f"{sequences}/{sequences} seqs"
    if pool.name == "states":
        return f"llama_memory_recurrent: size = {size:.2f} MiB ({pool.num_blocks} cells, {layers} layers, {seqs})"
    cells = pool.num_blocks * pool.block_size // sequences
    keys = sum(key_bytes(p) for p in parts) * pool.num_blocks / MIB
    key, value = parts[0].storage.key.name, parts[0].storage.value.name
    return (
        f"llama_kv_cache: size = {size:.2f} MiB ({cells} cells, {layers} layers, {seqs}), "
        f"K ({_GGML.get(key, key)}): {keys:.2f} MiB, V ({_GGML.get(value, value)}): {size - keys:.2f} MiB"
    )


_GGML = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


def _reasons(pools: tuple[Pool, ...], count: int) -> list[str]:
    reasons = [f"{count} sequences (--parallel) reserve their whole context at start; a short request frees nothing"]
    windows = [p for p in pools if p.name == "SWA cells"]
    if windows:
        cells = windows[0].num_blocks * CELLS // count
        reasons.append(f"window layers keep {cells:,} cells per sequence: window and one ubatch, rounded up to {CELLS}")
    return reasons
