"""Token ids → text, one token at a time, never half a character. Knows neither stop strings nor requests."""

from __future__ import annotations

import codecs

from kvledger.text.tokenizer import Tokenizer


class Detokenizer:
    """Follows one sequence. What `push` and `finish` give, joined, is what decoding all tokens at once gives.

    The text continues a prompt, so a leading space is kept even where a SentencePiece tokenizer would strip it from
    the beginning of a whole text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is still incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the real end: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
