"""The CPU executor on tiny random models: pool, copies, tiers, logits, prompt logprobs, refusals; where kernels lie."""

import ctypes
import os
import resource
import subprocess
import sys

import numba
import numpy as np
import pytest

from kvledger.errors import ConfigError, DamagedFile, UnsupportedModel
from kvledger.exec.cpu import MODES, CpuExecutor
from kvledger.kernels import gated, jit, matmul
from kvledger.kernels.isa import ISA
from kvledger.kernels.packed import integer_mode
from kvledger.kernels.warmup import common_kernels
from kvledger.model.decoder import build
from kvledger.model.registry import read_decoder
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Chunk, Step
from kvledger.spec.config import ExecConfig
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.kv_computed import kind_of
from kvledger.spec.sampling import SamplingParams
from reference_model import Reference
from tiny_models import decoder

RNG = np.random.default_rng(3)


def executor(weights, *, kv="bf16", block=16, num_blocks=40, threads=2, activations="auto"):
    spec = model_from_gguf(weights.metadata, weights.facts)
    return CpuExecutor(weights, spec, spec.kv_layout(kv, block), num_blocks, ExecConfig(threads, activations))


def sequence(ids, first_block=0, seq_id=0, block=16, room=64, groups=1, **params):
    per_group = -(-(len(ids) + room) // block)
    tables = tuple(list(range(first_block + g * per_group, first_block + (g + 1) * per_group)) for g in range(groups))
    asked = SamplingParams(**{"temperature": 0.0, **params})
    return Sequence(seq_id, str(seq_id), list(ids), len(ids), asked, 10_000, tables=tables)


def all_logits(ex, ids, **where):
    shape = {"block": ex.layout.block_size, "groups": len(ex.layout.groups)}
    seq = sequence(ids, prompt_logprobs=0, **shape, **where)
    return ex.logits(Step((Chunk(seq, 0, len(ids), True),)))


def tokens(count, vocab=96):
    return RNG.integers(0, vocab, count).tolist()


@pytest.mark.parametrize(
    ("kv", "block"), [("bf16", 16), ("bf16", 8), ("int8", 16), ("fp8", 32), ("fp32", 16), ("bf16", 256), ("int4", 32)]
)
def test_the_pool_is_what_the_layout_says(kv, block):
    ex = executor(decoder(dim=32), kv=kv, block=block, num_blocks=7)
    assert ex.num_blocks == 7
    assert ex.kv_bytes == 7 * ex.layout.block_bytes
    ex.close()
    ex.close()


@pytest.mark.parametrize(("kv", "block"), [("bf16", 16), ("int8", 16), ("fp8", 16), ("fp32", 16), ("int4", 32)])
def test_what_a_dense_model_runs_is_compiled_ahead(kv, block):
    """So that the first start tells how far it is."""
    ex = executor(decoder(kind="Q4_1", dim=32), kv=kv, block=block, num_blocks=7)
    ahead = {kernel.address for kernel in common_kernels(MODES["auto"], kind_of(ex.layout))}
    assert {*ex.model.body[:, 0].tolist(), *ex.model.head[:, 0].tolist()} <= ahead
    ex.close()


@pytest.mark.skipif(integer_mode("int8", 4) != "int8", reason="this path multiplies in 15 bits only")
def test_mixed_turns_queries_keys_and_down_or_takes_15_bits_for_queries_keys_and_the_first_eighth_of_the_layers():
    weights = decoder(layers=9, kind="Q4_1", dim=32)
    spec = model_from_gguf(weights.metadata, weights.facts)
    read = read_decoder(weights.metadata, spec, weights.tensors)
    model = build(read, weights.tensors, spec.kv_layout(), "mixed", 64)
    names = {k.address: mode for kernels in (matmul.KERNELS, gated.KERNELS) for (_, _, mode), k in kernels.items()}
    modes = [names[at] for at in model.body[:, 0].tolist() if at in names]  # q k v; output; gate and up; down
    if ISA.vnni:
        assert modes == ["turned", "int8", "int8", "turned"] * 9
    else:
        assert modes == ["int16"] * 8 + ["int16", "int8", "int8", "int8"] * 7


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (("bf16", "auto"), 0.04 if MODES["auto"] == "mixed" else 0.015), (("bf16", "int8"), 0.04),
        (("bf16", "int8x2"), 0.008), (("fp32", "fp32"), 2e-5), (("int8", "int8x2"), 0.02), (("fp8", "int8x2"), 0.08),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_logits_are_the_reference(case, tolerance, kind):
    weights = decoder(kind=kind, dim=32, heads=4, kv_heads=2, hidden=128)
    ids = tokens(40)
    expected = Reference(weights).logits(np.array(ids))
    ex = executor(weights, kv=case[0], activations=case[1])
    got = all_logits(ex, ids)
    ex.close()
    assert got.shape == expected.shape
    assert np.sqrt(((got - expected) ** 2).mean()) <= tolerance * expected.std()


def test_int4_keeps_the_newest_tokens_as_bf16_keeps_them_and_older_ones_nearly():
    weights = decoder(dim=32, hidden=128)
    ids = tokens(400)
    plain, ex = executor(weights, activations="fp32"), executor(weights, kv="int4", block=32, activations="fp32")
    expected, got = all_logits(plain, ids, room=0), all_logits(ex, ids, room=0)
    plain.close()
    ex.close()
    assert np.array_equal(got[:128], expected[:128])
    assert not np.array_equal(got[128], expected[128])
    error = np.sqrt(((got[128:] - expected[128:]) ** 2).mean())
    assert error <= 0.12 * expected.std()  # random keys are hard to quantise; a wrong page gives more than 1


def test_int4_needs_whole_groups():
    with pytest.raises(ConfigError, match=r"multiple of 32 tokens per block, got 16; nearest: 32"):
        executor(decoder(dim=32), kv="int4")
    with pytest.raises(ConfigError, match=r"multiple of 32 channels per head, got 80; nearest: 64"):
        executor(decoder(dim=80, kv_heads=1, heads=2), kv="int4", block=32)


def test_a_vocabulary_that_fills_no_tile():
    weights = decoder(vocab=83, tied=True)
    ids = tokens(20, 83)
    ex = executor(weights, kv="fp32", activations="fp32")
    got = all_logits(ex, ids)
    ex.close()
    assert np.allclose(got, Reference(weights).logits(np.array(ids)), atol=1e-4)


def test_only_asked_rows_go_through_the_head():
    ex = executor(decoder())
    first, second = sequence(tokens(30)), sequence(tokens(5), first_block=10, seq_id=1)
    every = [all_logits(ex, s.token_ids, first_block=s.tables[0][0]) for s in (first, second)]
    got = ex.logits(Step((Chunk(first, 0, 30, True), Chunk(second, 0, 5, True))))
    assert np.array_equal(got, np.stack([every[0][-1], every[1][-1]]))
    assert ex.logits(Step((Chunk(first, 0, 10, False),))).shape == (0, 96)
    assert ex.run(Step(())).samples == {}
    ex.close()


def test_rows_that_nobody_reads_stop_before_the_last_layers_attention(monkeypatch):
    ex = executor(decoder())
    whole, tail, run, ran = ex.model.body, ex.model.tail, ex._team.run, []

    def watched(program, ctx):
        ran.append((program.ctypes.data, len(program), int(ctx[matmul.ROWS])))
        run(program, ctx)

    monkeypatch.setattr(ex._team, "run", watched)
    first, second = sequence(tokens(30)), sequence(tokens(5), first_block=10, seq_id=1)
    before, after = whole.ctypes.data, whole[tail:].ctypes.data
    ex.logits(Step((Chunk(first, 0, 20, False), Chunk(second, 0, 4, False))))
    assert ran == [(before, tail, 24)]
    ex.logits(Step((Chunk(first, 20, 10, True), Chunk(second, 4, 1, True))))
    assert ran[1:3] == [(before, tail, 11), (after, len(whole) - tail, 2)]
    ex.logits(Step((Chunk(first, 29, 1, True), Chunk(second, 4, 1, True))))
    assert ran[4] == (before, len(whole), 2)
    ex.close()


def test_prompt_logprobs_cover_every_following_prompt_token():
    ex = executor(decoder())
    ids = tokens(150)  # more rows than the head takes at once
    seq = sequence(ids, prompt_logprobs=2)
    logits = all_logits(ex, ids)
    result = ex.run(Step((Chunk(seq, 0, 100, False),)))
    assert len(result.prompt_logprobs[0]) == 100
    last = ex.run(Step((Chunk(seq, 100, 50, True),)))
    assert len(last.prompt_logprobs[0]) == 49
    assert last.samples[0].token_id == int(logits[-1].argmax())
    every = [*result.prompt_logprobs[0], *last.prompt_logprobs[0]]
    assert [s.token_id for s in every] == ids[1:]
    row = logits[120].astype(np.float64)
    expected = row[ids[121]] - np.log(np.exp(row).sum())
    assert every[120].logprob == pytest.approx(expected, abs=1e-4)
    ex.close()


def test_copied_and_swapped_blocks_continue_the_same():
    ex = executor(decoder())
    ids = tokens(40)
    seq = sequence(ids, room=8)
    ex.run(Step((Chunk(seq, 0, 40, True),)))
    seq.token_ids.append(5)
    step = Step((Chunk(seq, 40, 1, True),))
    expected = ex.logits(step)
    blocks = list(seq.tables[0])
    moved = [b + 20 for b in blocks]
    seq.tables = (moved,)
    copies = tuple(zip(blocks, moved, strict=True))
    assert np.array_equal(ex.logits(Step(step.chunks, copies=copies)), expected)
    spare = [b + 30 for b in blocks]
    ex._store._num_host_slots = 99  # a host tier of 99 slots
    ex.run(Step((), swaps_out=tuple((b, i) for i, b in enumerate(moved))))
    seq.tables = (spare,)
    assert np.array_equal(ex.logits(Step(step.chunks, swaps_in=tuple(enumerate(spare)))), expected)
    ex.close()


@pytest.mark.parametrize("block", [8, 16])
def test_blocks_that_a_window_has_passed_are_not_read(block):
    ex = executor(decoder(attention__sliding_window=24), block=block, num_blocks=60)
    ids = tokens(200)
    seq = sequence(ids, block=block)
    ex.run(Step((Chunk(seq, 0, 199, False),)))
    step = Step((Chunk(seq, 199, 1, True),))
    expected = ex.logits(step)
    kept = (200 - 24) // block
    seq.tables = ([-1] * kept + seq.tables[0][kept:],)
    assert np.array_equal(ex.logits(step), expected)
    ex.close()


def test_a_poisoned_request_fails_alone():
    weights = decoder()
    embedding = weights.tensors["token_embd.weight"].data
    weights.tensors["token_embd.weight"].data = embedding.copy()
    weights.tensors["token_embd.weight"].data[7 * 68 : 7 * 68 + 2] = [0, 0x7E]  # token 7: a scale that is no number
    ex = executor(weights)
    good = sequence([1, 2, 3, 4], first_block=10)
    alone = ex.logits(Step((Chunk(good, 0, 4, True),)))
    bad = sequence([1, 7, 3], first_block=0, seq_id=1)
    result = ex.run(Step((Chunk(bad, 0, 3, True), Chunk(good, 0, 4, True))))
    assert set(result.failed) == {1}
    assert set(result.samples) == {0}
    good.tables = ([0],)  # the block that the poisoned one used
    assert np.array_equal(ex.logits(Step((Chunk(good, 0, 4, True),))), alone)
    ex.close()


def test_refusals_name_what_is_missing():
    weights = decoder()
    del weights.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(DamagedFile, match=r"blk\.1\.ffn_up\.weight"):
        executor(weights)
    with pytest.raises(UnsupportedModel, match="q4_0"):
        executor(decoder(), kv="q4_0")
    with pytest.raises(UnsupportedModel, match=r"kivi2 are not computed here; .*int4"):
        executor(decoder(dim=32), kv="kivi2", block=32)
    with pytest.raises(UnsupportedModel, match="falcon"):
        executor(decoder("falcon"))
    with pytest.raises(UnsupportedModel, match="multiples of 32"):
        executor(decoder(inner=100, kind="F32"))


def test_every_mode_of_the_configuration_is_computed():
    assert set(MODES) == {"auto", "int8", "int8x2", "fp32"}


def test_two_kinds_of_cpu_do_not_share_a_folder(tmp_path, monkeypatch):
    """Numba would name both their files alike, and of two that start together one may load the other's code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    here = jit.cache_folder.__wrapped__()
    assert jit.cache_folder.__wrapped__() == here
    for name, value in (("CPU_NAME", "another"), ("CPU_FEATURES", "+another")):
        with monkeypatch.context() as other:
            other.setattr(numba.config, name, value)
            assert jit.cache_folder.__wrapped__() != here


ONE_KERNEL = """
import numpy as np
from kvledger.kernels import simd
from kvledger.kernels.jit import Kernel, cached_njit
from kvledger.kernels.team import Team, empty_program
kernel = Kernel("put", lambda op, ctx, thread: simd.put_f32(simd.get_i64(op + 8), np.float32(7)))
number = np.zeros(1, np.float32)
Team(1).run(empty_program([[kernel.address, number.ctypes.data]]), np.zeros(64, np.int64))
print(number[0], cached_njit(lambda x: x + 1)(1))
"""


def run_one_kernel(cache, prepare=None):
    """What a process that keeps its code in a folder writes to stderr, and how many functions it loads and saves."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "NUMBA_DEBUG_CACHE": "1"}
    script = cache.parent / "one_kernel.py"
    script.write_text(ONE_KERNEL)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, preexec_fn=prepare)
    *cached, answer = done.stdout.splitlines() or [""]
    assert answer == "7.0 2", done.stderr
    return done.stderr, *(sum(f"data {what} " in line for line in cached) for what in ("loaded", "saved"))


