"""Chat and text completion, each as one class with the same four methods, so that the routes are written once.

`opening` and `chunk` give the `choices` entries of stream chunks, `whole` the entry of a finished answer. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.sched.step import Sample
from kvledger.server.responses import Choice, Delta, TokenText, chat_logprobs, completion_logprobs, prompt_logprobs
from kvledger.server.tools import CallReader, Piece, ToolPlan, read_all


class ChatShape:
    """`chat.completion` and its chunks. `num_top` None: no logprobs."""

    object, chunk_object, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, text_of: TokenText, num_top: int | None, plan: ToolPlan | None = None, *, with_ids: bool = False,
        echo: str = "",
    ) -> None:  # fmt: skip
        self._text_of, self._num_top, self._plan = text_of, num_top, plan
        self._with_ids, self._echo = with_ids, echo
        self._readers: dict[int, CallReader] = {}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role, once per choice, before anything else."""
        delta = {"role": "assistant", "content": self._echo}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunk(self, delta: Delta, choice: Choice) -> list[dict[str, Any]]:
        """Entries for what a step brought; the finish reason comes in an entry of its own, once."""
        entries = [self._entry(delta.index, piece.delta()) for piece in self._pieces(delta)]
        if delta.samples and (self._num_top is not None or self._with_ids):
            entries = entries or [self._entry(delta.index, {"content": ""})]
            entries[0] |= self._extras(delta.samples)
        if delta.finish_reason:
            reason = self._reason(delta.finish_reason, self._num_calls(delta.index))
            entries.append(self._entry(delta.index, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason})
        return entries

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The entry of a finished answer."""
        content: str | None = choice.stream.text
        message: dict[str, Any] = {"role": "assistant"}
        calls: list[dict[str, Any]] = []
        if self._plan is not None:
            content, calls = read_all(self._plan, choice.stream.text)
        message["content"] = self._echo + (content or "") if content or not calls else None
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason(choice.stream.finish_reason or "abort", len(calls)),
            "stop_reason": choice.stream.stop_reason,
        } | self._extras(choice.stream.samples)

    def top_level(self, choices: Sequence[Choice], wants_prompt: bool) -> dict[str, Any]:
        """Fields of the answer itself."""
        first = choices[0]
        found: dict[str, Any] = {}
        if wants_prompt:
            found["prompt_logprobs"] = prompt_logprobs(first.prompt_ids, first.prompt_samples, self._text_of)
        if self._with_ids:
            found["prompt_token_ids"] = list(first.prompt_ids)
        return found

    def _entry(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _extras(self, samples: Sequence[Sample]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._num_top is not None:
            extras["logprobs"] = chat_logprobs(samples, self._text_of, self._num_top)
        if self._with_ids:
            extras["token_ids"] = [sample.token_id for sample in samples]
        return extras

    def _pieces(self, delta: Delta) -> list[Piece]:
        if self._plan is None:
            return [Piece(content=delta.text)] if delta.text else []
        reader = self._readers.setdefault(delta.index, CallReader(self._plan))
        pieces = reader.feed(delta.text) if delta.text else []
        return pieces + (reader.finish() if delta.finish_reason else [])

    def _num_calls(self, index: int) -> int:
        return self._readers[index].num_calls if index in self._readers else 0

    def _reason(self, reason: str, num_calls: int) -> str:
        """A call that the model chose, or had to choose, is told; one that was named is not, as OpenAI has it."""
        is_choice = self._plan is not None and self._plan.mode != "named"
        return "tool_calls" if is_choice and num_calls and reason == "stop" else reason


class CompletionShape:
    """`text_completion`, whose chunks look like the whole. With `echo` the prompt comes first."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, text_of: TokenText, num_top: int | None, *, echo: Sequence[str] = (), is_prompt_only: bool = False,
        with_ids: bool = False, prompt_logprobs: bool = False, n: int = 1,
    ) -> None:  # fmt: skip
        """`echo`: text of each prompt, empty for no echo; `is_prompt_only`: the one generated token is dropped."""
        self._text_of, self._num_top, self._echo, self._n = text_of, num_top, echo, n
        self._is_prompt_only, self._with_ids, self._prompt_logprobs = is_prompt_only, with_ids, prompt_logprobs
        self._offsets: dict[int, int] = {}  # characters already sent, by choice

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Nothing: text chunks speak for themselves."""
        return []

    def chunk(self, delta: Delta, choice: Choice) -> list[dict[str, Any]]:
        """The entry for what a step brought."""
        is_first = delta.index not in self._offsets
        text = (self._prompt_text(choice) if is_first else "") + ("" if self._is_prompt_only else delta.text)
        offset = self._offsets.get(delta.index, 0)
        self._offsets[delta.index] = offset + len(text)
        if not (text or delta.finish_reason or (delta.samples and self._num_top is not None)):
            return []
        samples = () if self._is_prompt_only else delta.samples
        entry = {"index": delta.index, "text": text, "finish_reason": delta.finish_reason}
        entry |= {"stop_reason": delta.stop_reason, "logprobs": self._logprobs(choice, samples, is_first, offset)}
        return [entry | self._ids(choice, samples, is_first)]

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The entry of a finished answer."""
        text = self._prompt_text(choice) + ("" if self._is_prompt_only else choice.stream.text)
        samples = () if self._is_prompt_only else choice.stream.samples
        entry: dict[str, Any] = {"index": choice.index, "text": text}
        entry["logprobs"] = self._logprobs(choice, samples, True, 0)
        entry |= {"finish_reason": choice.stream.finish_reason, "stop_reason": choice.stream.stop_reason}
        if self._prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs(choice.prompt_ids, choice.prompt_samples, self._text_of)
        return entry | self._ids(choice, samples, True)

    def top_level(self, choices: Sequence[Choice], wants_prompt: bool) -> dict[str, Any]:
        """Fields of the answer itself: none."""
        return {}

    def _prompt_text(self, choice: Choice) -> str:
        return self._echo[choice.index // self._n] if self._echo else ""

    def _logprobs(
        self, choice: Choice, samples: Sequence[Sample], is_first: bool, offset: int
    ) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        ids = [sample.token_id for sample in samples]
        found: list[Sample | None] = list(samples)
        if self._echo and is_first:
            ids = [*choice.prompt_ids, *ids]
            found = [None, *choice.prompt_samples[: len(choice.prompt_ids) - 1], *found]
        return completion_logprobs(found, ids, self._text_of, self._num_top, offset)

    def _ids(self, choice: Choice, samples: Sequence[Sample], is_first: bool) -> dict[str, Any]:
        if not self._with_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": [sample.token_id for sample in samples]}
        return ids | ({"prompt_token_ids": list(choice.prompt_ids)} if is_first else {})


Shape = ChatShape | CompletionShape
