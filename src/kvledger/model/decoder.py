"""A decoder-only transformer as a program of kernels: the order of the ops, their buffers and their weights.

An architecture's file says what is different about it by filling in a `Decoder`; this module turns that and the
tensors into ops. Knows no file format (tensors come by name), no scheduler and no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvledger.errors import DamagedFile
from kvledger.kernels import attention as att
from kvledger.kernels import elementwise as ew
from kvledger.kernels import matmul as mm
from kvledger.kernels import matmul_amx as amx
from kvledger.kernels.team import empty_program
from kvledger.model.packing import Tensor, dense, halves_from_pairs, pack_matrices
from kvledger.model.rope import Rope
from kvledger.spec.kv import KVLayout

Array = np.ndarray[Any, Any]
MAX_ROWS = 256  # tokens that go through the program at once: their activations stay in the L2 cache
HEAD_ROWS = 64  # rows of logits computed at once


@dataclass(frozen=True)
class Decoder:
    """What shapes the program. Lists are per layer. Defaults are Llama's."""

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


@dataclass
class Buffers:
    """Activations of up to MAX_ROWS tokens, rows padded to 16. Addresses in ops point here."""

    x: Array  # float32[rows, hidden]: the residual stream
    qkv: Array
    q: Array  # uint16 (bf16)
    mixed: Array  # float32[rows, heads · dim]: attention's output
    gate_up: Array
    wide: dict[int, mm.Activations]  # quantised activations by width
    head_x: Array
    logits: Array


@dataclass
class Model:
    """A model ready to run: two programs, and all that their addresses point at."""

    decoder: Decoder
    body: Array  # from tokens to the residual stream
    head: Array  # from `head_x` to `logits`
    buffers: Buffers
    scratch_bytes: int
    weight_bytes: int
    keep: list[object] = field(default_factory=list)


