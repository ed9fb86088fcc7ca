"""Offline use: `LLM("smollm2").generate(prompts, params)`. One engine, driven by the callers' threads.

Prompts are text, token ids or chat messages. Nothing here decides anything: it adds requests, steps the engine and
puts events together. Whoever waits takes the next step, for everybody's requests: threads may call at once.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvledger.build import Loaded, Progress, build_engine
from kvledger.errors import BadRequest, ConfigError, KvledgerError, UnknownName
from kvledger.frontend import ChoiceStream, all_ended
from kvledger.metrics import Metrics, RequestTimes
from kvledger.sched.events import Admitted, Event, Finished, PromptScored, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.sched.step import Sample
from kvledger.spec.config import CacheConfig, EngineConfig, ExecConfig, SchedulerConfig
from kvledger.spec.sampling import SamplingParams
from kvledger.units import parse_bytes

if TYPE_CHECKING:
    from kvledger.beam import Beam, BeamSearch
    from kvledger.sched.books import Books
    from kvledger.text.structured import GrammarCompiler

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. `logprobs` are the samples with their alternatives, None unless asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # stop, length, error
    stop_reason: int | str | None
    logprobs: tuple[Sample, ...] | None
    message: str = ""  # what went wrong, where finish_reason is error

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(sample.logprob for sample in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt_logprobs[i]` belongs to prompt token i; the first has none."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int
    times: RequestTimes
    prompt_logprobs: tuple[Sample | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.outputs[0].text


class LLM:
    """A model ready to answer.

    `options` are those of `CacheConfig`, `SchedulerConfig` and `ExecConfig`, and `max_model_len`; `kv_memory` may be
    text such as "2GiB". `seed` makes sampling repeatable where a request names no seed of its own.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        _check_arguments(model, seed, progress)
        self.loaded: Loaded = build_engine(model, engine_config(**options), progress)
        self.engine, self.tokenizer = self.loaded.engine, self.loaded.tokenizer
        self.metrics = Metrics(keep_steps=1000)
        self.engine.listeners.append(self.metrics)
        self._seeds = random.Random(seed)
        self._ids = itertools.count()
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.RLock()  # of the engine, and of what its events change
        self._live: dict[str, _Pending] = {}
        self._searches: list[BeamSearch] = []

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. Idempotent; afterwards every call raises EngineDead."""
        with self._lock:
            self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        structured: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. `structured` is one of json (a schema), regex, choice or grammar.

        Raises BadRequest or ContextTooLong if one of the prompts cannot be answered; then none is.
        """
        batch = _as_batch(prompts)
        each = _one_each(SamplingParams() if params is None else params, len(batch))
        pending = self._submit([self._request(p, s, structured) for p, s in zip(batch, each, strict=True)])
        for _ in self._drive(pending):
            pass
        texts = [p if isinstance(p, str) else None for p in batch]
        return [item.output(text, self.metrics) for item, text in zip(pending, texts, strict=True)]

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None, **kw: Any
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several. Raises BadRequest for what is no list of messages."""
        talks = _as_batch(messages)
        if not all(isinstance(talk, Sequence) and all(isinstance(m, Mapping) for m in talk) for talk in talks):
            raise BadRequest(f"messages are a list of role and content, not {_shown(messages)}", "messages")
        return self.generate(messages, params, **kw)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The first choice's text as it comes. Ending the iteration early aborts the request."""
        (chosen,) = _one_each(SamplingParams() if params is None else params, 1)
        pending = self._submit([self._request(prompt, chosen, None)])
        try:
            for item, choice, delta in self._drive(pending):
                if choice == 0 and delta:
                    yield delta
                if item.choices[0].finish_reason == "error":
                    raise BadRequest(item.choices[0].message)
        finally:
            self._forget(pending[0].request)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], width: int = 4, max_tokens: int = 16, length_penalty: float = 1.0
    ) -> list[list[Beam]]:
        """The `width` best continuations of each prompt, best first. See `kvledger.beam`."""
        from kvledger.beam import BeamSearch, beam_params

        asked = beam_params(width, max_tokens, length_penalty)
        requests = [replace(self._request(p, asked, None), stepwise=True) for p in _as_batch(prompts)]
        searches: list[BeamSearch] = []
        try:
            for request in requests:
                with self._lock:
                    searches.append(BeamSearch(self.engine, request, width, length_penalty))
                    self._searches.append(searches[-1])
            while not all(search.is_done for search in searches):
                with self._lock:
                    if not all(search.is_done for search in searches):
                        self._step()
        finally:
            with self._lock:
                for search in searches:
                    search.close()
                    self._searches.remove(search)
                    self._forget(search.request)
        return [search.best(self.tokenizer) for search in searches]

    @property
    def books(self) -> Books:
        """Where the blocks of the KV cache are, now."""
        return self.engine.scheduler.books()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: text as it is, messages through the model's template. Raises BadRequest."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt, add_special=True))
        if not isinstance(prompt, Sequence) or not all(isinstance(item, Integral | Mapping) for item in prompt):
            raise BadRequest(f"a prompt is text, token ids or messages, not {_shown(prompt)}", "prompt")
        if all(isinstance(item, Integral) for item in prompt):
            return tuple(map(int, prompt))  # type: ignore[arg-type]
        from kvledger.text.chat import require_template

        text = require_template(self.loaded.template).render(prompt)  # type: ignore[arg-type]
        return tuple(self.tokenizer.encode(text))

    # ------------------------------------------------------------------------------------------ inside

    def _request(self, prompt: Prompt, params: SamplingParams, structured: Mapping[str, Any] | None) -> Request:
        return Request(
            f"llm-{next(self._ids)}", self.encode(prompt), params, seed=self._seeds.getrandbits(63),
            eos_token_ids=self.tokenizer.eos_token_ids, constraint=self._constraint(structured),
        )  # fmt: skip

    def _constraint(self, structured: Mapping[str, Any] | None) -> Any:
        if structured is None:
            return None
        if self._grammars is None:
            from kvledger.text.structured import GrammarCompiler

            self._grammars = GrammarCompiler(self.tokenizer)
        constraint = self._grammars.from_structured_outputs(structured) if isinstance(structured, Mapping) else None
        if constraint is None:
            kinds = "one of json, json_object, regex, choice or grammar"
            raise BadRequest(f"structured must name {kinds}, got {_shown(structured)}", "structured")
        return constraint

    def _submit(self, requests: Sequence[Request]) -> list[_Pending]:
        """Add all, or none where one is refused."""
        pending = [_Pending(request, self.tokenizer) for request in requests]
        with self._lock:
            for index, item in enumerate(pending):
                try:
                    self.engine.add(item.request)
                except KvledgerError:
                    self._drop(requests[:index])
                    raise
                self._live[item.request.request_id] = item
        return pending

    def _drop(self, requests: Iterable[Request]) -> None:
        with self._lock:
            for request in requests:
                self.engine.abort(request.request_id)
                self._forget(request)

    def _forget(self, request: Request) -> None:
        self._live.pop(request.request_id, None)
        self.metrics.live.pop(request.request_id, None)
        self.metrics.done.pop(request.request_id, None)

    def _drive(self, pending: Sequence[_Pending]) -> Iterator[tuple[_Pending, int, str]]:
        """Step until all have ended; yields (request, choice, new text). Aborts what is left if it is abandoned."""
        try:
            while not all(item.is_done for item in pending):
                with self._lock:  # another thread's step may have been for these, too
                    if not any(item.news for item in pending):
                        self._step()
                for item in pending:
                    while item.news:
                        yield item, *item.news.popleft()
        finally:
            with self._lock:
                self._drop(item.request for item in pending if not all_ended(item.choices))
                for item in pending:
                    self._live.pop(item.request.request_id, None)

    def _step(self) -> None:
        """One step of the engine for everybody's requests. The caller holds the lock."""
        events = self.engine.step()
        for event in events:
            if (item := self._live.get(event.request_id)) is not None:
                item.news.append((event.choice, item.take(event)))
                self._stop_where_found(item, event)
        for search in self._searches:
            search.take(events)

    def _stop_where_found(self, item: _Pending, event: Event) -> None:
        choice = item.choices[event.choice]
        if choice.must_stop:
            choice.must_stop = False
            self.engine.abort(event.request_id, event.choice, "stop", choice.stop_reason)


