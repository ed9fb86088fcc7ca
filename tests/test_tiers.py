"""Beyond the pool: swapped sequences and prefixes on disk, with real bytes in the CPU executor."""

import os
from pathlib import Path

import pytest

from kvledger import LLM, SamplingParams
from kvledger.cache.disk import PAGE, DiskTier
from kvledger.cache.tiers import TierPlan
from kvledger.errors import ConfigError
from kvledger.sched.events import Finished, Preempted, TokenEvent
from sched_fakes import FakeExecutor, make_scheduler, request, run_all
from tiny_model import write_tiny_model

BLOCK = 500


def key(i):
    return (bytes([i]) * 32, 0)


def disk(folder, records=4, namespace=b"m"):
    return DiskTier(folder, records * PAGE, BLOCK, namespace)


def put(tier, i):
    slot = tier.claim(key(i))
    tier.save(slot, bytes([i]) * BLOCK)
    return slot


def test_what_was_saved_is_found_after_a_restart(tmp_path):
    first = disk(tmp_path)
    for i in range(3):
        put(first, i)
    assert first.claim(key(1)) is None  # it is there already
    first.close()
    first.close()
    again = disk(tmp_path)
    assert len(again) == 3
    assert again.load(again.find(key(2))) == bytes([2]) * BLOCK
    assert again.find(key(9)) is None
    again.close()


def test_the_least_recently_used_record_is_overwritten(tmp_path):
    tier = disk(tmp_path)
    for i in range(4):
        put(tier, i)
    assert tier.find(key(0)) is not None
    put(tier, 4)
    assert [tier.find(key(i)) is not None for i in range(5)] == [True, False, True, True, True]
    assert tier.path.stat().st_size <= 4 * PAGE
    tier.close()


@pytest.mark.parametrize("damage", ["flip", "header", "tear", "cut"])
def test_a_damaged_record_is_a_miss(tmp_path, damage):
    tier = disk(tmp_path)
    for i in range(3):
        put(tier, i)
    tier.close()
    raw = bytearray(tier.path.read_bytes())
    if damage == "flip":
        raw[PAGE + 300] ^= 1
    elif damage == "header":
        raw[PAGE + 20] ^= 1
    elif damage == "tear":  # the first half of a later write
        raw[PAGE + 100 : PAGE + 300] = b"x" * 200
    else:
        raw = raw[: PAGE + 200]
    tier.path.write_bytes(raw)
    again = disk(tmp_path)
    assert again.find(key(1)) is None
    assert again.load(again.find(key(0))) == bytes(BLOCK)
    slot = put(again, 1)
    assert again.load(slot) == bytes([1]) * BLOCK
    again.close()


def test_other_models_have_other_files_and_one_process_holds_one(tmp_path):
    one, other = disk(tmp_path), disk(tmp_path, namespace=b"other")
    assert one.path != other.path
    with pytest.raises(ConfigError, match="in use by another process"):
        disk(tmp_path)
    one.close()
    disk(tmp_path).close()
    other.close()
    with pytest.raises(ConfigError, match="hold no KV block"):
        DiskTier(tmp_path, 100, BLOCK, b"m")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot hold"):
        disk(file / "below")


def test_a_full_disk_ends_saving_and_nothing_else(tmp_path, monkeypatch):
    tier = disk(tmp_path)
    put(tier, 0)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    put(tier, 1)
    assert not tier.can_save
    assert tier.claim(key(2)) is None
    assert tier.find(key(1)) is None
    assert tier.load(tier.find(key(0))) == bytes(BLOCK)
    tier.close()


# ---------------------------------------------------------------------------------------------- the scheduler's part


def texts(events):
    return sorted((e.request_id, e.num_output, e.sample.token_id) for e in events if isinstance(e, TokenEvent))


@pytest.mark.parametrize("kind", ["full", "mix", "chunked"])
def test_swapped_sequences_go_on_where_they_were(kind):
    trace = [request(i, [i + 1] * (5 + 3 * i), 20) for i in range(5)]
    groups = len(make_scheduler(kind=kind).plan.layout.groups)

    def run(num_blocks, slots):
        scheduler = make_scheduler(num_blocks * groups, kind, prefix=False, tiers=TierPlan(slots * groups))
        executor = FakeExecutor(scheduler)
        for item in trace:
            scheduler.add(item)
        return run_all(scheduler, executor), sum(1 for s in executor.steps if s[2]), scheduler

    roomy, _, _ = run(100, 0)
    tight, swaps, scheduler = run(14, 50)
    assert texts(tight) == texts(roomy)
    if kind == "full":
        assert swaps
        assert all(e.is_swapped for e in tight if isinstance(e, Preempted))
    assert scheduler.tiers._host.num_used == 0


def test_the_cheaper_way_is_chosen():
    def kinds(prefers):
        scheduler = make_scheduler(11, prefix=False, tiers=TierPlan(50, None, prefers))
        for i in range(4):
            scheduler.add(request(i, [i + 1] * 8, 12))
        return {e.is_swapped for e in run_all(scheduler) if isinstance(e, Preempted)}

    assert kinds(lambda tokens, blocks: False) == {False}
    assert kinds(lambda tokens, blocks: blocks > 0) == {True}


