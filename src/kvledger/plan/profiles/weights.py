"""The weights term of each pipeline stage: given, or counted from the model's shapes by `spec.weights`."""

from __future__ import annotations

from kvledger.plan.profiles.base import Band, Setup, Term
from kvledger.spec.model import ModelSpec
from kvledger.spec.weights import WeightBytes
from kvledger.spec.weights import stage_weights as weights_of_stages


def stage_weights(model: ModelSpec, setup: Setup) -> list[Term]:
    """One term per pipeline stage, for one rank. A band only where the bytes are an estimate. Raises UnknownName."""
    if setup.weights_bytes is not None:
        return [Term("weights", Band.exactly(setup.weights_bytes), "given")] * setup.pp
    return [_term(w) for w in weights_of_stages(model, setup.weight_dtype, setup.tp, setup.pp)]


def _term(weights: WeightBytes) -> Term:
    size = weights.total
    slack = size // 20 if weights.estimated else size // 100  # buffers, padding of kernels, alignment
    return Term("weights", Band(size - slack, size, size + slack), "computed", weights.note or weights.scheme)
