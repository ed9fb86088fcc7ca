"""Parameter counts and caches of every family, against published figures and against transformers' own classes."""

import json
from pathlib import Path

import pytest

from kvledger.data import catalogue
from kvledger.spec.families import FAMILIES
from kvledger.spec.from_config import model_from_config
from kvledger.spec.kv import ChunkedKV, FullKV, LatentKV, StateKV, WindowKV

COUNTS = json.loads((Path(__file__).parent / "data" / "param_counts.json").read_text())["counts"]

# Published counts and where they stand. Exact ones are sums over the safetensors files as the hub shows them.
PUBLISHED = [
    ("meta-llama/Llama-2-7b-hf", 6_738_415_616, "hub"),
    ("meta-llama/Llama-2-13b-hf", 13_015_864_320, "hub"),
    ("meta-llama/Llama-2-70b-hf", 68_976_648_192, "hub"),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248, "hub"),
    ("meta-llama/Llama-3.1-70B", 70_553_706_496, "hub"),
    ("meta-llama/Llama-3.1-405B", 405_853_388_800, "hub"),
    ("meta-llama/Llama-3.2-1B", 1_235_814_400, "hub"),
    ("meta-llama/Llama-3.2-3B", 3_212_749_824, "hub"),
    ("meta-llama/Llama-3.2-11B-Vision-Instruct", 10_670_220_835, "hub"),
    ("meta-llama/Llama-4-Scout-17B-16E", 108_641_793_536, "hub"),
    ("meta-llama/Llama-4-Maverick-17B-128E", 401_583_781_376, "hub"),
    ("Qwen/Qwen2.5-0.5B", 494_032_768, "hub"),
    ("Qwen/Qwen2.5-7B", 7_615_616_512, "hub"),
    ("Qwen/Qwen2.5-72B", 72_706_203_648, "hub"),
    ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656, "hub"),
    ("Qwen/Qwen3-8B", 8_190_735_360, "hub"),
    ("Qwen/Qwen3-32B", 32_762_123_264, "hub"),
    ("Qwen/Qwen3-30B-A3B", 30_532_122_624, "hub"),
    ("Qwen/Qwen3-235B-A22B", 235_093_634_560, "hub"),
    ("mistralai/Mistral-7B-v0.1", 7_241_732_096, "hub"),
    ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, "hub"),
    ("mistralai/Mixtral-8x22B-v0.1", 140_620_634_112, "hub"),
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 24_011_361_280, "hub"),
    ("google/gemma-2-9b", 9_241_705_984, "hub"),
    ("google/gemma-3-4b-it", 4_300_079_472, "hub"),
    ("google/gemma-3-27b-it", 27_432_406_640, "hub"),
    ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224, "hub"),
    ("deepseek-ai/DeepSeek-V2", 235_741_434_880, "hub"),
    ("deepseek-ai/DeepSeek-V3", 671_026_419_200, "hub, less the draft layer"),
    ("moonshotai/Kimi-K2-Instruct", 1_026_408_232_448, "hub"),
    ("openai/gpt-oss-20b", 20_914_757_184, "hub, mxfp4 unpacked"),
    ("openai/gpt-oss-120b", 116_829_156_672, "hub, mxfp4 unpacked"),
    ("HuggingFaceTB/SmolLM2-135M", 134_515_008, "hub"),
    ("ai21labs/Jamba-v0.1", 51_570_323_328, "hub"),
    ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8_888_227_328, "hub"),
    ("microsoft/phi-4", 14_659_507_200, "hub"),
    ("microsoft/Phi-3.5-MoE-instruct", 41_873_153_344, "hub"),
    ("openai-community/gpt2", 124_439_808, "hub"),
    ("facebook/opt-13b", 12_853_473_280, "hub"),
    ("bigscience/bloom", 176_247_271_424, "hub"),
    ("EleutherAI/gpt-neox-20b", 20_554_567_680, "hub"),
    ("tiiuae/falcon-7b", 6_921_720_704, "hub"),
    ("THUDM/glm-4-9b-chat", 9_399_951_360, "hub"),
]
# Billions as model cards give them, to the last digit given: total, active, and whether the card's active count has
# the embedding in it, from which a token only looks up a row.
ACTIVE = [
    ("deepseek-ai/DeepSeek-V3", "671", "37", False),
    ("deepseek-ai/DeepSeek-V2", "236", "21", True),
    ("Qwen/Qwen3-235B-A22B", "235", "22", True),
    ("openai/gpt-oss-20b", "20.9", "3.6", False),
    ("openai/gpt-oss-120b", "116.8", "5.1", False),
    ("mistralai/Mixtral-8x7B-v0.1", "46.7", "12.9", True),
    ("mistralai/Mixtral-8x22B-v0.1", "141", "39", True),
    ("google/gemma-4-26B-A4B-it", "25.2", "3.8", True),
    ("google/gemma-4-31B-it", "30.7", "30.7", True),
    ("ai21labs/AI21-Jamba-1.5-Large", "399", "94", True),
    ("allenai/OLMoE-1B-7B-0924", "6.9", "1.3", True),
    ("databricks/dbrx-instruct", "132", "36", False),
]
NOT_AS_COUNTED = {
    # The published files keep key and value weights of layers that share KV; transformers' classes drop them.
    "google/gemma-3n-E2B-it",
    "google/gemma-3n-E4B-it",
    # transformers' class allocates gate and up weights for the zero experts, which have none.
    "meituan-longcat/LongCat-Flash-Chat",
}


