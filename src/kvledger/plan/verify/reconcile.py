"""A log or a metrics endpoint beside the plan: figures, where the bytes go, what the figures imply, causes by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvledger.errors import ConfigError, KvledgerError
from kvledger.plan.profiles.base import Allocation
from kvledger.plan.verify.cases import verdict_json
from kvledger.plan.verify.checks import Check, Verdict, allocate, check, known_bytes, setup_of
from kvledger.plan.verify.implied import implications
from kvledger.plan.verify.logs import Log, parse_log, read_lines
from kvledger.plan.verify.metrics import scrape
from kvledger.plan.verify.record import Record
from kvledger.plan.verify.residuals import Account, account, remarks
from kvledger.plan.verify.shapes import Shape, shape_of


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One pool of a log: its checks, the account of its bytes, and sentences."""

    verdict: Verdict
    account: Account | None
    implied: tuple[str, ...]
    remarks: tuple[str, ...]
    lines: tuple[str, ...]  # what the engine would print by our rules


@dataclass(frozen=True, slots=True)
class Report:
    """All of a log."""

    log: Log
    pools: tuple[Reconciled, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return tuple(p.verdict for p in self.pools)


def reconcile(path: Path | None, url: str | None, model: str | None, device: str | None, tp: int | None) -> Report:
    """Read a log (or scrape an endpoint) and set it beside the rules. Arguments replace what it says.

    Raises DamagedFile, FetchError, ConfigError.
    """
    if path is not None:
        log = parse_log(read_lines(path))
    elif url is not None:
        log = scrape(url)
    else:
        raise ConfigError("a log file or a metrics URL is needed")
    told: dict[str, Any] = {k: v for k, v in (("model", model), ("gpu", device), ("tp", tp)) if v is not None}
    least = log.facts.get("available_gib_least")
    return Report(log, tuple(_reconciled(replace(r, **told), least) for r in log.records))


def _reconciled(record: Record, least_gib: float | None) -> Reconciled:
    """Blocks follow the rank with least memory, so capacity is checked with that."""
    used = record if least_gib is None else replace(record, available_gib=least_gib)
    verdict = check(used)
    try:
        shape: Shape | None = shape_of(used)
    except KvledgerError:
        shape = None
    ours = _allocation(used, shape)
    books = account(used, ours) if ours is not None and used.engine in ("vllm", "tensorrt-llm") else None
    return Reconciled(
        verdict, books, tuple(implications(used, shape, ours, books)),
        tuple(remarks(record, ours, least_gib)) if ours else (), ours.lines if ours else (),
    )  # fmt: skip


def _allocation(record: Record, shape: Shape | None) -> Allocation | None:
    if shape is None:
        return None
    try:
        available = known_bytes(record, shape)
        return allocate(record, shape, setup_of(record, shape, available)) if available else None
    except KvledgerError:
        return None


# ---------------------------------------------------------------------------------------------- as text and JSON


def report_lines(report: Report) -> Iterator[str]:
    """The report for a terminal."""
    log = report.log
    version = f" {log.facts['version']}" if "version" in log.facts else ""
    yield f"{log.engine}{version}: {log.num_lines:,} lines read"
    for pool in report.pools:
        yield ""
        yield from _pool_lines(pool)


def _pool_lines(pool: Reconciled) -> Iterator[str]:
    record = pool.verdict.record
    part = f", {record.part} layers" if record.part else ""
    yield f"{record.model or 'model not named (give --model)'}{part}, TP {record.tp}, KV {record.kv_dtype}"
    yield f"  {'figure':<18}{'log':>16}{'ours':>16}{'difference':>12}"
    for found in pool.verdict.checks:
        yield _check_line(found)
    if pool.account is not None:
        yield from _account_lines(pool.account)
    yield from _section("the figures imply", pool.implied)
    yield from _section("causes and rules", pool.remarks)
    yield from _section("this version would print", pool.lines)


def _check_line(found: Check) -> str:
    gap = "" if found.difference is None else f"{100 * found.difference:+.2f} %"
    cause = f"  {found.cause}" if found.cause else ""
    band = f"  band {found.band[0]:g} to {found.band[1]:g} GiB" if found.band else ""
    return f"  {found.name:<18}{_text(found.expected):>16}{_text(found.ours):>16}{gap:>12}  {found.status}{band}{cause}"


def _text(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value[:16]
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _account_lines(books: Account) -> Iterator[str]:
    yield "  where the bytes of a token go, per device"
    yield f"    {books.plain_bytes:>12,.0f} B  plain formula: every layer keeps every token"
    for residual in books.factors:
        yield f"    × {residual.factor:>10.4f}    {residual.name}: {residual.words}"
    implied = "" if books.implied_bytes is None else f"; the log implies {books.implied_bytes:,.0f} B"
    yield f"    {books.ours_bytes:>12,.0f} B  by these rules{implied}"


def _section(title: str, sentences: tuple[str, ...]) -> Iterator[str]:
    if sentences:
        yield f"  {title}"
        yield from (f"    {s}" for s in sentences)


def report_json(report: Report) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "engine": report.log.engine,
        "facts": report.log.facts,
        "pools": [
            {
                **verdict_json(p.verdict),
                "account": None if p.account is None else {
                    "plain_bytes_per_token": p.account.plain_bytes,
                    "factors": [{"name": r.name, "factor": r.factor, "cause": r.words} for r in p.account.factors],
                    "ours_bytes_per_token": p.account.ours_bytes,
                    "implied_bytes_per_token": p.account.implied_bytes,
                },
                "implied": list(p.implied), "remarks": list(p.remarks), "lines": list(p.lines),
            }
            for p in report.pools
        ],
    }  # fmt: skip
