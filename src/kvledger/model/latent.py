"""Multi-head latent attention as ops, the up-projections absorbed: queries go into the latent's space, and what they
gather there is unfolded to values. DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvledger.kernels import attention as att
from kvledger.kernels.kv_pages import AttentionShape
from kvledger.kernels.latent import latent_write
from kvledger.kernels.packed import EITHER, PackedMatrix
from kvledger.model.linear import MAX_ROWS, Array, Ops, Weights
from kvledger.model.packing import Part, halves_from_pairs, pack_matrices


@dataclass(frozen=True, slots=True)
class Latent:
    """Dimensions: latent, rope key, a head's other key channels, a head's values. `query_rank` 0: none."""

    dim: int
    rope: int
    nope: int
    value: int
    query_rank: int = 0


@dataclass(frozen=True)
class LatentBuffers:
    """One set for all layers."""

    kv: Array
    low: Array
    queries: Array
    absorbed: Array
    gathered: Array

    @staticmethod
    def make(ops: Ops, m: Latent, heads: int) -> LatentBuffers:
        """Buffers for MAX_ROWS tokens."""
        rows = ops.rows
        return LatentBuffers(
            rows(-(-(m.dim + m.rope) // 16) * 16), rows(max(16, m.query_rank)), rows(heads * (m.nope + m.rope)),
            rows(heads * m.dim), rows(heads * m.dim),
        )  # fmt: skip


def add_latent_write(ops: Ops, w: Weights, m: Latent, b: LatentBuffers, shape: AttentionShape, p: str, x: Array,
                     q: Array, angles: Array, scale: float, eps: float) -> None:  # fmt: skip
    """q = the layer's queries of RMSNorm(x), absorbed; latent and rope key go to the pool. `p`: names' beginning."""
    norm = w.vector(f"{p}attn_norm.weight")
    order = np.concatenate([np.arange(m.dim), m.dim + halves_from_pairs(1, m.rope)])
    ops.linear(x, w.matrix(f"{p}attn_kv_a_mqa.weight", rows=[order]), b.kv, norm=norm, eps=eps, worth=EITHER)
    _queries(ops, w, m, b, shape.heads, p, x, norm, eps)
    width = m.nope + m.rope
    for head, key in enumerate(_per_head(w, f"{p}attn_k_b.weight", shape.heads)):
        into = b.absorbed[:, head * m.dim : (head + 1) * m.dim]
        ops.linear(b.queries[:, head * width : head * width + m.nope], key, into, worth=EITHER)
    c_norm = w.vector(f"{p}attn_kv_a_norm.weight")
    ops.add(latent_write(shape, b.kv, b.queries, b.absorbed, q, angles, scale, c_norm, eps))


def add_latent_attention(ops: Ops, w: Weights, m: Latent, b: LatentBuffers, shape: AttentionShape, p: str, q: Array,
                         mixed: Array) -> None:  # fmt: skip
    """mixed[rows, heads · value] = the attention of `q` to the pool, unfolded."""
    ops.add(*att.attention(shape, q, b.gathered.ctypes.data, MAX_ROWS))
    for head, value in enumerate(_per_head(w, f"{p}attn_v_b.weight", shape.heads)):
        into = mixed[:, head * m.value : (head + 1) * m.value]
        ops.linear(b.gathered[:, head * m.dim : (head + 1) * m.dim], value, into, worth=EITHER)


def _queries(ops: Ops, w: Weights, m: Latent, b: LatentBuffers, heads: int, p: str, x: Array, norm: Array,
             eps: float) -> None:  # fmt: skip
    """Fill `b.queries`: per head the plain channels, then those that turn, as halves."""
    width = m.nope + m.rope
    within = np.concatenate([np.arange(m.nope), m.nope + halves_from_pairs(1, m.rope)])
    order = (np.arange(heads)[:, None] * width + within).reshape(-1)
    if not m.query_rank:
        ops.linear(x, w.matrix(f"{p}attn_q.weight", rows=[order]), b.queries, norm=norm, eps=eps, worth=EITHER)
        return
    ops.linear(x, w.matrix(f"{p}attn_q_a.weight"), b.low, norm=norm, eps=eps, worth=EITHER)
    low_norm = w.vector(f"{p}attn_q_a_norm.weight")
    ops.linear(b.low, w.matrix(f"{p}attn_q_b.weight", rows=[order]), b.queries, norm=low_norm, eps=eps, worth=EITHER)


def _per_head(w: Weights, name: str, heads: int) -> list[PackedMatrix]:
    """Matrices of a stack [heads, outputs, inputs], packed."""
    stack = w.find(name)
    return [w.packed(pack_matrices([Part.of(stack, head)], exact=w.exact)) for head in range(heads)]
