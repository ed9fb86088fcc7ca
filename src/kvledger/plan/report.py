"""One self-contained HTML page for a plan or a search: plots, tables, and the account of every figure.

Plots are plotly's, its script inside the page, so that the file opens anywhere without a network. plotly is imported
only here and only when a page is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kvledger.plan.explain import Figure, dress
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.ledgers import accounts, all_ledgers, lever_table
from kvledger.plan.planner import Plan, contexts_of
from kvledger.plan.search import Candidate, Found
from kvledger.plan.timing import speed
from kvledger.units import GIB

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; } td, th { padding: .2rem .8rem; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } td:first-child, th:first-child { text-align: left; }
tr:nth-child(even) td { background: #f6f6f4; } pre { background: #f6f6f4; padding: .6rem; overflow-x: auto; }
.assumed { color: #a05a00; } details { margin: .3rem 0; } h2 { margin-top: 2.2rem; }
"""
_NOTE = (
    "~ rests on an assumption; open a figure's account to see which. Times are floors unless an efficiency is given."
)
_COLOURS = {"weights": "#4c78a8", "overhead": "#9d9d9d", "KV": "#e8893c", "free": "#e6e6e0"}


def plan_page(plan: Plan) -> str:
    """The page of one plan. Imports plotly."""
    query = plan.query
    title = f"{query.model.name} on {query.num_devices} × {query.device.name}"
    plots = [memory_plot(plan), context_plot(plan), batch_plot(plan), lever_plot(plan)]
    tables = [_figures_table(name, figures) for name, figures in plan.groups]
    parts = [
        *(f"<p><b>warning:</b> {escape(w)}</p>" for w in plan.warnings),
        *_plots_html(plots[:1]), *tables, *_plots_html(plots[1:], first=False),
        _table_html(plan.by_context), _table_html(lever_table(plan.levers)),
        *(f"<p>· {escape(r)}</p>" for r in plan.outcome.memory.reasons),
        *(part for made in all_ledgers(plan) for part in _ledger_html(made)),
        "<h2>Accounts</h2>", *_accounts_html(accounts(plan)),
        "<h2>Sources</h2>", "<ul>", *(f"<li>{escape(s)}</li>" for s in plan.sources), "</ul>",
    ]  # fmt: skip
    return _page(title, parts)


def found_page(found: Found) -> str:
    """The page of a search: the Pareto front among all candidates shown. Imports plotly."""
    columns = ("configuration", "$/h", "requests", "TPOT", "TTFT", "tokens/s", "misses")

    def table(name: str, candidates: Sequence[Candidate]) -> str:
        return _table_html(Table(name, columns, tuple(_candidate_row(c) for c in candidates)))

    best = found.meeting[0].name if found.meeting else "none meets the target"
    parts = [
        f"<p>{found.num_tried:,} configurations tried, {len(found.meeting):,} meet the target. "
        f"Cheapest: <b>{escape(best)}</b>.</p>",
        *_plots_html([front_plot(found)]), table("Meeting the target, cheapest first", found.meeting[:30]),
        table("Nearest", found.near), table("Pareto front", found.front),
    ]  # fmt: skip
    return _page("Devices that meet the target", parts)


# ---------------------------------------------------------------------------------------------- plots


def _figure(**layout: Any) -> Any:
    import plotly.graph_objects as go

    return go.Figure(
        layout={"template": "plotly_white", "height": 380, "margin": {"t": 50, "l": 60, "r": 60}, **layout}
    )


def memory_plot(plan: Plan) -> Any:
    """One device's memory as a stacked bar, in GiB."""
    memory = plan.outcome.memory
    total = memory.total_bytes or memory.pool_bytes
    sizes = {"weights": memory.weights_bytes, "overhead": memory.overhead_bytes, "KV": memory.pool_bytes}
    sizes["free"] = max(0, total - sum(sizes.values()))
    figure = _figure(title="memory of one device, GiB", barmode="stack", height=220, yaxis={"visible": False})
    for name, size in sizes.items():
        text = f"{name} {dress(size, 'B')}"
        figure.add_bar(x=[size / GIB], y=[""], orientation="h", name=name, text=text, marker_color=_COLOURS[name])
    return figure


def context_plot(plan: Plan) -> Any:
    """Requests by context, both logarithmic."""
    from kvledger.plan.concurrency import requests_in

    contexts = contexts_of(plan.outcome)
    counts = [requests_in(plan.outcome.memory.pools, c) for c in contexts]
    figure = _figure(title="requests side by side, one replica", xaxis={"type": "log", "title": "context, tokens"},
                     yaxis={"type": "log", "title": "requests"})  # fmt: skip
    figure.add_scatter(x=contexts, y=[c or None for c in counts], mode="lines+markers", name="requests")
    return figure


