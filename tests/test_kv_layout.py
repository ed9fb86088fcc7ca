"""The KV layout by property, for every model of the catalogue, and by value where the answer is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.data import catalogue
from kvledger.errors import ConfigError, UnknownName
from kvledger.spec.kv import KV_TYPES, ChunkedKV, FullKV, KVLayout, KVStorage, LatentKV, StateKV, WindowKV

MODELS = [catalogue.model(row.id) for row in catalogue.rows()]
SHAPES = list({tuple(x.cache for x in m.layers): m for m in MODELS}.values())  # one model per layout
DTYPES = ["bf16", "fp8", "int8", "int8_per_token_head", "int4", "kivi2", "q8_0", "q4_0", "q8_0/q4_0", "nvfp4", "fp32"]
TOKENS = (0, 1, 2, 15, 16, 17, 127, 128, 129, 1000, 4096, 4097, 8191, 100_000)
DIVIDING = (1, 2, 4, 8)

models = st.sampled_from(SHAPES)
dtypes = st.sampled_from(DTYPES)
blocks = st.sampled_from([1, 8, 16, 32, 64, 128, 256])
lengths = st.integers(0, 2_000_000)


@pytest.mark.parametrize("model", SHAPES, ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_layout_of_every_model(model, dtype):
    layout = model.kv_layout(dtype)
    ordinary, newest = ([g for g in layout.groups if g.is_residual == flag] for flag in (False, True))
    assert layout.block_bytes >= layout.num_slots * max(g.page_bytes for g in ordinary)
    assert all(len(g.layers) * g.page_bytes <= layout.block_bytes for g in layout.groups)
    kept = [i for i, x in enumerate(model.layers) if x.cache is not None]
    assert sorted(i for g in ordinary for i in g.layers) == kept
    growing = [i for i in kept if not isinstance(model.layers[i].cache, StateKV)]
    assert sorted(i for g in newest for i in g.layers) == (growing if dtype == "int4" else [])
    held = [layout.bytes_for(n) for n in TOKENS]
    assert held[0] == 0
    assert held == sorted(held)
    for n, num_bytes in zip(TOKENS, held, strict=True):
        assert layout.blocks_for(n) * layout.block_bytes >= num_bytes
        assert layout.read_bytes(n) <= num_bytes


@settings(max_examples=300, deadline=None)
@given(models, dtypes, blocks, lengths)
def test_bytes_are_additive_over_layers(model, dtype, block_size, num_tokens):
    storage = KVStorage.of(dtype)
    whole = KVLayout.of([x.cache for x in model.layers], storage, block_size).bytes_for(num_tokens)
    specs = [x.cache for x in model.layers if x.cache is not None]
    single = {spec: KVLayout.of([spec], storage, block_size).bytes_for(num_tokens) for spec in set(specs)}
    assert whole == sum(single[spec] for spec in specs)


@settings(max_examples=300, deadline=None)
@given(models, dtypes, blocks, lengths, st.integers(1, 5000), st.integers(1, 8192))
def test_bytes_and_blocks_never_fall_as_a_sequence_grows(model, dtype, block_size, num_tokens, more, in_flight):
    layout = model.kv_layout(dtype, block_size)
    assert layout.bytes_for(num_tokens) <= layout.bytes_for(num_tokens + more)
    assert layout.blocks_for(num_tokens, in_flight) <= layout.blocks_for(num_tokens + more, in_flight)
    assert layout.blocks_for(num_tokens, in_flight) <= layout.blocks_for(num_tokens, in_flight + more)


@settings(max_examples=300, deadline=None)
@given(models, dtypes, blocks, lengths, st.sampled_from(DIVIDING))
def test_blocks_hold_what_is_stored(model, dtype, block_size, num_tokens, tp):
    layout = _sharded(model, dtype, block_size, tp)
    if layout is None:
        return
    assert layout.blocks_for(num_tokens) * layout.block_bytes >= layout.bytes_for(num_tokens)
    budget = layout.blocks_for(num_tokens) * layout.block_bytes
    assert layout.blocks_in(budget) == layout.blocks_for(num_tokens)
    assert layout.blocks_in(budget - 1) == max(0, layout.blocks_for(num_tokens) - 1)


@settings(max_examples=300, deadline=None)
@given(models, st.sampled_from(["bf16", "fp8", "int8", "q8_0"]), lengths, st.sampled_from((2, 4, 8, 16, 64)))
def test_tensor_parallelism_conserves_bytes_up_to_replication(model, dtype, num_tokens, tp):
    """All ranks together hold the whole once, and latents and single heads as often as there are ranks."""
    layout, shard = model.kv_layout(dtype), _sharded(model, dtype, 16, tp)
    if shard is None:
        return
    whole, rank = layout.bytes_for(num_tokens), shard.bytes_for(num_tokens)
    assert whole <= rank * tp
    assert rank <= whole
    storage = KVStorage.of(dtype)
    expected = 0
    for spec in (x.cache for x in model.layers):
        if isinstance(spec, FullKV):  # whole heads, each at least once
            heads = max(spec.num_kv_heads, tp)
            one = KVLayout.of([spec], storage, 16).bytes_for(num_tokens) // spec.num_kv_heads
            expected += heads * one
        elif isinstance(spec, LatentKV):
            expected += tp * KVLayout.of([spec], storage, 16).bytes_for(num_tokens)
        elif isinstance(spec, StateKV) and num_tokens:
            expected += tp * spec.shard(tp).state_bytes
    assert rank * tp == expected


def _sharded(model, dtype, block_size, tp):
    """The layout of one rank; None where the heads cannot be split so."""
    heads = {x.cache.num_kv_heads for x in model.layers if isinstance(x.cache, FullKV)}
    if any(h % tp and tp % h for h in heads):
        return None
    return model.kv_layout(dtype, block_size, tp)


@settings(max_examples=200, deadline=None)
@given(models, dtypes, st.integers(1, 10_000))
def test_pool_shape_is_blocks_times_block_bytes(model, dtype, num_blocks):
    layout = model.kv_layout(dtype)
    assert layout.pool_shape(num_blocks) == (num_blocks, layout.block_bytes)
    assert len(layout.tensor_shapes(num_blocks)) == len(layout.groups)


# ---------------------------------------------------------------------------------------------- by value


@pytest.mark.parametrize(
    ("name", "dtype", "per_token"),
    [
        ("llama-2-7b", "bf16", 524_288),
        ("llama-2-70b", "bf16", 327_680),
        ("llama-3.1-8b", "fp8", 65_536),
        ("llama-3.1-8b", "q8_0", 65_536 * 34 // 32),
        ("llama-3.1-8b", "int8", 65_536 + 32 * 8 * 2 * 4),
        ("deepseek-v3", "bf16", 61 * 576 * 2),
        ("deepseek-v3.2", "fp8_ds_mla", 61 * (656 + 132)),
        ("qwen3.5-27b", "bf16", 16 * 4 * 512 * 2),
        ("gemma-4-31b", "bf16", (50 * 16 * 512 + 10 * 4 * 1024) * 2),
        ("mistral-small-4", "bf16", 36 * 320 * 2),
    ],
)
def test_bytes_per_token(name, dtype, per_token):
    assert catalogue.model(name).kv_layout(dtype).bytes_per_token == per_token


def test_kivi_keeps_its_newest_tokens_unquantised():
    layout = KVLayout.of([FullKV(1, 128, 128)], KVStorage.of("int4"), 32)
    group = 32 * 256 // 2 + 2 * 128 * 4  # 4 bits, and 4 bytes per 32 of a channel (keys) or a token's channels (values)
    newest = 128 * 256 * 2
    assert layout.bytes_for(31) == 31 * 256 * 2
    assert (
        layout.bytes_for(32) == 32 * 256 * 2 + group
    )  # whole groups are quantised at once, and kept twice for a while
    assert layout.bytes_for(256) == newest + 8 * group
    assert layout.bytes_for(257) == newest + 8 * group
    # what is read: each token once, the last 97 to 128 of them in bf16
    assert [layout.read_bytes(n) for n in (128, 129, 160)] == [
        newest, 97 * 256 * 2 + group, newest + group
    ]  # fmt: skip
    assert layout.bytes_per_token == group // 32


def test_a_residual_fits_the_blocks_it_is_kept_in():
    """30 layers of SmolLM2 in int4: a block holds nine bf16 pages, so four groups of eight at most keep the newest."""
    layout = KVLayout.of([FullKV(3, 64, 64)] * 30, KVStorage.of("int4"), 32)
    page = 3 * 32 * 128 * 2
    assert layout.block_bytes == 30 * page * 10 // 32
    assert [len(g.layers) for g in layout.groups] == [30, 8, 8, 7, 7]
    assert [g.spec for g in layout.groups[1:]] == [WindowKV(3, 64, 64, 128)] * 4
    assert layout.blocks_for(2048) == 64 + 4 * 5
    narrow = KVLayout.of([WindowKV(3, 64, 64, 48)], KVStorage.of("int4"), 32)
    assert narrow.groups[1].spec.window == 48
    assert narrow.block_bytes == page  # one layer's bf16 page at least


def test_windows_stop_growing():
    spec = WindowKV(8, 128, 128, 4096)
    layout = KVLayout.of([spec], KVStorage.of("bf16"), 16)
    assert layout.bytes_for(4096) == layout.bytes_for(1_000_000)
    assert [spec.first_kept(n) for n in (0, 4095, 4096, 5000)] == [0, 0, 1, 905]
    assert spec.blocks(1_000_000, 16, in_flight=2048) == -(-(4095 + 2048) // 16) + 1


def test_chunks_begin_anew():
    spec = ChunkedKV(8, 128, 128, 8192)
    assert [spec.first_kept(n) for n in (0, 8191, 8192, 20_000)] == [0, 0, 8192, 16_384]
    assert spec.retained(20_000) == 8192


def test_groups_as_the_drawing_in_docs_layout_has_them():
    """Gemma 3 1B: 22 sliding and 4 full layers make groups of four, two of them with an empty slot."""
    layout = catalogue.model("gemma-3-1b").kv_layout()
    assert [g.layers for g in layout.groups] == [
        (0, 7, 14, 21), (1, 8, 15, 22), (2, 9, 16, 24), (3, 10, 18, 25), (4, 12, 19), (6, 13, 20), (5, 11, 17, 23),
    ]  # fmt: skip
    assert layout.num_slots == 4


def test_tp_that_fits_no_head_says_the_nearest():
    with pytest.raises(ConfigError, match=r"TP = 3 neither divides 8 KV heads .* nearest: [24]"):
        catalogue.model("llama-3.1-8b").kv_layout(tp=3)


def test_bad_requests():
    with pytest.raises(UnknownName, match="fp8"):
        KVStorage.of("fp9")
    with pytest.raises(ConfigError, match="block size 0"):
        catalogue.model("llama-3.1-8b").kv_layout(block_size=0)
    with pytest.raises(ConfigError, match="no layer keeps"):
        KVLayout.of([None, None], KVStorage.of("bf16"), 16)


@pytest.mark.parametrize("kind", KV_TYPES.values(), ids=lambda k: k.name)
def test_tiles_of_every_type_are_monotone(kind):
    for channels in (32, 64, 128, 256):
        sizes = [kind.tile_bytes(n, channels) for n in range(260)]
        assert sizes[0] == 0
        assert sizes == sorted(sizes)
