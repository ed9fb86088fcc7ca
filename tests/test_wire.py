"""The wire, byte by byte: shapes, order of events, fields that must be accepted, error bodies."""

import json
import threading

import httpx
import pytest

from conftest import Running, at_once, running, tiny_pool, until
from kvledger.server.state import Settings

ASK = [{"role": "user", "content": "say:hello"}]


def contents(events: list) -> str:
    return "".join(c["delta"].get("content") or "" for e in events if e != "[DONE]" for c in e["choices"])


def test_chat_whole(served: Running):
    body = served.chat("say:hello").json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "script"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == (
        0,
        "stop",
        None,
        None,
    )
    usage = body["usage"]
    assert usage["completion_tokens"] == 6  # five letters and the end of text
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert "cached_tokens" in usage["prompt_tokens_details"]


def test_completion_whole(served: Running):
    body = served.post("/v1/completions", prompt="say:hello").json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == "hello"
    assert body["usage"]["prompt_tokens"] == len("say:hello")


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_order(served: Running, n: int):
    """Role once per choice, first; one finish chunk per choice; usage with no choices; [DONE]; one id."""
    events = served.events("/v1/chat/completions", messages=ASK, n=n, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6 * n
    assert len({e["id"] for e in events[:-1]}) == 1
    for index in range(n):
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in c["delta"] for c in mine) == 1
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in mine) == "hello"


def test_stream_without_usage_has_no_usage(served: Running):
    events = served.events("/v1/chat/completions", messages=ASK)
    assert all("usage" not in e and e["choices"] for e in events[:-1])


def test_continuous_usage(served: Running):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.events("/v1/completions", prompt="count:5", stream_options=options)
    tallies = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert tallies == sorted(tallies)
    assert tallies[-1] == 6


