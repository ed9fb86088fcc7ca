"""Every figure of the lesson, computed by the public ledgers: equal, or different for a stated reason."""

import tomllib
from functools import cache
from pathlib import Path

import pytest

from kvledger.data.catalogue import model
from kvledger.data.devices import find_device
from kvledger.plan import allocation, bandwidth, compression, concurrency, memory, recompute
from kvledger.plan.explain import Input, derive, evaluate, given
from kvledger.plan.timing import Timing, rank_weights
from kvledger.plan.weights import weights_figure
from kvledger.plan.workload import WORKLOADS
from kvledger.units import GB, GIB, KIB, MIB

FILE = tomllib.loads((Path(__file__).parent / "lesson_figures.toml").read_text(encoding="utf-8"))
FIGURES = FILE["figure"]
UNITS = {"1": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "GB": GB, "ms": 1e-3, "T": 1e12}


def _bytes(model, contexts=memory.CONTEXTS, as_lesson=False):
    return memory.bytes_ledger(
        _model(model).kv_layout(), weights_figure(_model(model), "bf16", name="weights_bytes"), contexts
    )


def _concurrency(model, tp=2, kv_dtype="bf16", memory_gb=80, weights_gb=70, overhead_gb=2, as_lesson=False):
    terms = [Input(n, v * GB, "B") for n, v in (("M", memory_gb), ("W", weights_gb), ("O", overhead_gb))]
    budget = concurrency.budget_figure(terms[0], terms[1], terms[2:])
    return concurrency.concurrency(_model(model).kv_layout(kv_dtype, tp=tp), budget, as_lesson=as_lesson)


def _weights_only(params, weights_gb, tp, as_lesson=False):
    return bandwidth.weights_only(params, weights_gb * GB, find_device("h100-sxm"), tp=tp)


def _batch(batch, as_lesson=False, **args):
    return {f.name: f for f in bandwidth.batch_row(_weights_only(**args), batch)}


def _steps(model, tp, context, batches, as_lesson=False):
    spec = _model(model)
    timing = Timing(spec, find_device("h100-sxm"), spec.kv_layout(tp=tp), rank_weights(spec, "bf16", tp), "bf16", tp)
    ledger = bandwidth.bandwidth(timing, context, batches)
    one, many = (ledger[f"step_time_s_{b}"].as_input(n) for b, n in zip(batches, "ab", strict=True))
    return {"growth": derive("growth", "×", "b ÷ a", one, many)}


def _ratio(ledger, left, right):
    return {"ratio": derive("ratio", "×", "a ÷ b", ledger[left].as_input("a"), ledger[right].as_input("b"))}


def _latent(as_lesson=False):
    ledger = compression.latent_saving()
    times = derive("times_left", "×", "1 ÷ x", ledger["left_of_it"].as_input("x"))
    return {f.name: f for f in (*ledger.figures, times)}


def _device(device, as_lesson=False):
    spec = find_device(device)
    sparse = derive("sparse_bf16", "FLOP/s", "2 × P", Input("P", spec.peak_flops["bf16"]))
    return {"memory_bytes": given("memory_bytes", spec.memory_bytes, "B"), "sparse_bf16": sparse}


def _model(name):
    return model(name)


def _per_device(model, tp, as_lesson=False):
    return {"weights_bytes_per_device": weights_figure(_model(model), "bf16", tp)}


CALLS = {
    "recompute": recompute.recompute,
    "bytes": _bytes,
    "compression": lambda model, as_lesson=False: compression.compression(_model(model)),
    "weights_per_device": _per_device,
    "device": _device,
    "concurrency": _concurrency,
    "ratio": lambda left, right, as_lesson=False, **a: _ratio(_concurrency(as_lesson=as_lesson, **a), left, right),
    "ratio2": lambda left, right, model, as_lesson=False: _ratio(compression.compression(_model(model)), left, right),
    "weights": _weights_only,
    "batch": _batch,
    "steps": _steps,
    "latent": _latent,
    "reservation": lambda used, reserved, as_lesson=False: {
        f.name: f for f in allocation.reservation(Input("used", used), Input("reserved", reserved))
    },
    "last_block": lambda block_size, as_lesson=False: {f.name: f for f in allocation.last_block(block_size)},
    "allocation": lambda workload, max_len, as_lesson=False: allocation.allocation(WORKLOADS[workload], max_len),
    "arithmetic": lambda formula, as_lesson=False: {"value": derive("value", "", formula)},
}


@cache
def _call(call, args, as_lesson):
    return CALLS[call](**{k: list(v) if isinstance(v, tuple) else v for k, v in args}, as_lesson=as_lesson)


def figure(row, as_lesson=False):
    args = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in row["args"].items())
    return _call(row["call"], args, as_lesson)[row["figure"]]


def value(row, as_lesson=False):
    return figure(row, as_lesson).value / UNITS[row.get("unit", "1")]


def agrees(number, lesson):
    """Whether `number`, rounded to as many digits as the lesson prints, is what it prints."""
    text = repr(lesson)
    digits = len(text.partition(".")[2]) if "." in text and "e" not in text else 0
    return abs(number - lesson) < 0.5 * 10**-digits


def ids(row):
    return f"{row['step']}: {row['what']}"


@pytest.mark.parametrize("row", FIGURES, ids=ids)
def test_exact_value(row):
    if "exact" in row:
        assert value(row) == pytest.approx(row["exact"], rel=1e-6)


@pytest.mark.parametrize("row", FIGURES, ids=ids)
def test_lesson_agrees_or_says_why(row):
    same = agrees(value(row), row["lesson"])
    assert same != ("why" in row), f"lesson {row['lesson']}, exact {value(row)}, why: {row.get('why')}"


@pytest.mark.parametrize("row", [r for r in FIGURES if r.get("as_lesson")], ids=ids)
def test_as_lesson_counts_as_the_lesson_does(row):
    assert agrees(value(row, as_lesson=True), row["lesson"])


@pytest.mark.parametrize("row", FIGURES, ids=ids)
def test_formula_gives_the_value(row):
    shown = figure(row)
    assert evaluate(shown.formula, {i.name: i.value for i in shown.inputs}) == pytest.approx(shown.value, rel=1e-12)


def test_all_of_the_lesson_is_here():
    assert len(FIGURES) >= 80
    assert {row["step"][0] for row in FIGURES} == set("123456")
    assert all(row["source"] for row in FILE["quoted"])


LESSON = Path(__file__).parents[2] / "shared" / "lesson" / "lesson-15.txt"


@pytest.mark.skipif(not LESSON.is_file(), reason="the lesson's text is not beside this checkout")
def test_figures_stand_in_the_lesson():
    text = LESSON.read_text(encoding="utf-8").replace(",", "").replace("\u202f", "")
    missing = [ids(r) for r in FIGURES if f"{r['lesson']:g}" not in text and str(r["lesson"]) not in text]
    # powers of ten and ratios that the lesson writes in words or other units
    assert len(missing) <= 0.1 * len(FIGURES), missing
