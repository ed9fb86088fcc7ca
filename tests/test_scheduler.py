"""The scheduler's rules, one by one, over a scripted executor that also checks what it is given."""

import pytest

from kvledger.errors import BadRequest, ContextTooLong, UnknownName
from kvledger.sched.events import Admitted, Finished, Preempted, TokenEvent
from kvledger.sched.step import Sample, StepResult
from sched_fakes import LAYOUTS, FakeExecutor, make_scheduler, request, run_all


def chunks(step):
    return [(c.seq.request_id, c.start, c.num_tokens, c.samples) for c in step.chunks]


def ends(events):
    return {(e.request_id, e.choice): e for e in events if isinstance(e, Finished)}


def texts(events):
    """Output tokens by (request, choice)."""
    found = {}
    for e in events:
        if isinstance(e, TokenEvent):
            found.setdefault((e.request_id, e.choice), []).append(e.sample.token_id)
    return found


def advance(scheduler, executor, steps=1):
    events = []
    for _ in range(steps):
        step = scheduler.schedule()
        events += scheduler.update(step, executor.run(step))
        scheduler.check()
    return events


# ---------------------------------------------------------------------------------------------- steps


def test_decode_first_then_chunks_of_prompts_within_the_budget():
    scheduler = make_scheduler(60, max_num_batched_tokens=10, prefix=False)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 4))
    advance(scheduler, executor)
    scheduler.add(request("b", 17))
    assert chunks(scheduler.schedule()) == [("a", 4, 1, True), ("b", 0, 9, False)]


def test_a_prompt_is_computed_in_chunks_and_samples_at_its_end():
    scheduler = make_scheduler(60, max_num_batched_tokens=8, max_len=256)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 20, 2))
    seen = []
    while scheduler.has_work:
        step = scheduler.schedule()
        seen += chunks(step)
        scheduler.update(step, executor.run(step))
    assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 4, True), ("a", 20, 1, True)]


def test_without_chunking_a_prompt_may_pass_the_budget_alone():
    scheduler = make_scheduler(60, max_num_batched_tokens=8, chunked_prefill=False)
    for name, length in (("a", 20), ("b", 3)):
        scheduler.add(request(name, length))
    assert chunks(scheduler.schedule()) == [("a", 0, 20, True)]


def test_never_more_chunks_than_seats():
    scheduler = make_scheduler(100, max_num_seqs=3, max_num_batched_tokens=64)
    for i in range(7):
        scheduler.add(request(i, 3, 6, n=2))
    executor = FakeExecutor(scheduler)
    while scheduler.has_work:
        step = scheduler.schedule()
        assert len(step.chunks) <= 3
        scheduler.update(step, executor.run(step))


def test_priorities_count_only_when_asked_for():
    for queueing, first in (("fcfs", "late"), ("priority", "urgent")):
        scheduler = make_scheduler(60, max_num_seqs=1, queueing=queueing)
        scheduler.add(request("late", 4, priority=5))
        scheduler.add(request("urgent", 4, priority=-1))
        assert chunks(scheduler.schedule())[0][0] == first


def test_unknown_policy_is_named():
    with pytest.raises(UnknownName, match="static"):
        make_scheduler(policy="statik")


# ---------------------------------------------------------------------------------------------- refusal and ends


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_can_never_fit_is_refused_with_the_numbers(kind):
    scheduler = make_scheduler(12, kind, max_len=1000)
    longest = scheduler.plan.longest(1000) - 1
    if longest < 900:
        with pytest.raises(ContextTooLong, match=f"{longest + 1} tokens.*12"):
            scheduler.add(request("a", [1] * (longest + 1), None))
    scheduler.add(request("a", [1] * min(longest, 900), None))
    (end,) = ends(run_all(scheduler)).values()
    assert end.finish_reason == "length"
    assert end.num_output >= 1


@pytest.mark.parametrize("chunked", [True, False])
def test_any_length_passes_through_the_blocks_of_a_window(chunked):
    scheduler = make_scheduler(4, "window", max_len=1000, chunked_prefill=chunked)
    scheduler.add(request("a", 900, 100))
    (end,) = ends(run_all(scheduler)).values()
    assert (end.finish_reason, end.num_output) == ("length", 100)


@pytest.mark.parametrize(
    ("given", "text"),
    [((64, 1), "64 tokens; the prompt has 64"), ((60, 8), "at most 4"), ((0, 1), "empty")],
)
def test_what_passes_the_context_is_refused(given, text):
    scheduler = make_scheduler(60)
    with pytest.raises(BadRequest, match=text):
        scheduler.add(request("a", *given))
    assert not scheduler.has_work


