"""Text ↔ token ids. One class whatever the file said; the builders beside it know the formats.

Knows no model, no template and no engine. Safe to share between threads: nothing changes after construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.errors import BadRequest, DamagedFile

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids with a meaning. `prefix` and `suffix` are what `add_special` puts around a text."""

    special_ids: frozenset[int] = frozenset()  # control tokens: never shown, parsed only when asked
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a generation; the file's own first
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """Encodes and decodes. Build it with `from_metadata`."""

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        plain: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        tokens: SpecialTokens,
        strips_space: bool = False,
    ) -> None:
        """`parsing` finds control tokens in text, `plain` takes them for text; `pieces` are the bytes of each id."""
        self._parsing, self._plain = parsing, plain
        self._pieces = pieces
        self._tokens = tokens
        self._strips_space = strips_space  # encoding put a space in front; decoding takes it away

    @staticmethod
    def from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
        """From a GGUF file's metadata, or from `tokenizer.huggingface.json` in it (the text of a tokenizer.json).

        Raises UnsupportedModel (kind or pre-tokenizer without a row), DamagedFile (keys missing or contradictory).
        """
        from kvledger.text import gguf_tokenizer, json_tokenizer

        if "tokenizer.ggml.tokens" not in metadata and "tokenizer.huggingface.json" in metadata:
            return json_tokenizer.build(metadata)
        if "tokenizer.ggml.model" not in metadata:
            raise DamagedFile("the model has no tokenizer: no 'tokenizer.ggml.model' in a GGUF file, no tokenizer.json "
                              "in a folder")  # fmt: skip
        return gguf_tokenizer.build(metadata)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def bos_token_id(self) -> int | None:
        return self._tokens.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: end of text, end of turn, end of message."""
        return self._tokens.eos_token_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._tokens.special_ids

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token, by id."""
        return self._pieces

    @property
    def adds_space(self) -> bool:
        """Whether encoding puts a space in front of a text (SentencePiece)."""
        return self._strips_space

    def is_special(self, token_id: int) -> bool:
        return token_id in self._tokens.special_ids

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts begin-of-text (and end-of-text) around it where the model wants them; `parse_special`
        reads `<|im_start|>` and the like as the tokens they name, otherwise they are plain text. Raises BadRequest
        if the text is not valid Unicode (a lone surrogate).
        """
        backend = self._parsing if parse_special else self._plain
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise BadRequest(
                "the text is not valid Unicode: it holds a lone surrogate, or bytes that are no UTF-8"
            ) from error
        return [*self._tokens.prefix, *ids, *self._tokens.suffix] if add_special else ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of whole sequences; bytes that are no UTF-8 become U+FFFD. For a stream use `Detokenizer`."""
        hidden = self._tokens.special_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        if self._strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a control token, its name; empty for an id beyond the vocabulary.

        A model may have more output rows than the vocabulary has tokens (padding).
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""
