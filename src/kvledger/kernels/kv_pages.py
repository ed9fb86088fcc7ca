"""How keys and values lie in a page, for every KV type; and bringing them into the form that attention computes with.

A page is one layer's part of a block of `block` tokens. KV heads follow one another; each has its keys, the keys'
scales (int8), its values, the values' scales:

    bf16, int8, fp8   keys   [tiles of 16 tokens][D/2][16][2]      values [block/2][D][2]
    fp32              keys   [tiles of 16 tokens][D][16]           values [block][D]
    latent            as keys alone; the values are the first channels of the keys
    int4              groups of 32 tokens, see `kv_int4`

(blocks of 8 tokens have tiles of 8). The bytes are exactly `KVLayout`'s: nothing is padded. fp8: e4m3 without a scale.
int8: per token and head a word of a float32 scale whose last byte is the zero, x = scale · (level − zero), level and
zero 0 … 255: their difference is exact in bfloat16. What has few levels is kept transformed (`hadamard`): queries
and keys alike, which leaves scores as they are, and values, whose mix is transformed back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.hadamard import transform_width
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import inline

KINDS = {"bf16": 0, "int8": 1, "fp8_e4m3": 2, "fp32": 3, "int4": 4, "latent_bf16": 5, "latent_fp32": 6}
BF16, INT8, FP8, FP32, INT4, LATENT, LATENT_FP32 = range(7)
SEALED_TOKENS = 32  # tokens that int4 quantises together
_ELEMENT_BYTES = {"bf16": 2, "int8": 1, "fp8_e4m3": 1, "fp32": 4, "latent_bf16": 2, "latent_fp32": 4}
SPREAD = ("int8", "fp8_e4m3")  # types so coarse that channels that stand out are spread over the others
BF16_MAX = 3.3895314e38
INT8_MAX = 1e38  # the range of a head must be finite
FP8_MAX = 448.0


def query_size(size: int) -> int:
    """Bytes of a query's number beside keys of `size` bytes: float32 where bfloat16 has no dot products."""
    return size if ISA.bf16 else 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention. `slot` and `group` place it in the pool; `window` 0: all keys; `cap` 0: none.

    `page_bytes`: of this group's pages, which lie one after another in a block of `block_bytes` (0: the page is alone).
    """

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    page_bytes: int
    group: int
    slot: int
    window: int = 0
    cap: float = 0.0
    kind: str = "bf16"
    latent: int = 0  # leading channels of the keys that are the values, too (MLA)
    block_bytes: int = 0
    newest: AttentionShape | None = None  # where the newest `residual` tokens lie, for types that keep them in bf16
    residual: int = 0

    @property
    def stride(self) -> int:
        """Bytes from a block to the next."""
        return self.block_bytes or self.page_bytes

    @property
    def offset(self) -> int:
        """Bytes from a block's beginning to this layer's page."""
        return self.slot * self.page_bytes

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.latent or self.dim

    @property
    def ratio(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        """Bytes of a number in the form that is computed with."""
        return 4 if self.kind.endswith("fp32") else 2

    @property
    def spread(self) -> int:
        """Channels of a head that are transformed together; 0: none."""
        return transform_width(self.dim) if self.kind in SPREAD else 0

    @property
    def padded_dim(self) -> int:
        """Channels of a query row: whole AMX tiles of 32."""
        return -(-self.dim // 32) * 32

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in a page."""
        if self.kind == "int4":
            return self.block_size // SEALED_TOKENS * 40 * self.dim
        part = self.block_size * (self.dim * _ELEMENT_BYTES[self.kind] + (4 if self.kind == "int8" else 0))
        return part if self.latent else 2 * part


# ---------------------------------------------------------------------------------------------- writing


@inline
def clamped(address, top):  # type: ignore[no-untyped-def]
    """16 float32, cut to ±top, NaN to −top: a block outlives its sequence, and 0 · NaN is not 0."""
    return simd.minimum(simd.maximum(simd.load_f32(address), simd.splat(np.float32(-top))), simd.splat(np.float32(top)))