def batch_plot(plan: Plan) -> Any:
    """Tokens per second and TPOT by batch, up to what fits."""
    outcome, query = plan.outcome, plan.query
    batches = sorted({1 << k for k in range(14) if 1 << k <= outcome.requests} | {outcome.requests})
    found = [speed(outcome.timing, b, query.context, query.output, query.cached) for b in batches]
    right = {"title": "TPOT, ms", "overlaying": "y", "side": "right"}
    title, x = f"speed by batch at {query.context:,} tokens", {"type": "log", "title": "batch"}
    figure = _figure(title=title, xaxis=x, yaxis={"title": "tokens/s"}, yaxis2=right)
    figure.add_scatter(x=batches, y=[s.tokens_per_s for s in found], mode="lines+markers", name="tokens/s")
    tpot = [1e3 * s.tpot_sustained_s for s in found]
    figure.add_scatter(x=batches, y=tpot, mode="lines+markers", name="TPOT, ms", yaxis="y2")
    return figure


def lever_plot(plan: Plan) -> Any:
    """What each lever buys: factors on requests and tokens/s."""
    names = [x.change.name for x in plan.levers]
    figure = _figure(title="levers: factors against this plan", barmode="group", yaxis={"type": "log"})
    figure.add_bar(x=names, y=[x.requests_gain for x in plan.levers], name="requests")
    figure.add_bar(x=names, y=[x.tokens_gain for x in plan.levers], name="tokens/s")
    return figure


def front_plot(found: Found) -> Any:
    """Price against TPOT: candidates that meet the target, those that do not, and the front."""
    figure = _figure(title="price against TPOT", height=520, xaxis={"type": "log", "title": "$ per hour"},
                     yaxis={"type": "log", "title": "TPOT with prefills, ms"})  # fmt: skip
    groups = (
        ("meets", found.meeting[:2000], "markers"),
        ("misses", found.near, "markers"),
        ("front", found.front, "lines+markers"),
    )
    for name, candidates, mode in groups:
        priced = [c for c in candidates if c.outcome.price_per_hour is not None]
        figure.add_scatter(
            x=[c.price_per_hour for c in priced], y=[1e3 * c.outcome.speed.tpot_sustained_s for c in priced],
            text=[c.name for c in priced], mode=mode, name=name,
        )  # fmt: skip
    return figure


# ---------------------------------------------------------------------------------------------- HTML


def _ledger_html(made: Ledger) -> list[str]:
    """One of the six ledgers, folded: its figures, tables and notes."""
    notes = "".join(f"<p>· {escape(note)}</p>" for note in made.notes)
    tables = "".join(_table_html(t, "h3") for t in made.tables)
    figures = _figures_table("figures", made.figures, "h3")
    summary = f"<summary>Ledger {escape(made.name)}: {escape(made.title)}</summary>"
    return [f"<details>{summary}{figures}{tables}{notes}</details>"]


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n<p>{_NOTE}</p>\n</body></html>\n"
    )


def _plots_html(plots: Sequence[Any], first: bool = True) -> list[str]:
    """Plots as HTML; the first of a page brings plotly's script along."""
    return [p.to_html(full_html=False, include_plotlyjs=first and i == 0) for i, p in enumerate(plots)]


def _figures_table(title: str, figures: Sequence[Figure], heading: str = "h2") -> str:
    rows = tuple((f.title, f) for f in figures)
    return _table_html(Table(title, ("", ""), rows), heading)


def _table_html(table: Table, heading: str = "h2") -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    rows = "".join("<tr>" + "".join(_cell_html(c) for c in row) + "</tr>" for row in table.rows)
    return f"<{heading}>{escape(table.title)}</{heading}>\n<table><tr>{head}</tr>{rows}</table>"


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    style = ' class="assumed"' if cell.is_assumed else ""
    return f'<td{style} title="{escape(cell.explain(), quote=True)}">{escape(cell.text)}</td>'


def _accounts_html(figures: Iterable[Figure]) -> list[str]:
    seen: dict[str, Figure] = {f.name: f for f in figures}
    return [
        f"<details><summary>{escape(f.title)} = {escape(f.text)}</summary><pre>{escape(f.explain())}</pre></details>"
        for f in seen.values()
    ]


def _candidate_row(candidate: Candidate) -> tuple[str, ...]:
    outcome = candidate.outcome
    return (
        candidate.name, "?" if outcome.price_per_hour is None else f"{outcome.price_per_hour:.2f}",
        f"{outcome.total_requests:,}", dress(outcome.speed.tpot_sustained_s, "s"), dress(outcome.speed.ttft_s, "s"),
        f"{outcome.tokens_per_s:,.0f}", "; ".join(candidate.misses),
    )  # fmt: skip
