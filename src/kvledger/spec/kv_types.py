"""How one number of the KV cache is stored: bits, scales, zero points, and the formats that fix a whole row.

A type is a row of `KV_TYPES`. Knows no layers and no tokens' places; `spec.kv` counts with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.errors import UnknownName
from kvledger.units import cdiv


@dataclass(frozen=True, slots=True)
class KVType:
    """How one number of the cache is stored.

    `bits` per element; one scale (and zero point) of `scale_bytes` per `group` elements. The group runs along the
    channels of one token and head (`axis="row"`, 0 = all of them) or along the tokens of one channel (`"column"`).
    `row_bytes` overrides all of it where a format fixes the bytes of a token. `residual` newest tokens stay in bf16
    (KIVI, arXiv:2402.02750, section 4).
    """

    name: str
    bits: int
    scale_bytes: int = 0
    group: int = 0
    axis: str = "row"
    row_bytes: int = 0
    residual: int = 0

    def tile_bytes(self, num_tokens: int, channels: int) -> int:
        """Bytes of `num_tokens` × `channels` elements of one head, scales included."""
        if num_tokens <= 0 or channels <= 0:
            return 0
        if self.row_bytes:
            return num_tokens * self.row_bytes
        data = cdiv(num_tokens * channels * self.bits, 8)
        if not self.scale_bytes:
            return data
        if self.axis == "row":
            return data + num_tokens * cdiv(channels, self.group or channels) * self.scale_bytes
        return data + channels * cdiv(num_tokens, self.group or num_tokens) * self.scale_bytes


_PLAIN = [
    KVType("fp32", 32), KVType("bf16", 16), KVType("fp16", 16),
    KVType("fp8_e4m3", 8), KVType("fp8_e5m2", 8),  # one scale per tensor or none: no bytes per token
]  # fmt: skip
_SCALED = [
    KVType("int8", 8, scale_bytes=4),  # one word of scale and zero per token and head
    KVType("int8_per_token_head", 8, scale_bytes=4),
    KVType("fp8_per_token_head", 8, scale_bytes=4),
    KVType("int4_per_token_head", 4, scale_bytes=4),
    KVType("int4_k", 4, scale_bytes=4, group=32, axis="column", residual=128),  # fp16 scale + fp16 zero
    KVType("int4_v", 4, scale_bytes=4, group=32, axis="row", residual=128),
    KVType("int2_k", 2, scale_bytes=4, group=32, axis="column", residual=128),
    KVType("int2_v", 2, scale_bytes=4, group=32, axis="row", residual=128),
    KVType("nvfp4", 4, scale_bytes=1, group=16), KVType("mxfp4", 4, scale_bytes=1, group=32),
    KVType("fp8_ds_mla", 8, row_bytes=656),  # 512 fp8 + 4 fp32 scales + 64 bf16 of rope
    KVType("fp8_ds_v4", 8, row_bytes=584),  # DeepSeek-V4: 448 fp8 + 64 bf16 of rope + 8 bytes of scales
]  # fmt: skip
_GGML = [  # block bytes / 32 elements, from ggml's block structs
    KVType("q8_0", 8, scale_bytes=2, group=32), KVType("q5_1", 5, scale_bytes=4, group=32),
    KVType("q5_0", 5, scale_bytes=2, group=32), KVType("q4_1", 4, scale_bytes=4, group=32),
    KVType("q4_0", 4, scale_bytes=2, group=32), KVType("iq4_nl", 4, scale_bytes=2, group=32),
]  # fmt: skip
KV_TYPES: dict[str, KVType] = {t.name: t for t in (*_PLAIN, *_SCALED, *_GGML)}
_ALIASES = {
    "auto": "bf16", "float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16",
    "half": "fp16", "fp8": "fp8_e4m3", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "fp8_inc": "fp8_e4m3",
}  # fmt: skip
_PAIRS = {"int4": ("int4_k", "int4_v"), "kivi4": ("int4_k", "int4_v"), "kivi2": ("int2_k", "int2_v"),
          "int2": ("int2_k", "int2_v")}  # fmt: skip
_NAMED = {pair: name for name, pair in reversed(_PAIRS.items())}  # the first name of each


@dataclass(frozen=True, slots=True)
class KVStorage:
    """The types of keys and of values."""

    key: KVType
    value: KVType

    @property
    def name(self) -> str:
        """`bf16`; where keys and values differ the pair's own name, as `int4`, else `q8_0/q4_0`."""
        both = (self.key.name, self.value.name)
        return self.key.name if self.key == self.value else _NAMED.get(both, "/".join(both))

    @property
    def span(self) -> int:
        """Tokens after which bytes repeat: the group of scales that run along tokens, else 1."""
        return max(t.group if t.axis == "column" else 1 for t in (self.key, self.value))

    @property
    def residual(self) -> int:
        """Newest tokens that stay in bf16; 0: none."""
        return max(self.key.residual, self.value.residual)

    @property
    def usual_block_size(self) -> int:
        """Tokens per block where nobody says: 16, or as many as share a scale."""
        return max(16, self.span)

    def num_quantised(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens the last of them reads quantised, where there is a residual.

        Whole groups of `span` tokens, so that `residual` tokens hold the rest wherever the last group ends.
        """
        return max(0, ((num_tokens - 1) // self.span - self.residual // self.span + 1) * self.span)

    @staticmethod
    def of(name: str) -> KVStorage:
        """`bf16`, `fp8`, `int4`, `q8_0/q4_0` (keys/values) … → storage. Raises UnknownName."""
        text = name.strip().lower()
        if text in _PAIRS:
            key, value = _PAIRS[text]
        else:
            key, _, value = text.partition("/")
        return KVStorage(_kv_type(key), _kv_type(value or key))


UNQUANTISED = KVStorage(KV_TYPES["bf16"], KV_TYPES["bf16"])


def _kv_type(name: str) -> KVType:
    found = KV_TYPES.get(_ALIASES.get(name, name))
    if found is None:
        raise UnknownName("KV type", name, [*KV_TYPES, *_ALIASES, *_PAIRS])
    return found