def cannot_write():
    """Root ignores permissions; without this capability it does not."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1  # linux/prctl.h, linux/capability.h
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) == 0


def no_room():
    """Files may be made and nothing written to them, as where a disk is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def set_writable(folder, is_writable):
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o755 if path.is_dir() else 0o644) & (0o777 if is_writable else 0o555))


@pytest.mark.parametrize(
    ("why", "prepare"),
    [("Not a directory", None), ("Permission denied", cannot_write), ("File too large", no_room)],
)
def test_kernels_work_where_they_cannot_be_kept_and_it_is_said_once(tmp_path, why, prepare):
    cache = tmp_path / "cache"
    if prepare is None:
        cache.touch()
    else:
        cache.mkdir(mode=0o555 if prepare is cannot_write else 0o755)
    told, loaded, saved = run_one_kernel(cache, prepare)
    assert told.count(f"what is not in {cache}") == told.count(f"({why})") == len(told.splitlines()) == 1
    assert loaded == saved == 0


def test_a_folder_that_cannot_be_written_is_read_and_only_what_is_missing_compiled(tmp_path):
    cache = tmp_path / "cache"
    told, loaded, saved = run_one_kernel(cache)
    assert (told, loaded) == ("", 0)
    assert saved > 2
    set_writable(cache, False)
    assert run_one_kernel(cache, cannot_write) == ("", saved, 0)
    set_writable(cache, True)
    missing = next(cache.rglob("*.put-*.nbi"))
    missing.unlink()
    set_writable(cache, False)
    told, loaded, saved_now = run_one_kernel(cache, cannot_write)
    assert (loaded, saved_now) == (saved - 1, 0)
    assert told.count("is compiled at every start") == len(told.splitlines()) == 1