class _Pending:
    """A request and what has come of it."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.choices = [ChoiceStream(tokenizer, request, i) for i in range(request.params.n)]
        self.num_cached = 0
        self.scores: list[Sample] = []
        self.news: deque[tuple[int, str]] = deque()  # (choice, new text) that nobody has fetched yet

    @property
    def is_done(self) -> bool:
        """Ended, and everything fetched."""
        return not self.news and all_ended(self.choices)

    def take(self, event: Event) -> str:
        """Book one event; the choice's new text."""
        if isinstance(event, TokenEvent):
            return self.choices[event.choice].token(event)
        if isinstance(event, Finished):
            return self.choices[event.choice].finish(event)
        if isinstance(event, PromptScored):
            self.scores += event.samples
        elif isinstance(event, Admitted) and event.is_first:
            self.num_cached = event.num_cached
        return ""

    def output(self, prompt: str | None, metrics: Metrics) -> RequestOutput:
        request, params = self.request, self.request.params
        times = metrics.done.pop(request.request_id, None) or metrics.live[request.request_id]
        scores = None if params.prompt_logprobs is None else (None, *self.scores)
        outputs = tuple(_completion(choice) for choice in self.choices)
        return RequestOutput(prompt, request.prompt_token_ids, outputs, self.num_cached, times, scores)


