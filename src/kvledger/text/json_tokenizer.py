"""A tokenizer from the text of a tokenizer.json (and the ids that the folder's other files name)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.text.pieces import byte_level_piece, end_ids, spaced_piece
from kvledger.text.tokenizer import SpecialTokens, Tokenizer

MAX_TOKEN_ID = 1 << 22


def build(metadata: Mapping[str, object]) -> Tokenizer:
    """`tokenizer.huggingface.json` in `metadata` → Tokenizer. Raises UnsupportedModel, DamagedFile."""
    text = str(metadata["tokenizer.huggingface.json"])
    parsing, plain = _backend(text), _backend(text)
    plain.encode_special_tokens = True
    described = json.loads(text)
    if not isinstance(described.get("model"), dict) or described["model"].get("type", "BPE") not in ("BPE", "Unigram"):
        raise UnsupportedModel("tokenizer.json describes neither BPE nor Unigram")
    ids = parsing.get_vocab(with_added_tokens=True)
    if not ids or max(ids.values()) > MAX_TOKEN_ID:
        raise DamagedFile(f"tokenizer.json: {len(ids):,} tokens, the highest id {max(ids.values(), default=0):,}")
    added = {token["id"]: token for token in described.get("added_tokens", [])}
    return Tokenizer(
        parsing,
        plain,
        _pieces(ids, added, byte_level="ByteLevel" in json.dumps(described.get("decoder"))),
        _special_tokens(parsing, ids, added, metadata),
        strips_space='"Strip"' in json.dumps(described.get("decoder")),
    )


def _backend(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise DamagedFile(f"tokenizer.json cannot be read: {error}") from error


def _pieces(ids: Mapping[str, int], added: Mapping[int, Any], byte_level: bool) -> list[bytes]:
    pieces = [b""] * (max(ids.values()) + 1)
    convert = byte_level_piece if byte_level else spaced_piece
    for name, i in ids.items():
        pieces[i] = name.encode() if i in added else convert(name)
    return pieces


def _special_tokens(
    backend: tokenizers.Tokenizer, ids: Mapping[str, int], added: Mapping[int, Any], metadata: Mapping[str, object]
) -> SpecialTokens:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    named = [i for i in (eos if isinstance(eos, list) else [eos]) if isinstance(i, int)]
    prefix, suffix = _surroundings(backend)
    return SpecialTokens(
        special_ids=frozenset(i for i, token in added.items() if token.get("special")),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(dict.fromkeys([*named, *end_ids({name: ids[name] for name in ids if ids[name] in added})])),
        prefix=prefix,
        suffix=suffix,
    )


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    bare, full = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return tuple(full[:start]), tuple(full[start + len(bare) :])
