"""From the engine's events to text: one choice at a time, for the library and the server alike. Knows no HTTP.

Stop strings live here, above the engine, which sees only ids; whoever owns the engine ends a choice that found one.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.sched.events import Finished, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.sched.step import Sample
from kvledger.text.detokenizer import Detokenizer
from kvledger.text.stop import StopChecker
from kvledger.text.tokenizer import Tokenizer


class ChoiceStream:
    """One choice's tokens on their way to text: whole characters only, cut at a stop string.

    Feed it the choice's events in order; `text` grows, `finish_reason` is set at the end. After a stop string the
    rest is ignored and `must_stop` says that the engine should end the choice.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, choice: int) -> None:
        self.request, self.choice = request, choice
        self.text = ""
        self.samples: list[Sample] = []
        self.offsets: list[int] = []  # where each token's text begins in `text`
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.must_stop = False
        self.message = ""
        params = request.params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)

    @property
    def token_ids(self) -> list[int]:
        return [sample.token_id for sample in self.samples]

    def token(self, event: TokenEvent) -> str:
        """One more token → the text that has become certain. A token that ends the text shows nothing."""
        if self.finish_reason is not None:
            return ""
        self.samples.append(event.sample)
        self.offsets.append(len(self.text))
        if self._is_silent(event.sample.token_id):
            return ""
        can_stop = len(self.samples) > self.request.params.min_tokens
        delta = self._checker.push(self._detokenizer.push(event.sample.token_id), can_stop)
        self._find_stop()
        self.text += delta
        return delta

    def finish(self, event: Finished) -> str:
        """The choice has ended → the text that was held back. Half a character at the real end shows as U+FFFD."""
        if self.finish_reason is not None:
            return ""
        delta = self._checker.push(self._detokenizer.finish()) + self._checker.finish()
        self.finish_reason, self.stop_reason, self.message = event.finish_reason, event.stop_reason, event.message
        self._find_stop()
        self.must_stop = False  # the engine has ended it already
        self.text += delta
        return delta

    def _find_stop(self) -> None:
        if self._checker.matched is not None:
            self.finish_reason, self.stop_reason, self.must_stop = "stop", self._checker.matched, True

    def _is_silent(self, token_id: int) -> bool:
        """An end of text, or a stop token that the request does not want to see, once it may end anything."""
        request, params = self.request, self.request.params
        if len(self.samples) <= params.min_tokens and len(self.samples) != params.max_tokens:
            return False
        if token_id in params.stop_token_ids:
            return not params.include_stop_str_in_output
        return token_id in request.eos_token_ids and not params.ignore_eos and params.skip_special_tokens


def all_ended(choices: Iterable[ChoiceStream]) -> bool:
    """Nothing more will come."""
    return all(choice.finish_reason is not None for choice in choices)