def test_stream_headers_and_framing(served: Running):
    response = served.post("/v1/completions", prompt="say:x", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    assert all(part.startswith("data: ") for part in response.text.strip().split("\n\n"))


def test_fields_of_other_tools_are_accepted(served: Running):
    """What guidellm, vllm bench and others send; null stands for absent, unknown fields for nothing."""
    body = {
        "stop": None, "ignore_eos": True, "max_tokens": 9, "temperature": 0, "user": "me", "suffix": None,
        "logit_bias": None, "n": None, "seed": None, "best_of": None, "some_future_field": {"a": 1}, "top_k": -1,
        "repetition_penalty": 1.0, "min_p": 0.0, "presence_penalty": None, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "stream_interval": 1, "logprobs": None,
    }  # fmt: skip
    answer = served.post("/v1/completions", prompt="say:ab", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 9
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_prompts_as_ids_and_lists(served: Running):
    ids = list(b"say:one")
    assert served.post("/v1/completions", prompt=ids).json()["choices"][0]["text"] == "one"
    both = served.post("/v1/completions", prompt=["say:a", "say:b"], n=2).json()["choices"]
    assert [(c["index"], c["text"]) for c in both] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    lists = served.post("/v1/completions", prompt=[ids, list(b"say:two")]).json()["choices"]
    assert [c["text"] for c in lists] == ["one", "two"]


def test_echo_with_logprobs(served: Running):
    """lm-eval's way of scoring: the prompt's tokens with their logprobs, the first of which is null."""
    body = served.post("/v1/completions", prompt=list(b"abc"), echo=True, logprobs=1, max_tokens=1).json()
    found = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"].startswith("abc")
    assert found["tokens"][:3] == ["a", "b", "c"]
    assert found["token_logprobs"][:3] == [None, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1]["b"] == -0.5


def test_echo_alone_generates_nothing(served: Running):
    body = served.post("/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=0).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


def test_echo_stream_equals_whole(served: Running):
    ask = {"prompt": "say:xyz", "echo": True, "logprobs": 1}
    whole = served.post("/v1/completions", **ask).json()["choices"][0]
    parts = [e["choices"][0] for e in served.events("/v1/completions", **ask)[:-1]]
    assert "".join(p["text"] for p in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for p in parts for x in p["logprobs"][key]] == whole["logprobs"][key]


def test_chat_logprobs(served: Running):
    body = served.chat("say:é", logprobs=True, top_logprobs=2).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries[:2]] == [[0xC3], [0xA9]]
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    assert served.chat("x", top_logprobs=2).status_code == 400


def test_prompt_logprobs(served: Running):
    found = served.post("/v1/completions", prompt="abc", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    assert found["prompt_logprobs"][0] is None
    assert found["prompt_logprobs"][1]["98"]["decoded_token"] == "b"
    assert len(found["prompt_logprobs"]) == 3


def test_characters_never_arrive_in_halves(served: Running):
    """Tokens are single bytes here, so every one of these characters spans several."""
    text = "naïve 😀 中文 👩‍👩‍👧"
    events = served.events("/v1/chat/completions", messages=[{"role": "user", "content": f"say:{text}"}])
    assert contents(events) == text
    assert all("�" not in contents([e]) for e in events)


def test_character_cut_by_max_tokens_shows_once_at_the_end(served: Running):
    cut = served.chat("say:a😀", max_tokens=3).json()["choices"][0]
    assert cut["message"]["content"] == "a�"
    assert cut["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["lo w", ["zz", "lo w"], ["o w", "lo w"]])
def test_stop_strings_over_token_borders(served: Running, stop):
    body = served.chat("say:hello world and more", stop=stop).json()["choices"][0]
    expected = {"lo w": "hel", "o w": "hell"}[body["stop_reason"]]
    assert body["message"]["content"] == expected
    assert body["finish_reason"] == "stop"


def test_stop_string_included(served: Running):
    body = served.chat("say:hello world", stop="lo", include_stop_str_in_output=True).json()["choices"][0]
    assert body["message"]["content"] == "hello"


def test_stop_string_in_stream_shows_nothing_of_itself(served: Running):
    events = served.events(
        "/v1/chat/completions", messages=[{"role": "user", "content": "say:one END two"}], stop=["END"]
    )
    assert contents(events) == "one "
    assert [c["stop_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]] == ["END"]
    served.wait_idle()


def test_near_miss_of_a_stop_string_is_shown(served: Running):
    assert served.chat("say:EN EN", stop=["END"]).json()["choices"][0]["message"]["content"] == "EN EN"


def test_stop_token_ids(served: Running):
    body = served.post("/v1/completions", prompt="say:abc", stop_token_ids=[98]).json()["choices"][0]
    assert (body["text"], body["finish_reason"], body["stop_reason"]) == ("a", "stop", 98)


def test_min_tokens_holds_stop_strings_off(served: Running):
    body = served.post("/v1/completions", prompt="say:abcabc", stop=["b"], min_tokens=3).json()["choices"][0]
    assert body["text"] == "abca"


def test_token_ids_on_request(served: Running):
    body = served.chat("say:ab", return_token_ids=True).json()
    assert body["choices"][0]["token_ids"][:2] == [97, 98]
    assert body["prompt_token_ids"]


def test_cached_tokens_in_usage(served: Running):
    prompt = "the same beginning, long enough for whole blocks of sixteen; say:x"
    served.post("/v1/completions", prompt=prompt, cache_salt="mine")
    again = served.post("/v1/completions", prompt=prompt, cache_salt="mine").json()["usage"]
    other = served.post("/v1/completions", prompt=prompt, cache_salt="yours").json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_cached_tokens_of_beam_searches(served: Running):
    prompts = [
        "one beginning, long enough for whole blocks of sixteen; say:x",
        "another, of which blocks are kept; say:y",
    ]
    body = {"prompt": prompts, "use_beam_search": True, "n": 2, "max_tokens": 3}
    first, again = (served.post("/v1/completions", **body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == sum((len(p) - 1) // 16 * 16 for p in prompts)
    refused = served.post("/v1/completions", **{**body, "n": 3, "best_of": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_the_log_line_of_a_beam_search_has_its_tokens():
    lines = []
    with running(settings=Settings(quiet=True, log_prompts=True)) as served:
        served.server.state.log = lambda event, **fields: lines.append(fields)
        body = {"prompt": "say:abc", "use_beam_search": True, "n": 2, "max_tokens": 3, "request_id": "mine"}
        spent = served.post("/v1/completions", **body).json()["usage"]
        until(lambda: lines)
    line = lines[0]
    assert (line["id"], line["prompt"]) == ("cmpl-mine", ["say:abc"])
    assert (line["prompt_tokens"], line["cached_tokens"]) == (7, 0)
    assert line["completion_tokens"] == spent["completion_tokens"] > 0


def test_prefix_shorter_than_a_block_is_reported_as_no_hit(served: Running):
    for _ in range(2):
        usage = served.post("/v1/completions", prompt="short say:x").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_truncation(served: Running):
    body = served.post("/v1/completions", prompt="x" * 600 + "say:hi", truncate_prompt_tokens=6).json()
    assert body["usage"]["prompt_tokens"] == 6
    assert body["choices"][0]["text"] == "hi"


def test_tokenize_round_trip(served: Running):
    found = served.post("/tokenize", prompt="héy", return_token_strs=True).json()
    assert found["count"] == 4
    assert found["max_model_len"] == 512
    assert served.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "héy"}
    chat = served.post("/tokenize", messages=ASK).json()
    assert chat["tokens"][0] == 257
    assert served.post("/tokenize").status_code == 400


def test_small_endpoints(served: Running):
    from kvledger import __version__

    assert served.http.get("/version").json() == {"version": __version__}
    assert served.http.get("/load").json() == {"server_load": 0}
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/health").content == b""
    card = served.http.get("/v1/models").json()
    assert [m["id"] for m in card["data"]] == ["script", "script-alias"]
    assert card["data"][0]["max_model_len"] == 512


BAD = [
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {}, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "broken", "content": "x"}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ("/v1/chat/completions", {"messages": ASK, "n": 0}, "n"),
    ("/v1/chat/completions", {"messages": ASK, "n": 512}, "n"),
    ("/v1/chat/completions", {"messages": ASK, "temperature": -1}, "temperature"),
    ("/v1/chat/completions", {"messages": ASK, "top_p": 0}, "top_p"),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 0}, "max_tokens"),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 10**6}, "max_tokens"),
    ("/v1/chat/completions", {"messages": ASK, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("/v1/chat/completions", {"messages": ASK, "logit_bias": {"99999": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": ASK, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format"),
    ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "xml"}}, "response_format"),
    ("/v1/chat/completions", {"messages": ASK, "stop": ["x"] * 65}, "stop"),
    ("/v1/chat/completions", {"messages": ASK, "logit_bias": {"5": 101}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": ASK, "n": 3, "best_of": 2}, "best_of"),
    ("/v1/chat/completions", {"messages": ASK, "best_of": 2, "stream": True}, "best_of"),
    ("/v1/completions", {"prompt": ["x"] * 1000, "n": 9}, "n"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt"),
    ("/v1/completions", {"prompt": "x" * 600}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [259]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [259]}, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "seed": 1 << 70}, "seed"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_requests_name_the_field_and_the_server_lives(served: Running, path: str, body: dict, param: str):
    answer = served.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    assert served.chat("say:ok").json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    ],
)
def test_malformed_bodies(served: Running, raw: bytes):
    answer = served.http.post("/v1/chat/completions", content=raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_too_long_says_the_numbers(served: Running):
    message = served.post("/v1/completions", prompt="x" * 500, max_tokens=100).json()["error"]["message"]
    assert "512" in message
    assert "600" in message


def test_unknown_model_and_route(served: Running):
    answer = served.chat("x", model="gpt-9")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert served.http.get("/v1/nothing").json()["error"]["code"] == 404
    assert served.http.get("/v1/completions").status_code == 405


def test_request_id_is_the_clients_own(served: Running):
    answer = served.http.post("/v1/completions", json={"prompt": "say:x"}, headers={"X-Request-Id": "trace 7\r"[:7]})
    assert answer.json()["id"] == "cmpl-trace_7"


def test_error_in_mid_stream_is_an_event_and_done_follows(served: Running):
    events = served.events("/v1/completions", prompt="poison")
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == 500
    assert served.chat("say:ok").status_code == 200


def test_poison_request_ends_alone(served: Running):
    answer = served.post("/v1/completions", prompt="poison")
    assert answer.status_code == 500
    assert answer.headers["x-should-retry"] == "false"
    served.wait_idle()


def test_responses_whole(served: Running):
    body = served.post("/v1/responses", input="say:hi", instructions="Be brief.", max_output_tokens=50).json()
    assert (body["object"], body["status"]) == ("response", "completed")
    assert body["output"][0]["content"][0]["text"] == "hi"
    assert body["usage"]["output_tokens"] == 3
    cut = served.post("/v1/responses", input="say:hello", max_output_tokens=2).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_responses_stream_order(served: Running):
    events = served.events("/v1/responses", input=[{"role": "user", "content": "say:hi"}])[:-1]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    names = list(dict.fromkeys(e["type"] for e in events))
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


def test_stream_events_are_json_lines(served: Running):
    text = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "say:a\n\nb"}], stream=True).text
    found = [json.loads(p[6:]) for p in text.strip().split("\n\n")[:-1]]
    assert contents(found) == "a\n\nb"


def test_page_is_served_whole_and_asks_nobody_else(served: Running):
    page = served.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "</html>" in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert page.text.count("</script>") == 1


def test_ledger_adds_up(served: Running):
    served.chat("say:something to keep")
    served.wait_idle()
    books = served.http.get("/ledger").json()
    blocks, size = books["blocks"], books["bytes"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"]
    assert size["kv_used"] + size["kv_cached"] + size["kv_free"] == size["kv_pool"]
    assert size["kv_pool"] == blocks["total"] * blocks["block_bytes"]
    assert books["built"]["agrees"]
    assert books["block_map"]["cells"].count("c") == blocks["cached"] > 0
    assert books["requests"] == {"running": 0, "waiting": 0}


def test_ledger_of_a_running_request():
    with running(wait=False) as served:
        at_once_thread = threading.Thread(target=at_once, args=(served, [{"prompt": "x" * 20 + "count:3"}]))
        served.script.step_s = 0.05
        at_once_thread.start()
        until(lambda: served.server.state.link.num_open == 1)
        until(lambda: served.http.get("/ledger").json()["requests"]["running"] == 1)
        books = served.http.get("/ledger").json()
        at_once_thread.join()
    assert books["blocks"]["used"] == 2
    assert 0 < books["waste"]["share"] < 1
    assert books["block_map"]["cells"].count("u") == 2


@pytest.mark.parametrize(
    ("max_model_len", "listed"), [(512, [512]), (1023, [1023]), (1024, [1024]), (5000, [1024, 2048, 4096])]
)
def test_the_ledger_lists_no_context_that_would_be_refused(max_model_len: int, listed: list[int]):
    pool = tiny_pool(num_blocks=1000)
    with running(pool=pool, max_model_len=max_model_len) as served:
        found = served.http.get("/ledger").json()["requests_at_context"]
        assert found == {str(context): 1000 // (-(-context // 16)) for context in listed}
        assert served.post("/v1/completions", prompt="x" * (max_model_len + 1)).status_code == 400


def test_best_of_returns_the_best(served: Running):
    body = served.post("/v1/completions", prompt="say:abc", n=2, best_of=4).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "abc"), (1, "abc")]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 16  # four choices were generated


def test_one_model(served: Running):
    assert served.http.get("/v1/models/script-alias").json()["id"] == "script-alias"
    assert served.http.get("/v1/models/nope").status_code == 404


def test_a_request_id_in_use_is_refused_and_the_first_goes_on():
    with running(wait=False) as served:
        first: list = []
        ask = {"prompt": "say:first", "request_id": "mine"}
        thread = threading.Thread(target=lambda: first.append(served.post("/v1/completions", **ask)))
        until(lambda: served.server.state.link.state.value == "ready")
        thread.start()
        until(lambda: served.server.state.link.num_open == 1)
        with httpx.Client(base_url=served.url) as other:
            assert other.post("/v1/completions", json=ask).status_code == 400
        served.script.gate.set()
        thread.join()
    assert first[0].json()["choices"][0]["text"] == "first"


def test_a_fully_cached_prompt_still_answers(served: Running):
    """The last token is always computed, so the last block is not taken from the cache."""
    prompt = ("exactly thirty-two bytes, " + "say:ok").rjust(32, "_")
    assert len(prompt) == 32
    first = served.post("/v1/completions", prompt=prompt).json()
    again = served.post("/v1/completions", prompt=prompt).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"] == "ok"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_priority_overtakes_in_the_queue():
    ends: list[int] = []
    with running(wait=False, max_num_seqs=1, queueing="priority") as served:
        link = served.server.state.link

        def ask(priority: int) -> None:
            httpx.post(served.url + "/v1/completions", json={"prompt": "count:5", "priority": priority})
            ends.append(priority)

        until(lambda: link.state.value == "ready")
        crowd = []
        for number, priority in enumerate([5, 9, 7, 1], start=1):
            crowd.append(threading.Thread(target=ask, args=(priority,)))
            crowd[-1].start()
            until(lambda number=number: link.num_open == number)
        served.script.step_s = 0.01
        served.script.gate.set()
        for thread in crowd:
            thread.join()
    assert [p for p in ends if p != 5] == [1, 7, 9]
