"""Tensors of a file → packed matrices for the kernels, and plain float32 vectors. Knows ggml's block formats.

4-bit types with a scale (and minimum) per 32 stay as they are; 5- and 8-bit ones take a byte per weight, without loss.
Everything else is dequantised and quantised again to 8 bits with a scale per 32; `requantised` tells which tensors, and
docs/weights.md what it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvledger.errors import UnsupportedModel
from kvledger.kernels.joined import joined
from kvledger.kernels.packed import GROUP, TILE, PackedMatrix, pack, pack_dense
from kvledger.weights.ggml_types import GGML_TYPES
from kvledger.weights.quantised import dequantise, scales_6bit

Array = np.ndarray[Any, Any]
_FLOATS_AT_ONCE = 1 << 24  # of what is requantised
_WEIGHTS_AT_ONCE = 1 << 22  # of what is packed


class Tensor(Protocol):
    """A tensor as stored: flat uint8 `data` of `ggml_type` blocks; `shape` rows first."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ggml_type(self) -> str: ...
    @property
    def data(self) -> Array: ...


class Levels(NamedTuple):
    """w[n, k] = scale[n, k/32] · level[n, k] + minimum[n, k/32]."""

    level: Array  # uint8[N, K]
    scale: Array  # float32[N, K/32]
    minimum: Array
    bits: int


def _half(raw: Array) -> Array:
    return np.ascontiguousarray(raw).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(raw: Array) -> Array:
    """ggml's order in a block of 32: low nibbles are inputs 0–15, high nibbles 16–31."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bit(raw: Array) -> Array:
    """Bit 4 of each of 32 levels from a little-endian word."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q4_0(b: Array) -> tuple[Array, Array, Array]:
    d = _half(b[..., :2])
    return _nibbles(b[..., 2:]), d, -8 * d


def _q4_1(b: Array) -> tuple[Array, Array, Array]:
    return _nibbles(b[..., 4:]), _half(b[..., :2]), _half(b[..., 2:4])


def _q5_0(b: Array) -> tuple[Array, Array, Array]:
    d = _half(b[..., :2])
    return _nibbles(b[..., 6:]) | _fifth_bit(b[..., 2:6]), d, -16 * d


def _q5_1(b: Array) -> tuple[Array, Array, Array]:
    return _nibbles(b[..., 8:]) | _fifth_bit(b[..., 4:8]), _half(b[..., :2]), _half(b[..., 2:4])


def _q8_0(b: Array) -> tuple[Array, Array, Array]:
    d = _half(b[..., :2])
    return b[..., 2:] ^ np.uint8(128), d, -128 * d


def _group_scales(b: Array) -> tuple[Array, Array]:
    """Scales and minima of the eight groups of super-blocks. A half float times six bits is exact in float32."""
    scale, minimum = scales_6bit(b[:, 4:16])
    return _half(b[:, :2])[:, None] * scale, -_half(b[:, 2:4])[:, None] * minimum


def _groups(raw: Array) -> Array:
    """K-quants' order: 32 bytes hold a group in their low nibbles, the next one in the high nibbles."""
    quads = raw.reshape(len(raw), -1, 32)
    return np.stack([quads & 15, quads >> 4], axis=2).reshape(len(raw), -1, 32)


def _q4_k(b: Array) -> tuple[Array, Array, Array]:
    """Bytes: d, dmin, 12 of scales and minima, 128 of levels."""
    return _groups(b[:, 16:]), *_group_scales(b)


def _q5_k(b: Array) -> tuple[Array, Array, Array]:
    """As Q4_K, with 32 bytes of fifth bits before the levels: bit i of byte j belongs to level j of group i."""
    fifth = np.unpackbits(b[:, None, 16:48], axis=1, bitorder="little") << 4
    return _groups(b[:, 48:]) | fifth, *_group_scales(b)


