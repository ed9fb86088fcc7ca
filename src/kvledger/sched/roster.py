"""Who is here, what they hold, and what there is to tell: sequences between waiting, running and ended.

Carries out what the scheduler decides: start, preempt, clone, end. Every change of a block's holder happens here or in
the ledger below, so `check` can recount it all.
"""

from __future__ import annotations

from kvledger.cache.block_pool import BlockPool
from kvledger.cache.ledger import BlockLedger, Tables, moves
from kvledger.cache.prefix_cache import Key, PrefixCache, PrefixMatch
from kvledger.cache.tiers import TierPlan, Tiers
from kvledger.plan.pool import PoolPlan
from kvledger.sched.books import Books
from kvledger.sched.draft import Draft, Moves
from kvledger.sched.events import Admitted, Event, Finished, Preempted
from kvledger.sched.policies import Policy
from kvledger.sched.sequence import Request, Sequence, Status
from kvledger.sched.sequence_list import SequenceList
from kvledger.spec.config import Queueing


class Roster:
    """Sequences by state, over one pool of blocks, one prefix cache and the tiers beyond."""

    def __init__(
        self, plan: PoolPlan, policy: Policy, queueing: Queueing, prefix_caching: bool, tiers: TierPlan | None
    ) -> None:
        self.plan, self.policy = plan, policy
        self.pool = BlockPool(plan.num_blocks)
        self.ledger = BlockLedger(plan.layout, self.pool)
        self.tiers = Tiers(tiers or TierPlan())
        self.prefix = PrefixCache(self.pool, plan.layout.groups, prefix_caching, self.tiers.find)
        self.waiting = SequenceList(queueing)
        self.running = SequenceList(queueing)
        self.requests: dict[str, list[Sequence]] = {}  # live sequences by request
        self.events: list[Event] = []
        self.saves: Moves = []  # (block, slot) of new prefix blocks, for the next step
        self._parked: list[tuple[Sequence, list[Finished]]] = []  # ended members of a static batch
        self._spent: list[Tables] = []  # host slots that the last step has read
        self._num_arrivals = self._num_sequences = 0

    def add(self, request: Request, max_total_tokens: int) -> Sequence:
        """A new request's first sequence, waiting."""
        params, self._num_arrivals = request.params, self._num_arrivals + 1
        seq = Sequence(
            self._next_id(), request.request_id, list(request.prompt_token_ids), len(request.prompt_token_ids),
            params, max_total_tokens, priority=request.priority, salt=request.salt, constraint=request.constraint,
            seed=request.seed if params.seed is None else params.seed, eos_token_ids=request.eos_token_ids,
            arrival=self._num_arrivals, num_forks=params.n - 1, is_stepwise=request.stepwise,
        )  # fmt: skip
        self.requests[request.request_id] = [seq]
        self.waiting.add(seq)
        return seq

    def clone(self, seq: Sequence, choice: int, num_computed: int) -> Sequence:
        """A sequence with the same tokens that shares the blocks of positions [0, num_computed)."""
        is_running = seq.status is Status.RUNNING
        num_computed = min(num_computed, seq.num_computed) if is_running else 0
        child = Sequence(
            self._next_id(), seq.request_id, list(seq.token_ids), seq.num_prompt_tokens, seq.params,
            seq.max_total_tokens, choice, seq.priority, seq.seed, seq.salt,
            None if seq.constraint is None else seq.constraint.fork(), seq.eos_token_ids,
            num_computed=num_computed, status=Status.RUNNING if is_running else Status.WAITING,
            num_preemptions=seq.num_preemptions,
            cumulative_logprob=seq.cumulative_logprob, arrival=seq.arrival, is_stepwise=seq.is_stepwise,
            is_held=seq.is_held, num_scored=seq.num_scored,
        )  # fmt: skip
        child.digests = seq.digests[: num_computed // self.ledger.block_size]
        child.num_entered = min(seq.num_entered, len(child.digests))
        if is_running:
            child.tables = self.ledger.share(seq.tables, num_computed)
        (self.running if is_running else self.waiting).add(child)
        self.requests[seq.request_id].append(child)
        return child

    def start(self, seq: Sequence, match: PrefixMatch, draft: Draft) -> None:
        """Move the sequence from waiting to running, with the blocks that were found or are loaded."""
        self.waiting.remove(seq)
        if seq.status is Status.SWAPPED:
            seq.tables = self.ledger.take_like(seq.slots)
            draft.load(seq, moves(seq.slots, seq.tables))
            self._spent.append(seq.slots)
            seq.slots = ()
        else:
            self.ledger.adopt(match.tables)
            seq.tables = match.tables
            draft.load(seq, self.ledger.fill(seq.tables, match.loads))
            seq.num_computed = match.num_blocks * self.ledger.block_size
            seq.num_entered = 0 if match.loads else match.num_blocks
        seq.status = Status.RUNNING
        is_first = not seq.num_preemptions
        if is_first:
            seq.num_cached = seq.num_computed
            if self.prefix.enabled:
                self.prefix.count(seq.num_prompt_tokens, seq.num_cached)
        self.running.add(seq)
        self.events.append(Admitted(*who(seq), seq.num_tokens, seq.num_computed, is_first))

    def preempt(self, seq: Sequence, draft: Draft) -> None:
        """Take all blocks of a running sequence; it will have them back from the host tier, or recompute them."""
        filled = self.ledger.head(seq.tables, seq.num_computed)
        swaps = draft.is_settled(seq) and self.tiers.can_swap(seq.num_computed, self.ledger.held(filled))
        draft.preempt(seq)
        self.running.remove(seq)
        self.events.append(Preempted(*who(seq), seq.num_computed, swaps))
        if swaps:
            seq.slots, seq.status = self.tiers.take_slots(filled), Status.SWAPPED
            draft.swaps_out += moves(filled, seq.slots)
        else:
            seq.num_computed, seq.status = 0, Status.WAITING
        self.ledger.release(seq.tables)
        seq.num_entered = 0
        seq.num_preemptions += 1
        self.waiting.add(seq)

    def end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None, message: str = "") -> None:
        """Finish a live sequence. A static batch keeps its blocks, and its news, until the last member is done."""
        is_running = seq.status is Status.RUNNING
        (self.running if is_running else self.waiting).remove(seq)
        seq.status, seq.finish_reason, seq.stop_reason, seq.is_held = Status.FINISHED, reason, stop_reason, False
        self.requests[seq.request_id].remove(seq)
        if not self.requests[seq.request_id]:
            del self.requests[seq.request_id]
        ends = [self._farewell(seq, choice, message) for choice in range(seq.choice, seq.choice + 1 + seq.num_forks)]
        if is_running and not self.policy.refills:
            self._parked.append((seq, ends))
            if not len(self.running):
                self._release_batch()
        else:
            self.ledger.release(seq.tables)
            self.tiers.release_slots(seq.slots)
            self.events += ends

    @staticmethod
    def _farewell(seq: Sequence, choice: int, message: str) -> Finished:
        """The last event of a choice, also of one that never came to split off."""
        return Finished(
            seq.request_id, choice, seq.seq_id, seq.finish_reason or "", seq.stop_reason, seq.num_prompt_tokens,
            seq.num_output_tokens, seq.num_cached, seq.num_preemptions, message,
        )  # fmt: skip

    def _release_batch(self) -> None:
        for seq, ends in self._parked:
            self.ledger.release(seq.tables)
            self.events += ends
        self._parked = []

    def release_parked(self) -> bool:
        """Blocks of a static batch's ended members, needed after all: more choices than were reserved for."""
        freed = [seq for seq, _ in self._parked if self.ledger.held(seq.tables)]
        for seq in freed:
            self.ledger.release(seq.tables)
        return bool(freed)

    def begin_moves(self, draft: Draft) -> None:
        """Slots that the last step read are free; blocks entered since are saved before anything overwrites them."""
        for slots in self._spent:
            self.tiers.release_slots(slots)
        draft.swaps_out, self.saves, self._spent = self.saves, [], []

    def enter(self, key: Key, block: int) -> None:
        """A full block may be found from now on, here and on disk."""
        self.prefix.enter(*key, block)
        if (slot := self.tiers.claim(key)) is not None:
            self.saves.append((block, slot))

    def books(self, num_reserved: int) -> Books:
        """Where the blocks are, now. O(blocks): for reports."""
        return Books.of(self.plan, self.pool, tuple(self.running), num_reserved)

    def check(self) -> None:
        """Recount blocks and queues from scratch. AssertionError on any disagreement."""
        holders = (*self.running, *(seq for seq, _ in self._parked))
        self.pool.check(table for seq in holders for table in seq.tables)
        self.prefix.check()
        self.tiers.check([*self._spent, *(seq.slots for seq in self.waiting)])
        live = [seq for sequences in self.requests.values() for seq in sequences]
        assert sorted(s.seq_id for s in live) == sorted(s.seq_id for s in (*self.running, *self.waiting))
        assert not any(table for seq in self.waiting for table in seq.tables), "a waiting sequence holds blocks"
        for seq in self.running:
            assert seq.num_computed <= len(seq.tables[0]) * self.ledger.block_size, "positions without a block"

    def _next_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences


def who(seq: Sequence) -> tuple[str, int, int]:
    """What every event begins with."""
    return seq.request_id, seq.choice, seq.seq_id
