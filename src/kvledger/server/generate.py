"""`/v1/chat/completions` and `/v1/completions`: prepare, run, and answer whole or as a stream."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kvledger.errors import BadRequest, KvledgerError
from kvledger.sched.sequence import Request
from kvledger.server import prompts
from kvledger.server.answer import Answer
from kvledger.server.beams import BeamAsked, BeamRun, beam_choices, beams_of
from kvledger.server.errors import QueueFull, reply_for
from kvledger.server.protocol import ChatRequest, CompletionRequest, Sampling, parse
from kvledger.server.responses import Choice, Envelope, usage
from kvledger.server.served import Served
from kvledger.server.shapes import ChatShape, CompletionShape, Shape
from kvledger.server.sse import DONE, KEEP_ALIVE, EventStream, event, unless_gone
from kvledger.server.state import ServerState
from kvledger.server.tools import plan_tools
from kvledger.spec.sampling import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A request ready to run: what the engine is asked and how the answer will look."""

    body: Sampling
    envelope: Envelope
    requests: list[Request]
    shape: Shape
    arrival_s: float
    beams: BeamAsked | None = None


async def chat(http: HttpRequest, state: ServerState) -> Response:
    """`POST /v1/chat/completions`."""
    arrival_s = time.monotonic()
    state.link.check_ready()
    body = parse(ChatRequest, await http.body())
    return await respond(http, state, await chat_job(http, state, body, arrival_s))


async def chat_job(
    http: HttpRequest, state: ServerState, body: ChatRequest, arrival_s: float, prefix: str | None = None
) -> Job:
    """A chat request, checked and rendered; ids begin with `prefix`. Raises BadRequest, ContextTooLong, UnknownName."""
    served = state.served
    prompts.check_model(body.model, served)
    plan = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    params = prompts.sampling_params(
        body, served, max_tokens=max_tokens, logprobs=num_top, prompt_logprobs=body.prompt_logprobs
    )
    ids = await asyncio.to_thread(prompts.chat_prompt, body, plan, served)
    constraint = await compile_constraint(prompts.constraint_spec(body, plan), served)
    echo = prompts.message_text(body.messages[-1]) if body.echo else ""
    shape = ChatShape(served.token_text, num_top, plan, with_ids=bool(body.return_token_ids), echo=echo)
    job = make_job(http, state, body, shape, [ids], params, constraint, arrival_s, prefix)
    return replace(job, beams=beams_of(body, bool(body.logprobs), constraint is not None))


async def completion(http: HttpRequest, state: ServerState) -> Response:
    """`POST /v1/completions`."""
    arrival_s, served = time.monotonic(), state.served
    body = parse(CompletionRequest, await http.body())
    prompts.check_model(body.model, served)
    is_prompt_only = bool(body.echo) and body.max_tokens == 0
    params = prompts.sampling_params(
        body,
        served,
        max_tokens=1 if is_prompt_only else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
    )
    ids = await asyncio.to_thread(prompts.completion_prompts, body, served)
    constraint = await compile_constraint(prompts.constraint_spec(body, None), served)
    shape = CompletionShape(
        served.token_text,
        body.logprobs,
        echo=[served.tokenizer.decode(x) for x in ids] if body.echo else (),
        is_prompt_only=is_prompt_only,
        with_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        n=params.n,
    )
    job = make_job(http, state, body, shape, ids, params, constraint, arrival_s)
    beams = beams_of(body, body.logprobs is not None, constraint is not None)
    return await respond(http, state, replace(job, beams=beams))


async def compile_constraint(spec: prompts.ConstraintSpec | None, served: Served) -> Constraint | None:
    """Compile off the event loop: a large schema must not hold up the others."""
    return None if spec is None else await asyncio.to_thread(served.compile_constraint, spec.kind, spec.value)


def make_job(
    http: HttpRequest,
    state: ServerState,
    body: Sampling,
    shape: Shape,
    ids: Sequence[list[int]],
    params: SamplingParams,
    constraint: Constraint | None,
    arrival_s: float,
    prefix: str | None = None,
) -> Job:
    """Truncate, check lengths, and give everything its ids. Raises BadRequest, ContextTooLong."""
    served = state.served
    kept = [prompts.truncate(x, body.truncate_prompt_tokens, served, params.max_tokens) for x in ids]
    for x in kept:
        prompts.check_length(len(x), params.max_tokens, served)
    answer_id = f"{prefix or shape.id_prefix}-{chosen_id(http, body.request_id)}"
    requests = prompts.engine_requests(
        answer_id, kept, params, served, priority=body.priority or 0, salt=body.cache_salt, constraint=constraint
    )
    return Job(body, Envelope(answer_id, int(time.time()), body.model or served.name), requests, shape, arrival_s)


def chosen_id(http: HttpRequest, asked: str | None) -> str:
    """The client's own request id where it gave one, else a random one."""
    given = asked or http.headers.get("x-request-id")
    return re.sub(r"[^\w.:-]", "_", given)[:128] if given else secrets.token_hex(16)


