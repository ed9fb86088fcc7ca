"""The README's first command, as a user runs it: a process, the default model, real clients."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from kvledger.errors import FetchError
from kvledger.weights.store import resolve

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model() -> str:
    try:
        resolve("smollm2")
    except FetchError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    return "smollm2"


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[tuple[str, list[str]]]:
    """(address, lines said so far) of `kvledger serve` with its default model."""
    command = [sys.executable, "-m", "kvledger", "serve", "--port", "0", "--kv-memory", "256MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line.rstrip())
            if found := re.search(r"serving +(http://\S+)/v1", line):
                break
        else:
            pytest.fail("the server did not start:\n" + "\n".join(said))
        url = found[1]
        end = time.monotonic() + 20
        while httpx.get(url + "/health").status_code != 200 and time.monotonic() < end:
            time.sleep(0.02)
        yield url, said
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_prints_the_plan_it_then_builds(server):
    url, said = server
    books = httpx.get(url + "/ledger").json()
    plan = "\n".join(said)
    assert f"{books['plan']['num_blocks']:,} blocks" in plan
    assert books["built"]["agrees"]
    assert books["blocks"]["total"] * books["blocks"]["block_bytes"] == books["bytes"]["kv_pool"]
    for context, count in books["requests_at_context"].items():
        assert f"{count} of {int(context) // 1024}K tokens" in plan
    parts = books["blocks"]
    assert parts["used"] + parts["cached"] + parts["free"] == parts["total"]


def test_paris(server):
    url, _ = server
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 20}
    assert "Paris" in httpx.post(url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
    assert "Paris" in httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"]


def test_the_openai_package_and_the_same_answer_whole_streamed_and_cached(server):
    url, _ = server
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    ask = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**ask)
    streamed = client.chat.completions.create(**ask, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in streamed)
    again = client.chat.completions.create(**ask)
    assert text == whole.choices[0].message.content == again.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_logprobs_of_the_prompt_are_those_of_generation(server):
    """Scoring a text by echo gives what generating it gave, bit for bit."""
    url, _ = server
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, "logprobs": 1}
    made = httpx.post(url + "/v1/completions", json=body).json()["choices"][0]
    prompt = httpx.post(url + "/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
    full = httpx.post(url + "/tokenize", json={"prompt": body["prompt"] + made["text"]}).json()["tokens"]
    scored = httpx.post(
        url + "/v1/completions", json={"prompt": full, "echo": True, "logprobs": 1, "max_tokens": 1}
    ).json()["choices"][0]
    wanted = made["logprobs"]["token_logprobs"]
    assert scored["logprobs"]["token_logprobs"][len(prompt) : len(prompt) + len(wanted)] == wanted


def test_json_schema_and_required_tool(server):
    url, _ = server
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, response_format=wanted, temperature=0, max_tokens=60
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    called = client.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_tokens=80,
    )  # fmt: skip
    call = called.choices[0].message.tool_calls[0]
    assert call.function.name == "look_up"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_run_answers_on_stdout(model: str):
    command = [sys.executable, "-m", "kvledger", "run", model, QUESTION[0]["content"]]
    options = ["--temperature", "0", "--max-tokens", "20", "--kv-memory", "64MiB"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=True)
    assert "Paris" in done.stdout
    assert "loading" not in done.stdout


def test_chat_remembers_and_ends_at_the_end_of_input(model: str):
    command = [sys.executable, "-m", "kvledger", "chat", model, "--temperature", "0", "--max-tokens", "20"]
    done = subprocess.run(
        [*command, "--kv-memory", "64MiB"], input="What is the capital of France?\n/reset\n/exit\n",
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "Paris" in done.stdout


def test_beam_search_finds_what_the_library_finds(server):
    """The best of four beams is at least as likely as greedy, and its blocks come back."""
    url, _ = server
    body = {"prompt": "The capital of France is", "max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 4}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1]
    assert any("Paris" in c["text"] for c in choices)
    assert choices[0]["text"] != choices[1]["text"]
    refused = httpx.post(url + "/v1/completions", json={**body, "stream": True})
    assert refused.status_code == 400
    too_long = httpx.post(url + "/v1/completions", json={**body, "max_tokens": 100_000})
    assert too_long.status_code == 400
    end = time.monotonic() + 10
    while httpx.get(url + "/ledger").json()["blocks"]["used"] and time.monotonic() < end:
        time.sleep(0.02)
    books = httpx.get(url + "/ledger").json()
    assert books["blocks"]["used"] == 0
    assert books["requests"] == {"running": 0, "waiting": 0}


def test_a_seed_repeats_itself_and_choices_differ(server):
    url, _ = server
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "n": 3, "seed": 7}
    texts = [[c["text"] for c in httpx.post(url + "/v1/completions", json=body).json()["choices"]] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    other = httpx.post(url + "/v1/completions", json={**body, "seed": 8}).json()
    assert [c["text"] for c in other["choices"]] != texts[0]


def test_bench_serve_measures_it(server):
    url, _ = server
    command = [sys.executable, "-m", "kvledger", "bench", "serve", "--url", url, "--workload", "16/4", "--json"]
    options = ["--requests", "6", "--rate", "20", "--slo-e2e", "60s"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert (found["num_sent"], found["num_complete"], found["num_output_tokens"]) == (6, 6, 24)
    assert found["goodput_per_s"] > 0
    assert 0 < found["ttft_s"]["p50"] <= found["e2e_s"]["p50"]
