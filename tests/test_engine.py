"""The loop: what happens when the executor fails, what listeners hear, and how time passes."""

import pytest

from kvledger.cache.tiers import TierPlan
from kvledger.clock import VirtualClock, WallClock
from kvledger.engine import Engine
from kvledger.errors import BadRequest
from kvledger.exec.simulated import Script, SimulatedExecutor
from kvledger.metrics import Metrics
from kvledger.sched.events import Finished, Preempted, TokenEvent
from sched_fakes import FakeExecutor, make_scheduler, request


def make_engine(executor=FakeExecutor, listeners=(), clock=None, **kw):
    scheduler = make_scheduler(**{"num_blocks": 60, **kw})
    return Engine(scheduler, executor(scheduler), clock, listeners)


def run(engine, limit=2000):
    events = []
    for _ in range(limit):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.scheduler.check()
    raise AssertionError("never ends")


def ends(events):
    return {(e.request_id, e.choice): e.finish_reason for e in events if isinstance(e, Finished)}


class Poisoned(FakeExecutor):
    """Raises whenever a step contains request `bad`, before or after the others were computed."""

    def run(self, step):
        if any(c.seq.request_id == "bad" for c in step.chunks):
            raise FloatingPointError("overflow in layer 3")
        return super().run(step)


def test_a_poison_request_fails_alone():
    engine = make_engine(Poisoned)
    for name in ("a", "bad", "b"):
        engine.add(request(name, 5, n=2))
    events = run(engine)
    assert ends(events) == {
        ("a", 0): "length", ("a", 1): "length", ("b", 0): "length", ("b", 1): "length",
        ("bad", 0): "error", ("bad", 1): "error",
    }  # fmt: skip
    message = next(e.message for e in events if isinstance(e, Finished) and e.request_id == "bad")
    assert message == "FloatingPointError: overflow in layer 3"
    assert engine.scheduler.pool.num_used == 0


def test_text_of_the_others_is_what_it_would_have_been():
    def texts(names, executor):
        engine = make_engine(executor)
        for name in names:
            engine.add(request(name, 9, 12))
        return [(e.request_id, e.sample.token_id) for e in run(engine) if isinstance(e, TokenEvent)]

    with_poison = [t for t in texts(["a", "bad", "b"], Poisoned) if t[0] != "bad"]
    assert with_poison == texts(["a", "b"], FakeExecutor)


def test_an_executor_that_always_fails_ends_everything_and_the_engine_lives():
    class Broken(FakeExecutor):
        broken = True

        def run(self, step):
            if self.broken:
                raise MemoryError
            return super().run(step)

    engine = make_engine(Broken)
    for i in range(5):
        engine.add(request(i, 7))
    assert set(ends(run(engine)).values()) == {"error"}
    engine.executor.broken = False
    engine.add(request("after", 7))
    assert ends(run(engine)) == {("after", 0): "length"}
    assert engine.scheduler.pool.num_used == 0


def test_copies_are_made_once_although_the_step_is_run_again():
    class FailsTogether(FakeExecutor):
        """Cannot compute several chunks at once; FakeExecutor checks that what is read is what was written."""

        def run(self, step):
            if len(step.chunks) > 1:
                raise RuntimeError("too many")
            return super().run(step)

    engine = make_engine(FailsTogether, prefix=False)
    engine.add(request("a", 14, 9, n=4))
    assert ends(run(engine)) == {("a", i): "length" for i in range(4)}


def test_moves_that_cannot_be_made_end_those_who_hold_blocks():
    class BadStore(FakeExecutor):
        def run(self, step):
            if step.swaps_in:
                raise OSError("record 3 is damaged")
            return super().run(step)

    engine = make_engine(BadStore, num_blocks=11, prefix=False, tiers=TierPlan(50))
    for i in range(6):
        engine.add(request(i, [i + 1] * 8, 12))
    events = run(engine)
    reasons = list(ends(events).values())
    assert set(reasons) == {"error", "length"}
    assert len(reasons) == 6
    message = next(e.message for e in events if isinstance(e, Finished) and e.message)
    assert message == "blocks could not be moved: OSError: record 3 is damaged"
    assert engine.scheduler.pool.num_used == 0


def test_a_refused_request_changes_nothing():
    metrics = Metrics()
    engine = make_engine(listeners=[metrics])
    with pytest.raises(BadRequest):
        engine.add(request("a", 500))
    assert not engine.has_work
    assert not metrics.live


def test_planned_and_built_blocks_must_agree():
    scheduler = make_scheduler(20)
    executor = FakeExecutor(scheduler)
    executor.num_blocks = 19
    with pytest.raises(AssertionError, match="20 blocks, the executor 19"):
        Engine(scheduler, executor)


class Seconds:
    """One second a step, and a tenth for every token."""

    def seconds(self, shape):
        return 1.0 + 0.1 * sum(work.new_tokens for work in shape)


def simulated(scheduler):
    return SimulatedExecutor(scheduler.plan, Seconds())


def test_times_are_those_of_the_virtual_clock():
    metrics, clock = Metrics(), VirtualClock(100.0)
    engine = make_engine(simulated, [metrics], clock, max_num_seqs=1)
    engine.add(request("a", 10, 3))
    engine.add(request("b", 10, 1))
    run(engine)
    a, b = metrics.done["a"], metrics.done["b"]
    assert (a.queue_s, a.ttft_s) == (0.0, 2.0)
    assert a.gaps_s == pytest.approx([1.1, 1.1])
    assert (a.tpot_s, a.e2e_s) == (pytest.approx(1.1), pytest.approx(4.2))
    assert (b.queue_s, b.tpot_s) == (pytest.approx(4.2), None)
    assert b.num_cached == 8
    assert b.ttft_s == pytest.approx(4.2 + 1.0 + 0.2)  # two of ten tokens were left to compute
    assert metrics.totals.num_steps == 4
    assert metrics.totals.busy_s == pytest.approx(clock.now() - 100.0)
    assert metrics.totals.overhead == pytest.approx(0.0)


def test_totals_count_what_the_events_say():
    metrics = Metrics(keep=2)
    engine = make_engine(listeners=[metrics], num_blocks=11, prefix=False)
    for i in range(4):
        engine.add(request(i, [i + 1] * 8, 12))
    events = run(engine)
    preempted = [e for e in events if isinstance(e, Preempted)]
    assert preempted
    assert metrics.totals.num_preemptions == len(preempted)
    assert metrics.totals.num_output_tokens == 48
    assert metrics.totals.num_computed_tokens == 4 * (8 + 11) + metrics.totals.num_recomputed_tokens
    assert metrics.totals.num_finished == 4
    assert len(metrics.done) == 2
    assert not metrics.live


def test_a_script_is_replayed():
    scheduler = make_scheduler(40)
    script = Script({("a", 0): [5, 6, 7], ("a", 1): [8, 9, 10]})
    engine = Engine(scheduler, SimulatedExecutor(scheduler.plan, Seconds(), script), VirtualClock())
    engine.add(request("a", 6, 3, n=2))
    said = [(e.choice, e.sample.token_id) for e in run(engine) if isinstance(e, TokenEvent)]
    assert sorted(said) == [(0, 5), (0, 6), (0, 7), (1, 8), (1, 9), (1, 10)]


def test_clocks():
    clock = VirtualClock()
    clock.advance(2.0)
    clock.advance_to(1.0)
    assert clock.now() == 2.0
    clock.advance_to(5.0)
    assert clock.now() == 5.0
    wall = WallClock()
    before = wall.now()
    wall.advance(1000.0)
    assert 0.0 <= wall.now() - before < 100.0