@inline
def to_int8(source, target, dim):  # type: ignore[no-untyped-def]
    """dim float32 → levels at `target`. Returns the word of scale and zero, as float32."""
    low = high = simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        x = clamped(source + 4 * d, INT8_MAX)
        low, high = simd.minimum(low, x), simd.maximum(high, x)
    least, top = simd.reduce_min(low), simd.reduce_max(high)
    scale = as_scale(simd.f32_bits((top - least) / np.float32(255)))
    inverse = np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0)
    zero = min(np.int32(255), np.int32(np.float32(0.5) - least * inverse))
    wide, shift = simd.splat(inverse), simd.splat_i32(zero)
    limit = simd.splat(np.float32(255))
    nothing = simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        level = simd.add_i32(simd.round_i32(simd.mul(clamped(source + 4 * d, INT8_MAX), wide)), shift)
        level = simd.round_i32(simd.minimum(simd.maximum(simd.to_f32(level), nothing), limit))
        simd.store_i8(target + d, level)
    return simd.as_f32(np.int64(simd.f32_bits(scale) | zero))


@inline
def as_scale(word):  # type: ignore[no-untyped-def]
    """The scale of a word of int8's: float32 but for the last byte."""
    return simd.as_f32(np.int64(word & np.int32(-256)))


@inline
def to_elements(kind, source, target, dim):  # type: ignore[no-untyped-def]
    """dim float32 → the type's elements at `target`. Returns their scale."""
    if kind == INT8:
        return to_int8(source, target, dim)
    for d in range(0, dim, 16):
        if kind == FP8:
            simd.store_i8(target + d, simd.f32_to_e4m3(clamped(source + 4 * d, FP8_MAX)))
        elif kind in (FP32, LATENT_FP32):
            simd.store_f32(target + 4 * d, clamped(source + 4 * d, BF16_MAX))
        else:
            simd.store_bf16(target + 2 * d, clamped(source + 4 * d, BF16_MAX))
    return np.float32(1)


