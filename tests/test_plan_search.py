"""The search: what it finds meets the target and is cheapest, the front dominates, and it is quick."""

import time
from itertools import pairwise

import pytest

from kvledger.data.catalogue import model
from kvledger.errors import ConfigError, UnknownName
from kvledger.plan.planner import plan
from kvledger.plan.search import Target, find

TARGET = Target.parse("concurrency=64 context=8192 tpot=50ms ttft=1s")
DEVICES = ("h100-sxm", "l40s", "mi300x", "rtx-4090")


@pytest.fixture(scope="module")
def found():
    return find(model("llama-3.1-70b"), TARGET, DEVICES)


def test_target_in_words():
    assert Target(64, 8192, None, 0, 0.05, 1.0) == TARGET
    assert Target.parse("concurrency=1k, context=32K prefix=0") == Target(1024, 32768, None, 0)


@pytest.mark.parametrize(
    "text", ["tpot", "tpot=fast", "speed=3", "context=-1", "concurrency=0", "tpot=0ms", "context=8kb"]
)
def test_nonsense_targets(text):
    with pytest.raises(ConfigError):
        Target.parse(text)


def test_the_best_meets_the_target_as_a_plan_of_its_own(found):
    best = found.meeting[0].query
    made = plan(
        model("llama-3.1-70b"), best.device, tp=best.tp, pp=best.pp, dp=best.dp, weights=best.weights,
        kv_dtype=best.kv_dtype, context=8192, batch=-(-64 // best.dp),
    )  # fmt: skip
    assert made.outcome.total_requests >= 64
    assert made.outcome.speed.tpot_sustained_s <= 0.05
    assert made.outcome.speed.ttft_s <= 1.0
    assert made.outcome.price_per_hour == found.meeting[0].price_per_hour


def test_nothing_cheaper_meets_it(found):
    prices = [c.price_per_hour for c in found.meeting]
    assert prices == sorted(prices)
    assert all(not c.misses for c in found.meeting)
    assert all(c.misses for c in found.near)


def test_front_is_not_dominated(found):
    front = [(c.price_per_hour, c.outcome.speed.tpot_sustained_s) for c in found.front]
    assert len(front) > 3
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    for c in found.meeting:
        mine = (c.price_per_hour, c.outcome.speed.tpot_sustained_s)
        assert any(price <= mine[0] and tpot <= mine[1] for price, tpot in front)


def test_impossible_targets_show_the_nearest():
    nothing = find(model("llama-3.1-70b"), Target.parse("concurrency=64 context=8192 tpot=10us"), ("h100-sxm",))
    assert not nothing.meeting
    assert "TPOT" in nothing.near[0].misses[0]


def test_unknown_device():
    with pytest.raises(UnknownName):
        find(model("llama-3.1-70b"), TARGET, ("h1000",))


def test_devices_without_a_price_only_when_named():
    everything = find(model("qwen3-8b"), Target(concurrency=4), tp=(1,), pp=(1,), dp=(1,))
    assert all(c.outcome.price_per_hour is not None for c in everything.meeting)
    named = find(model("qwen3-8b"), Target(concurrency=4), ("h20",), tp=(1,), pp=(1,), dp=(1,))
    assert named.meeting[0].outcome.price_per_hour is None


def test_a_configuration_costs_less_than_a_plan():
    """Against plans timed beside it, so that no machine's speed matters."""
    spec = model("llama-3.1-70b")
    start = time.process_time()
    found = find(spec, TARGET)
    each = (time.process_time() - start) / found.num_tried
    start = time.process_time()
    for context in range(4096, 4096 + 200):
        plan(spec, "h100-sxm", tp=4, context=context)
    assert found.num_tried >= 5000
    assert each < (time.process_time() - start) / 200
