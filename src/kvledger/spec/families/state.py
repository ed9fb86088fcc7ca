"""Mixers whose memory does not grow: Mamba 1 and 2, gated delta nets, KDA, lightning attention, short convolutions.

Each gives the weights of one mixer and the `StateKV` it keeps per sequence: the last inputs of its convolution
(kernel − 1 columns) and its recurrent state. Convolutions are stored in the type of the activations; the recurrent
state in the type the config names, else in that of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.spec.config_fields import Fields
from kvledger.spec.families import parts
from kvledger.spec.families.parts import Weights, linear, norm
from kvledger.spec.kv import StateKV
from kvledger.spec.model import Weight

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def activation_bytes(f: Fields) -> int:
    """Bytes of one activation: 4 where the config says float32, else 2."""
    return _SIZES.get(f.text("dtype", "torch_dtype"), 2)


def recurrent_bytes(f: Fields) -> int:
    """Bytes of one number of the recurrent state."""
    return _SIZES.get(f.text("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), activation_bytes(f))


def convolution(channels: int, kernel: int, *, bias: bool = False, units: int = 0) -> Weights:
    """Depthwise convolution over time: `kernel` taps per channel."""
    weights = [Weight("other", channels, kernel, split="rows", units=units)]
    return weights + ([Weight("bias", channels, split="rows", units=units)] if bias else [])


# ---------------------------------------------------------------------------------------------- Mamba


def mamba1_sizes(f: Fields) -> tuple[int, int, int]:
    """(channels, state size, rank of the time step) of a Mamba layer (arXiv:2312.00752)."""
    hidden = parts.hidden_size(f)
    inner = f.count_or(f.count_or(2, "mamba_expand", "expand", low=1) * hidden, "intermediate_size_mamba", low=1)
    rank = f.count_or(-(-hidden // 16), "mamba_dt_rank", "time_step_rank", low=1, auto="auto")
    return inner, f.count("mamba_d_state", "state_size"), rank


def mamba1(f: Fields, *, inner_norms: bool = False) -> tuple[Weights, StateKV]:
    """Mamba as in Jamba (`inner_norms`: RMSNorm on the time step and both state projections)."""
    hidden, kernel = parts.hidden_size(f), f.count("mamba_d_conv", "conv_kernel")
    inner, state, rank = mamba1_sizes(f)
    bias = f.flag("mamba_proj_bias", "use_bias")
    weights = linear("state", 2 * inner, hidden, bias=bias, split="rows")
    weights += convolution(inner, kernel, bias=f.flag("mamba_conv_bias", "use_conv_bias", default=True))
    weights += linear("state", rank + 2 * state, inner, split="cols")
    weights += linear("state", inner, rank, bias=True, split="rows")
    weights += [Weight("other", inner, state, split="rows"), Weight("other", inner, split="rows")]  # A, D
    weights += linear("state", hidden, inner, bias=bias, split="cols")
    if inner_norms:
        weights += norm(rank) + norm(state, 2)
    cache = StateKV(((inner * (kernel - 1), activation_bytes(f), inner), (inner * state, recurrent_bytes(f), inner)))
    return weights, cache


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Sizes of a Mamba-2 mixer (arXiv:2405.21060). `norm_size` 0: no gated norm."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    norm_size: int
    proj_bias: bool
    conv_bias: bool
    inner: int


def read_mamba2(f: Fields) -> Mamba2:
    """Sizes in either spelling (Bamba, Granite, Falcon-H1: `mamba_d_…`; Nemotron-H: `mamba_num_heads` …)."""
    heads = f.count("mamba_n_heads", "mamba_num_heads", "num_heads")
    dim = f.maybe_count("mamba_d_head", "mamba_head_dim", "head_dim")
    expanded = f.count_or(2, "mamba_expand", "expand", low=1) * parts.hidden_size(f)
    inner = f.count_or(heads * dim if dim else expanded, "mamba_d_ssm", low=1)
    return Mamba2(
        heads=heads,
        head_dim=inner // heads,
        groups=f.count_or(1, "mamba_n_groups", "n_groups", low=1),
        state=f.count("mamba_d_state", "ssm_state_size", "state_size"),
        kernel=f.count("mamba_d_conv", "conv_kernel"),
        norm_size=inner if f.flag("mamba_rms_norm", default=True) else 0,
        proj_bias=f.flag("mamba_proj_bias", "use_bias"),
        conv_bias=f.flag("mamba_conv_bias", "use_conv_bias", default=True),
        inner=inner,
    )


def mamba2(f: Fields) -> tuple[Weights, StateKV]:
    """One Mamba-2 mixer. The projections of a single group are replicated by every rank; several are split."""
    m, hidden = read_mamba2(f), parts.hidden_size(f)
    grouped = 2 * m.groups * m.state
    weights = linear("state", 2 * m.inner + grouped + m.heads, hidden, bias=m.proj_bias, split="rows")
    weights += convolution(m.inner + grouped, m.kernel, bias=m.conv_bias)
    weights += [Weight("other", m.heads, count=3, split="rows")]  # A, D and the time step's bias
    weights += [Weight("norm", m.norm_size, split="rows")] if m.norm_size else []
    weights += linear("state", hidden, m.inner, bias=m.proj_bias, split="cols", units=m.heads)
    size = activation_bytes(f)
    cache = StateKV(
        (
            (m.inner * (m.kernel - 1), size, m.inner),
            (grouped * (m.kernel - 1), size, m.groups),
            (m.heads * m.head_dim * m.state, recurrent_bytes(f), m.heads),
        )
    )
    return weights, cache


# ---------------------------------------------------------------------------------------------- linear attention


def delta_net(f: Fields) -> tuple[Weights, StateKV]:
    """Gated delta net of Qwen3-Next and Qwen3.5 (arXiv:2412.06464): one key × value matrix per value head."""
    hidden, kernel = parts.hidden_size(f), f.count("linear_conv_kernel_dim")
    key_heads, value_heads = f.count("linear_num_key_heads"), f.count("linear_num_value_heads")
    key_dim, value_dim = f.count("linear_key_head_dim"), f.count("linear_value_head_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    channels = 2 * keys + values
    weights = linear("state", channels + values, hidden, split="rows", units=key_heads)
    weights += linear("state", 2 * value_heads, hidden, split="rows", units=value_heads)
    weights += convolution(channels, kernel, units=key_heads)
    weights += [Weight("other", value_heads, count=2, split="rows"), *norm(value_dim)]
    weights += linear("state", hidden, values, split="cols", units=value_heads)
    recurrent = value_heads * key_dim * value_dim
    cache = StateKV(
        ((channels * (kernel - 1), activation_bytes(f), channels), (recurrent, recurrent_bytes(f), value_heads))
    )
    return weights, cache


def kimi_delta(f: Fields) -> tuple[Weights, StateKV]:
    """Kimi delta attention (arXiv:2510.26692): three convolutions, a low-rank gate, an fp32 state."""
    section = f.section("linear_attn_config") or f
    hidden = parts.hidden_size(f)
    heads = section.count("linear_num_heads", "num_heads")
    dim = section.count("linear_head_dim", "head_dim")
    kernel = section.count("short_conv_kernel_size", "linear_conv_kernel_dim")
    width = heads * dim
    weights = [w for _ in range(3) for w in linear("state", width, hidden, split="rows", units=heads)]
    weights += convolution(3 * width, kernel, units=heads)
    for _ in range(2):  # forget gate and output gate, each through a bottleneck of one head's width
        weights += linear("state", dim, hidden) + linear("state", width, dim, split="rows", units=heads)
    weights += [Weight("other", width, split="rows"), Weight("other", heads, split="rows")]  # time step bias, A
    weights += linear("state", heads, hidden, split="rows") + norm(dim)
    weights += linear("state", hidden, width, split="cols", units=heads)
    cache = StateKV(((3 * width * (kernel - 1), activation_bytes(f), 3 * width), (heads * dim * dim, 4, heads)))
    return weights, cache


def lightning(f: Fields) -> tuple[Weights, StateKV]:
    """Lightning attention of MiniMax-Text-01 (arXiv:2501.08313): one head × head matrix in fp32 per head."""
    heads, hidden = parts.read_heads(f), parts.hidden_size(f)
    width = heads.num * heads.key_dim
    weights = linear("state", 3 * width, hidden, split="rows", units=heads.num) + norm(width)
    weights += linear("state", width, hidden, split="rows", units=heads.num)  # output gate
    weights += linear("state", hidden, width, split="cols", units=heads.num)
    return weights, StateKV(((heads.num * heads.key_dim * heads.key_dim, 4, heads.num),))


def short_convolution(f: Fields) -> tuple[Weights, StateKV]:
    """Gated short convolution of LFM2: keeps the last `conv_L_cache` − 1 inputs."""
    hidden, kernel, bias = parts.hidden_size(f), f.count("conv_L_cache"), f.flag("conv_bias")
    weights = linear("state", 3 * hidden, hidden, bias=bias, split="rows") + convolution(hidden, kernel, bias=bias)
    weights += linear("state", hidden, hidden, bias=bias, split="cols")
    return weights, StateKV(((hidden * (kernel - 1), activation_bytes(f), hidden),))
