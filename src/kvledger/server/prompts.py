"""From a request's fields to what the engine is asked: token ids, sampling parameters, constraint. Checks values.

Everything raises BadRequest that names the field, or ContextTooLong with the numbers. Knows no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvledger.errors import BadRequest, ContextTooLong, UnknownName
from kvledger.sched.sequence import Request
from kvledger.server.protocol import MAX_PROMPTS, ChatRequest, CompletionRequest, Message, Sampling
from kvledger.server.served import Served
from kvledger.server.tools import ToolPlan, auto_grammar, forced_schema, instructions
from kvledger.spec.sampling import Constraint, SamplingParams

MAX_SCHEMA_NODES, MAX_SCHEMA_DEPTH = 4096, 64
MAX_SEQUENCES = 2048  # prompts × n of one HTTP request
MAX_BIAS = 100.0
_BANNED = -MAX_BIAS
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What an answer's text must match. `kind`: json (a schema), json_object, regex, choice or grammar."""

    kind: str
    value: Any


def check_model(name: str | None, served: Served) -> None:
    """No name, or one of the served names. Raises UnknownName."""
    if name and name not in served.names:
        raise UnknownName("model", name, served.names)


def completion_prompts(body: CompletionRequest, served: Served) -> list[list[int]]:
    """The prompts of a completion, as token ids: text, ids, or a list of either."""
    prompt = body.prompt
    if body.suffix:
        raise BadRequest("suffix: filling in the middle is not supported", "suffix")
    items: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not items:
        raise BadRequest("prompt is empty", "prompt")
    if len(items) > MAX_PROMPTS:
        raise BadRequest(f"{len(items)} prompts in one request; at most {MAX_PROMPTS}", "prompt")
    return [_encode(item, body.add_special_tokens, served) for item in items]


def _encode(item: str | list[int], add_special: bool, served: Served) -> list[int]:
    ids = served.tokenizer.encode(item, add_special=add_special) if isinstance(item, str) else list(item)
    check_ids(ids, served.vocab_size, "prompt")
    if not ids:
        raise BadRequest("prompt is empty: at least one token is needed", "prompt")
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises BadRequest when an id is not in the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise BadRequest(f"{param}: token {token_id} is not in the vocabulary of {vocab_size}", param)


def chat_prompt(body: ChatRequest, plan: ToolPlan | None, served: Served) -> list[int]:
    """The chat template's prompt as token ids."""
    text = served.render(
        _template_messages(body.messages, plan, served),
        tools=[tool.model_dump() for tool in body.tools or ()] if plan and served.knows_tools else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        **_safe_kwargs(body.chat_template_kwargs or {}),
    )
    return _encode(text, body.add_special_tokens, served)


def _safe_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of the client; the template's own inputs cannot be replaced through them."""
    taken = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
    return {name: value for name, value in kwargs.items() if name not in taken}


def _template_messages(messages: Sequence[Message], plan: ToolPlan | None, served: Served) -> list[dict[str, Any]]:
    """Messages as templates expect them: text content; functions told in the system message where need be."""
    found = [_plain(message, served) for message in messages]
    if plan is None or served.knows_tools:
        return found
    told = instructions(plan)
    if found[0]["role"] == "system":
        return [found[0] | {"content": f"{found[0]['content']}\n\n{told}"}, *found[1:]]
    return [{"role": "system", "content": told}, *found]


def _plain(message: Message, served: Served) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    if message.name:
        plain["name"] = message.name
    if served.knows_tools and message.tool_calls:
        plain["tool_calls"] = message.tool_calls
    elif message.tool_calls and not plain["content"]:
        plain["content"] = "".join(f"<tool_call>{_call_text(call)}</tool_call>" for call in message.tool_calls)
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f'{{"name": "{function.get("name", "")}", "arguments": {function.get("arguments") or "{}"}}}'


