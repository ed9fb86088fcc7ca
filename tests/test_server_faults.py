"""Faults and load: clients that leave, full queues, deadlines, an engine that dies, signals, keys and limits."""

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from conftest import Running, Script, at_once, running, scripted, tiny_pool, until
from kvledger.bench.serve import Slo, Target, drive, summarise
from kvledger.errors import ConfigError
from kvledger.plan.workload import find_workload
from kvledger.server.app import make_app
from kvledger.server.run import allow_many_connections, bind
from kvledger.server.state import ServerState, Settings
from kvledger.simulate.replay import poisson

QUIET = Settings(quiet=True)
LONG = {"prompt": "count:400", "max_tokens": 400}


def metric(served: Running, line: str) -> float:
    """The value of the series whose name and labels contain all words of `line`."""
    for text in served.http.get("/metrics").text.splitlines():
        if all(word in text for word in line.split()) and not text.startswith("#"):
            return float(text.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {line}")


def send_raw(url: str, body: dict, read_bytes: int) -> None:
    """Post, read about `read_bytes` of the answer, hang up."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head + payload)
        got = 0
        sock.settimeout(5)
        while got < read_bytes:
            data = sock.recv(min(4096, read_bytes - got))
            if not data:
                break
            got += len(data)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("read_bytes", [0, 1, 100, 400, 2000, 10_000])
def test_disconnect_at_any_point_gives_the_blocks_back(stream: bool, read_bytes: int):
    with running(Script(step_s=0.001)) as served:
        send_raw(served.url, {**LONG, "stream": stream}, read_bytes if stream else 0)
        served.wait_idle(3)


def test_disconnect_while_waiting_in_the_queue():
    with running(Script(), wait=False) as served:
        sender = threading.Thread(target=send_raw, args=(served.url, {**LONG, "stream": True}, 0))
        until(lambda: served.server.state.link.state.value == "ready")
        sender.start()
        sender.join()
        served.script.gate.set()
        served.wait_idle(3)


def test_body_never_finished():
    with running() as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert served.chat("say:ok").status_code == 200
        served.wait_idle()


def test_many_clients_with_random_cancellation_lose_no_block():
    async def client(http: httpx.AsyncClient, rng: random.Random, tally: dict) -> None:
        body = {"prompt": f"{rng.random()} count:{rng.randint(1, 60)}", "max_tokens": 64, "n": rng.choice([1, 1, 2])}
        try:
            async with asyncio.timeout(rng.choice([0.02, 0.1, 0.3, 20])):
                if rng.random() < 0.5:
                    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                        async for _ in answer.aiter_bytes():
                            pass
                else:
                    await http.post("/v1/completions", json=body)
            tally["done"] += 1
        except TimeoutError:
            tally["left"] += 1

    async def crowd(url: str) -> dict:
        rng, tally = random.Random(5), {"done": 0, "left": 0}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=30) as http:
            await asyncio.gather(*(client(http, random.Random(rng.random()), tally) for _ in range(200)))
        return tally

    with running(Script(step_s=0.0005), pool=tiny_pool(48), max_num_seqs=16, max_num_batched_tokens=64) as served:
        tally = asyncio.run(crowd(served.url))
        assert tally["done"] + tally["left"] == 200
        assert min(tally.values()) > 10, tally
        served.wait_idle()
        assert served.chat("say:alive").json()["choices"][0]["message"]["content"] == "alive"


def test_full_queue_is_answered_503_and_counted():
    settings = Settings(quiet=True, max_queue=2, max_num_seqs=1)
    with running(Script(step_s=0.002), settings, max_num_seqs=1) as served:
        codes, replies = [], []

        def ask() -> None:
            answer = httpx.post(
                served.url + "/v1/completions", json={"prompt": "count:40", "max_tokens": 50}, timeout=20
            )
            codes.append(answer.status_code)
            replies.append(answer)

        crowd = [threading.Thread(target=ask) for _ in range(12)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        refused = [r for r in replies if r.status_code == 503]
        assert len(codes) == 12
        assert set(codes) == {200, 503}
        assert 3 <= codes.count(200) <= 5
        assert all(int(r.headers["Retry-After"]) >= 1 for r in refused)
        assert refused[0].json()["error"]["type"] == "Service Unavailable"
        assert "busy" in refused[0].json()["error"]["message"]
        assert metric(served, "admission_rejections max_num_queued_reqs") == len(refused)
        served.wait_idle()


def test_burst_does_not_block_health():
    with running(Script(step_s=0.01), pool=tiny_pool(1000), max_num_seqs=64) as served:
        body = {"prompt": "count:60", "max_tokens": 60}
        crowd = [
            threading.Thread(target=lambda: httpx.post(served.url + "/v1/completions", json=body, timeout=60))
            for _ in range(40)
        ]
        for thread in crowd:
            thread.start()
        times = []
        for _ in range(20):
            started = time.monotonic()
            assert served.http.get("/health").status_code == 200
            times.append(time.monotonic() - started)
        for thread in crowd:
            thread.join()
        assert sorted(times)[len(times) // 2] < 0.25


@pytest.mark.parametrize("stream", [True, False])
def test_deadline(stream: bool):
    with running(Script(step_s=0.02), Settings(quiet=True, request_timeout_s=0.3)) as served:
        answer = served.post("/v1/completions", **LONG, stream=stream)
        if stream:
            assert '"code":504' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 504
            assert answer.headers["x-should-retry"] == "false"
        served.wait_idle(2)


def test_long_start_answers_health_with_a_reason():
    proceed = threading.Event()

    def slow(progress):
        progress("fetching the model: 42 %")
        proceed.wait()
        return scripted(Script(), tiny_pool())(progress)

    with running(load=slow, wait=False) as served:
        health = served.http.get("/health")
        assert health.status_code == 503
        assert "42 %" in health.json()["error"]["message"]
        assert served.chat("x").status_code == 503
        assert served.chat("x").headers["Retry-After"]
        assert served.http.get("/metrics").status_code == 200
        proceed.set()
        until(lambda: served.http.get("/health").status_code == 200)


def test_engine_death_reaches_every_client_and_health():
    with running(wait=False) as served:
        answers = at_once(served, [{"prompt": prompt} for prompt in ("say:a", "say:b", "die")])
        assert [a.status_code for a in answers].count(503) >= 1
        assert all(a.status_code in (200, 503) for a in answers)
        dead = [a for a in answers if a.status_code == 503]
        assert all("died" in a.json()["error"]["message"] for a in dead)
    assert served.server.exit_code == 1


async def ask_app(state: ServerState, path: str) -> int:
    transport = httpx.ASGITransport(app=make_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        return (await http.get(path)).status_code


def test_health_is_503_once_the_engine_is_dead():
    """Asked of the application itself: the process is on its way out by then."""
    with running() as served:
        state = served.server.state
        assert asyncio.run(ask_app(state, "/health")) == 200
        served.post("/v1/completions", prompt="die")
        assert asyncio.run(ask_app(state, "/health")) == 503


def test_a_question_to_a_dying_engine_is_answered():
    with running(wait=False) as served:
        until(lambda: served.server.state.link.state.value == "ready")
        codes: list[int] = []
        dying = threading.Thread(target=lambda: httpx.post(served.url + "/v1/completions", json={"prompt": "die"}))
        asking = threading.Thread(target=lambda: codes.append(served.http.get("/ledger").status_code))
        dying.start()
        until(lambda: served.scheduler.running)  # the step has begun and waits at the gate
        asking.start()
        until(lambda: served.server.state.link._calls)
        served.script.gate.set()
        dying.join()
        asking.join(5)
    assert codes == [503]


def test_a_prompt_in_many_chunks_is_computed_without_pauses():
    """Steps in the middle of a prompt tell nothing; they are no reason to rest."""
    with running(max_num_batched_tokens=8) as served:
        began = time.monotonic()
        assert served.post("/v1/completions", prompt="x" * 400 + "say:y").json()["choices"][0]["text"] == "y"
        assert time.monotonic() - began < 0.9  # 51 chunks; with a rest of 20 ms after each it was above a second
        assert metric(served, "vllm:iteration_tokens_total_sum") == 406


def test_restart_builds_a_new_engine():
    with running(settings=Settings(quiet=True, restart=True)) as served:
        assert served.post("/v1/completions", prompt="die").status_code == 503
        until(lambda: served.http.get("/health").status_code == 200)
        assert served.chat("say:again").json()["choices"][0]["message"]["content"] == "again"
        assert served.server.state.link.num_restarts == 1
        assert metric(served, "kvledger:engine_restarts") == 1
    assert served.server.exit_code == 0


def test_restart_gives_up_when_nothing_ever_works():
    with running(settings=Settings(quiet=True, restart=True)) as served:
        end = time.monotonic() + 20
        while not served.server.should_exit and time.monotonic() < end:
            try:
                served.post("/v1/completions", prompt="die")
            except httpx.HTTPError:
                break
    assert served.server.exit_code == 1


def test_api_key():
    with running(settings=Settings(quiet=True, api_keys=("s3cret", "other"))) as served:
        refused = served.chat("say:x")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        for key in ("wrong", "s3cre", "s3crett", "s"):
            assert served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        for key in ("s3cret", "other"):
            assert served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert served.http.get("/v1/models", headers={"Authorization": "Basic s3cret"}).status_code == 401
        assert served.http.get("/ledger").status_code == 401
        assert served.http.get("/health").status_code == 200
        assert served.http.get("/metrics").status_code == 200


def test_cors_is_off_unless_asked_for():
    ask = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    with running() as served:
        assert "access-control-allow-origin" not in served.http.options("/v1/models", headers=ask).headers
    with running(settings=Settings(quiet=True, allow_origins=("http://elsewhere",))) as served:
        answer = served.http.options("/v1/models", headers=ask)
        assert answer.headers["access-control-allow-origin"] == "http://elsewhere"


def test_body_limit():
    with running(settings=Settings(quiet=True, max_body_bytes=1000)) as served:
        assert served.post("/v1/completions", prompt="x" * 2000).status_code == 413
        chunked = served.http.post("/v1/completions", content=iter([b"x" * 600] * 4))
        assert chunked.status_code == 413
        assert served.chat("say:ok").status_code == 200


@pytest.mark.parametrize(
    "schema",
    [{"type": "nonsense"}, {"type": "object", "properties": 7}, {"$ref": "#/nowhere"}, "not a schema",
     {"allOf": [{"type": "string"}] * 5000}],
    ids=["type", "properties", "ref", "text", "huge"],
)  # fmt: skip
def test_bad_schema_is_a_400_and_the_server_lives(served: Running, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.chat("say:x", response_format=wanted)
    assert answer.status_code == 400, answer.text
    assert served.chat("say:ok").status_code == 200


def test_deeply_nested_schema(served: Running):
    schema: dict = {}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    answer = served.chat("x", response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert answer.status_code == 400


def test_request_that_outgrows_the_pool_ends_alone():
    """Four blocks of sixteen hold 64 positions: a prompt beyond is refused, an answer beyond is cut."""
    with running(pool=tiny_pool(4)) as served:
        refused = served.post("/v1/completions", prompt="x" * 100)
        assert refused.status_code == 400
        assert "64" in refused.json()["error"]["message"]
        grown = served.post("/v1/completions", prompt="count:300", max_tokens=300).json()["choices"][0]
        assert grown["finish_reason"] == "length"
        assert len(grown["text"]) < 100
        assert served.chat("say:ok", max_tokens=4).status_code == 200
        served.wait_idle()


def test_preemption_does_not_change_an_answer():
    with running(pool=tiny_pool(18), max_num_seqs=4, wait=False) as served:
        answers = at_once(served, [{"prompt": f"{c} count:150", "max_tokens": 151} for c in "abcdef"])
        assert [a.json()["choices"][0]["text"] for a in answers] == [c * 150 for c in "abcdef"]
        assert metric(served, "vllm:num_preemptions_total") > 0
        assert metric(served, "vllm:prefix_cache_hits_total") <= metric(served, "vllm:prefix_cache_queries_total")
        served.wait_idle()


def test_draining_has_an_end():
    """A request that would run for minutes is cut when the drain timeout (2 s here) is over."""
    with running(Script(step_s=0.5), pool=tiny_pool(100)) as served:
        cut = threading.Thread(target=send_raw, args=(served.url, {**LONG, "stream": True}, 10**6))
        cut.start()
        until(lambda: served.scheduler.running)
        began = time.monotonic()
    assert time.monotonic() - began < 8
    cut.join(5)
    assert not cut.is_alive()


def test_port_in_use_is_told_in_one_sentence():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*already in use"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="70000"):
        bind("127.0.0.1", 70000)


SERVER = """
import sys
sys.path.insert(0, {tests!r})
from conftest import *
script = Script(step_s=0.02)
script.gate.set()
sock = bind("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
sys.exit(HttpServer(Settings(), scripted(script, tiny_pool()), sock, drain_s=20).serve_until_done())
"""


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def process():
    code = SERVER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        url = f"http://127.0.0.1:{int(started.stdout.readline())}"
        until(lambda: is_healthy(url))
        yield started, url
        if started.poll() is None:
            started.kill()


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_in_mid_stream_lets_it_end(process, sig, code):
    started, url = process
    with httpx.stream(
        "POST", url + "/v1/completions", json={"prompt": "count:30", "stream": True, "max_tokens": 40}
    ) as s:
        lines = s.iter_lines()
        next(lines)
        started.send_signal(sig)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"stop"' in rest[-2]
    assert started.wait(10) == code
    log = started.stderr.read().decode()
    assert "Traceback" not in log
    assert "status=200" in log
    assert "count:30" not in log  # never the prompt's text


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_second_signal_ends_streams_with_an_error(process, sig, code):
    started, url = process
    with httpx.stream("POST", url + "/v1/completions", json={**LONG, "stream": True}) as s:
        lines = s.iter_lines()
        next(lines)
        began = time.monotonic()
        started.send_signal(sig)
        time.sleep(0.3)
        assert started.poll() is None
        started.send_signal(sig)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "shutting down" in rest[-2]
    assert started.wait(5) == code
    assert time.monotonic() - began < 5
    assert "Traceback" not in started.stderr.read().decode()


def test_drain_has_an_end():
    with running(Script(step_s=0.02)) as served:  # drains for two seconds
        with httpx.stream("POST", served.url + "/v1/completions", json={**LONG, "stream": True}) as s:
            lines = s.iter_lines()
            next(lines)
            served.server.should_exit = True
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in rest[-2]


def test_a_client_that_does_not_read_is_left(process):
    """Its answer cannot be ended properly: two signals leave all the same, and nothing is said of it."""
    started, url = process
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.3)
        started.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        started.send_signal(signal.SIGTERM)
        assert started.wait(5) == 0
    assert "Traceback" not in started.stderr.read().decode()


def test_ready_is_told_when_requests_are_answered():
    """Whoever reads the line that names the address asks at once."""
    answers, url = [], []

    def load(progress):
        served, engine = scripted(Script(), tiny_pool())(progress)
        return replace(served, on_ready=lambda: answers.append(httpx.get(f"{url[0]}/v1/models").status_code)), engine

    with running(load=lambda progress: (until(lambda: url), load(progress))[1], wait=False) as found:
        url.append(found.url)
        until(lambda: answers)
    assert answers == [200]


LOADING = """
import sys, time
sys.path.insert(0, {tests!r})
from kvledger.cli import serve
from kvledger.server import loading
def slow(*args):
    def load(progress):
        progress("fetching the model")
        time.sleep(60)
    return load
loading.make_loader = slow
from kvledger.cli.main import main
main(["serve", "--port", "0"])
"""


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_while_loading_leaves_at_once(sig, code):
    source = LOADING.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", source], stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert "fetching" in started.stderr.readline()
        time.sleep(0.2)
        started.send_signal(sig)
        began = time.monotonic()
        assert started.wait(10) == code
        assert time.monotonic() - began < 5
        assert "Traceback" not in started.stderr.read()


def test_two_thousand_requests_at_once_are_answered_or_refused():
    settings = Settings(quiet=True, max_queue=500, max_num_seqs=64)
    allow_many_connections()
    with running(Script(), settings, pool=tiny_pool(2000), max_num_seqs=64) as served:
        arrivals = poisson(find_workload("8/2"), 2000, 0.0, 4, max_prompt=8, max_output=4, vocab_size=90)
        found = summarise(asyncio.run(drive(Target.of(served.url), arrivals)), Slo())
        assert found.num_complete + found.num_refused == 2000
        assert found.num_failed == 0
        assert found.num_complete > 500
        served.wait_idle()


def test_signal_when_idle(process):
    started, _ = process
    started.send_signal(signal.SIGTERM)
    assert started.wait(5) == 0


def test_engine_death_makes_the_process_fail(process):
    started, url = process
    assert httpx.post(url + "/v1/completions", json={"prompt": "die"}).status_code == 503
    assert started.wait(10) == 1
