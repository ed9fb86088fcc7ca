"""The six ledgers: every formula shown computes the value shown, for every kind of model; figures behave as claimed."""

import math
import random

import pytest
from hypothesis import given as property_test
from hypothesis import strategies as st

from kvledger.data.catalogue import model, rows
from kvledger.errors import ConfigError, DoesNotFit, UnknownName
from kvledger.plan import allocation, compression, explain, memory, workload
from kvledger.plan.concurrency import budget_figure, requests_figure
from kvledger.plan.explain import Figure, Input, derive, evaluate, given
from kvledger.plan.ledgers import LEDGERS, Ask, ledger
from kvledger.plan.planner import make_query
from kvledger.plan.recompute import recompute
from kvledger.plan.weights import weights_figure
from kvledger.spec.kv import (
    KV_TYPES,
    ChunkedKV,
    FullKV,
    KVLayout,
    KVStorage,
    LatentKV,
    StateKV,
    WindowKV,
)

KINDS = ("llama-2-70b", "mixtral-8x7b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b", "smollm2", "opt-13b")
SPECS = (
    FullKV(8, 128, 128), FullKV(4, 192, 128), WindowKV(8, 128, 128, 1024), ChunkedKV(8, 128, 128, 2048),
    LatentKV(512, 64), LatentKV(512, 64, 132), LatentKV(512, 64, 64, ratio=4),
    LatentKV(512, 64, 0, ratio=128), LatentKV(512, 64, 0, window=128), StateKV(((1000, 4, 1000), (30, 2, 1))),
)  # fmt: skip


def check(figure: Figure) -> None:
    """The formula, computed, is the value."""
    computed = evaluate(figure.formula, {i.name: i.value for i in figure.inputs})
    assert computed == pytest.approx(figure.value, rel=1e-9), figure.explain()


@pytest.mark.parametrize("name", LEDGERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_formula_gives_its_value(name, kind):
    device = "b300" if kind == "deepseek-v3" else "h100-sxm"
    query = make_query(kind, device, tp=1 if kind == "smollm2" else 8, context=2048)
    made = ledger(name, Ask(query))
    assert len(list(made.all_figures())) >= 8
    for figure in made.all_figures():
        check(figure)
        assert figure.title in figure.explain()
        assert figure.text


@pytest.mark.parametrize("dtype", [*KV_TYPES, "int4", "int2", "q8_0/q4_0"])
def test_kv_formulas_for_every_type_and_kind(dtype):
    storage = KVStorage.of(dtype)
    for first in SPECS:
        for second in SPECS:
            if dtype == "fp8_ds_mla" and not isinstance(first, LatentKV | StateKV):
                continue
            layout = KVLayout.of([first, second, first, second, second], storage, 16)
            check(memory.token_figure(layout))
            for context in (1, 127, 1024, 5000):
                check(memory.request_figure(layout, context))


def test_formula_of_the_lesson_in_its_usual_order():
    figure = memory.token_figure(model("llama-2-70b").kv_layout())
    assert figure.formula == "2 × L × H_kv × d_h × b"
    assert figure.substitution == "2 × 80 × 8 × 128 × 2"


def test_catalogue_models_have_weights_and_token_figures():
    for row in rows():
        spec = model(row.id)
        check(weights_figure(spec, spec.dtype))
        if any(x.cache is not None for x in spec.layers):
            check(memory.token_figure(spec.kv_layout()))


# ---------------------------------------------------------------------------------------------- figures


def test_assumptions_travel_through_figures():
    price = Input("price", 3.0, "$", "a guess", "assumed")
    one = derive("one", "$", "price × 2", price)
    two = derive("two", "$", "one + 1", one)
    assert one.is_assumed
    assert two.is_assumed
    assert two.text.endswith("~")
    assert two.rests_on == ("one",)
    assert not derive("plain", "", "a + 1", Input("a", 1)).is_assumed
    assert "(assumed)" in one.explain()


@pytest.mark.parametrize(
    ("formula", "value"),
    [("2 × 3 + 4 ÷ 8", 6.5), ("7 // 2", 3), ("−(2 − 5)", 3), ("floor(7 ÷ 2)", 3), ("2 ^ 0.5", 2**0.5), ("max(1, 2)", 2),
     ("10000000000000000000 × 3 + 1", 30000000000000000001)],
)  # fmt: skip
def test_arithmetic_in_text(formula, value):
    assert evaluate(formula, {}) == value


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "a.b", "x", "9 ^ 9 ^ 9 ^ 9", "[1]", "1 ÷ 0", "(", "'a' × 3", "f(1)"]
)
def test_text_that_is_no_arithmetic(formula):
    with pytest.raises(ConfigError):
        evaluate(formula, {})