def _completion(choice: ChoiceStream) -> Completion:
    wants_logprobs = choice.request.params.logprobs is not None
    return Completion(
        choice.choice, choice.text, tuple(choice.token_ids), choice.finish_reason or "", choice.stop_reason,
        tuple(choice.samples) if wants_logprobs else None, choice.message,
    )  # fmt: skip


def engine_config(**options: Any) -> EngineConfig:
    """Flat options → configuration. Raises UnknownName with the nearest option, ConfigError for a bad value."""
    if "kv_memory" in options:
        given = options.pop("kv_memory")
        options["kv_memory_bytes"] = parse_bytes(given) if isinstance(given, str) else given
    parts = {"cache": CacheConfig, "sched": SchedulerConfig, "exec": ExecConfig}
    names = {name: {f.name for f in fields(part)} for name, part in parts.items()}
    known = {"max_model_len", "kv_memory"}.union(*names.values())
    for option in options:
        if option not in known:
            raise UnknownName("option", option, known)
    chosen = {name: part(**{k: options[k] for k in options if k in names[name]}) for name, part in parts.items()}
    return EngineConfig(**chosen, max_model_len=options.get("max_model_len"))


def _check_arguments(model: object, seed: object, progress: object) -> None:
    """Raises ConfigError for what is of the wrong type, before anything is loaded."""
    if not isinstance(model, str | Path):
        raise ConfigError(f"model must be a name or a path, got {_shown(model)}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"seed must be a whole number, got {_shown(seed)}")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be a function of a text, got {_shown(progress)}")


def _as_batch(prompts: Any) -> list[Prompt]:
    """One prompt or several → a list: text, a list of ids and a list of messages are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise BadRequest(
            f"prompts are text, token ids or messages, or a list of these, not {_shown(prompts)}", "prompt"
        )
    return [prompts] if prompts and isinstance(prompts[0], Integral | Mapping) else list(prompts)


def _shown(value: object) -> str:
    """A value in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if not isinstance(params, SamplingParams | Sequence):
        raise BadRequest(f"params must be SamplingParams, or a list of these, got {_shown(params)}", "params")
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if not all(isinstance(item, SamplingParams) for item in each):
        raise BadRequest(f"params must be SamplingParams, got {_shown(params)}", "params")
    if len(each) != count:
        raise BadRequest(f"{len(each)} sampling parameters for {count} prompts; give one, or one each", "params")
    return each
