"""How vLLM turns a rank's layers into groups that draw equal blocks from one pool (v1/core/kv_cache_utils, 0.32).

Pure rules over `spec.kv`: which layers share a block table, how pages of different size are made equal, how a block
grows until it covers a state. Knows no memory sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvledger.errors import ConfigError
from kvledger.plan.profiles.base import BlockGroup
from kvledger.spec.kv import (
    CacheSpec,
    ChunkedKV,
    FullKV,
    KVStorage,
    LatentKV,
    LayerGroup,
    StateKV,
    WindowKV,
    group_size,
    split_layers,
)
from kvledger.units import cdiv

_NAMES = {
    "full": "FullAttentionSpec", "window": "SlidingWindowSpec", "chunked": "ChunkedLocalAttentionSpec",
    "latent": "MLAAttentionSpec", "state": "MambaSpec",
}  # fmt: skip
_MIXED = "UniformTypeKVCacheSpecs"
CONV_KERNEL = 4  # every published hybrid keeps 3 columns of its short convolution


@dataclass(frozen=True, slots=True)
class StateRules:
    """How states are kept. `align`: one more state per request as prefix-cache checkpoint; MLA blocks are rounded.

    `prefill_checkpoint`: Mamba-2 layers keep yet another, written from inside a prefill (since 0.32 at the latest).
    """

    align: bool = True
    draft_tokens: int = 0
    mla_alignment: int = 128
    prefill_checkpoint: bool = True

    def extra_blocks(self, spec: CacheSpec) -> int:
        """States of a request beside the running one."""
        if not isinstance(spec, StateKV):
            return 0
        return int(self.align) + int(self.align and self.prefill_checkpoint and is_mamba2(spec)) + self.draft_tokens


def is_mamba2(spec: StateKV) -> bool:
    """Of all mixers only Mamba-2 has three tensors: a convolution over channels, one over groups, and the state."""
    return len(spec.parts) == 3


def shard_spec(spec: CacheSpec, tp: int) -> CacheSpec:
    """One rank's part. vLLM rounds KV heads down and keeps at least one, whatever divides what."""
    if isinstance(spec, FullKV):
        return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // tp))
    return spec.shard(tp)


def halve_state(spec: CacheSpec) -> CacheSpec:
    """A state of 4 B numbers in 2 B, as vLLM runs float32 models in bf16."""
    if not isinstance(spec, StateKV):
        return spec
    return StateKV(tuple((n, min(size, 2), units) for n, size, units in spec.parts))


