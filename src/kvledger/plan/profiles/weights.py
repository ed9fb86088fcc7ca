"""The weights term of each pipeline stage: given, or counted from the model's shapes by `spec.weights`."""

from __future__ import annotations

from kvledger.plan.profiles.base import Band, Setup, Term
from kvledger.spec.model import ModelSpec
from kvledger.spec.weights import WeightBytes
from kvledger.spec.weights import stage_weights as weights_of_stages
from kvledger.units import cdiv


def stage_weights(model: ModelSpec, setup: Setup, fp4_multiple: int = 1) -> list[Term]:
    """One term per pipeline stage, for one rank. A band only where the bytes are an estimate. Raises UnknownName.

    An engine whose fp4 expert kernels want the hidden size in multiples of `fp4_multiple` stores them padded.
    """
    if setup.weights_bytes is not None:
        return [Term("weights", Band.exactly(setup.weights_bytes), "given")] * setup.pp
    stages = weights_of_stages(model, setup.weight_dtype, setup.tp, setup.pp)
    return [_term(w, _padding(w, model.hidden_size, fp4_multiple)) for w in stages]


def _padding(weights: WeightBytes, hidden: int, multiple: int) -> int:
    """Bytes by which padded fp4 experts exceed the published ones (gpt-oss: 2,880 columns become 3,072)."""
    if weights.scheme != "mxfp4" or not hidden:
        return 0
    return weights.parts.get("experts", 0) * (cdiv(hidden, multiple) * multiple - hidden) // hidden


def _term(weights: WeightBytes, padding: int) -> Term:
    size = weights.total + padding
    slack = size // 20 if weights.estimated else size // 100 + padding // 2  # kernels' buffers, alignment
    note = weights.note or weights.scheme
    return Term("weights", Band(size - slack, size, size + slack), "computed", f"{note}, padded" if padding else note)
