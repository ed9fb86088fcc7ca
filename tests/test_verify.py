"""Plan against fact: case files by value, logs of four engines, causes by name, hostile input."""

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvledger.cli.main import main
from kvledger.data.catalogue import model
from kvledger.errors import DamagedFile, FetchError
from kvledger.plan.verify.cases import run_cases, summarise
from kvledger.plan.verify.checks import check
from kvledger.plan.verify.devices import device_of
from kvledger.plan.verify.implied import bytes_per_token, kv_types, models_by_bytes, whole_blocks
from kvledger.plan.verify.logs import MAX_LINE, parse_log, read_lines
from kvledger.plan.verify.metrics import parse_metrics, scrape
from kvledger.plan.verify.reconcile import reconcile, report_lines
from kvledger.plan.verify.record import draft_layers, from_row, kv_dtype_of
from kvledger.plan.verify.shapes import from_formula, shape_of
from kvledger.units import GIB

CASES = Path(__file__).parents[2] / "shared" / "cases"
needs_cases = pytest.mark.skipif(not CASES.is_dir(), reason="the case files are not beside this checkout")
RUNNER = CliRunner()


def case(**fields):
    """A row as a log would give it."""
    return {"engine": "vLLM", "engine_version": "0.19.0", "gpu": "H100-80GB", "tp": 1, "pp": 1, **fields}


# ---------------------------------------------------------------------------------- case files, when they are here


def all_rows(path):
    cases = run_cases(path)
    assert not cases.damaged
    return list(cases.verdicts.values())


@needs_cases
def test_every_row_of_the_allocator_comes_out_exactly():
    verdicts = all_rows(CASES / "vllm_kv_blocks.jsonl")
    assert len(verdicts) >= 42
    wrong = [(v.record.model, c) for v in verdicts for c in v.checks if c.status != "ok"]
    assert wrong == []


@needs_cases
def test_logged_tokens_and_concurrency_within_one_percent_where_the_shape_is_sure():
    verdicts = all_rows(CASES / "engine_logs.jsonl")
    checks = [(v.record, c) for v in verdicts for c in v.checks if c.name in ("kv_tokens", "max_concurrency")]
    assert sum(c.status == "ok" for _, c in checks) >= 130
    # no figure is off without a cause
    assert [(r.label, c.name) for r, c in checks if c.status == "off"] == []


@needs_cases
def test_budgets_within_four_percent_and_inside_the_band():
    total = summarise(all_rows(CASES / "engine_logs.jsonl"))
    assert total.budgets >= 45
    assert total.budget_error <= 0.04
    assert total.budgets_inside >= 0.9 * total.budgets


@needs_cases
def test_models_left_out_of_the_fit_are_predicted_as_well():
    scripts = Path(__file__).parents[1] / "scripts"
    import importlib.util

    spec = importlib.util.spec_from_file_location("fit_overheads", scripts / "fit_overheads.py")
    fit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fit)
    found = fit.left_out(fit.load(CASES / "engine_logs.jsonl"))
    assert sum(abs(e) for e, _ in found) / len(found) <= 0.04
    assert sum(ok for _, ok in found) >= 0.9 * len(found)


# ---------------------------------------------------------------------------------- rows that are always here

EXACT = [
    ("meta-llama/Llama-3.1-8B", 4, "bf16", 16, 20659290365, 131072, 8192, 39404, 630464, 4.8101),
    ("google/gemma-3-1b-it", 2, "fp8", 64, 32569052146, 8192, 2048, 248482, 5442685, 664.3904),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 8, "fp8", 32, 7533065121, 1048576, 2048, 76630, 2382364, 2.272),
    ("deepseek-ai/DeepSeek-V2-Lite", 4, "bf16", 64, 17245434443, 163840, 2048, 8663, 554432, 3.384),
    ("Qwen/Qwen2.5-7B-Instruct", 16, "fp8", 32, 51360941173, 32768, 8192, 223915, 7165280, 218.667),
]


