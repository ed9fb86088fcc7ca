"""`kvledger deploy`: the command line of an engine that realises a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvledger.cli import plan_options as o
from kvledger.cli.output import emit, emit_json, say

if TYPE_CHECKING:
    from kvledger.plan.planner import Plan

app = typer.Typer(add_completion=False)


@app.command()
def deploy(
    model: o.Model,
    device: o.Device = "local",
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    dp_attention: o.DpAttention = False,
    context: o.Context = None,
    output: o.Output = None,
    prefix: o.Prefix = "0",
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
    path: Annotated[str | None, typer.Option("--path", help="Model path or id for the command, if another.")] = None,
    as_json: o.Json = False,
) -> None:
    """The command line of an engine that realises a plan."""
    from kvledger.plan.deploy import command
    from kvledger.plan.planner import answer

    query = o.query_of(
        model, device, tp=tp, pp=pp, dp=dp, dp_attention=dp_attention, context=context, output=output,
        prefix=prefix, batch=batch, kv_dtype=kv_dtype, weights=weights, engine=engine, engine_version=engine_version,
        block_size=block_size, memory_fraction=memory_fraction, kv_memory_bytes=kv_memory, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    made = answer(query)
    text = command(made.outcome, path or (model if query.engine == "kvledger" else _as_typed(model, query.model.name)))
    if as_json:
        emit_json({"engine": query.engine, "command": text, "plan": made.to_json()})
    else:
        _tell_planned(made)
        emit(text)


def _tell_planned(made: Plan) -> None:
    """Beside the command: what it is to give, and of which version its flags are."""
    from kvledger.plan.deploy import ENGINES, VERSIONS
    from kvledger.plan.explain import dress

    query, memory = made.query, made.outcome.memory
    for warning in made.warnings:
        say(f"warning: {warning}")
    say(f"flags as of {query.engine} {VERSIONS[query.engine]}; engines: {', '.join(ENGINES)}")
    say(f"planned: KV {dress(memory.pool_bytes, 'B')}, {memory.num_blocks:,} blocks of {memory.block_size}, "
        f"{made.outcome.total_requests:,} requests of {query.context:,} tokens")  # fmt: skip


def _as_typed(typed: str, full: str) -> str:
    """What the command should name: a path as it was typed, the hub id behind a short name otherwise."""
    return full if "/" in full and "/" not in typed and not typed.endswith(".gguf") else typed
