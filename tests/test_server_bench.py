"""The open-loop client: what it counts, on a server whose times are known."""

import asyncio
import json
import re
import time

import pytest

from conftest import Script, running, tiny_pool
from kvledger.bench.serve import Outcome, Slo, Target, drive, read_events, read_trace, summarise
from kvledger.cli.main import main
from kvledger.errors import ConfigError
from kvledger.plan.workload import find_workload
from kvledger.server.state import Settings
from kvledger.simulate.replay import poisson


def arrivals(count: int, rate: float, prompt_and_output: str = "20/10"):
    workload = find_workload(prompt_and_output)
    return poisson(workload, count, rate, 64, max_prompt=64, max_output=64, vocab_size=90, seed=3)


def test_open_loop_keeps_its_times_and_sees_every_token():
    with running(Script(step_s=0.005), pool=tiny_pool(512)) as served:
        outcomes = asyncio.run(drive(Target.of(served.url), arrivals(30, 60.0)))
        found = summarise(outcomes, Slo())
    assert (found.num_sent, found.num_complete, found.num_refused, found.num_failed) == (30, 30, 0, 0)
    assert found.num_output_tokens == 300
    assert found.itl_s["p50"] >= 0.004
    assert found.ttft_s["p50"] >= 0.005
    assert found.seconds >= max(a.at_s for a in arrivals(30, 60.0))
    assert found.goodput_per_s == pytest.approx(30 / found.seconds)


def test_slow_requests_do_not_count_as_good():
    with running(Script(step_s=0.02), pool=tiny_pool(512)) as served:
        outcomes = asyncio.run(drive(Target.of(served.url), arrivals(5, 0.0)))
    assert summarise(outcomes, Slo(tpot_s=0.001)).goodput_per_s == 0
    assert summarise(outcomes, Slo(tpot_s=10, ttft_s=10, e2e_s=10)).goodput_per_s > 0


def test_refusals_are_counted_and_none_is_lost():
    with running(Script(step_s=0.002), Settings(quiet=True, max_queue=4, max_num_seqs=4), max_num_seqs=4) as served:
        found = summarise(asyncio.run(drive(Target.of(served.url), arrivals(60, 0.0))), Slo())
        served.wait_idle()
    assert found.num_complete + found.num_refused == 60
    assert found.num_failed == 0
    assert found.num_complete >= 4
    assert found.num_refused > 0


def test_closed_loop_has_never_more_than_its_clients():
    with running(Script(step_s=0.002), pool=tiny_pool(512)) as served:
        outcomes = asyncio.run(drive(Target.of(served.url), arrivals(20, 0.0), concurrency=2))
    assert summarise(outcomes, Slo()).num_complete == 20
    for outcome in outcomes:
        overlapping = [o for o in outcomes if o.due_s < outcome.due_s < o.end_s]
        assert len(overlapping) <= 1


def test_a_server_that_tells_no_usage():
    """A token is taken to be an event; keep-alives and empty texts are none."""

    async def follow() -> Outcome:
        reader, outcome = asyncio.StreamReader(), Outcome(0.0)
        text = 'data: {"choices": [{"text": "%s"}]}\n\n'
        reader.feed_data(b"HTTP/1.1 200 OK\r\n\r\n: ping\n\n")
        reader.feed_data("".join(text % piece for piece in ("a", "", "b", "c")).encode() + b"data: [DONE]\n\n")
        reader.feed_eof()
        await read_events(reader, outcome, time.monotonic())
        return outcome

    outcome = asyncio.run(follow())
    assert (outcome.num_tokens, len(outcome.gaps_s), outcome.is_complete) == (3, 2, True)


def test_prompts_as_words():
    with running(Script(step_s=0.02), pool=tiny_pool(512)) as served:
        target = Target.of(served.url, as_text=True)
        message = target.message(arrivals(1, 0.0)[0]).split(b"\r\n\r\n")[1]
        outcomes = asyncio.run(drive(target, arrivals(2, 0.0)))
    assert len(json.loads(message)["prompt"].split()) == 20
    assert all(o.is_complete and len(o.gaps_s) >= 5 for o in outcomes)


def test_nobody_there():
    found = summarise(asyncio.run(drive(Target("127.0.0.1", 9), arrivals(2, 0.0))), Slo())
    assert (found.num_failed, found.num_complete) == (2, 0)
    assert found.first_failure.startswith("ConnectionRefusedError: ")
    with pytest.raises(ConfigError):
        Target.of("ftp://x")


def test_the_first_failure_is_told_and_that_nothing_was_measured(capsys):
    with running(pool=tiny_pool(512)) as served, pytest.raises(SystemExit) as end:
        main(["bench", "serve", "--url", served.url + "/", "--requests", "2", "--workload", "9/2", "--ban", "-1"])
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert "2 sent, 0 complete, 0 refused, 2 failed" in out
    assert "TTFT" not in out
    assert re.search(r"first failure: HTTP 400: .*token -1 is not in the vocabulary", err)


def test_an_answer_that_breaks_off_says_so():
    async def read() -> Outcome:
        reader, outcome = asyncio.StreamReader(), Outcome(0.0)
        reader.feed_data(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n')
        reader.feed_eof()
        await read_events(reader, outcome, 0.0)
        return outcome

    outcome = asyncio.run(read())
    assert (outcome.is_complete, outcome.failure) == (False, "the answer broke off")


def test_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.6805900,5000,9000\n"
    )
    first, second = read_trace(path, 10, 100, 1000, speed=2)
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(2.0))
    assert (len(first.request.prompt_token_ids), first.num_output) == (374, 44)
    assert len(second.request.prompt_token_ids) + second.num_output == 1000
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="TIMESTAMP"):
        read_trace(path, 10, 100, 1000)
