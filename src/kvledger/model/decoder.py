"""A decoder-only transformer as a program of kernels: the order of the ops, their buffers and their weights.

An architecture's file says what is different about it by filling in a `Decoder`; this module turns that and the
tensors into ops. Knows no file format (tensors come by name), no scheduler and no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvledger.kernels import attention as att
from kvledger.kernels import elementwise as ew
from kvledger.kernels import kv_write
from kvledger.kernels.kv_int4 import seal
from kvledger.kernels.kv_pages import AttentionShape, query_size
from kvledger.kernels.packed import EITHER, FIFTEEN_BITS, PackedMatrix, aligned
from kvledger.kernels.team import empty_program
from kvledger.model.experts import Experts, add_experts
from kvledger.model.latent import Latent, LatentBuffers, add_latent_attention, add_latent_write
from kvledger.model.linear import MAX_ROWS, Array, Ops, Weights
from kvledger.model.packing import Tensor, halves_from_pairs
from kvledger.model.rope import Rope
from kvledger.spec.kv import KVLayout
from kvledger.spec.kv_computed import kind_of

FINE_SHARE = 8  # of the layers the first eighth is worth 15 bits: all others hear its errors
HEAD_ROWS = 64  # rows of logits computed at once
# The head sees one row per sequence, prompts or not: few rows are read faster as integers, and more exactly.
HEAD_MODES = {"bf16": "int8x2"}


@dataclass(frozen=True)
class Decoder:
    """What shapes the program. Tuples are per layer. Defaults are Llama's."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    num_layers: int
    vocab: int
    max_context: int
    eps: float
    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]  # 0: all keys
    pairs: bool = False  # the file's query and key rows rotate neighbouring channels
    activation: str = "silu"
    embed_scale: float = 1.0
    query_scale: float | None = None  # None: 1 / √head_dim
    score_cap: float = 0.0  # Gemma 2: scores are cut to ± this by tanh
    logit_cap: float = 0.0
    post_norms: bool = False  # Gemma: what a block adds is normed first
    experts: Experts | None = None
    dense_layers: int = 0  # leading layers without experts
    latent: Latent | None = None  # MLA: one KV head of latent + rope channels

    @property
    def ratio(self) -> int:
        """Query heads per head of the cache."""
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        """Channels that attention gathers per query head."""
        return self.latent.dim if self.latent else self.head_dim


@dataclass
class Model:
    """A model ready to run: two programs, and all that their addresses point at.

    From op `tail` of the body on, with the last layer's attention, nothing is written that other rows read.
    """

    decoder: Decoder
    body: Array  # from tokens to the residual stream
    tail: int
    head: Array  # from `head_x` to `logits`
    x: Array  # float32[MAX_ROWS, hidden]: the residual stream
    q: Array  # [KV heads, MAX_ROWS, ·]: queries of the layer that ran last
    head_x: Array
    logits: Array
    scratch_bytes: int
    weight_bytes: int
    unread: tuple[str, ...]  # tensors of the file that no op reads
    keep: list[object] = field(default_factory=list)


def build(d: Decoder, tensors: Mapping[str, Tensor], layout: KVLayout, mode: str, num_positions: int,
          progress: Callable[[float], None] = lambda share: None) -> Model:  # fmt: skip
    """Pack the weights and write the programs. `num_positions` bounds the rope tables. Raises DamagedFile,
    UnsupportedModel.
    """
    return _Builder(d, Weights(tensors, progress), layout, mode, num_positions).build()