@pytest.mark.parametrize(("name", "published", "source"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_count_equals_the_published_one(name, published, source):
    assert catalogue.model(name).num_params == published, source


@pytest.mark.parametrize(("name", "total", "active", "with_embedding"), ACTIVE, ids=[row[0] for row in ACTIVE])
def test_total_and_active_round_to_the_published_figures(name, total, active, with_embedding):
    model = catalogue.model(name)
    looked_up = 0 if with_embedding else model.embedding_params
    for value, text in ((model.num_params, total), (model.active_params - looked_up, active)):
        digits = len(text.partition(".")[2])
        assert f"{value / 1e9:.{digits}f}" == text


def test_every_count_equals_that_of_transformers():
    ours = {name: catalogue.model(name).num_params for name in COUNTS}
    assert {n for n in COUNTS if ours[n] != COUNTS[n]} == NOT_AS_COUNTED
    assert len(COUNTS) >= 250


def test_every_row_agrees_with_its_own_published_count():
    for row in catalogue.rows():
        ours = catalogue.model(row.id).num_params
        if row.num_params is not None:
            assert abs(ours - row.num_params) <= (0.015 * row.num_params if row.is_rounded else 0), row.id


def test_params_are_the_sum_of_the_shapes():
    for row in catalogue.rows():
        model = catalogue.model(row.id)
        shapes = [w for x in model.layers for w in x.weights] + list(model.outer_weights)
        assert sum(w.params for w in shapes) == model.num_params, row.id


# ---------------------------------------------------------------------------------------------- caches


def caches(name):
    return [layer.cache for layer in catalogue.model(name).layers]


def test_kinds_of_attention_by_value():
    assert set(caches("llama-2-7b")) == {FullKV(32, 128, 128)}  # MHA
    assert set(caches("llama-3.1-70b")) == {FullKV(8, 128, 128)}  # GQA
    assert set(caches("falcon-7b")) == {FullKV(1, 64, 64)}  # MQA
    assert set(caches("deepseek-v2-lite")) == {LatentKV(512, 64)}
    assert set(caches("deepseek-v3.2")) == {LatentKV(512, 64, 132)}  # 128 fp8 + one fp32 scale
    assert set(caches("mistral-7b-v0.1")) == {WindowKV(8, 128, 128, 4096)}
    assert set(caches("mistral-7b-v0.3")) == {FullKV(8, 128, 128)}


def test_windows_between_full_layers():
    gemma2, gemma3, oss = caches("gemma-2-9b"), caches("gemma-3-12b"), caches("gpt-oss-20b")
    assert gemma2 == [WindowKV(8, 256, 256, 4096), FullKV(8, 256, 256)] * 21
    assert gemma3 == ([WindowKV(8, 256, 256, 1024)] * 5 + [FullKV(8, 256, 256)]) * 8
    assert oss == [WindowKV(8, 64, 64, 128), FullKV(8, 64, 64)] * 12
    olmo = caches("olmo-3-7b")
    assert olmo == ([WindowKV(32, 128, 128, 4096)] * 3 + [FullKV(32, 128, 128)]) * 8


def test_qwen2_slides_only_when_asked_and_only_above():
    config = dict(catalogue.find("qwen2.5-7b").row.config)
    config |= {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    layers = model_from_config(config, "q", "q").layers
    assert [isinstance(x.cache, WindowKV) for x in layers] == [False] * 20 + [True] * 8
    off = model_from_config(config | {"use_sliding_window": False}, "q", "q")
    assert not any(isinstance(x.cache, WindowKV) for x in off.layers)


def test_llama4_chunks_three_of_four_layers():
    assert caches("llama-4-scout") == ([ChunkedKV(8, 128, 128, 8192)] * 3 + [FullKV(8, 128, 128)]) * 12


def test_gemma4_has_two_shapes_and_e_models_share():
    full, slide = FullKV(4, 512, 512), WindowKV(16, 256, 256, 1024)
    assert caches("gemma-4-31b") == ([slide] * 5 + [full]) * 10
    e4b = caches("gemma-4-e4b")
    assert e4b.count(None) == 18
    assert e4b.count(FullKV(2, 512, 512)) == 4
    assert e4b.count(WindowKV(2, 256, 256, 512)) == 20


def test_hybrids_keep_states_of_the_right_size():
    qwen = caches("qwen3.5-27b")
    state = qwen[0]
    assert [isinstance(x, StateKV) for x in qwen[:4]] == [True, True, True, False]
    # 48 value heads × 128 × 128 in fp32, and three columns of 10,240 channels in bf16
    assert state.state_bytes == 48 * 128 * 128 * 4 + 3 * 10_240 * 2
    assert state.shard(2).state_bytes == state.state_bytes // 2
    kimi = catalogue.model("kimi-linear").layers[0].cache
    # two ranks: 1,085,440 bytes each, as a published start-up log has it
    assert kimi.shard(2).state_bytes == 1_085_440
    assert sum(isinstance(x, LatentKV) for x in caches("kimi-linear")) == 7


def test_jamba_and_nemotron_interleave_as_published():
    jamba = [type(x).__name__ for x in caches("jamba")]
    assert [i for i, x in enumerate(jamba) if x == "FullKV"] == [4, 12, 20, 28]
    nano = catalogue.model("nemotron-nano-9b-v2")
    kinds = [None if x.cache is None else x.cache.kind for x in nano.layers]
    assert (kinds.count("state"), kinds.count("full"), kinds.count(None)) == (27, 4, 25)


def test_v4_keeps_a_window_and_compressed_tokens():
    kinds = caches("deepseek-v4-flash")
    window = LatentKV(448, 64, window=128)
    assert kinds[:2] == [window, window]
    assert kinds[2:6] == [window, LatentKV(448, 64, 132, ratio=4), window, LatentKV(448, 64, ratio=128)]
    layout = catalogue.model("deepseek-v4-flash").kv_layout("bf16", block_size=128)
    million = 1 << 20
    rows = 43 * 128 + 21 * million // 4 + 20 * million // 128
    assert layout.bytes_for(million) == rows * 1024 + 21 * million // 4 * 132


def test_sliding_layers_with_heads_of_their_own():
    mimo = caches("mimo-v2-flash")
    assert mimo[0] == FullKV(4, 192, 128)
    assert mimo[1] == WindowKV(8, 192, 128, 129)
    assert sum(type(x) is FullKV for x in mimo) == 9


def test_cross_attention_keeps_nothing_that_grows():
    model = catalogue.model("llama-3.2-11b-vision")
    assert [i for i, x in enumerate(model.layers) if x.cache is None] == list(range(3, 40, 5))
    assert "cross-attention" in model.notes[0]


def test_shared_indexers_of_glm():
    layers = catalogue.model("glm-5.3").layers
    assert sum(x.cache.index_bytes > 0 for x in layers) == 21
    assert all(x.cache.index_bytes == 132 for x in catalogue.model("glm-5").layers)


def test_latent_decode_works_on_the_latent():
    layer = catalogue.model("deepseek-v3").layers[0]
    assert (layer.score_dims, layer.mix_dims) == (128 * 192, 128 * 128)
    assert (layer.latent_score_dims, layer.latent_mix_dims) == (128 * 576, 128 * 512)


def test_heads_that_differ_by_layer():
    openelm = {
        "model_type": "openelm", "model_dim": 256, "head_dim": 64, "num_transformer_layers": 2, "vocab_size": 1000,
        "max_context_length": 2048, "num_query_heads": [4, 8], "num_kv_heads": [1, 2], "ffn_multipliers": [0.5, 4.0],
        "ffn_dim_divisor": 256, "share_input_output_layers": True, "normalize_qk_projections": True,
    }  # fmt: skip
    model = model_from_config(openelm, "o", "o")
    assert [x.cache for x in model.layers] == [FullKV(1, 64, 64), FullKV(2, 64, 64)]
    assert model.layers[1].params == 256 * 64 * (8 + 4 + 8) + 2 * 64 + 3 * 256 * 1024 + 2 * 256


def test_searched_blocks_may_have_neither_attention_nor_mlp():
    block = {"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.625}}
    skipped = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    linear = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
    config = {
        "model_type": "nemotron-nas", "hidden_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "block_configs": [block, skipped, linear],
    }  # fmt: skip
    model = model_from_config(config, "nas", "nas")
    assert [x.cache for x in model.layers] == [FullKV(8, 128, 128), None, None]
    assert model.layers[1].params == 0
    assert model.layers[0].params == 2 * 8192 * (8192 + 1024) + 3 * 8192 * 14336 + 2 * 8192  # 2 norms


def test_text_part_of_a_multimodal_file_and_an_uncounted_tower():
    config = {
        "model_type": "some_vlm", "vision_config": {"depth": 3},
        "text_config": dict(catalogue.find("qwen3-8b").row.config),
    }  # fmt: skip
    model = model_from_config(config, "v", "v")
    assert model.num_params == 8_190_735_360
    assert "not counted" in model.notes[-1]


def test_llama4_may_list_its_layers_with_rope():
    config = dict(catalogue.find("llama-4-scout").row.config)
    config["text_config"] = config["text_config"] | {"no_rope_layers": [1, 0] * 24}
    layers = model_from_config(config, "l", "l").layers
    assert [x.cache.kind for x in layers] == ["chunked", "full"] * 24


def test_a_text_part_may_leave_out_its_class_defaults():
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert model_from_config(llava, "l", "l").num_params == 6_738_415_616 + 2 * 64 * 4096


def test_yarn_stretches_the_context():
    config = dict(catalogue.find("qwen2.5-7b").row.config)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = model_from_config(config | {"rope_scaling": yarn}, "q", "q")
    assert (model.trained_context, model.max_context) == (32768, 131072)
    assert catalogue.model("deepseek-v3").max_context == 163840
    assert catalogue.model("phi-3-mini-128k").trained_context == 4096


def test_notes_and_schemes_come_from_the_file():
    assert catalogue.model("deepseek-v3").dtype == "fp8_block"
    assert catalogue.model("deepseek-v3").draft_layers == 1
    assert catalogue.model("gpt-oss-120b").dtype == "mxfp4"
    assert catalogue.model("kimi-k2-thinking").dtype == "int4_g32"
    assert catalogue.model("gpt2").activation_dtype == "fp32"
    assert catalogue.model("llama-3.1-8b").trained_context == 8192


def test_every_family_is_in_the_catalogue_or_tested_here():
    used = {catalogue.model(row.id).architecture for row in catalogue.rows()}
    elsewhere = {"openelm", "exaone_moe"}
    spare = {"apertus", "aquila", "arcee", "codegen", "granitemoeshared", "hunyuan_v1_dense", "hyperclovax", "lfm2_moe",
             "nanbeige", "orion", "persimmon", "xverse", "yi", "glm", "RefinedWeb", "RefinedWebModel", "mistral_text",
             "ministral", "gemma4_text"}  # fmt: skip
    assert set(FAMILIES) - used - elsewhere - spare == set()
