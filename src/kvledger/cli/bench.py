"""`kvledger bench`: the engine's speed, the server's, and the lesson's claims, each as a table or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvledger.cli.bench_serve import bench_serve
from kvledger.cli.engine_options import Activations, BlockSize, KvDtype, Threads
from kvledger.cli.output import StatusLine, columns, emit, emit_json, say
from kvledger.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from kvledger.bench.engine import EngineBench
    from kvledger.bench.lesson import Lesson

app = typer.Typer(add_completion=False, help="Measure the engine, the server and the lesson's claims.")
app.command("serve")(bench_serve)

ModelName = Annotated[str, typer.Option("--model", help="Path, alias, pypi: or hf: name of the model.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.command()
def engine(
    model: ModelName = "smollm2",
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run together.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 128,
    output: Annotated[int, typer.Option(min=2, help="Tokens that each writes, the first at the end of prefill.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; the median counts.")] = 3,
    kv_dtype: KvDtype = "bf16",
    block_size: BlockSize = None,
    threads: Threads = None,
    activations: Activations = "auto",
    as_json: Json = False,
) -> None:
    """Prefill and decode of equal requests, beside what this machine could do at most."""
    from kvledger.bench.engine import bench_engine

    status = StatusLine()
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "block_size": block_size, "activations": activations}
    found = bench_engine(model, batch, prompt, output, repeats, status.show, num_threads=threads, **options)
    status.clear()
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        emit_json(found.as_json())
    else:
        _show_engine(found)


def _show_engine(found: EngineBench) -> None:
    assumed = "" if found.ceiling_measured else "  (peaks of this machine assumed: kvledger devices --measure)"
    rows = [
        ("prefill", f"{found.prefill_tokens_per_s:,.0f} tokens/s", f"{found.ceiling_prefill:.0%} of the ceiling"),
        ("decode", f"{found.decode_tokens_per_s:,.0f} tokens/s", f"{found.ceiling_decode:.0%} of the ceiling"),
        ("decode step", format_seconds(found.step_p50_s), f"slowest {format_seconds(found.step_max_s)}"),
        ("outside kernels", f"{found.overhead:.2%}", "of decode steps"),
        ("KV held at the end", format_bytes(found.kv_bytes), f"{found.waste:.1%} of its blocks empty"),
    ]
    emit(f"{found.model}: {found.batch} × ({found.prompt} + {found.output}) tokens, {found.kv_dtype} KV{assumed}")
    for line in columns(rows, indent="  "):
        emit(line)


@app.command()
def lesson(
    model: ModelName = "smollm2",
    kv_memory: Annotated[str, typer.Option(help="KV memory of the policy comparison on this machine.")] = "48MiB",
    requests: Annotated[int, typer.Option(min=1, help="Requests of the simulated comparison.")] = 300,
    measure: Annotated[bool, typer.Option(help="Also measure on this machine's kernels (some minutes).")] = True,
    as_json: Json = False,
) -> None:
    """The lesson's claims, counted by the scheduler and measured on this machine."""
    from kvledger.bench.lesson import count_lesson, measure_lesson
    from kvledger.weights.store import resolve

    pool_bytes = parse_bytes(kv_memory)
    if measure:
        resolve(model)
    say("counting and simulating: about a minute")
    result = count_lesson(requests)
    if measure:
        say("measuring on this machine")
        status = StatusLine()
        result = measure_lesson(result, model, pool_bytes, status.show)
        status.clear()
    for note in result.notes:
        say(f"note: {note}")
    if as_json:
        emit_json(result.as_json())
    else:
        _show_lesson(result)


def _show_lesson(found: Lesson) -> None:
    for title, rows in found.tables():
        emit(title)
        for line in columns(rows, indent="  "):
            emit(line)
        emit()
