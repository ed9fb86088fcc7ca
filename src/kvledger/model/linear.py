"""Products as ops: weights found by name and packed, activations as the product wants them, buffers shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvledger.errors import DamagedFile
from kvledger.kernels import elementwise as ew
from kvledger.kernels import matmul as mm
from kvledger.kernels import matmul_amx as amx
from kvledger.kernels import matmul_f32 as f32
from kvledger.kernels import packed as pk
from kvledger.kernels.gated import gated, scratch_bytes
from kvledger.kernels.isa import ISA
from kvledger.kernels.large_pages import LargePages
from kvledger.kernels.team import MEMORY
from kvledger.model.packing import Tensor, dense, pack_matrices

Array = np.ndarray[Any, Any]
# Tokens that go through the program at once: their activations stay in the L2 cache, smaller where vectors are.
MAX_ROWS = 256 if ISA.vnni else 128


class Weights:
    """Tensors by name, packed; keeps what it made alive and counts it. Raises DamagedFile for a name it lacks."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Callable[[float], None], exact: bool = False) -> None:
        self._tensors, self._progress, self.exact = tensors, progress, exact
        self.keep: list[object] = []
        self._memory = LargePages()
        self.bytes = 0
        self.scratch = scratch_bytes(MAX_ROWS)
        self._read: set[str] = set()

    def find(self, name: str) -> Tensor:
        """The tensor as stored."""
        if name not in self._tensors:
            raise DamagedFile(f"there is no tensor {name!r}")
        self._read.add(name)
        self._progress(len(self._read) / len(self._tensors))
        return self._tensors[name]

    def has(self, name: str) -> bool:
        return name in self._tensors

    @property
    def unread(self) -> tuple[str, ...]:
        """Names that nobody has asked for, in the file's order."""
        return tuple(name for name in self._tensors if name not in self._read)

    def matrix(self, *names: str, rows: Sequence[Array | None] | None = None) -> pk.PackedMatrix:
        """Matrices of equal input size, stacked; `rows[i]` reorders the outputs of the i-th."""
        return self.packed(pack_matrices([self.find(n) for n in names], rows, exact=self.exact))

    def packed(self, matrix: pk.PackedMatrix) -> pk.PackedMatrix:
        """Keep a matrix alive, in large pages, and count it."""
        matrix = replace(matrix, data=self._memory.move(matrix.data))
        self.keep.append(matrix)
        self.bytes += matrix.data.nbytes
        self.scratch = max(self.scratch, amx.scratch_bytes(matrix))
        return matrix

    def vector(self, *names: str, rows: Sequence[Array | None] | None = None) -> Array:
        """float32 vectors joined, then zeros to a multiple of 16."""
        parts = [dense(self.find(n)).reshape(-1).astype(np.float32) for n in names]
        if rows:
            parts = [p if r is None else p[r] for p, r in zip(parts, rows, strict=True)]
        total = sum(map(len, parts))
        joined: Array = pk.aligned((-(-total // 16) * 16,))
        joined[:total] = np.concatenate(parts)
        self.keep.append(joined)
        self.bytes += joined.nbytes
        return joined


class Ops:
    """A program being written. `mode` is how activations are kept for products (`packed.TERM_BITS`).

    `worth`: what every product that is added is worth at least (`packed.integer_mode`).
    """

    def __init__(self, weights: Weights, mode: str) -> None:
        self.weights, self.mode, self.worth = weights, mode, 0
        weights.exact = mode == "fp32"
        self.ops: list[list[int]] = []
        self.keep: list[object] = []
        self._activations: dict[tuple[int, int, bool], pk.Activations] = {}
        self._zeros: dict[int, Array] = {}

    def add(self, *ops: list[int]) -> None:
        self.ops += ops

    def rows(self, width: int) -> Array:
        """A buffer float32[MAX_ROWS, width]."""
        buffer: Array = pk.aligned((MAX_ROWS, width))
        self.keep.append(buffer)
        return buffer

    def mode_for(self, matrix: pk.PackedMatrix, worth: int = 0) -> str:
        """Unpacked weights have no integers to multiply: they need floating point on either side."""
        if self.mode in pk.FLOAT_MODES:
            return "fp32" if matrix.bits == 32 else self.mode
        return "fp32" if matrix.bits >= 16 else pk.integer_mode(self.mode, matrix.bits, worth | self.worth)

    def activations(self, width: int, mode: str, *, second: bool = False) -> pk.Activations:
        """The buffer for activations of this size: one for all ops, since they run one after the other.

        `second`: for an op that reads activations, too.
        """
        key = (width, pk.x_bytes(mode), second)
        if key not in self._activations:
            self._activations[key] = pk.Activations.empty(MAX_ROWS, width, mode)
            self.keep.append(self._activations[key])
        return self._activations[key]

    def zeros(self, size: int) -> Array:
        """A bias that changes nothing."""
        if size not in self._zeros:
            self._zeros[size] = pk.aligned((size,))
            self.keep.append(self._zeros[size])
        return self._zeros[size]

    def linear(self, source: Array, matrix: pk.PackedMatrix, target: Array, *, norm: Array | None = None,
               eps: float = 0.0, bias: Array | None = None, add: bool = False, worth: int = 0,
               **rows: Any) -> None:  # fmt: skip
        """target (+)= W · f(source) + bias, f being RMSNorm or nothing.

        `worth`: see `packed.integer_mode`. `rows`: `index` and `share` (see `elementwise.quantise`) and `count`, the
        address of the number of rows.
        """
        _check_fit(source, matrix, target)
        mode = self.mode_for(matrix, worth)
        x = self._quantised(source, matrix, mode, norm, eps, rows)
        self._multiplied(self.product(x, matrix, target, mode, bias, add=add), matrix, rows)

    def feed_forward(self, source: Array, matrix: pk.PackedMatrix, inner: Array, down: pk.PackedMatrix, target: Array,
                     *, activation: str, norm: Array | None = None, eps: float = 0.0, bias: Array | None = None,
                     add: bool = False, **rows: Any) -> None:  # fmt: skip
        """target (+)= down · (act(gate) · up) + bias, where `matrix` has gate's outputs, then up's, of RMSNorm(source).

        `inner` holds them where one op cannot do both (`gated`). `rows`: as `linear`'s.
        """
        _check_fit(source, matrix, inner)
        _check_fit(inner, down, target, gated=True)
        mode, out_mode = self.mode_for(matrix), self.mode_for(down, pk.TURNING)
        if matrix.num_tiles * pk.TILE < 2 * down.cols:
            raise DamagedFile(f"gate and up have {matrix.rows} outputs, and down takes {down.cols} of each")
        x = self._quantised(source, matrix, mode, norm, eps, rows)
        out = self.activations(down.cols, out_mode, second=True)
        if mode in pk.FLOAT_MODES or out_mode in pk.FLOAT_MODES:
            self._multiplied(self.product(x, matrix, inner, mode, None, add=False), matrix, rows)
            self._counted(ew.gate_quantise(inner.ctypes.data, out, out_mode, activation), rows)
        else:
            op = gated(x, matrix, mode, self.zeros(matrix.num_tiles * pk.TILE), out, out_mode, activation)
            self._multiplied(op, matrix, rows)
        self._multiplied(self.product(out, down, target, out_mode, bias, add=add), down, rows)

    def _quantised(self, source: Array, matrix: pk.PackedMatrix, mode: str, norm: Array | None, eps: float,
                   rows: Mapping[str, int]) -> pk.Activations:  # fmt: skip
        x = self.activations(matrix.cols, mode)
        chosen = {name: value for name, value in rows.items() if name != "count"}
        op = ew.norm_quantise(source.ctypes.data, norm, x, eps, mode, stride=source.strides[0], **chosen)
        self._counted(op, rows)
        return x

    def _multiplied(self, op: list[int], matrix: pk.PackedMatrix, rows: Mapping[str, int]) -> None:
        """An op that reads a matrix, which threads that wait for it ask for."""
        self._counted(op, rows)
        self.ops[-1] += [0] * (MEMORY - len(self.ops[-1])) + [matrix.data.ctypes.data, matrix.data.nbytes]

    def product(self, x: pk.Activations, matrix: pk.PackedMatrix, target: Array, mode: str, bias: Array | None,
                *, add: bool) -> list[int]:  # fmt: skip
        """The op of one product."""
        bias = self.zeros(matrix.num_tiles * pk.TILE) if bias is None else bias
        ldy = target.strides[0]
        if mode == "bf16":
            return amx.matmul(x, matrix, target.ctypes.data, ldy, bias, add=add)
        if mode == "fp32":
            return f32.matmul(x, matrix, target.ctypes.data, ldy, bias, add=add)
        return mm.matmul(x, matrix, target.ctypes.data, ldy, mode, bias, add=add)

    def _counted(self, op: list[int], rows: Mapping[str, int]) -> None:
        """An op whose number of rows lies at an address (without one: the step's)."""
        place = mm.ROWS_AT // 8
        self.ops.append([*op, *[0] * (place - len(op)), rows.get("count", 0)])


def _check_fit(source: Array, matrix: pk.PackedMatrix, target: Array, *, gated: bool = False) -> None:
    """Kernels check no bounds. Raises DamagedFile for a matrix that reads or writes past its buffers' rows."""
    reads, writes = matrix.cols * (2 if gated else 1), matrix.num_tiles * pk.TILE
    if source.shape[1] < reads or target.strides[0] < 4 * writes:
        room = f"{source.shape[1]} numbers in and {target.strides[0] // 4} out"
        raise DamagedFile(f"a matrix of {matrix.rows} × {matrix.cols} does not fit a row of {room}")
