"""`plan`, `ledger`, `devices` and `deploy` as a person calls them: data on stdout, one sentence for a mistake."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from kvledger.cli.main import main


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))

    def call(*args):
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return call


def test_plan_in_words(run):
    code, out, _ = run("plan", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "4", "--context", "8k")
    assert code == 0
    for words in ("W weights", "K KV pool", "requests at 8,192 tokens", "TTFT floor", "best lever", "cost per million"):
        assert words in out
    assert "\x1b" not in out


def test_plan_as_json(run):
    code, out, err = run("plan", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["tp"] == 4
    assert found["levers"][0]["requests_gain"] > 1


def test_plan_explained(run):
    _, out, _ = run("plan", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "4", "--explain")
    assert "formula       kv_bytes_per_token = 2 × L × H_kv × d_h × b" in out
    assert "substituted   2 × 80 × 8 × 128 × 2" in out
    assert "(assumed)" in out


def test_plan_with_all_six_ledgers(run):
    args = ("plan", "gemma-3-27b", "--device", "h100-sxm", "--ledgers")
    _, out, _ = run(*args, "--json")
    found = json.loads(out)["ledgers"]
    assert list(found) == ["recompute", "bytes", "concurrency", "bandwidth", "compression", "allocation"]
    _, out, _ = run(*args)
    assert "What the cache saves" in out
    assert "Where KV memory is wasted" in out


def test_plan_as_the_lesson_counts(run):
    args = ("plan", "llama-2-70b", "--device", "h100-sxm", "--tp", "2", "--context", "8192")
    code, _, err = run(*args)
    assert code == 1
    assert "--allow-long-context" in err
    _, out, _ = run(*args, "--as-lesson", "--json")
    rows = {r[0]: r[3]["value"] for r in json.loads(out)["tables"][0]["rows"]}
    assert rows == {"2,048": 25, "4,096": 12, "8,192": 6, "32,768": 1}
    _, out, _ = run(*args, "--as-lesson", "--json", "--kv-dtype", "fp8")
    assert json.loads(out)["tables"][0]["rows"][2][3]["value"] == 12


def test_plan_page(run, tmp_path):
    file = tmp_path / "plan.html"
    code, out, err = run("plan", "llama-3.1-70b", "--device", "h100-sxm", "--tp", "4", "--html", str(file))
    assert (code, out) == (0, "")
    assert "written" in err
    page = file.read_text(encoding="utf-8")
    assert "<script src" not in page
    assert "Plotly.newPlot" in page
    assert page.count("<details>") > 26
    assert page.count("Ledger ") >= 6


def test_engines_side_by_side(run):
    code, out, _ = run("plan", "llama-3.1-8b", "--device", "h100-sxm", "--compare")
    assert code == 0
    assert all(engine in out for engine in ("vllm", "sglang", "llama.cpp", "tensorrt-llm"))


def test_find_in_words_json_and_page(run, tmp_path):
    args = (
        "plan",
        "qwen3-8b",
        "--target",
        "concurrency=16 context=4k tpot=50ms",
        "--find",
        "--devices",
        "h100-sxm, l40s",
    )
    _, out, _ = run(*args)
    assert "cheapest: " in out
    assert "x meets the target" in out
    file = tmp_path / "find.html"
    _, out, _ = run(*args, "--json", "--html", str(file))
    found = json.loads(out)
    assert found["best"]["requests_at_context"] >= 16
    assert "Pareto front" in file.read_text(encoding="utf-8")
    _, out, _ = run(*args, "--json", "--tp", "2", "--weights", "awq", "--kv-dtype", "fp8")
    shapes = {(c["tp"], c["weights"], c["kv_dtype"]) for c in json.loads(out)["meeting"]}
    assert shapes == {(2, "awq", "fp8")}


@pytest.mark.parametrize("name", ["recompute", "bytes", "concurrency", "bandwidth", "compression", "allocation"])
def test_ledgers(run, name):
    args = ("ledger", name, "llama-3.1-8b", "--tp", "2")
    code, out, _ = run(*args)
    assert code == 0
    assert out
    _, out, _ = run(*args, "--json")
    assert json.loads(out)["ledger"] == name
    _, out, _ = run(*args, "--explain")
    assert "formula" in out


def test_ledger_without_a_name_lists_them(run):
    _, out, _ = run("ledger")
    assert [line.split()[0] for line in out.splitlines()] == [
        "recompute", "bytes", "concurrency", "bandwidth", "compression", "allocation",
    ]  # fmt: skip


def test_devices(run):
    _, out, _ = run("devices")
    assert "h100-sxm" in out
    _, out, _ = run("devices", "--json")
    assert len(json.loads(out)) >= 37
    _, out, err = run("devices", "local")
    assert "--measure" in out + err


def test_a_measurement_becomes_the_local_device(run, monkeypatch):
    found = {"threads": 2, "read_bytes_per_s": {1: 14e9, 2: 26e9}, "peak_ops_per_s": {"int8": 9e11, "fp32": 1e11}}
    monkeypatch.setitem(sys.modules, "kvledger.kernels.ceilings", SimpleNamespace(measure_ceilings=lambda: found))
    code, out, _ = run("devices", "--measure", "--json")
    row = json.loads(out)[0]
    assert (code, row["measured"], row["bandwidth_bytes_per_s"]) == (0, True, 26e9)
    assert row["peak_flops"] == {"int8": 9e11, "fp32": 1e11}
    _, out, _ = run("plan", "smollm2", "--json")
    assert json.loads(out)["warnings"] == []


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_deploy_carries_the_plan(run, engine):
    args = ("deploy", "qwen3-8b", "--device", "h100-sxm", "--engine", engine, "--context", "8k", "--kv-dtype", "fp8")
    code, out, _ = run(*args)
    assert code == 0
    words = shlex.split(out.replace("\\\n", " "))
    flag = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests", "llama.cpp": "--parallel"}[engine]
    _, planned, _ = run("plan", *args[1:], "--json")
    assert int(words[words.index(flag) + 1]) == json.loads(planned)["batch"]


def test_deploy_kvledger(run):
    _, out, _ = run("deploy", "smollm2", "--context", "2048", "--kv-memory", "1GiB", "--kv-dtype", "int8")
    words = shlex.split(out.replace("\\\n", " "))
    assert words[:2] == ["kvledger", "serve"]
    assert words[words.index("--kv-memory") + 1] == "1024MiB"
    assert words[words.index("--kv-dtype") + 1] == "int8"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan", "nosuchmodel"), "unknown model"),
        (("plan", "qwen3-8b", "--device", "h1oo"), "nearest: h100"),
        (("plan", "qwen3-8b", "--context", "80GB"), "not a whole number"),
        (("plan", "qwen3-8b", "--context", "8k8"), "not a whole number"),
        (("plan", "qwen3-8b", "--kv-memory", "lots"), "80GiB"),
        (("plan", "llama-3.1-70b", "--device", "h100-sxm"), "nearest that fits"),
        (("plan", "qwen3-8b", "--target", "tpot=50ms"), "--find"),
        (("plan", "qwen3-8b", "--target", "nonsense", "--find"), "no part of a target"),
        (("plan", "qwen3-8b", "--workload", "1k/x"), "not a whole number"),
        (("plan", "/no/such/config.json"), "no file"),
        (("ledger", "nosuch"), "unknown ledger"),
        (("ledger", "bytes"), "needs a model"),
        (("devices", "tesla"), "unknown device"),
        (("deploy", "qwen3-8b", "--device", "h100-sxm", "--engine", "tensorrt-llm"), "engine to deploy"),
    ],
)  # fmt: skip
def test_one_sentence_for_a_mistake(run, args, words):
    code, out, err = run(*args)
    assert code == 1
    assert out == ""
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
