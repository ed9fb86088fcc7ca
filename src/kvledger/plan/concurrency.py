"""Ledger 3, concurrency: what a device has left for KV, and how many requests of a length that holds.

The budget is what the caller says or what an engine's profile allocates; a request is counted in whole blocks, as
engines do. `as_lesson` divides GB by GiB, as the lesson does. Knows no engine and no price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvledger.errors import ConfigError, DoesNotFit
from kvledger.plan.explain import Basis, Figure, Input, derive, evaluate
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.memory import CONTEXTS, request_figure, token_figure
from kvledger.plan.workload import growth_blocks
from kvledger.spec.kv import KVLayout
from kvledger.units import GB, GIB, format_bytes


class Blocks(Protocol):
    """Something that hands out blocks: a `PoolPlan`, or a pool of an engine's profile."""

    @property
    def num_blocks(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds."""
        ...


def budget_figure(memory: Input, weights: Input, overheads: Sequence[Input], fraction: Input | None = None) -> Figure:
    """Bytes of one device left for KV. Raises DoesNotFit when nothing is left."""
    share = f"{memory.name} × {fraction.name}" if fraction else memory.name
    formula = " − ".join([share, weights.name, *(o.name for o in overheads)])
    inputs = (memory, *((fraction,) if fraction else ()), weights, *overheads)
    figure = derive("kv_budget_bytes", "B", formula, *inputs, label="KV budget per device")
    if figure.value <= 0:
        raise DoesNotFit(
            f"weights of {format_bytes(weights.value)} leave no room for KV in {format_bytes(memory.value)}: "
            f"{format_bytes(-figure.value)} are missing per device",
            int(-figure.value),
        )
    return figure


def requests_figure(layout: KVLayout, budget: Figure, context: int, as_lesson: bool = False) -> Figure:
    """Requests of `context` tokens that fit in `budget`, in whole blocks; `as_lesson` divides GB by GiB instead."""
    request = request_figure(layout, context)
    if as_lesson:
        return derive(
            f"requests_{context}", "requests", f"floor((M ÷ {GB}) ÷ (K ÷ {GIB}))", budget.as_input("M"),
            request.as_input("K"), label=f"requests at {context:,} tokens", note="GB divided by GiB",
        )  # fmt: skip
    return derive(
        f"requests_{context}", "requests", "(M // P) // N", budget.as_input("M"),
        Input("P", layout.block_bytes, "B", f"one block of {layout.block_size} tokens"),
        Input("N", layout.blocks_for(context), "blocks", f"KVLayout.blocks_for({context})"),
        label=f"requests at {context:,} tokens",
    )  # fmt: skip


def fraction_figure(layout: KVLayout, budget: Figure, context: int) -> Figure:
    """The same without rounding down: how near the next request is."""
    request = request_figure(layout, context).as_input("K")
    return derive(f"fits_{context}", "", "M ÷ K", budget.as_input("M"), request, label="budget ÷ request")


def concurrency(
    layout: KVLayout, budget: Figure, contexts: Sequence[int] = CONTEXTS, as_lesson: bool = False, title: str = ""
) -> Ledger:
    """Requests by context length in `budget` bytes of KV per device. Raises ConfigError below 1 token."""
    if min(contexts) < 1:
        raise ConfigError("contexts must be at least 1 token")
    rows: list[tuple[Cell, ...]] = [
        (
            f"{s:,}",
            request_figure(layout, s),
            fraction_figure(layout, budget, s),
            requests_figure(layout, budget, s, as_lesson),
        )
        for s in contexts
    ]
    columns = ("context", "KV per request and device", "budget ÷ request", "requests")
    figures = (budget, token_figure(layout, "kv_bytes_per_token_per_device"))
    return Ledger(
        "concurrency", title or "How many requests fit", figures, (Table("by context", columns, tuple(rows)),)
    )


def pool_requests(
    pools: Sequence[Blocks],
    context: int,
    prefix: int = 0,
    hit_rate: float = 1.0,
    basis: Basis = "derived",
    name: str = "",
) -> Figure:
    """Requests of `context` tokens side by side in an engine's pools; the scarcest pool decides.

    The first `prefix` tokens are kept once for the share `hit_rate` of the requests that start with them. `basis` is
    what the number of blocks rests on.
    """
    inputs, terms = [], []
    for index, pool in enumerate(pools):
        tag = f"_{index}" if len(pools) > 1 else ""
        need, shared = max(1, pool.blocks_for(context)), min(growth_blocks(pool.blocks_for, prefix), pool.num_blocks)
        inputs += [
            Input(f"B{tag}", pool.num_blocks, "blocks", "blocks of the pool", basis),
            Input(f"N{tag}", need, "blocks", f"one request of {context:,} tokens, at most"),
        ]
        if shared:
            inputs += [Input(f"Q{tag}", shared, "blocks", f"shared prefix of {prefix:,} tokens, kept once"),
                       Input(f"h{tag}", hit_rate, "", "share of requests that hit it")]  # fmt: skip
            terms.append(f"floor((B{tag} − Q{tag}) ÷ max(1, N{tag} − h{tag} × Q{tag}))")
        else:
            terms.append(f"B{tag} // N{tag}")
    formula = terms[0] if len(terms) == 1 else f"min({', '.join(terms)})"
    value = evaluate(formula, {i.name: i.value for i in inputs})
    source = "whole blocks, as engines hand them out"
    label = f"requests at {context:,} tokens"
    return Figure(name or f"requests_{context}", value, "requests", formula, tuple(inputs), source, label=label)


def requests_in(pools: Sequence[Blocks], context: int, prefix: int = 0, hit_rate: float = 1.0) -> int:
    """The value of `pool_requests` alone."""
    return int(pool_requests(pools, context, prefix, hit_rate).value)


def request_cost(pool: Blocks, block_bytes: int, unit: int = 4096) -> tuple[Figure, Figure]:
    """(fixed bytes, bytes per token) of a request in whole blocks, once every window is full.

    Fixed are states, full windows and what in-flight tokens need; a window costs nothing more per token.
    """
    far, farther = 1024 * unit, 2048 * unit  # beyond every window and chunk; whole blocks for usual block sizes
    near, wide = pool.blocks_for(far), pool.blocks_for(farther)
    p = Input("P", block_bytes, "B", "one block")
    slope = derive(
        "request_bytes_per_token", "B", "P × (N_2 − N_1) ÷ s", p, Input("N_2", wide, "blocks", f"{farther} tokens"),
        Input("N_1", near, "blocks", f"{far} tokens"), Input("s", far, "tokens"), label="request: per token",
    )  # fmt: skip
    fixed = derive(
        "request_fixed_bytes", "B", "P × N_1 − k × s", p, Input("N_1", near, "blocks", f"{far} tokens"),
        slope.as_input("k"), Input("s", far, "tokens"), label="request: fixed, once windows are full",
    )  # fmt: skip
    return fixed, slope
