"""`/v1/responses`: one turn of text and function calls, on top of the chat machinery. No turn is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kvledger.errors import BadRequest, KvledgerError
from kvledger.server.answer import Answer
from kvledger.server.errors import reply_for
from kvledger.server.generate import Job, chat_job, open_answer
from kvledger.server.protocol import ChatRequest, ResponsesRequest, parse, validate
from kvledger.server.response_events import ResponseEvents
from kvledger.server.sse import DONE, KEEP_ALIVE, EventStream, unless_gone
from kvledger.server.state import ServerState
from kvledger.server.tools import CallReader, Piece, ToolPlan, plan_tools, read_all


async def create(http: HttpRequest, state: ServerState) -> Response:
    """`POST /v1/responses`."""
    arrival_s = time.monotonic()
    body = parse(ResponsesRequest, await http.body())
    if body.previous_response_id:
        message = "previous_response_id: answers are not kept; send the whole conversation"
        raise BadRequest(message, "previous_response_id")
    chat = to_chat(body)
    plan = plan_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    job = await chat_job(http, state, chat, arrival_s, "resp")
    if body.stream:
        answer = await unless_gone(open_answer(http, state, job), http.receive)
        return EventStream(_stream(answer, body, job, plan), {"x-request-id": job.envelope.id}, answer.close)
    return await unless_gone(_whole(http, state, body, job, plan), http.receive)


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request in chat's words. Raises BadRequest on items that have none."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += [_message(item) for item in items]
    fields = body.model_dump(
        include={"model", "temperature", "top_p", "seed", "stream", "priority", "cache_salt", "ignore_eos"}
        | {"parallel_tool_calls"}
    )
    return validate(
        ChatRequest,
        fields
        | {
            "messages": messages,
            "max_tokens": body.max_output_tokens,
            "response_format": _format((body.text or {}).get("format")),
            "tools": [_tool(tool) for tool in body.tools or ()] or None,
            "tool_choice": _choice(body.tool_choice),
            "logprobs": body.top_logprobs is not None,
            "top_logprobs": body.top_logprobs,
        },
    )


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        return {"role": "system" if role == "developer" else role, "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    raise BadRequest(f"input: items of type {kind!r} are not supported", "input")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"tools: only functions are supported, not {tool.get('type')!r}", "tools")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(wanted: Any) -> dict[str, Any] | None:
    if not isinstance(wanted, Mapping):
        return None
    if wanted.get("type") != "json_schema":
        return {"type": wanted.get("type")}
    return {"type": "json_schema", "json_schema": {"name": wanted.get("name", "r"), "schema": wanted.get("schema")}}


async def _whole(
    http: HttpRequest, state: ServerState, body: ResponsesRequest, job: Job, plan: ToolPlan | None
) -> Response:
    answer = await open_answer(http, state, job)
    try:
        async for _ in answer.deltas():
            pass
    finally:
        answer.close()
    events = ResponseEvents(body, job.envelope)
    events.start()
    for piece in _pieces(answer.choices[0].stream.text, plan):
        events.add(piece)
    events.end(answer.choices[0].stream.finish_reason)
    return JSONResponse(events.response(_usage(answer)), headers={"x-request-id": job.envelope.id})


def _pieces(text: str, plan: ToolPlan | None) -> list[Piece]:
    """A whole answer in pieces, as a stream would have given them."""
    if plan is None:
        return [Piece(content=text)] if text else []
    content, calls = read_all(plan, text)
    pieces = [Piece(content=content)] if content else []
    for index, call in enumerate(calls):
        function = call["function"]
        pieces.append(Piece(call=index, name=function["name"], arguments=function["arguments"]))
    return pieces


def _usage(answer: Answer) -> dict[str, Any]:
    given, got = answer.num_prompt_tokens, answer.num_output_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": sum(answer.num_cached)},
        "output_tokens": got,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + got,
    }


async def _stream(
    answer: Answer, body: ResponsesRequest, job: Job, plan: ToolPlan | None
) -> AsyncGenerator[bytes, None]:
    events, reader = ResponseEvents(body, job.envelope), CallReader(plan) if plan else None
    try:
        yield events.start()
        async for deltas in answer.deltas():
            if not deltas:
                yield KEEP_ALIVE
            for delta in deltas:
                pieces = [Piece(content=delta.text)] if delta.text else []
                if reader is not None:
                    pieces = reader.feed(delta.text) if delta.text else []
                    pieces += reader.finish() if delta.finish_reason else []
                if data := b"".join(events.add(piece) for piece in pieces):
                    yield data
        yield events.end(answer.choices[0].stream.finish_reason)
        yield events.final(_usage(answer))
    except Exception as error:
        yield events.failed(reply_for(error))
        if not isinstance(error, KvledgerError):
            raise
    yield DONE
