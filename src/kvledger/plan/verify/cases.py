"""Case files: one JSON object a line, either an allocator's answers or figures of start-up logs.

Reading is bounded in bytes and rows; a row that is no case is told with its line, and the others are judged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvledger.errors import DamagedFile, KvledgerError
from kvledger.plan.verify.checks import Check, Verdict, check
from kvledger.plan.verify.record import Record, from_row

MAX_BYTES = 256 << 20
MAX_LINE = 1 << 20
MAX_ROWS = 200_000


@dataclass(frozen=True, slots=True)
class Cases:
    """A file's rows by line number: judged, or damaged and why."""

    verdicts: Mapping[int, Verdict]
    damaged: Mapping[int, str]


def run_cases(path: Path) -> Cases:
    """Every row checked; one that is no case costs no other its verdict.

    Raises DamagedFile for what is no file, or too large, or has no row that is a case.
    """
    verdicts: dict[int, Verdict] = {}
    damaged: dict[int, str] = {}
    for number, line in _lines(path):
        try:
            verdicts[number] = check(_record(line))
        except KvledgerError as error:
            damaged[number] = str(error)
    if damaged and not verdicts:
        number, why = next(iter(damaged.items()))
        others = f"; {len(damaged) - 1:,} more lines, and none is a case" if len(damaged) > 1 else ""
        raise DamagedFile(f"{path}, line {number}: {why}{others}")
    return Cases(verdicts, damaged)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line that is not blank; of a line that is too long only the beginning."""
    if not path.is_file():
        raise DamagedFile(f"{path} is not a file")
    if path.stat().st_size > MAX_BYTES:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes; case files of up to {MAX_BYTES:,} are read")
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
            if number > MAX_ROWS:
                raise DamagedFile(f"{path} has more than {MAX_ROWS:,} rows")
            rest = line
            while len(rest) > MAX_LINE and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE + 1)
            if line.strip():
                yield number, line


def _record(line: bytes) -> Record:
    """Raises DamagedFile or ConfigError for what is no case."""
    if len(line) > MAX_LINE:
        raise DamagedFile(f"longer than {MAX_LINE:,} bytes")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"not JSON ({str(error)[:100]})") from None
    if not isinstance(row, dict) or "model" not in row:
        raise DamagedFile("not an object with a model; see docs/accuracy.md for the fields")
    try:
        return from_row(row)
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedFile(f"a field has the wrong kind ({str(error)[:100]})") from None


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of judged rows, of all their checks and of damaged rows; the error of predicted budgets (relative,
    absolute value).
    """

    rows: int
    ok: int
    explained: int
    off: int
    skipped: int
    budgets: int = 0
    budget_error: float = 0.0
    budgets_inside: int = 0
    contradictory: int = 0
    damaged: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every row was judged and every figure is within its tolerance."""
        return not (self.off or self.explained or self.damaged)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def summarise(verdicts: Collection[Verdict], num_damaged: int = 0) -> Summary:
    """Counts, and the mean absolute error of budgets over records that do not contradict themselves."""
    checks = [c for v in verdicts for c in v.checks]
    counts = {s: sum(c.status == s for c in checks) for s in ("ok", "explained", "off", "skipped")}
    budgets = [c for c in checks if c.name == "available_gib"]
    sound = [c for c in budgets if c.status != "explained"]
    errors = [abs(c.difference) for c in sound if c.difference is not None]
    return Summary(
        len(verdicts), counts["ok"], counts["explained"], counts["off"], counts["skipped"], len(sound),
        sum(errors) / len(errors) if errors else 0.0, sum(c.status == "ok" for c in sound),
        len(budgets) - len(sound), num_damaged,
    )  # fmt: skip


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """A row's result: stable keys, documented in docs/accuracy.md."""
    record = verdict.record
    return {
        "id": record.label, "engine": record.engine, "engine_version": record.engine_version, "model": record.model,
        "tp": record.tp, "shape": verdict.source, "checks": [check_json(c) for c in verdict.checks],
        "outside": verdict.is_outside,
    }  # fmt: skip


def check_json(check: Check) -> dict[str, Any]:
    """One figure."""
    return {
        "figure": check.name, "expected": check.expected, "ours": check.ours, "difference": check.difference,
        "tolerance": check.tolerance, "band": check.band, "status": check.status, "cause": check.cause,
    }  # fmt: skip