@pytest.mark.parametrize("is_writable", [True, False])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])  # Numba's indices, and code
@pytest.mark.parametrize("left", [0, 40])
def test_damaged_files_of_compiled_kernels_are_replaced(tmp_path, kind, left, is_writable):
    cache = tmp_path / "cache"
    assert run_one_kernel(cache)[0] == ""
    files = sorted(cache.rglob(f"*.{kind}"))
    for file in files:
        os.truncate(file, left)
    set_writable(cache, is_writable)
    told, loaded, saved = run_one_kernel(cache, None if is_writable else cannot_write)
    assert loaded == 0
    assert told.count("is compiled anew: its code in") == len(files) > 2
    assert told.count("is compiled at every start") == len(told.splitlines()) - len(files) == (not is_writable)
    if is_writable:
        assert saved == len(files)
        assert run_one_kernel(cache) == ("", saved, 0)


def holed(code):
    """Zeros in its middle, as where a crash came before all of a file was on the disk."""
    return code[: len(code) // 2] + bytes(512) + code[len(code) // 2 + 512 :]


@pytest.mark.parametrize("damage", ["holed", "another's"])
def test_code_that_is_not_what_was_written_is_never_run(tmp_path, damage):
    cache = tmp_path / "cache"
    assert run_one_kernel(cache)[0] == ""
    files = sorted(cache.rglob("*.nbc"))
    codes = [file.read_bytes() for file in files]
    for file, code, other in zip(files, codes, codes[1:] + codes[:1], strict=True):
        file.write_bytes(holed(code) if damage == "holed" else other)
    told, _, saved = run_one_kernel(cache)
    assert told.count("is compiled anew: its code in") == len(told.splitlines()) == len(files) == saved > 2
    assert run_one_kernel(cache) == ("", saved, 0)
