"""What a step computes, seen from the cost side: context and new tokens per sequence. No ids, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step.

    `new_tokens` are computed after `context` tokens already in the cache; `num_logits` rows go through the output
    head (1 for a sequence that samples, 0 for a chunk in the middle of a prompt, more for prompt logprobs).
    """

    context: int
    new_tokens: int
    num_logits: int = 1


StepShape = tuple[Work, ...]


def num_tokens(shape: StepShape) -> int:
    """Tokens that the step computes."""
    return sum(work.new_tokens for work in shape)


def attention_pairs(work: Work) -> int:
    """Query-key pairs of one sequence under the causal mask: token i of the new ones sees context + i + 1 keys."""
    return work.new_tokens * work.context + work.new_tokens * (work.new_tokens + 1) // 2
