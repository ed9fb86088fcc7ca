"""The measurements themselves: counts that must come out, and a trace played by both clocks."""

from dataclasses import replace

import pytest

from kvledger.bench.common import Instant
from kvledger.bench.engine import bench_engine, ceiling
from kvledger.bench.lesson import Lesson
from kvledger.bench.phases import Point
from kvledger.bench.policies import (
    Setup,
    compare_chunking,
    compare_policies,
    measure_policies,
    skewed_trace,
    sweep_block_sizes,
)
from kvledger.bench.recompute import count_forwards, time_forwards
from kvledger.bench.sharing import count_beam_sharing, count_sample_sharing, measure_prefix_hit
from kvledger.build import build_engine
from kvledger.data.devices import local_device
from kvledger.errors import ConfigError
from kvledger.kernels.team import MEMORY, num_cpus
from kvledger.llm import engine_config
from kvledger.metrics import Metrics
from kvledger.plan.workload import find_workload
from kvledger.simulate.replay import poisson
from kvledger.spec.kv import FullKV
from kvledger.spec.model import Layer, ModelSpec
from kvledger.spec.step import Work
from tiny_model import HIDDEN, write_tiny_model

SPEC = ModelSpec("m", "m", 64, 300, 2048, (Layer(FullKV(2, 32, 32), 40_000),) * 2, 4, 20_000, 0)


class PerStep:
    """A step costs a second whatever it computes: memory-bound decoding at its purest."""

    def seconds(self, shape):
        return 1.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny.gguf"))


@pytest.fixture
def loaded(path):
    model = build_engine(path, engine_config(kv_memory="2MiB", max_num_seqs=16, prefix_caching=False))
    yield model
    model.engine.scheduler.check()
    model.engine.close()


def test_the_lessons_count_of_forwards():
    found = count_forwards(SPEC, 1000, 1000)
    assert (found.with_cache, found.without_cache) == (1_999, 1_499_500)
    small = count_forwards(SPEC, 7, 5)
    assert (small.with_cache, small.without_cache) == (11, 7 + 8 + 9 + 10 + 11)


def test_forwards_are_timed_on_kernels(loaded):
    metrics = Metrics()
    loaded.engine.listeners.append(metrics)
    found = time_forwards(loaded, 20, 10)
    loaded.engine.listeners.remove(metrics)
    assert list(metrics.done)[:2] == ["first", "cached"]  # what happens once is not timed
    assert (found.with_cache, found.without_cache) == (29, 20 * 10 + 45)
    assert found.with_cache_s > 0
    assert found.without_cache_s > 0


def test_paging_wastes_less_runs_more_and_is_faster():
    trace = skewed_trace(SPEC, find_workload("sharegpt"), count=60)
    pool = 4096 * SPEC.kv_layout().bytes_per_token
    static, orca, paged, chunked = compare_policies(Setup(SPEC, PerStep(), pool), trace)
    tokens = sum(arrival.num_output for arrival in trace)
    assert {run.result.num_output_tokens for run in (static, orca, paged, chunked)} == {tokens}
    assert static.times == 1.0
    assert orca.result.mean_batch <= 4096 // 2048 < paged.result.mean_batch
    assert orca.result.mean_waste > 0.5
    assert max(paged.result.mean_waste, chunked.result.mean_waste) < 0.04
    assert chunked.times > 3 > orca.times > 1.0


def test_larger_blocks_waste_more():
    trace = skewed_trace(SPEC, find_workload("sharegpt"), count=40)
    runs = sweep_block_sizes(Setup(SPEC, PerStep(), 1 << 22), trace, (8, 64, 256))
    wastes = [run.result.mean_waste for run in runs]
    assert wastes == sorted(wastes)
    assert wastes[0] < 0.02 < 0.1 < wastes[2]


class PerToken:
    """A step costs a millisecond per token."""

    def seconds(self, shape):
        return 1e-3 * sum(work.new_tokens for work in shape)


def test_chunks_bound_the_time_between_tokens():
    trace = skewed_trace(SPEC, find_workload("600/30"), count=20, rate_per_s=1.0)
    whole, small = compare_chunking(Setup(SPEC, PerToken(), 1 << 24), trace, (64,))
    assert whole.result.num_output_tokens == small.result.num_output_tokens == 600
    assert whole.result.gap_s(100) > 0.6
    assert small.result.gap_s(100) <= 0.064 + 1e-9
    assert small.result.ttft_s(0) >= 0.6 - 1e-9


def test_policies_on_kernels_give_everyone_their_tokens(path):
    trace = poisson(find_workload("20/8"), 6, 200.0, 12, max_prompt=64, max_output=12, vocab_size=250)
    runs = measure_policies(path, trace, 1 << 20, 128)
    assert [run.result.num_output_tokens for run in runs] == [48] * 4
    assert all(len(run.result.requests) == 6 for run in runs)
    assert all(times.ttft_s is not None for run in runs for times in run.result.requests)


