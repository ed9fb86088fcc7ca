"""The step cost against sums written out token by token, and the simulated executor's clock."""

import pytest

from kvledger.exec.simulated import SimulatedExecutor
from kvledger.plan.pool import PoolPlan
from kvledger.plan.roofline import Roofline, pairs, step_seconds
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Chunk, Step
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import ChunkedKV, FullKV, LatentKV, StateKV, WindowKV
from kvledger.spec.model import Layer, ModelSpec
from kvledger.spec.sampling import SamplingParams
from kvledger.spec.step import Work

DEVICE = DeviceSpec("d", "gpu", "v", 10**9, 10**9, 1e9, {"bf16": 1e12, "int8": 2e12})
FULL, WINDOW, CHUNKED = FullKV(2, 8, 8), WindowKV(2, 8, 8, 5), ChunkedKV(2, 8, 8, 7)


def spec(*layers):
    return ModelSpec("m", "m", 16, 100, 1000, layers, 2, embedding_params=1600, head_params=1600)


@pytest.mark.parametrize("kind", [FULL, WINDOW, CHUNKED, LatentKV(8, 4)])
@pytest.mark.parametrize("work", [Work(0, 1), Work(0, 20), Work(3, 1), Work(3, 9), Work(13, 30), Work(100, 1)])
def test_pairs_are_the_sum_over_queries(kind, work):
    positions = range(work.context, work.context + work.new_tokens)
    assert pairs(kind, work) == sum(p + 1 - kind.first_kept(p) for p in positions)


def test_a_state_has_no_pairs_and_a_borrowed_cache_counts_in_full():
    assert pairs(StateKV(((10, 4, 10),)), Work(5, 5)) == 0
    assert pairs(None, Work(5, 5)) == 6 + 7 + 8 + 9 + 10


def test_flops_and_bytes_of_a_mixed_step():
    model = spec(Layer(FULL, 1000, score_dims=16, mix_dims=16), Layer(WINDOW, 500, score_dims=16, mix_dims=16))
    layout = model.kv_layout("bf16", 4)
    shape = (Work(10, 1, 1), Work(0, 6, 0))
    cost = step_seconds(model, DEVICE, layout, shape)
    attention = 2 * 32 * ((11 + 21) + (5 + 1 + 2 + 3 + 4 + 5 + 5))
    assert cost.flops == 2 * (1500 * 7 + 1600 * 1) + attention
    assert cost.weight_bytes == 2 * (1500 + 1600)
    assert cost.kv_bytes == layout.read_bytes(11) + layout.read_bytes(6) + 7 * layout.bytes_per_token
    assert cost.memory_s == cost.bytes / 1e9
    assert cost.seconds == max(cost.compute_s, cost.memory_s)


def test_the_last_layer_may_end_early_for_rows_that_nobody_reads():
    last = Layer(WINDOW, 500, score_dims=16, mix_dims=16, qkv_params=200)
    model = spec(Layer(FULL, 1000, score_dims=16, mix_dims=16, qkv_params=300), last)
    engine = Roofline(model, DEVICE, model.kv_layout(), skips_unread=True)
    shape = (Work(10, 1, 1), Work(0, 6, 0), Work(3, 9, 2))
    first = 2 * 1000 * 16 + 2 * 32 * (11 + sum(range(1, 7)) + sum(range(4, 13)))
    ends = 2 * (200 * 16 + 300 * 3) + 2 * 32 * (5 + 0 + 2 * 5)  # all rows' keys and values, three rows' rest
    assert engine.flops(shape) == first + ends + 2 * 1600 * 3
    assert engine.cost(shape).bytes == Roofline(model, DEVICE, model.kv_layout()).cost(shape).bytes


def test_weights_are_read_once_and_the_head_only_for_logits():
    roofline = Roofline(spec(Layer(FULL, 1000)), DEVICE, spec(Layer(FULL, 1000)).kv_layout(), weight_bytes=4200)
    one, many = roofline.cost((Work(9, 1),)), roofline.cost((Work(9, 1),) * 50)
    assert one.weight_bytes == many.weight_bytes == pytest.approx(2600)  # one byte a weight
    assert roofline.cost((Work(0, 9, 0),)).weight_bytes == pytest.approx(1000)
    assert roofline.cost(()).seconds == 0.0


def test_experts_are_read_as_they_are_touched():
    layer = Layer(FULL, 100 + 8 * 50, num_experts=8, experts_per_token=2, expert_params=50)
    roofline = Roofline(spec(layer), DEVICE, spec(layer).kv_layout(), weight_bytes=spec(layer).num_params)
    assert roofline.weights_read((Work(0, 1, 0),)) == pytest.approx(100 + 50 * 2)
    assert roofline.weights_read((Work(0, 2, 0),)) == pytest.approx(100 + 50 * 8 * (1 - 0.75**2))
    assert roofline.weights_read((Work(0, 500, 0),)) == pytest.approx(100 + 50 * 8)


def test_prefill_binds_on_arithmetic_and_decode_on_memory():
    model = spec(Layer(FULL, 10**6, score_dims=16, mix_dims=16))
    roofline = Roofline(model, DEVICE, model.kv_layout())
    assert roofline.cost((Work(0, 5000),)).bound == "compute"
    assert roofline.cost((Work(5000, 1),)).bound == "memory"


def test_the_simulated_executor_spends_what_the_roofline_says():
    model = spec(Layer(FULL, 1000))
    layout = model.kv_layout()
    roofline = Roofline(model, DEVICE, layout)
    executor = SimulatedExecutor(PoolPlan(layout, 0, 10, "test"), roofline)
    seq = Sequence(1, "a", [1, 2, 3], 3, SamplingParams(prompt_logprobs=0), 10, tables=([0],))
    plain = executor.run(Step((Chunk(seq, 0, 3, True),)))
    assert plain.seconds == roofline.seconds((Work(0, 3, 3),))
    assert [s.token_id for s in plain.prompt_logprobs[1]] == [2, 3]
    moved = executor.run(Step((Chunk(seq, 0, 3, True),), copies=((0, 1),), swaps_out=((2, 0),)))
    assert moved.seconds - plain.seconds == pytest.approx(2 * 2 * layout.block_bytes / 1e9)
