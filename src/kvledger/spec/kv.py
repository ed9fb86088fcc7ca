"""The KV layout: what a sequence keeps, in how many bytes, in which blocks. The only place with that formula.

The planner counts with `KVLayout`, the block pool is sized by it, the executor allocates from it. Pure integers:
no tensors, no devices, no model files. The lesson's formula 2 × L × H_kv × d_h × s × b is the special case of one
group of full layers in a plain type; everything else (windows, latents, states, scales) is a `CacheSpec` or a `KVType`.

Words: a *block* holds `block_size` tokens of one group of layers; a *page* is one layer's part of a block; a *slot*
is the place of one layer in the pool, so a block is `num_slots` pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvledger.errors import ConfigError
from kvledger.spec.kv_types import KV_TYPES, UNQUANTISED, KVStorage, KVType
from kvledger.units import cdiv

__all__ = [
    "KV_TYPES", "CacheSpec", "ChunkedKV", "FullKV", "KVLayout", "KVStorage", "KVType", "LatentKV", "LayerGroup",
    "StateKV", "WindowKV", "group_size", "split_layers",
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- what one layer keeps


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of a sequence. Subclasses differ in the tokens they keep and in the bytes of a token."""

    @property
    def kind(self) -> str:
        """`full`, `window`, `chunked`, `latent`, `state`."""
        raise NotImplementedError

    @property
    def span(self) -> int:
        """Tokens that share a row: 1, but for compressed latents."""
        return 1

    def tile_bytes(self, num_tokens: int, storage: KVStorage) -> int:
        """Bytes of `num_tokens` consecutive tokens of this layer."""
        raise NotImplementedError

    def retained(self, num_tokens: int) -> int:
        """Tokens still kept once `num_tokens` have been seen; never falls as `num_tokens` grows."""
        return num_tokens

    def blocks(self, num_tokens: int, block_size: int, in_flight: int = 1) -> int:
        """Most blocks held at once while a sequence grows to `num_tokens`, at most `in_flight` new ones a step."""
        return cdiv(num_tokens, block_size)

    def first_kept(self, num_computed: int) -> int:
        """Oldest position that the query at position `num_computed` or a later one may still read."""
        return 0

    def shard(self, tp: int) -> CacheSpec:
        """The part that one of `tp` tensor-parallel ranks keeps."""
        return self


