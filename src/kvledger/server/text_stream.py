"""One choice's tokens on their way to a client: whole characters only, cut at a stop string. Knows no engine."""

from __future__ import annotations

from kvledger.spec.sampling import SamplingParams
from kvledger.text.detokenizer import Detokenizer
from kvledger.text.stop import StopChecker
from kvledger.text.tokenizer import Tokenizer


class TokenStream:
    """A detokenizer and a stop checker in a row."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._num_tokens, self._min_tokens = 0, params.min_tokens

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token."""
        self._num_tokens += 1
        return self._checker.push(self._detokenizer.push(token_id), self._num_tokens > self._min_tokens)

    def finish(self) -> str:
        """What was held back, when no more tokens come; half a character at the real end shows as U+FFFD."""
        return self._checker.push(self._detokenizer.finish()) + self._checker.finish()

    @property
    def stop(self) -> str | None:
        """The stop string that was found; nothing after it is given out."""
        return self._checker.matched
