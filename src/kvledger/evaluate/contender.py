"""Whoever predicts: this engine in some configuration. Gives logits of every position, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from kvledger.build import Progress
from kvledger.engine import Engine
from kvledger.evaluate.divergence import Logits
from kvledger.exec.cpu import MODES, CpuExecutor
from kvledger.exec.sampler import score
from kvledger.llm import LLM
from kvledger.sched.sequence import Request
from kvledger.sched.step import Sample, StepResult
from kvledger.spec.sampling import SamplingParams

ROWS = 64  # rows in hand at once: 64 × 262,144 logits in float64 are 128 MiB


class Contender(Protocol):
    """A model to compare. Two contenders give blocks of the same rows."""

    @property
    def name(self) -> str: ...

    @property
    def kv_bytes_per_token(self) -> float | None: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the model, as `Loaded` has it."""

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Row i predicts the token after `token_ids[i]`; blocks of `ROWS` rows, the last may be shorter."""

    def close(self) -> None: ...


class Ours:
    """This engine with a KV type and an arithmetic. Raises what `LLM` raises."""

    def __init__(
        self, name: str, model: str, kv_dtype: str, activations: str, context: int, threads: int | None,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.llm = LLM(
            model, kv_dtype=kv_dtype, activations=activations, num_threads=threads, max_model_len=context,
            max_num_seqs=1, max_num_batched_tokens=ROWS, prefix_caching=False, progress=progress,
        )  # fmt: skip
        self.name = name

    @property
    def kv_bytes_per_token(self) -> float:
        """Scales included; without what a type keeps of the newest tokens in bf16."""
        return self.llm.loaded.pool.layout.bytes_per_token

    @property
    def notes(self) -> tuple[str, ...]:
        return self.llm.loaded.notes

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        return logit_rows(self.llm.engine, token_ids)

    def close(self) -> None:
        self.llm.close()


def logit_rows(engine: Engine, token_ids: Sequence[int]) -> Iterator[Logits]:
    """Logits of every position of a prompt, a step's rows at a time."""
    every_row = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    return _drive(engine, Request("window", tuple(token_ids), every_row), lambda row: Sample(int(row.argmax())))


def force(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> list[Sample]:
    """The answer's tokens put in place of what would be sampled, each with the logprob and rank the model gives it."""
    given: list[Sample] = []

    def choose(row: Logits) -> Sample:
        given.append(score(row, answer[len(given)], 0))
        return given[-1]

    params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    for _ in _drive(engine, Request("forced", tuple(prompt), params), choose):
        pass
    return given


def _drive(engine: Engine, request: Request, choose: Callable[[Logits], Sample]) -> Iterator[Logits]:
    """The scheduler's own steps for one request; `choose` takes the place of the sampler. Yields each step's logits."""
    scheduler, executor = engine.scheduler, cast(CpuExecutor, engine.executor)
    scheduler.add(request)
    while scheduler.has_work:
        step, samples = scheduler.schedule(), {}
        if step.chunks:
            rows = executor.logits(step)
            samples = {c.seq.seq_id: choose(rows[-1]) for c in step.chunks if c.samples}
            yield rows
        scheduler.update(step, StepResult(samples, 0.0))


def arithmetic_name(activations: str) -> str:
    """`auto (bf16)`: what the mode means on this machine."""
    return f"auto ({MODES['auto']})" if activations == "auto" else activations
