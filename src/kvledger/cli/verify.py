"""`kvledger verify`: case files, start-up logs and metrics endpoints set beside the plan, every difference named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvledger.cli.output import columns, emit, emit_json, say
from kvledger.errors import ConfigError

if TYPE_CHECKING:
    from kvledger.plan.verify.checks import Check, Verdict

app = typer.Typer(add_completion=False)

_MARKS = {"ok": "ok", "explained": "explained", "off": "OFF", "skipped": "skipped"}


@app.command()
def verify(
    log: Path = typer.Argument(None, help="A start-up log of vLLM, SGLang, llama.cpp or TensorRT-LLM."),
    cases: Path = typer.Option(None, "--cases", help="JSON lines: an allocator's answers or figures of logs."),
    metrics: str = typer.Option(None, "--metrics", help="URL of a running vLLM's or kvledger's /metrics."),
    model: str = typer.Option(None, "--model", help="The model, where the log does not name it."),
    device: str = typer.Option(None, "--device", help="The device, where the log does not name it."),
    tp: int = typer.Option(None, "--tp", min=1, help="Tensor parallel size, where the log does not say."),
    as_json: bool = typer.Option(False, "--json", help="Everything as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="With --cases: only rows that do not simply agree."),
) -> None:
    """Plan against fact: a start-up log, a metrics endpoint or case files.

    Exit 1 where a row of --cases is outside its tolerance or is no case, or where a figure of a log is off and no
    cause was found.
    """
    if sum(x is not None for x in (log, cases, metrics)) != 1:
        raise ConfigError("give one of: a log file, --cases FILE.jsonl, --metrics URL")
    if cases is not None:
        off = _cases(cases, as_json, quiet)
    else:
        off = _log(log, metrics, model, device, tp, as_json)
    if off:
        raise typer.Exit(1)


def _cases(path: Path, as_json: bool, quiet: bool) -> bool:
    from kvledger.plan.verify.cases import run_cases, summarise, verdict_json

    cases = run_cases(path)
    total = summarise(cases.verdicts.values(), len(cases.damaged))
    for number, why in cases.damaged.items():
        say(f"{path}, line {number}: {why}")
    if as_json:
        damaged = [{"line": number, "why": why} for number, why in cases.damaged.items()]
        verdicts = [verdict_json(v) for v in cases.verdicts.values()]
        emit_json({"summary": total.to_json(), "rows": verdicts, "damaged": damaged})
        return not total.is_clean
    rows: list[tuple[str, ...]] = [("row", "model", "figure", "expected", "ours", "difference", "", "")]
    for number, verdict in cases.verdicts.items():
        shown = [c for c in verdict.checks if not quiet or c.status in ("off", "explained")]
        rows += [_line(verdict, c, verdict.record.label or str(number)) for c in shown]
    for line in _table(rows):
        emit(line)
    emit()
    emit(
        f"{total.rows} rows: {total.ok} figures agree, {total.explained} are outside and explained, "
        f"{total.off} are off, {total.skipped} skipped"
        + (f"; lines that are no case: {total.damaged:,}" if total.damaged else "")
    )
    if total.budgets:
        emit(
            f"available KV memory from device, weights and utilisation: mean absolute error "
            f"{100 * total.budget_error:.2f} % over {total.budgets} records, {total.budgets_inside} inside the band; "
            f"{total.contradictory} more contradict themselves"
        )
    return not total.is_clean


def _line(verdict: Verdict, check: Check, label: str) -> tuple[str, ...]:
    gap = "" if check.difference is None else f"{100 * check.difference:+.2f} %"
    name = f"{verdict.record.model[:44]} tp{verdict.record.tp}"
    band = f"band {check.band[0]:g} to {check.band[1]:g}; " if check.band else ""
    return (label, name, check.name, _figure(check.expected), _figure(check.ours), gap, _MARKS[check.status],
            (band + check.cause).rstrip("; "))  # fmt: skip


def _figure(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value if len(value) <= 40 else value[:37] + "…"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4f}".rstrip("0")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligned columns; the last one, words, is left as it is."""
    left = columns([row[:-1] for row in rows])
    return [f"{line}  {row[-1]}".rstrip() for line, row in zip(left, rows, strict=True)]


def _log(
    path: Path | None, url: str | None, model: str | None, device: str | None, tp: int | None, as_json: bool
) -> bool:
    from kvledger.plan.verify.reconcile import reconcile, report_json, report_lines

    report = reconcile(path, url, model, device, tp)
    if as_json:
        emit_json(report_json(report))
    else:
        for line in report_lines(report):
            emit(line)
    return any(v.is_off for v in report.verdicts)
