"""The KV layout: what a sequence keeps, in how many bytes, in which blocks. The only place with that formula.

The planner counts with `KVLayout`, the block pool is sized by it, the executor allocates from it. Pure integers:
no tensors, no devices, no model files. The lesson's formula 2 × L × H_kv × d_h × s × b is the special case of one
group of full layers in a plain type; everything else (windows, latents, states, scales) is a `CacheSpec` or a `KVType`.

Words: a *block* holds `block_size` tokens of one group of layers; a *page* is one layer's part of a block; a *slot*
is the place of one layer in a block, so a block is `num_slots` pages. A type that keeps its newest tokens in bf16 has
*residual* groups beside the others: the same layers once more, with a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    def newest(self, num_tokens: int) -> CacheSpec | None:
        """What the layer keeps if only its `num_tokens` newest tokens are kept; None where no token is."""
        return None

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

    def newest(self, num_tokens: int) -> CacheSpec | None:
        kept = self.retained(num_tokens)
        return WindowKV(self.num_kv_heads, self.key_dim, self.value_dim, kept) if kept else None

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

    def newest(self, num_tokens: int) -> CacheSpec | None:
        return replace(self, window=self.retained(num_tokens), index_bytes=0) if num_tokens else None


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
    """Layers that share one block table: the same spec, the same storage. `layers` are indices into the model.

    `is_residual`: they are in another group, too, which takes over from the newest tokens kept here.
    """

    spec: CacheSpec
    layers: tuple[int, ...]
    storage: KVStorage
    block_size: int
    is_residual: bool = False

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's part of a block."""
        if isinstance(self.spec, StateKV):
            return self.spec.state_bytes
        return self.spec.tile_bytes(self.block_size, self.storage)

    def stored(self, num_tokens: int) -> int:
        """Tokens of a sequence of `num_tokens` that this group stores. What has a residual waits for whole groups."""
        kept = self.spec.retained(num_tokens)
        span = self.storage.span * self.spec.span if self.storage.residual else 1
        return kept // span * span

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` stores in this group, without block rounding."""
        if isinstance(self.spec, StateKV):
            return len(self.layers) * self.spec.state_bytes if num_tokens else 0
        return len(self.layers) * self.spec.tile_bytes(self.stored(num_tokens), self.storage)

    def read_bytes(self, context: int, newest: int) -> int:
        """Bytes that the last of `context` tokens reads here, when it reads the `newest` of them from a residual."""
        if isinstance(self.spec, StateKV):
            return self.bytes_for(context)
        kept = self.spec.retained(context)
        tokens = min(kept, newest) if self.is_residual else min(self.stored(context), max(0, kept - newest))
        return len(self.layers) * self.spec.tile_bytes(tokens, self.storage)

    def blocks_for(self, num_tokens: int, in_flight: int = 1) -> int:
        """Most blocks held at once while a sequence grows to `num_tokens`."""
        return self.spec.blocks(num_tokens, self.block_size, in_flight)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of layers over one pool of equal blocks of `block_bytes`. Build it with `KVLayout.of`.

    `num_slots` layers are in the largest group that is no residual; smaller groups leave slots empty (padding).
    """

    groups: tuple[LayerGroup, ...]
    num_slots: int
    block_bytes: int

    @staticmethod
    def of(specs: Sequence[CacheSpec | None], storage: KVStorage, block_size: int) -> KVLayout:
        """Layout of a model whose layer i keeps `specs[i]` (None: nothing, as with shared or cross-attention KV).

        Layers of equal spec form groups of equal size: the smallest count of any spec, or the largest where that is
        less than 1.5 times the smallest, so that all groups can draw from one pool (vLLM's rule, kv_cache_utils,
        0.32). The last groups may have empty slots. Residual groups have as many layers as their larger pages fit
        into such a block, one at least. Raises ConfigError if nothing is kept or block_size < 1.
        """
        if block_size < 1:
            raise ConfigError(f"block size {block_size} is below 1; 16 is usual")
        kinds = _by_spec(enumerate(specs))
        if not kinds:
            raise ConfigError("no layer keeps a KV cache")
        size = group_size([len(layers) for layers in kinds.values()])
        groups = [
            LayerGroup(spec, part, storage, block_size)
            for spec, layers in kinds.items()
            for part in split_layers(layers, size)
        ]
        num_slots = max(len(g.layers) for g in groups)
        ordinary = num_slots * max(g.page_bytes for g in groups)
        newest = [*_residual_groups(specs, storage, block_size, ordinary)]
        most = max([ordinary, *(len(g.layers) * g.page_bytes for g in newest)])
        return KVLayout((*groups, *newest), num_slots, most)

    @property
    def block_size(self) -> int:
        """Tokens per block (the smallest of any group)."""
        return min(g.block_size for g in self.groups)

    @property
    def storage(self) -> KVStorage:
        """The type that was asked for: of every group but residuals."""
        return self.groups[0].storage

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token stores while no window is full (the lesson's per-token figure).

        Scales and rows shared by several tokens are spread over them. A residual is a constant and left out.
        """
        spans = [(g, g.storage.span * g.spec.span) for g in self.groups if not g.is_residual]
        return sum(len(g.layers) * cdiv(g.spec.tile_bytes(span, g.storage), span) for g, span in spans)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` stores, without block rounding."""
        return sum(g.bytes_for(num_tokens) for g in self.groups)

    def read_bytes(self, context: int) -> int:
        """Bytes that one decode step reads of a sequence with `context` tokens, itself included."""
        newest = context - self.storage.num_quantised(context) if self.storage.residual else 0
        return sum(g.read_bytes(context, newest) for g in self.groups)

    def blocks_for(self, num_tokens: int, in_flight: int = 1) -> int:
        """Most blocks that one sequence holds while it grows to `num_tokens`, over all groups."""
        return sum(g.blocks_for(num_tokens, in_flight) for g in self.groups)

    def longest_in(self, num_blocks: int, most: int) -> int:
        """Longest sequence, of at most `most` tokens, that so many blocks serve: any, where all layers have windows."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= num_blocks else (low, middle)
        return low

    def blocks_in(self, num_bytes: int) -> int:
        """Whole blocks in a budget of `num_bytes`."""
        return max(0, num_bytes) // self.block_bytes

    def pool_shape(self, num_blocks: int) -> tuple[int, int]:
        """(blocks, block bytes): the byte tensor an executor allocates. Slot s of a group is its s-th page in a row."""
        return (num_blocks, self.block_bytes)

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