@dataclass(frozen=True, slots=True)
class FullKV(CacheSpec):
    """Keys and values of every token: MHA, GQA (arXiv:2305.11147) or MQA (arXiv:1911.02150) by `num_kv_heads`."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def kind(self) -> str:
        return "full"

    def tile_bytes(self, num_tokens: int, storage: KVStorage) -> int:
        key = storage.key.tile_bytes(num_tokens, self.key_dim)
        return self.num_kv_heads * (key + storage.value.tile_bytes(num_tokens, self.value_dim))

    def shard(self, tp: int) -> CacheSpec:
        """Heads are split while there are heads; past that every rank keeps one, replicated.

        Raises ConfigError where neither divides the other.
        """
        heads = self.num_kv_heads
        if heads % tp and tp % heads:
            fits = [t for t in range(1, max(tp, heads) + 1) if not (heads % t and t % heads)]
            near = min(fits, key=lambda t: abs(t - tp))
            raise ConfigError(f"TP = {tp} neither divides {heads} KV heads nor is a multiple of them; nearest: {near}")
        return replace(self, num_kv_heads=max(1, heads // tp))


def window_blocks(window: int, num_tokens: int, block_size: int, in_flight: int) -> int:
    """Most blocks that a sliding window holds; one more than its length asks, for it may begin inside a block."""
    return cdiv(min(window - 1 + in_flight, num_tokens), block_size) + 1


@dataclass(frozen=True, slots=True)
class WindowKV(FullKV):
    """Sliding window: a query reads itself and the `window` − 1 tokens before it."""

    window: int

    @property
    def kind(self) -> str:
        return "window"

    def retained(self, num_tokens: int) -> int:
        return min(num_tokens, self.window)

    def blocks(self, num_tokens: int, block_size: int, in_flight: int = 1) -> int:
        return window_blocks(self.window, num_tokens, block_size, in_flight)

    def first_kept(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedKV(FullKV):
    """Chunked local attention (Llama 4): a query reads the tokens of its own chunk of `chunk` positions."""

    chunk: int

    @property
    def kind(self) -> str:
        return "chunked"

    def retained(self, num_tokens: int) -> int:
        return min(num_tokens, self.chunk)

    def blocks(self, num_tokens: int, block_size: int, in_flight: int = 1) -> int:
        return cdiv(min(self.chunk + in_flight, num_tokens), block_size)

    def first_kept(self, num_computed: int) -> int:
        return num_computed // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class LatentKV(CacheSpec):
    """MLA (DeepSeek-V2, arXiv:2405.04434): one latent vector and one rope key per token, shared by all heads.

    Values are read back from the latent, so there is one row of `latent_dim + rope_dim`, and no rank can keep less
    of it: tensor parallelism replicates. `index_bytes` per row are the keys of a sparse-attention indexer (DSA).
    DeepSeek-V4 keeps one row per `ratio` tokens, and beside it the rows of the last `window` tokens (0: of all).
    """

    latent_dim: int
    rope_dim: int
    index_bytes: int = 0
    ratio: int = 1
    window: int = 0

    @property
    def kind(self) -> str:
        return "latent"

    @property
    def span(self) -> int:
        return self.ratio

    def tile_bytes(self, num_tokens: int, storage: KVStorage) -> int:
        rows = cdiv(num_tokens, self.ratio)
        return storage.key.tile_bytes(rows, self.latent_dim + self.rope_dim) + rows * self.index_bytes

    def retained(self, num_tokens: int) -> int:
        return min(num_tokens, self.window) if self.window else num_tokens

    def blocks(self, num_tokens: int, block_size: int, in_flight: int = 1) -> int:
        if not self.window:
            return cdiv(num_tokens, block_size)
        return window_blocks(self.window, num_tokens, block_size, in_flight)

    def first_kept(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class StateKV(CacheSpec):
    """Linear attention or state-space layer: a state of fixed size per sequence, whatever its length.

    `parts` are (elements, bytes per element, units) of each tensor: convolution window, recurrent state. Units are
    the heads, groups or channels that ranks share out; one unit is kept whole by every rank.
    """

    parts: tuple[tuple[int, int, int], ...]

    @property
    def kind(self) -> str:
        return "state"

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in this layer."""
        return sum(elements * size for elements, size, _ in self.parts)

    def tile_bytes(self, num_tokens: int, storage: KVStorage) -> int:
        return 0

    def retained(self, num_tokens: int) -> int:
        return 0

    def blocks(self, num_tokens: int, block_size: int, in_flight: int = 1) -> int:
        return 1 if num_tokens else 0

    def shard(self, tp: int) -> CacheSpec:
        return StateKV(tuple((n // units * cdiv(units, tp), size, cdiv(units, tp)) for n, size, units in self.parts))


# ---------------------------------------------------------------------------------------------- groups and layout


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table: the same spec, the same storage. `layers` are indices into the model."""

    spec: CacheSpec
    layers: tuple[int, ...]
    storage: KVStorage
    block_size: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        if isinstance(self.spec, StateKV):
            return self.spec.state_bytes
        return self.spec.tile_bytes(self.block_size, self.storage)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` stores in this group, without block rounding."""
        if isinstance(self.spec, StateKV):
            return len(self.layers) * self.spec.state_bytes if num_tokens else 0
        kept = self.spec.retained(num_tokens)
        tail = min(kept, self.storage.key.residual)  # KIVI: the newest tokens are not quantised yet
        old = self.spec.tile_bytes(kept - tail, self.storage)
        return len(self.layers) * (old + self.spec.tile_bytes(tail, UNQUANTISED))

    def blocks_for(self, num_tokens: int, in_flight: int = 1) -> int:
        """Most blocks held at once while a sequence grows to `num_tokens`, with those that a residual overflows to."""
        blocks = self.spec.blocks(num_tokens, self.block_size, in_flight)
        tail = min(self.spec.retained(num_tokens), self.storage.key.residual)
        if not tail:
            return blocks
        return blocks + cdiv(self.spec.tile_bytes(tail, UNQUANTISED), self.page_bytes)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of layers over one pool of equal blocks. Build it with `KVLayout.of`."""

    groups: tuple[LayerGroup, ...]
    num_slots: int  # layers in the largest group; smaller groups leave slots empty (padding)
    page_bytes: int  # the largest page of any group

    @staticmethod
    def of(specs: Sequence[CacheSpec | None], storage: KVStorage, block_size: int) -> KVLayout:
        """Layout of a model whose layer i keeps `specs[i]` (None: nothing, as with shared or cross-attention KV).

        Layers of equal spec form groups of equal size: the smallest count of any spec, or the largest where that is
        less than 1.5 times the smallest, so that all groups can draw from one pool (vLLM's rule, kv_cache_utils,
        0.32). The last groups may have empty slots. Raises ConfigError if nothing is kept or block_size < 1.
        """
        if block_size < 1:
            raise ConfigError(f"block size {block_size} is below 1; 16 is usual")
        kinds: dict[CacheSpec, list[int]] = {}
        for index, spec in enumerate(specs):
            if spec is not None:
                kinds.setdefault(spec, []).append(index)
        if not kinds:
            raise ConfigError("no layer keeps a KV cache")
        size = group_size([len(layers) for layers in kinds.values()])
        groups = [
            LayerGroup(spec, part, storage, block_size)
            for spec, layers in kinds.items()
            for part in split_layers(layers, size)
        ]
        pages = max(g.page_bytes for g in groups)
        return KVLayout(tuple(groups), max(len(g.layers) for g in groups), pages)

    @property
    def block_size(self) -> int:
        """Tokens per block (the smallest of any group)."""
        return min(g.block_size for g in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: every slot's page."""
        return self.num_slots * self.page_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token stores while no window is full (the lesson's per-token figure).

        Scales and rows shared by several tokens are spread over them.
        """
        spans = [(g, g.storage.span * g.spec.span) for g in self.groups]
        return sum(len(g.layers) * cdiv(g.spec.tile_bytes(span, g.storage), span) for g, span in spans)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` stores, without block rounding."""
        return sum(g.bytes_for(num_tokens) for g in self.groups)

    def read_bytes(self, context: int) -> int:
        """Bytes that one decode step reads of a sequence with `context` tokens, itself included."""
        return self.bytes_for(context)

    def blocks_for(self, num_tokens: int, in_flight: int = 1) -> int:
        """Most blocks that one sequence holds while it grows to `num_tokens`, over all groups."""
        return sum(g.blocks_for(num_tokens, in_flight) for g in self.groups)

    def blocks_in(self, num_bytes: int) -> int:
        """Whole blocks in a budget of `num_bytes`."""
        return max(0, num_bytes) // self.block_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int]:
        """(slots, blocks, page bytes): the byte tensor an executor allocates; its size is blocks × block_bytes."""
        return (self.num_slots, num_blocks, self.page_bytes)

    def tensor_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Per group, the logical shape of its part of the pool: (layers, blocks, tokens, KV heads, key + value dims).

        A latent group has one head and no values; a state group has (layers, blocks, state bytes).
        """
        shapes: list[tuple[int, ...]] = []
        for g in self.groups:
            if isinstance(g.spec, FullKV):
                dims = (g.block_size, g.spec.num_kv_heads, g.spec.key_dim + g.spec.value_dim)
            elif isinstance(g.spec, LatentKV):
                dims = (g.block_size, 1, g.spec.latent_dim + g.spec.rope_dim)
            else:
                shapes.append((len(g.layers), num_blocks, g.page_bytes))
                continue
            shapes.append((len(g.layers), num_blocks, *dims))
        return tuple(shapes)


def group_size(counts: Sequence[int]) -> int:
    """Layers per group, from the number of layers of each spec (vLLM 0.32: the minimum, or the maximum if close)."""
    low, high = min(counts), max(counts)
    return high if high < 1.5 * low else low


def split_layers(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """`layers` dealt out in turn to ⌈n / size⌉ groups, so that group lengths differ by at most one."""
    num_groups = cdiv(len(layers), size)
    return [tuple(layers[i::num_groups]) for i in range(num_groups)]
