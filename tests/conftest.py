"""A server whose model is a script: the real scheduler, engine and HTTP side over an executor that reads its lines.

The last word of a prompt says what is answered, see `Script`. Tokens are bytes, so every text can be said and every
character of several bytes arrives in pieces.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvledger.engine import Engine
from kvledger.errors import BadRequest
from kvledger.plan.pool import PoolPlan
from kvledger.sched.scheduler import Scheduler
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Sample, Step, StepResult
from kvledger.server.ledger import live_books
from kvledger.server.run import HttpServer, bind
from kvledger.server.served import Served
from kvledger.server.state import Settings
from kvledger.spec.config import SchedulerConfig
from kvledger.spec.kv import FullKV, KVLayout, KVStorage
from kvledger.spec.step import num_tokens
from kvledger.text.pieces import byte_alphabet
from kvledger.text.structured import GrammarCompiler
from kvledger.text.tokenizer import Tokenizer

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 256
VOCAB = 256 + len(MARKS)


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; three marks follow."""
    names = {byte: chr(point) for point, byte in byte_alphabet().items()}
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": [*(names[byte] for byte in range(256)), *MARKS],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * len(MARKS),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.ggml.add_bos_token": False,
        }
    )


TOKENIZER = byte_tokenizer()


class Death(BaseException):
    """What no engine survives."""


@dataclass
class Script:
    """Reads its lines from the prompt: `say:TEXT` is answered TEXT, `count:N` its first letter N times.

    `poison` raises, `die` kills the engine; anything else is answered `Paris.`. A step takes `step_s`.
    """

    step_s: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)  # steps wait until it is set

    def line(self, seq: Sequence) -> bytes:
        prompt = TOKENIZER.decode(seq.token_ids[: seq.num_prompt_tokens], skip_special=False)
        said = re.findall(r"say:(.*?)(?:<\|im_end\|>|$)", prompt, re.S)
        if said:
            return said[-1].encode()
        counted = re.findall(r"count:(\d+)", prompt)
        return prompt[:1].encode() * int(counted[-1]) if counted else b"Paris."

    def next_token(self, seq: Sequence) -> int:
        line, position = self.line(seq), seq.num_output_tokens
        wanted = line[position] if position < len(line) else EOS
        mask = seq.constraint.mask() if seq.constraint is not None else None
        if mask is None or mask[wanted // 8] >> wanted % 8 & 1:
            return wanted
        return next(i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1)


class ScriptedExecutor:
    """Says what the script says; logprobs are −0.5 for what is said and −2 for everything else."""

    def __init__(self, pool: PoolPlan, script: Script) -> None:
        self.num_blocks, self.kv_bytes, self.script = pool.num_blocks, pool.pool_bytes, script

    def run(self, step: Step) -> StepResult:
        self.script.gate.wait()
        time.sleep(self.script.step_s)
        samples, scores = {}, {}
        for chunk in step.chunks:
            prompt = TOKENIZER.decode(chunk.seq.token_ids)
            if "poison" in prompt:
                raise ValueError("this prompt cannot be computed")
            if "die" in prompt:
                raise Death("killed by the script")
            if chunk.samples:
                samples[chunk.seq.seq_id] = self._sample(self.script.next_token(chunk.seq), chunk.seq.params.logprobs)
            if chunk.seq.params.prompt_logprobs is not None:
                scores[chunk.seq.seq_id] = tuple(
                    self._sample(i, chunk.seq.params.prompt_logprobs)
                    for i in chunk.seq.token_ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
                )[: chunk.seq.num_prompt_tokens - 1 - chunk.start]
        return StepResult(samples, self.script.step_s, scores)

    def _sample(self, token_id: int, num_top: int | None) -> Sample:
        top = ((token_id, -0.5), *((i, -2.0) for i in range(97, 97 + (num_top or 0)) if i != token_id))
        return Sample(token_id, -0.5, 1, top[: num_top or 0])

    def close(self) -> None: ...


def render(messages: list[dict[str, Any]], **given: Any) -> str:
    if any(m["role"] == "broken" for m in messages):
        raise BadRequest("the template refuses role 'broken'", "messages")
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if given.get("add_generation_prompt", True) else "")


