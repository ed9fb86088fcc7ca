"""Bytes that a model's weights take under a storage scheme: in total, by part, per pipeline stage, per rank.

Exact where the file was read or the shapes and the format are known; marked `estimated` where a GGUF file type is
only named, or where a model came without shapes. What stays unquantised is listed, not hidden in a factor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvledger.errors import ConfigError
from kvledger.spec.model import ModelSpec, Part, Weight, pipeline_stages
from kvledger.spec.schemes import GGUF_PARTS, FileType, Scheme, file_type, ggml_bytes, scheme, scheme_bits

__all__ = ["WeightBytes", "scheme_bits", "stage_weights", "weight_bytes", "weight_bytes_per_device"]

_ACTIVATION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """`total` bytes, the same by part, and how sure that is. `unquantised` parts stay in the activations' type."""

    scheme: str
    total: int
    parts: Mapping[Part, int] = field(default_factory=dict)
    estimated: bool = False
    note: str = ""
    unquantised: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class _Counting:
    """Bytes of single weights under one scheme."""

    model: ModelSpec
    plan: Scheme | FileType
    touched: frozenset[Part]
    rest_bytes: int
    tied: bool

    def bytes_of(self, weight: Weight, layer: int) -> int:
        if weight.part not in self.touched or not weight.cols:
            return weight.params * (4 if isinstance(self.plan, FileType) and not weight.cols else self.rest_bytes)
        if isinstance(self.plan, Scheme):
            return weight.count * self.plan.matrix_bytes(weight.rows, weight.cols)
        kind = self.plan.kind(weight, layer, self.model.num_layers, self.tied)
        return weight.count * ggml_bytes(kind, weight.rows, weight.cols)

    def bytes_in(self, weight: Weight, layers: Sequence[int]) -> int:
        """Bytes of the same weight in each of `layers`; only a GGUF mix tells layers apart."""
        if isinstance(self.plan, Scheme):
            return len(layers) * self.bytes_of(weight, 0)
        return sum(self.bytes_of(weight, layer) for layer in layers)


def _counting(model: ModelSpec, name: str) -> _Counting:
    rest, tied = _ACTIVATION_BYTES.get(model.activation_dtype, 2), model.head_params == 0
    mix = file_type(name)
    if mix is not None:
        return _Counting(model, mix, GGUF_PARTS, 4, tied)  # what is not quantised is fp32 in GGUF
    plan = scheme(name)
    has_experts = any(x.num_experts for x in model.layers)
    return _Counting(model, plan, plan.touched(has_experts), plan.rest_bytes or rest, tied)


def weight_bytes(model: ModelSpec, scheme_name: str | None = None) -> WeightBytes:
    """All weights of `model`, stored as published (None) or under a named scheme. Raises UnknownName."""
    name = scheme_name or model.dtype
    if model.weight_bytes is not None and name == model.dtype:
        return WeightBytes(name, model.weight_bytes, note="summed over the tensors of the file")
    if not model.outer_weights:
        return _without_shapes(model, name)
    counting = _counting(model, name)
    parts = _count(counting, range(model.num_layers), model.outer_weights)
    return _result(counting, name, parts)


def _count(
    counting: _Counting, stage: range, outer: Iterable[Weight], tp: int = 1, ep: int = 1
) -> Counter[Part]:  # fmt: skip
    """Bytes by part of the layers of `stage` and the weights outside them."""
    parts: Counter[Part] = Counter()
    for layer, indices in counting.model.distinct_layers:
        held = indices[bisect_left(indices, stage.start) : bisect_left(indices, stage.stop)]
        for weight in layer.weights if held else ():
            parts[weight.part] += counting.bytes_in(weight.shard(tp, ep), held)
    for weight in outer:
        parts[weight.part] += counting.bytes_of(weight.shard(tp, ep), 0)
    return parts


def _result(counting: _Counting, name: str, parts: Counter[Part]) -> WeightBytes:
    estimated = isinstance(counting.plan, FileType)
    note = "estimated: llama.cpp's mix by shapes" if estimated else ""
    if isinstance(counting.plan, Scheme):
        note = counting.plan.note
    untouched = tuple(sorted(p for p in parts if p not in counting.touched))
    return WeightBytes(name, sum(parts.values()), dict(parts), estimated, note, untouched)