@property_test(st.floats(1e-12, 1e15), st.sampled_from(["B", "s", "$", "FLOP/s", "%", "×", "tokens", ""]))
def test_dressing_never_fails(value, unit):
    assert explain.dress(value, unit)
    check(given("x", value, unit))


def test_one_is_singular():
    assert explain.dress(1, "requests") == "1 request"
    assert explain.dress(2, "requests") == "2 requests"
    assert explain.dress(math.inf, "s") == "∞"


# ---------------------------------------------------------------------------------------------- recompute


@property_test(st.integers(1, 300), st.integers(1, 300))
def test_forwards_counted_one_by_one(prompt, output):
    made = recompute(prompt, output)
    without = sum(prompt + t - 1 for t in range(1, output + 1))
    with_cache = prompt + sum(1 for _ in range(2, output + 1))
    assert made["forwards_without_cache"].value == without
    assert made["forwards_with_cache"].value == with_cache
    assert recompute(prompt, output, as_lesson=True)["forwards_with_cache"].value == with_cache + 1


def test_huge_counts_stay_exact():
    n = 10**11
    made = recompute(n, n)["forwards_without_cache"]
    assert made.value == n * n + n * (n - 1) // 2
    assert made.text == f"{made.value:,}"


def test_recompute_refuses_nothing_to_do():
    with pytest.raises(ConfigError):
        recompute(0, 10)


# ---------------------------------------------------------------------------------------------- concurrency


def test_lesson_and_exact_counts_differ_by_the_unit():
    spec = model("llama-2-70b")
    parts = [Input(n, v * 10**9, "B") for n, v in (("M", 80), ("W", 70), ("O", 2))]
    budget = budget_figure(parts[0], parts[1], parts[2:])
    layout = spec.kv_layout(tp=2)
    contexts = (2048, 4096, 8192, 32768)
    assert [requests_figure(layout, budget, s).value for s in contexts] == [23, 11, 5, 1]
    assert [requests_figure(layout, budget, s, as_lesson=True).value for s in contexts] == [25, 12, 6, 1]


def test_no_room_says_how_much_is_missing():
    with pytest.raises(DoesNotFit) as error:
        budget_figure(Input("M", 80 * 10**9), Input("W", 140 * 10**9), [])
    assert error.value.missing_bytes == 60 * 10**9


# ---------------------------------------------------------------------------------------------- compression


def test_alternatives_are_relative_to_the_model():
    made = compression.compression(model("llama-2-70b"))
    assert made["share_heads_64"].value == 8
    assert made["share_heads_8"].value == 1
    assert made["share_type_fp8"].value == 0.5
    assert made["share_type_q8_0"].value == pytest.approx(34 / 64)
    assert made["share_type_int8"].value == pytest.approx((128 + 4) / 256)


def test_every_finding_has_a_source():
    assert {e.lever for e in compression.evidence()} >= {"heads", "mla", "fp8", "int4", "int8", "window"}
    assert all(e.source and e.finding for e in compression.evidence())


# ---------------------------------------------------------------------------------------------- allocation


AZURE = workload.WORKLOADS["azure-conv-2023"]


