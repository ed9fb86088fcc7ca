"""The `openai` package against the running server: what users' programs do."""

import json

import openai
import pytest

from conftest import Running, Script, running, tiny_pool
from kvledger.server.state import Settings

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def served():
    """Room for descriptions of functions, at a token per byte."""
    with running(pool=tiny_pool(512), max_model_len=4096) as found:
        yield found


@pytest.fixture
def client(served: Running):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as found:
        yield found


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=user("capital?"), temperature=0, seed=1)
    assert answer.choices[0].message.content == "Paris."
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_chat_stream(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="script", messages=user("say:un deux"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "un deux"
    assert chunks[-1].usage.completion_tokens == 8


def test_completions_with_logprobs(client: openai.OpenAI):
    answer = client.completions.create(model="script", prompt="say:ab", logprobs=2, n=2)
    assert [c.text for c in answer.choices] == ["ab", "ab"]
    assert answer.choices[0].logprobs.tokens[:2] == ["a", "b"]


def test_chat_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=user("say:ab"), logprobs=True, top_logprobs=1)
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("a", [97], "a")


def test_models(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == ["script", "script-alias"]


def test_json_schema(client: openai.OpenAI):
    """The script wants to talk; the schema makes it an object."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="script", messages=user("say:talk"), response_format=wanted)
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


def test_vllm_extras(client: openai.OpenAI):
    ask = {"model": "script", "messages": user("say:maybe")}
    chosen = client.chat.completions.create(**ask, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].message.content in ("yes", "no")
    guided = client.chat.completions.create(**ask, extra_body={"guided_regex": "[0-9]{3}"})
    assert guided.choices[0].message.content.isdigit()
    with pytest.raises(openai.BadRequestError, match="one kind"):
        client.chat.completions.create(**ask, extra_body={"guided_regex": "a", "guided_choice": ["b"]})


def call(text: str) -> str:
    return f'say:<tool_call>{{"name": "get_weather", "arguments": {text}}}</tool_call>'


def test_tools_auto_calls(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="script", messages=user(call('{"city": "Oslo"}')), tools=[WEATHER, TIME]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}


def test_tools_auto_with_line_breaks_and_several_calls(client: openai.OpenAI):
    """As Qwen's and Hermes' templates teach it."""
    one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    two = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = client.chat.completions.create(model="script", messages=user(f"say:{one}\n{two}"), tools=[WEATHER, TIME])
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in answer.choices[0].message.tool_calls]
    assert calls == [("get_weather", {"city": "Oslo"}), ("get_time", {})]


@pytest.mark.parametrize(
    "text", ["<b>bold</b>", "<tool is what I need", "<", "", "<tool_cal", " <tool_call> in a text"]
)
def test_tools_auto_lets_text_begin_as_it_likes(client: openai.OpenAI, text: str):
    answer = client.chat.completions.create(model="script", messages=user(f"say:{text}"), tools=[WEATHER])
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"


def test_tools_auto_holds_arguments_to_the_schema(client: openai.OpenAI):
    """The script begins a call and then leaves the schema; the grammar does not let it."""
    answer = client.chat.completions.create(
        model="script", messages=user(call('{"town": 7}')), tools=[WEATHER], max_tokens=200
    )
    arguments = answer.choices[0].message.tool_calls[0].function.arguments
    assert arguments.startswith(('{"city"', '{ "city"')), arguments


def test_tools_auto_may_answer_in_text(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=user("say:It is 5 < 6."), tools=[WEATHER])
    assert answer.choices[0].message.content == "It is 5 < 6."
    assert answer.choices[0].finish_reason == "stop"
    assert not answer.choices[0].message.tool_calls


def test_tools_required(client: openai.OpenAI):
    said = 'say:[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    answer = client.chat.completions.create(
        model="script", messages=user(said), tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False
    )
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("get_weather", {"city": "Rome"})]


def test_tools_named(client: openai.OpenAI):
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model="script", messages=user('say:{"city": "Bonn"}'), tools=[WEATHER, TIME], tool_choice=named
    )
    function = answer.choices[0].message.tool_calls[0].function
    assert (function.name, json.loads(function.arguments)) == ("get_weather", {"city": "Bonn"})
    with pytest.raises(openai.BadRequestError, match="get_time"):
        client.chat.completions.create(
            model="script", messages=user("x"), tools=[TIME],
            tool_choice={"type": "function", "function": {"name": "nope"}},
        )  # fmt: skip


def test_tools_none(client: openai.OpenAI):
    answer = client.chat.completions.create(model="script", messages=user("x"), tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "Paris."


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_stream(client: openai.OpenAI, mode: str):
    """Index and id and name once, then pieces of arguments that join to the whole."""
    said = call('{"city": "Ulm"}') if mode == "auto" else 'say:[{"name": "get_weather", "arguments": {"city": "Ulm"}}]'
    stream = client.chat.completions.create(
        model="script", messages=user(said), tools=[WEATHER], tool_choice=mode, parallel_tool_calls=False, stream=True
    )
    chunks = [c.choices[0] for c in stream]
    pieces = [t for c in chunks for t in c.delta.tool_calls or ()]
    assert [p.function.name for p in pieces if p.function.name] == ["get_weather"]
    assert len([p.id for p in pieces if p.id]) == 1
    assert json.loads("".join(p.function.arguments or "" for p in pieces)) == {"city": "Ulm"}
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    assert not "".join(c.delta.content or "" for c in chunks)


def test_tool_results_go_back(client: openai.OpenAI):
    first = client.chat.completions.create(model="script", messages=user(call('{"city": "Oslo"}')), tools=[WEATHER])
    message = first.choices[0].message
    history = [
        *user("weather?"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "say:sunny"},
    ]
    answer = client.chat.completions.create(model="script", messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == "sunny"


def test_responses(client: openai.OpenAI):
    answer = client.responses.create(model="script", input="say:good", instructions="x")
    assert answer.output_text == "good"
    with client.responses.stream(model="script", input="say:good day") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == "good day"
        assert stream.get_final_response().status == "completed"


def test_responses_function_call(client: openai.OpenAI):
    tool = {"type": "function", **WEATHER["function"]}
    answer = client.responses.create(model="script", input=call('{"city": "Kiel"}'), tools=[tool])
    item = answer.output[0]
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "get_weather", {"city": "Kiel"})


def test_responses_json_schema(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"format": {"type": "json_schema", "name": "r", "schema": schema | {"additionalProperties": False}}}
    answer = client.responses.create(model="script", input='say:{"n": 4}', text=wanted)
    assert json.loads(answer.output_text) == {"n": 4}


def test_errors_become_the_packages_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="script", messages=user("x"), temperature=-3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=user("x"))
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="script", prompt="poison", stream=True))


def test_authentication_error():
    with running(settings=Settings(quiet=True, api_keys=("k",))) as served:
        ask = {"model": "script", "messages": user("say:in")}
        good = openai.OpenAI(base_url=served.url + "/v1", api_key="k")
        assert good.chat.completions.create(**ask).choices[0].message.content == "in"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=served.url + "/v1", api_key="wrong").chat.completions.create(**ask)


def test_retries_carry_a_client_over_a_full_queue():
    """Two retries with Retry-After: whoever was refused gets through when the queue has emptied."""
    settings = Settings(quiet=True, max_queue=1, max_num_seqs=1)
    with running(Script(step_s=0.01), settings, max_num_seqs=1) as served:
        first = openai.OpenAI(base_url=served.url + "/v1", api_key="k", max_retries=0)
        streams = [first.completions.create(model="script", prompt="count:30", max_tokens=30, stream=True)
                   for _ in range(2)]  # fmt: skip
        with pytest.raises(openai.InternalServerError):
            first.completions.create(model="script", prompt="say:x")
        patient = openai.OpenAI(base_url=served.url + "/v1", api_key="k", max_retries=2)
        assert patient.completions.create(model="script", prompt="say:x").choices[0].text == "x"
        for stream in streams:
            list(stream)


def test_failures_that_cannot_be_mended_are_not_retried(served: Running):
    def num_failed() -> float:
        lines = served.http.get("/metrics").text.splitlines()
        failed = (x for x in lines if x.startswith("kvledger:http_requests_total") and 'status="500"' in x)
        return sum(float(line.rsplit(" ", 1)[1]) for line in failed)

    before = num_failed()
    eager = openai.OpenAI(base_url=served.url + "/v1", api_key="k", max_retries=2)
    with pytest.raises(openai.InternalServerError):
        eager.completions.create(model="script", prompt="poison")
    assert num_failed() == before + 1