def _without_shapes(model: ModelSpec, name: str) -> WeightBytes:
    """Bits per weight times parameters: for models that came without shapes (a GGUF header re-typed)."""
    layers, ends = sum(x.params for x in model.layers), model.embedding_params + model.head_params
    rest = _ACTIVATION_BYTES.get(model.activation_dtype, 2)
    bits = scheme_bits(name)
    whole = file_type(name) is not None or bits >= 16
    parts: dict[Part, int] = {
        "embedding": int(ends * bits / 8) if whole else ends * rest,
        "other": int(layers * bits / 8) + model.other_params * rest,
    }
    note = "estimated: bits per weight × parameters, as the shapes are not known"
    return WeightBytes(name, sum(parts.values()), parts, True, note)


# ---------------------------------------------------------------------------------------------- over devices


def stage_weights(
    model: ModelSpec, scheme_name: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1
) -> tuple[WeightBytes, ...]:
    """Weights of one rank of each pipeline stage; all `tp` ranks of a stage hold the same number of bytes.

    The embedding and the vision tower are on the first stage, final norm and head on the last; a tied head is a
    second copy where the stages differ. Norms, routers and MLA's down-projections are on every rank; KV heads are
    replicated once TP passes them; `ep` ranks hold whole experts. Raises ConfigError, UnknownName.
    """
    _check_ranks(tp, pp, ep)
    stages = pipeline_stages(model.num_layers, pp)
    if tp == pp == ep == 1:
        return (weight_bytes(model, scheme_name),)
    if not model.outer_weights:
        return _stages_without_shapes(model, scheme_name, stages, tp)
    name = scheme_name or model.dtype
    counting = _counting(model, name)
    found = []
    for index, stage in enumerate(stages):
        outer = _outer_of(model, index == 0, index == pp - 1)
        parts = _count(counting, stage, outer, tp, ep)
        found.append(_result(counting, name, parts))
    return tuple(found)


def weight_bytes_per_device(
    model: ModelSpec, scheme_name: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1
) -> list[int]:
    """Bytes of each of the tp × pp ranks, stage by stage. Raises ConfigError, UnknownName."""
    return [stage.total for stage in stage_weights(model, scheme_name, tp, pp, ep) for _ in range(tp)]


def _check_ranks(tp: int, pp: int, ep: int) -> None:
    for name, value in (("TP", tp), ("PP", pp), ("EP", ep)):
        if not 1 <= value <= 4096:
            raise ConfigError(f"{name} = {value} is not from 1 to 4096")


def _outer_of(model: ModelSpec, first: bool, last: bool) -> list[Weight]:
    """What lies outside the layers on a stage."""
    outer = [w for w in model.outer_weights if (last if w.part in ("head", "norm", "bias") else first)]
    if last and not first and not model.head_params:
        outer += [w for w in model.outer_weights if w.part == "embedding"][:1]
    return outer


def _stages_without_shapes(
    model: ModelSpec, name: str | None, stages: list[range], tp: int
) -> tuple[WeightBytes, ...]:  # fmt: skip
    """Layers by their share of the parameters, ends on the first and last stage, everything split evenly by TP."""
    whole = weight_bytes(model, name)
    scale = whole.total / max(1, model.num_params)
    found = []
    for index, stage in enumerate(stages):
        params = sum(model.layers[i].params for i in stage)
        if index == 0:
            params += model.embedding_params + model.other_params
        if index == len(stages) - 1:
            params += model.head_params or (model.embedding_params if len(stages) > 1 else 0)
        size = int(params * scale / tp)
        note = "estimated: the file's bytes shared out by parameters, TP splitting all of them"
        exact = tp == 1 and len(stages) == 1
        found.append(WeightBytes(whole.scheme, whole.total if exact else size, {}, not exact or whole.estimated,
                                 whole.note if exact else note))  # fmt: skip
    return tuple(found)
