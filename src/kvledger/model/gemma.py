"""Gemma 2 and 3: norms after each block as well, scaled embedding, GELU, windows in most layers, capped scores (2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvledger.model import llama
from kvledger.model.decoder import Decoder
from kvledger.model.packing import Tensor
from kvledger.model.rope import Rope
from kvledger.spec.from_gguf import Facts
from kvledger.spec.model import ModelSpec


def read(facts: Facts, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """The decoder that the metadata describes."""
    plain = llama.read(facts, spec, tensors, pairs=False)
    return replace(
        plain,
        activation="gelu",
        embed_scale=plain.hidden**0.5,
        post_norms=True,
        ropes=tuple(_rope(facts, plain, layer) for layer in range(plain.num_layers)),
    )


def _rope(facts: Facts, plain: Decoder, layer: int) -> Rope:
    """Gemma 3 turns window layers at a base of their own, and does not stretch them."""
    if facts.arch != "gemma3" or not plain.windows[layer]:
        return plain.ropes[layer]
    return Rope(plain.ropes[layer].dim, llama.positive_number(facts, "rope.freq_base_swa", 10000.0))
