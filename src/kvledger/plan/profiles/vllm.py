"""vLLM's rules from device memory to blocks, by version (read in 0.32; logs of 0.6 to 0.26 agree, docs/accuracy.md).

available = total × utilisation − weights − activation − non-torch (− graphs since 0.21); blocks = available ÷ bytes
per block, the least over ranks; concurrency = blocks ÷ blocks of one request of `max_model_len`.
"""

from __future__ import annotations

from collections import Counter
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
    parse_version,
    remaining,
    required,
)
from kvledger.plan.profiles.overhead import (
    FITTED,
    Batch,
    Constants,
    Version,
    activation_term,
    cuda_bytes,
    default_batch,
    vllm_terms,
)
from kvledger.plan.profiles.vllm_groups import (
    StateRules,
    block_bytes_of,
    describe,
    form_groups,
    halve_state,
    padding_layers,
    shard_spec,
    widen_state,
    without_window,
)
from kvledger.plan.profiles.weights import stage_weights
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import CacheSpec, FullKV, KVStorage, LatentKV
from kvledger.spec.model import ModelSpec
from kvledger.spec.model import pipeline_stages as model_stages
from kvledger.units import GIB, format_bytes

NEWEST = "0.32.0"
_FP8 = ("fp8", "fp8_e4m3", "fp8_ds_mla")


@dataclass(frozen=True, slots=True)
class VllmProfile:
    """vLLM at `version`."""

    version: str = NEWEST
    name: str = "vllm"
    constants: Constants = FITTED

    @property
    def _version(self) -> Version:
        return parse_version(self.version)

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """See `Profile.allocate`."""
        version = self._version
        length = setup.max_model_len or model.max_context
        batch = default_batch(device, version, setup, length)
        groups, reasons = layer_groups(model, setup, version)
        stages = pipeline_stages(model.num_layers, setup.pp, setup.draft_layers)
        budget, terms, available = self._budget(model, device, setup, batch)
        blocks = [
            available[i].mid // block_bytes_of(groups, stage) for i, stage in enumerate(stages) if _keeps(groups, stage)
        ]
        num_blocks = min(blocks)
        rank = blocks.index(num_blocks)
        in_flight = batch.num_tokens * self._batches(setup)
        pool = Pool("blocks", groups, num_blocks, block_bytes_of(groups, stages[rank]), in_flight)
        if num_blocks < 1:
            raise _no_room(pool, available[rank], setup)
        concurrency = pool.concurrency(length)
        tokens = printed_tokens(pool, concurrency, length, version, setup.dcp)
        reasons += rank_reasons(setup, rank, blocks) + padding_reasons(groups) + flight_reasons(pool, batch)
        reasons += start_reasons(pool, length)
        lines = printed_lines(available[rank].mid, pool, tokens, concurrency, length, version)
        total = cuda_bytes(device) if device else 0
        return Allocation(
            self.name, self.version, length, total, budget, terms, available[rank], (pool,), tokens, concurrency,
            lines, tuple(reasons),
        )  # fmt: skip

    def budget(self, model: ModelSpec, device: DeviceSpec, setup: Setup) -> list[Band]:
        """KV bytes of every pipeline stage, without asking whether a block fits."""
        batch = default_batch(device, self._version, setup, setup.max_model_len or model.max_context)
        return self._budget(model, device, setup, batch)[2]

    def _batches(self, setup: Setup) -> int:
        """Steps in flight: pipeline stages, and one more with asynchronous scheduling (counted in 0.32)."""
        if setup.concurrent_batches:
            return setup.concurrent_batches
        return setup.pp + 1 if self._version >= (0, 32, 0) else 1

    def _budget(
        self, model: ModelSpec, device: DeviceSpec | None, setup: Setup, batch: Batch
    ) -> tuple[int, tuple[Term, ...], list[Band]]:
        """(share of the memory, terms of the fullest stage, KV bytes of every stage)."""
        if setup.available_bytes is not None:
            return 0, (), self._printed(model, device, setup, batch)
        device = required(device)
        fraction = setup.memory_fraction or (0.92 if self._version >= (0, 32, 0) else 0.90)
        budget = int(cuda_bytes(device) * fraction)
        last = setup.pp - 1
        stages = [
            (w, *vllm_terms(model, device, setup, self._version, batch, i == last, self.constants))
            for i, w in enumerate(stage_weights(model, setup, fp4_multiple=256))
        ]
        bands = [remaining(budget, terms) for terms in stages]
        return budget, stages[min(range(len(bands)), key=lambda i: bands[i].mid)], bands

    def _printed(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup, batch: Batch) -> list[Band]:
        """KV bytes of every stage from those of the first, which the log prints: the last also samples.

        Without a device nothing is known of batches, and all stages get the same.
        """
        given = setup.available_bytes or 0
        if device is None or setup.pp == 1:
            return [Band.exactly(given)] * setup.pp
        first, last = (activation_term(model, setup, self._version, batch, h).size.mid for h in (False, True))
        return [Band.exactly(given)] * (setup.pp - 1) + [Band.exactly(given - (last - first))]


