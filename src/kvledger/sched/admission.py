"""Whether a waiting sequence may start: blocks free, blocks promised, blocks needed. Decides; changes nothing.

A running sequence is *promised* what it was admitted with and has not taken yet: the rest of its prompt, or of its
maximum length under a reserving policy, and otherwise a few tokens of growth, so that admitting one more does not soon
push another out. (On ShareGPT's lengths in a full pool, 32 tokens each cut preemptions to an eighth: docs/log.md.)
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.cache.ledger import BlockLedger
from kvledger.cache.prefix_cache import PrefixCache, PrefixMatch, extend_chain, root_digest
from kvledger.sched.policies import Policy
from kvledger.sched.sequence import Sequence
from kvledger.spec.config import SchedulerConfig


class Admission:
    """The arithmetic of promises over one ledger."""

    def __init__(
        self,
        ledger: BlockLedger,
        prefix: PrefixCache,
        policy: Policy,
        config: SchedulerConfig,
        namespace: bytes = b"",
    ) -> None:
        self.ledger, self.prefix, self.policy, self.namespace = ledger, prefix, policy, namespace
        self.budget, self.growth = config.max_num_batched_tokens, config.growth_tokens

    def fits(self, seq: Sequence, match: PrefixMatch, promised: int) -> bool:
        """Free blocks, less what is promised to others, cover the sequence and the choices yet to split off."""
        whole = self.ledger.layout.blocks_for(self.policy.target(seq), self._in_flight(seq))
        need = max(0, whole - match.num_held) + self._forks(seq)
        return self.ledger.pool.num_free - match.num_idle - promised >= need

    def promised(self, running: Iterable[Sequence]) -> int:
        """Blocks that running sequences may still take."""
        return sum(self.promise(seq) for seq in running)

    def promise(self, seq: Sequence) -> int:
        """Blocks that this running sequence may still take."""
        target = self.policy.target(seq, self.growth)
        more = self.ledger.still_needed(seq.tables, seq.num_computed, target, self._in_flight(seq))
        return more + self._forks(seq)

    def match(self, seq: Sequence) -> PrefixMatch:
        """What the prefix cache has of the sequence but for its last token, whose logits are needed to sample.

        A prompt whose logprobs are asked for is computed in full; a swapped sequence brings its blocks along.
        """
        scored = 0 if seq.params.prompt_logprobs is None else seq.num_prompt_tokens - 1
        if not self.prefix.enabled or seq.num_scored < scored or seq.slots:
            return self.prefix.match(())
        full = (seq.num_tokens - 1) // self.ledger.block_size
        self.extend_digests(seq, full)
        return self.prefix.match(seq.digests[:full])

    def extend_digests(self, seq: Sequence, num_blocks: int) -> None:
        """Make sure that the sequence has the digests of its first `num_blocks` blocks."""
        size = self.ledger.block_size
        if len(seq.digests) < num_blocks:
            root = root_digest(seq.salt, self.namespace)
            extend_chain(seq.digests, root, seq.token_ids[: num_blocks * size], size)

    def _in_flight(self, seq: Sequence) -> int:
        """Tokens of the sequence that one step may compute."""
        return max(1, min(self.budget, seq.num_uncomputed) if self.policy.chunks else seq.num_uncomputed)

    def _forks(self, seq: Sequence) -> int:
        """Blocks of their own for choices yet to split off: a first one each, or all beyond the shared prompt."""
        if not seq.num_forks:
            return 0
        groups = self.ledger.num_groups
        shared = groups * ((seq.num_prompt_tokens - 1) // self.ledger.block_size)
        whole = self.ledger.layout.blocks_for(seq.max_total_tokens) if self.policy.reserves else 0
        return seq.num_forks * max(groups, whole - shared)