def message_text(message: Message) -> str:
    """A message's text; parts of text are joined. Raises BadRequest on pictures and sound."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_part_text(part) for part in message.content)


def _part_text(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise BadRequest(f"messages: content of type {kind!r} is not supported; send text", "messages")
    return str(part["text"])


def truncate(ids: list[int], keep: int | None, served: Served, max_tokens: int | None) -> list[int]:
    """The last `keep` tokens; −1: as many as leave room for the output."""
    if keep is None:
        return ids
    if keep < -1 or keep == 0:
        raise BadRequest(f"truncate_prompt_tokens must be −1 or at least 1, got {keep}", "truncate_prompt_tokens")
    return ids[-(served.max_model_len - (max_tokens or 1)) :] if keep == -1 else ids[-keep:]


def check_length(num_prompt: int, max_tokens: int | None, served: Served) -> None:
    """Raises ContextTooLong when prompt and asked-for output cannot stand in the context."""
    limit = served.max_model_len
    total = num_prompt + (1 if max_tokens is None else max_tokens)
    if total > limit:
        asked = "at least 1" if max_tokens is None else str(max_tokens)
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
            f"({num_prompt} in the prompt, {asked} in the completion). Shorten the prompt or lower max_tokens.",
            "max_tokens" if num_prompt < limit else "prompt",
        )


def sampling_params(
    body: Sampling, served: Served, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The engine's parameters: the request's fields, else the model's recommendation, else OpenAI's defaults."""
    chosen = {name: _first(getattr(body, name), served.defaults.get(name), plain) for name, plain in _DEFAULTS.items()}
    check_ids(body.stop_token_ids or (), served.vocab_size, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), served.vocab_size, "allowed_token_ids")
    check_ids(tuple(body.logit_bias or ()), served.vocab_size, "logit_bias")
    if any(abs(bias) > MAX_BIAS for bias in (body.logit_bias or {}).values()):
        raise BadRequest(f"logit_bias must be from −{MAX_BIAS:g} to {MAX_BIAS:g}", "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=chosen["temperature"],
        top_p=chosen["top_p"],
        top_k=int(chosen["top_k"]),
        min_p=chosen["min_p"],
        repetition_penalty=chosen["repetition_penalty"],
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={**(body.logit_bias or {}), **_bans(body.bad_words or (), served)},
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        seed=body.seed,
        n=num_choices(body),
        stop=tuple(word for word in body.stop if word),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=0 if logprobs is None and body.best_of else logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def num_choices(body: Sampling) -> int:
    """Choices to generate: n, or best_of of which the best n are returned. Raises BadRequest."""
    n = 1 if body.n is None else body.n
    if body.best_of is None:
        return n
    if body.best_of < n:
        raise BadRequest(f"best_of {body.best_of} is less than n {n}", "best_of")
    if body.use_beam_search:
        return n  # best_of is the width of the search
    if body.stream and body.best_of > n:
        raise BadRequest("best_of cannot be streamed: which are best is known at the end", "best_of")
    return body.best_of


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _bans(words: Sequence[str], served: Served) -> dict[int, float]:
    """Biases that keep one-token words away, alone and after a space."""
    bans: dict[int, float] = {}
    for word in words:
        spelled = [served.tokenizer.encode(text, add_special=False) for text in (word, " " + word)]
        single = [ids[0] for ids in spelled if len(ids) == 1]
        if not single:
            raise BadRequest(
                f"bad_words: {word!r} is {len(spelled[0])} tokens; only one-token words can be", "bad_words"
            )
        bans |= dict.fromkeys(single, _BANNED)
    return bans


def constraint_spec(body: Sampling, plan: ToolPlan | None) -> ConstraintSpec | None:
    """What the answer must match; at most one way of saying it. Raises BadRequest."""
    asked = [*_format_spec(body), *_structured_specs(body), *_tool_specs(plan)]
    if len(asked) > 1 and plan is not None and plan.mode == "auto":
        asked = asked[:-1]  # a response format binds the answer; the model may then not call
    if len(asked) > 1:
        raise BadRequest("ask for one kind of structured output, not several", "response_format")
    for spec in asked:
        check_complexity(spec)
    return asked[0] if asked else None


def _format_spec(body: Sampling) -> list[ConstraintSpec]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [ConstraintSpec("json_object", True)]
    schema = wanted.json_schema.json_schema if wanted.json_schema else None
    if schema is None:
        raise BadRequest("response_format of type json_schema needs json_schema.schema", "response_format")
    return [ConstraintSpec("json", schema)]


def _structured_specs(body: Sampling) -> list[ConstraintSpec]:
    more = body.structured_outputs
    asked = (
        ("json", body.guided_json if body.guided_json is not None else (more and more.json_)),
        ("regex", body.guided_regex or (more and more.regex)),
        ("choice", body.guided_choice or (more and more.choice)),
        ("grammar", body.guided_grammar or (more and more.grammar)),
        ("json_object", (more and more.json_object) or None),
    )
    return [ConstraintSpec(kind, value) for kind, value in asked if value is not None]


def _tool_specs(plan: ToolPlan | None) -> list[ConstraintSpec]:
    if plan is None:
        return []
    if plan.mode == "auto":
        return [ConstraintSpec("grammar", auto_grammar(plan))]
    return [ConstraintSpec("json", forced_schema(plan))]


def check_complexity(spec: ConstraintSpec) -> None:
    """Raises BadRequest when a schema has more nodes or levels than a server should compile for a stranger.

    Lengths of text, and what references expand to, are bounded where it is compiled.
    """
    nodes, deepest, stack = 0, 0, [(spec.value, 1)]
    while stack:
        value, depth = stack.pop()
        nodes, deepest = nodes + 1, max(deepest, depth)
        if nodes > MAX_SCHEMA_NODES or deepest > MAX_SCHEMA_DEPTH:
            limits = f"at most {MAX_SCHEMA_NODES} nodes, {MAX_SCHEMA_DEPTH} levels deep"
            raise BadRequest(f"the {spec.kind} is too complex: {limits}", "response_format")
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        stack += [(child, depth + 1) for child in children]


def engine_requests(
    answer_id: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    served: Served,
    *,
    priority: int,
    salt: str | None,
    constraint: Constraint | None,
) -> list[Request]:
    """One engine request per prompt; without a seed each draws its own."""
    if len(prompts) * params.n > MAX_SEQUENCES:
        raise BadRequest(f"{len(prompts)} prompts × n {params.n} are more than {MAX_SEQUENCES} sequences", "n")
    return [
        Request(
            request_id=f"{answer_id}-{i}",
            prompt_token_ids=tuple(ids),
            params=params,
            priority=priority,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            salt=(salt or "").encode(),
            eos_token_ids=served.eos_token_ids,
            constraint=constraint.fork() if constraint and i else constraint,
        )
        for i, ids in enumerate(prompts)
    ]
