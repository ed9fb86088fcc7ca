"""One layout: planned blocks are the pool's, and the bytes allocated are blocks × block bytes, for every kind."""

import pytest

from golden_models import described, write_folder
from kvledger.build import assemble, build_engine
from kvledger.errors import ConfigError, UnknownName, UnsupportedModel
from kvledger.exec.simulated import SimulatedExecutor
from kvledger.kernels.kv_pages import KINDS as KERNEL_KINDS
from kvledger.plan.planner import plan
from kvledger.plan.pool import PoolPlan, local_pool, plan_pool
from kvledger.plan.profiles import Setup, get_profile
from kvledger.sched.sequence import Request
from kvledger.spec.config import CacheConfig, EngineConfig, SchedulerConfig
from kvledger.spec.kv import ChunkedKV, FullKV, LatentKV, WindowKV
from kvledger.spec.kv_computed import COMPUTED, OF_LATENTS, kind_of
from kvledger.spec.model import Layer, ModelSpec
from kvledger.spec.sampling import SamplingParams
from kvledger.units import GIB, MIB
from test_architectures import give_tokenizer
from tiny_model import write_tiny_model

LATENT = [LatentKV(512, 64)] * 4
KINDS = {
    "mha": [FullKV(8, 64, 64)] * 6,
    "gqa": [FullKV(2, 64, 64)] * 6,
    "mqa": [FullKV(1, 128, 128)] * 3,
    "window": [WindowKV(4, 64, 64, 512)] * 4,
    "gemma": ([WindowKV(4, 64, 64, 512)] * 5 + [FullKV(4, 64, 64)]) * 2,
    "uneven": [FullKV(4, 64, 64)] + [WindowKV(1, 64, 64, 100)] * 5,
    "chunked": [ChunkedKV(2, 64, 64, 256)] * 3 + [FullKV(2, 64, 64)],
    "latent": LATENT,
    "some layers keep nothing": [FullKV(2, 64, 64), None, FullKV(2, 64, 64), None],
}


class Instant:
    def seconds(self, shape):
        return 0.0


def spec_of(caches, context=4096):
    layers = tuple(Layer(cache, 1000) for cache in caches)
    return ModelSpec("test", "test", 64, 100, context, layers, 4, 6400, 0)


TYPES = [*((t, b) for t in ("bf16", "fp32", "int8", "fp8") for b in (8, 16, 64)), ("int4", 32), ("int4", 64)]


@pytest.mark.parametrize(
    ("kind", "dtype", "block_size"),
    [(kind, *how) for kind in KINDS for how in TYPES if KINDS[kind] is not LATENT or how[0] in OF_LATENTS],
)
def test_planned_blocks_are_the_pools_blocks(kind, dtype, block_size):
    spec = spec_of(KINDS[kind])
    config = EngineConfig(CacheConfig(block_size, dtype, kv_memory_bytes=8 * MIB), SchedulerConfig(max_num_seqs=8))
    plan = local_pool(spec, config, total_bytes=1 << 34, available_bytes=1 << 33)
    engine = assemble(spec, plan, config, SimulatedExecutor(plan, Instant()))
    assert engine.scheduler.pool.num_blocks == plan.num_blocks == engine.executor.num_blocks
    assert engine.executor.kv_bytes == plan.num_blocks * plan.layout.block_bytes == plan.pool_bytes
    blocks, size = plan.layout.pool_shape(plan.num_blocks)
    assert blocks * size == plan.pool_bytes <= 8 * MIB


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_never_holds_more_blocks_than_the_layout_says(kind, dtype):
    """Grown to any length, alone, whatever the chunks: at most `blocks_for(length, in_flight)`."""
    spec = spec_of(KINDS[kind])
    config = EngineConfig(CacheConfig(block_size=32), SchedulerConfig(max_num_batched_tokens=50))
    layout = spec.kv_layout(dtype, 32)
    plan = plan_pool(layout, 2000 * layout.block_bytes)
    engine = assemble(spec, plan, config, SimulatedExecutor(plan, Instant()))
    seq = engine.add(Request("a", tuple(range(90)) * 8, SamplingParams(max_tokens=600)))
    most = 0
    while engine.has_work:
        engine.step()
        held = engine.scheduler.ledger.held(seq.tables) if seq.tables else 0
        assert held <= layout.blocks_for(max(1, seq.num_tokens), in_flight=50)
        most = max(most, held)
    assert most >= layout.blocks_for(seq.num_tokens) - 2 * len(layout.groups)  # and the bound is not a loose one