def test_presets_keep_the_published_moments():
    assert AZURE.prompt.mean == pytest.approx(1154.7, rel=0.02)
    assert AZURE.output.mean == pytest.approx(211.1, rel=0.02)
    assert AZURE.prompt.quantile(0.5) == pytest.approx(1020)
    assert AZURE.prompt.quantile(0.9) == pytest.approx(2735)
    assert AZURE.output.quantile(0.9) == pytest.approx(424)
    assert workload.WORKLOADS["sharegpt"].output.mean == pytest.approx(337.99, rel=0.01)
    assert workload.WORKLOADS["arxiv-summarization"].prompt.quantile(0.9) == pytest.approx(12985)


def test_waste_grows_with_the_block_and_paging_beats_reserving():
    made = allocation.allocation(AZURE, 8192)
    wasted = [made[f"wasted_block{b}"].value for b in allocation.BLOCK_SIZES]
    assert wasted == sorted(wasted)
    assert wasted[0] == 0
    assert made["wasted_block16"].value < 4 < made["wasted_max"].value
    assert made["wasted_block16"].value < made["wasted_pow2"].value < made["wasted_max"].value
    assert made["gain_requests_block16"].value > 5


def test_mean_waste_of_a_block_is_half_a_block():
    made = allocation.allocation(AZURE, 8192)
    extra = made["held_block16"].value - made["used"].value
    assert extra == pytest.approx(allocation.last_block(16)[1].value, rel=0.1)


@property_test(st.integers(1, 100), st.integers(1, 60), st.integers(1, 6), st.sampled_from([4, 16]))
def test_sharing_never_needs_more_than_copying(prompt, output, width, block):
    copied = width * -(-(prompt + output) // block)
    beams = allocation.beam_blocks(prompt, output, width, block)
    assert -(-(prompt + output) // block) <= beams <= copied
    assert allocation.beam_blocks(prompt, output, width, block) == beams  # deterministic


def test_samples_save_what_the_paper_measured_on_sharegpt():
    made = allocation.sharing(161, 338, (2, 4, 6))
    saved = [made[f"samples_saved_{w}"].value for w in (2, 4, 6)]
    assert 15 < saved[0] < saved[1] < saved[2] < 31  # 16.2–30.5 % published, sampling included


# ---------------------------------------------------------------------------------------------- capacity


def test_requests_at_a_percentile_against_a_count_of_many_draws():
    blocks = 20_000
    count = workload.requests_at_percentile(blocks, lambda n: -(-n // 16), AZURE, 95)
    held = AZURE.held_tokens(200_000)
    random.Random(1).shuffle(held)
    groups = [held[i : i + count] for i in range(0, len(held) - count, count)]
    fits = sum(sum(-(-n // 16) for n in g) <= blocks for g in groups) / len(groups)
    assert 0.93 <= fits <= 0.97


def test_capacity_falls_with_the_percentile_and_rises_with_sharing():
    def blocks_of(tokens):
        return -(-tokens // 16)

    counts = [workload.requests_at_percentile(9000, blocks_of, AZURE, p) for p in (50, 90, 99)]
    assert counts == sorted(counts, reverse=True)
    shared = workload.find_workload("azure-conv-2023", 512, 0.9)
    assert workload.requests_at_percentile(9000, blocks_of, shared, 90) > counts[1]
    whole = workload.requests_at_percentile(9000, blocks_of, AZURE, 90, whole=True)
    assert whole < counts[1]


def test_fixed_lengths_have_no_spread():
    made = workload.find_workload("1k/1")
    assert workload.requests_at_percentile(640, lambda n: -(-n // 16), made, 99) == 9  # 1,025 tokens: 65 blocks


@pytest.mark.parametrize("text", ["nosuch", "1k/", "0/5", "a/b"])
def test_unknown_workloads(text):
    with pytest.raises((UnknownName, ConfigError)):
        workload.find_workload(text)