class _Weights:
    """Tensors by name, packed; keeps what it made alive and counts it."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Callable[[float], None]) -> None:
        self._tensors, self._progress = tensors, progress
        self.keep: list[object] = []
        self.bytes = 0
        self.scratch = 0
        self._done = 0

    def _find(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise DamagedFile(f"there is no tensor {name!r}")
        self._done += 1
        self._progress(min(1.0, self._done / len(self._tensors)))
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, *names: str, rows: list[Array | None] | None = None) -> mm.PackedMatrix:
        packed = pack_matrices([self._find(n) for n in names], rows)
        self.keep.append(packed)
        self.bytes += packed.data.nbytes
        self.scratch = max(self.scratch, amx.scratch_bytes(packed))
        return packed

    def vector(self, *names: str, pad: int = 0, rows: list[Array | None] | None = None) -> Array:
        parts = [dense(self._find(n)).reshape(-1).astype(np.float32) for n in names]
        if rows:
            parts = [p if r is None else p[r] for p, r in zip(parts, rows, strict=True)]
        joined = np.concatenate([*parts, np.zeros(max(0, pad - sum(map(len, parts))), np.float32)])
        self.keep.append(joined)
        self.bytes += joined.nbytes
        return joined


def build(d: Decoder, tensors: Mapping[str, Tensor], layout: KVLayout, mode: str, num_positions: int,
          progress: Callable[[float], None] = lambda share: None) -> Model:  # fmt: skip
    """Pack the weights and write the programs. `num_positions` bounds the rope tables. Raises DamagedFile."""
    return _Builder(d, tensors, layout, mode, num_positions, progress).build()


class _Builder:
    def __init__(self, d: Decoder, tensors: Mapping[str, Tensor], layout: KVLayout, mode: str, num_positions: int,
                 progress: Callable[[float], None]) -> None:  # fmt: skip
        self.d, self.layout, self.mode = d, layout, mode
        self.w = _Weights(tensors, progress)
        self.places = {layer: (g, s) for g, group in enumerate(layout.groups) for s, layer in enumerate(group.layers)}
        self.angles = {rope: rope.angles(num_positions) for rope in set(d.ropes)}
        self.zeros = np.zeros(
            -(-max(d.vocab, 2 * d.inner, (d.heads + 2 * d.kv_heads) * d.head_dim) // 16) * 16, np.float32
        )
        self.buffers = self._buffers()

    def _buffers(self) -> Buffers:
        d, f32 = self.d, np.float32
        q_shape = (d.kv_heads * MAX_ROWS * (d.heads // d.kv_heads) + 16, -(-d.head_dim // 32) * 32)
        return Buffers(
            x=np.zeros((MAX_ROWS, d.hidden), f32),
            qkv=np.zeros((MAX_ROWS, (d.heads + 2 * d.kv_heads) * d.head_dim), f32),
            q=np.zeros(q_shape, np.uint16),
            mixed=np.zeros((MAX_ROWS, d.heads * d.head_dim), f32),
            gate_up=np.zeros((MAX_ROWS, 2 * d.inner), f32),
            wide={n: mm.Activations.empty(MAX_ROWS, n) for n in {d.hidden, d.heads * d.head_dim, d.inner}},
            head_x=np.zeros((HEAD_ROWS, d.hidden), f32),
            logits=np.zeros((HEAD_ROWS, d.vocab), f32),
        )

    def build(self) -> Model:
        d, b = self.d, self.buffers
        embedding = self.w.matrix("token_embd.weight")
        body = [ew.embed(embedding, b.x.ctypes.data, d.embed_scale)]
        for layer in range(d.num_layers):
            body += self._layer(layer)
        head_matrix = self.w.matrix("output.weight") if self.w.has("output.weight") else embedding
        normed = b.wide[d.hidden]
        head = [
            ew.norm_quantise(b.head_x.ctypes.data, self.w.vector("output_norm.weight"), normed, d.eps, self.mode),
            self._product(normed, head_matrix, b.logits, add=False),
        ]
        scratch = max(self.w.scratch, att.scratch_bytes(d.head_dim), d.head_dim * 8) + 256
        keep = [*self.w.keep, self.angles, self.zeros]
        return Model(d, empty_program(body), empty_program(head), b, -(-scratch // 64) * 64, self.w.bytes, keep)

    def _layer(self, layer: int) -> list[list[int]]:
        d, b, p = self.d, self.buffers, f"blk.{layer}."
        x = b.x.ctypes.data
        normed, mixed, inner = b.wide[d.hidden], b.wide[d.heads * d.head_dim], b.wide[d.inner]
        turn = halves_from_pairs(d.heads, d.head_dim) if d.pairs else None
        turn_k = halves_from_pairs(d.kv_heads, d.head_dim) if d.pairs else None
        qkv_names, rows = [f"{p}attn_{n}.weight" for n in "qkv"], [turn, turn_k, None]
        bias = None
        if self.w.has(f"{p}attn_q.bias"):
            bias = self.w.vector(*(f"{p}attn_{n}.bias" for n in "qkv"), pad=len(self.zeros), rows=rows)
        return [
            ew.norm_quantise(x, self.w.vector(f"{p}attn_norm.weight"), normed, d.eps, self.mode),
            self._product(normed, self.w.matrix(*qkv_names, rows=rows), b.qkv, add=False, bias=bias),
            *self._attention(layer),
            ew.quantise(b.mixed.ctypes.data, mixed, self.mode),
            self._product(mixed, self.w.matrix(f"{p}attn_output.weight"), b.x, add=True),
            ew.norm_quantise(x, self.w.vector(f"{p}ffn_norm.weight"), normed, d.eps, self.mode),
            self._product(normed, self.w.matrix(f"{p}ffn_gate.weight", f"{p}ffn_up.weight"), b.gate_up, add=False),
            ew.gate_quantise(b.gate_up.ctypes.data, inner, self.mode, d.activation),
            self._product(inner, self.w.matrix(f"{p}ffn_down.weight"), b.x, add=True),
        ]

    def _attention(self, layer: int) -> list[list[int]]:
        d, b, p = self.d, self.buffers, f"blk.{layer}."
        group, slot = self.places[layer]
        shape = att.AttentionShape(
            d.heads, d.kv_heads, d.head_dim, self.layout.groups[group].block_size, self.layout.page_bytes, group, slot,
            d.windows[layer],
        )  # fmt: skip
        scale = d.head_dim**-0.5 if d.query_scale is None else d.query_scale
        norms = [
            self.w.vector(f"{p}attn_{n}_norm.weight") if self.w.has(f"{p}attn_{n}_norm.weight") else None for n in "qk"
        ]
        angles = self.angles[d.ropes[layer]]
        write = att.rope_write(shape, b.qkv.ctypes.data, b.q, angles, scale, MAX_ROWS, norms[0], norms[1], d.eps)
        return [write, *att.attention(shape, b.q, b.mixed.ctypes.data, MAX_ROWS)]

    def _product(self, x: mm.Activations, w: mm.PackedMatrix, y: Array, *, add: bool, bias: Array | None = None) -> list[int]:  # fmt: skip # noqa: E501
        bias = self.zeros if bias is None else bias
        if self.mode == "bf16":
            return amx.matmul(x, w, y.ctypes.data, y.shape[1] * 4, bias, add=add)
        return mm.matmul(x, w, y.ctypes.data, y.shape[1] * 4, self.mode, bias, add=add)