# type → bits kept per level, and the decoder: uint8[blocks, bytes] → levels, scales, minima of its groups of 32
_BLOCKS: dict[str, tuple[int, Callable[[Array], tuple[Array, Array, Array]]]] = {
    "Q4_0": (4, _q4_0), "Q4_1": (4, _q4_1), "Q5_0": (8, _q5_0), "Q5_1": (8, _q5_1), "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k), "Q5_K": (8, _q5_k),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One matrix of a stack, as a tensor of its own."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    data: Array

    @staticmethod
    def of(stack: Tensor, index: int) -> Part:
        """Matrix `index` of [count, rows, columns]."""
        size = len(stack.data) // stack.shape[0]
        data = stack.data[index * size : (index + 1) * size]
        return Part(f"{stack.name}[{index}]", stack.shape[1:], stack.ggml_type, data)


@np.errstate(all="ignore")  # a damaged file's scale may be no number: its logits will not be, either
def levels_of(tensor: Tensor) -> Levels:
    """The levels of a matrix of a type in `_BLOCKS`; others are requantised."""
    k = _columns(tensor)
    if tensor.ggml_type not in _BLOCKS:
        return _requantise(tensor, k)
    bits, decode = _BLOCKS[tensor.ggml_type]
    blocks = np.asarray(tensor.data).reshape(-1, GGML_TYPES[tensor.ggml_type].block_bytes)
    level, scale, minimum = decode(blocks)
    groups = (-1, k // GROUP)
    return Levels(level.reshape(-1, k), scale.reshape(groups), minimum.astype(np.float32).reshape(groups), bits)


def requantised(facts: Mapping[str, tuple[tuple[int, ...], str, int]]) -> dict[str, int]:
    """Type → how many matrices of it lose bits here; `facts` are name → (shape, type, bytes)."""
    return dict(
        Counter(t for shape, t, _ in facts.values() if len(shape) > 1 and t not in _BLOCKS and t not in _FLOATS)
    )


def _columns(tensor: Tensor) -> int:
    """Inputs of a matrix. Raises UnsupportedModel where they are no multiple of 32."""
    k = tensor.shape[-1]
    if k % GROUP:
        raise UnsupportedModel(f"{tensor.name}: rows of {k} weights are no multiple of {GROUP}")
    return k


def _requantise(tensor: Tensor, k: int) -> Levels:
    """A few rows at a time: in float32 a large vocabulary would take more memory than the rest of the model."""
    rows = np.asarray(tensor.data).reshape(prod(tensor.shape[:-1]), -1)
    step, scales = max(1, _FLOATS_AT_ONCE // k), (len(rows), k // GROUP)
    levels = Levels(np.empty((len(rows), k), np.uint8), np.empty(scales, np.float32), np.empty(scales, np.float32), 8)
    for i in range(0, len(rows), step):
        raw = rows[i : i + step]
        few = quantise_8bit(dequantise(raw.reshape(-1), tensor.ggml_type, (len(raw), k)))
        for whole, part in zip(levels[:3], few[:3], strict=True):
            whole[i : i + step] = part
    return levels


def quantise_8bit(w: Array) -> Levels:
    """float32[N, K] → 8 bits with a scale per 32: level − 128 = round(127 w / max|w|)."""
    groups = w.reshape(len(w), -1, GROUP)
    scale = _short((np.abs(groups).max(-1) / 127).astype(np.float32))
    safe = np.where(scale > 0, scale, 1)[..., None]
    level = groups / safe
    np.rint(level, out=level).clip(-127, 127, out=level)
    level += 128
    return Levels(level.astype(np.uint8).reshape(w.shape), scale, -128 * scale, 8)


def _short(scale: Array) -> Array:
    """Rounded to float16, which levels make up for and which saves 32 bits a group; as they are beyond its range."""
    fits = (scale == 0) | ((scale >= np.finfo(np.float16).smallest_normal) & (scale < 65504 / 128))
    return scale.astype(np.float16).astype(np.float32) if fits.all() else scale


@np.errstate(all="ignore")
def dense(tensor: Tensor) -> Array:
    """The tensor as float32. Raises UnsupportedModel for a type nobody decodes."""
    raw = np.ascontiguousarray(tensor.data)
    if tensor.ggml_type in _FLOATS:
        return _FLOATS[tensor.ggml_type](raw).reshape(tensor.shape)
    return dequantise(raw, tensor.ggml_type, tensor.shape)


_FLOATS: dict[str, Callable[[Array], Array]] = {
    "F32": lambda raw: raw.view(np.float32),
    "F64": lambda raw: raw.view(np.float64).astype(np.float32),
    "F16": lambda raw: raw.view(np.float16).astype(np.float32),
    "BF16": lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}


def pack_exact(w: Array) -> PackedMatrix:
    """float32[N, K] as it is."""
    return pack_dense(w.astype(np.float32), 32)


def pack_matrices(tensors: Sequence[Tensor], rows: Sequence[Array | None] | None = None, *, exact: bool = False) -> PackedMatrix:  # fmt: skip # noqa: E501
    """Several matrices of equal input size as one, stacked; `rows[i]` reorders the outputs of tensor i.

    Unquantised matrices become bfloat16. `exact`: nothing is rounded; what has no exact packing becomes float32.
    Large ones in their own order are packed a stretch of rows at a time: whole, they lie in memory several times.
    """
    bits = _bits({t.ggml_type for t in tensors}, exact)
    counts = [prod(t.shape[:-1]) for t in tensors]
    is_small = sum(prod(t.shape) for t in tensors) <= _WEIGHTS_AT_ONCE
    if is_small or rows is not None or any(count % TILE for count in counts[:-1]):
        return _pack_whole(tensors, rows or [None] * len(tensors), bits)
    return joined((part for t in tensors for part in _pack_stretches(t, bits)), sum(counts))


def _bits(kinds: set[str], exact: bool) -> int:
    """Of a weight of a matrix of these types, packed."""
    if kinds & _FLOATS.keys() or (exact and not kinds <= _BLOCKS.keys()):
        return 16 if not exact or kinds == {"BF16"} else 32
    return max(_BLOCKS[kind][0] if kind in _BLOCKS else 8 for kind in kinds)  # a byte holds fewer bits, too


def _pack_whole(tensors: Sequence[Tensor], orders: Sequence[Array | None], bits: int) -> PackedMatrix:
    if bits >= 16:
        parts = [dense(t).reshape(-1, _columns(t)) for t in tensors]
        return pack_dense(np.concatenate([p if r is None else p[r] for p, r in zip(parts, orders, strict=True)]), bits)
    levels = [p if r is None else _take(p, r) for p, r in zip(map(levels_of, tensors), orders, strict=True)]
    level, scale, minimum = (np.concatenate([p[i] for p in levels]) for i in range(3))
    return pack(level, scale, minimum, bits)


def _pack_stretches(tensor: Tensor, bits: int) -> Iterator[PackedMatrix]:
    """Some rows after the other, whole tiles each but the last. What is requantised has its levels beforehand."""
    count, k = prod(tensor.shape[:-1]), _columns(tensor)
    step = max(TILE, _WEIGHTS_AT_ONCE // k // TILE * TILE)
    stretches = [slice(start, min(count, start + step)) for start in range(0, count, step)]
    if bits < 16 and tensor.ggml_type not in _BLOCKS:
        levels = levels_of(tensor)
        yield from (pack(*_take(levels, rows)[:3], bits) for rows in stretches)
        return
    data = np.asarray(tensor.data).reshape(count, -1)
    for rows in stretches:
        part = Part(tensor.name, (rows.stop - rows.start, k), tensor.ggml_type, data[rows].reshape(-1))
        yield _pack_whole([part], [None], bits)


def _take(p: Levels, rows: Array | slice) -> Levels:
    return Levels(p.level[rows], p.scale[rows], p.minimum[rows], p.bits)


def halves_from_pairs(heads: int, dim: int) -> Array:
    """Row order that turns rope on neighbouring channels (as GGUF stores Llama) into rope on halves."""
    within = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])
    return np.asarray((np.arange(heads)[:, None] * dim + within).reshape(-1))
