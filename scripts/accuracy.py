"""Write docs/accuracy.md: the plan against an allocator's answers and start-up logs, every miss with its cause.

    python scripts/accuracy.py ../shared/cases docs/accuracy.md

The folder holds vllm_kv_blocks.jsonl and engine_logs.jsonl. Nothing in the page is typed by hand but its frame.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fit_overheads import errors, fit, graph_error, left_out, load

from kvledger.errors import KvledgerError
from kvledger.plan.profiles.overhead import FITTED, Constants
from kvledger.plan.verify.cases import run_cases, summarise
from kvledger.plan.verify.checks import Check, Verdict
from kvledger.plan.verify.reconcile import reconcile, report_lines
from kvledger.plan.verify.record import Record
from kvledger.plan.verify.shapes import shape_of
from kvledger.spec.weights import stage_weights
from kvledger.units import GIB

FRAME = """\
# Accuracy of the plan

*Written by `python scripts/accuracy.py CASES docs/accuracy.md`; the figures are computed at that moment.*

Two kinds of facts are set beside the plan. An **allocator's answers**: vLLM 0.32's own KV cache allocator, asked
without weights or GPU. **Start-up logs** that people published: what vLLM, SGLang, llama.cpp and TensorRT-LLM printed
of their memory. `kvledger verify --cases FILE.jsonl` runs either kind and exits 1 where a row is outside its
tolerance, with or without a known cause, or is no case; such a row is told with its line, and the others are judged.
"""
FIELDS = """
## Fields

A row is one JSON object a line. Allocator rows: `engine` ("vllm 0.32.0"), `model`, `tp`, `kv_cache_dtype`,
`block_size`, `available_kv_bytes`, `max_model_len`, `max_num_batched_tokens`; expected `num_blocks`, `kv_tokens`,
`max_concurrency`, `groups`. Log rows: `engine`, `engine_version`, `model`, `gpu`, `tp`, `pp`, `dcp`,
`gpu_memory_utilization`, `max_model_len`, `kv_cache_dtype`, `block_size`, `weights_gib`, `activation_gib`,
`non_torch_gib`, `available_kv_gib`, `kv_tokens`, `num_blocks`, `cpu_blocks`, `max_concurrency`, `kv_size_mib_total`,
`kv_size_mib_k`, `kv_size_mib_v`; whatever is missing is not checked.

With `--json`: `summary` (`rows`, `ok`, `explained`, `off`, `skipped`, `budgets`, `budget_error`, `budgets_inside`,
`contradictory`, `damaged`), `rows`, each with `id`, `engine`, `engine_version`, `model`, `tp`, `shape`, `outside` and
`checks` of `figure`, `expected`, `ours`, `difference`, `tolerance`, `band`, `status`, `cause`, and `damaged`, each with
`line` and `why`.