def _keeps(groups: Sequence[BlockGroup], stage: range) -> bool:
    return any(i in stage for g in groups for p in g.parts for i in p.layers)


def _no_room(pool: Pool, available: Band, setup: Setup) -> DoesNotFit:
    need = pool.block_bytes - available.mid
    hint = (
        "a higher memory fraction, more devices (--tp) or smaller weights" if setup.available_bytes is None else "more"
    )
    return DoesNotFit(
        f"vLLM finds {left_for_kv(available.mid)} for KV, less than one block of {format_bytes(pool.block_bytes)}: "
        f"{format_bytes(need)} are missing; try {hint}",
        need,
    )


# ---------------------------------------------------------------------------------------------- layers and ranks


def storage_of(model: ModelSpec, kv_dtype: str) -> KVStorage:
    """The KV type that `--kv-cache-dtype` means: `auto` follows activations; sparse MLA packs fp8 in 656 B rows.

    Activations of a float32 model are bf16, unless `--dtype` asks otherwise.
    """
    if kv_dtype == "auto":
        return KVStorage.of("bf16" if model.activation_dtype == "fp32" else model.activation_dtype)
    sparse = any(isinstance(x.cache, LatentKV) and x.cache.index_bytes for x in model.layers)
    return KVStorage.of("fp8_ds_mla" if sparse and kv_dtype in _FP8 else kv_dtype)


def default_block_size(model: ModelSpec, version: Version) -> int:
    """16; MLA kernels want 64."""
    latent = any(isinstance(x.cache, LatentKV) for x in model.layers)
    return 64 if latent and version >= (0, 8, 0) else 16


def layer_groups(model: ModelSpec, setup: Setup, version: Version) -> tuple[tuple[BlockGroup, ...], list[str]]:
    """Groups of one rank's layers, draft layers included, and what was decided on the way."""
    reasons: list[str] = []
    specs: list[CacheSpec | None] = [None if x.cache is None else shard_spec(x.cache, setup.tp) for x in model.layers]
    if model.activation_dtype == "fp32":
        specs = [None if s is None else halve_state(s) for s in specs]
    odd = [x.cache for x in model.layers if isinstance(x.cache, FullKV) and x.cache.num_kv_heads % setup.tp
           and setup.tp % x.cache.num_kv_heads]  # fmt: skip
    if odd:
        reasons.append(f"TP = {setup.tp} does not divide {odd[0].num_kv_heads} KV heads; vLLM itself may refuse")
    if any(isinstance(s, LatentKV) and s.ratio > 1 for s in specs):
        reasons.append("compressed latents: vLLM's packed layout of them is followed in outline, not to the block")
    specs += draft_specs(specs, setup.draft_layers)
    specs = [None if s is None else widen_state(s, setup.draft_tokens) for s in specs]
    if not setup.hybrid:
        specs = [None if s is None else without_window(s) for s in specs]
    rules = StateRules(
        setup.prefix_caching, setup.draft_tokens, 128 if version >= (0, 28, 0) else 64, version >= (0, 32, 0)
    )
    asked = setup.block_size or default_block_size(model, version)
    groups = form_groups(specs, storage_of(model, setup.kv_dtype), asked, rules, setup.dcp)
    grown = max(g.block_size for g in groups if g.kind != "state") if any(g.kind != "state" for g in groups) else asked
    if any(g.kind == "state" for g in groups) and grown > asked:
        reasons.append(f"attention block grown from {asked} to {grown} tokens, so that a page covers one state")
    return groups, reasons