def exact_row(values, **changes):
    names = ("model", "tp", "kv_cache_dtype", "block_size", "available_kv_bytes", "max_model_len",
             "max_num_batched_tokens", "num_blocks", "kv_tokens", "max_concurrency")  # fmt: skip
    return {"engine": "vllm 0.32.0", **dict(zip(names, values, strict=True)), **changes}


@pytest.mark.parametrize("values", EXACT, ids=lambda v: v[0])
def test_allocator_rows(values):
    found = check(from_row(exact_row(values)))
    assert [c.status for c in found.checks] == ["ok"] * 3


@pytest.mark.parametrize("field", ["num_blocks", "kv_tokens", "max_concurrency"])
def test_a_figure_that_is_off_by_little_is_off(field):
    row = exact_row(EXACT[0])
    row[field] = round(row[field] + (1 if field != "max_concurrency" else 0.0001), 4)
    assert check(from_row(row)).is_off


LOGGED = [
    case(model="google/gemma-3-27b-it", available_kv_gib=19.53, kv_tokens=36560, num_blocks=15997, max_model_len=8192,
         max_concurrency=4.46, block_size=16, notes="max_num_batched_tokens 8192"),
    case(model="openai/gpt-oss-20b", tp=2, available_kv_gib=59.32, kv_tokens=2591776, num_blocks=323972,
         max_model_len=8192, max_concurrency=316.07, block_size=16, notes="max_num_batched_tokens 8192"),
    case(model="meta-llama/Llama-3.1-8B-Instruct", pp=2, available_kv_gib=66.54, kv_tokens=1075312, num_blocks=67207,
         max_model_len=8192, max_concurrency=131.26, block_size=16),
    case(engine_version="0.24.0", gpu="RTX 5090", model="Qwen3.6-35B-A3B NVFP4", available_kv_gib=5.98,
         kv_tokens=567978, max_model_len=131072, max_concurrency=4.33, kv_cache_dtype="fp8",
         max_num_batched_tokens=8192),
    case(engine_version="0.20.2rc1", gpu="RTX PRO 6000 96GB", model="zai-org/GLM-5.1 (NVFP4)", tp=8, dcp=8,
         available_kv_gib=19.47, kv_tokens=2720768, max_model_len=202752, max_concurrency=13.42, block_size=64,
         kv_cache_dtype="fp8 (fp8_ds_mla)"),
    {"engine": "SGLang", "model": "moonshotai/Kimi-K2.5", "tp": 8, "kv_cache_dtype": "bf16", "kv_tokens": 2454421,
     "kv_size_mib_total": 164485.12},
    {"engine": "llama.cpp", "model": "openai/gpt-oss-20b (SWA part)", "kv_cache_dtype": "f16", "kv_tokens": 2304,
     "kv_size_mib_total": 54.0},
    {"engine": "ik_llama.cpp", "model": "Qwen/Qwen3-235B-A22B", "kv_cache_dtype": "K q8_0, V f16", "kv_tokens": 65536,
     "kv_size_mib_k": 3196.0, "kv_size_mib_v": 6016.0, "kv_size_mib_total": 9212.0},
    {"engine": "TensorRT-LLM", "model": "Qwen/Qwen3-Reranker-0.6B", "tp": 1, "block_size": 32, "kv_tokens": 643136,
     "available_kv_gib": 68.69},
    {"engine": "vLLM", "engine_version": "0.5.x/0.6.x (Aug 2024)", "model": "meta-llama/Meta-Llama-3-8B-Instruct",
     "block_size": 16, "num_blocks": 157794, "cpu_blocks": 4096, "kv_cache_dtype": "fp8"},
]  # fmt: skip