def test_ids_outside_the_vocabulary_are_refused():
    scheduler = make_scheduler()
    scheduler.vocab_size = 100
    bad = [request("a", [5, 100]), request("a", [5], stop_token_ids=(-1,)), request("a", [5], logit_bias={200: 1.0})]
    for item in bad:
        with pytest.raises(BadRequest, match="outside the vocabulary of 100"):
            scheduler.add(item)


def test_the_same_id_twice_is_refused():
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    with pytest.raises(BadRequest, match="'a'"):
        scheduler.add(request("a", 4))


def test_growth_past_the_pool_ends_that_request_alone():
    """The first grows until it holds the whole pool; those behind it yield, and then go on."""
    scheduler = make_scheduler(6, max_len=1000, prefix=False)
    scheduler.add(request("big", 8, None))
    scheduler.add(request("small", [9] * 4, 5))
    found = ends(run_all(scheduler))
    assert (found["big", 0].finish_reason, found["big", 0].num_output) == ("length", 24 + 1 - 8)
    assert (found["small", 0].finish_reason, found["small", 0].num_output) == ("length", 5)


def test_ends_by_eos_stop_token_and_length():
    class Says(FakeExecutor):
        def run(self, step):
            super().run(step)
            return StepResult({c.seq.seq_id: Sample(30 + c.seq.num_output_tokens) for c in step.chunks if c.samples}, 0)

    cases = {
        "eos": (request("eos", 4, 9, eos_token_ids=(33,)), "stop", None, 4),
        "ignored": (request("ignored", 4, 9, eos_token_ids=(33,), ignore_eos=True), "length", None, 9),
        "stop": (request("stop", 4, 9, stop_token_ids=(32, 35)), "stop", 32, 3),
        "late": (request("late", 4, 9, stop_token_ids=(32, 35), min_tokens=4), "stop", 35, 6),
        "length": (request("length", 4, 2), "length", None, 2),
    }
    scheduler = make_scheduler(60)
    for item, *_ in cases.values():
        scheduler.add(item)
    found = ends(run_all(scheduler, Says(scheduler)))
    for name, (_, *expected) in cases.items():
        end = found[name, 0]
        assert [end.finish_reason, end.stop_reason, end.num_output] == expected, name


def test_a_failed_sequence_ends_alone():
    scheduler = make_scheduler(60)
    executor = FakeExecutor(scheduler)
    bad = scheduler.add(request("bad", 4))
    scheduler.add(request("good", 5))
    step = scheduler.schedule()
    result = executor.run(step)
    events = scheduler.update(step, StepResult(result.samples, 0.0, {}, {bad.seq_id: "poison"}))
    assert (ends(events)["bad", 0].finish_reason, ends(events)["bad", 0].message) == ("error", "poison")
    assert ends(run_all(scheduler, executor))["good", 0].num_output == 8


def test_abort_gives_blocks_back_at_once():
    scheduler = make_scheduler(60, prefix=False)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 9, n=2))
    scheduler.add(request("b", 9))
    advance(scheduler, executor, 3)
    scheduler.abort("a", 1, "stop", "END")
    scheduler.check()
    scheduler.abort("b")
    scheduler.abort("never heard of")
    events = advance(scheduler, executor)
    assert (ends(events)["a", 1].finish_reason, ends(events)["a", 1].stop_reason) == ("stop", "END")
    assert ends(events)["b", 0].finish_reason == "abort"
    scheduler.abort("a")
    assert scheduler.pool.num_used == 0


def test_a_request_aborted_while_its_step_runs_is_left_alone():
    scheduler = make_scheduler(60)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 4))
    step = scheduler.schedule()
    result = executor.run(step)
    scheduler.abort("a")
    assert [type(e) for e in scheduler.update(step, result)] == [Admitted, Finished]
    scheduler.check()


# ---------------------------------------------------------------------------------------------- preemption


def run_trace(trace, num_blocks, **kw):
    scheduler = make_scheduler(num_blocks, **kw)
    executor = FakeExecutor(scheduler)
    for item in trace:
        scheduler.add(item)
    return run_all(scheduler, executor), scheduler


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("prefix", [True, False])
def test_preempted_text_is_the_same_text(kind, prefix):
    trace = [request(i, [i + 1] * (5 + 3 * i), 20) for i in range(5)]
    roomy, _ = run_trace(trace, 400, kind=kind, prefix=prefix)
    num_groups = len(make_scheduler(kind=kind).plan.layout.groups)
    tight, _ = run_trace(trace, 14 * num_groups, kind=kind, prefix=prefix)
    assert texts(tight) == texts(roomy)
    assert not any(isinstance(e, Preempted) for e in roomy)
    if kind in ("full", "latent", "mqa"):
        assert any(isinstance(e, Preempted) for e in tight)


