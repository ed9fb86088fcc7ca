"""Whatever arrives is answered below 500, and the server goes on: changed fields, and plain noise."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import Running, running

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20), st.sampled_from(["auto", "required", "none", "text", "json_object", "user", "\ud800", "\0"]),
)  # fmt: skip
JUNK = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FIELDS = [
    "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop",
    "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens", "priority", "request_id",
    "cache_salt", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "logprobs", "top_logprobs", "echo", "tools", "tool_choice", "messages", "prompt", "input", "text",
    "max_tokens", "max_completion_tokens", "chat_template", "chat_template_kwargs", "tokens", "use_beam_search",
]  # fmt: skip
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "say:x"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "say:x", "max_tokens": 3},
    "/v1/responses": {"input": "say:x", "max_output_tokens": 3},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1, 2]},
}
PLAUSIBLE = {
    "tools": [TOOL], "logit_bias": {"5": 1.0}, "response_format": {"type": "json_object"}, "stop": ["a", "b"],
    "chat_template": "{{ messages[0]['content'] }}", "guided_regex": "[ab]+", "n": 2, "logprobs": 2, "echo": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running(max_model_len=1024) as found:
        yield found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(GOOD)),
    changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3),
    plausible=st.sets(st.sampled_from(sorted(PLAUSIBLE)), max_size=2),
)
def test_changed_fields(server: Running, path: str, changes: dict, plausible: set):
    body = {**GOOD[path], **{name: PLAUSIBLE[name] for name in plausible}, **changes}
    answer = server.http.post(path, content=_json(body), timeout=20)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"code":500' not in answer.text
    elif answer.status_code != 200:
        assert answer.json()["error"]["code"] == answer.status_code


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(GOOD)), raw=st.binary(max_size=200))
def test_noise(server: Running, path: str, raw: bytes):
    assert server.http.post(path, content=raw).status_code == 400


def test_it_still_answers(server: Running):
    server.wait_idle()
    assert server.chat("say:well").json()["choices"][0]["message"]["content"] == "well"


def _json(value: object) -> bytes:
    import json

    return json.dumps(value).encode()
