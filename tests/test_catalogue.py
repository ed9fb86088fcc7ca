"""The bundled models: every row stands on its own, and is found by whatever people call it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvledger.data import catalogue
from kvledger.errors import ConfigError, DamagedFile, FetchError, UnknownName
from kvledger.models import model_at, resolve_model
from kvledger.spec.weights import weight_bytes

LOGS = Path(__file__).parents[2] / "shared" / "cases" / "engine_logs.jsonl"
BLOCKS = LOGS.parent / "vllm_kv_blocks.jsonl"
# Log records whose model is not said, or said only by family.
NOT_A_MODEL = ("hybrid", "unknown", "variant not stated", "7B class", "24B class", "bench_one_batch")


def test_enough_rows_each_with_source_date_and_one_id():
    rows = catalogue.rows()
    assert len(rows) >= 250
    ids = [name.lower() for row in rows for name in (row.id, *row.also)]
    assert len(ids) == len(set(ids))
    for row in rows:
        assert row.source, row.id
        assert row.date.startswith("2026-"), row.id
        assert row.id.count("/") <= 1


def test_short_names_are_unambiguous():
    shorts = [name.lower() for row in catalogue.rows() for name in row.names]
    assert len(shorts) == len(set(shorts))


@pytest.mark.parametrize("row", catalogue.rows(), ids=lambda row: row.id)
def test_every_row_parses_and_is_found_by_all_its_names(row):
    model = catalogue.model(row.id)
    assert model.num_layers > 0
    assert model.max_context > 0
    for name in (row.id, *row.names, *row.also):
        assert catalogue.find(name).row is row, name
        assert catalogue.find(name.upper()).row is row, name


@pytest.mark.parametrize(
    ("name", "row_id", "scheme"),
    [
        ("llama-2-70b", "meta-llama/Llama-2-70b-hf", None),
        ("SmolLM2", "HuggingFaceTB/SmolLM2-135M", None),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "Qwen/Qwen2.5-72B", "awq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B", "gptq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-7B", "int8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "meta-llama/Llama-3.3-70B-Instruct", "fp8_channel"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B", "gptq"),
        ("RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-quantized.w8a8",
         "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "int8"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B", "int4"),
        ("nvidia/Llama-3.1-8B-Instruct-NVFP4", "meta-llama/Llama-3.1-8B", "nvfp4"),
        ("unsloth/Llama-3.2-1B-Instruct-GGUF", "meta-llama/Llama-3.2-1B", None),
        ("unsloth/Qwen2.5-3B-Instruct-unsloth-bnb-4bit", "Qwen/Qwen2.5-3B", "bnb4"),
        ("Llama-3.1-8B-Instruct-Q4_K_M", "meta-llama/Llama-3.1-8B", "q4_k_m"),
        ("gemma-3-27b-it-qat-q4_0", "google/gemma-3-27b-it", "q4_0"),
        ("zai-org/GLM-5.1 (NVFP4)", "zai-org/GLM-5", "nvfp4"),
        ("google/gemma-2-2b (full part)", "google/gemma-2-2b", None),
        ("meta-llama/Llama-3.1-8B-Instruct + EAGLE", "meta-llama/Llama-3.1-8B", None),
        ("cyankiwi/Kimi-Linear-48B-A3B-Instruct-AWQ-4bit", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "awq"),
    ],
)  # fmt: skip
def test_variants_have_the_shape_of_their_base(name, row_id, scheme):
    match = catalogue.find(name)
    assert (match.row.id, match.scheme) == (row_id, scheme)
    assert catalogue.model(name).dtype == scheme or scheme is None


def test_unknown_names_get_the_nearest():
    with pytest.raises(UnknownName, match=r"nearest: .*qwen3-8b"):
        catalogue.model("qwen3-8bb")
    for hostile in ("", " ", "-" * 5000, "/", "(((", "\0", "q4_k_m", "../../etc/passwd", "instruct-" * 500):
        start = time.perf_counter()
        with pytest.raises(UnknownName):
            catalogue.find(hostile)
        assert time.perf_counter() - start < 1.0


@pytest.mark.skipif(not LOGS.exists(), reason="the published start-up logs are not beside this checkout")
def test_every_model_of_the_logs_is_known():
    for file in (LOGS, BLOCKS):
        for line in file.read_text().splitlines():
            name = json.loads(line)["model"]
            if not any(word in name for word in NOT_A_MODEL):
                catalogue.find(name)


def test_a_model_is_found_quickly_in_a_fresh_process():
    code = (
        "import time; from kvledger.data import catalogue; t = time.process_time();"
        "catalogue.model('deepseek-v3'); print(time.process_time() - t)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    assert min(times) < 0.05


# ---------------------------------------------------------------------------------------------- resolving


def test_paths_come_before_names(tmp_path):
    config = dict(catalogue.find("qwen3-0.6b").row.config)
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert resolve_model(str(folder)).num_params == 596_049_920
    assert resolve_model(str(folder / "config.json")).name == "qwen3-8b"
    assert resolve_model("qwen3-8b").num_params == 8_190_735_360


def test_a_folder_of_safetensors_gives_exact_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(catalogue.find("qwen3-0.6b").row.config))
    for name, size in (("model-1.safetensors", 1000), ("model-2.safetensors", 24)):
        (tmp_path / name).write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(size))
    model = resolve_model(str(tmp_path))
    assert model.weight_bytes == 1024
    assert weight_bytes(model).total == 1024
    assert weight_bytes(model, "fp32").total == 4 * model.num_params
    (tmp_path / "model-2.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(DamagedFile, match=r"model-2\.safetensors"):
        resolve_model(str(tmp_path))


def test_a_path_that_is_not_there_is_not_looked_up_elsewhere():
    with pytest.raises(ConfigError, match="there is no file"):
        resolve_model("./qwen3-8b")
    with pytest.raises(ConfigError, match="there is no file"):
        resolve_model("model.gguf")


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"0 GGUF files and no config\.json"):
        model_at(tmp_path)


def test_a_hub_id_offline_is_a_clear_error(monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise OSError("no such host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kvledger.weights.fetch_hub.getproxies", dict)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    start = time.perf_counter()
    with pytest.raises(FetchError, match=r"somebody/unheard-of-7b: its config\.json could not be fetched"):
        resolve_model("somebody/unheard-of-7b")
    with pytest.raises(FetchError, match="the bundled catalogue has it as 'Qwen/Qwen3-8B'"):
        resolve_model("hf:Qwen/Qwen3-8B")
    assert time.perf_counter() - start < 5


def test_names_that_cannot_be_paths():
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(UnknownName):
            resolve_model(name)
