"""Writes any metadata and any tensors as GGUF bytes, whether or not they can be meant: what mutations need."""

import struct
from pathlib import Path

from kvledger.weights.ggml_types import GGML_TYPES

BOOL, STRING, ARRAY, I64, F64, U64 = 7, 8, 9, 11, 12, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: object) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return I64 if value < 1 << 63 else U64
    return {float: F64, str: STRING, list: ARRAY}[type(value)]


def _payload(value: object) -> bytes:
    kind = _kind(value)
    if kind == ARRAY:
        return _array(value)
    if kind == STRING:
        return text(value)
    return struct.pack({BOOL: "<?", I64: "<q", U64: "<Q", F64: "<d"}[kind], value)


def _array(values: list) -> bytes:
    """The first item says the type of all; an empty one is of whole numbers."""
    kind = _kind(values[0]) if values else I64
    return struct.pack("<IQ", kind, len(values)) + b"".join(_payload(v) for v in values)


def gguf_bytes(metadata: dict[str, object], tensors: dict[str, tuple[tuple[int, ...], str, bytes]]) -> bytes:
    """A file. `tensors`: name → (shape rows first, type, data); lengths are not checked. None values are left out."""
    keys = {k: v for k, v in metadata.items() if v is not None}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(text(k) + struct.pack("<I", _kind(v)) + _payload(v) for k, v in keys.items())
    body, offset = [], 0
    for name, (shape, kind, data) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], GGML_TYPES[kind].code, offset)
        body.append(data + bytes(-len(data) % 32))
        offset += len(body[-1])
    return head + bytes(-len(head) % 32) + b"".join(body)


def write(path: Path, metadata: dict[str, object], tensors: dict[str, tuple[tuple[int, ...], str, bytes]]) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def byte_tokenizer(vocab: int) -> dict[str, object]:
    """Keys of a tokenizer whose token i is byte i; the last token ends a text."""
    from tiny_model import byte_names

    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": byte_names()[:vocab],
        "tokenizer.ggml.token_type": [1] * (vocab - 1) + [3], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": vocab - 1,
    }  # fmt: skip
