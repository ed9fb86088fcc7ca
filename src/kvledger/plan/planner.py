"""The plan: will this model fit, for how many requests, how fast, at what cost; every figure with its account.

`plan(...)` answers one question. Numbers come from `plan.outcome`; here they become figures. Knows no files: models
are `ModelSpec`s or names of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvledger.data import catalogue
from kvledger.data.devices import LOCAL, find_device
from kvledger.errors import ConfigError, DoesNotFit, UnknownName
from kvledger.plan.bandwidth import step_figures, timed_figure
from kvledger.plan.concurrency import pool_requests, request_cost
from kvledger.plan.cost import cost_figure, price_input
from kvledger.plan.explain import Basis, Figure, Input, derive, dress, given
from kvledger.plan.ledger import Cell, Table
from kvledger.plan.levers import Lever, levers, rescue
from kvledger.plan.memory import request_figure, token_figure
from kvledger.plan.outcome import Memory, Outcome, evaluate, kv_dtype_of, longest
from kvledger.plan.profiles.base import ENGINES, Term
from kvledger.plan.query import Query
from kvledger.plan.workload import Workload, requests_at_percentile
from kvledger.spec.device import DeviceSpec
from kvledger.spec.model import ModelSpec

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Plan:
    """An answered query. Figures are made when asked for; `plan["name"]` is one of them."""

    outcome: Outcome
    workload: Workload | None = None

    @property
    def query(self) -> Query:
        """What was asked."""
        return self.outcome.query

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the person should know before trusting the figures."""
        device = self.query.device
        advice = device.notes if device.name == LOCAL and not device.measured else ()
        return (*self.outcome.warnings, *advice)

    @cached_property
    def levers(self) -> tuple[Lever, ...]:
        """Single changes that buy requests or tokens, best first."""
        return levers(self.outcome)

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """Every number of the plan, in the order they are shown."""
        return tuple(figure for _, group in self.groups for figure in group)

    @cached_property
    def groups(self) -> tuple[tuple[str, tuple[Figure, ...]], ...]:
        """The figures under headings."""
        speed = "speed and cost" + (", floors" if self.query.efficiency == 1 else "")
        return (
            ("memory per device", memory_figures(self.outcome)),
            ("requests", (*request_figures(self.outcome), *self._workload_figures())),
            (speed, speed_figures(self.outcome)),
        )

    @cached_property
    def by_context(self) -> Table:
        """Requests by context length."""
        pools, query = self.outcome.memory.pools, self.query
        rows: list[tuple[Cell, ...]] = []
        for context in contexts_of(self.outcome):
            prefix = min(query.prefix, context // 2)
            row = pool_requests(pools, context, prefix, query.hit_rate, self.outcome.memory.basis)
            rows.append((f"{context:,}", request_figure(self.outcome.rank_layout, context), row))
        return Table("requests by context, one pool", ("context", "KV per request and device", "requests"), tuple(rows))

    def __getitem__(self, name: str) -> Figure:
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(f"no figure {name!r}; there are {', '.join(f.name for f in self.figures)}")

    def _workload_figures(self) -> Iterator[Figure]:
        if self.workload is None:
            return
        memory = self.outcome.memory
        source = f"{self.workload.name} ({self.workload.source}): sum of blocks by its mean, spread and skew"
        for percent in PERCENTILES:
            count = min(
                requests_at_percentile(p.num_blocks, p.blocks_for, self.workload, percent) for p in memory.pools
            )
            label = f"requests of {self.workload.name} that fit {percent} % of the time"
            yield given(f"requests_p{percent}", count, "requests", source, memory.basis, label)

    def _workload_json(self) -> dict[str, Any] | None:
        if self.workload is None:
            return None
        requests = {str(p): self[f"requests_p{p}"].value for p in PERCENTILES}
        return {"name": self.workload.name, "requests_at_percentile": requests, "source": self.workload.source}

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object; keys are stable (docs/planning.md)."""
        outcome, query, memory = self.outcome, self.query, self.outcome.memory
        speed = outcome.speed
        return {
            "model": query.model.name,
            "device": query.device.name,
            "engine": query.engine,
            "tp": query.tp,
            "pp": query.pp,
            "dp": query.dp,
            "context": query.context,
            "output": query.output,
            "prefix": query.prefix,
            "kv_dtype": kv_dtype_of(query),
            "weights": query.scheme,
            "kv_bytes_per_token": query.model.kv_layout(kv_dtype_of(query)).bytes_per_token,
            "kv_bytes_per_token_per_device": self["kv_bytes_per_token_per_device"].value,
            "weights_bytes_per_device": memory.weights_bytes,
            "overhead_bytes": memory.overhead_bytes,
            "kv_budget_bytes": memory.available.mid,
            "kv_budget_band_bytes": [memory.available.low, memory.available.high],
            "num_blocks": memory.num_blocks,
            "block_size": memory.block_size,
            "block_bytes": memory.block_bytes,
            "kv_pool_bytes": memory.pool_bytes,
            "kv_tokens": memory.kv_tokens,
            "max_concurrency": round(memory.max_concurrency, 4),
            "requests_at_context": outcome.total_requests,
            "requests_band": list(outcome.requests_band),
            "workload": self._workload_json(),
            "batch": speed.batch,
            "step_time_s": speed.step.seconds,
            "bound": speed.step.bound,
            "tpot_s": speed.tpot_s,
            "tpot_sustained_s": speed.tpot_sustained_s,
            "ttft_s": speed.ttft_s,
            "tokens_per_s": outcome.tokens_per_s,
            "cost_per_million_tokens": outcome.cost_per_million,
            "levers": [lever.to_json() for lever in self.levers],
            "warnings": list(self.warnings),
            "reasons": list(memory.reasons),
            "log_lines": list(memory.lines),
            "figures": [f.to_json() for f in self.figures],
            "sources": self.sources,
        }

    @property
    def sources(self) -> list[str]:
        """Where the inputs come from."""
        found = [query_source for query_source in (self.query.model.source, self.query.device.source) if query_source]
        found += [i.source for f in self.figures for i in f.inputs if i.source and not i.source.startswith("figure ")]
        return list(dict.fromkeys(found))


def plan(
    model: ModelSpec | str,
    device: DeviceSpec | str = LOCAL,
    *,
    workload: Workload | None = None,
    **options: Any,
) -> Plan:
    """Plan `model` on `device`. `options` are the fields of `plan.query.Query`: tp, context, kv_dtype, weights …

    The engine is kvledger on `local`, vLLM elsewhere, unless named. Raises UnknownName, ConfigError, and DoesNotFit
    with what is missing and the nearest change that fits.
    """
    return answer(make_query(model, device, **options), workload)


def answer(query: Query, workload: Workload | None = None) -> Plan:
    """The plan for a query. Raises ConfigError, DoesNotFit with what is missing and the nearest change that fits."""
    try:
        return Plan(evaluate(query), workload)
    except DoesNotFit as error:
        if query.kv_memory_bytes is not None:
            raise  # says itself how much would fit
        raise rescue(query, error) from error


def make_query(model: ModelSpec | str, device: DeviceSpec | str = LOCAL, **options: Any) -> Query:
    """Names looked up, defaults chosen. Raises UnknownName for a model, a device or an option, ConfigError."""
    spec = catalogue.model(model) if isinstance(model, str) else model
    where = find_device(device) if isinstance(device, str) else device
    unknown = next((name for name in options if name not in Query.__dataclass_fields__), None)
    if unknown is not None:
        raise UnknownName("option", unknown, Query.__dataclass_fields__)
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen.setdefault("engine", "kvledger" if where.name == LOCAL else "vllm")
    chosen.setdefault("context", min(8192, spec.max_context))
    chosen.setdefault("output", min(512, max(1, chosen["context"] // 4)))
    if chosen["context"] == 1:
        raise ConfigError("a context of 1 token has no room for an answer; use at least 2")
    if chosen["engine"] not in ENGINES:
        raise UnknownName("engine", chosen["engine"], ENGINES)
    return Query(spec, where, **chosen)


# ---------------------------------------------------------------------------------------------- figures


def memory_figures(outcome: Outcome) -> tuple[Figure, ...]:
    """From the device's memory to blocks."""
    query, memory = outcome.query, outcome.memory
    total = given("memory_bytes", memory.total_bytes, "B", f"{query.device.name}: {query.device.source}",
                  "assumed" if "memory_bytes" in query.device.assumed else "given", "device memory")  # fmt: skip
    terms = tuple(term_figure(t) for t in memory.terms)
    budget = _budget(outcome, total, terms)
    per_block = Input("P", memory.block_bytes, "B", f"one block of {memory.block_size} tokens, every slot a page")
    blocks = derive("num_blocks", "", "M // P", budget.as_input("M"), per_block, label="blocks")
    if blocks.value != memory.num_blocks:  # several pools, or ranks that hold less: the engine's rule says why
        source = "; ".join(memory.reasons) or "the engine's profile"
        blocks = given("num_blocks", memory.num_blocks, "", source, memory.basis, "blocks")
    whole = query.model.kv_layout(kv_dtype_of(query))
    size = given(
        "block_size", memory.block_size, "tokens", f"{query.engine}'s default" if not query.block_size else "given"
    )
    one_rank = token_figure(outcome.rank_layout, "kv_bytes_per_token_per_device")
    return (total, *terms, budget, token_figure(whole), one_rank, size, blocks)


def term_figure(term: Term) -> Figure:
    """One item of memory that is not KV. Fitted ones count as assumed: they have a band."""
    basis: Basis = {"given": "given", "computed": "derived"}.get(term.basis, "assumed")  # type: ignore[assignment]
    name = f"{term.name}_bytes_per_device" if term.name == "weights" else f"{term.name.replace(' ', '_')}_bytes"
    return given(name, term.size.mid, "B", term.note or term.basis, basis, term.name.replace("_", " "))


def _budget(outcome: Outcome, total: Figure, terms: Sequence[Figure]) -> Figure:
    memory, query = outcome.memory, outcome.query
    inputs = [Input("U", memory.budget_bytes, "B", f"share of {total.text} that {query.engine} may use")]
    inputs += [f.as_input(f"T_{i}") for i, f in enumerate(terms)]
    formula = " − ".join(i.name for i in inputs)
    left = memory.budget_bytes - sum(t.size.mid for t in memory.terms)
    if left != memory.available.mid:
        return given("kv_budget_bytes", memory.available.mid, "B", "; ".join(memory.reasons), "given", "KV budget")
    return derive("kv_budget_bytes", "B", formula, *inputs, label="KV budget", note=band_note(memory))


def band_note(memory: Memory) -> str:
    """How far the KV budget may be off, and which item is to blame; empty where it is exact."""
    widest = memory.dominant
    if widest is None:
        return ""
    low, high = dress(memory.available.low, "B"), dress(memory.available.high, "B")
    return f"between {low} and {high}; {widest.name.replace('_', ' ')} makes most of that band"


def request_figures(outcome: Outcome) -> tuple[Figure, ...]:
    """How many requests, and what one costs."""
    query, memory, basis = outcome.query, outcome.memory, outcome.memory.basis
    tokens = given("kv_tokens", memory.kv_tokens, "tokens", f"as {query.engine} prints it", basis, "KV cache size")
    source, label = f"blocks ÷ blocks of {query.context:,} tokens", f"maximum concurrency at {query.context:,} tokens"
    most = given("max_concurrency", round(memory.max_concurrency, 4), "", source, basis, label)
    one = pool_requests(memory.pools, query.context, query.prefix, query.hit_rate, basis, "requests_at_context")
    requests: tuple[Figure, ...] = (one,)
    if query.dp * query.ranks > 1:
        one = replace(one, name="requests_per_pool", label=f"{one.title}, one pool")
        label = f"requests at {query.context:,} tokens, {query.dp * query.ranks} pools"
        pools = (Input("dp", query.dp, "", "replicas"), Input("r", query.ranks, "", "ranks with KV of their own"))
        requests = (
            one,
            derive("requests_at_context", "requests", "dp × r × n", *pools, one.as_input("n"), label=label),
        )
    span = given("longest_request", longest(memory.pools), "tokens", "search over the pool's blocks", basis)
    per_request = request_figure(outcome.rank_layout, query.context, "kv_bytes_per_request")
    return (tokens, most, *requests, per_request, *request_cost(memory.pools[0], memory.block_bytes), span)


def speed_figures(outcome: Outcome) -> tuple[Figure, ...]:
    """Step time, TTFT, TPOT, tokens per second, cost: floors at the batch of the plan."""
    query, speed, timing = outcome.query, outcome.speed, outcome.timing
    how = "given" if query.batch else "as many as fit, at most what the engine runs"
    batch = given("batch", speed.batch, "requests", how, "given" if query.batch else outcome.memory.basis)
    step, _ = step_figures(timing, speed.batch, query.context)
    prompt = max(1, query.context - query.output)
    label = f"TTFT floor, {prompt:,} tokens" + (f", {query.cached:,} cached" if query.cached else "")
    ttft = timed_figure(timing, timing.prefill(prompt, query.cached), max(1, prompt - query.cached), "ttft_s", label)
    tpot = derive("tpot_s", "s", "t", step.as_input("t"), label="TPOT floor")
    m, b, pp = Input("m", query.output, "tokens"), batch.as_input("B"), Input("pp", query.pp, "stages")
    t_d, t_p = step.as_input("t_d"), ttft.as_input("t_p")
    sustained = derive("tpot_sustained_s", "s", "t_d + (B − 1) × t_p ÷ pp ÷ m", t_d, b, t_p, pp, m,
                       label="TPOT with the others' prefills")  # fmt: skip
    rate = derive("tokens_per_s", "tokens/s", "dp × B × m ÷ (m × t_d + B × t_p ÷ pp)", Input("dp", query.dp), b, m, t_d,
                  t_p, pp, label="output tokens/s, prefills paid")  # fmt: skip
    price = price_input(query.device, query.price_per_hour)
    cost = (cost_figure(price, query.num_devices, rate),) if price else ()
    return (batch, step, tpot, sustained, ttft, rate, *cost)


def contexts_of(outcome: Outcome) -> list[int]:
    """Context lengths worth a row: powers of two up to the model's limit, and the one asked for."""
    limit = max(outcome.query.model.max_context, outcome.query.context)
    return sorted({outcome.query.context, *(1 << k for k in range(10, 21) if 1 << k <= limit)})