class _Builder:
    def __init__(self, d: Decoder, weights: Weights, layout: KVLayout, mode: str, num_positions: int) -> None:
        self.d, self.w, self.layout = d, weights, layout
        self.ops = Ops(weights, mode)
        self.places = {
            (layer, group.is_residual): (g, slot)
            for g, group in enumerate(layout.groups)
            for slot, layer in enumerate(group.layers)
        }
        self.angles = {rope: rope.angles(num_positions) for rope in set(d.ropes)}
        self.kind = kind_of(layout)
        self.size = self._shape(0, self.kind).size
        q_type = np.float32 if query_size(self.size) == 4 else np.uint16
        self.q = aligned((MAX_ROWS * d.heads + 16, -(-d.head_dim // 32) * 32), q_type)
        rows = self.ops.rows
        self.x, self.y = rows(d.hidden), rows(d.hidden)
        self.qkv = rows(0 if d.latent else (d.heads + 2 * d.kv_heads) * d.head_dim)
        self.mixed = rows(d.heads * (d.latent.value if d.latent else d.head_dim))
        self.latents = LatentBuffers.make(self.ops, d.latent, d.heads) if d.latent else None
        self.gate_up = rows(2 * d.inner)

    def build(self) -> Model:
        d, ops, w = self.d, self.ops, self.w
        embedding = w.matrix("token_embd.weight")
        ops.add(ew.embed(embedding, self.x.ctypes.data, d.embed_scale))
        tail = 0
        for layer in range(d.num_layers):
            ops.worth = FIFTEEN_BITS if layer < d.num_layers / FINE_SHARE else 0
            shape = self._shape(layer, self.kind)
            self._queries_keys_values(layer, shape)
            tail = len(ops.ops)
            self._attention(layer, shape)
            self._feed_forward(layer)
        ops.worth = 0
        body, ops.ops = ops.ops, []
        ops.mode = HEAD_MODES.get(ops.mode, ops.mode)
        head_x, logits = aligned((HEAD_ROWS, d.hidden)), aligned((HEAD_ROWS, -(-d.vocab // 16) * 16))
        matrix = w.matrix("output.weight") if w.has("output.weight") else embedding
        ops.linear(head_x, matrix, logits, norm=w.vector("output_norm.weight"), eps=d.eps)
        if d.logit_cap:
            ops.add(ew.soft_cap(logits, d.logit_cap))
        written = kv_write.scratch_bytes(d.heads, d.kv_heads, d.head_dim)
        scratch = max(w.scratch, att.scratch_bytes(d.head_dim, d.value_dim, self.size), written) + 4096
        keep: list[object] = [w.keep, ops.keep, self.angles]
        return Model(
            d,
            empty_program(body),
            tail,
            empty_program(ops.ops),
            self.x,
            self.q[: MAX_ROWS * d.heads].reshape(d.kv_heads, MAX_ROWS, -1),
            head_x,
            logits,
            -(-scratch // 64) * 64,
            w.bytes,
            w.unread,
            keep,
        )

    def _queries_keys_values(self, layer: int, shape: AttentionShape) -> None:
        """Queries into `q`, keys and values into the pool."""
        d, p = self.d, f"blk.{layer}."
        scale = d.head_dim**-0.5 if d.query_scale is None else d.query_scale
        angles = self.angles[d.ropes[layer]]
        if d.latent is not None and self.latents is not None:
            add_latent_write(self.ops, self.w, d.latent, self.latents, shape, p, self.x, self.q, angles, scale, d.eps)
        else:
            self._plain_write(shape, p, angles, scale)

    def _attention(self, layer: int, shape: AttentionShape) -> None:
        """x += the attention of `q` to the pool."""
        d, p = self.d, f"blk.{layer}."
        if d.latent is not None and self.latents is not None:
            add_latent_attention(self.ops, self.w, d.latent, self.latents, shape, p, self.q, self.mixed)
        else:
            self.ops.add(*att.attention(shape, self.q, self.mixed.ctypes.data, MAX_ROWS))
        matrix, back = self._back(f"{p}attn_output")
        self.ops.linear(self.mixed, matrix, **back)
        self._normed_back(f"{p}post_attention_norm.weight")

    def _shape(self, layer: int, kind: str, *, is_residual: bool = False) -> AttentionShape:
        d, (index, slot) = self.d, self.places[layer, is_residual]
        group, residual = self.layout.groups[index], 0 if is_residual else self.layout.storage.residual
        return AttentionShape(
            d.heads, d.kv_heads, d.head_dim, group.block_size, group.page_bytes, index, slot, d.windows[layer],
            d.score_cap, kind, d.latent.dim if d.latent else 0, self.layout.block_bytes,
            self._shape(layer, "bf16", is_residual=True) if residual else None, residual,
        )  # fmt: skip

    def _plain_write(self, shape: AttentionShape, p: str, angles: Array, scale: float) -> None:
        d, w = self.d, self.w
        turn, turn_k = (halves_from_pairs(n, d.head_dim) if d.pairs else None for n in (d.heads, d.kv_heads))
        rows = [turn, turn_k, None]
        bias = None
        if w.has(f"{p}attn_q.bias"):
            bias = w.vector(*(f"{p}attn_{n}.bias" for n in "qkv"), rows=rows)
        matrix = w.matrix(*(f"{p}attn_{n}.weight" for n in "qkv"), rows=rows)
        self.ops.linear(
            self.x, matrix, self.qkv, norm=w.vector(f"{p}attn_norm.weight"), eps=d.eps, bias=bias, worth=EITHER
        )
        norms = [w.vector(f"{p}attn_{n}_norm.weight") if w.has(f"{p}attn_{n}_norm.weight") else None for n in "qk"]
        source = self.qkv.ctypes.data
        written = shape.newest or shape
        self.ops.add(kv_write.rope_write(written, source, self.q, angles, scale, MAX_ROWS, norms[0], norms[1], d.eps))
        if shape.newest:
            self.ops.add(seal(shape))

    def _feed_forward(self, layer: int) -> None:
        d, w, p = self.d, self.w, f"blk.{layer}."
        norm = w.vector(f"{p}ffn_norm.weight")
        if d.experts is not None and layer >= d.dense_layers:
            add_experts(self.ops, w, d.experts, p, self.x, norm, d.eps)
            return
        matrix = w.matrix(f"{p}ffn_gate.weight", f"{p}ffn_up.weight")
        down, back = self._back(f"{p}ffn_down")
        self.ops.feed_forward(self.x, matrix, self.gate_up, down, norm=norm, eps=d.eps, activation=d.activation, **back)
        self._normed_back(f"{p}post_ffw_norm.weight")

    def _back(self, name: str) -> tuple[PackedMatrix, dict[str, Any]]:
        """A matrix whose product goes back to the residual stream, and how: added, or into `y`, to be normed first."""
        bias = self.w.vector(f"{name}.bias") if self.w.has(f"{name}.bias") else None
        add = not self.d.post_norms
        return self.w.matrix(f"{name}.weight"), {"target": self.x if add else self.y, "bias": bias, "add": add}

    def _normed_back(self, norm: str) -> None:
        """x += the norm of what a block gave, in architectures that have one there."""
        if self.d.post_norms:
            self.ops.add(ew.add_norm(self.y, self.w.vector(norm), self.x, self.d.eps))