def test_the_pool_is_no_larger_than_the_sequences_can_fill():
    spec = spec_of(KINDS["gqa"], context=1024)
    config = EngineConfig(CacheConfig(kv_memory_bytes=1 << 30), SchedulerConfig(max_num_seqs=2))
    plan = local_pool(spec, config, 1 << 34, 1 << 33)
    assert plan.num_blocks == 2 * 1024 // 16
    assert "2 sequences of 1024 tokens" in plan.reason


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("dtype", "block_size"), [("bf16", 8), ("bf16", None), ("bf16", 32), ("int4", None), ("int4", 64), ("int8", 16)]
)
def test_the_cpu_executor_allocates_the_plan(tmp_path, window, dtype, block_size):
    check_allocation(write_tiny_model(tmp_path / "tiny.gguf", window=window), dtype, block_size)


@pytest.mark.parametrize(("dtype", "block_size"), [("bf16", None), ("int8", None), ("int8", 8), ("fp8", 32)])
def test_the_cpu_executor_allocates_the_plan_of_latents(tmp_path, dtype, block_size):
    folder = write_folder(tmp_path, described()["deepseek2"])
    give_tokenizer(folder)
    layout = check_allocation(folder, dtype, block_size)
    assert layout.bytes_per_token == 3 * (64 + 32) * {"bf16": 2}.get(dtype, 1) + (3 * 4 if dtype == "int8" else 0)


def check_allocation(path, dtype, block_size):
    """A model's engine has the pool of its plan. Returns the layout."""
    cache = CacheConfig(block_size, dtype, kv_memory_bytes=3 * MIB)
    config = EngineConfig(cache, SchedulerConfig(max_num_seqs=99))
    loaded = build_engine(path, config)
    try:
        planned = local_pool(loaded.model, config, 1, 1)  # a given size depends on nothing else
        assert loaded.pool == planned
        assert isinstance(loaded.pool, PoolPlan)
        assert loaded.pool.layout.block_size == (block_size or {"int4": 32}.get(dtype, 16))
        assert loaded.engine.executor.num_blocks == loaded.engine.scheduler.pool.num_blocks == planned.num_blocks
        assert loaded.engine.executor.kv_bytes == planned.num_blocks * planned.layout.block_bytes
        return planned.layout
    finally:
        loaded.engine.close()


def test_every_type_that_is_offered_has_a_kernel():
    offered = [kind_of(spec_of(KINDS["gqa"]).kv_layout(name, 32)) for name in COMPUTED]
    assert sorted(offered) == sorted(KERNEL_KINDS)
    assert {kind_of(spec_of(LATENT).kv_layout(name, 32)) for name in OF_LATENTS} == set(offered) - {"int4"}


@pytest.mark.parametrize("block_size", [8, 16])
def test_blocks_that_split_a_group_are_refused_by_configuration_and_plan_alike(block_size):
    said = f"int4 KV needs a multiple of 32 tokens per block, got {block_size}; nearest: 32"
    with pytest.raises(ConfigError, match=said):
        CacheConfig(block_size, "int4")
    with pytest.raises(ConfigError, match=said):
        plan("smollm2-135m", kv_dtype="int4", block_size=block_size)
    setup = Setup(kv_dtype="int4", block_size=block_size, available_bytes=GIB)
    with pytest.raises(ConfigError, match=said):
        get_profile("kvledger").allocate(spec_of(KINDS["gqa"]), None, setup)
    assert plan("smollm2-135m", "h100-sxm", kv_dtype="int4", block_size=block_size)["num_blocks"].value > 0


def test_types_that_no_kernel_computes_are_refused_with_those_that_one_does():
    with pytest.raises(UnknownName, match=r"unknown KV type 'fp9'; nearest: fp8, fp32"):
        CacheConfig(kv_dtype="fp9")
    with pytest.raises(ConfigError, match="in q8_0 are not computed here; bf16, int8, fp8, int4, fp32 are"):
        CacheConfig(kv_dtype="q8_0")
    with pytest.raises(ConfigError, match="q8_0 are not computed here"):
        plan("smollm2-135m", kv_dtype="q8_0")
    with pytest.raises(
        UnsupportedModel, match="MLA's latents in int4 are not computed here; bf16, int8, fp8, fp32 are"
    ):
        local_pool(spec_of(LATENT), EngineConfig(CacheConfig(kv_dtype="int4")), 1 << 34, 1 << 33)


def test_heads_that_split_a_group_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "tiny.gguf", head_dim=16)
    monkeypatch.setattr("kvledger.exec.cpu.CpuExecutor.__init__", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="int4 KV needs a multiple of 32 channels per head, got 16; nearest: 32"):
        build_engine(path, EngineConfig(CacheConfig(kv_dtype="int4", kv_memory_bytes=3 * MIB)))
