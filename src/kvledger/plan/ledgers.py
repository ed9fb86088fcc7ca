"""The six ledgers by name, for one query: what `kvledger ledger NAME MODEL` prints and the page shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvledger.errors import ConfigError, UnknownName
from kvledger.plan.allocation import MOST_OUTPUT, allocation, sharing
from kvledger.plan.bandwidth import BATCHES, bandwidth
from kvledger.plan.compression import compression
from kvledger.plan.concurrency import budget_figure, concurrency, pool_requests
from kvledger.plan.explain import Figure, Input, derive
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.levers import Lever
from kvledger.plan.memory import CONTEXTS, bytes_ledger, request_figure
from kvledger.plan.outcome import kv_dtype_of, timing_of
from kvledger.plan.planner import Plan, answer, memory_figures
from kvledger.plan.query import Query
from kvledger.plan.recompute import recompute
from kvledger.plan.weights import weights_figure
from kvledger.plan.workload import Workload, find_workload
from kvledger.spec.weights import scheme_bits
from kvledger.units import GB

LESSON_OVERHEAD_GB = 2
_NAMED_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![a-zA-Z0-9])")


@dataclass(frozen=True, slots=True)
class Ask:
    """A query with what only ledgers ask: table axes, the workload, and the lesson's way to count."""

    query: Query | None
    contexts: Sequence[int] = CONTEXTS
    batches: Sequence[int] = ()
    prompt: int = 1000
    output: int = 1000
    workload: Workload | None = None
    block_size: int = 16
    as_lesson: bool = False


def _needs_query(ask: Ask, name: str) -> Query:
    if ask.query is None:
        raise ConfigError(f"the {name} ledger needs a model, for example llama-2-70b")
    return ask.query


def _recompute(ask: Ask) -> Ledger:
    roofline = None if ask.query is None else timing_of(ask.query).roofline
    return recompute(ask.prompt, ask.output, roofline, ask.as_lesson)


def _bytes(ask: Ask) -> Ledger:
    query = _needs_query(ask, "bytes")
    layout = query.model.kv_layout(kv_dtype_of(query), ask.block_size, query.tp)
    weights = weights_figure(query.model, query.scheme, query.tp)
    rank = f", one of {query.tp} TP ranks" if query.tp > 1 else ""
    title = f"What KV costs in bytes: {query.model.name}, {kv_dtype_of(query)}{rank}"
    return bytes_ledger(layout, weights, ask.contexts, ask.batches or (1, 4, 16), title)


def _concurrency(ask: Ask) -> Ledger:
    query = _needs_query(ask, "concurrency")
    if ask.as_lesson:
        return _lesson_concurrency(ask, query)
    return plan_concurrency(answer(query), ask.contexts)


def _lesson_concurrency(ask: Ask, query: Query) -> Ledger:
    """Memory as sold, the weights that the model's name tells, 2 GB of overhead, GB divided by GiB."""
    memory = Input("M", query.device.sold_bytes, "B", f"{query.device.name}, as sold")
    weights = nominal_weights(query).as_input("W")
    budget = budget_figure(
        memory, weights, [Input("O", LESSON_OVERHEAD_GB * GB, "B", "the lesson's estimate", "assumed")]
    )
    layout = query.model.kv_layout(kv_dtype_of(query), ask.block_size, query.tp)
    made = concurrency(
        layout, budget, ask.contexts, as_lesson=True, title="How many requests fit, as the lesson counts"
    )
    return replace(made, notes=("Exact counts: the same command without --as-lesson.",))


def nominal_weights(query: Query) -> Figure:
    """Weights of one device as the lesson counts them: a "70b" has 70 × 10^9, all of them split by TP and PP."""
    told = _NAMED_SIZE.search(query.model.name)
    params = float(told[1]) * 1e9 if told else query.model.num_params
    return derive(
        "weights_bytes_per_device", "B", "N × b ÷ (tp × pp)",
        Input("N", params, "weights", "the model's name" if told else query.model.source),
        Input("b", round(scheme_bits(query.scheme)) / 8, "B", query.scheme),
        Input("tp", query.tp, "devices"), Input("pp", query.pp, "devices"), label="weights per device",
    )  # fmt: skip


