"""The feed-forward of a mixture of experts as ops. Knows how experts are chosen, not which model has them.

Shazeer et al., arXiv:1701.06538; shared experts and group-limited choice: DeepSeek-V2 and V3 (arXiv:2405.04434,
arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvledger.kernels import elementwise as ew
from kvledger.kernels import matmul as mm
from kvledger.kernels import routing
from kvledger.kernels.packed import PackedMatrix, aligned
from kvledger.kernels.simd import float_bits
from kvledger.model.linear import MAX_ROWS, Array, Ops, Weights
from kvledger.model.packing import Part, dense, pack_exact, pack_matrices


@dataclass(frozen=True, slots=True)
class Experts:
    """`used` of `num` experts work on a token. `norm`: their weights sum to 1. `groups`: see `routing.keep_groups`."""

    num: int
    used: int
    inner: int
    norm: bool
    scale: float = 1.0
    sigmoid: bool = False
    groups: int = 1
    groups_used: int = 1
    shared_inner: int = 0
    activation: str = "silu"


@dataclass(frozen=True)
class _Buffers:
    """One set for all layers: they run one after the other."""

    normed: Array
    logits: Array
    gate_up: Array
    y: Array
    shared: Array
    shared_gate: Array
    slots: Array
    weights: Array
    counts: Array
    lists: Array
    work: Array


def _buffers(ops: Ops, e: Experts, hidden: int) -> _Buffers:
    rows = ops.rows
    made = next((k for k in ops.keep if isinstance(k, _Buffers)), None)
    if made is None:
        made = _Buffers(
            rows(hidden), rows(-(-e.num // 16) * 16), rows(2 * max(e.inner, e.shared_inner)), rows(hidden),
            rows(hidden), rows(16), aligned((MAX_ROWS * e.used, hidden)),
            np.zeros(MAX_ROWS * e.used, np.float32), np.zeros(e.num, np.int64),
            np.zeros((e.num, MAX_ROWS), np.int32), np.zeros(4 * e.num, np.float32),
        )  # fmt: skip
        ops.keep.append(made)
    return made


def add_experts(ops: Ops, w: Weights, e: Experts, p: str, x: Array, norm: Array, eps: float) -> None:
    """x += the chosen experts' weighted answers to RMSNorm(x), and the shared expert's. `p`: names' beginning."""
    b = _buffers(ops, e, x.shape[1])
    ops.add(ew.add_norm(x, norm, b.normed, eps, add=False))
    router = w.packed(pack_exact(dense(w.find(f"{p}ffn_gate_inp.weight"))))
    ops.linear(b.normed, router, b.logits)
    bias = w.vector(f"{p}exp_probs_b.bias").ctypes.data if w.has(f"{p}exp_probs_b.bias") else 0
    ops.add([
        routing.ROUTE.address, b.logits.ctypes.data, b.logits.strides[0], e.num, e.used, int(e.sigmoid), bias, e.groups,
        e.groups_used, int(e.norm), float_bits(e.scale), b.weights.ctypes.data, b.counts.ctypes.data,
        b.lists.ctypes.data, b.lists.strides[0], b.work.ctypes.data,
    ])  # fmt: skip
    for index, (gate_up, down) in enumerate(_expert_matrices(w, e, p)):
        _one_expert(ops, e, b, index, gate_up, down)
    shared, gate = _shared_expert(ops, w, e, b, p)
    ops.add([
        routing.COMBINE.address, x.ctypes.data, b.slots.ctypes.data, b.weights.ctypes.data, e.used, x.shape[1], shared,
        gate, b.shared_gate.strides[0],
    ])  # fmt: skip


def _expert_matrices(w: Weights, e: Experts, p: str) -> Any:
    """Yields (gate and up, down) of each expert, packed."""
    stacks = [w.find(f"{p}ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
    for index in range(e.num):
        gate, up, down = (Part.of(t, index) for t in stacks)
        yield tuple(w.packed(pack_matrices(parts, exact=w.exact)) for parts in ([gate, up], [down]))


def _one_expert(ops: Ops, e: Experts, b: _Buffers, index: int, gate_up: PackedMatrix, down: PackedMatrix) -> None:
    count, rows = int(b.counts[index:].ctypes.data), int(b.lists[index].ctypes.data)
    inner = _columns(b.gate_up, 2 * e.inner)
    ops.feed_forward(
        b.normed, gate_up, inner, down, b.y, activation=e.activation, index=rows, share=e.used, count=count
    )
    op = [routing.SCATTER.address, b.y.ctypes.data, rows, b.slots.ctypes.data, b.y.shape[1]]
    ops.add([*op, *[0] * (mm.ROWS_AT // 8 - len(op)), count])


def _columns(buffer: Array, width: int) -> Array:
    """The same memory as dense rows of `width`."""
    return buffer.reshape(-1)[: len(buffer) * width].reshape(len(buffer), width)


def _shared_expert(ops: Ops, w: Weights, e: Experts, b: _Buffers, p: str) -> tuple[int, int]:
    """(address of its answer, address of its gate's logits), 0 for what the model lacks."""
    if not w.has(f"{p}ffn_gate_shexp.weight"):
        return 0, 0
    inner = _columns(b.gate_up, 2 * e.shared_inner)
    gate_up, down = (
        w.matrix(f"{p}ffn_gate_shexp.weight", f"{p}ffn_up_shexp.weight"),
        w.matrix(f"{p}ffn_down_shexp.weight"),
    )
    ops.feed_forward(b.normed, gate_up, inner, down, b.shared, activation=e.activation)
    if not w.has(f"{p}ffn_gate_inp_shexp.weight"):
        return int(b.shared.ctypes.data), 0
    gate = dense(w.find(f"{p}ffn_gate_inp_shexp.weight")).reshape(1, -1)
    ops.linear(b.normed, w.packed(pack_exact(gate)), b.shared_gate)
    return int(b.shared.ctypes.data), int(b.shared_gate.ctypes.data)
