"""`kvledger bench serve`: options → a run of the open-loop client against a server, started here or elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

from kvledger.cli.output import columns, emit, emit_json, say
from kvledger.errors import ConfigError, EngineDead
from kvledger.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from kvledger.bench.serve import ServeBench


def bench_serve(
    url: str = typer.Option(
        "", help="A running server, as http://127.0.0.1:8000; default: one is started for the run."
    ),
    model: str = typer.Option("smollm2", help="Model of the server that is started."),
    workload: str = typer.Option("128/32", help="PROMPT/OUTPUT in tokens, or a named distribution (sharegpt, …)."),
    trace: Path = typer.Option(None, help="CSV of TIMESTAMP, ContextTokens, GeneratedTokens instead of a workload."),
    speed: float = typer.Option(1.0, min=1e-6, help="Play the trace this many times faster."),
    rate: float = typer.Option(0.0, min=0, help="Requests per second, Poisson; 0 sends all at once."),
    concurrency: int = typer.Option(None, min=1, help="Closed loop instead: clients that ask when answered."),
    requests: int = typer.Option(100, min=1, help="How many requests."),
    seed: int = typer.Option(0, help="Of arrivals, lengths and prompts."),
    slo_ttft: str = typer.Option("", help="Goodput counts requests with a first token within this, as 500ms."),
    slo_tpot: str = typer.Option("", help="… and this mean time per token."),
    slo_e2e: str = typer.Option("", help="… and this time in all."),
    as_text: bool = typer.Option(False, "--text", help="Prompts as words, for servers that take no token ids."),
    ban: list[int] = typer.Option([], help="Token id never to choose, for servers that do not know ignore_eos."),
    api_key: str = typer.Option("", envvar="KVLEDGER_API_KEY", help="Key for the server."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
    server_options: str = typer.Option("", help="More options for the server that is started, in one string."),
) -> None:
    """Measure a server from outside: TTFT, TPOT, ITL, E2E percentiles and goodput."""
    from kvledger.bench.serve import Slo, Target, drive, summarise

    _check_source(workload, trace)
    slo = Slo(*(parse_seconds(text) if text else None for text in (slo_ttft, slo_tpot, slo_e2e)))
    with nullcontext(url.rstrip("/")) if url else started_server(model, _words(server_options)) as address:
        card = model_card(address, api_key)
        target = Target.of(address, model=card["id"], api_key=api_key or None, as_text=as_text, ban_ids=tuple(ban))
        arrivals = _arrivals(workload, trace, speed, rate, requests, seed, card.get("max_model_len") or 2048)
        outcomes = asyncio.run(drive(target, arrivals, concurrency))
    found = summarise(outcomes, slo)
    if as_json:
        emit_json(found.as_json())
    else:
        show(found, slo != Slo())
    if found.first_failure:
        say(f"first failure: {found.first_failure}")
    if not found.num_complete:
        raise typer.Exit(1)


def _check_source(workload: str, trace: Path | None) -> None:
    """Before a server is started. Raises ConfigError, UnknownName."""
    from kvledger.plan.workload import find_workload

    if trace is None:
        find_workload(workload)
    elif not trace.is_file():
        raise ConfigError(f"there is no file {trace}")


def _words(options: str) -> list[str]:
    """As a shell would split them."""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--server-options {options!r} cannot be split into words: {error}") from error


def _arrivals(
    workload: str, trace: Path | None, speed: float, rate: float, requests: int, seed: int, context: int
) -> Any:
    """What will be sent. Prompts are random ids below 4,096, which every vocabulary has."""
    from kvledger.bench.serve import read_trace
    from kvledger.plan.workload import find_workload
    from kvledger.simulate.replay import poisson

    if trace is not None:
        return read_trace(trace, requests, 4096, context, speed)
    half = context // 2
    found, bounds = find_workload(workload), {"max_prompt": half, "max_output": half}
    return poisson(found, requests, rate, half, **bounds, vocab_size=4096, seed=seed)


def model_card(url: str, api_key: str) -> dict[str, Any]:
    """The first model that the server lists. Raises ConfigError where nobody answers."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=10) as answer:
            card: dict[str, Any] = json.load(answer)["data"][0]
            return card
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"no OpenAI-compatible server answers at {url}: {error}") from error


@contextmanager
def started_server(model: str, options: list[str]) -> Iterator[str]:
    """`kvledger serve` in a process of its own; its address once it is ready. Raises EngineDead if it never is."""
    command = [sys.executable, "-m", "kvledger", "serve", model, "--port", "0", *options]
    say("starting " + " ".join(command[2:]))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line.strip())
            if found := re.search(r"serving +(http://\S+)/v1", line):
                break
        else:
            raise EngineDead(f"the server did not start: {said[-1] if said else 'it said nothing'}")
        Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
        try:
            yield found[1]
        finally:
            process.terminate()
            process.wait(30)


def show(found: ServeBench, has_slo: bool) -> None:
    """The run as a table on stdout."""
    counts = f"{found.num_sent} sent, {found.num_complete} complete, {found.num_refused} refused"
    emit(f"{counts}, {found.num_failed} failed, in {format_seconds(found.seconds)}")
    emit(f"{found.num_complete / found.seconds:.2f} requests/s, {found.tokens_per_s:.1f} output tokens/s")
    if has_slo:
        emit(f"goodput {found.goodput_per_s:.2f} requests/s within the SLO")
    if not found.num_complete:
        return
    rows = [("", *(f"p{p}" for p in (50, 90, 99)))]
    for name, values in (("TTFT", found.ttft_s), ("TPOT", found.tpot_s), ("ITL", found.itl_s), ("E2E", found.e2e_s)):
        rows.append((name, *(format_seconds(v) for v in values.values())))
    for line in columns(rows):
        emit(line)