def tiny_pool(num_blocks: int = 64, block_size: int = 16) -> PoolPlan:
    layout = KVLayout.of([FullKV(1, 8, 8)] * 2, KVStorage.of("bf16"), block_size)
    return PoolPlan(layout, num_blocks * layout.block_bytes, num_blocks, "given by the test")


def scripted(script: Script, pool: PoolPlan, max_model_len: int = 512, **sched: Any) -> Callable[[Any], Any]:
    """A loader for `HttpServer`."""

    def load(progress: Callable[[str], None]) -> tuple[Served, Engine]:
        progress("reading the script")
        scheduler = Scheduler(pool, SchedulerConfig(**sched), max_model_len, vocab_size=VOCAB)
        served = Served(
            names=("script", "script-alias"),
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            tokenizer=TOKENIZER,
            render=render,
            compile_constraint=GrammarCompiler(TOKENIZER).compile,
            eos_token_ids=TOKENIZER.eos_token_ids,
            step_cost=lambda shape: (num_tokens(shape), 2.0, 3.0),
            books=lambda engine: live_books("script", 1 << 20, engine),
            cache_info={"block_size": pool.layout.block_size, "num_gpu_blocks": pool.num_blocks},
        )
        return served, Engine(scheduler, ScriptedExecutor(pool, script))

    return load


@dataclass
class Running:
    """A server in a thread. `check` recounts every block in the engine's own thread."""

    server: HttpServer
    script: Script
    url: str
    http: httpx.Client

    @property
    def scheduler(self) -> Scheduler:
        engine = self.server.state.link.engine
        assert engine is not None
        return engine.scheduler

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until the engine has nothing left, then recount."""
        until(lambda: not (self.scheduler.has_work or self.server.state.link.num_open), seconds)
        self.scheduler.check()
        assert self.scheduler.pool.num_used == 0, "blocks were not given back"

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, say: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": say}], **fields)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, in order; `[DONE]` as text."""
        text = self.post(path, stream=True, **body).text
        return [read_event(e) for e in text.split("\n\n") if e.startswith(("data:", "event:"))]


def at_once(served: Running, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """All the completions asked for before the first step runs; the server must have been started with `wait=False`."""
    link, answers = served.server.state.link, [httpx.Response(0)] * len(bodies)

    def ask(i: int) -> None:
        answers[i] = httpx.post(served.url + "/v1/completions", json=bodies[i], timeout=30)

    until(lambda: link.state.value == "ready")
    crowd = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in crowd:
        thread.start()
    until(lambda: link.num_open == len(bodies))
    served.script.gate.set()
    for thread in crowd:
        thread.join()
    return answers


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that must come true soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds} s"
        time.sleep(0.005)


def read_event(text: str) -> Any:
    data = text.split("data: ", 1)[1]
    return data if data == "[DONE]" else json.loads(data)


@contextmanager
def running(
    script: Script | None = None, settings: Settings | None = None, pool: PoolPlan | None = None,
    load: Callable[[Any], Any] | None = None, wait: bool = True, **sched: Any,
) -> Iterator[Running]:  # fmt: skip
    """A server on a free port; its gate is open unless the script brought a closed one and `wait` is False."""
    script = script or Script()
    if wait:
        script.gate.set()
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    load = load or scripted(script, pool or tiny_pool(), **sched)
    server = HttpServer(settings or Settings(quiet=True), load, sock, drain_s=2)
    thread = threading.Thread(target=server.serve_until_done)
    thread.start()
    with httpx.Client(base_url=url, timeout=20) as http:
        try:
            until(lambda: server.started)
            if wait:
                until(lambda: http.get("/health").status_code == 200)
            yield Running(server, script, url, http)
        finally:
            script.gate.set()
            server.should_exit = True
            thread.join(15)
            assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session", autouse=True)
def _no_blocks_left_behind() -> Iterator[None]:
    """A test that keeps blocks on disk keeps them in a folder of its own."""
    here = Path.cwd()
    yield
    assert not list(here.glob("blocks-*.kv"))


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """One scripted server for a whole module."""
    with running() as found:
        yield found