@pytest.mark.parametrize("row", LOGGED, ids=lambda r: f"{r['engine']} {r['model']}")
def test_logged_figures_come_out(row):
    found = check(from_row(row))
    assert found.checks
    assert {c.status for c in found.checks} == {"ok"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (case(model="Qwen3.6-27B", engine_version=None, gpu=None, available_kv_gib=17.25, kv_tokens=255975,
              max_model_len=131072, max_concurrency=1.95), "draft layer"),
        (case(model="deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", engine_version=None, gpu="2x RTX 4090", tp=2,
              available_kv_gib=8.69, kv_tokens=81536, block_size=16), "rank with least has 7.47 GiB"),
        ({"engine": "SGLang", "model": "deepseek-ai/DeepSeek-V3.2-Exp", "kv_cache_dtype": "fp8", "kv_tokens": 1462784,
          "kv_size_mib_total": 55828.48}, "leaves out the keys of the sparse-attention indexer"),
        ({"engine": "ik_llama.cpp", "model": "deepseek-ai/DeepSeek-R1", "kv_cache_dtype": "f16", "kv_tokens": 512,
          "kv_size_mib_k": 1464.0, "kv_size_mib_v": 976.0}, "MLA is off"),
    ],
)  # fmt: skip
def test_differences_are_named(row, words):
    found = check(from_row(row))
    assert {c.status for c in found.checks if c.name != "available_gib"} == {"explained"}
    assert all(words in c.cause for c in found.checks if c.status == "explained" and c.name != "available_gib")


def test_a_record_whose_parts_do_not_add_up_is_said_to_contradict_itself():
    row = case(engine_version="0.10.0", model="Qwen/Qwen3-32B", gpu_memory_utilization=0.95, weights_gib=61.03,
               available_kv_gib=4.45, activation_gib=5.64)  # fmt: skip
    (found,) = check(from_row(row)).checks
    assert found.status == "explained"
    assert "0.898" in found.cause


def test_words_of_logs():
    assert kv_dtype_of("auto (bf16)") == "bf16"
    assert kv_dtype_of("fp8 (fp8_ds_mla)") == "fp8_ds_mla"
    assert kv_dtype_of("K q8_0, V f16") == "q8_0/f16"
    assert kv_dtype_of("auto", "torch.float32") == "fp32"
    assert draft_layers("x/GLM", "TP8 DCP1 MTPon") == 1
    assert draft_layers("x/GLM", "TP8 DCP1 MTPoff") == 0
    assert draft_layers("google/gemma-4-31B-it + MTP", "") == 0  # its MTP layers read the target's KV
    assert device_of("RTX 3090 (23.58GiB)").memory_bytes == int(23.58 * GIB)
    assert device_of("2x H100").name == "h100-sxm"
    assert device_of("abacus") is None


def test_shapes_from_formulas():
    shape = from_formula("80L x 4 kv-heads/GPU x (128+128) x 2 B")
    assert sum(x.cache.num_kv_heads for x in shape.model.layers) == 320
    assert from_formula("78L x (656 fp8_ds_mla + 132 indexer) B").model.layers[0].cache.index_bytes == 132
    assert from_formula("27L x 576 x 2 B (latent)").model.layers[0].cache.latent_dim == 512
    assert from_formula("9" * 5000) is None
    assert shape_of(from_row({"engine": "llama.cpp", "model": "Openai_Gpt Oss 20b"})).model.name == "openai/gpt-oss-20b"


# ---------------------------------------------------------------------------------- start-up logs

