"""Plans and searches on the terminal: the memory bar, groups of figures, contexts, levers. Plain without colour."""

from __future__ import annotations

from typing import Any

from kvledger.cli.tables import ASSUMED, console, figures_grid, rich_table
from kvledger.plan.explain import dress
from kvledger.plan.ledger import Table
from kvledger.plan.ledgers import lever_table
from kvledger.plan.outcome import Outcome
from kvledger.plan.planner import Plan, band_note
from kvledger.plan.search import Candidate, Found

BAR = 60  # characters of the memory bar
SHOWN = 10  # candidates and levers on the screen; --json has all


def show_plan(plan: Plan) -> None:
    """Everything a person asks first, in the order they ask it."""
    out, query, outcome = console(), plan.query, plan.outcome
    out.print(headline(outcome), style="bold", markup=False)
    for warning in plan.warnings:
        out.print(f"warning: {warning}", markup=False)
    out.print()
    for line in memory_bar(outcome):
        out.print(line, markup=False)
    for title, figures in plan.groups:
        out.print(f"\n[bold]{title}[/bold]")
        out.print(figures_grid(figures))
    if note := band_note(outcome.memory):
        low, high = outcome.requests_band
        out.print(f"\nKV budget {note}: {low:,} to {high:,} requests")
    out.print(f"\na decode step is bound by {outcome.speed.step.bound}")
    out.print()
    out.print(rich_table(plan.by_context))
    out.print(rich_table(lever_table(plan.levers[:SHOWN])))
    best = next(iter(plan.levers), None)
    if best is not None:
        flags = f" ({best.change.flags})" if best.change.flags else ""
        out.print(f"best lever: {best.change.name}{flags}: {best.requests_gain:.2f} × the requests", markup=False)
    for reason in outcome.memory.reasons:
        out.print(f"· {reason}", markup=False)
    for line in outcome.memory.lines:
        out.print(f"{query.engine} would log: {line}", markup=False)
    out.print(ASSUMED)


def headline(outcome: Outcome) -> str:
    """`meta-llama/Llama-3.1-70B on 2 × h100-sxm (TP 2), vllm`."""
    query = outcome.query
    spread = " ".join(f"{n} {v}" for n, v in (("TP", query.tp), ("PP", query.pp), ("DP", query.dp)) if v > 1)
    devices = f"{query.num_devices} × {query.device.name}" + (f" ({spread})" if spread else "")
    return f"{query.model.name}, {query.scheme} weights, on {devices}, {query.engine}"


def memory_bar(outcome: Outcome) -> list[str]:
    """One device's memory as letters, and what they stand for."""
    memory = outcome.memory
    total = memory.total_bytes or memory.budget_bytes or memory.pool_bytes
    parts = [("W", "weights", memory.weights_bytes), ("O", "overhead", memory.overhead_bytes),
             ("K", "KV pool", memory.pool_bytes)]  # fmt: skip
    free = max(0, total - sum(size for _, _, size in parts))
    bar = "".join(letter * round(BAR * size / total) for letter, _, size in parts)[:BAR].ljust(BAR, "·")
    legend = [f"{letter} {name} {dress(size, 'B')} ({100 * size / total:.1f} %)" for letter, name, size in parts]
    legend.append(f"· free {dress(free, 'B')} ({100 * free / total:.1f} %)")
    return [f"[{bar}] {dress(total, 'B')}", "  ".join(legend)]


# ---------------------------------------------------------------------------------------------- searches


def show_found(found: Found) -> None:
    """The cheapest that meets the target, its like, and the Pareto front."""
    out = console()
    out.print(f"{found.num_tried:,} configurations tried, {len(found.meeting):,} meet the target")
    if found.meeting:
        out.print(f"cheapest: {found.meeting[0].name}", style="bold", markup=False)
        out.print(rich_table(candidate_table("meeting the target, cheapest first", found.meeting[:SHOWN])))
    else:
        out.print("none meets the target; nearest:", style="bold")
        out.print(rich_table(candidate_table("nearest to the target", found.near[:SHOWN])))
    out.print(rich_table(candidate_table("Pareto front: price against TPOT", found.front[:SHOWN])))
    for line in front_plot(found):
        out.print(line, markup=False)
    out.print("prices are assumed unless given; times are floors")