def widen_state(spec: CacheSpec, draft_tokens: int) -> CacheSpec:
    """A state that can be rolled back over `draft_tokens` guesses: its convolutions keep as many columns more."""
    if not isinstance(spec, StateKV) or not draft_tokens or len(spec.parts) < 2:
        return spec
    *convolutions, recurrent = spec.parts
    columns = CONV_KERNEL - 1
    wider = [(n // columns * (columns + draft_tokens), size, units) for n, size, units in convolutions]
    return StateKV((*wider, recurrent))


def state_block_size(specs: Sequence[CacheSpec], storage: KVStorage, block_size: int, rules: StateRules) -> int:
    """Tokens per attention block once its page must cover one state page; `block_size` where there are no states."""
    state = max((s.state_bytes for s in specs if isinstance(s, StateKV)), default=0)
    attention = [s for s in specs if not isinstance(s, StateKV)]
    token = max((LayerGroup(s, (0,), storage, 1).page_bytes for s in attention), default=0)
    if not state or not token:
        return block_size
    step = max(16, block_size)
    if any(isinstance(s, LatentKV) for s in attention):
        step = max(step, rules.mla_alignment)
    return max(block_size, step * cdiv(state, step * token))


def form_groups(
    specs: Sequence[CacheSpec | None], storage: KVStorage, block_size: int, rules: StateRules, dcp: int = 1
) -> tuple[BlockGroup, ...]:
    """Groups of the layers that keep something; `specs` are already one rank's.

    Raises ConfigError where nothing is kept or pages can be made equal by no rule.
    """
    kinds: dict[CacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec is not None:
            kinds.setdefault(spec, []).append(index)
    if not kinds:
        raise ConfigError("no layer keeps a KV cache")
    block_size = state_block_size(list(kinds), storage, block_size, rules)
    parts = [LayerGroup(spec, tuple(layers), storage, block_size) for spec, layers in kinds.items()]
    if len({_family(p.spec) for p in parts}) == 1:
        return (_group(tuple(parts), None, rules, dcp),)
    if any(isinstance(p.spec, LatentKV) and p.spec.window for p in parts):
        return _packed(parts, rules, dcp)
    try:
        unified = [_unify(p, max(q.page_bytes for q in parts)) for p in parts]
    except ConfigError:
        whole = tuple(replace(p, spec=without_window(p.spec)) for p in parts)
        if not any(isinstance(p.spec, WindowKV) for p in parts) or len({_family(p.spec) for p in whole}) > 1:
            raise
        return (_group(whole, None, rules, dcp),)
    size = group_size([len(p.layers) for p, _ in unified])
    return tuple(
        _group((replace(part, layers=layers),), page, rules, dcp)
        for part, page in unified
        for layers in split_layers(part.layers, size)
    )


def without_window(spec: CacheSpec) -> CacheSpec:
    """The same heads kept for every token, as with the hybrid manager switched off."""
    if isinstance(spec, WindowKV | ChunkedKV):
        return FullKV(spec.num_kv_heads, spec.key_dim, spec.value_dim)
    return spec


def _family(spec: CacheSpec) -> tuple[str, int]:
    """Layers of one family always need the same number of tokens, so one block table serves them all."""
    if isinstance(spec, WindowKV | LatentKV) and spec.window:
        return ("window", spec.window)
    if isinstance(spec, ChunkedKV):
        return ("chunked", spec.chunk)
    if isinstance(spec, StateKV):
        return ("state", spec.state_bytes)
    return ("full", 0)


def _packed(parts: Sequence[LayerGroup], rules: StateRules, dcp: int) -> tuple[BlockGroup, ...]:
    """Latents with windows (DeepSeek V4): pages of any size lie side by side in a block as wide as the full layers'.

    Window layers are dealt out so that each of their groups fits that width.
    """
    families: dict[tuple[str, int], list[LayerGroup]] = {}
    for part in parts:
        families.setdefault(_family(part.spec), []).append(part)
    width = max(sum(len(p.layers) * p.page_bytes for p in f) for kind, f in families.items() if kind[0] == "full")
    groups = []
    for (kind, _), family in families.items():
        if kind == "full":
            groups.append(_group(tuple(family), None, rules, dcp))
            continue
        for part in family:
            count = cdiv(len(part.layers), max(1, width // part.page_bytes))
            groups += [_group((replace(part, layers=part.layers[i::count]),), None, rules, 1) for i in range(count)]
    return tuple(groups)


def _unify(part: LayerGroup, page_bytes: int) -> tuple[LayerGroup, int | None]:
    """`part` with a page of `page_bytes`: more tokens per block where that divides, else padding."""
    own = part.page_bytes
    if own == page_bytes:
        return part, None
    if not isinstance(part.spec, StateKV) and page_bytes % own == 0:
        return replace(part, block_size=part.block_size * (page_bytes // own)), None
    if isinstance(part.spec, LatentKV):
        raise ConfigError(f"a latent page of {own} B neither divides {page_bytes} B nor may it be padded")
    return part, page_bytes


def _group(parts: tuple[LayerGroup, ...], page_bytes: int | None, rules: StateRules, dcp: int) -> BlockGroup:
    spec = parts[0].spec
    shards = dcp if spec.kind in ("full", "latent") else 1
    return BlockGroup(parts, page_bytes, rules.extra_blocks(spec), shards)


def block_bytes_of(groups: Sequence[BlockGroup], layers: range | None = None) -> int:
    """Bytes of one block on a rank that holds `layers` (None: all): its largest group."""
    return max(_bytes_on(g, layers) for g in groups)


def _bytes_on(group: BlockGroup, layers: range | None) -> int:
    if layers is None:
        return group.block_bytes
    held = [replace(p, layers=tuple(i for i in p.layers if i in layers)) for p in group.parts]
    return replace(group, parts=tuple(held)).block_bytes


def describe(group: BlockGroup) -> tuple[str, int]:
    """vLLM's name of the group's spec and its number of layers, as `[["SlidingWindowSpec", 21], …]` in dumps.

    The keys of a sparse-attention indexer are a layer of their own there.
    """
    return _NAMES[group.kind], group.num_layers + _indexers(group)


def is_listed(group: BlockGroup, name: str, layers: int) -> bool:
    """Whether a dump's (name, layers) is `group`.

    Layers with pages of different size in one block table go by the name of the first in the scheduler's dump, and
    are `UniformTypeKVCacheSpecs` in the worker's.
    """
    mixed = len(group.parts) > 1 or _indexers(group) > 0
    return describe(group) == (name, layers) or (mixed and (name, layers) == (_MIXED, describe(group)[1]))


def _indexers(group: BlockGroup) -> int:
    return sum(len(p.layers) for p in group.parts if isinstance(p.spec, LatentKV) and p.spec.index_bytes)


def padding_layers(groups: Sequence[BlockGroup]) -> int:
    """Slots of the pool that no layer fills: groups × largest group − layers."""
    largest = max(g.num_layers for g in groups)
    return sum(largest - g.num_layers for g in groups)