VLLM_LOG = """\
INFO 04-20 10:00:00 [api_server.py:1200] vLLM API server version 0.19.0
INFO 04-20 10:00:01 [utils.py:233] non-default args: {'model_tag': 'google/gemma-3-27b-it', 'max_model_len': 8192}
(EngineCore pid=1) INFO [core.py] Initializing a V1 LLM engine (v0.19.0) with config: model='google/gemma-3-27b-it', \
speculative_config=None, dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, kv_cache_dtype=auto
INFO Chunked prefill is enabled with max_num_batched_tokens=8192.
INFO Model loading took 51.45 GiB memory and 12.3 seconds
INFO Available KV cache memory: 19.53 GiB
WARNING Add 8 padding layers, may waste at most 15.38% KV cache memory
INFO GPU KV cache size: 36,560 tokens
INFO Maximum concurrency for 8,192 tokens per request: 4.46x
INFO Graph capturing finished in 20 secs, took 1.14 GiB
"""
SGLANG_LOG = """\
[2026-05-01 10:00:00] server_args=ServerArgs(model_path='google/gemma-4-31B-it', tp_size=2, mem_fraction_static=0.85, \
kv_cache_dtype='auto', speculative_algorithm=None)
[2026-05-01 10:01:02 TP0] Use sliding window memory pool. full_layer_tokens=24248, swa_layer_tokens=19398
[2026-05-01 10:01:02 TP0] KV Cache is allocated. #tokens: 19398, K size: 3.70 GB, V size: 3.70 GB
[2026-05-01 10:01:02 TP0] KV Cache is allocated. #tokens: 24248, K size: 0.46 GB, V size: 0.46 GB
[2026-05-01 10:01:02 TP1] KV Cache is allocated. #tokens: 24248, K size: 0.46 GB, V size: 0.46 GB
"""
LLAMA_LOG = """\
build: 6123 (abc) with gcc
llama_model_loader: - kv   2: general.name str = Openai_Gpt Oss 20b
llama_context: n_ctx         = 131072
llama_kv_cache: size = 3072.00 MiB (131072 cells,  12 layers,  1/1 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
llama_kv_cache: size =   54.00 MiB (  2304 cells,  12 layers,  1/1 seqs), K (f16):   27.00 MiB, V (f16):   27.00 MiB
"""
TRT_LOG = """\
[TensorRT-LLM] TensorRT-LLM version: 1.0.0
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 68.69 GiB for max tokens in paged KV cache (643136).
"""


def report_of(tmp_path, text, **told):
    path = tmp_path / "engine.log"
    path.write_text(text)
    return reconcile(path, None, told.get("model"), told.get("device"), told.get("tp"))


def test_a_vllm_log_is_reconciled(tmp_path):
    report = report_of(tmp_path, VLLM_LOG)
    (pool,) = report.pools
    assert report.log.engine == "vllm"
    assert [c.status for c in pool.verdict.checks] == ["ok", "ok"]
    padding = next(r for r in pool.account.factors if r.name == "padding")
    assert padding.factor == pytest.approx(70 / 62)
    assert pool.account.ours_bytes == pytest.approx(pool.account.implied_bytes, rel=2e-3)
    assert any(words.startswith("KV type bf16") for words in pool.implied)
    assert "GPU KV cache size: 36,560 tokens" in pool.lines


def test_states_and_derived_figures_are_named_and_inverted(tmp_path):
    text = (
        VLLM_LOG.replace("0.19.0", "0.24.0").replace("google/gemma-3-27b-it", "Qwen/Qwen3.6-35B-A3B")
        .replace("8,192 tokens per request: 4.46x", "131,072 tokens per request: 4.33x").replace("36,560", "567,978")
        .replace("19.53", "5.98").replace("kv_cache_dtype=auto", "kv_cache_dtype=fp8")
    )  # fmt: skip
    (pool,) = report_of(tmp_path, text).pools
    assert {c.status for c in pool.verdict.checks} == {"ok"}
    assert [r.name for r in pool.account.factors] == ["state pages"]
    assert any("299 blocks of 2096 tokens at 69 a request: fp8" in words for words in pool.implied)