def plan_concurrency(made: Plan, contexts: Sequence[int] = CONTEXTS) -> Ledger:
    """The engine's budget itemised, requests by context, levers."""
    outcome, query = made.outcome, made.query
    rows: list[tuple[Cell, ...]] = []
    for context in contexts:
        prefix, memory = min(query.prefix, context // 2), outcome.memory
        requests = pool_requests(memory.pools, context, prefix, query.hit_rate, memory.basis)
        rows.append((f"{context:,}", request_figure(outcome.rank_layout, context), requests))
    tables = (
        Table("by context", ("context", "KV per request and device", "requests"), tuple(rows)),
        lever_table(made.levers),
    )
    title = f"How many requests fit: {query.model.name} on {query.num_devices} × {query.device.name}, {query.engine}"
    return Ledger("concurrency", title, memory_figures(outcome), tables, (*made.warnings, *outcome.memory.reasons))


def lever_table(found: Sequence[Lever]) -> Table:
    """Levers as rows: what each buys and costs."""
    rows = tuple(
        (x.change.name, f"{x.requests_gain:.2f}×", f"{x.tokens_gain:.2f}×", f"{x.per_dollar_gain:.2f}×", x.change.kind,
         x.change.costs)
        for x in found
    )  # fmt: skip
    return Table(
        "levers, best first", ("lever", "requests", "tokens/s", "requests per $", "kind", "what it costs"), rows
    )


def _bandwidth(ask: Ask) -> Ledger:
    query = _needs_query(ask, "bandwidth")
    return bandwidth(timing_of(query), query.context, ask.batches or BATCHES)


def _compression(ask: Ask) -> Ledger:
    query = _needs_query(ask, "compression")
    return compression(query.model, kv_dtype_of(query), query.context, ask.block_size)


def _allocation(ask: Ask) -> Ledger:
    workload = ask.workload or find_workload("azure-conv-2023")
    max_len = ask.query.context if ask.query else 8192
    made = allocation(workload, max_len, ask.block_size)
    prompt, output = max(1, round(workload.prompt.mean)), min(MOST_OUTPUT, max(1, round(workload.output.mean)))
    shared = sharing(prompt, output, block_size=ask.block_size)
    return replace(made, tables=(*made.tables, *shared.tables), notes=(*made.notes, *shared.notes))


LEDGERS: dict[str, tuple[Callable[[Ask], Ledger], str]] = {
    "recompute": (_recompute, "forwards with and without a cache; how arithmetic each phase is"),
    "bytes": (_bytes, "the formula factor by factor; contexts × batches; where KV overtakes the weights"),
    "concurrency": (_concurrency, "budget per device, requests by context, levers"),
    "bandwidth": (_bandwidth, "step floor, ridge, intensity and speed by batch"),
    "compression": (_compression, "heads, MLA, windows, number types; what is known of quality"),
    "allocation": (_allocation, "reserved, paged, token-level; block sizes; samples and beams"),
}


def ledger(name: str, ask: Ask) -> Ledger:
    """The ledger called `name`. Raises UnknownName, and what the ledger itself raises."""
    if name not in LEDGERS:
        raise UnknownName("ledger", name, LEDGERS)
    return LEDGERS[name][0](ask)


def all_ledgers(made: Plan) -> tuple[Ledger, ...]:
    """The six ledgers of a plan's own query."""
    query = made.query
    contexts = sorted({*CONTEXTS, query.context})
    prompt = query.context - query.output
    ask = Ask(query, contexts, (), prompt, query.output, made.workload, query.block_size or 16)
    return tuple(plan_concurrency(made, contexts) if name == "concurrency" else ledger(name, ask) for name in LEDGERS)


def accounts(made: Plan) -> tuple[Figure, ...]:
    """Every figure of a plan, those of its tables included."""
    cells = (cell for row in made.by_context.rows for cell in row)
    return (*made.figures, *(cell for cell in cells if isinstance(cell, Figure)))
