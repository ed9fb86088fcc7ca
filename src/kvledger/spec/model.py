"""What a model is, as far as memory and arithmetic go: layers, what each keeps, how many weights each has.

Frozen facts only. Files are translated into a `ModelSpec` once (`from_config` for config.json, `from_gguf` for a
GGUF header); nothing else reads their keys. Knows the shapes of weights, never their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvledger.errors import ConfigError
from kvledger.spec.kv import CacheSpec, KVLayout, KVStorage
from kvledger.units import cdiv

# Matrices of these parts are what quantisers quantise; the others stay as published (see spec/weights.py).
Part = Literal[
    "attention", "mlp", "experts", "shared_experts", "state", "indexer",
    "router", "norm", "bias", "embedding", "head", "vision", "other",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """`count` equal matrices of `rows` × `cols` (outputs × inputs), or vectors of `rows` numbers where `cols` is 0.

    `split` is the axis that tensor parallelism cuts; `units` is how many indivisible pieces (heads) it has there, 0
    where any row may go anywhere. A rank keeps ⌈units / TP⌉ of them: past that many ranks a head is replicated.
    Weights of part `experts` are the routed ones, `count` experts each. `name` tells apart what a mixed GGUF type
    treats apart: `v` of attention, `down` of an MLP or an expert.
    """

    part: Part
    rows: int
    cols: int = 0
    count: int = 1
    split: Literal["", "rows", "cols"] = ""
    units: int = 0
    name: str = ""

    @property
    def params(self) -> int:
        """Numbers in all `count` of them."""
        return self.count * self.rows * max(1, self.cols)

    def shard(self, tp: int, ep: int = 1) -> Weight:
        """The part that one rank keeps: whole experts with `ep` ranks, otherwise rows or columns with `tp`."""
        if self.part == "experts" and ep > 1:
            whole = replace(self, count=cdiv(self.count, ep))
            return whole.shard(max(1, tp // ep))
        if not self.split or tp == 1:
            return self
        axis = self.rows if self.split == "rows" else self.cols
        units = self.units or axis
        kept = axis * cdiv(units, tp) // units
        return replace(self, rows=kept) if self.split == "rows" else replace(self, cols=kept)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block of the model.

    `cache` is what it keeps (None: it reads another layer's cache, or none grows with the text). `params` counts all
    its weights, experts included; of these `num_experts` × `expert_params` are routed and `experts_per_token` of
    them work on a token. `score_dims` and `mix_dims` are the summed dimensions of all query heads in q·k and p·v:
    one token attending to n others costs 2 n (score_dims + mix_dims) FLOPs. `latent_score_dims` and
    `latent_mix_dims` are the same where MLA decodes on the latent itself (0: it does not). `qkv_params` are those of
    its weights that queries, keys and values take, with their norms (0: not told apart).
    `weights` are the shapes behind `params`, empty where the source gives none.
    """

    cache: CacheSpec | None
    params: int
    score_dims: int = 0
    mix_dims: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    weights: tuple[Weight, ...] = ()
    latent_score_dims: int = 0
    latent_mix_dims: int = 0
    qkv_params: int = 0

    @property
    def active_params(self) -> int:
        """Weights that work on one token."""
        return self.params - (self.num_experts - self.experts_per_token) * self.expert_params