Status `ok`: within tolerance. `explained`: outside, and a named cause makes every figure of the row agree. `off`:
outside without one. `skipped`: the row has no pair of figures that the rules connect, or no known shape.
"""


def page(folder: Path) -> Iterator[str]:
    """The page, block by block."""
    exact = every_row(folder / "vllm_kv_blocks.jsonl")
    logs = every_row(folder / "engine_logs.jsonl")
    yield FRAME
    yield from exact_part(exact)
    yield from capacity_part(logs)
    yield from budget_part(logs)
    yield from weights_part(logs)
    yield from constants_part(folder / "engine_logs.jsonl")
    yield from misses_part(logs)
    yield from sample_part()
    yield FIELDS


def every_row(path: Path) -> list[Verdict]:
    cases = run_cases(path)
    if cases.damaged:
        raise SystemExit(f"{path}: rows that are no cases: {cases.damaged}")
    return list(cases.verdicts.values())


def exact_part(verdicts: Sequence[Verdict]) -> Iterator[str]:
    checks = [c for v in verdicts for c in v.checks]
    equal = sum(c.status == "ok" for c in checks)
    models = len({v.record.model for v in verdicts})
    yield (
        f"## vLLM's allocator\n\n{len(verdicts)} rows of {models} models: {equal} of {len(checks)} figures "
        "(blocks, tokens, concurrency to four decimals, groups of layers) are equal. `tests/vllm_allocator.jsonl` "
        "holds 65 more, of random mixes of layers that no published model has.\n"
    )


def capacity_part(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Figures that follow from memory the log reports."""
    yield "## Capacity, given the memory that the log reports\n"
    yield "Tolerance 1 % and the rounding of the log.\n"
    yield "| engine | figure | agree | explained | off |\n|---|---|---|---|---|"
    table: Counter[tuple[str, str, str]] = Counter()
    for verdict in verdicts:
        for check in verdict.checks:
            if check.name != "available_gib" and check.status != "skipped":
                table[verdict.record.engine, check.name, check.status] += 1
    for engine, figure in sorted({(e, f) for e, f, _ in table}):
        counts = [str(table[engine, figure, s]) for s in ("ok", "explained", "off")]
        yield f"| {engine} | {figure} | {' | '.join(counts)} |"
    skipped = sum(all(c.status == "skipped" for c in v.checks) for v in verdicts)
    yield f"\n{skipped} of {len(verdicts)} rows are skipped: no pair of figures that the rules connect, or no shape.\n"


def budgets(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, Check]]:
    """All predicted budgets."""
    return [(v, c) for v in verdicts for c in v.checks if c.name == "available_gib"]


