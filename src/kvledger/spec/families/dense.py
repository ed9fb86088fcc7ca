"""Dense decoders, one row each. Facts of the published architectures; a row is what differs from Llama."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.decoder import Traits, decoder


def every(f: Fields, index: int) -> bool:
    """Every layer slides (Mistral 7B v0.1, Phi-3)."""
    return True


def qwen2_window(f: Fields, index: int) -> bool:
    """Qwen2: only where asked for, and only from `max_window_layers` on."""
    return f.flag("use_sliding_window") and index >= f.count_or(1 << 20, "max_window_layers")


def all_but_each(period: int, *names: str) -> Callable[[Fields, int], bool]:
    """Every layer slides but each `period`-th (or as many as the config's field says)."""
    return lambda f, index: (index + 1) % (f.count_or(period, *names, low=1) if names else period) != 0


def _llama(f: Fields) -> Traits:
    bias = f.flag("attention_bias") or f.flag("bias")
    return Traits(qkv_bias=bias, out_bias=bias, mlp_bias=f.flag("mlp_bias"))


def _phi(f: Fields) -> Traits:
    return Traits(
        qkv_bias=True, out_bias=True, gated=False, mlp_bias=True, norms=1, norm_bias=True, head_bias=True,
        qk_norm="head" if f.flag("qk_layernorm") else "", qk_norm_bias=True,
    )  # fmt: skip


def _starcoder2(f: Fields) -> Traits:
    bias = f.flag("use_bias", default=True)
    return Traits(
        qkv_bias=bias, out_bias=bias, gated=False, mlp_bias=bias, norm_bias=True, tied=True, window=every
    )  # fmt: skip


def _cohere(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    norms = "heads" if f.flag("use_qk_norm") else ""
    return Traits(qkv_bias=bias, out_bias=bias, norms=1, qk_norm=norms, tied=True)


def _cohere2(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    slides = all_but_each(4, "sliding_window_pattern", "_sliding_window_pattern", "layer_switch")
    return Traits(qkv_bias=bias, out_bias=bias, norms=1, tied=True, window=slides)


def _olmo(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, norms=0, final_norms=0)  # its LayerNorm has no parameters


def _olmo2(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, qk_norm="all", window=all_but_each(4))


def _qwen3(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, qk_norm="head", window=qwen2_window)


def _stablelm(f: Fields) -> Traits:
    norms = 1 if f.flag("use_parallel_residual") else 2
    per_head = "heads" if f.flag("qk_layernorm") else ""
    return Traits(qkv_bias=f.flag("use_qkv_bias"), norms=norms, norm_bias=True, qk_norm=per_head)


def _glm(f: Fields) -> Traits:
    return Traits(qkv_bias=f.flag("attention_bias"))


def _glm4(f: Fields) -> Traits:
    return Traits(qkv_bias=f.flag("attention_bias"), norms=4)


def _chatglm(f: Fields) -> Traits:
    """GLM-3/4 as first published: fused QKV with bias, KV groups in `multi_query_group_num`."""
    return Traits(qkv_bias=f.flag("add_qkv_bias"), mlp_bias=f.flag("add_bias_linear"))


def _nemotron(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, gated=False, mlp_bias=f.flag("mlp_bias"), norm_bias=True)


def _seed_oss(f: Fields) -> Traits:
    return Traits(qkv_bias=f.flag("attention_bias", default=True), out_bias=f.flag("attention_out_bias"))


def exaone4_traits(f: Fields) -> Traits:
    """Its pattern may be written in letters: LLLG is three local layers, then a global one."""
    pattern = f.sliding_pattern(default="LLLG")
    return Traits(qk_norm="head", window=lambda f, index: pattern[index % len(pattern)] == "L")


def _ernie(f: Fields) -> Traits:
    bias = f.flag("use_bias")
    return Traits(qkv_bias=bias, out_bias=bias, mlp_bias=bias, tied=True)


def _internlm3(f: Fields) -> Traits:
    return Traits(qkv_bias=f.flag("qkv_bias"), out_bias=f.flag("bias"), mlp_bias=f.flag("bias"))


def _arcee(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, gated=False, mlp_bias=f.flag("mlp_bias"))


def _apertus(f: Fields) -> Traits:
    bias = f.flag("attention_bias")
    return Traits(qkv_bias=bias, out_bias=bias, gated=False, qk_norm="head")


def _persimmon(f: Fields) -> Traits:
    norms = "head" if f.flag("qk_layernorm", default=True) else ""
    return Traits(qkv_bias=True, out_bias=True, gated=False, mlp_bias=True, norm_bias=True, qk_norm=norms,
                  qk_norm_bias=True)  # fmt: skip


def _mistral(f: Fields) -> Traits:
    return Traits(window=every)


def _phi3(f: Fields) -> Traits:
    return Traits(window=every)


def _qwen2(f: Fields) -> Traits:
    return Traits(qkv_bias=True, window=qwen2_window)


def _qwen(f: Fields) -> Traits:
    """Qwen 1 counts gate and up together in `intermediate_size`."""
    return Traits(qkv_bias=True, inner=f.count("intermediate_size") // 2)


DENSE_FAMILIES: dict[str, parts.Builder] = {
    **dict.fromkeys(("llama", "smollm3", "granite", "internlm2", "baichuan", "yi", "minicpm", "xverse",
                     "aquila", "orion", "hyperclovax", "nanbeige"), decoder(_llama)),
    **dict.fromkeys(("mistral", "ministral", "ministral3", "mistral_text"), decoder(_mistral)),
    "qwen": decoder(_qwen), "qwen2": decoder(_qwen2), "qwen3": decoder(_qwen3),
    "phi": decoder(_phi), "phi3": decoder(_phi3),
    "starcoder2": decoder(_starcoder2), "stablelm": decoder(_stablelm),
    "cohere": decoder(_cohere), "cohere2": decoder(_cohere2),
    "olmo": decoder(_olmo), "olmo2": decoder(_olmo2), "olmo3": decoder(_olmo2),
    "glm": decoder(_glm), "glm4": decoder(_glm4), "chatglm": decoder(_chatglm),
    "nemotron": decoder(_nemotron), "seed_oss": decoder(_seed_oss), "exaone4": decoder(exaone4_traits),
    "exaone": decoder(lambda f: Traits()), "ernie4_5": decoder(_ernie), "internlm3": decoder(_internlm3),
    "hunyuan_v1_dense": decoder(lambda f: Traits(qk_norm="head")), "arcee": decoder(_arcee),
    "apertus": decoder(_apertus), "persimmon": decoder(_persimmon),
}  # fmt: skip