def test_the_last_admitted_yields_and_is_first_to_return():
    events, _ = run_trace([request(i, [i + 1] * 8, 12) for i in range(4)], 11, prefix=False)
    order = [(type(e).__name__, e.request_id) for e in events if isinstance(e, Admitted | Preempted)]
    victims = [name for kind, name in order if kind == "Preempted"]
    assert victims
    assert "0" not in victims  # the first in line never yields
    returned = order[order.index(("Preempted", victims[0])) + 1 :]
    first_back = next(name for kind, name in returned if kind == "Admitted")
    assert first_back <= victims[0]  # nobody who came later runs before it


def test_the_worst_priority_yields():
    trace = [request("low", [1] * 8, 20, priority=9), request("high", [2] * 8, 20, priority=0)]
    events, _ = run_trace(trace, 9, queueing="priority", prefix=False)
    assert {e.request_id for e in events if isinstance(e, Preempted)} == {"low"}


def test_no_thrash():
    """A preempted sequence waits until its text and growth fit: far fewer preemptions than steps."""
    scheduler = make_scheduler(24, prefix=False, max_num_batched_tokens=32)
    executor = FakeExecutor(scheduler)
    for i in range(30):
        scheduler.add(request(i, [i + 1] * 10, 40))
    events = run_all(scheduler, executor)
    recomputed = sum(e.num_tokens for e in events if isinstance(e, Preempted))
    computed = sum(len(t) for t in texts(events).values()) + 30 * 10
    assert len(ends(events)) == 30
    assert recomputed < 0.6 * computed


def test_short_prompts_do_not_wait_for_a_long_one():
    scheduler = make_scheduler(200, max_len=512, max_num_batched_tokens=16, prefix=False)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("long", 400, 4))
    advance(scheduler, executor)
    scheduler.add(request("short", [7] * 6, 4))
    assert chunks(scheduler.schedule()) == [("short", 0, 4, False), ("long", 16, 12, False)]


def test_alone_a_long_prompt_has_the_whole_budget():
    scheduler = make_scheduler(200, max_len=512, max_num_batched_tokens=16, prefix=False)
    scheduler.add(request("long", 400, 4))
    advance(scheduler, FakeExecutor(scheduler), 3)
    assert chunks(scheduler.schedule()) == [("long", 48, 16, False)]


# ---------------------------------------------------------------------------------------------- choices and forks


def test_choices_share_the_prompt_and_part_at_the_last_block():
    scheduler = make_scheduler(60, prefix=False, max_num_batched_tokens=64)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 14, 6, n=4))
    advance(scheduler, executor, 2)
    # prompt of 14: three full blocks shared by four; the fourth block is copied for three of them
    assert (scheduler.pool.num_used, scheduler.pool.num_shared) == (3 + 4, 3)
    events = run_all(scheduler, executor)
    assert set(ends(events)) == {("a", c) for c in range(4)}


def test_choices_say_what_they_would_say_alone():
    shared, _ = run_trace([request("a", 13, 9, n=5)], 100)
    tight, _ = run_trace([request("a", 13, 9, n=5)], 9)
    assert texts(shared) == texts(tight)
    assert len({tuple(t) for t in texts(shared).values()}) == 5


def test_a_parent_that_ends_at_its_first_token_leaves_its_choices():
    events, scheduler = run_trace([request("a", 5, 1, n=3)], 30)
    assert {c for _, c in texts(events)} == {0, 1, 2}
    assert scheduler.pool.num_used == 0


def test_aborted_before_they_split_all_choices_end():
    scheduler = make_scheduler()
    scheduler.add(request("a", 5, 5, n=3))
    scheduler.abort("a")
    events = scheduler.update(scheduler.schedule(), StepResult({}, 0.0))
    assert set(ends(events)) == {("a", 0), ("a", 1), ("a", 2)}


