"""The one scheduler: who runs in the next step, with which blocks. Served by any executor, real or simulated.

`schedule()` decides and allocates; `update()` takes what the step gave and is the only place where sequences grow or
end. No clock, no text, no tensors.

The order of sequences is total: (priority, arrival, choice). Whoever needs a block that is not there takes it from
the last in that order, so the first one always gets on: no live-lock. A sequence is admitted only if its whole
prompt, what is promised to those who run, and some growth for each of them are free: no thrash.
"""

from __future__ import annotations

from kvledger.cache.block_pool import BlockPool
from kvledger.cache.ledger import BlockLedger, Tables, moves
from kvledger.cache.prefix_cache import Key, PrefixCache, PrefixMatch
from kvledger.cache.tiers import TierPlan, Tiers
from kvledger.errors import BadRequest
from kvledger.plan.pool import PoolPlan
from kvledger.sched.admission import Admission
from kvledger.sched.books import Books
from kvledger.sched.draft import Draft
from kvledger.sched.ending import ending
from kvledger.sched.events import Admitted, Event, Finished, Preempted, PromptScored, TokenEvent
from kvledger.sched.limits import check_request
from kvledger.sched.policies import policy_of
from kvledger.sched.sequence import Request, Sequence, Status
from kvledger.sched.step import Chunk, Sample, Step, StepResult
from kvledger.sched.waiting import SequenceList
from kvledger.spec.config import SchedulerConfig


