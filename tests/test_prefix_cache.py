"""The prefix cache: what is found, what must not be, and honest counts, through the scheduler that uses it."""

import pytest

from kvledger.cache.block_pool import BlockPool
from kvledger.cache.prefix_cache import PrefixCache, extend_chain, root_digest
from kvledger.sched.events import Admitted, Finished, Preempted
from sched_fakes import LAYOUTS, FakeExecutor, layout, make_scheduler, request, run_all


def chain(tokens, size=4, salt=b""):
    digests = []
    extend_chain(digests, root_digest(salt), tokens, size)
    return digests


def cached(requests_, **kw):
    """num_cached of each request, run one after the other."""
    scheduler = make_scheduler(**kw)
    executor = FakeExecutor(scheduler)
    found = []
    for item in requests_:
        scheduler.add(item)
        found += [e.num_cached for e in run_all(scheduler, executor) if isinstance(e, Finished)]
    return found, scheduler


def test_a_digest_stands_for_everything_before_it():
    base = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain([1, 2, 3, 4, 5, 6, 7, 8, 9]) == base  # full blocks only
    assert chain([0, 2, 3, 4, 5, 6, 7, 8])[1] != base[1]
    assert chain([1, 2, 3, 4, 5, 6, 7, 8], salt=b"x")[0] != base[0]
    assert root_digest(b"ab", b"c") != root_digest(b"b", b"ca")


def test_a_chain_grows_as_if_made_at_once():
    tokens, grown = list(range(23)), []
    for end in range(len(tokens) + 1):
        extend_chain(grown, root_digest(), tokens[:end], 4)
    assert grown == chain(tokens)


def test_a_repeated_prompt_is_found_but_for_its_last_token():
    found, _ = cached([request(i, 16, 1) for i in range(2)])
    assert found == [0, 12]  # 16 tokens fill 4 blocks; the last token must be computed, so 3 count
    found, _ = cached([request(i, 17, 1) for i in range(2)])
    assert found == [0, 16]


def test_a_shared_start_shorter_than_a_block_is_not_found():
    found, _ = cached([request(0, [1, 2, 3, 50, 51, 52], 1), request(1, [1, 2, 3, 60, 61, 62], 1)])
    assert found == [0, 0]


def test_another_salt_finds_nothing():
    found, _ = cached([request(0, 16, 1, salt=b"a"), request(1, 16, 1, salt=b"b"), request(2, 16, 1, salt=b"a")])
    assert found == [0, 0, 12]


def test_outputs_are_found_by_the_next_turn():
    scheduler = make_scheduler(num_blocks=40)
    executor = FakeExecutor(scheduler)
    first = scheduler.add(request("turn 1", 10, 12))
    run_all(scheduler, executor)
    scheduler.add(request("turn 2", [*first.token_ids, 7, 7, 7], 2))
    (end,) = [e for e in run_all(scheduler, executor) if isinstance(e, Finished)]
    assert end.num_cached == 20  # 22 tokens, the last one never computed: 21 → 5 blocks


def test_prompt_logprobs_compute_the_whole_prompt():
    found, _ = cached([request(0, 16, 1), request(1, 16, 1, prompt_logprobs=0)])
    assert found == [0, 0]


def test_switched_off_finds_nothing():
    found, scheduler = cached([request(i, 16, 1) for i in range(2)], prefix=False)
    assert found == [0, 0]
    assert len(scheduler.prefix) == 0


def test_eviction_takes_the_tail_first():
    found, scheduler = cached([request(0, 17, 1), request(1, range(100, 117), 1), request(2, 17, 1)], num_blocks=7)
    # request 1 takes the 3 blank blocks and the last 2 of request 0's 4 full ones; its first 2 are still found
    assert found == [0, 0, 8]
    scheduler.check()


def test_counts_leave_recompute_out():
    scheduler = make_scheduler(num_blocks=9, max_num_batched_tokens=32)
    for i in range(3):
        scheduler.add(request(i, [i * 10 + j for j in range(8)], 12))
    events = run_all(scheduler)
    again = [e for e in events if isinstance(e, Admitted) and not e.is_first]
    assert any(isinstance(e, Preempted) for e in events)
    assert any(e.num_cached for e in again)  # a preempted sequence does find its blocks again …
    assert scheduler.prefix.num_queried_tokens == 24
    assert scheduler.prefix.num_hit_tokens == 0  # … but that is nobody's hit
    assert [e.num_cached for e in events if isinstance(e, Finished)] == [0, 0, 0]


def test_blocks_being_filled_are_not_found():
    """Two equal prompts in the same step: the second cannot use what is not computed yet."""
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=64)
    for i in range(2):
        scheduler.add(request(i, 17, 4))
    events = run_all(scheduler)
    assert [e.num_cached for e in events if isinstance(e, Admitted)] == [0, 0]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_is_found_can_be_read(kind):
    """The executor checks that every position a query reads holds the request's own text."""
    scheduler = make_scheduler(60, kind)
    executor = FakeExecutor(scheduler)
    for i, length in enumerate((30, 30, 13, 31, 22, 30)):
        scheduler.add(request(i, length, 10))
        events = run_all(scheduler, executor)
        (end,) = [e for e in events if isinstance(e, Finished)]
        assert i == 0 or end.num_cached > 0


def test_window_groups_need_only_the_blocks_of_the_window():
    where = layout("window")  # window 10, blocks of 4
    pool = BlockPool(20)
    prefix = PrefixCache(pool, where.groups)
    digests = chain(list(range(24)))
    for i in (3, 4, 5):  # tokens 12 … 23
        block = pool.take()
        for g in range(len(where.groups)):
            prefix.enter(digests[i], g, block)
    match = prefix.match(digests)
    assert match.num_blocks == 6  # the query at 24 reads 15 … 23
    assert [b < 0 for b in match.tables[0]] == [True] * 3 + [False] * 3
    assert prefix.match(digests[:4]).num_blocks == 0  # the query at 16 reads 7 … 15, and 7 … 11 are gone


def test_a_window_that_has_lost_its_first_blocks_hides_nothing_beside_a_full_group():
    where = layout("mix")
    pool, digests = BlockPool(60), chain(list(range(24)))
    prefix = PrefixCache(pool, where.groups)
    for g, group in enumerate(where.groups):
        for i in range(6) if not group.spec.first_kept(1 << 40) else (3, 4, 5):
            prefix.enter(digests[i], g, pool.take())
    match = prefix.match(digests)
    assert match.num_blocks == 6
    assert {sum(b >= 0 for b in table) for table in match.tables} == {6, 3}


def test_clear_forgets_but_keeps_what_is_in_use():
    scheduler = make_scheduler(num_blocks=30)
    executor = FakeExecutor(scheduler)
    scheduler.add(request(0, 16, 2))
    run_all(scheduler, executor)
    scheduler.add(request(1, 16, 8))
    step = scheduler.schedule()
    scheduler.update(step, executor.run(step))
    scheduler.prefix.clear()
    scheduler.check()
    assert (len(scheduler.prefix), scheduler.pool.num_idle) == (0, 0)
    run_all(scheduler, executor)