@inline
def write_key(kind, elements, scale, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Put a token's key at place `within` of a head's page at `to`."""
    tile = min(block, 16)
    start, lane = within // tile * tile * dim, within % tile
    for d in range(0, dim, 2):
        if kind in (FP32, LATENT_FP32):
            simd.put_f32(to + (start + d * tile + lane) * 4, simd.get_f32(elements + 4 * d))
            simd.put_f32(to + (start + (d + 1) * tile + lane) * 4, simd.get_f32(elements + 4 * d + 4))
        elif kind in (BF16, LATENT):
            simd.put_i32(to + (start + d * tile + lane * 2) * 2, simd.get_i32(elements + 2 * d))
        else:
            simd.put_u16(to + start + d * tile + lane * 2, simd.get_u16(elements + d))
    if kind == INT8:
        simd.put_f32(to + block * dim + within * 4, scale)


@inline
def write_value(kind, elements, scale, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Put a token's value at place `within` of a head's page at `to` (where its keys begin)."""
    start = within // 2 * dim * 2 + within % 2
    for d in range(dim):
        if kind == FP32:
            simd.put_f32(to + ((block + within) * dim + d) * 4, simd.get_f32(elements + 4 * d))
        elif kind == BF16:
            simd.put_u16(to + (block * dim + start + 2 * d) * 2, simd.get_u16(elements + 2 * d))
        else:
            part = block * dim + (block * 4 if kind == INT8 else 0)
            simd.put_u8(to + part + start + 2 * d, simd.get_u8(elements + d))
    if kind == INT8:
        simd.put_f32(to + 2 * block * dim + block * 4 + within * 4, scale)


# ---------------------------------------------------------------------------------------------- reading


@inline
def to_form(kind, source, index, target):  # type: ignore[no-untyped-def]
    """16 elements from number `index` on → bf16 at `target`: exact."""
    if kind == FP8:
        simd.store_bf16(target, simd.e4m3_to_f32(simd.load_u8(source + index)))
    else:
        simd.store_bf16(target, simd.load_bf16(source + 2 * index))


@inline
def copy_scales(words, count, to):  # type: ignore[no-untyped-def]
    """The scales of `count` words of int8's."""
    for key in range(count):
        simd.put_f32(to + key * 4, as_scale(simd.get_i32(words + key * 4)))


@inline
def zero_of(words):  # type: ignore[no-untyped-def]
    """The last byte of each word."""
    eight = simd.splat_i32(np.int32(8))
    return simd.sub_i32(words, simd.shl_i32(simd.sra_i32(words, eight), eight))


@inline
def without_zero(at, zeros):  # type: ignore[no-untyped-def]
    """16 levels − their zeros, as float32: at most ±255, exact in bfloat16."""
    return simd.to_f32(simd.sub_i32(simd.load_u8(at), zeros))


@inline
def stage_keys(kind, base, within, block, dim, half, out, scales):  # type: ignore[no-untyped-def]
    """A tile of keys (`half` 1: the second eight tokens of one) from a head's page → [D/2][16][2] bf16 or [D][16]."""
    tile = min(block, 16)
    start = within // tile * tile * dim
    if kind in (FP32, LATENT_FP32):
        for d in range(dim):
            for key in range(tile):
                value = simd.get_f32(base + (start + d * tile + key) * 4)
                simd.put_f32(out + (d * 16 + half * 8 + key) * 4, value)
        return
    if kind == INT8:
        words = base + block * dim + within // tile * tile * 4
        copy_scales(words, tile, scales)
        zeros = zero_of(simd.load_i32(words))
        for d in range(dim // 2):
            at, to = base + start + d * tile * 2, out + (d * 32 + half * 16) * 2
            simd.store_bf16(to, without_zero(at, simd.low_lanes_twice(zeros)))
            if tile == 16:
                simd.store_bf16(to + 32, without_zero(at + 16, simd.high_lanes_twice(zeros)))
        return
    for d in range(dim // 2):
        for part in range(tile // 8):
            to = out + (d * 32 + (half + part) * 16) * 2
            to_form(kind, base, start + d * tile * 2 + part * 16, to)


@inline
def stage_values(kind, base, within, block, dim, half, out, scales):  # type: ignore[no-untyped-def]
    """A tile of values, as `stage_keys` → [8][D][2] bf16 or [16][D] float32."""
    tile = min(block, 16)
    start, to = within // tile * tile * dim, half * 8 * dim
    count = tile * dim
    if kind == FP32:
        for i in range(0, count, 16):
            simd.store_f32(out + (to + i) * 4, simd.load_f32(base + (block * dim + start + i) * 4))
        return
    source = base + block * dim * (2 if kind == BF16 else 1) + (block * 4 if kind == INT8 else 0)
    if kind == INT8:
        words = source + block * dim + within // tile * tile * 4
        copy_scales(words, tile, scales)
        for pair in range(tile // 2):
            even, odd = simd.get_i32(words + 8 * pair), simd.get_i32(words + 8 * pair + 4)
            zeros = simd.in_turn(even & np.int32(255), odd & np.int32(255))
            for i in range(pair * dim * 2, (pair + 1) * dim * 2, 16):
                simd.store_bf16(out + (to + i) * 2, without_zero(source + start + i, zeros))
        return
    for i in range(0, count, 16):
        to_form(kind, source, start + i, out + (to + i) * 2)


@inline
def stage_latent(kind, keys, dim, out):  # type: ignore[no-untyped-def]
    """Values of a tile from its keys in form: the first `dim` channels, keys and channels changing places."""
    for d in range(dim):
        for key in range(16):
            if kind == LATENT_FP32:
                simd.put_f32(out + (key * dim + d) * 4, simd.get_f32(keys + (d * 16 + key) * 4))
            else:
                value = simd.get_u16(keys + (d // 2 * 32 + key * 2 + d % 2) * 2)
                simd.put_u16(out + (key // 2 * dim * 2 + d * 2 + key % 2) * 2, value)