def _by_spec(layers: Iterable[tuple[int, CacheSpec | None]]) -> dict[CacheSpec, list[int]]:
    kinds: dict[CacheSpec, list[int]] = {}
    for index, spec in layers:
        if spec is not None:
            kinds.setdefault(spec, []).append(index)
    return kinds


def _residual_groups(specs: Sequence[CacheSpec | None], storage: KVStorage, block_size: int,
                     block_bytes: int) -> Iterator[LayerGroup]:  # fmt: skip
    """The newest tokens of every layer in bf16, as windows. A layer's page is larger here: fewer layers fit a block."""
    if not storage.residual:
        return
    newest = ((index, spec and spec.newest(storage.residual)) for index, spec in enumerate(specs))
    for spec, layers in _by_spec(newest).items():
        page = spec.tile_bytes(block_size, UNQUANTISED)
        for part in split_layers(layers, max(1, block_bytes // page)):
            yield LayerGroup(spec, part, UNQUANTISED, block_size, is_residual=True)


def group_size(counts: Sequence[int]) -> int:
    """Layers per group, from the number of layers of each spec (vLLM 0.32: the minimum, or the maximum if close)."""
    low, high = min(counts), max(counts)
    return high if high < 1.5 * low else low


def split_layers(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """`layers` dealt out in turn to ⌈n / size⌉ groups, so that group lengths differ by at most one."""
    num_groups = cdiv(len(layers), size)
    return [tuple(layers[i::num_groups]) for i in range(num_groups)]
