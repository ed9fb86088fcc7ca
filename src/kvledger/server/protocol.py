"""What clients may send: the fields of OpenAI's API and vLLM's additions. Unknown fields are accepted and ignored.

Models only check shapes and types; `SamplingParams` checks values, `prompts.py` meanings. Knows no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvledger.errors import BadRequest

MAX_PROMPTS = 1024  # prompts of one /v1/completions request
MAX_STOPS = 64
_MAX_SEED = (1 << 63) - 1


def _as_list(value: Any) -> Any:
    """`stop` may be null, one string or a list."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Body):
    """`response_format.json_schema`."""

    name: str = "response"
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: at most one of these."""

    json_: Any | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionSpec(Body):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """An entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(Body):
    """`tool_choice.function`."""

    name: str


class NamedTool(Body):
    """`tool_choice` that names one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Sampling(Body):
    """Fields of sampling that both APIs share. None: the model's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = 1
    best_of: int | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = 1.0
    seed: Annotated[int, Field(ge=-_MAX_SEED - 1, le=_MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] = []
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: int | None = 0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = True
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = False
    priority: int | None = 0
    request_id: str | None = Field(default=None, max_length=128)
    cache_salt: str | None = Field(default=None, max_length=1024)
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


Prompt = str | list[str] | list[int] | list[list[int]]


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True


class Message(Body):
    """A chat message; `content` may be text, parts of text, or null beside tool calls."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool | None = False
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = Field(default=None, max_length=100_000)
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`, as far as one turn of text and function calls goes."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = 0
    cache_salt: str | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = False


class TokenizeRequest(Body):
    """`POST /tokenize`: a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """`POST /detokenize`. vLLM calls the field `tokens`, others `token_ids`: both are read."""

    model: str | None = None
    tokens: list[int] = Field(validation_alias=AliasChoices("tokens", "token_ids"))


T = TypeVar("T", bound=Body)


def parse(kind: type[T], raw: bytes) -> T:
    """Bytes of a body → request. Raises BadRequest that names the first wrong field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _bad_request(error) from None


def validate(kind: type[T], value: Any) -> T:
    """As `parse`, of a value that has been read already. Raises BadRequest."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _bad_request(error) from None


def _bad_request(error: ValidationError) -> BadRequest:
    """The first complaint, as `field: what is wrong`; a union's branches are not spelled out."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid" or not path:
        return BadRequest(f"the body is not a JSON object: {first['msg']}", None)
    return BadRequest(f"{'.'.join(path)}: {first['msg']}", path[0])