def test_without_enough_slots_it_recomputes():
    scheduler = make_scheduler(11, prefix=False, tiers=TierPlan(1))
    for i in range(4):
        scheduler.add(request(i, [i + 1] * 8, 12))
    events = run_all(scheduler)
    assert {e.is_swapped for e in events if isinstance(e, Preempted)} == {False}


@pytest.mark.parametrize("num_choices", [6, 8])
def test_choices_swapped_out_before_their_first_step_come_back(num_choices):
    """A window has passed most of their prompt: what it left is all that they may take again."""
    scheduler = make_scheduler(14, "window", max_len=100, prefix=False, tiers=TierPlan(200), max_num_batched_tokens=64)
    scheduler.add(request("a", 50, 20, n=num_choices))
    events = run_all(scheduler)
    assert any(e.is_swapped for e in events if isinstance(e, Preempted))
    assert [e.finish_reason for e in events if isinstance(e, Finished)] == ["length"] * num_choices


def test_an_aborted_swapped_sequence_leaves_no_slot():
    scheduler = make_scheduler(11, prefix=False, tiers=TierPlan(50))
    executor = FakeExecutor(scheduler)
    for i in range(4):
        scheduler.add(request(i, [i + 1] * 8, 12))
    while not any(s.slots for s in scheduler.waiting):
        step = scheduler.schedule()
        scheduler.update(step, executor.run(step))
    for i in range(4):
        scheduler.abort(str(i))
        scheduler.check()
    assert scheduler.tiers._host.num_used == 0


@pytest.mark.parametrize("kind", ["full", "mix"])
def test_prefixes_come_back_from_disk(tmp_path, kind):
    """Evicted blocks are loaded instead of computed; the executor checks that they hold the right text."""
    scheduler = make_scheduler(60, kind, tiers=None)
    tier = DiskTier(tmp_path, 1 << 20, 100, b"m")
    scheduler = make_scheduler(60, kind, tiers=TierPlan(0, tier))
    executor = FakeExecutor(scheduler)
    scheduler.add(request("a", 40, 3))
    run_all(scheduler, executor)
    assert len(tier) >= 9
    scheduler.prefix.clear()
    tier._trusted.update(tier._key_of)  # FakeExecutor keeps the bytes, not the file
    scheduler.add(request("b", 40, 3))
    (end,) = [e for e in run_all(scheduler, executor) if isinstance(e, Finished)]
    assert end.num_cached == 36
    scheduler.check()


# ---------------------------------------------------------------------------------------------- with real bytes


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def path(tmp_path):
    return str(write_tiny_model(tmp_path / "tiny.gguf"))


def test_swapping_on_the_cpu_changes_no_text(path):
    prompts = [f"{i} once upon a time, in a land far away" for i in range(6)]
    with LLM(path, kv_memory="1MiB", prefix_caching=False) as roomy:
        expected = [o.outputs for o in roomy.generate(prompts, GREEDY)]
    with LLM(path, kv_memory=12 * 8192, prefix_caching=False, growth_tokens=0, swap_bytes=1 << 20) as tight:
        tight.engine.scheduler.tiers.plan = TierPlan(128)  # whatever this machine's roofline says
        assert [o.outputs for o in tight.generate(prompts, GREEDY)] == expected
        assert tight.metrics.totals.num_preemptions > 0
        assert tight.metrics.totals.num_recomputed_tokens == 0


def test_a_relative_folder_is_the_one_of_the_start(path, tmp_path, monkeypatch):
    prompt = "a long prompt, and the same one from elsewhere " * 4
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for folder in ("../kv", "."):
        with LLM(path, kv_memory="1MiB", disk_dir=folder, disk_bytes=1 << 20) as llm:
            monkeypatch.chdir(tmp_path / "elsewhere")
            llm.generate(prompt, GREEDY)
        monkeypatch.chdir(tmp_path / "work")
        (file,) = Path(folder).glob("blocks-*.kv")
        assert file.stat().st_size > 0
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/kv", "a\0b"])
def test_a_folder_that_cannot_be_is_told(path, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~nobody-of-that-name").touch()
    with pytest.raises(ConfigError, match="cannot hold the KV tier"):
        LLM(path, kv_memory="1MiB", disk_dir=folder, disk_bytes=1 << 20)


@pytest.mark.parametrize("limit", [{}, {"disk_bytes": 1 << 20}])
def test_a_prompt_is_found_on_disk_after_a_restart(path, tmp_path, limit):
    options = {"kv_memory": "1MiB", "disk_dir": str(tmp_path / "kv"), **limit}
    prompt = "a long prompt, and the same one after the restart " * 4
    with LLM(path, **options) as first:
        before = first.generate(prompt, GREEDY)[0]
    with LLM(path, **options) as second:
        after = second.generate(prompt, GREEDY)[0]
        assert after.num_cached_tokens == (len(after.prompt_token_ids) - 1) // 16 * 16
        assert after.outputs == before.outputs
    with LLM(path, **options | {"block_size": 8}) as other:
        assert other.generate(prompt, GREEDY)[0].num_cached_tokens == 0  # another layout, another file
