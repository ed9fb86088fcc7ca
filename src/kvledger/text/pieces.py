"""From the names of tokens to the bytes they stand for, and which of them end a text."""

from __future__ import annotations

import re
from collections.abc import Mapping

# tokens that end a generation whatever the file says of them, as in llama.cpp (llama-vocab.cpp, special_eog_ids)
_END_NAMES = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, int]:
    """Code point → byte of byte-level BPE (GPT-2's bytes_to_unicode, inverted)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: byte for byte in shown} | {256 + i: byte for i, byte in enumerate(hidden)}


_FOREIGN = "\uffff"  # no byte: makes the encoding below fail
_TO_BYTES = dict.fromkeys(range(256), _FOREIGN) | {point: chr(byte) for point, byte in byte_alphabet().items()}


def byte_level_piece(name: str) -> bytes:
    """Bytes of a byte-level token; a name with characters outside the alphabet stands for itself."""
    try:
        return name.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()


def spaced_piece(name: str) -> bytes:
    """Bytes of a SentencePiece token: `▁` is a space, `<0x0A>` a byte."""
    if match := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(match[1], 16)])
    return name.replace("\u2581", " ").encode()


def end_ids(ids_by_name: Mapping[str, int]) -> list[int]:
    """Ids of all tokens that end a generation by their name, in order of id."""
    names = [name for name in _END_NAMES if name in ids_by_name]
    if "<|return|>" in names and "<|call|>" in names and "<|end|>" in names:
        names.remove("<|end|>")  # in gpt-oss's format it only ends a message
    return sorted(ids_by_name[name] for name in names)