V0_LOG = """\
INFO llm_engine.py:234] Initializing an LLM engine (v0.6.6) with config: model='meta-llama/Llama-3.1-8B-Instruct', \
dtype=torch.bfloat16, max_seq_len=20000, tensor_parallel_size=1, kv_cache_dtype=auto
INFO worker.py] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.90) = 21.22
INFO worker.py:241] model weights take 14.99GiB; non_torch_memory takes 0.35GiB; PyTorch activation peak memory takes \
2.07GiB; the rest of the memory reserved for KV Cache is 3.81GiB.
INFO gpu_executor.py:76] # GPU blocks: 1952, # CPU blocks: 2048
INFO gpu_executor.py:80] Maximum concurrency for 20000 tokens per request: 1.56x
"""


def test_an_old_log_is_checked_from_blocks_to_budget(tmp_path):
    (pool,) = report_of(tmp_path, V0_LOG).pools
    assert {c.name: c.status for c in pool.verdict.checks} == {
        "num_blocks": "ok", "max_concurrency": "ok", "cpu_blocks": "ok", "available_gib": "ok",
    }  # fmt: skip


def test_ranks_that_differ_are_named(tmp_path):
    text = VLLM_LOG.replace("INFO GPU KV", "INFO (Worker_TP1) Available KV cache memory: 18.00 GiB\nINFO GPU KV")
    (pool,) = report_of(tmp_path, text).pools
    assert any(words.startswith("rank minimum: ranks report 19.53 to 18.00 GiB") for words in pool.remarks)


def test_an_sglang_log_has_two_pools(tmp_path):
    report = report_of(tmp_path, SGLANG_LOG)
    assert {p.verdict.record.part: [c.status for c in p.verdict.checks] for p in report.pools} == {
        "window": ["ok", "ok"], "full": ["ok", "ok"],
    }  # fmt: skip


STATE_LOG = """\
[2025-11-01 TP0] server_args=ServerArgs(model_path='Qwen/Qwen3.5-9B', tp_size=2, mem_fraction_static=0.85)
[2025-11-01 TP0] Mamba Cache is allocated. max_mamba_cache_size: 186, conv_state size: 0.10GB, ssm_state size: 4.38GB
[2025-11-01 TP0] KV Cache is allocated. #tokens: 327310, K size: 2.50 GB, V size: 2.50 GB
"""


def test_a_pool_of_states_is_checked_and_tells_models_apart(tmp_path):
    """KV alone fits Qwen 3.5 27B in fp8 just as well; the states do not."""
    (pool,) = report_of(tmp_path, STATE_LOG).pools
    assert [(c.name, c.status) for c in pool.verdict.checks] == [
        ("key_mib", "ok"), ("value_mib", "ok"), ("state_gib", "ok"),
    ]  # fmt: skip
    (other,) = report_of(tmp_path, STATE_LOG.replace("9B", "27B").replace("=0.85", "=0.85, kv_cache_dtype='fp8'")).pools
    assert [c.status for c in other.verdict.checks] == ["ok", "ok", "off"]


def test_a_llama_cpp_log_has_two_caches(tmp_path):
    report = report_of(tmp_path, LLAMA_LOG)
    assert [p.verdict.record.part for p in report.pools] == ["full", "window"]
    assert {c.status for p in report.pools for c in p.verdict.checks} == {"ok"}


def test_a_tensorrt_log_needs_a_model_and_suggests_some_without(tmp_path):
    (pool,) = report_of(tmp_path, TRT_LOG).pools
    assert any("Qwen/Qwen3-0.6B (TP 1, bf16)" in words for words in pool.implied)
    (pool,) = report_of(tmp_path, TRT_LOG, model="Qwen/Qwen3-0.6B").pools
    assert [c.status for c in pool.verdict.checks] == ["ok"]
    assert any("Qwen3-0.6B" in line for line in report_lines(report_of(tmp_path, TRT_LOG, model="Qwen/Qwen3-0.6B")))


def test_whole_blocks_inverts_the_figure():
    assert whole_blocks(377456, 262144, 341) == 491  # two Qwen 3.8 27B servers, as their logs factor
    assert whole_blocks(920517, 262144, 174) == 611
    assert whole_blocks(920518, 262144, 174) is None


