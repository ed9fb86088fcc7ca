"""DeepSeek V2 and V3: latent attention, leading dense layers, then many small experts with shared ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kvledger.model import llama
from kvledger.model.decoder import Decoder
from kvledger.model.latent import Latent
from kvledger.model.packing import Tensor
from kvledger.spec.from_gguf import Facts
from kvledger.spec.model import ModelSpec


def read(facts: Facts, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """The decoder that the metadata describes."""
    plain = llama.read(facts, spec, tensors)
    rope = facts.positive("rope.dimension_count")
    latent = Latent(
        facts.positive("attention.kv_lora_rank"), rope, facts.positive("attention.key_length_mla") - rope,
        facts.positive("attention.value_length_mla"), facts.count("attention.q_lora_rank", 0),
    )  # fmt: skip
    # YaRN sharpens the scores here, not cosines and sines (DeepSeek's mscale, squared: queries and keys)
    sharpened = llama.number(facts, "rope.scaling.yarn_log_multiplier", 0.0)
    stretch = 1 + sharpened * math.log(llama.positive_number(facts, "rope.scaling.factor", 1.0))
    return replace(
        plain,
        kv_heads=1,
        head_dim=latent.dim + rope,
        latent=latent,
        query_scale=(latent.nope + rope) ** -0.5 * stretch**2,
        ropes=tuple(replace(r, dim=rope, magnitude=1.0) for r in plain.ropes),
    )
