"""What a step costs: FLOPs and bytes of a StepShape → seconds, and which of the two binds. Knows no engine.

Roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): a step can end no sooner than its arithmetic at the
device's peak and its memory traffic at the device's bandwidth allow:

    seconds = max(flops / (peak × compute_efficiency), bytes / (bandwidth × bandwidth_efficiency)) + overhead

    flops = 2 × matmul weights × tokens            (the output head only for rows that need logits)
          + 2 × query-key pairs × (score_dims + mix_dims), per layer, masks and windows counted
    bytes = weights, once per step whatever the batch (of routed experts those that some token touches)
          + per sequence what `KVLayout.read_bytes` says of the context it ends with
          + new tokens × `KVLayout.bytes_per_token` written

Activations stay in caches and are not counted. The simulator's clock and the planner's bandwidth ledger are both
this function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvledger.errors import UnknownName
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import CacheSpec, ChunkedKV, KVLayout, StateKV, WindowKV
from kvledger.spec.model import ModelSpec, Part
from kvledger.spec.step import StepShape, Work, attention_pairs


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds, FLOPs and bytes of one step; `bound` names the larger of the two times."""

    seconds: float
    compute_s: float
    memory_s: float
    flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def bound(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def bytes(self) -> float:
        """All memory traffic of the step."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte; below the device's ridge the step is bound by memory."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Roofline:
    """The cost of steps of one model on one device.

    `weight_bytes` is what the weights occupy as stored (None: the model's own, else two bytes each); `weight_parts`
    is the same by part, where parts are stored in different types (`spec.weights.WeightBytes.parts`). The two
    efficiencies are the shares of peak that are reached and `overhead_s` is added to every step: 1, 1 and 0 give
    the bound itself; measured values turn it into a prediction. `skips_unread`: the engine computes the last layer,
    from its attention on, only for rows that need logits (the model must have `Layer.qkv_params`).
    """

    model: ModelSpec
    device: DeviceSpec
    layout: KVLayout
    weight_bytes: int | None = None
    compute_dtype: str = "bf16"
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    overhead_s: float = 0.0
    weight_parts: Mapping[Part, int] | None = None
    kv_share: float = 1.0  # of the sequences of a step, those whose KV this device keeps
    skips_unread: bool = False

    def cost(self, shape: StepShape, repeat: int = 1) -> StepCost:
        """What the step costs when it holds `shape` `repeat` times (a batch of equals is priced as one of them).

        Raises UnknownName when the device has no peak for `compute_dtype`.
        """
        flops, weights = repeat * self.flops(shape), self.weights_read(shape, repeat)
        kv = self.kv_share * repeat * sum(self._kv_traffic(work) for work in shape)
        compute_s = flops / (self._peak * self.compute_efficiency)
        memory_s = (weights + kv) / (self.device.bandwidth_bytes_per_s * self.bandwidth_efficiency)
        seconds = max(compute_s, memory_s) + self.overhead_s if shape else 0.0
        return StepCost(seconds, compute_s, memory_s, flops, weights, kv)

    def seconds(self, shape: StepShape) -> float:
        """How long the step takes."""
        return self.cost(shape).seconds

    def flops(self, shape: StepShape) -> float:
        """Multiplications and additions: products with weights, and attention."""
        tokens = sum(work.new_tokens for work in shape)
        logits = sum(work.num_logits for work in shape)
        products = 2.0 * (self._body_params * tokens + self._head_params * logits)
        skipped = sum(self._unread_flops(work) for work in shape) if self.skips_unread else 0.0
        return products + sum(self._attention_flops(work) for work in shape) - skipped

    def _attention_flops(self, work: Work) -> float:
        decode = work.new_tokens == 1
        dims = ((spec, one if decode else many) for spec, many, one in self.model.attention_dims)
        return sum(2.0 * size * pairs(spec, work) for spec, size in dims)

    def _unread_flops(self, work: Work) -> float:
        """What follows the last layer's queries, keys and values in the rows before those that need logits."""
        last, rows = self.model.layers[-1], work.new_tokens - work.num_logits
        attention = (last.score_dims + last.mix_dims) * pairs(last.cache, Work(work.context, rows))
        return 2.0 * ((last.active_params - last.qkv_params) * rows + attention)

    def weights_read(self, shape: StepShape, repeat: int = 1) -> float:
        """Bytes of weights that the step reads: all dense ones once, and the experts that are touched.

        Routing is taken as uniform, so T tokens choosing k of E experts touch E (1 − (1 − k/E)^T) of them.
        """
        tokens = repeat * sum(work.new_tokens for work in shape)
        if not tokens:
            return 0.0
        head = any(work.num_logits for work in shape)
        if self.weight_parts:
            touched = self._touched_params(tokens) / max(1, self._expert_params)
            return self._dense_bytes + head * self._head_bytes + self.weight_parts.get("experts", 0) * touched
        params = self.model.dense_params + head * self._head_params + self._touched_params(tokens)
        return params * self._bytes_per_param

    def _touched_params(self, tokens: int) -> float:
        """Weights of routed experts that `tokens` tokens touch."""
        return sum(
            layers * size * experts * (1.0 - (1.0 - chosen / experts) ** tokens)
            for layers, experts, chosen, size in self.model.expert_layers
        )

    def _kv_traffic(self, work: Work) -> int:
        read = self.layout.read_bytes(work.context + work.new_tokens)
        return read + work.new_tokens * self.layout.bytes_per_token

    @cached_property
    def _peak(self) -> float:
        if self.compute_dtype not in self.device.peak_flops:
            raise UnknownName(f"peak of {self.device.name} for", self.compute_dtype, self.device.peak_flops)
        return self.device.peak_flops[self.compute_dtype]

    @cached_property
    def _bytes_per_param(self) -> float:
        stored = self.weight_bytes if self.weight_bytes is not None else self.model.weight_bytes
        return stored / self.model.num_params if stored else 2.0

    @cached_property
    def _dense_bytes(self) -> int:
        """Parts that every step reads: no look-up table, no head, no routed experts, no vision tower."""
        aside = ("embedding", "head", "experts", "vision")
        return sum(size for part, size in (self.weight_parts or {}).items() if part not in aside)

    @cached_property
    def _head_bytes(self) -> int:
        parts = self.weight_parts or {}
        return parts.get("head", 0) or parts.get("embedding", 0)

    @cached_property
    def _expert_params(self) -> int:
        return sum(layers * experts * size for layers, experts, _, size in self.model.expert_layers)

    @cached_property
    def _head_params(self) -> int:
        return self.model.head_params or self.model.embedding_params

    @cached_property
    def _body_params(self) -> int:
        return self.model.matmul_params - self._head_params


def step_seconds(
    model: ModelSpec,
    device: DeviceSpec,
    layout: KVLayout,
    shape: StepShape,
    weight_bytes: int | None = None,
    compute_dtype: str = "bf16",
) -> StepCost:
    """The roofline bound of one step; for many steps of one model keep a `Roofline`."""
    return Roofline(model, device, layout, weight_bytes, compute_dtype).cost(shape)


def pairs(spec: CacheSpec | None, work: Work) -> int:
    """Query-key pairs of one layer and sequence under the layer's mask; closed forms of Σ (p + 1 − first_kept(p)).

    p runs over the new positions [context, context + new_tokens). A layer without a cache of its own reads another
    layer's and counts in full.
    """
    context, new = work.context, work.new_tokens
    if isinstance(spec, WindowKV):
        growing = min(max(spec.window - context, 0), new)  # queries that still see everything
        return growing * context + growing * (growing + 1) // 2 + (new - growing) * spec.window
    if isinstance(spec, ChunkedKV):
        return _chunk_pairs(context + new, spec.chunk) - _chunk_pairs(context, spec.chunk)
    if isinstance(spec, StateKV):
        return 0
    return attention_pairs(work)


def _chunk_pairs(num_tokens: int, chunk: int) -> int:
    whole, rest = divmod(num_tokens, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
