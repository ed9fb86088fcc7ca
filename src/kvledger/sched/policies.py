"""Scheduling policies: four answers that make the one scheduler behave like engines did before and do now.

| policy     | memory of a sequence        | a prompt          | who joins                          | as in            |
| ---------- | --------------------------- | ----------------- | ---------------------------------- | ---------------- |
| static     | its maximum length, at once | whole, one step   | a batch when the last one is done  | batch servers    |
| orca       | its maximum length, at once | whole, one step   | anyone, at every step              | Orca, OSDI 2022  |
| continuous | blocks as it grows          | chunks of a step  | anyone, at every step              | vLLM, Sarathi    |

A row is all a policy is: adding one is adding a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvledger.errors import UnknownName
from kvledger.sched.sequence import Sequence
from kvledger.spec.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """How memory is promised, how prompts are cut and when sequences may join and leave."""

    name: str
    reserves: bool  # room for the maximum length is set aside at admission: nobody is ever preempted
    chunks: bool  # a prompt may be spread over several steps
    refills: bool  # sequences join while others run, and leave as they end

    def target(self, seq: Sequence, growth: int = 1) -> int:
        """Tokens for which a sequence must be able to find room; `growth` more than it has, unless all is reserved."""
        return seq.max_total_tokens if self.reserves else min(seq.num_tokens + growth, seq.max_total_tokens)


POLICIES = {
    p.name: p
    for p in (
        Policy("continuous", reserves=False, chunks=True, refills=True),
        Policy("orca", reserves=True, chunks=False, refills=True),
        Policy("static", reserves=True, chunks=False, refills=False),
    )
}


def policy_of(config: SchedulerConfig) -> Policy:
    """The policy the configuration names; without chunked prefill if it says so. Raises UnknownName."""
    if config.policy not in POLICIES:
        raise UnknownName("policy", config.policy, POLICIES)
    policy = POLICIES[config.policy]
    return policy if config.chunked_prefill else replace(policy, chunks=False)
