"""Qwen 2 and 3, dense and with experts: Llama with biases or QK norms (found by their tensors), rope on halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvledger.model import llama
from kvledger.model.decoder import Decoder
from kvledger.model.packing import Tensor
from kvledger.spec.from_gguf import Facts
from kvledger.spec.model import ModelSpec


def read(facts: Facts, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """The decoder that the metadata describes."""
    decoder = llama.read(facts, spec, tensors, pairs=False)
    if facts.arch.endswith("moe") and decoder.experts is not None and not facts.has("expert_weights_norm"):
        # files before the key existed: Qwen 3 norms the chosen experts' weights, Qwen 2 does not
        return replace(decoder, experts=replace(decoder.experts, norm=facts.arch == "qwen3moe"))
    return decoder