@dataclass(frozen=True)
class ModelSpec:
    """A model. Counts are in weights (parameters); `weight_bytes` is exact where a file was read, else None."""

    name: str
    architecture: str  # model_type of config.json, general.architecture of GGUF
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[Layer, ...]
    num_heads: int
    embedding_params: int
    head_params: int  # 0 where the output head is the embedding
    other_params: int = 0  # final norm, vision tower …
    dtype: str = "bf16"  # of the weights as published: a name of spec/weights.py's schemes
    weight_bytes: int | None = None
    trained_context: int | None = None  # before rope scaling stretched it
    draft_layers: int = 0  # multi-token prediction layers published with the model, not in `layers`
    source: str = ""
    notes: tuple[str, ...] = field(default=())
    activation_dtype: str = "bf16"  # of activations, so of a KV cache and a state left to `auto`
    outer_weights: tuple[Weight, ...] = ()  # shapes outside the layers: embedding, head, final norm, vision tower

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """Per layer, the index of the first layer that equals it: what is counted there holds here."""
        seen: dict[Layer, int] = {}
        return tuple(seen.setdefault(layer, index) for index, layer in enumerate(self.layers))

    @cached_property
    def distinct_layers(self) -> tuple[tuple[Layer, tuple[int, ...]], ...]:
        """Layers that are equal, with their indices: most models have one to three kinds."""
        kinds: dict[Layer, list[int]] = {}
        for index, layer in enumerate(self.layers):
            kinds.setdefault(layer, []).append(index)
        return tuple((layer, tuple(indices)) for layer, indices in kinds.items())

    @cached_property
    def num_params(self) -> int:
        """All weights."""
        return self.embedding_params + self.head_params + self.other_params + sum(x.params for x in self.layers)

    @cached_property
    def active_params(self) -> int:
        """Weights that take part in computing one token: routed experts counted as often as they are chosen."""
        return self.num_params - sum(x.params - x.active_params for x in self.layers)

    @cached_property
    def matmul_params(self) -> int:
        """Weights multiplied per token: as `active_params`, with the output head and without the embedding look-up."""
        head = self.head_params or self.embedding_params
        return sum(x.active_params for x in self.layers) + head

    @cached_property
    def dense_params(self) -> int:
        """Weights of the layers, and beside them, that every token uses: no routed experts, embedding or head."""
        return sum(x.params - x.num_experts * x.expert_params for x in self.layers) + self.other_params

    @cached_property
    def expert_layers(self) -> tuple[tuple[int, int, int, int], ...]:
        """(layers, experts, experts per token, weights of one expert), equal layers counted together."""
        kinds = [(x.num_experts, x.experts_per_token, x.expert_params) for x in self.layers if x.num_experts]
        return tuple((kinds.count(kind), *kind) for kind in dict.fromkeys(kinds))

    @cached_property
    def attention_dims(self) -> tuple[tuple[CacheSpec | None, int, int], ...]:
        """(cache, summed score and mix dims over several new tokens, over one): layers of equal caches together.

        The two differ for MLA, which expands its latents for a prompt and attends to them directly at decode.
        """
        dims: dict[CacheSpec | None, tuple[int, int]] = {}
        for x in self.layers:
            many, one = dims.get(x.cache, (0, 0))
            own = x.score_dims + x.mix_dims
            dims[x.cache] = (many + own, one + (x.latent_score_dims + x.latent_mix_dims or own))
        return tuple((cache, many, one) for cache, (many, one) in dims.items() if many)

    def kv_layout(self, kv_dtype: str = "bf16", block_size: int = 16, tp: int = 1) -> KVLayout:
        """The KV layout of one of `tp` tensor-parallel ranks. Raises ConfigError, UnknownName."""
        shards = [None if x.cache is None else x.cache.shard(tp) for x in self.layers]
        return KVLayout.of(shards, KVStorage.of(kv_dtype), block_size)


def pipeline_stages(num_layers: int, pp: int) -> list[range]:
    """Layers of each of `pp` stages: equal, and what is left over goes to the stages before the last, from behind.

    The last stage has the output head to compute, the first the embedding to hold (vLLM 0.32, get_pp_indices).
    Raises ConfigError where a stage would be empty.
    """
    if not 1 <= pp <= num_layers:
        raise ConfigError(f"PP = {pp} for {num_layers} layers; from 1 to {num_layers} stages are possible")
    sizes = [num_layers // pp] * pp
    for i in range(2, num_layers % pp + 2):
        sizes[-i] += 1
    ends = [sum(sizes[: i + 1]) for i in range(pp)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
