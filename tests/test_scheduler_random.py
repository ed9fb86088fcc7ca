"""100,000 random operations on queues, pool and prefix cache, with a full recount after every single one.

The scripted executor also checks each step: no slot written twice, every position read holds the right text.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvledger.cache.tiers import TierPlan
from kvledger.errors import BadRequest
from kvledger.sched.events import Finished
from sched_fakes import LAYOUTS, FakeExecutor, make_scheduler, request, run_all

NUM_WALKS, OPERATIONS = 100, 1000


class Walk:
    """One scheduler, and operations on it by number."""

    def __init__(self, rng):
        self.rng = rng
        self.scheduler = make_scheduler(
            rng.choice([8, 12, 20, 40]),
            rng.choice(list(LAYOUTS)),
            rng.choice([2, 4]),
            prefix=rng.random() < 0.7,
            policy=rng.choice(["continuous", "continuous", "orca", "static"]),
            queueing=rng.choice(["fcfs", "priority"]),
            chunked_prefill=rng.random() < 0.7,
            max_num_batched_tokens=rng.choice([4, 7, 16]),
            max_num_seqs=rng.choice([1, 3, 8]),
            tiers=TierPlan(rng.choice([0, 0, 5, 30]), None, lambda tokens, blocks: tokens % 3 > 0),
        )
        self.executor = FakeExecutor(self.scheduler)
        self.events, self.added, self.num_forks = [], [], 0

    def add(self):
        if len(self.scheduler.waiting) > 12:
            return self.step()  # long queues take time and show nothing new
        rng, name = self.rng, f"r{len(self.added)}"
        length = rng.choice([1, 3, 8, 16, 17, 30])
        prompt = range(1, length + 1) if rng.random() < 0.5 else [rng.randrange(3) for _ in range(length)]
        options = {"n": rng.choice([1, 1, 1, 2, 5]), "priority": rng.randrange(3), "stepwise": rng.random() < 0.1}
        try:
            self.scheduler.add(request(name, prompt, rng.choice([1, 2, 8, 30]), **options))
            self.added.append(name)
        except BadRequest:
            self.scheduler.check()

    def abort(self):
        if self.added:
            self.scheduler.abort(self.rng.choice(self.added[-10:]), self.rng.choice([None, 0, 1]))

    def fork(self):
        live = self._live()
        if live:
            self.num_forks += 1
            self.scheduler.fork(self.rng.choice(live), 1000 + self.num_forks, self.rng.choice([None, 77]))

    def resume(self):
        for seq in self._live():
            if seq.is_held:
                self.scheduler.resume(seq, self.rng.choice([None, 66]))

    def _live(self):
        live = [s for name in self.added[-10:] for s in self.scheduler.sequences(name)]
        return [s for s in live if s.num_output_tokens and not s.num_forks]

    def step(self):
        step = self.scheduler.schedule()
        self.scheduler.check()
        self.events += self.scheduler.update(step, self.executor.run(step))

    def operate(self):
        options = [self.add, self.abort, self.fork, self.resume, self.step]
        self.rng.choices(options, [30, 6, 4, 4, 60])[0]()
        self.scheduler.check()

    def finish(self):
        """Everything that was added ends, once, and nothing stays behind."""
        for name in self.added:
            if any(s.is_stepwise for s in self.scheduler.sequences(name)):
                self.scheduler.abort(name)
        self.events += run_all(self.scheduler, self.executor)
        ends = [(e.request_id, e.choice) for e in self.events if isinstance(e, Finished)]
        assert len(ends) == len(set(ends))
        assert {name for name, _ in ends} == set(self.added)
        assert self.scheduler.pool.num_used == 0


@pytest.mark.parametrize("group", range(10))
def test_random_walks_lose_no_block(group):
    for seed in range(group * NUM_WALKS // 10, (group + 1) * NUM_WALKS // 10):
        walk = Walk(random.Random(seed))
        for _ in range(OPERATIONS):
            walk.operate()
        walk.finish()


class SchedulerMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    @initialize(seed=st.integers(0, 1 << 30))
    def begin(self, seed):
        self.walk = Walk(random.Random(seed))

    @rule()
    def add(self):
        self.walk.add()

    @rule()
    def abort(self):
        self.walk.abort()

    @precondition(lambda self: self.walk.added)
    @rule()
    def fork(self):
        self.walk.fork()

    @rule()
    def resume(self):
        self.walk.resume()

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.walk.step()

    @rule()
    def forget_prefixes(self):
        self.walk.scheduler.prefix.clear()

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "walk"):
            self.walk.scheduler.check()

    def teardown(self):
        if hasattr(self, "walk"):
            self.walk.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
