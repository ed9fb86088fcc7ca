"""`kvledger plan`: one plan, or the cheapest devices that meet a target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvledger.cli import plan_options as o
from kvledger.cli.output import emit_json, say
from kvledger.errors import ConfigError
from kvledger.plan.query import Query

if TYPE_CHECKING:
    from kvledger.plan.ledger import Ledger
    from kvledger.plan.planner import Plan

app = typer.Typer(add_completion=False)


@app.command()
def plan(
    model: o.Model,
    device: o.Device = "local",
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    dp_attention: o.DpAttention = False,
    context: o.Context = None,
    output: o.Output = None,
    prefix: o.Prefix = "0",
    hit_rate: o.HitRate = 1.0,
    batch: o.Batch = None,
    kv_dtype: o.KvDtype = "auto",
    weights: o.Weights = None,
    engine: o.Engine = None,
    engine_version: o.Version = None,
    block_size: o.BlockSize = None,
    memory_fraction: o.Fraction = None,
    kv_memory: o.KvMemory = None,
    max_num_seqs: o.MaxSeqs = None,
    max_num_batched_tokens: o.MaxTokens = None,
    efficiency: o.Efficiency = 1.0,
    price: o.Price = None,
    allow_long_context: o.LongContext = False,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Lengths: azure-conv-2023, sharegpt …, or PROMPT/OUTPUT.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help='"concurrency=64 context=8192 tpot=50ms ttft=1s"')
    ] = None,
    find: Annotated[bool, typer.Option("--find", help="Search devices and spreads for the target.")] = False,
    devices: Annotated[str | None, typer.Option("--devices", help="Only these, with commas.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="The engines' rules side by side.")] = False,
    ledgers: Annotated[bool, typer.Option("--ledgers", help="All six ledgers after the plan.")] = False,
    as_lesson: o.AsLesson = False,
    as_json: o.Json = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained report.")] = None,
    explain: o.Explain = False,
) -> None:
    """Will this model fit these devices, for how many requests, how fast, at what cost."""
    if find or target:
        only = _held_to(tp, pp, dp, weights, kv_dtype) | {"engine": engine or "vllm", "efficiency": efficiency}
        _find(model, _sought(find, target), devices, as_json, html, **only)
        return
    query = o.query_of(
        model, device, tp=tp, pp=pp, dp=dp, dp_attention=dp_attention, context=context, output=output, prefix=prefix,
        hit_rate=hit_rate, batch=batch, kv_dtype=kv_dtype, weights=weights, engine=engine,
        engine_version=engine_version, block_size=block_size, memory_fraction=memory_fraction,
        kv_memory_bytes=kv_memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        efficiency=efficiency, price_per_hour=price, allow_long_context=allow_long_context or as_lesson,
    )  # fmt: skip
    if compare:
        _compare(query, as_json)
    elif as_lesson:
        _as_lesson(query, as_json, explain)
    else:
        _plan(query, workload, ledgers, as_json, html, explain)


def _plan(query: Query, workload: str | None, ledgers: bool, as_json: bool, html: Path | None, explain: bool) -> None:
    from kvledger.plan.ledgers import all_ledgers
    from kvledger.plan.planner import answer
    from kvledger.plan.workload import find_workload

    lengths = find_workload(workload, query.prefix, query.hit_rate if query.prefix else 0.0) if workload else None
    made = answer(query, lengths)
    if html is not None:
        from kvledger.plan.report import plan_page

        _write(html, plan_page(made))
    more = all_ledgers(made) if ledgers else ()
    if as_json:
        emit_json(made.to_json() | ({"ledgers": {x.name: x.to_json() for x in more}} if ledgers else {}))
    elif explain or html is None:
        _show(made, more, explain)


def _show(made: Plan, more: tuple[Ledger, ...], explain: bool) -> None:
    from kvledger.cli.plan_view import show_plan
    from kvledger.cli.tables import console, show_accounts, show_ledger
    from kvledger.plan.ledgers import accounts

    if explain:
        show_accounts(accounts(made), console())
    else:
        show_plan(made)
    for ledger in more:
        console().print()
        show_ledger(ledger, explain)


def _sought(find: bool, target: str | None) -> str:
    """The target's text. Raises ConfigError for one of the two options without the other."""
    if not find or not target:
        raise ConfigError('--target and --find go together: --target "concurrency=64 context=8k tpot=50ms" --find')
    return target


def _held_to(tp: int, pp: int, dp: int, weights: str | None, kv_dtype: str) -> dict[str, Any]:
    """What the search may not choose, because it was given."""
    only: dict[str, Any] = {name: (n,) for name, n in (("tp", tp), ("pp", pp), ("dp", dp)) if n > 1}
    only |= {"weights": (weights,)} if weights else {}
    return only | ({"kv_dtypes": (kv_dtype.lower(),)} if kv_dtype != "auto" else {})


def _find(model: str, text: str, devices: str | None, as_json: bool, html: Path | None, **only: Any) -> None:
    from kvledger.cli.plan_view import found_json, show_found
    from kvledger.models import resolve_model
    from kvledger.plan import search

    names = [name.strip() for name in devices.split(",") if name.strip()] if devices else []
    found = search.find(resolve_model(model), search.Target.parse(text), names, **only)
    if html is not None:
        from kvledger.plan.report import found_page

        _write(html, found_page(found))
    if as_json:
        emit_json(found_json(found))
    elif html is None:
        show_found(found)


def _as_lesson(query: Query, as_json: bool, explain: bool) -> None:
    from kvledger.cli.tables import tell_ledger
    from kvledger.plan.ledgers import Ask, ledger
    from kvledger.plan.memory import CONTEXTS

    tell_ledger(ledger("concurrency", Ask(query, sorted({*CONTEXTS, query.context}), as_lesson=True)), as_json, explain)


def _compare(query: Query, as_json: bool) -> None:
    from kvledger.cli.tables import tell_ledger
    from kvledger.plan.profiles.compare import compare_ledger  # type: ignore[import-not-found,unused-ignore]

    tell_ledger(compare_ledger(query.model, query.device, query.setup()), as_json)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    say(f"written: {path} ({len(page.encode()) / 1e6:.1f} MB)")
