"""`kvledger ledger NAME`: one of the six accounts of KV memory, every figure explained on request."""

from __future__ import annotations

from typing import Annotated

import typer

from kvledger.cli import plan_options as o
from kvledger.cli.output import emit
from kvledger.errors import ConfigError
from kvledger.plan.query import MOST_TOKENS
from kvledger.units import parse_count

MOST_ROWS = 64
app = typer.Typer(add_completion=False)


@app.command()
def ledger(
    name: Annotated[
        str | None, typer.Argument(help="recompute, bytes, concurrency, bandwidth, compression, allocation.")
    ] = None,
    model: o.OptionalModel = None,
    device: o.Device = "h100-sxm",
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    context: o.Context = None,
    contexts: Annotated[str | None, typer.Option("--contexts", help="Rows of tables: 2k,4k,8k,32k.")] = None,
    batches: Annotated[str | None, typer.Option("--batches", help="Columns or rows of tables: 1,8,32.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="Prompt tokens of the recompute ledger.")] = "1000",
    output: Annotated[str, typer.Option("--output", help="Output tokens of the recompute ledger.")] = "1000",
    prefix: o.Prefix = "0",
    kv_dtype: o.KvDtype = "auto",
    weights: o.Weights = None,
    engine: o.Engine = None,
    block_size: o.BlockSize = None,
    kv_memory: o.KvMemory = None,
    efficiency: o.Efficiency = 1.0,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Lengths of the allocation ledger: azure-conv-2023, 2k/256 …")
    ] = None,
    as_lesson: o.AsLesson = False,
    as_json: o.Json = False,
    explain: o.Explain = False,
) -> None:
    """One of the six ledgers of KV memory, every figure explained."""
    from kvledger.cli.tables import tell_ledger
    from kvledger.plan import ledgers
    from kvledger.plan.memory import CONTEXTS
    from kvledger.plan.workload import find_workload

    if name is None:
        _list_all()
        return
    query = None
    if model is not None:
        query = o.query_of(
            model, device, tp=tp, pp=pp, context=context, prefix=prefix, kv_dtype=kv_dtype, weights=weights,
            engine=engine, block_size=block_size, kv_memory_bytes=kv_memory, efficiency=efficiency,
            allow_long_context=True,
        )  # fmt: skip
    ask = ledgers.Ask(
        query,
        contexts=_counts(contexts) or CONTEXTS,
        batches=_counts(batches),
        prompt=parse_count(prompt),
        output=parse_count(output),
        workload=find_workload(workload) if workload else None,
        block_size=block_size or 16,
        as_lesson=as_lesson,
    )
    tell_ledger(ledgers.ledger(name, ask), as_json, explain)


def _list_all() -> None:
    from kvledger.plan.ledgers import LEDGERS

    for name, (_, words) in LEDGERS.items():
        emit(f"{name:12} {words}")


def _counts(text: str | None) -> tuple[int, ...]:
    counts = tuple(parse_count(part) for part in text.split(",")) if text else ()
    if len(counts) > MOST_ROWS or any(count > MOST_TOKENS for count in counts):
        raise ConfigError(f"at most {MOST_ROWS} values up to {MOST_TOKENS:,} each: {text[:60] if text else ''}")
    return counts
