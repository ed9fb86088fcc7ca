"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

Behaves as llama.cpp does on the same file (llama-vocab.cpp); the merging itself is done by the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.text.pieces import byte_level_piece, end_ids, spaced_piece
from kvledger.text.pretokenizers import PreTokenizer, pre_tokenizer
from kvledger.text.tokenizer import SpecialTokens, Tokenizer

_PREFIX = "tokenizer.ggml."
_KINDS = ("gpt2", "llama")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Vocabulary:
    """Names, types and scores of the tokens, checked against each other."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.names: list[str] = self.array("tokens", str)
        self.ids = {name: i for i, name in enumerate(self.names)}
        self.ends = end_ids(self.ids)
        self.types = self.array("token_type", int, [TokenType.NORMAL] * len(self.names))
        for i in self.ends:  # some files call them normal
            self.types[i] = TokenType.CONTROL

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """One value per token. Raises DamagedFile."""
        value = self.metadata.get(_PREFIX + key, default)
        if not isinstance(value, list) or not value or not all(isinstance(x, kind) for x in value):
            raise DamagedFile(f"'{_PREFIX}{key}' is missing or not a list of {kind.__name__}")
        if key != "tokens" and len(value) != len(self.names):
            raise DamagedFile(f"'{_PREFIX}{key}' has {len(value):,} entries for {len(self.names):,} tokens")
        return list(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(_PREFIX + key, default))

    def token_id(self, key: str) -> int | None:
        """The id under `key`; None if there is none or no such token."""
        value = self.metadata.get(_PREFIX + key)
        return value if isinstance(value, int) and 0 <= value < len(self.names) else None

    def of_type(self, *types: TokenType) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in types]


def build(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata describe. Raises UnsupportedModel, DamagedFile."""
    kind = metadata.get(_PREFIX + "model")
    if kind not in _KINDS:
        raise UnsupportedModel(f"tokenizer kind {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    vocabulary = _Vocabulary(metadata)
    if kind == "llama":
        return _sentencepiece(vocabulary)
    pre = metadata.get(_PREFIX + "pre")
    if not isinstance(pre, str):
        raise UnsupportedModel("'tokenizer.ggml.pre' is missing: how this model cuts text into words is not known; "
                               "convert the model again with a current convert_hf_to_gguf.py")  # fmt: skip
    return _byte_level(vocabulary, pre_tokenizer(pre))


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    merges = vocabulary.metadata.get(_PREFIX + "merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
        raise DamagedFile("'tokenizer.ggml.merges' is missing or not a list of strings")
    pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
    model = _bpe(vocabulary, pairs, ignore_merges=pre.ignore_merges)
    cuts: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    words = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def backend() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = words
        return made

    return _assemble(vocabulary, backend, byte_level_piece, add_bos=pre.add_bos)


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """Unknown characters fall back to bytes; the piece with the best score is merged first."""
    unknown = vocabulary.of_type(TokenType.UNKNOWN)
    model = _bpe(
        vocabulary,
        merges_by_score(vocabulary.names, vocabulary.array("scores", float), vocabulary.of_type(TokenType.NORMAL)),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.names[unknown[0]] if unknown else None,
    )
    add_space = vocabulary.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("\u2581")] if add_space else []
    steps.append(normalizers.Replace(" ", "\u2581"))

    def backend() -> tokenizers.Tokenizer:
        made = tokenizers.Tokenizer(model)
        made.normalizer = normalizers.Sequence(steps)
        return made

    return _assemble(vocabulary, backend, spaced_piece, add_bos=True, strips_space=add_space)


def merges_by_score(names: Sequence[str], scores: Sequence[float], normal: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two, best score first: SentencePiece's BPE written as a list of merges."""
    ids = {names[i]: i for i in normal}
    found = [
        (-scores[i], ids[left], ids[right], left, right)
        for name, i in ids.items()
        for cut in range(1, len(name))
        if (left := name[:cut]) in ids and (right := name[cut:]) in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise DamagedFile(f"vocabulary and merges of the tokenizer contradict each other: {error}") from error


def _assemble(
    vocabulary: _Vocabulary,
    backend: Callable[[], tokenizers.Tokenizer],
    piece: Callable[[str], bytes],
    add_bos: bool,
    strips_space: bool = False,
) -> Tokenizer:
    names, types = vocabulary.names, vocabulary.types
    control = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    own = vocabulary.of_type(TokenType.USER_DEFINED)
    plain, parsing = backend(), backend()
    user_defined = [AddedToken(names[i], normalized=False, special=False) for i in own if names[i]]
    plain.add_tokens(user_defined)
    parsing.add_tokens(user_defined)
    parsing.add_special_tokens([AddedToken(names[i], normalized=False, special=True) for i in control if names[i]])
    literal = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    pieces = [n.encode() if t in literal else piece(n) for n, t in zip(names, types, strict=True)]
    return Tokenizer(parsing, plain, pieces, _special_tokens(vocabulary, control, add_bos), strips_space)


def _special_tokens(vocabulary: _Vocabulary, control: list[int], add_bos: bool) -> SpecialTokens:
    bos, eos = vocabulary.token_id("bos_token_id"), vocabulary.token_id("eos_token_id")
    named = [eos, vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id")]
    ends = [i for i in named if i is not None] + vocabulary.ends
    with_bos = bos is not None and vocabulary.flag("add_bos_token", add_bos)
    with_eos = eos is not None and vocabulary.flag("add_eos_token", False)
    return SpecialTokens(
        special_ids=frozenset(control),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        prefix=(bos,) if with_bos and bos is not None else (),
        suffix=(eos,) if with_eos and eos is not None else (),
    )
