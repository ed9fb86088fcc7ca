"""Engines' rules: values that vLLM's own allocator gave, figures that logs printed, and properties of every profile."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.data.catalogue import model
from kvledger.data.devices import find_device
from kvledger.errors import ConfigError, DoesNotFit, UnknownName
from kvledger.plan.profiles.base import ENGINES, Band, Setup, get_profile, parse_version
from kvledger.plan.profiles.compare import compare, compare_ledger, request_bytes
from kvledger.plan.profiles.overhead import cuda_bytes
from kvledger.plan.profiles.sglang import SglangProfile, static_fraction
from kvledger.plan.profiles.vllm import VllmProfile, printed_tokens
from kvledger.plan.profiles.vllm_groups import StateRules, describe, form_groups, padding_layers
from kvledger.spec.kv import ChunkedKV, FullKV, KVStorage, LatentKV, StateKV, WindowKV
from kvledger.spec.model import Layer, ModelSpec
from kvledger.units import GIB, MIB

BF16 = KVStorage.of("bf16")
H100 = find_device("h100")


def model_of(specs, name="test"):
    layers = tuple(Layer(s, 1000) for s in specs)
    return ModelSpec(name, "test", 256, 1000, 1 << 20, layers, 8, 1000, 1000)


def spec_of(kind, *dims):
    makers = {
        "full": lambda h, d: FullKV(h, d, d), "win": lambda h, d, w: WindowKV(h, d, d, w),
        "chunk": lambda h, d, w: ChunkedKV(h, d, d, w), "mla": lambda d: LatentKV(d - 64, 64),
        "state": lambda n: StateKV(((n, 1, n),)),
    }  # fmt: skip
    return makers[kind](*dims)


# ---------------------------------------------------------------------------------- vLLM's own allocator (0.32)

ALLOCATOR = [json.loads(x) for x in (Path(__file__).parent / "vllm_allocator.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ALLOCATOR, ids=range(len(ALLOCATOR)))
def test_blocks_as_vllm_allocates(row):
    """Random mixes of layers: windows, chunks, latents, states, unequal pages, pipeline stages; asked of vLLM 0.32."""
    specs = [spec_of(kind, *dims) for kind, *dims, count in row["layers"] for _ in range(count)]
    setup = Setup(
        kv_dtype=row["kv_dtype"], block_size=row["block_size"], pp=row["pp"], concurrent_batches=1,
        available_bytes=row["available_kv_bytes"], max_model_len=row["max_model_len"],
        max_num_batched_tokens=row["max_num_batched_tokens"],
    )  # fmt: skip
    ours = VllmProfile("0.32.0").allocate(model_of(specs), None, setup)
    groups = ours.pools[0].groups
    assert [list(describe(g)) for g in groups] == row["groups"]
    assert [g.block_size for g in groups] == row["block_sizes"]
    assert ours.num_blocks == row["num_blocks"]
    assert ours.kv_tokens == row["kv_tokens"]
    assert round(ours.max_concurrency, 4) == row["max_concurrency"]


def test_layers_share_a_block_table_only_where_they_need_the_same_tokens():
    full, window = FullKV(8, 128, 128), WindowKV(8, 128, 128, 1024)
    groups = form_groups([window] * 5 + [full], BF16, 16, StateRules())
    assert [describe(g) for g in groups] == [("SlidingWindowSpec", 1)] * 5 + [("FullAttentionSpec", 1)]
    assert len(form_groups([FullKV(8, 64, 64), FullKV(2, 64, 64)], BF16, 16, StateRules())) == 1


def test_gemma_3_27b_pads_eight_slots():
    groups = form_groups([x.cache for x in model("gemma-3-27b").layers], BF16, 16, StateRules())
    assert len(groups) == 7
    assert padding_layers(groups) == 8


def test_smaller_pages_get_more_tokens_per_block():
    groups = form_groups([WindowKV(8, 256, 256, 1024)] * 5 + [FullKV(2, 512, 512)], BF16, 16, StateRules())
    assert {g.kind: g.block_size for g in groups} == {"window": 16, "full": 32}
    assert len({p.page_bytes for g in groups for p in g.parts}) == 1


@pytest.mark.parametrize(
    ("name", "tp", "kv_dtype", "drafts", "size"),
    [
        ("Qwen/Qwen3.6-27B", 2, "bf16", (0, 0), 784), ("Qwen/Qwen3.6-27B", 2, "fp8", (0, 0), 1568),
        ("Qwen/Qwen3.6-27B", 1, "bf16", (1, 1), 800), ("Qwen/Qwen3.6-35B-A3B", 1, "fp8", (0, 0), 2096),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", 2, "bf16", (0, 0), 960),
    ],
)  # fmt: skip
def test_attention_blocks_grow_until_they_cover_a_state(name, tp, kv_dtype, drafts, size):
    """Block sizes that vLLM printed for these models."""
    setup = Setup(tp=tp, kv_dtype=kv_dtype, available_bytes=20 * GIB, draft_layers=drafts[0], draft_tokens=drafts[1])
    ours = VllmProfile("0.24.0").allocate(model(name), None, setup)
    assert max(g.block_size for g in ours.pools[0].groups) == size


def test_states_are_counted_once_more_with_prefix_caching():
    m = model("Qwen/Qwen3.6-35B-A3B")
    setup = Setup(kv_dtype="fp8", available_bytes=int(5.98 * GIB), max_model_len=131072, max_num_batched_tokens=8192)
    ours = VllmProfile("0.24.0").allocate(m, None, setup)
    assert (ours.num_blocks, ours.pools[0].blocks_for(131072), ours.kv_tokens) == (299, 69, 567978)


# ---------------------------------------------------------------------------------- figures as versions print them


def test_token_figure_changed_its_meaning_after_0_20():
    m, setup = model("gemma-3-27b"), Setup(available_bytes=int(19.53 * GIB), max_model_len=8192,
                                           max_num_batched_tokens=8192, concurrent_batches=1)  # fmt: skip
    old, new = (VllmProfile(v).allocate(m, None, setup) for v in ("0.19.0", "0.21.0"))
    assert old.num_blocks == new.num_blocks
    assert old.kv_tokens == 36560  # as a log of 0.19 has it: blocks ÷ 7 groups × 16
    assert new.kv_tokens == int(new.max_concurrency * 8192)
    assert "GPU KV cache size: 36,560 tokens" in old.lines


def test_latents_are_replicated_and_context_parallelism_divides_them():
    m = model("deepseek-v3")
    one, eight = (VllmProfile().allocate(m, None, Setup(tp=t, available_bytes=60 * GIB)) for t in (1, 8))
    assert one.num_blocks == eight.num_blocks
    shared = VllmProfile().allocate(m, None, Setup(tp=8, dcp=8, available_bytes=60 * GIB, max_model_len=65536))
    plain = VllmProfile().allocate(m, None, Setup(tp=8, available_bytes=60 * GIB, max_model_len=65536))
    assert shared.max_concurrency == pytest.approx(8 * plain.max_concurrency)


def test_sparse_latents_in_fp8_are_656_bytes_and_their_indexer_132():
    ours = VllmProfile().allocate(model("deepseek-v3.2"), None, Setup(kv_dtype="fp8", available_bytes=20 * GIB))
    assert ours.block_bytes == 61 * (656 + 132) * 64


def test_a_draft_layer_keeps_kv_of_its_own():
    m = model("llama-3.1-8b")
    plain, eagle = (
        VllmProfile("0.19.0").allocate(m, None, Setup(available_bytes=int(51.63 * GIB), draft_layers=n)) for n in (0, 1)
    )
    assert eagle.block_bytes * 32 == plain.block_bytes * 33
    assert eagle.kv_tokens == pytest.approx(410128, rel=2e-4)  # as an EAGLE server printed it


def test_the_fullest_pipeline_stage_decides():
    specs = [FullKV(8, 128, 128)] * 7
    setup = Setup(pp=2, available_bytes=10 * GIB, max_model_len=4096)
    ours = VllmProfile().allocate(model_of(specs), None, setup)
    assert ours.num_blocks == 10 * GIB // (4 * 65536)
    assert any("stage 0 of 2 decides" in r for r in ours.reasons)


def test_heads_that_tp_does_not_divide_are_counted_as_vllm_counts_and_said():
    ours = VllmProfile().allocate(model_of([FullKV(10, 128, 128)]), None, Setup(tp=4, available_bytes=GIB))
    assert ours.block_bytes == 2 * 256 * 2 * 16
    assert any("does not divide 10 KV heads" in r for r in ours.reasons)


# ---------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("name", "version", "setup", "logged_gib"),
    [
        ("llama-3.1-8b", "0.19.0", Setup(memory_fraction=0.95, weights_bytes=int(14.99 * GIB)), 58.11),
        ("qwen2.5-72b", "0.19.0", Setup(tp=2, memory_fraction=0.95, weights_bytes=int(67.8 * GIB)), 3.04),
        ("gemma-3-27b", "0.19.0", Setup(memory_fraction=0.95, weights_bytes=int(51.45 * GIB)), 19.53),
        ("gpt-oss-120b", "0.11.0", Setup(memory_fraction=0.95, weights_bytes=int(64.38 * GIB)), 3.33),
        ("qwen3-14b", "0.16.0", Setup(memory_fraction=0.95), 41.94),
        ("qwen3-14b", "0.17.0", Setup(memory_fraction=0.95), 45.34),
    ],
)  # fmt: skip
def test_available_memory_of_an_h100_as_logged(name, version, setup, logged_gib):
    """Device, weights and utilisation alone; the last two have even the weights computed."""
    band = VllmProfile(version).budget(model(name), H100, setup)[0]
    assert band.mid / GIB == pytest.approx(logged_gib, rel=0.04)
    assert band.low <= logged_gib * GIB <= band.high


def test_the_widest_term_is_named():
    ours = VllmProfile("0.19.0").allocate(model("llama-3.1-8b"), H100, Setup(memory_fraction=0.9, max_model_len=8192))
    assert ours.dominant is not None
    assert ours.dominant.size.spread == max(t.size.spread for t in ours.terms)
    assert {t.name for t in ours.terms} == {"weights", "activation", "non_torch", "cuda_graphs"}
    assert ours.available.mid == ours.budget_bytes - ours.weights_bytes - ours.overhead_bytes


def test_too_large_a_model_says_by_how_much():
    with pytest.raises(DoesNotFit, match="are missing") as caught:
        VllmProfile().allocate(model("llama-3.1-70b"), H100, Setup(max_model_len=8192))
    assert caught.value.missing_bytes > 0


# ---------------------------------------------------------------------------------- the other engines


def test_sglang_deals_windows_fewer_tokens():
    """24,248 and 19,398 tokens, as logged for Gemma 4 31B under TP 2: 0.8 window tokens per full token."""
    m = model("google/gemma-4-31B-it")
    ours = SglangProfile().allocate(m, None, Setup(tp=2, available_bytes=int((2 * 0.46 + 2 * 3.7) * GIB)))
    full, window = ours.pools
    assert window.num_blocks == int(full.num_blocks * 0.8)
    assert (full.block_bytes, window.block_bytes) == (10 * 2 * 1024 * 2, 50 * 8 * 512 * 2)


def test_sglang_reserves_by_prefill_chunk_graphs_and_ranks():
    reserved_mib = 512 + 1.5 * 8192 + 2 * 256 + 1024 / 8  # its rule for devices of 60 to 90 GiB
    assert static_fraction(H100, Setup()) == pytest.approx(1 - reserved_mib / 81559, abs=5e-4)
    assert static_fraction(find_device("t4"), Setup()) < 0.8
    assert static_fraction(H100, Setup(memory_fraction=0.5)) == 0.5


@pytest.mark.parametrize(
    ("name", "setup", "sizes"),
    [
        ("gpt-oss-20b", Setup(max_model_len=131072, max_num_seqs=1, max_num_batched_tokens=2048), [3072, 54]),
        ("google/gemma-2-2b", Setup(max_model_len=8192, max_num_seqs=1), [416, 234]),
        ("meta-llama/Meta-Llama-3-8B", Setup(max_model_len=2048, max_num_seqs=1), [256]),
        ("deepseek-r1", Setup(max_model_len=32768, max_num_seqs=1), [2196]),
        ("Qwen/Qwen3-235B-A22B", Setup(max_model_len=32768, max_num_seqs=1, kv_dtype="q8_0"), [3196]),
        ("Qwen/Qwen3-235B-A22B", Setup(max_model_len=65536, max_num_seqs=1, kv_dtype="q8_0/f16"), [9212]),
    ],
)  # fmt: skip
def test_llama_cpp_caches_in_mib_as_printed(name, setup, sizes):
    ours = get_profile("llama.cpp").allocate(
        model(name), None, Setup(**{**_fields(setup), "available_bytes": 100 * GIB})
    )
    assert [p.pool_bytes / MIB for p in ours.pools] == sizes


def test_llama_cpp_rounds_window_cells_to_256():
    """2,304 = 128 + 2,048 rounded up; 256 = 128 + 128; the full cache of 131,072 needs no rounding."""
    for ubatch, cells in ((2048, 2304), (128, 256)):
        setup = Setup(max_model_len=131072, max_num_seqs=1, max_num_batched_tokens=ubatch, available_bytes=100 * GIB)
        ours = get_profile("llama.cpp").allocate(model("gpt-oss-20b"), None, setup)
        assert f"( {cells} cells" in ours.lines[1].replace("(", "( ")


def test_tensorrt_counts_in_blocks_of_32():
    ours = get_profile("trtllm").allocate(model("Qwen/Qwen3-0.6B"), None, Setup(available_bytes=int(68.69 * GIB)))
    assert ours.kv_tokens == pytest.approx(643136, rel=2e-4)
    assert ours.kv_tokens % 32 == 0


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_kvledger_plans_the_pool_it_builds(dtype):
    from kvledger.plan.pool import local_pool
    from kvledger.spec.config import CacheConfig, EngineConfig

    m = model("smollm2-135m")
    config = EngineConfig(cache=CacheConfig(kv_memory_bytes=GIB, kv_dtype=dtype))
    ours = get_profile("kvledger").allocate(m, None, Setup(available_bytes=GIB, kv_dtype=dtype))
    built = local_pool(m, config, 0, 0)
    pool = ours.pools[0]
    assert (pool.num_blocks, pool.block_bytes, pool.block_size) == (
        built.num_blocks, built.layout.block_bytes, {"bf16": 16, "int4": 32}[dtype]
    )  # fmt: skip
    assert pool.blocks_for(2048) == built.layout.blocks_for(2048, pool.in_flight)


def test_compare_sets_engines_side_by_side_and_says_why():
    made = compare(model("gemma-3-27b"), H100, Setup(max_model_len=8192))
    assert [a.engine for a in made.allocations] == list(ENGINES)
    costs = {a.engine: request_bytes(a) for a in made.allocations}
    assert costs["vllm"] > costs["sglang"]  # windows and the tokens in flight, padded slots
    assert any("padding" in r for r in made.reasons)
    table = compare_ledger(model("gemma-3-27b"), H100, Setup(max_model_len=8192)).tables[0]
    assert len(table.rows) == len(ENGINES)


def test_compare_reports_who_cannot():
    made = compare(model("llama-3.1-70b"), H100, Setup(max_model_len=8192, tp=2))
    assert any(r.startswith("kvledger:") for r in made.refusals)


# ---------------------------------------------------------------------------------- properties


@settings(max_examples=60, deadline=None)
@given(
    engine=st.sampled_from([e for e in ENGINES if e != "kvledger"]),
    name=st.sampled_from(["llama-3.1-8b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v2-lite", "Qwen/Qwen3.6-35B-A3B"]),
    gib=st.integers(8, 200),
    length=st.sampled_from([512, 5000, 32768]),
    kv_dtype=st.sampled_from(["bf16", "fp8"]),
)
def test_pools_fit_their_memory_and_grow_with_it(engine, name, gib, length, kv_dtype):
    m, profile = model(name), get_profile(engine)

    def allocation(size):
        try:
            return profile.allocate(m, None, Setup(available_bytes=size, max_model_len=length, kv_dtype=kv_dtype,
                                                   max_num_seqs=4 if engine == "tensorrt-llm" else None))  # fmt: skip
        except DoesNotFit:
            return None

    ours, more = allocation(gib * GIB), allocation(2 * gib * GIB)
    if ours is None:
        return
    assert ours.kv_bytes <= gib * GIB
    assert more is not None
    assert more.num_blocks >= ours.num_blocks
    assert more.max_concurrency >= ours.max_concurrency
    for pool in ours.pools:
        held = [pool.blocks_for(n) for n in range(1, 4 * length, max(1, length // 7))]
        assert held == sorted(held)
        assert all(g.block_bytes <= pool.block_bytes for g in pool.groups)
        assert all(g.used_bytes <= g.block_bytes for g in pool.groups)


@settings(max_examples=40, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), length=st.integers(1, 100_000), gib=st.integers(1, 100))
def test_tensor_parallelism_conserves_kv_until_heads_run_out(tp, length, gib):
    one, split = (
        VllmProfile("0.20.0").allocate(model("llama-3.1-8b"), None,
                                       Setup(tp=t, available_bytes=gib * GIB, max_model_len=length))
        for t in (1, tp)
    )  # fmt: skip
    assert one.block_bytes == tp * split.block_bytes
    assert abs(split.num_blocks - tp * one.num_blocks) <= tp


def test_engine_names_and_versions():
    assert get_profile("LLAMACPP").name == "llama.cpp"
    with pytest.raises(UnknownName, match="sglang"):
        get_profile("sglan")
    assert parse_version("v0.20.2rc1") == (0, 20, 2)
    assert parse_version("0.6.x") == (0, 6, 0)
    assert VllmProfile("0.15/0.16").allocate(model("qwen3-14b"), None, Setup(available_bytes=GIB)).num_blocks
    with pytest.raises(ConfigError, match="not like"):
        parse_version("newer dev build")


@pytest.mark.parametrize("field", ["tp", "block_size", "max_model_len"])
def test_setups_that_cannot_be_meant(field):
    with pytest.raises(ConfigError, match=field):
        Setup(**{field: 0})


def test_a_profile_without_memory_asks_for_a_device():
    for engine in ENGINES:
        with pytest.raises(ConfigError, match="device"):
            get_profile(engine).allocate(model("llama-3.1-8b"), None, Setup())


def test_cuda_offers_less_than_the_driver_reports():
    assert 0.99 < cuda_bytes(H100) / H100.memory_bytes < 1
    assert Band.exactly(5).spread == 0


def test_version_zero_eight_prints_blocks():
    pool = VllmProfile("0.7.1").allocate(model("llama-3.1-8b"), None, Setup(available_bytes=GIB))
    assert pool.lines[0] == f"# cuda blocks: {pool.num_blocks}"
    assert printed_tokens(pool.pools[0], 1.0, 10, (0, 7, 0)) == 16 * pool.num_blocks


def _fields(setup):
    return {name: getattr(setup, name) for name in setup.__slots__}


def test_the_null_block_and_one_request_must_fit_or_vllm_refuses_to_start():
    m = model("llama-3.1-8b")
    setup = Setup(available_bytes=65 * 16 * 131072, max_model_len=1040, block_size=16)  # 65 blocks, 65 needed
    ours = VllmProfile().allocate(m, None, setup)
    assert ours.num_blocks == 65
    assert any("needs 65 blocks of 64; --max-model-len 1024 would fit" in r for r in ours.reasons)
    fits = VllmProfile().allocate(m, None, Setup(available_bytes=66 * 16 * 131072, max_model_len=1040, block_size=16))
    assert not any("refuses" in r for r in fits.reasons)


def test_published_mxfp4_experts_are_stored_padded_by_vllm():
    ours = VllmProfile("0.19.0").allocate(model("gpt-oss-20b"), H100, Setup(memory_fraction=0.95, max_model_len=8192))
    assert ours.weights_bytes / GIB == pytest.approx(13.64, rel=0.02)  # as logged; the file has 12.8


@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "kvledger"])
def test_every_model_of_the_catalogue_is_allocated_or_refused_in_words(engine):
    """No model of 280 crashes a profile, and no pool exceeds its memory."""
    from kvledger.data.catalogue import rows
    from kvledger.errors import KvledgerError

    device, done = find_device("b200"), 0
    for row in rows():
        try:
            ours = get_profile(engine).allocate(model(row.id), device, Setup(tp=8, max_model_len=4096, draft_layers=1))
        except KvledgerError:
            continue
        done += 1
        assert ours.kv_bytes <= ours.available.mid, row.id
        assert ours.available.low <= ours.available.mid <= ours.available.high
        assert ours.concurrency(4096) == pytest.approx(ours.max_concurrency)
    assert done > 200


def test_windows_hold_what_two_steps_in_flight_may_need_since_0_32():
    m, setup = model("gemma-3-12b"), Setup(available_bytes=20 * GIB, max_model_len=32768, max_num_batched_tokens=2048)
    old, new = (VllmProfile(v).allocate(m, None, setup) for v in ("0.31.0", "0.32.0"))
    assert (old.pools[0].in_flight, new.pools[0].in_flight) == (2048, 4096)
    assert any("2 steps of 2,048 tokens may be in flight" in r for r in new.reasons)
    assert new.max_concurrency < old.max_concurrency