def test_arrivals_follow_their_rate_and_the_clock_waits():
    arrivals = poisson(find_workload("20/4"), 400, 2.0, 8, max_prompt=64, max_output=8, vocab_size=250, seed=1)
    assert arrivals[-1].at_s == pytest.approx(200, rel=0.15)
    result = Setup(SPEC, Instant(), 1 << 22, 128).run(arrivals[:50])
    assert result.seconds == pytest.approx(arrivals[49].at_s)
    assert all(times.ttft_s == pytest.approx(0.0, abs=1e-9) for times in result.requests)


def test_sharing_is_counted_in_blocks(loaded):
    samples = count_sample_sharing(loaded, n=4, prompt=64, output=20)
    # four full blocks but for the last token, then a copy of that block and one or two more for each
    assert samples.copied_blocks == 4 * 6
    assert samples.shared_blocks == 3 + 4 * 3
    beams = count_beam_sharing(loaded, width=3, prompt=64, output=20)
    assert beams.shared_blocks < beams.copied_blocks


def test_a_prefix_hit_computes_only_the_rest(path):
    model = build_engine(path, engine_config(kv_memory="2MiB"))
    found = measure_prefix_hit(model, prompt=400, repeats=1)
    assert found.num_cached == 384
    assert found.cold_s > 0
    assert found.hit_s > 0
    model.engine.close()


def test_engine_bench_counts_its_own_steps(path):
    found = bench_engine(path, batch=3, prompt=20, output=9, repeats=1)
    assert found.num_decode_steps == 8
    assert found.decode_tokens_per_s == pytest.approx(3 * 8 / found.decode_s)
    assert found.kv_bytes == 3 * 28 * 512  # tokens × layers × heads × (K + V) × 32 dims × 2 bytes
    json = found.as_json()
    assert json["prefill_tokens_per_s"] == found.prefill_tokens_per_s
    assert 0 <= json["overhead"] < 1


def test_the_ceiling_counts_what_the_program_computes(loaded):
    """Of the last layer, for a prompt's rows but the last, the weights of the ops before `tail` and no others."""
    program, last = loaded.engine.executor.model, loaded.model.layers[-1]
    behind = program.body[program.tail :, MEMORY + 1].sum() // 2 + HIDDEN  # matrices in bfloat16, and a norm
    assert last.params - last.qkv_params == behind
    bound = ceiling(loaded, local_device())
    every_row, some = (replace(bound, skips_unread=s).flops((Work(0, 100),)) for s in (False, True))
    assert bound.flops((Work(0, 100),)) == some
    assert every_row - some == 2 * 99 * behind + 2 * (last.score_dims + last.mix_dims) * (99 * 100 // 2)
    assert bound.flops((Work(99, 1),)) == replace(bound, skips_unread=False).flops((Work(99, 1),))


def test_the_lesson_prints_what_it_has():
    trace = skewed_trace(SPEC, find_workload("alpaca"), count=10)
    setup = Setup(SPEC, PerStep(), 1 << 22)
    found = Lesson(count_forwards(SPEC, 10, 10), compare_policies(setup, trace), sweep_block_sizes(setup, trace, (16,)))
    assert [title.split(" ")[0] for title, _ in found.tables()] == ["Token", "opt-13b", "The"]
    json = found.as_json()
    assert json["forwards"]["with_cache"] == 19
    assert "requests" not in json["policies"][0]["result"]
    assert json["policies"][0]["result"]["tokens_per_s"] > 0
    for measured, head in ((True, "roofline"), (False, "roofline, peaks assumed")):
        timed = replace(found, timed_forwards=found.forwards, by_batch=(Point(1, 9, 4e-3, 5e-3, "memory", measured),))
        assert dict(timed.tables())["Decode by batch"][0][2] == head


def test_what_the_context_does_not_hold_is_refused_in_the_words_of_the_request(path, monkeypatch):
    monkeypatch.setattr("kvledger.bench.engine.build_engine", None)
    with pytest.raises(ConfigError, match=r"prompts of 500 tokens and 20 tokens written are .* context of 512"):
        bench_engine(path, prompt=500, output=20)


@pytest.mark.parametrize(("kv_dtype", "threads", "used"), [("int4", 1, 1), ("fp8", None, num_cpus())])
def test_a_report_says_the_type_as_it_is_asked_for_and_the_threads_that_computed(path, kv_dtype, threads, used):
    found = bench_engine(path, prompt=8, output=3, repeats=1, kv_dtype=kv_dtype, num_threads=threads).as_json()
    assert (found["kv_dtype"], found["num_threads"]) == (kv_dtype, used)
