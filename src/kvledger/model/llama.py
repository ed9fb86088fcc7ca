"""Llama and what has its plan: SmolLM2, Llama 2 and 3.x, Mistral, Mixtral. Other architectures vary it."""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.model.decoder import Decoder
from kvledger.model.experts import Experts
from kvledger.model.packing import Tensor, dense
from kvledger.model.rope import Rope, yarn_factors, yarn_magnitude
from kvledger.spec.from_gguf import Facts
from kvledger.spec.kv import WindowKV
from kvledger.spec.model import ModelSpec

MAX_NUMBER = 3e38  # of float32
MAX_CAP = 1000.0
_SCALINGS = ("none", "linear", "yarn")


def read(facts: Facts, spec: ModelSpec, tensors: Mapping[str, Tensor], *, pairs: bool = True) -> Decoder:
    """The decoder that a GGUF's metadata describes. `pairs`: queries and keys rotate neighbouring channels."""
    dim = facts.key_dim(0)
    rope = read_rope(facts, tensors, facts.count("rope.dimension_count", dim))
    caches = [layer.cache for layer in spec.layers]
    return Decoder(
        hidden=spec.hidden_size,
        heads=facts.positive("attention.head_count"),
        kv_heads=facts.positive("attention.head_count_kv", facts.positive("attention.head_count")),
        head_dim=dim,
        inner=facts.count("feed_forward_length", 0),
        num_layers=spec.num_layers,
        vocab=spec.vocab_size,
        max_context=spec.max_context,
        eps=positive_number(facts, "attention.layer_norm_rms_epsilon"),
        ropes=(rope,) * spec.num_layers,
        windows=tuple(c.window if isinstance(c, WindowKV) else 0 for c in caches),
        pairs=pairs,
        query_scale=number(facts, "attention.scale", dim**-0.5),
        score_cap=soft_cap(facts, "attn_logit_softcapping"),
        logit_cap=soft_cap(facts, "final_logit_softcapping"),
        experts=read_experts(facts),
        dense_layers=facts.count("leading_dense_block_count", 0),
    )


def read_experts(facts: Facts) -> Experts | None:
    """Mixture of experts, if the metadata has one (Mixtral is a `llama` with experts)."""
    num = facts.count("expert_count", 0)
    if num == 0:
        return None
    inner = facts.positive("expert_feed_forward_length", facts.count("feed_forward_length"))
    shared = facts.count("expert_shared_feed_forward_length", inner * facts.count("expert_shared_count", 0))
    return Experts(
        num, facts.positive("expert_used_count"), inner,
        norm=bool(facts.metadata.get(f"{facts.arch}.expert_weights_norm", facts.arch == "llama")),
        scale=number(facts, "expert_weights_scale", 1.0),
        sigmoid=facts.count("expert_gating_func", 1) == 2,
        groups=facts.count("expert_group_count", 1),
        groups_used=facts.count("expert_group_used_count", 1),
        shared_inner=shared,
    )  # fmt: skip


def number(facts: Facts, key: str, default: float | None = None) -> float:
    """A real number of the metadata. Raises DamagedFile where it is missing or no float32 can hold it."""
    value = facts.metadata.get(f"{facts.arch}.{key}", default)
    real = float(value) if isinstance(value, int | float) else float(facts.count(key))
    if not abs(real) < MAX_NUMBER:  # NaN, too
        raise DamagedFile(f"'{facts.arch}.{key}' is {real}, not a finite number")
    return real


def positive_number(facts: Facts, key: str, default: float | None = None) -> float:
    """As `number`, and above 0."""
    real = number(facts, key, default)
    if real <= 0:
        raise DamagedFile(f"'{facts.arch}.{key}' is {real}; it must be above 0")
    return real


def soft_cap(facts: Facts, key: str) -> float:
    """What tanh cuts to; 0 where the file says nothing. Beyond MAX_CAP float32 has too few bits for it."""
    cap = number(facts, key, 0.0)
    if not 0 <= cap <= MAX_CAP:
        raise DamagedFile(f"'{facts.arch}.{key}' is {cap}; it must be between 0 and {MAX_CAP:g}")
    return cap


def read_rope(facts: Facts, tensors: Mapping[str, Tensor], dim: int) -> Rope:
    """Rope as the metadata says; frequency factors from the tensor where the file has one (Llama 3).

    A factor without a type is a linear one, as in llama.cpp.
    """
    base = positive_number(facts, "rope.freq_base", 10000.0)
    kind = facts.metadata.get(f"{facts.arch}.rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"rope scaling {kind!r} is not computed here; computed are {', '.join(_SCALINGS)}")
    factor = positive_number(facts, "rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in tensors:
        factors = dense(tensors["rope_freqs.weight"]).reshape(-1)
        if not ((factors > 0) & (factors < MAX_NUMBER)).all():
            raise DamagedFile("tensor 'rope_freqs.weight' holds a factor that is no number above 0")
        return Rope(dim, base, factors=tuple(factors.tolist()))
    if kind == "yarn":
        trained = facts.positive("rope.scaling.original_context_length")
        ends = (("fast", 32.0), ("slow", 1.0))
        turns = [positive_number(facts, f"rope.scaling.yarn_beta_{end}", at) for end, at in ends]
        return Rope(
            dim, base, factors=yarn_factors(dim, base, factor, trained, *turns), magnitude=yarn_magnitude(factor)
        )
    return Rope(dim, base, linear=factor if kind == "linear" else 1.0)