def test_kv_types_from_bytes():
    m = model("llama-3.1-8b")
    assert kv_types(m, 2, bytes_per_token(m, "q8_0", 2)) == ["q8_0"]
    assert "bf16" in kv_types(m, 1, 131072)
    assert "meta-llama/Llama-3.1-8B (TP 1, bf16)" in models_by_bytes(131072, limit=500)


# ---------------------------------------------------------------------------------- hostile input


@pytest.mark.parametrize("text", ["", "\n" * 1000, "hello\nworld\n", "\x00\xff" * 5000])
def test_what_is_no_log_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "x.log"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DamagedFile, match="lines is a start-up line"):
        parse_log(read_lines(path))


def test_hostile_lines_cost_bounded_time(tmp_path):
    path = tmp_path / "hostile.log"
    path.write_bytes(b"# GPU blocks: 7\nspeculative_config=" + b"m" * 10**6 + b"\n" + b"vLLM model= GiB " * 2_000_000)
    start = time.perf_counter()
    log = parse_log(read_lines(path))
    assert time.perf_counter() - start < 10
    assert log.facts["num_blocks"] == 7
    assert max(map(len, read_lines(path))) <= MAX_LINE


@pytest.mark.parametrize(
    "line",
    ["# GPU blocks: " + "9" * 400, "GPU KV cache size: ,,, tokens", "Available KV cache memory: -2.14 GiB",
     "vllm tensor_parallel_size=0, max_seq_len=0", "# GPU blocks: 5, # CPU blocks: 0"],
)  # fmt: skip
def test_odd_figures_are_no_crash(tmp_path, line):
    path = tmp_path / "odd.log"
    path.write_text(f"vLLM API server version 0.19.0\nmodel='llama-3.1-8b'\n{line}\n")
    result = RUNNER.invoke(_app(), [str(path)])
    assert result.exit_code in (0, 1)
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"), ("[1]", "not an object"), ('{"engine": "vLLM"}', "not an object with a model"),
        ('{"model": "x", "kv_tokens": "many"}', "not a number"), ('{"model": "x", "tp": -1}', "not a count"),
        ('{"model": "x", "tp": 1e300}', "figures below 10"), ("[" * 100_000, "not JSON"),
        ('{"model": "' + "x" * 3_000_000 + '"}', "longer than 1,048,576 bytes"),
        ('{"model": "x", "groups": 5}', "groups is 5, not a list"),
        ('{"model": "x", "groups": [["FullAttentionSpec"]]}', "groups is .*, not a list of kind and layers"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_case_is_told_with_its_line_and_the_others_are_judged(tmp_path, line, words):
    path, good = tmp_path / "cases.jsonl", json.dumps(LOGGED[0])
    path.write_text(f"{good}\n\n{line}\n{good}\n")
    result = RUNNER.invoke(_app(), ["--cases", str(path)])
    assert result.exit_code == 1
    (told,) = result.stderr.splitlines()
    assert re.match(rf"{path}, line 3: .*{words}", told)
    assert [row.split()[0] for row in result.stdout.splitlines() if "36,560" in row] == ["1", "4"]
    assert "2 rows: 6 figures agree" in result.stdout
    assert "lines that are no case: 1" in result.stdout
    found = json.loads(RUNNER.invoke(_app(), ["--cases", str(path), "--json"]).stdout)
    assert (found["summary"]["rows"], found["summary"]["damaged"], len(found["rows"])) == (2, 1, 2)
    assert [row["line"] for row in found["damaged"]] == [3]
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(DamagedFile, match=rf"line 1: .*{words}.*; 1 more lines, and none is a case"):
        run_cases(path)


# ---------------------------------------------------------------------------------- metrics and the command

METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",gpu_memory_utilization="0.9",\
num_cpu_blocks="2048",num_gpu_blocks="78897"} 1.0
vllm:num_requests_running{model_name="meta-llama/Meta-Llama-3-8B-Instruct"} 0.0
"""


def test_metrics_of_a_running_server_are_a_record():
    (record,) = parse_metrics(METRICS).records
    assert (record.num_blocks, record.block_size, record.cpu_blocks) == (78897, 16, 2048)
    assert {c.name: c.status for c in check(record).checks} == {"cpu_blocks": "ok"}
    with pytest.raises(DamagedFile, match="cache_config_info"):
        parse_metrics("up 1\n")


def test_kvledgers_own_metrics_are_checked_to_the_block():
    text = METRICS.replace("78897", "1365").replace("meta-llama/Meta-Llama-3-8B-Instruct", "smollm2-135m")
    sizes = "".join(
        f'kvledger:kv_bytes{{engine="0",state="{s}"}} {n}\n'
        for s, n in (("used", 0), ("cached", 0), ("free", 1365 * 16 * 46080 // 2), ("shared", 7))
    )
    (record,) = parse_metrics(text + sizes).records
    assert record.engine == "kvledger"
    assert record.available_bytes == 1365 * 16 * 23040
    found = check(record).checks
    assert [(c.name, c.status) for c in found] == [("num_blocks", "ok")]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000", "http://127.0.0.1:9/metrics"])
def test_metrics_that_cannot_be_read(url):
    with pytest.raises(FetchError):
        scrape(url)


def _app():
    from kvledger.cli.verify import app

    return app


def test_the_command_prints_expected_ours_and_difference(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in LOGGED))
    result = RUNNER.invoke(_app(), ["--cases", str(path)])
    assert result.exit_code == 0
    assert "36,560" in result.output
    assert "10 rows" in result.output


def test_the_command_exits_1_where_a_figure_is_outside_its_tolerance(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps({**LOGGED[1], "kv_tokens": 2_400_000}) + "\n")
    result = RUNNER.invoke(_app(), ["--cases", str(path), "--json"])
    assert result.exit_code == 1
    row = json.loads(result.stdout)["rows"][0]
    assert row["outside"]
    wrong = next(c for c in row["checks"] if c["figure"] == "kv_tokens")
    assert wrong["expected"] == 2_400_000
    assert wrong["ours"] == pytest.approx(2591776, rel=1e-3)


def test_user_errors_are_one_line(capsys, tmp_path):
    for args in (["verify", str(tmp_path / "nothing.log")], ["verify"], ["verify", "--metrics", "nonsense"]):
        with pytest.raises(SystemExit) as left:
            main(args)
        assert left.value.code in (1, 2)
        assert capsys.readouterr().err.startswith("error: ")


def test_a_row_that_lists_no_indexer_is_counted_without():
    specs = {
        "engine": "vllm 0.32.0", "model": "deepseek-ai/DeepSeek-V3.2", "tp": 8, "kv_cache_dtype": "bf16",
        "block_size": 64, "available_kv_bytes": 20 * GIB, "max_model_len": 8192, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    for layers, page in ((61, 1152), (122, 1152 + 132)):
        row = {**specs, "groups": [["MLAAttentionSpec", layers]], "num_blocks": 20 * GIB // (61 * page * 64)}
        assert [c.status for c in check(from_row(row)).checks] == ["ok", "ok"]


def test_a_log_that_names_no_model_asks_for_it(tmp_path):
    log = tmp_path / "vllm.log"
    lines = [
        "INFO [kv_cache_utils.py:1087] GPU KV cache size: 495,616 tokens",
        "INFO [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens per request: 60.50x",
    ]
    log.write_text("\n".join(lines))
    said = "\n".join(report_lines(reconcile(log, None, None, None, None)))
    assert "the log does not name the model; give --model" in said
    assert "unknown model ''" not in said