def candidate_table(title: str, candidates: tuple[Candidate, ...]) -> Table:
    """One line per candidate."""
    columns = ("configuration", "$/h", "requests", "TPOT", "TTFT", "tokens/s", "$/M tokens", "misses")
    return Table(title, columns, tuple(_line(c) for c in candidates))


def _line(candidate: Candidate) -> tuple[str, ...]:
    outcome, cost = candidate.outcome, candidate.outcome.cost_per_million
    price = outcome.price_per_hour
    return (
        candidate.name,
        "?" if price is None else f"{price:.2f}",
        f"{outcome.total_requests:,}",
        dress(outcome.speed.tpot_sustained_s, "s"),
        dress(outcome.speed.ttft_s, "s"),
        f"{outcome.tokens_per_s:,.0f}",
        "?" if cost is None else f"{cost:.2f}",
        "; ".join(candidate.misses),
    )


def front_plot(found: Found, width: int = 64, height: int = 12) -> list[str]:
    """The Pareto front as characters: price to the right, TPOT upwards, both logarithmic; x marks the target met."""
    from math import log

    points = [(log(c.price_per_hour), log(c.outcome.speed.tpot_sustained_s), not c.misses) for c in found.front]
    if len(points) < 2:
        return []
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in list(zip(*points, strict=True))[:2])
    grid = [[" "] * width for _ in range(height)]
    for x, y, met in points:
        column, row = round((x - x0) / (x1 - x0 or 1) * (width - 1)), round((y1 - y) / (y1 - y0 or 1) * (height - 1))
        grid[row][column] = "x" if met else "o"
    top, low = (dress(found.front[i].outcome.speed.tpot_sustained_s, "s") for i in (0, -1))
    left, right = (f"${found.front[i].price_per_hour:.2f}/h" for i in (0, -1))
    lines = ["".join(row).rstrip() for row in grid]
    lines[0], lines[-1] = f"{lines[0]}  TPOT {top}".rstrip(), lines[-1].ljust(width) + f"  {low}"
    return ["|" + line for line in lines] + ["+" + "-" * width, f" {left.ljust(width - len(right))}{right}",
                                             " x meets the target, o does not"]  # fmt: skip


def found_json(found: Found) -> dict[str, Any]:
    """A search as a JSON object."""
    target = {name: getattr(found.target, name) for name in found.target.__dataclass_fields__}
    return {
        "target": target,
        "num_tried": found.num_tried,
        "num_meeting": len(found.meeting),
        "best": candidate_json(found.meeting[0]) if found.meeting else None,
        "meeting": [candidate_json(c) for c in found.meeting[:50]],
        "near": [candidate_json(c) for c in found.near],
        "front": [candidate_json(c) for c in found.front],
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A candidate as a JSON object: the keys of a plan, without its accounts."""
    query, outcome = candidate.query, candidate.outcome
    return {
        "name": candidate.name,
        "device": query.device.name,
        "num_devices": query.num_devices,
        "tp": query.tp,
        "pp": query.pp,
        "dp": query.dp,
        "weights": query.scheme,
        "kv_dtype": query.kv_dtype,
        "price_per_hour": outcome.price_per_hour,
        "requests_at_context": outcome.total_requests,
        "batch": outcome.speed.batch,
        "step_time_s": outcome.speed.step.seconds,
        "bound": outcome.speed.step.bound,
        "tpot_s": outcome.speed.tpot_s,
        "tpot_sustained_s": outcome.speed.tpot_sustained_s,
        "ttft_s": outcome.speed.ttft_s,
        "tokens_per_s": outcome.tokens_per_s,
        "cost_per_million_tokens": outcome.cost_per_million,
        "misses": list(candidate.misses),
    }
