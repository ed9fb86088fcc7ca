"""Weights as figures: bytes of one device, part by part, from `spec.weights`. No formula of its own."""

from __future__ import annotations

from kvledger.plan.explain import Figure, Input
from kvledger.spec.model import ModelSpec
from kvledger.spec.weights import WeightBytes, stage_weights

_WHOLE = {"fp32": 4, "bf16": 2, "fp16": 2}


def heaviest_stage(model: ModelSpec, scheme: str, tp: int = 1, pp: int = 1) -> WeightBytes:
    """Weights of one rank of the pipeline stage that holds most. Raises ConfigError, UnknownName."""
    return max(stage_weights(model, scheme, tp, pp), key=lambda stage: stage.total)


def weights_figure(
    model: ModelSpec, scheme: str, tp: int = 1, pp: int = 1, name: str = "weights_bytes_per_device"
) -> Figure:
    """Bytes of weights on one device: weights × bytes where that is all, else the sum over parts."""
    stage = heaviest_stage(model, scheme, tp, pp)
    basis = "assumed" if stage.estimated else "derived"
    label = "weights" if tp * pp == 1 else f"weights of one of {tp * pp} devices"
    source = f"spec.weights, {stage.scheme}: {stage.note}; {model.source}"
    size = _WHOLE.get(stage.scheme)
    if size and tp * pp == 1 and stage.total == model.num_params * size:
        inputs: tuple[Input, ...] = (
            Input("N", model.num_params, "weights", model.source),
            Input("b", size, "B", scheme),
        )
        return Figure(name, stage.total, "B", "N × b", inputs, source, basis, label)  # type: ignore[arg-type]
    inputs = _part_inputs(stage)
    formula = " + ".join(i.name for i in inputs)
    return Figure(name, stage.total, "B", formula, inputs, source, basis, label)  # type: ignore[arg-type]


def _part_inputs(stage: WeightBytes) -> tuple[Input, ...]:
    if not stage.parts or sum(stage.parts.values()) != stage.total:
        return (Input("W", stage.total, "B", stage.note),)
    kept = set(stage.unquantised)
    return tuple(
        Input(f"W_{part}", size, "B", "in the activations' type" if part in kept else stage.scheme)
        for part, size in stage.parts.items()
        if size
    )
