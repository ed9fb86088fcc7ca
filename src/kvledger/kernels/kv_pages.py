"""How keys and values lie in a page, for every KV type; and bringing them into the form that attention computes with.

A page is one layer's part of a block of `block` tokens. KV heads follow one another; each has its keys, the keys'
scales (int8), its values, the values' scales:

    bf16, int8, fp8   keys   [tiles of 16 tokens][D/2][16][2]      values [block/2][D][2]
    fp32              keys   [tiles of 16 tokens][D][16]           values [block][D]
    a latent          as keys alone, of any type but int4; the values are the first channels of the keys
    int4              groups of 32 tokens, see `kv_int4`

(blocks of 8 tokens have tiles of 8). The bytes are exactly `KVLayout`'s: nothing is padded. fp8: e4m3 without a scale.
int8: per token and head a word of a float32 scale whose last byte is the zero, x = scale · (level − zero), level and
zero 0 … 255: their difference is exact in bfloat16. A key's levels are not all the nearest ones (`kv_round`). What has
few levels is kept transformed (`hadamard`): queries and keys alike, which leaves scores as they are, and values, whose
mix is transformed back.

A latent's row has one word for the latent and for its rope key, whose ranges may be far apart. So the word names a
power of two as well, in four bits beside the zero: the rope key is kept in steps that many times the latent's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvledger.kernels import simd
from kvledger.kernels.hadamard import transform_width
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import inline

KINDS = {"bf16": 0, "int8": 1, "fp8_e4m3": 2, "fp32": 3, "int4": 4}
BF16, INT8, FP8, FP32, INT4 = range(5)
SEALED_TOKENS = 32  # tokens that int4 quantises together
SPREAD = ("int8", "fp8_e4m3")  # types so coarse that channels that stand out are spread over the others
BF16_MAX = 3.3895314e38
MOST_LEVELS = 512  # channels whose products of levels add up within 32 bits
INT8_MAX = 1e38  # the range of a head must be finite
ZERO_BITS = 8  # of a word of int8's
STEP_BITS = 4  # of a latent's word, above the zero: how many powers of two the rope key's step is from the latent's,
LEAST_STEP, MOST_STEP = -4, 11  # from a sixteenth to 2,048 times
FP8_MAX = 448.0


def bytes_of_kind(kind: int) -> int:
    """Bytes of a number in a page of any type but int4. Plain enough for Numba."""
    return 4 if kind == FP32 else 2 if kind == BF16 else 1


def values_begin(kind: int, block: int, size: int) -> int:
    """Bytes from a head's keys of `size` bytes to its values: the keys, and int8's words. Plain enough for Numba."""
    return block * (size + (4 if kind == INT8 else 0))


element_bytes, values_at = inline(bytes_of_kind), inline(values_begin)


def query_size(size: int) -> int:
    """Bytes of a query's number beside keys of `size` bytes: float32 where bfloat16 has no dot products, and for
    levels, to become levels itself.
    """
    return size if ISA.bf16 and size > 1 else 4


@inline
def block_at(blocks, index):  # type: ignore[no-untyped-def]
    """A block's number; any for one that a window has passed (−1): its keys are masked."""
    return np.int64(max(0, simd.get_i32(blocks + index * 4)))


