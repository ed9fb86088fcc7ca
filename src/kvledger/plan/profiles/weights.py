"""Weight bytes of each pipeline stage: given, or computed from the model's shapes."""

from __future__ import annotations

from kvledger.plan.profiles.base import Band, Setup, Term
from kvledger.spec.model import ModelSpec


def stage_weights(model: ModelSpec, setup: Setup) -> list[Term]:
    """One term per pipeline stage."""
    if setup.weights_bytes is not None:
        return [Term("weights", Band.exactly(setup.weights_bytes), "given")] * setup.pp
    bits = {"fp8": 8, "fp8_block": 8, "int8": 8, "awq": 4.5, "gptq": 4.5, "mxfp4": 4.25, "nvfp4": 4.5, "fp32": 32}
    size = int(model.num_params * bits.get(setup.weight_dtype or model.dtype, 16) / 8 / setup.tp / setup.pp)
    return [Term("weights", Band(int(0.98 * size), size, int(1.03 * size)), "computed")] * setup.pp
