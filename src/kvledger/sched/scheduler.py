"""The one scheduler: who runs in the next step, with which blocks. Served by any executor, real or simulated.

`schedule()` decides and allocates; `update()` takes what the step gave and is the only place where sequences grow or
end. No clock, no text, no tensors.

The order of sequences is total: (priority, arrival, choice). Whoever needs a block that is not there takes it from
the last in that order, so the first one always gets on: no live-lock. A sequence is admitted only if its whole
prompt, what is promised to those who run, and some growth for each of them are free: no thrash.
"""

from __future__ import annotations

from kvledger.cache.tiers import TierPlan
from kvledger.errors import BadRequest
from kvledger.plan.pool import PoolPlan
from kvledger.sched.admission import Admission
from kvledger.sched.books import Books
from kvledger.sched.draft import Draft
from kvledger.sched.ending import ending
from kvledger.sched.events import Event, PromptScored, TokenEvent
from kvledger.sched.limits import check_request
from kvledger.sched.policies import policy_of
from kvledger.sched.roster import Roster, who
from kvledger.sched.sequence import Request, Sequence, Status
from kvledger.sched.step import Chunk, Sample, Step, StepResult
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
        self.roster = roster = Roster(pool, self.policy, config.queueing, prefix_caching, tiers)
        self.pool, self.ledger, self.prefix, self.tiers = roster.pool, roster.ledger, roster.prefix, roster.tiers
        self.waiting, self.running = roster.waiting, roster.running
        self.admission = Admission(self.ledger, self.prefix, self.policy, config, namespace)

    # ------------------------------------------------------------------------------------------ requests come and go

    def add(self, request: Request) -> Sequence:
        """Queue a request; its further choices split off when the prompt is computed.

        Raises BadRequest or ContextTooLong; the scheduler is then unchanged.
        """
        if request.request_id in self.roster.requests:
            raise BadRequest(f"request id {request.request_id!r} is already running", "request_id")
        longest = check_request(request, self.plan, self.max_model_len, self.vocab_size)
        return self.roster.add(request, longest)

    def abort(
        self, request_id: str, choice: int | None = None, reason: str = "abort",
        stop_reason: int | str | None = None, message: str = "",
    ) -> None:  # fmt: skip
        """End one choice of a request, or all; blocks are free at once. Unknown or ended ones are left alone."""
        for seq in tuple(self.roster.requests.get(request_id, ())):
            if choice is None or seq.choice == choice:
                self.roster.end(seq, reason, stop_reason, message)

    def fork(self, seq: Sequence, choice: int, last_token_id: int | None = None) -> Sequence:
        """A copy of a live sequence that shares its blocks; `last_token_id` replaces the newest token.

        Choice numbers of one request must differ. The copy runs (or waits) as the original does.
        """
        child = self.roster.clone(seq, choice, seq.num_computed)
        child.token_ids[-1] = seq.token_ids[-1] if last_token_id is None else last_token_id
        return child

    def resume(self, seq: Sequence, last_token_id: int | None = None) -> None:
        """Let a stepwise sequence compute its newest token (or `last_token_id` in its place) and sample the next."""
        if last_token_id is not None:
            seq.token_ids[-1] = last_token_id
        seq.is_held = False

    def fail_holders(self, message: str) -> None:
        """What blocks hold is in doubt: end everyone who holds some, in the pool or beyond, and forget all prefixes."""
        for seq in (*self.running, *self.waiting):
            if seq.tables or seq.slots:
                self.roster.end(seq, "error", message=message)
        self.prefix.clear()
        self.roster.saves.clear()

    def sequences(self, request_id: str) -> tuple[Sequence, ...]:
        """The request's live sequences."""
        return tuple(self.roster.requests.get(request_id, ()))

    @property
    def has_work(self) -> bool:
        """Something waits or runs, events have not been fetched or blocks not been saved yet."""
        return bool(self.roster.requests or self.roster.events or self.roster.saves)

    # ------------------------------------------------------------------------------------------ schedule: decide

    def schedule(self) -> Step:
        """The next step; empty when nothing can run. Decoding comes first, then begun prompts, then new ones."""
        draft = Draft(self.config)
        self.roster.begin_moves(draft)
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
        saves, self.roster.saves = tuple(self.roster.saves), []
        return Step((), swaps_out=saves)

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
            if self.roster.release_parked():
                continue
            victim = self._victim(seq)
            if victim is None:
                return self._last_resort(seq, room)
            self.roster.preempt(victim, draft)
            if victim is seq:
                return 0
        return min(room, wanted)

    def _last_resort(self, seq: Sequence, room: int) -> int:
        """Alone in the pool and still short: cut the prompt, whatever the policy; or the sequence has outgrown it."""
        if room < 1:
            self.roster.end(seq, "length")
        return max(0, room)

    def _victim(self, seq: Sequence) -> Sequence | None:
        """Who yields a block: one that is held, else the last in order. None when `seq` is alone: it has outgrown."""
        held = [other for other in self.running if other.is_held and other is not seq]
        if held:
            return held[-1]
        return self.running[-1] if len(self.running) > 1 else None

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
                self.roster.start(seq, match, draft)
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
            self.roster.preempt(held[-1], draft)
        return bool(held)

    # ------------------------------------------------------------------------------------------ update: mutate

    def update(self, step: Step, result: StepResult) -> list[Event]:
        """Book what the step gave: tokens, ends, full blocks, free blocks. Returns everything that happened since."""
        for chunk in step.chunks:
            if chunk.seq.is_finished:
                continue  # aborted while the step ran
            if (message := result.failed.get(chunk.seq.seq_id)) is not None:
                self.roster.end(chunk.seq, "error", message=message)
            else:
                self._book(chunk, result)
        events, self.roster.events = self.roster.events, []
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
                    self.roster.enter((seq.digests[index], group), table[index])
        seq.num_entered = full

    def _score(self, chunk: Chunk, samples: tuple[Sample, ...]) -> None:
        """Deliver prompt logprobs once, also when a preempted prompt is computed again."""
        seq = chunk.seq
        fresh = samples[max(0, seq.num_scored - chunk.start) :]
        if fresh:
            seq.num_scored += len(fresh)
            self.roster.events.append(PromptScored(*who(seq), fresh))

    def _split(self, seq: Sequence) -> None:
        """At the first token the other choices start, with the blocks of the prompt but for its last token."""
        for choice in range(seq.choice + 1, seq.choice + 1 + seq.num_forks):
            self.roster.clone(seq, choice, seq.num_prompt_tokens - 1)
        seq.num_forks = 0

    def _append(self, seq: Sequence, sample: Sample) -> None:
        seq.token_ids.append(sample.token_id)
        seq.cumulative_logprob += sample.logprob
        self.roster.events.append(TokenEvent(*who(seq), sample, seq.num_output_tokens))
        try:
            if seq.constraint is not None:
                seq.constraint.accept(sample.token_id)
        except BadRequest as error:  # a grammar that gave up ends its own request
            self.roster.end(seq, "error", message=str(error))
            return
        if (end := ending(seq)) is not None:
            self.roster.end(seq, *end)
        elif seq.is_stepwise:
            seq.is_held = True

    # ------------------------------------------------------------------------------------------ the books

    def books(self) -> Books:
        """Where the blocks are, now. O(blocks): for reports."""
        return self.roster.books(self.admission.promised(self.running) if self.policy.reserves else 0)

    def check(self) -> None:
        """Recount blocks and queues from scratch. AssertionError on any disagreement."""
        self.roster.check()