def draft_specs(specs: Sequence[CacheSpec | None], count: int) -> list[CacheSpec | None]:
    """MTP and EAGLE layers keep what the last layer with full (or latent) attention keeps, else what the last keeps."""
    kept = [s for s in specs if s is not None]
    full = [s for s in kept if s.kind in ("full", "latent")]
    return [(full or kept)[-1]] * count if kept else [None] * count


def pipeline_stages(num_layers: int, pp: int, draft_layers: int = 0) -> list[range]:
    """Layers of each stage, draft layers (numbered after the model's) on the last. Raises ConfigError."""
    *before, last = model_stages(num_layers, pp)
    return [*before, range(last.start, last.stop + draft_layers)]


# ---------------------------------------------------------------------------------------------- what is printed


def printed_tokens(pool: Pool, concurrency: float, length: int, version: Version, dcp: int = 1) -> int:
    """The figure of `GPU KV cache size`: blocks ÷ groups × block size until 0.20, concurrency × length since 0.21."""
    if version < (0, 8, 0):
        return pool.num_blocks * pool.block_size
    if version < (0, 21, 0):
        return pool.num_blocks // len(pool.groups) * pool.block_size * dcp
    return int(concurrency * length)


def printed_lines(
    available: int, pool: Pool, tokens: int, concurrency: float, length: int, version: Version
) -> tuple[str, ...]:
    """Capacity lines of the start-up log in the words of that version."""
    gib, times = f"{available / GIB:.2f} GiB", "Maximum concurrency for"
    if version < (0, 8, 0):
        name = "# GPU blocks" if version < (0, 7, 0) else "# cuda blocks"
        return f"{name}: {pool.num_blocks}", f"{times} {length} tokens per request: {concurrency:.2f}x"
    memory = f"Available KV cache memory: {gib}"
    if version < (0, 32, 0):
        size = f"GPU KV cache size: {tokens:,} tokens"
        return memory, size, f"{times} {length:,} tokens per request: {concurrency:.2f}x"
    return memory, f"GPU KV cache size: {tokens:,} tokens, {times} {length:,} tokens per request: {concurrency:.2f}x"


def rank_reasons(setup: Setup, rank: int, blocks: Sequence[int]) -> list[str]:
    """Which pipeline stage decides, where they differ."""
    if setup.pp == 1 or len(set(blocks)) == 1:
        return []
    return [f"stage {rank} of {setup.pp} decides: the stages could hold {', '.join(f'{b:,}' for b in blocks)} blocks"]


def flight_reasons(pool: Pool, batch: Batch) -> list[str]:
    """Windows and chunks keep what is not settled yet; with asynchronous scheduling that is more than one step."""
    steps = pool.in_flight // batch.num_tokens
    if steps < 2 or not any(g.kind in ("window", "chunked") for g in pool.groups):
        return []
    return [
        f"{steps} steps of {batch.num_tokens:,} tokens may be in flight (asynchronous scheduling, stages): a request's "
        "windows hold blocks for all of them; a smaller --max-num-batched-tokens frees some"
    ]


def start_reasons(pool: Pool, length: int) -> list[str]:
    """Whether vLLM starts at all: one request of the full length must fit, beside the null block it keeps back."""
    need, usable = pool.blocks_for(length), pool.num_blocks - 1
    if need <= usable:
        return []
    fits = longest_length(pool, length)
    hint = f"--max-model-len {fits} would" if fits else "not even one token does"
    return [f"vLLM refuses to start: a request of {length:,} tokens needs {need:,} blocks of {usable:,}; {hint} fit"]


def longest_length(pool: Pool, length: int) -> int:
    """The longest request, up to `length`, that the pool holds beside the null block; 0 where none does."""
    low, high = 0, length + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pool.blocks_for(middle) <= pool.num_blocks - 1 else (low, middle)
    return low


def padding_reasons(groups: Sequence[BlockGroup]) -> list[str]:
    """How layers were grouped, and what of a block stays empty."""
    if len(groups) == 1:
        return []
    alike = Counter(map(describe, groups))
    kinds = ", ".join(f"{count} of {n} {name}" for (name, n), count in alike.items())
    largest = max(g.block_bytes for g in groups)
    used = sum(g.used_bytes for g in groups)
    lost = 100 * (1 - used / (largest * len(groups)))
    equal = len({g.block_bytes // g.num_layers for g in groups}) == 1
    padding = f"{padding_layers(groups)} padding layers, " if equal else ""
    return [f"{len(groups)} groups share the pool: {kinds}; {padding}{lost:.1f} % of it stays empty"]
