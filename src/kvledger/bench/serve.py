"""How a server feels from outside: an open-loop client that sends on time, whatever the server does.

    kvledger bench serve --url http://127.0.0.1:8000 --workload 128/32 --rate 10 --requests 200

Arrivals are Poisson or a trace's; with `concurrency` the loop is closed instead: so many clients, each sending its
next request when the last has ended. TTFT counts from the moment a request was due to its first text. Works with any
OpenAI-compatible server; needs nothing but asyncio, so that the client takes little of a small machine.
"""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from kvledger.errors import ConfigError
from kvledger.sched.sequence import Request
from kvledger.simulate.replay import Arrival
from kvledger.spec.sampling import SamplingParams

TIMEOUT_S = 600.0
_WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not".split()  # noqa: SIM905
PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds from the start of the run."""

    due_s: float
    status: int = 0  # 0: no answer at all
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    is_complete: bool = False
    failure: str = ""  # why it is not complete, where that was said

    @property
    def ttft_s(self) -> float:
        return (self.end_s if self.first_s is None else self.first_s) - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 with fewer than two."""
        if self.first_s is None or self.num_tokens < 2:
            return 0.0
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good. None: not asked."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        asked = (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s),
            (self.e2e_s, outcome.end_s - outcome.due_s),
        )
        return outcome.is_complete and all(limit is None or value <= limit for limit, value in asked)


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What came of a run. Percentiles by name (`p50` …) in seconds, over complete requests."""

    num_sent: int
    num_complete: int
    num_refused: int  # 503
    num_failed: int
    seconds: float
    num_output_tokens: int
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]
    goodput_per_s: float
    first_failure: str  # of those that failed, in words

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "requests_per_s": self.num_complete / self.seconds if self.seconds else 0.0,
            "tokens_per_s": self.tokens_per_s,
        }


def summarise(outcomes: Sequence[Outcome], slo: Slo) -> ServeBench:
    """Percentiles and counts of a finished run."""
    done = [o for o in outcomes if o.is_complete]
    seconds = max((o.end_s for o in outcomes), default=0.0)
    refused = sum(o.status == 503 for o in outcomes)
    return ServeBench(
        len(outcomes),
        len(done),
        refused,
        len(outcomes) - len(done) - refused,
        seconds,
        sum(o.num_tokens for o in done),
        _percentiles([o.ttft_s for o in done]),
        _percentiles([o.tpot_s for o in done if o.num_tokens > 1]),
        _percentiles([gap for o in done for gap in o.gaps_s]),
        _percentiles([o.end_s - o.due_s for o in done]),
        sum(slo.is_met(o) for o in outcomes) / seconds if seconds else 0.0,
        next((o.failure for o in outcomes if not o.is_complete and o.status != 503), ""),
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES} if ordered else {}


def read_trace(path: Path, count: int, vocab_size: int, max_model_len: int, speed: float = 1.0) -> tuple[Arrival, ...]:
    """The first `count` rows of a CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Azure's format).

    Prompts are random ids of that length, cut with the output to the context; `speed` 2 sends twice as fast.
    Raises ConfigError.
    """
    try:
        with path.open(newline="") as file:
            rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
        start = _moment(rows[0])
        return tuple(_arrival(i, row, start, vocab_size, max_model_len, speed) for i, row in enumerate(rows))
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"{path} is not a trace with TIMESTAMP, ContextTokens, GeneratedTokens: {error}") from error


def _arrival(i: int, row: dict[str, str], start: float, vocab_size: int, limit: int, speed: float) -> Arrival:
    output = max(1, min(int(row["GeneratedTokens"]), limit // 2))
    length = max(1, min(int(row["ContextTokens"]), limit - output))
    rng = Random(i)
    prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
    return Arrival((_moment(row) - start) / speed, Request(f"trace-{i}", prompt, SamplingParams()), output)


def _moment(row: dict[str, str]) -> float:
    return datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    model: str | None = None
    api_key: str | None = None
    as_text: bool = False  # prompts as words, for servers that take no token ids
    ban_ids: tuple[int, ...] = ()  # biased away, for servers that do not know ignore_eos

    @staticmethod
    def of(url: str, **fields: Any) -> Target:
        """`fields` are the other fields. Raises ConfigError on anything but http://HOST:PORT."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url!r} is not http://HOST:PORT")
        return Target(parts.hostname, parts.port or 80, **fields)

    def message(self, arrival: Arrival) -> bytes:
        """The whole HTTP request."""
        body: dict[str, Any] = {
            "prompt": words(arrival.request.prompt_token_ids) if self.as_text else arrival.request.prompt_token_ids,
            "max_tokens": arrival.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model:
            body["model"] = self.model
        if self.ban_ids:
            body["logit_bias"] = {str(token_id): -100 for token_id in self.ban_ids}
        payload = json.dumps(body).encode()
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n{key}"
        return f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload


def words(token_ids: Sequence[int]) -> str:
    """As many short words as there are ids: about a token each in any vocabulary of English."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in token_ids)


async def drive(target: Target, arrivals: Sequence[Arrival], concurrency: int | None = None) -> list[Outcome]:
    """Send every arrival when it is due (or `concurrency` at a time) and wait for all answers."""
    start_s = time.monotonic()
    if concurrency is None:
        return list(await asyncio.gather(*(_send_when_due(target, a, start_s) for a in arrivals)))
    queue = list(reversed(arrivals))
    outcomes: list[Outcome] = []

    async def client() -> None:
        while queue:
            arrival = queue.pop()
            outcomes.append(await _send(target, arrival, start_s, time.monotonic() - start_s))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return outcomes


async def _send_when_due(target: Target, arrival: Arrival, start_s: float) -> Outcome:
    await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
    return await _send(target, arrival, start_s, arrival.at_s)


async def _send(target: Target, arrival: Arrival, start_s: float, due_s: float) -> Outcome:
    outcome = Outcome(due_s)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 20)
            try:
                writer.write(target.message(arrival))
                await read_events(reader, outcome, start_s)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, LookupError, asyncio.IncompleteReadError) as error:
        outcome.failure = f"{type(error).__name__}: {error}".removesuffix(": ")
    outcome.end_s = time.monotonic() - start_s
    return outcome


async def read_events(reader: asyncio.StreamReader, outcome: Outcome, start_s: float) -> None:
    """Follow the answer's events. A server that tells no usage is taken to send a token per event."""
    outcome.status = int((await reader.readline()).split()[1])
    if outcome.status != 200:
        outcome.failure = f"HTTP {outcome.status}: {_message(await reader.read(-1))}"
        return
    outcome.failure = "the answer broke off"
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            outcome.is_complete = outcome.status == 200 and outcome.num_tokens > 0
            return
        event = json.loads(line[6:])
        if "error" in event:
            outcome.failure = _message(line[6:])
        if event.get("choices") and event["choices"][0].get("text"):
            _note_text(outcome, time.monotonic() - start_s)
        if event.get("usage"):
            outcome.num_tokens = event["usage"]["completion_tokens"]


def _message(answer: bytes) -> str:
    """What an error's body says, headers before it or not; else its beginning."""
    body = answer.partition(b"\r\n\r\n")[2] or answer
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace").strip()


def _note_text(outcome: Outcome, now_s: float) -> None:
    outcome.num_tokens += 1
    if outcome.first_s is None:
        outcome.first_s = now_s
    else:
        outcome.gaps_s.append(now_s - outcome.last_s)
    outcome.last_s = now_s