@inline
def page_at(place, token, block):  # type: ignore[no-untyped-def]
    """The head's page that holds a token. `place`: block table, pool, bytes of a block, offset of the head …"""
    return place[1] + block_at(place[0], token // block) * place[2] + place[3]


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
        """Bytes of a number in the form that is computed with: 1 are int8's levels, where bytes have dot products."""
        is_levels = self.kind == "int8" and ISA.vnni and not self.latent and self.dim <= MOST_LEVELS
        return 4 if self.kind == "fp32" else 1 if is_levels else 2

    @property
    def spread(self) -> int:
        """Channels of a value, and of a key so far as it is one, that are transformed together; 0: none."""
        return transform_width(self.value_dim) if self.kind in SPREAD else 0

    @property
    def rope_spread(self) -> int:
        """Channels of a latent's rope key that are transformed together; 0: none."""
        return transform_width(self.dim - self.latent) if self.kind in SPREAD and self.latent else 0

    @property
    def padded_dim(self) -> int:
        """Channels of a query row: whole AMX tiles of 32."""
        return -(-self.dim // 32) * 32

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in a page."""
        if self.kind == "int4":
            return self.block_size // SEALED_TOKENS * 40 * self.dim
        kind = KINDS[self.kind]
        part = values_begin(kind, self.block_size, self.dim * bytes_of_kind(kind))
        return part if self.latent else 2 * part


# ---------------------------------------------------------------------------------------------- writing


@inline
def cut(x, top):  # type: ignore[no-untyped-def]
    """x cut to ±top, NaN to −top: a block outlives its sequence, and 0 · NaN is not 0."""
    return simd.minimum(simd.maximum(x, simd.splat(np.float32(-top))), simd.splat(np.float32(top)))


@inline
def clamped(address, top):  # type: ignore[no-untyped-def]
    """16 float32 at `address`, `cut`."""
    return cut(simd.load_f32(address), top)


@inline
def to_int8(source, target, dim, spare):  # type: ignore[no-untyped-def]
    """dim float32 → levels at `target`. Returns the word of scale and zero; `spare` last bits are not the scale's."""
    low = high = simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        x = clamped(source + 4 * d, INT8_MAX)
        low, high = simd.minimum(low, x), simd.maximum(high, x)
    least, top = simd.reduce_min(low), simd.reduce_max(high)
    scale = as_scale(simd.f32_bits((top - least) / np.float32(255)), spare)
    inverse = np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0)
    zero = min(np.int32(255), np.int32(np.float32(0.5) - least * inverse))
    wide, shift = simd.splat(inverse), simd.splat_i32(zero)
    limit = simd.splat(np.float32(255))
    nothing = simd.splat(np.float32(0))
    for d in range(0, dim, 16):
        level = simd.add_i32(simd.round_i32(simd.mul(clamped(source + 4 * d, INT8_MAX), wide)), shift)
        level = simd.round_i32(simd.minimum(simd.maximum(simd.to_f32(level), nothing), limit))
        simd.store_i8(target + d, level)
    return np.int64(simd.f32_bits(scale) | zero)


@inline
def as_scale(word, spare):  # type: ignore[no-untyped-def]
    """The scale of a word of int8's: float32 but for the `spare` last bits."""
    return simd.as_f32(np.int64(word) >> spare << spare)


@inline
def spare_bits(latent):  # type: ignore[no-untyped-def]
    """Bits of a word of int8's that are not the scale's."""
    return ZERO_BITS + STEP_BITS if latent > 0 else ZERO_BITS


@inline
def largest(source, first, last):  # type: ignore[no-untyped-def]
    """The largest magnitude of channels [first, last)."""
    top = simd.splat(np.float32(0))
    for d in range(first, last, 16):
        top = simd.maximum(top, simd.absolute(clamped(source + 4 * d, INT8_MAX)))
    return simd.reduce_max(top)


@inline
def even_out(row, latent, dim):  # type: ignore[no-untyped-def]
    """Divide a row's rope key by the least power of two that brings it into the latent's range. Returns its log."""
    ratio = largest(row, latent, dim) / max(largest(row, 0, latent), np.float32(1e-30))
    exponent = ((np.int64(simd.f32_bits(ratio)) + 0x7FFFFF) >> 23) - 127  # rounded up
    step = min(max(exponent, np.int64(LEAST_STEP)), np.int64(MOST_STEP))
    factor = simd.splat(simd.as_f32((127 - step) << 23))
    for d in range(latent, dim, 16):
        simd.store_f32(row + 4 * d, simd.mul(clamped(row + 4 * d, INT8_MAX), factor))
    return step


@inline
def to_floats(kind, source, target, dim):  # type: ignore[no-untyped-def]
    """dim float32 → elements at `target` of a type without words."""
    for d in range(0, dim, 16):
        if kind == FP8:
            simd.store_i8(target + d, simd.f32_to_e4m3(clamped(source + 4 * d, FP8_MAX)))
        elif kind == FP32:
            simd.store_f32(target + 4 * d, clamped(source + 4 * d, BF16_MAX))
        else:
            simd.store_bf16(target + 2 * d, clamped(source + 4 * d, BF16_MAX))


@inline
def to_latent_elements(kind, row, target, latent, dim):  # type: ignore[no-untyped-def]
    """A latent and its rope key → the type's elements at `target`. Returns int8's word.

    The row itself is no longer what it was.
    """
    if kind != INT8:
        to_floats(kind, row, target, dim)
        return np.int64(0)
    step = even_out(row, latent, dim)
    return to_int8(row, target, dim, spare_bits(latent)) | (step - LEAST_STEP) << ZERO_BITS


@inline
def ask_for_token(kind, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Ask for the lines that a token at place `within` of a head's page shares with others."""
    tile, size = min(block, 16), dim * element_bytes(kind)
    keys, values = to + within // tile * tile * size, to + values_at(kind, block, size) + within // 2 * 2 * size
    for line in range(0, tile * size, 64):
        simd.prefetch(keys + line)
    for line in range(0, 2 * size, 64):
        simd.prefetch(values + line)


@inline
def write_key_word(word, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Put the word of an int8 key at place `within` of a head's page at `to`."""
    simd.put_i32(to + block * dim + within * 4, np.int32(word))


@inline
def write_key(kind, elements, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Put a token's key at place `within` of a head's page at `to`."""
    tile = min(block, 16)
    start, lane = within // tile * tile * dim, within % tile
    if kind == BF16:
        at = to + (start + lane * 2) * 2
        for d in range(0, dim, 2):
            simd.put_i32(at + d * tile * 2, simd.get_i32(elements + 2 * d))
    elif kind == FP32:
        at = to + (start + lane) * 4
        for d in range(dim):
            simd.put_f32(at + d * tile * 4, simd.get_f32(elements + 4 * d))
    else:
        at = to + start + lane * 2
        for d in range(0, dim, 2):
            simd.put_u16(at + d * tile, simd.get_u16(elements + d))


@inline
def write_keys(kind, elements, stride, count, to, within, block, dim):  # type: ignore[no-untyped-def]
    """Put `count` tokens' keys, `stride` bytes apart, at places from `within` on, all of one tile."""
    size = element_bytes(kind)
    if count == 16 and dim * size % 64 == 0:
        at = to + within * dim * size
        for d in range(0, dim * size, 64):
            if size == 1:
                simd.turn_halves(elements + d, stride, at + 16 * d)
            else:
                simd.turn_words(elements + d, stride, at + 16 * d)
        return
    for i in range(count):
        write_key(kind, elements + i * stride, to, within + i, block, dim)


@inline
def write_value_word(word, to, within, block, dim):  # type: ignore[no-untyped-def]
    """As `write_key_word`, of a value."""
    simd.put_i32(to + values_at(INT8, block, dim) + block * dim + within * 4, np.int32(word))


@inline
def write_values(kind, elements, stride, count, to, within, block, dim):  # type: ignore[no-untyped-def]
    """As `write_keys`, of values of any type but bf16.

    Two tokens share their lines: nobody else may write one's while another's is written.
    """
    to += values_at(kind, block, dim * element_bytes(kind))
    if kind == FP32:
        for i in range(count):
            at = to + (within + i) * dim * 4
            for d in range(0, dim, 16):
                simd.store_f32(at + 4 * d, simd.load_f32(elements + i * stride + 4 * d))
        return
    end = within + count
    while within < end:
        pair, is_odd = to + within // 2 * dim * 2, within % 2
        is_pair = is_odd == 0 and within + 1 < end
        for d in range(0, dim, 16):
            if is_pair:
                simd.store_both_i8(pair + 2 * d, elements + d, elements + stride + d)
            else:
                simd.store_one_i8(pair + 2 * d, elements + d, is_odd)
        taken = 2 if is_pair else 1
        elements += taken * stride
        within += taken


@inline
def write_bf16_values(values, stride, count, to, within, block, dim):  # type: ignore[no-untyped-def]
    """As `write_values`, of bf16, from float32."""
    to += values_at(BF16, block, dim * 2)
    end = within + count
    while within < end:
        pair, is_odd = to + within // 2 * dim * 4, within % 2
        is_pair = is_odd == 0 and within + 1 < end
        for d in range(0, dim * 4, 64):
            x = clamped(values + d, BF16_MAX)
            if is_pair:
                simd.store_bf16_pairs(pair + d, x, clamped(values + stride + d, BF16_MAX))
            else:
                simd.store_one_bf16(pair + d, x, is_odd)
        taken = 2 if is_pair else 1
        values += taken * stride
        within += taken


# ---------------------------------------------------------------------------------------------- reading


@inline
def to_form(kind, source, index, target):  # type: ignore[no-untyped-def]
    """16 elements from number `index` on → bf16 at `target`: exact."""
    if kind == FP8:
        simd.store_bf16(target, simd.e4m3_to_f32(simd.load_u8(source + index)))
    else:
        simd.store_bf16(target, simd.load_bf16(source + 2 * index))


@inline
def copy_scales(words, count, spare, to):  # type: ignore[no-untyped-def]
    """The scales of `count` words of int8's."""
    for key in range(count):
        simd.put_f32(to + key * 4, as_scale(simd.get_i32(words + key * 4), spare))


@inline
def field_of(words, first, count):  # type: ignore[no-untyped-def]
    """`count` bits of each word, from bit `first` on."""
    above = simd.sra_i32(words, simd.splat_i32(np.int32(first + count)))
    return simd.sub_i32(
        simd.sra_i32(words, simd.splat_i32(np.int32(first))), simd.shl_i32(above, simd.splat_i32(np.int32(count)))
    )


@inline
def step_of(words):  # type: ignore[no-untyped-def]
    """The power of two of each word by which a rope key's levels count."""
    exponent = simd.add_i32(field_of(words, ZERO_BITS, STEP_BITS), simd.splat_i32(np.int32(LEAST_STEP)))
    return simd.power_of_two(exponent)


@inline
def without_zero(at, zeros):  # type: ignore[no-untyped-def]
    """16 levels − their zeros, as float32: at most ±255, exact in bfloat16."""
    return simd.to_f32(simd.sub_i32(simd.load_u8(at), zeros))


@inline
def stage_levels(source, pairs, stride, words, is_rope, to):  # type: ignore[no-untyped-def]
    """Levels of eight keys, each of whose words stands in two lanes: pairs of channels `stride` bytes apart."""
    zeros = field_of(words, 0, ZERO_BITS)
    step = step_of(words)
    for d in range(pairs):
        level = without_zero(source + d * stride, zeros)
        simd.store_bf16(to + d * 64, simd.mul(level, step) if is_rope else level)


@inline
def stage_keys(kind, base, within, block, dim, latent, half, out, scales):  # type: ignore[no-untyped-def]
    """A tile of keys (`half` 1: the second eight tokens of one) from a head's page → [D/2][16][2] bf16 or [D][16].

    `latent`: channels before the rope key; 0: keys are a head's.
    """
    tile = min(block, 16)
    start = within // tile * tile * dim
    if kind == FP32:
        for d in range(dim):
            for key in range(tile):
                value = simd.get_f32(base + (start + d * tile + key) * 4)
                simd.put_f32(out + (d * 16 + half * 8 + key) * 4, value)
        return
    if kind == INT8:
        words = base + block * dim + within // tile * tile * 4
        copy_scales(words, tile, spare_bits(latent), scales)
        plain = (latent if latent > 0 else dim) // 2
        for part in range(tile // 8):
            both = simd.load_i32(words)
            eight = simd.low_lanes_twice(both) if part == 0 else simd.high_lanes_twice(both)
            at, to = base + start + part * 16, out + (half + part) * 32
            stage_levels(at, plain, tile * 2, eight, False, to)
            stage_levels(at + plain * tile * 2, dim // 2 - plain, tile * 2, eight, True, to + plain * 64)
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
    source = base + values_at(kind, block, dim * element_bytes(kind))
    if kind == INT8:
        words = source + block * dim + within // tile * tile * 4
        copy_scales(words, tile, ZERO_BITS, scales)
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
            if kind == FP32:
                simd.put_f32(out + (key * dim + d) * 4, simd.get_f32(keys + (d * 16 + key) * 4))
            else:
                value = simd.get_u16(keys + (d // 2 * 32 + key * 2 + d % 2) * 2)
                simd.put_u16(out + (key // 2 * dim * 2 + d * 2 + key % 2) * 2, value)