def test_stepwise_sequences_wait_to_be_told():
    scheduler = make_scheduler(60)
    executor = FakeExecutor(scheduler)
    seq = scheduler.add(request("a", 6, 10, stepwise=True))
    advance(scheduler, executor)
    assert seq.is_held
    assert not scheduler.schedule().chunks
    other = scheduler.fork(seq, 1, last_token_id=77)
    scheduler.resume(seq, 66)
    scheduler.resume(other)
    advance(scheduler, executor)
    assert (seq.token_ids[6], other.token_ids[6]) == (66, 77)
    assert seq.tables[0][0] == other.tables[0][0]
    scheduler.check()


def test_held_sequences_yield_to_those_that_can_go_on():
    scheduler = make_scheduler(6, prefix=False)
    executor = FakeExecutor(scheduler)
    held = [scheduler.add(request(i, [i + 1] * 8, 10, stepwise=True)) for i in range(2)]
    advance(scheduler, executor, 2)
    scheduler.add(request("c", [9] * 9, 6))
    events = []
    for _ in range(30):
        events += advance(scheduler, executor)
    assert ("c", 0) in ends(events)
    assert any(isinstance(e, Preempted) for e in events)
    assert all(not s.is_finished for s in held)


# ---------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("policy", ["orca", "static"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_reserved_memory_is_never_taken_back(policy, kind):
    trace = [request(i, [i + 1] * (3 + i % 7), 1 + 5 * (i % 4), n=1 + i % 2) for i in range(20)]
    events, _ = run_trace(trace, 100, kind=kind, policy=policy)
    assert not any(isinstance(e, Preempted) for e in events)
    assert len(ends(events)) == 30


def test_a_static_batch_comes_and_goes_as_one():
    scheduler = make_scheduler(60, policy="static", max_num_seqs=3, max_num_batched_tokens=64)
    executor = FakeExecutor(scheduler)
    for i in range(5):
        scheduler.add(request(i, 4, 2 + 3 * i))
    log = []
    while scheduler.has_work:
        step = scheduler.schedule()
        log += [(type(e).__name__, e.request_id) for e in scheduler.update(step, executor.run(step))]
        scheduler.check()
    order = [(k, r) for k, r in log if k in ("Admitted", "Finished")]
    assert [k for k, _ in order] == ["Admitted"] * 3 + ["Finished"] * 3 + ["Admitted"] * 2 + ["Finished"] * 2


def test_orca_reserves_the_maximum_and_continuous_does_not():
    for policy, admitted in (("orca", 2), ("continuous", 6)):
        scheduler = make_scheduler(16, policy=policy, max_num_batched_tokens=64, prefix=False)
        for i in range(6):
            # at most 32 tokens: 8 blocks of 16; or a block and one to grow, each
            scheduler.add(request(i, [i + 1] * 4, 28))
        step = scheduler.schedule()
        assert len(step.chunks) == admitted
        books = scheduler.books()
        assert books.num_used + books.num_reserved == (16 if policy == "orca" else 6)


def test_books_count_waste_and_sharing():
    scheduler = make_scheduler(20, prefix=False, max_num_batched_tokens=64)
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 6, 9, n=2))
    advance(scheduler, executor, 2)
    books = scheduler.books()
    # blocks: one shared full one, and a second one each with positions 4, 5, 6 or 4, 5 computed
    assert (books.num_used, books.num_shared, books.num_places) == (3, 1, 12)
    assert books.num_stored == 4 + 3 + 2
    assert books.waste == pytest.approx(3 / 12)


@pytest.mark.parametrize("kind", ["window", "mix", "chunked"])
def test_window_groups_give_back_what_they_pass(kind):
    scheduler = make_scheduler(400, kind, max_len=400, prefix=False)
    executor = FakeExecutor(scheduler)
    seq = scheduler.add(request("a", 200, 100))
    most = 0
    while scheduler.has_work:
        advance(scheduler, executor)
        most = max(most, scheduler.ledger.held(seq.tables))
    layout = scheduler.plan.layout
    assert most <= layout.blocks_for(300, in_flight=16)
    full_blocks = 75 * len(layout.groups)
    assert most < full_blocks


@pytest.mark.parametrize("kind", ["window", "mix", "chunked"])
def test_choices_hold_nothing_that_the_window_has_passed(kind):
    """From the step in which they split off on: a choice preempted before its first step asks for what it holds."""
    scheduler = make_scheduler(200, kind, max_len=100, prefix=False, max_num_batched_tokens=64)
    scheduler.add(request("a", 50, 20, n=3))
    advance(scheduler, FakeExecutor(scheduler))
    found = [scheduler.ledger.held(seq.tables) for seq in scheduler.sequences("a")]
    assert len(found) == 3
    assert max(found) <= scheduler.plan.layout.blocks_for(51, in_flight=1)