class Scheduler:
    """Queues, block pool, prefix cache and the rules between them.

    `pool` is the planned pool: the scheduler manages exactly its blocks. `vocab_size` None leaves ids unchecked.
    """

    def __init__(
        self,
        pool: PoolPlan,
        config: SchedulerConfig,
        max_model_len: int,
        *,
        prefix_caching: bool = True,
        vocab_size: int | None = None,
        namespace: bytes = b"",
        tiers: TierPlan | None = None,
    ) -> None:
        self.plan, self.config, self.policy = pool, config, policy_of(config)
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.pool = BlockPool(pool.num_blocks)
        self.ledger = BlockLedger(pool.layout, self.pool)
        self.tiers = Tiers(tiers or TierPlan())
        self.prefix = PrefixCache(self.pool, pool.layout.groups, prefix_caching, self.tiers.find)
        self.admission = Admission(self.ledger, self.prefix, self.policy, config, namespace)
        self.waiting = SequenceList(config.queueing)
        self.running = SequenceList(config.queueing)
        self._parked: list[tuple[Sequence, list[Finished]]] = []  # ended members of a static batch
        self._requests: dict[str, list[Sequence]] = {}
        self._events: list[Event] = []
        self._saves: list[tuple[int, int]] = []  # (block, slot) of new prefix blocks, for the next step
        self._spent: list[Tables] = []  # host slots that the last step has read
        self._num_arrivals = self._num_sequences = 0

    # ------------------------------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> Sequence:
        """Queue a request; its further choices split off when the prompt is computed.

        Raises BadRequest or ContextTooLong; the scheduler is then unchanged.
        """
        if request.request_id in self._requests:
            raise BadRequest(f"request id {request.request_id!r} is already running", "request_id")
        longest = check_request(request, self.plan, self.max_model_len, self.vocab_size)
        params, self._num_arrivals = request.params, self._num_arrivals + 1
        seq = Sequence(
            self._next_id(), request.request_id, list(request.prompt_token_ids), len(request.prompt_token_ids),
            params, longest, priority=request.priority, salt=request.salt, constraint=request.constraint,
            seed=request.seed if params.seed is None else params.seed, eos_token_ids=request.eos_token_ids,
            arrival=self._num_arrivals, num_forks=params.n - 1, is_stepwise=request.stepwise,
        )  # fmt: skip
        self._requests[request.request_id] = [seq]
        self.waiting.add(seq)
        return seq

    def abort(
        self, request_id: str, choice: int | None = None, reason: str = "abort",
        stop_reason: int | str | None = None, message: str = "",
    ) -> None:  # fmt: skip
        """End one choice of a request, or all; blocks are free at once. Unknown or ended ones are left alone."""
        for seq in tuple(self._requests.get(request_id, ())):
            if choice is None or seq.choice == choice:
                self._end(seq, reason, stop_reason, message)

    def fork(self, seq: Sequence, choice: int, last_token_id: int | None = None) -> Sequence:
        """A copy of a live sequence that shares its blocks; `last_token_id` replaces the newest token.

        Choice numbers of one request must differ. The copy runs (or waits) as the original does.
        """
        child = self._clone(seq, choice, seq.num_computed)
        child.token_ids[-1] = seq.token_ids[-1] if last_token_id is None else last_token_id
        return child

    def resume(self, seq: Sequence, last_token_id: int | None = None) -> None:
        """Let a stepwise sequence compute its newest token (or `last_token_id` in its place) and sample the next."""
        if last_token_id is not None:
            seq.token_ids[-1] = last_token_id
        seq.is_held = False

    def sequences(self, request_id: str) -> tuple[Sequence, ...]:
        """The request's live sequences."""
        return tuple(self._requests.get(request_id, ()))

    @property
    def has_work(self) -> bool:
        """Something waits or runs, events have not been fetched or blocks not been saved yet."""
        return bool(self._requests or self._events or self._saves)

    # ------------------------------------------------------------------------------------------ schedule: decide

    def schedule(self) -> Step:
        """The next step; empty when nothing can run. Decoding comes first, then begun prompts, then new ones."""
        draft = Draft(self.config)
        self._begin_moves(draft)
        joins = self.policy.refills or not len(self.running)
        prompts = []
        for seq in tuple(self.running):
            if seq.num_uncomputed > 1:
                prompts.append(seq)
            else:
                self._place(seq, draft)
        self._place_prompts(prompts, draft)
        if joins:
            self._admit(draft)
        return draft.step()

    def last_saves(self) -> Step:
        """A step that only saves what has not been saved yet: for the end of an engine's life."""
        saves, self._saves = tuple(self._saves), []
        return Step((), swaps_out=saves)

    def _begin_moves(self, draft: Draft) -> None:
        """Slots that the last step read are free; blocks entered since are saved before anything overwrites them."""
        for slots in self._spent:
            self.tiers.release_slots(slots)
        draft.swaps_out, self._saves, self._spent = self._saves, [], []

    def _place_prompts(self, prompts: list[Sequence], draft: Draft) -> None:
        """Begun prompts in order; one longer than the step first leaves a share of the budget to those behind it."""
        if self.policy.chunks and prompts and prompts[0].num_uncomputed > draft.tokens_left:
            with draft.only_share():
                for seq in prompts[1:]:
                    self._place(seq, draft)
                self._admit(draft)
        for seq in prompts:
            if not draft.has(seq):
                self._place(seq, draft)

    def _place(self, seq: Sequence, draft: Draft) -> None:
        """Give the sequence its part of the step, if budget and blocks allow."""
        if seq.status is not Status.RUNNING or seq.is_held:
            return
        wanted = draft.wanted(seq, self.policy.chunks)
        if wanted == 1 and self.ledger.is_writable(seq.tables, seq.num_computed):  # most of decoding
            draft.place(seq, 1)
        elif wanted and (granted := self._make_room(seq, wanted, draft)):
            copies = self.ledger.extend(seq.tables, seq.num_computed, seq.num_computed + granted)
            draft.place(seq, granted, copies)

    def _make_room(self, seq: Sequence, wanted: int, draft: Draft) -> int:
        """Free blocks for `wanted` tokens, or fewer where a prompt may be cut; 0 if the sequence itself must yield."""
        least = 1 if self.policy.chunks else wanted
        while (room := self.ledger.room(seq.tables, seq.num_computed)) < least:
            if self._release_parked():
                continue
            victim = self._victim(seq)
            if victim is None:
                return self._last_resort(seq, room)
            self._preempt(victim, draft)
            if victim is seq:
                return 0
        return min(room, wanted)

    def _last_resort(self, seq: Sequence, room: int) -> int:
        """Alone in the pool and still short: cut the prompt, whatever the policy; or the sequence has outgrown it."""
        if room < 1:
            self._end(seq, "length")
        return max(0, room)

    def _release_parked(self) -> bool:
        """Blocks of a static batch's ended members, needed after all: more choices than were reserved for."""
        freed = [seq for seq, _ in self._parked if self.ledger.held(seq.tables)]
        for seq in freed:
            self.ledger.release(seq.tables)
        return bool(freed)

    def _victim(self, seq: Sequence) -> Sequence | None:
        """Who yields a block: one that is held, else the last in order. None when `seq` is alone: it has outgrown."""
        held = [other for other in self.running if other.is_held and other is not seq]
        if held:
            return held[-1]
        return self.running[-1] if len(self.running) > 1 else None

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        """Take all blocks of a running sequence; it will have them back from the host tier, or recompute them."""
        filled = self.ledger.head(seq.tables, seq.num_computed)
        swaps = draft.is_settled(seq) and self.tiers.can_swap(seq.num_computed, self.ledger.held(filled))
        draft.preempt(seq)
        self.running.remove(seq)
        self._events.append(Preempted(*_who(seq), seq.num_computed, swaps))
        if swaps:
            seq.slots, seq.status = self.tiers.take_slots(filled), Status.SWAPPED
            draft.swaps_out += moves(filled, seq.slots)
        else:
            seq.num_computed, seq.status = 0, Status.WAITING
        self.ledger.release(seq.tables)
        seq.num_entered = 0
        seq.num_preemptions += 1
        self.waiting.add(seq)

    def _admit(self, draft: Draft) -> None:
        """Start waiting sequences in order until one does not fit. A static batch ignores the token budget here."""
        if draft.has_preempted or not len(self.waiting):
            return
        admission, promised = self.admission, -1
        while (seq := self._next_waiting()) is not None and self._has_seat(seq, draft):
            match = admission.match(seq)
            promised = admission.promised(self.running) if promised < 0 else promised
            # with nobody running the first in line always starts: it can be held, or it would have been refused
            if not len(self.running) or admission.fits(seq, match, promised):
                self._start(seq, match, draft)
                self._place(seq, draft)
                promised += admission.promise(seq)
            elif not self._any_active() and self._yield_held(draft):
                promised = -1
            else:
                return

    def _next_waiting(self) -> Sequence | None:
        return next((seq for seq in self.waiting if not seq.is_held), None)

    def _has_seat(self, seq: Sequence, draft: Draft) -> bool:
        if len(self.running) >= self.config.max_num_seqs:
            return False
        return not self.policy.refills or draft.wanted(seq, self.policy.chunks) > 0

    def _any_active(self) -> bool:
        return any(not seq.is_held for seq in self.running)

    def _yield_held(self, draft: Draft) -> bool:
        """Preempt the last held sequence for one that can go on."""
        held = [seq for seq in self.running if seq.is_held]
        if held:
            self._preempt(held[-1], draft)
        return bool(held)

    def _start(self, seq: Sequence, match: PrefixMatch, draft: Draft) -> None:
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
        self._events.append(Admitted(*_who(seq), seq.num_tokens, seq.num_computed, is_first))

    # ------------------------------------------------------------------------------------------ update: mutate

    def update(self, step: Step, result: StepResult) -> list[Event]:
        """Book what the step gave: tokens, ends, full blocks, free blocks. Returns everything that happened since."""
        for chunk in step.chunks:
            if chunk.seq.is_finished:
                continue  # aborted while the step ran
            if (message := result.failed.get(chunk.seq.seq_id)) is not None:
                self._end(chunk.seq, "error", message=message)
            else:
                self._book(chunk, result)
        events, self._events = self._events, []
        return events

    def _book(self, chunk: Chunk, result: StepResult) -> None:
        seq = chunk.seq
        seq.num_computed = chunk.start + chunk.num_tokens
        self._enter_blocks(seq)
        self._score(chunk, result.prompt_logprobs.get(seq.seq_id, ()))
        if chunk.samples:
            sample = result.samples[seq.seq_id]
            self._split(seq)
            self._append(seq, sample)
        if not seq.is_finished:
            self.ledger.pass_by(seq.tables, seq.num_computed)

    def _enter_blocks(self, seq: Sequence) -> None:
        """Blocks that are full now may be found by others."""
        full = seq.num_computed // self.ledger.block_size
        if not self.prefix.enabled or full <= seq.num_entered:
            return
        self.admission.extend_digests(seq, full)
        for index in range(seq.num_entered, full):
            for group, table in enumerate(seq.tables):
                if table[index] >= 0:
                    self._enter((seq.digests[index], group), table[index])
        seq.num_entered = full

    def _enter(self, key: Key, block: int) -> None:
        self.prefix.enter(*key, block)
        if (slot := self.tiers.claim(key)) is not None:
            self._saves.append((block, slot))

    def _score(self, chunk: Chunk, samples: tuple[Sample, ...]) -> None:
        """Deliver prompt logprobs once, also when a preempted prompt is computed again."""
        seq = chunk.seq
        fresh = samples[max(0, seq.num_scored - chunk.start) :]
        if fresh:
            seq.num_scored += len(fresh)
            self._events.append(PromptScored(*_who(seq), fresh))

    def _split(self, seq: Sequence) -> None:
        """At the first token the other choices start, with the blocks of the prompt but for its last token."""
        for choice in range(seq.choice + 1, seq.choice + 1 + seq.num_forks):
            self._clone(seq, choice, seq.num_prompt_tokens - 1)
        seq.num_forks = 0

    def _append(self, seq: Sequence, sample: Sample) -> None:
        seq.token_ids.append(sample.token_id)
        seq.cumulative_logprob += sample.logprob
        self._events.append(TokenEvent(*_who(seq), sample, seq.num_output_tokens))
        try:
            if seq.constraint is not None:
                seq.constraint.accept(sample.token_id)
        except BadRequest as error:  # a grammar that gave up ends its own request
            self._end(seq, "error", message=str(error))
            return
        if (end := ending(seq)) is not None:
            self._end(seq, *end)
        elif seq.is_stepwise:
            seq.is_held = True

    def _clone(self, seq: Sequence, choice: int, num_computed: int) -> Sequence:
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
        self._requests[seq.request_id].append(child)
        return child

    def _end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None, message: str = "") -> None:
        """Finish a live sequence. A static batch keeps its blocks, and its news, until the last member is done."""
        is_running = seq.status is Status.RUNNING
        (self.running if is_running else self.waiting).remove(seq)
        seq.status, seq.finish_reason, seq.stop_reason, seq.is_held = Status.FINISHED, reason, stop_reason, False
        self._requests[seq.request_id].remove(seq)
        if not self._requests[seq.request_id]:
            del self._requests[seq.request_id]
        ends = [self._farewell(seq, choice, message) for choice in range(seq.choice, seq.choice + 1 + seq.num_forks)]
        if is_running and not self.policy.refills:
            self._parked.append((seq, ends))
            if not len(self.running):
                self._release_batch()
        else:
            self.ledger.release(seq.tables)
            self.tiers.release_slots(seq.slots)
            self._events += ends

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
            self._events += ends
        self._parked = []

    def _next_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    # ------------------------------------------------------------------------------------------ the books

    def books(self) -> Books:
        """Where the blocks are, now. O(blocks): for reports."""
        holders = [*self.running, *(seq for seq, _ in self._parked)]
        return Books.of(
            self.plan, self.pool, holders, self.admission.promised(self.running) if self.policy.reserves else 0
        )

    def check(self) -> None:
        """Recount blocks and queues from scratch. AssertionError on any disagreement."""
        holders = [*self.running, *(seq for seq, _ in self._parked)]
        self.pool.check(table for seq in holders for table in seq.tables)
        self.prefix.check()
        self.tiers.check([*self._spent, *(seq.slots for seq in self.waiting)])
        live = [seq for sequences in self._requests.values() for seq in sequences]
        assert sorted(s.seq_id for s in live) == sorted(s.seq_id for s in (*self.running, *self.waiting))
        assert not any(table for seq in self.waiting for table in seq.tables), "a waiting sequence holds blocks"
        for seq in self.running:
            assert seq.num_computed <= len(seq.tables[0]) * self.ledger.block_size, "positions without a block"


def _who(seq: Sequence) -> tuple[str, int, int]:
    return seq.request_id, seq.choice, seq.seq_id
