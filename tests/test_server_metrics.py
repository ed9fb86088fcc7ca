"""`/metrics`: the families that dashboards for vLLM ask for, honest counts, and a document that lists them all."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Running, at_once, running, tiny_pool
from kvledger.plan.roofline import Roofline
from kvledger.server.loading import cost_of_steps
from kvledger.server.prometheus import COUNTERS, GAUGES, HISTOGRAMS, Histogram, token_edges
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import FullKV
from kvledger.spec.model import Layer, ModelSpec
from kvledger.spec.step import Work

DOCS = Path(__file__).parent.parent / "docs"
# the 36 families of vllm-openai-cpu 0.26, as inference-perf lists them for its own tests
GOLDEN = re.findall(
    r"\w+",
    """
    cache_config_info e2e_request_latency_seconds engine_sleep_state estimated_flops_per_gpu_total
    estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total external_prefix_cache_hits_total
    external_prefix_cache_queries_total generation_tokens_total inter_token_latency_seconds iteration_tokens_total
    kv_cache_usage_perc mm_cache_hits_total mm_cache_queries_total num_preemptions_total num_requests_running
    num_requests_waiting num_requests_waiting_by_reason prefix_cache_hits_total prefix_cache_queries_total
    prompt_tokens_by_source_total prompt_tokens_cached_total prompt_tokens_total request_decode_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_queue_time_seconds request_generation_tokens
    request_max_num_generation_tokens request_params_max_tokens request_params_n request_prefill_kv_computed_tokens
    request_prompt_tokens request_success_total request_time_per_output_token_seconds time_to_first_token_seconds
    """,
)


def families(served: Running) -> dict:
    return {f.name: f for f in text_string_to_metric_families(served.http.get("/metrics").text)}


def value(served: Running, name: str, **labels: str) -> float:
    for family in families(served).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")


def test_golden_families(served: Running):
    text = served.http.get("/metrics").text
    declared = set(re.findall(r"^# TYPE vllm:(\S+) \S+$", text, re.M))
    assert len(GOLDEN) == 36
    assert set(GOLDEN) <= declared


def test_labels_are_vllms(served: Running):
    for family in families(served).values():
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            assert family.name == "vllm:cache_config_info" or sample.labels["model_name"] == "script"


def test_one_request_is_counted_once_everywhere():
    with running() as served:
        served.post("/v1/completions", prompt="the prompt say:abc", max_tokens=8)
        served.wait_idle()
        assert value(served, "vllm:prompt_tokens_total") == len("the prompt say:abc")
        assert value(served, "vllm:generation_tokens_total") == 4
        assert value(served, "vllm:request_success_total", finished_reason="stop") == 1
        assert value(served, "vllm:time_to_first_token_seconds_count") == 1
        assert value(served, "vllm:inter_token_latency_seconds_count") == 3
        assert value(served, "vllm:e2e_request_latency_seconds_count") == 1
        assert value(served, "vllm:request_generation_tokens_sum") == 4
        assert value(served, "vllm:request_params_max_tokens_sum") == 8
        assert value(served, "vllm:iteration_tokens_total_sum") == len("the prompt say:abc") + 3
        assert value(served, "kvledger:http_requests_total", route="/v1/completions", status="200") == 1


def test_hits_do_not_include_recompute():
    """Preempted sequences find their own blocks again; that is no hit."""
    bodies = [{"prompt": f"{c} count:150", "max_tokens": 151} for c in "abcdef"]
    with running(pool=tiny_pool(18), max_num_seqs=4, wait=False) as served:
        at_once(served, bodies)
        served.wait_idle()
        assert value(served, "vllm:num_preemptions_total") > 0
        assert value(served, "vllm:prefix_cache_hits_total") == 0
        assert value(served, "vllm:prefix_cache_queries_total") == sum(len(b["prompt"]) for b in bodies)


def test_stop_string_counts_as_stop_not_abort():
    with running() as served:
        served.chat("say:one END two", stop="END")
        served.wait_idle()
        assert value(served, "vllm:request_success_total", finished_reason="stop") == 1
        assert value(served, "vllm:request_success_total", finished_reason="abort") == 0


def test_gauges_of_the_pool_agree_with_it():
    with running() as served:
        served.post("/v1/completions", prompt="x" * 40 + "say:y")
        served.wait_idle()
        states = {s: value(served, "kvledger:kv_blocks", state=s) for s in ("used", "cached", "free")}
        assert sum(states.values()) == served.scheduler.plan.num_blocks
        assert states["used"] == 0
        assert states["cached"] == 2
        assert value(served, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("num_scrapes", [2])
def test_counters_never_fall(served: Running, num_scrapes: int):
    def counters() -> dict:
        return {
            (s.name, *sorted(s.labels.items())): s.value
            for f in families(served).values()
            if f.type in ("counter", "histogram")
            for s in f.samples
        }

    before = counters()
    for _ in range(num_scrapes):
        served.chat("say:more")
        after = counters()
        assert all(after[key] >= before[key] for key in before)
        before = after


def test_histogram():
    found = Histogram((1.0, 2.0))
    for x in (0.5, 1.0, 1.5, 9.0):
        found.observe(x)
    assert found.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert found.sum == 12.0


def test_fine_edges_stand_below_vllms():
    edges = {name: e for name, _, e in HISTOGRAMS}["vllm:inter_token_latency_seconds"]
    vllm = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    assert list(edges)[-len(vllm) :] == vllm
    assert min(edges) <= 0.0005
    assert token_edges(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def test_estimates_are_the_planners_own():
    """Bytes read and written are together the roofline's traffic; FLOPs are its FLOPs."""
    layers = (Layer(FullKV(2, 8, 8), 1000),)
    model = ModelSpec("m", "m", 16, 100, 1000, layers, 2, embedding_params=1600, head_params=1600)
    layout, shape = model.kv_layout(), (Work(100, 1), Work(0, 64), Work(32, 16, 0))
    flops, read, written = cost_of_steps(model, layout)(shape)
    cost = Roofline(model, DeviceSpec("d", "gpu", "v", 10**9, 10**9, 1e9, {"bf16": 1e12}), layout).cost(shape)
    assert (flops, read + written) == (cost.flops, cost.bytes)
    assert written == 81 * layout.bytes_per_token
    with running() as served:
        served.post("/v1/completions", prompt="the prompt say:abc", max_tokens=8)
        served.wait_idle()
        assert value(served, "vllm:estimated_flops_per_gpu_total") == len("the prompt say:abc") + 3
        assert value(served, "vllm:estimated_write_bytes_per_gpu_total") == 3 * 4


def test_documents_name_every_metric():
    text = (DOCS / "serving.md").read_text()
    missing = [name for name, *_ in (*COUNTERS, *HISTOGRAMS, *GAUGES) if f"`{name}`" not in text]
    assert not missing


def test_dashboard_uses_only_metrics_that_exist():
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = set(re.findall(r"(?:vllm|kvledger):\w+", json.dumps(board["panels"])))
    known = {"vllm:cache_config_info"} | {name for name, *_ in GAUGES}
    known |= {f"{name}_total" for name, *_ in COUNTERS}
    known |= {f"{name}_{part}" for name, *_ in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert asked <= known, asked - known
    assert len(asked) > 15