def budget_part(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Available memory from device, weights and utilisation alone."""
    total, found = summarise(verdicts), budgets(verdicts)
    every = [abs(c.difference or 0.0) for _, c in found]
    yield (
        "## Available KV memory, given device, weights and utilisation alone\n\n"
        f"{total.budgets} records: mean absolute error **{100 * total.budget_error:.2f} %**, "
        f"{total.budgets_inside} inside the printed band ({100 * total.budgets_inside / total.budgets:.0f} %). "
        f"{total.contradictory} further records contradict themselves (their parts add up to another utilisation than "
        f"they state); with those the mean is {100 * sum(every) / len(every):.2f} % over {len(every)}.\n"
    )
    yield "| id | model | version | TP | PP | utilisation | logged GiB | ours GiB | error | band GiB | |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for verdict, c in found:
        r = verdict.record
        low, high = c.band or (0.0, 0.0)
        mark = {"ok": "inside", "off": "**outside**", "explained": "contradicts itself"}[c.status]
        yield (
            f"| {r.label} | {r.model} | {r.engine_version or '–'} | {r.tp} | {r.pp} | {r.memory_fraction} | "
            f"{c.expected} | {c.ours} | {100 * (c.difference or 0.0):+.2f} % | {low} to {high} | {mark} |"
        )
    yield ""


def weights_part(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Weights counted from shapes against those logged."""
    gaps = sorted(abs(g) for v in verdicts if (g := weights_gap(v.record)) is not None)
    close = sum(g < 0.01 for g in gaps)
    yield (
        f"## Weights, counted from shapes\n\n{len(gaps)} records name model and weights: median error "
        f"{100 * gaps[len(gaps) // 2]:.2f} %, {close} within 1 %. The large ones load another scheme than the name "
        "says, pad matrices (mxfp4 kernels round 2,880 up to 3,072), or offload.\n"
    )


def weights_gap(record: Record) -> float | None:
    """Relative error of the first stage's weights; None where the record or the catalogue does not say enough."""
    try:
        shape = shape_of(record)
        if record.weights_gib is None or shape.is_sharded:
            return None
        scheme = "fp32" if record.kv_dtype == "fp32" else None
        return stage_weights(shape.model, scheme, record.tp, record.pp)[0].total / GIB / record.weights_gib - 1
    except KvledgerError:
        return None


def constants_part(path: Path) -> Iterator[str]:
    """What was fitted, and how it carries over to models left out."""
    samples = load(path)
    constants = fit(samples)
    yield "## What is fitted\n"
    yield (
        "The shapes of the terms follow from what vLLM's profiling pass does: the widest layer over "
        "`max_num_batched_tokens`, then a sampler over `max_num_seqs` rows of logits, whichever peak is larger, with "
        "the expert kernel's buffers beside it. The constants are fitted to the records with an activation or "
        "non-torch figure by `scripts/fit_overheads.py` (least absolute deviations); the first era has few records.\n"
    )
    yield "| constant | in use | fitted now |\n|---|---|---|"
    for name in Constants.__slots__:
        unit, scale = ("", 1.0) if name.startswith(("logit", "hidden")) else (" GiB", GIB)
        yield f"| `{name}` | {getattr(FITTED, name) / scale:.3f}{unit} | {getattr(constants, name) / scale:.3f}{unit} |"
    yield ""
    for label, found in (("in sample", errors(samples, constants)), ("each model left out", left_out(samples))):
        sizes = [abs(e) for e, _ in found]
        inside = sum(ok for _, ok in found)
        mean, worst = 100 * sum(sizes) / len(sizes), 100 * max(sizes)
        yield f"- {label}: {len(found)} records, mean {mean:.2f} %, worst {worst:.1f} %, {inside} inside the band"
    graphs = 100 * graph_error(samples, FITTED)
    yield (
        f"\nCUDA graphs are fitted to those that 0.19 captured after the pool (mean error {graphs:.0f} %; mixtures of "
        "experts take more). That the estimate taken off the budget since 0.21 is as large is an assumption; so are "
        "the non-torch memory of TP > 1 before 0.19 and every overhead of SGLang, llama.cpp and TensorRT-LLM. "
        "Most records are one sweep on one kind of device (H100): leaving a model out says little about other "
        "devices, so bands are half as wide again there.\n"
    )


def misses_part(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Everything outside its tolerance."""
    yield "## Misses, each with its cause\n"
    yield "| id | model | figure | logged | ours | difference | cause |\n|---|---|---|---|---|---|---|"
    for verdict in verdicts:
        for c in verdict.checks:
            if c.status in ("off", "explained"):
                yield _miss(verdict, c)
    yield ""


SAMPLE = """\
Initializing a V1 LLM engine (v0.24.0) with config: model='Qwen/Qwen3.6-35B-A3B', kv_cache_dtype=fp8, max_seq_len=131072
Chunked prefill is enabled with max_num_batched_tokens=8192.
Available KV cache memory: 5.98 GiB
GPU KV cache size: 567,978 tokens
Maximum concurrency for 131,072 tokens per request: 4.33x
"""


def sample_part() -> Iterator[str]:
    """A log and what `kvledger verify` says of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        path.write_text(SAMPLE, encoding="utf-8")
        said = "\n".join(report_lines(reconcile(path, None, None, None, None)))
    yield f"## A log, reconciled\n\n`kvledger verify server.log` of\n\n```\n{SAMPLE}```\n\nsays\n\n```\n{said}\n```\n"
    yield (
        "`--model`, `--device` and `--tp` say what a log leaves out; `--metrics URL` reads a running server's "
        "`cache_config_info` instead of a file.\n"
    )


def _miss(verdict: Verdict, c: Check) -> str:
    r = verdict.record
    gap = "" if c.difference is None else f"{100 * c.difference:+.1f} %"
    said = f" (the record: {r.explanation[:200]})" if c.status == "off" and r.explanation else ""
    cause = c.cause or f"not found{said}"
    return f"| {r.label} | {r.model} | {c.name} | {_text(c.expected)} | {_text(c.ours)} | {gap} | {cause} |"


def _text(value: float | str | None) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text("\n".join(page(Path(sys.argv[1]))) + "\n", encoding="utf-8")
