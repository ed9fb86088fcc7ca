"""A step: which sequences compute how many tokens in one forward pass, and what came of it. Frozen.

No flag says prefill or decode: a chunk is `num_tokens` positions from `start`; it samples when it reaches the
sequence's last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvledger.sched.sequence import Sequence
from kvledger.spec.step import StepShape, Work


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + num_tokens) of one sequence."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool  # the chunk ends with the sequence's last token, so its logits choose the next one

    @property
    def num_logits(self) -> int:
        """Rows that go through the output head."""
        if self.seq.params.prompt_logprobs is not None and self.start < self.seq.num_prompt_tokens:
            return self.num_tokens
        return int(self.samples)


@dataclass(frozen=True, slots=True)
class Step:
    """Chunks to compute, after block copies `(source, destination)` (copy-on-write) and tier moves.

    `swaps_out` are (block, tier slot) to save, `swaps_in` are (tier slot, block) to load; both happen before copies.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    swaps_out: tuple[tuple[int, int], ...] = ()
    swaps_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def has_moves(self) -> bool:
        """Blocks are copied or moved between tiers."""
        return bool(self.copies or self.swaps_out or self.swaps_in)

    @property
    def shape(self) -> StepShape:
        """What the step costs, without ids."""
        return tuple(Work(c.start, c.num_tokens, c.num_logits) for c in self.chunks)

    def signature(self) -> tuple[object, ...]:
        """Everything the scheduler decided, comparable between two runs of the same trace."""
        chunks = tuple(
            (c.seq.request_id, c.seq.choice, c.start, c.num_tokens, c.samples, tuple(map(tuple, c.seq.tables)))
            for c in self.chunks
        )
        return (chunks, self.copies, self.swaps_out, self.swaps_in)


@dataclass(frozen=True, slots=True)
class Sample:
    """One chosen token. Logprobs are natural logs after penalties and temperature-free (of the raw distribution).

    `top` are (token id, logprob) of the most likely tokens, best first, as many as the request asked for.
    """

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: a sample per sampling chunk, by seq_id, and the seconds it took (measured or predicted).

    `prompt_logprobs` by seq_id: for each position computed in this chunk whose next token is a prompt token, the
    Sample of that next token. `failed` by seq_id: sequences that must end with this message (a poison request).
    """

    samples: Mapping[int, Sample]
    seconds: float
    prompt_logprobs: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