async def open_answer(http: HttpRequest, state: ServerState, job: Job) -> Answer:
    """Submit the job; count it where it is refused."""
    served, settings = state.served, state.settings
    answer = Answer(state.link, served, state.observer, job.requests, job.arrival_s, settings.request_timeout_s)
    try:
        await answer.open()
    except QueueFull:
        state.observer.metrics.inc("vllm:admission_rejections", len(job.requests), "max_num_queued_reqs")
        raise
    _note(http, state, job, answer=answer)
    return answer


def _note(http: HttpRequest, state: ServerState, job: Job, **facts: Any) -> None:
    """What the log line of this request says beside its path and time."""
    note = http.scope["state"].setdefault("note", {})
    note |= {"id": job.envelope.id, **facts}
    if state.settings.log_prompts:
        tokenizer = state.served.tokenizer
        note["prompt"] = [tokenizer.decode(request.prompt_token_ids) for request in job.requests]


async def respond(http: HttpRequest, state: ServerState, job: Job) -> Response:
    """Run the job and answer as the client asked."""
    if job.beams is not None:
        return await unless_gone(_respond_beams(http, state, job, job.beams), http.receive)
    if job.body.stream:
        answer = await unless_gone(open_answer(http, state, job), http.receive)
        return EventStream(stream_events(answer, job), {"x-request-id": job.envelope.id}, answer.close)
    return await unless_gone(_respond_whole(http, state, job), http.receive)


async def _respond_whole(http: HttpRequest, state: ServerState, job: Job) -> Response:
    answer = await open_answer(http, state, job)
    try:
        async for _ in answer.deltas():
            pass
    finally:
        answer.close()
    entries = [job.shape.whole(choice) for choice in best_choices(answer.choices, job.body, answer.n)]
    body = job.envelope.wrap(job.shape.object, entries, usage_of(answer))
    body |= job.shape.top_level(answer.choices, job.body.prompt_logprobs is not None)
    return JSONResponse(body, headers={"x-request-id": job.envelope.id})


def best_choices(choices: list[Choice], body: Sampling, num_generated: int) -> list[Choice]:
    """Of every prompt's choices the n with the highest mean logprob, renumbered; all of them without best_of."""
    n = body.n or 1
    if body.best_of is None or num_generated == n:
        return choices
    found: list[Choice] = []
    for first in range(0, len(choices), num_generated):
        ranked = sorted(choices[first : first + num_generated], key=lambda choice: -choice.mean_logprob)
        found += ranked[:n]
    return [replace(choice, index=i) for i, choice in enumerate(found)]


async def _respond_beams(http: HttpRequest, state: ServerState, job: Job, asked: BeamAsked) -> Response:
    served, timeout_s, n = state.served, state.settings.request_timeout_s, job.requests[0].params.n
    runs = [BeamRun(state.link, request, asked) for request in job.requests]
    found = await asyncio.gather(*(run.beams(served, timeout_s) for run in runs))
    choices = [c for i, run in enumerate(runs) for c in beam_choices(run, found[i], n, i * n, served)]
    num_prompt = sum(len(request.prompt_token_ids) for request in job.requests)
    num_output, num_cached = sum(len(choice.stream.samples) for choice in choices), sum(run.num_cached for run in runs)
    _note(http, state, job, prompt_tokens=num_prompt, cached_tokens=num_cached, completion_tokens=num_output)
    tally = usage(num_prompt, num_output, num_cached)
    entries = [job.shape.whole(choice) for choice in choices]
    return JSONResponse(job.envelope.wrap(job.shape.object, entries, tally))


def usage_of(answer: Answer) -> dict[str, Any]:
    """Usage so far."""
    return usage(answer.num_prompt_tokens, answer.num_output_tokens, sum(answer.num_cached))


async def stream_events(answer: Answer, job: Job) -> AsyncGenerator[bytes, None]:
    """Chunks as events: openings, deltas, perhaps usage; an error is an event; `[DONE]` always comes last."""
    options = job.body.stream_options
    is_running_tally = bool(options and options.continuous_usage_stats)
    try:
        openings = [event(chunk) for choice in answer.choices for chunk in _opening(job, answer, choice)]
        if openings:
            yield b"".join(openings)
        async for deltas in answer.deltas():
            if not deltas:
                yield KEEP_ALIVE
                continue
            entries = [e for delta in deltas for e in job.shape.chunk(delta, answer.choices[delta.index])]
            tally = usage_of(answer) if is_running_tally else None
            yield b"".join(event(_chunk(job, [entry], tally)) for entry in entries)
        if options and options.include_usage:
            yield event(_chunk(job, [], usage_of(answer)))
    except Exception as error:
        yield event(reply_for(error).body())
        if not isinstance(error, KvledgerError):
            raise
    yield DONE


def _opening(job: Job, answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    return [_chunk(job, [entry], None) for entry in job.shape.opening(choice.index)]


def _chunk(job: Job, entries: list[dict[str, Any]], tally: dict[str, Any] | None) -> dict[str, Any]:
    return job.envelope.wrap(job.shape.chunk_object, entries, tally)
