"""Whoever predicts: this engine in some configuration. Gives logits of every position, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from kvledger.engine import Engine
from kvledger.evaluate.divergence import Logits
from kvledger.exec.cpu import MODES, CpuExecutor
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

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Row i predicts the token after `token_ids[i]`; blocks of `ROWS` rows, the last may be shorter."""

    def close(self) -> None: ...


class Ours:
    """This engine with a KV type and an arithmetic. Raises what `LLM` raises."""

    def __init__(
        self, name: str, model: str, kv_dtype: str, activations: str, context: int, threads: int | None
    ) -> None:
        self.llm = LLM(
            model, kv_dtype=kv_dtype, activations=activations, num_threads=threads, max_model_len=context,
            max_num_seqs=1, max_num_batched_tokens=ROWS, prefix_caching=False,
        )  # fmt: skip
        self.name = name

    @property
    def kv_bytes_per_token(self) -> float:
        """Of a full block."""
        layout = self.llm.loaded.pool.layout
        return layout.bytes_for(layout.block_size) / layout.block_size

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        return logit_rows(self.llm.engine, token_ids)

    def close(self) -> None:
        self.llm.close()


def logit_rows(engine: Engine, token_ids: Sequence[int]) -> Iterator[Logits]:
    """The scheduler's own steps over one prompt, with the logits of every row in place of a sample."""
    scheduler, executor = engine.scheduler, cast(CpuExecutor, engine.executor)
    every_row = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    scheduler.add(Request("window", tuple(token_ids), every_row))
    while scheduler.has_work:
        step, samples = scheduler.schedule(), {}
        if step.chunks:
            rows = executor.logits(step)
            samples = {c.seq.seq_id: Sample(int(rows[-1].argmax())) for c in step.chunks if c.samples}
            yield rows
        scheduler.update(step, StepResult(samples, 0.0))


def arithmetic_name(activations: str) -> str:
    """`auto (bf16)`: what the mode means on this machine."""
    return f"auto ({MODES['auto']})" if activations == "auto" else activations
