"""Plans: figures that explain themselves, the pool that is really built, levers, spreads, and bad questions."""

import time
from dataclasses import replace

import pytest

import kvledger
from kvledger.data.catalogue import model
from kvledger.data.devices import find_device
from kvledger.data.host import host_memory
from kvledger.errors import ConfigError, DoesNotFit, KvledgerError, UnknownName
from kvledger.plan.explain import evaluate
from kvledger.plan.ledgers import accounts
from kvledger.plan.levers import changes
from kvledger.plan.outcome import engine_config, longest
from kvledger.plan.planner import make_query, plan
from kvledger.plan.pool import auto_budget, local_pool
from kvledger.plan.timing import compute_dtype
from kvledger.plan.workload import find_workload

KEYS = {
    "model", "device", "tp", "kv_bytes_per_token", "kv_bytes_per_token_per_device", "weights_bytes_per_device",
    "overhead_bytes", "kv_budget_bytes", "num_blocks", "block_size", "kv_tokens", "max_concurrency",
    "requests_at_context", "step_time_s", "bound", "tpot_s", "ttft_s", "tokens_per_s", "cost_per_million_tokens",
    "levers", "sources",
}  # fmt: skip
CASES = [
    ("llama-3.1-70b", {"device": "h100-sxm", "tp": 4}),
    ("llama-3.1-70b", {"device": "h100-sxm", "tp": 2, "pp": 2, "dp": 2, "kv_dtype": "fp8"}),
    ("deepseek-v3", {"device": "h200", "tp": 8}),
    ("gemma-3-27b", {"device": "a100-80gb", "context": 32768}),
    ("gpt-oss-120b", {"device": "h100-sxm", "prefix": 1024}),
    ("mixtral-8x7b", {"device": "mi300x", "weights": "fp8"}),
    ("smollm2", {"device": "local"}),
    ("qwen3-8b", {"device": "l4", "weights": "awq", "engine": "sglang"}),
    ("qwen3-8b", {"device": "rtx-4090", "weights": "q4_k_m", "engine": "llama.cpp"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{o['device']}" for n, o in CASES])
def test_every_figure_accounts_for_itself(name, options):
    made = plan(name, workload=find_workload("azure-conv-2023"), **options)
    for figure in accounts(made):
        computed = evaluate(figure.formula, {i.name: i.value for i in figure.inputs})
        assert computed == pytest.approx(figure.value, rel=1e-9), figure.explain()
    found = made.to_json()
    assert found.keys() >= KEYS
    for key in ("num_blocks", "kv_tokens", "requests_at_context", "tpot_s", "ttft_s", "tokens_per_s"):
        assert made[key].value == pytest.approx(found[key])
    assert found["requests_at_context"] == made.query.dp * made.outcome.requests
    assert found["sources"]


def test_json_keys_are_documented():
    from pathlib import Path

    text = (Path(__file__).parent.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    assert [key for key in plan("smollm2").to_json() if f"`{key}`" not in text] == []


def test_from_kvledger_import_plan():
    from kvledger import plan as called

    assert called("smollm2").to_json()["num_blocks"] == kvledger.plan("smollm2").outcome.memory.num_blocks


# ---------------------------------------------------------------------------------------------- this machine


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("block_size", [None, 32])
def test_local_plan_is_the_pool_that_is_built(kv_dtype, block_size):
    made = plan("smollm2", kv_dtype=kv_dtype, block_size=block_size, kv_memory_bytes=512 << 20)
    built = local_pool(made.query.model, engine_config(made.query), *host_memory())
    found = made.to_json()
    assert (found["num_blocks"], found["block_size"]) == (built.num_blocks, built.layout.block_size)
    assert found["kv_pool_bytes"] == built.pool_bytes == found["num_blocks"] * found["block_bytes"]
    assert found["kv_tokens"] == built.kv_tokens


def test_budget_leaves_the_machine_half_of_what_is_free():
    gib = 1 << 30
    assert auto_budget(64 * gib, 60 * gib, gib)[0] == 16 * gib
    tight, reason = auto_budget(64 * gib, 4 * gib, gib)
    assert tight < 1.5 * gib
    assert "half" in reason


def test_local_is_one_machine():
    with pytest.raises(ConfigError, match="one machine"):
        plan("qwen3-0.6b", tp=2)


# ---------------------------------------------------------------------------------------------- spreads and levers


def test_more_devices_hold_more_and_cost_more():
    one, two = (plan("llama-3.1-8b", "h100-sxm", tp=tp) for tp in (1, 2))
    assert two.outcome.requests > 2 * one.outcome.requests  # weights are split, too
    assert two["kv_bytes_per_token_per_device"].value * 2 == one["kv_bytes_per_token_per_device"].value
    assert two.outcome.price_per_hour == 2 * one.outcome.price_per_hour


def test_replicas_multiply_requests_and_tokens_not_speed():
    one, four = (plan("llama-3.1-8b", "h100-sxm", dp=dp) for dp in (1, 4))
    assert four.outcome.total_requests == 4 * one.outcome.total_requests
    assert four.outcome.tokens_per_s == pytest.approx(4 * one.outcome.tokens_per_s)
    assert four.outcome.speed.tpot_s == one.outcome.speed.tpot_s
    assert four.outcome.cost_per_million == pytest.approx(one.outcome.cost_per_million)


def test_latents_are_replicated_under_tp_and_split_by_stages():
    eight = plan("deepseek-v3", "h200", tp=8)
    whole = eight.to_json()["kv_bytes_per_token"]
    assert eight["kv_bytes_per_token_per_device"].value == whole == 61 * 576 * 2
    staged = plan("deepseek-v3", "h200", tp=8, pp=2)
    assert staged["kv_bytes_per_token_per_device"].value == 31 * 576 * 2  # the fuller stage


def test_dp_attention_splits_requests_and_keeps_attention_whole():
    plain, split = (plan("deepseek-v3", "h200", tp=8, dp_attention=on) for on in (False, True))
    more = split.outcome.memory.weights_bytes - plain.outcome.memory.weights_bytes
    attention = sum(
        w.params for x in model("deepseek-v3").layers for w in x.weights if w.part == "attention" and w.split
    )
    assert more == pytest.approx(attention * 7 / 8, rel=0.01)  # fp8: a byte per weight, seven eighths of them again
    assert split.outcome.total_requests == split["requests_per_pool"].value * 8
    assert split.outcome.total_requests > 5 * plain.outcome.total_requests
    step = split.outcome.timing.decode(80, 8192)
    assert step.kv_bytes == pytest.approx(plain.outcome.timing.decode(80, 8192).kv_bytes / 8)
    with pytest.raises(ConfigError, match="KV heads"):
        plan("qwen3-8b", "h200", tp=8, dp_attention=True)


@pytest.mark.parametrize(
    ("device", "scheme", "kind"),
    [
        ("h100-sxm", "bf16", "bf16"), ("h100-sxm", "fp8_block", "fp8"), ("a100", "fp8", "bf16"),
        ("v100", "bf16", "fp16"),
        ("h100-sxm", "awq", "bf16"), ("h100-sxm", "mxfp4", "bf16"), ("b200", "mxfp4", "fp8"), ("b200", "nvfp4", "fp4"),
        ("epyc-9755", "q4_k_m", "int8"), ("m2-ultra", "q4_k_m", "bf16"), ("h100-sxm", "int8", "int8"),
    ],
)  # fmt: skip
def test_number_type_of_arithmetic(device, scheme, kind):
    assert compute_dtype(find_device(device), scheme) == kind


def test_heads_are_replicated_once_tp_passes_them():
    eight, sixteen = (plan("llama-3.1-70b", "h100-sxm", tp=tp) for tp in (8, 16))
    assert eight["kv_bytes_per_token_per_device"].value == sixteen["kv_bytes_per_token_per_device"].value


def test_a_shared_prefix_is_kept_once_and_computed_once():
    alone, shared = (plan("llama-3.1-8b", "l40s", prefix=p) for p in (0, 4096))
    assert shared.outcome.requests > 1.5 * alone.outcome.requests
    assert shared.outcome.speed.ttft_s < alone.outcome.speed.ttft_s
    pool = shared.outcome.memory.pools[0]
    held = 256 + shared.outcome.requests * (512 - 256)  # blocks: the prefix once, the rest each
    assert held <= pool.num_blocks < held + 256


def test_longer_contexts_hold_fewer_and_read_more():
    plans = [plan("llama-3.1-8b", "h100-sxm", context=c, batch=4) for c in (2048, 8192, 32768)]
    assert [p.outcome.requests for p in plans] == sorted((p.outcome.requests for p in plans), reverse=True)
    assert [p.outcome.speed.tpot_s for p in plans] == sorted(p.outcome.speed.tpot_s for p in plans)


def test_levers_are_the_plans_they_name():
    base = plan("llama-3.1-70b", "h100-sxm", tp=4)
    named = {x.change.flags: x for x in base.levers}
    assert (
        named["--kv-dtype fp8"].outcome.requests
        == plan("llama-3.1-70b", "h100-sxm", tp=4, kv_dtype="fp8").outcome.requests
    )
    assert named["--tp 8"].per_dollar_gain == pytest.approx(named["--tp 8"].requests_gain / 2)
    kinds = [x.change.kind for x in base.levers]
    assert kinds.index("serves less") > max(i for i, k in enumerate(kinds) if k in ("quality", "money", "free"))
    assert kinds[-1] == "another model"
    assert all(x.requests_gain >= 1.02 or x.tokens_gain >= 1.02 for x in base.levers)


def test_speed_is_the_roofline_by_hand():
    """Llama-3.1-8B on one H100, one request of 1,024 tokens: weights and KV over the bandwidth."""
    made = plan("llama-3.1-8b", "h100-sxm", context=1024, batch=1)
    spec, device = model("llama-3.1-8b"), find_device("h100-sxm")
    weights = 2 * (spec.num_params - spec.embedding_params)
    kv = 1025 * 2 * 32 * 8 * 128 * 2  # 1,024 read, one written
    assert made.outcome.speed.tpot_s == pytest.approx((weights + kv) / device.bandwidth_bytes_per_s, rel=1e-6)
    assert made.outcome.speed.step.bound == "memory"


def test_touched_experts_not_all_of_them():
    one, many = (plan("mixtral-8x7b", "h200", context=1024, batch=b).outcome.speed.step for b in (1, 64))
    assert one.weight_bytes < 0.4 * many.weight_bytes
    assert many.weight_bytes == pytest.approx(2 * model("mixtral-8x7b").num_params, rel=0.01)


def test_quantised_experts_are_priced_as_stored():
    """gpt-oss: experts in mxfp4, everything else in bf16."""
    step = plan("gpt-oss-120b", "h100-sxm", context=1024, batch=1).outcome.speed.step
    spec = model("gpt-oss-120b")
    dense = 2 * (spec.active_params - 36 * 4 * spec.layers[0].expert_params - spec.embedding_params)
    experts = 36 * 4 * spec.layers[0].expert_params * 4.25 / 8
    assert step.weight_bytes == pytest.approx(dense + experts, rel=0.03)


# ---------------------------------------------------------------------------------------------- bad questions


def test_does_not_fit_names_what_is_missing_and_what_would():
    with pytest.raises(DoesNotFit) as error:
        plan("llama-3.1-70b", "h100-sxm")
    assert error.value.missing_bytes > 50 << 30
    assert "nearest that fits: --" in str(error.value)
    flags = str(error.value).rpartition("nearest that fits: ")[2].split()
    options = {flags[i].strip("-").replace("-", "_"): flags[i + 1] for i in range(0, len(flags), 2)}
    options = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    assert plan("llama-3.1-70b", "h100-sxm", **options).outcome.requests >= 1


def test_one_request_that_is_too_long_says_the_longest():
    with pytest.raises(DoesNotFit, match="the longest that fits is") as error:
        plan("llama-3.1-8b", "l4", context=131072)
    told = int(str(error.value).split("the longest that fits is ")[1].split(" ")[0].replace(",", ""))
    fits = plan("llama-3.1-8b", "l4", context=told // 2)
    assert told // 2 <= longest(fits.outcome.memory.pools)


def test_given_kv_memory_is_held_against_the_device():
    made = plan("llama-3.1-8b", "h100-sxm", kv_memory_bytes=20 << 30)
    assert made.outcome.memory.pool_bytes == 20 << 30
    assert made.outcome.memory.weights_bytes == 2 * model("llama-3.1-8b").num_params
    with pytest.raises(DoesNotFit, match=r"nearest that fits: \d+MiB of KV memory") as error:
        plan("llama-3.1-8b", "h100-sxm", kv_memory_bytes=90 << 30)
    told = int(str(error.value).rpartition("nearest that fits: ")[2].partition("MiB")[0]) << 20
    assert plan("llama-3.1-8b", "h100-sxm", kv_memory_bytes=told).outcome.requests > 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "nearest that does: 2 or 4"),
        ({"tp": 0}, "at least 1"),
        ({"pp": 1000}, "layers"),
        ({"dp": 10**9}, "devices"),
        ({"context": 0}, "at least 1"),
        ({"context": 1}, "no room"),
        ({"context": 10**18}, "cannot be meant"),
        ({"output": 8192}, "leaves no prompt"),
        ({"prefix": 10**6}, "longer than the prompt"),
        ({"prefix": -1}, "at least 0"),
        ({"batch": -5}, "at least 1"),
        ({"batch": 10**40}, "cannot be meant"),
        ({"kv_memory_bytes": 0}, "positive"),
        ({"hit_rate": 1.5}, "between 0 and 1"),
        ({"efficiency": 0.0}, "efficiency"),
        ({"memory_fraction": 1.5}, "fraction"),
        ({"price_per_hour": -1.0}, "price"),
        ({"engine": "kvledger"}, "CPUs"),
    ],
)  # fmt: skip
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        plan("llama-3.1-8b", "h100-sxm", **options)


@pytest.mark.parametrize(
    ("arguments", "options", "nearest"),
    [
        (("llama-3.1-8", "h100-sxm"), {}, "llama-3.1-8b"),
        (("llama-3.1-8b", "h100-smx"), {}, "h100-sxm"),
        (("llama-3.1-8b", "h100-sxm"), {"kv_dtype": "fp9"}, "fp8"),
        (("llama-3.1-8b", "h100-sxm"), {"weights": "fp9"}, "fp8"),
        (("llama-3.1-8b", "h100-sxm"), {"engine": "vlm"}, "vllm"),
        (("llama-3.1-8b", "h100-sxm"), {"contxt": 3}, "context"),
    ],
)  # fmt: skip
def test_unknown_names_come_with_the_nearest(arguments, options, nearest):
    with pytest.raises(UnknownName) as error:
        plan(*arguments, **options)
    assert nearest in error.value.nearest


def test_beyond_the_context():
    with pytest.raises(ConfigError, match="no rope scaling"):
        plan("llama-2-70b", "h100-sxm", tp=4, context=8192)
    allowed = plan("llama-2-70b", "h100-sxm", tp=4, context=8192, allow_long_context=True)
    assert "beyond" in allowed.warnings[0]
    stretched = plan("llama-3.1-8b", "h100-sxm", context=32768)  # trained with 8,192, scaled to 131,072
    assert "rope scaling" in stretched.warnings[0]
    assert plan("llama-3.1-8b", "h100-sxm", context=8192).warnings == ()


def test_no_change_of_a_query_raises_anything_but_our_errors():
    for name, options in CASES:
        for change in changes(make_query(name, **options)):
            try:
                replace(change.query)
            except KvledgerError:
                continue


def test_one_plan_takes_less_than_50_ms():
    plan("llama-3.1-70b", "h100-sxm", tp=2)  # imports, catalogue
    start = time.process_time()
    for _ in range(5):
        plan("llama-3.1-70b", "h100-sxm", tp=2)
    assert (time.process_time() - start) / 5 < 0.05


def test_planning_imports_nothing_heavy():
    import subprocess
    import sys

    code = (
        "import sys; from kvledger import plan; plan('llama-3.1-70b', 'h100-sxm', tp=4).to_json();"
        "print([m for m in ('numpy', 'numba', 'plotly', 'rich', 'fastapi') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
