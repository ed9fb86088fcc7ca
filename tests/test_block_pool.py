"""The pool: counts, order of eviction, and a recount that notices every loss."""

import pytest

from kvledger.cache.block_pool import BlockPool


def test_taken_shared_released():
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.share(a)
    assert (pool.num_used, pool.num_free, pool.num_shared) == (2, 1, 1)
    pool.check([[a, b], [a]])
    pool.release(a)
    pool.release(a)
    pool.release(b)
    assert (pool.num_used, pool.num_free, pool.num_idle) == (0, 3, 0)
    pool.check([])


def test_blank_blocks_go_before_idle_ones_and_the_oldest_idle_first():
    evicted = []
    pool = BlockPool(4, evicted.append)
    blocks = [pool.take() for _ in range(4)]
    for block in blocks[:3]:
        pool.keep_when_free(block)
    for block in (blocks[1], blocks[0], blocks[2], blocks[3]):
        pool.release(block)
    assert pool.num_idle == 3
    assert [pool.take() for _ in range(4)] == [blocks[3], blocks[1], blocks[0], blocks[2]]
    assert evicted == [blocks[1], blocks[0], blocks[2]]


def test_an_idle_block_found_again_is_the_newest_when_it_is_released():
    pool = BlockPool(2)
    a, b = pool.take(), pool.take()
    for block in (a, b):
        pool.keep_when_free(block)
        pool.release(block)
    pool.share(a)
    pool.release(a)
    assert [pool.take(), pool.take()] == [b, a]


def test_an_evicted_block_is_not_cached_any_more():
    pool = BlockPool(1)
    block = pool.take()
    pool.keep_when_free(block)
    pool.release(block)
    assert pool.take() == block
    pool.release(block)
    assert pool.num_idle == 0


def test_forgotten_blocks_become_blank():
    pool = BlockPool(2)
    a, b = pool.take(), pool.take()
    pool.keep_when_free(a)
    pool.keep_when_free(b)
    pool.release(a)
    pool.forget(a)
    pool.forget(b)
    pool.release(b)
    assert (pool.num_idle, pool.num_free) == (0, 2)
    pool.check([])


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_check_notices_lost_and_invented_holders(tables):
    pool = BlockPool(2)
    assert pool.take() == 0
    pool.check([[0, -1]])
    with pytest.raises(AssertionError):
        pool.check(tables)


def test_double_release_is_an_error():
    pool = BlockPool(1)
    block = pool.take()
    pool.release(block)
    with pytest.raises(AssertionError):
        pool.release(block)
