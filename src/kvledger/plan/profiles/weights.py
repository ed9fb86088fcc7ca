"""Weight bytes of each pipeline stage: given, or computed from the model's shapes."""

from __future__ import annotations

from kvledger.plan.profiles.base import Band, Setup, Term
from kvledger.spec.model import ModelSpec
from kvledger.units import format_bytes


def stage_weights(model: ModelSpec, setup: Setup) -> list[Term]:
    """One term per pipeline stage."""
    if setup.weights_bytes is not None:
        return [Term("weights", Band.exactly(setup.weights_bytes), "given")] * setup.pp
    raise NotImplementedError(format_bytes(model.num_params))
