"""Packed weights: which types of GGUF come through without loss, what the others cost, and that files of both run."""

import json
import logging
import re
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from gguf_bytes import byte_tokenizer, write
from kvledger import LLM, SamplingParams
from kvledger.bench.policies import measure_policies
from kvledger.cli.main import main
from kvledger.kernels.joined import joined
from kvledger.kernels.packed import pack
from kvledger.model import packing
from kvledger.model.packing import _BLOCKS, dense, levels_of, pack_matrices, quantise_8bit, requantised
from kvledger.plan.workload import find_workload
from kvledger.simulate.replay import poisson
from kvledger.weights.ggml_types import GGML_TYPES
from kvledger.weights.quantised import decoded_types
from reference_model import Reference
from test_architectures import errors, run
from test_quantised import SCALES, random_blocks
from tiny_models import Tensor, decoder

REQUANTISED = [name for name in decoded_types() if GGML_TYPES[name].block_elements > 1 and name not in _BLOCKS]


def random_tensor(name, rows=64, cols=256):
    blocks = random_blocks(name, rows * cols // GGML_TYPES[name].block_elements)
    return Tensor("t", (rows, cols), name, blocks.reshape(-1))


def unpacked(levels):
    """float32[N, K]: scale · level + minimum, in float32."""
    groups = levels.level.reshape(len(levels.level), -1, 32).astype(np.float32)
    w = groups * levels.scale[..., None] + levels.minimum[..., None]
    return w.reshape(levels.level.shape)


@pytest.mark.parametrize("name", _BLOCKS)
def test_without_loss(name):
    tensor = random_tensor(name)
    blocks = tensor.data.reshape(-1, GGML_TYPES[name].block_bytes)
    theirs = dequantize(blocks, GGMLQuantizationType[name]).reshape(tensor.shape)
    levels = levels_of(tensor)
    assert levels.level.max() < 1 << levels.bits
    np.testing.assert_array_max_ulp(unpacked(levels), theirs, 1)
    assert np.ptp(levels.level, axis=1).min() > 0, "every row of the test has more than one level"


@pytest.mark.parametrize(("name", "bits"), [("Q4_1", 5), ("Q4_K", 6), ("Q5_K", 10), ("Q8_0", 9), ("Q6_K", 9)])
def test_bits_per_weight(name, bits):
    packed = pack_matrices([random_tensor(name)])
    assert packed.data.nbytes * 8 == bits * 64 * 256


@pytest.mark.parametrize("name", REQUANTISED)
def test_requantising_costs_less_than_one_per_cent(name):
    """Root mean square, row by row: docs/weights.md has the figures."""
    tensor = random_tensor(name, rows=256)
    with np.errstate(all="ignore"):
        w, got = dense(tensor).astype(np.float64), unpacked(levels_of(tensor))
        usual = np.isfinite(w).all(1) & (np.abs(w).max(1) < 1e30) & (np.abs(w).max(1) > 1e-30)
    error, size = (np.sqrt((x[usual] ** 2).mean(1)) for x in (got - w, w))
    assert usual.sum() > 40
    assert (error / size).max() < 0.01


def test_requantising_takes_a_few_rows_at_a_time(monkeypatch):
    tensor = random_tensor("Q6_K")
    whole = levels_of(tensor)
    monkeypatch.setattr(packing, "_FLOATS_AT_ONCE", 7 * 256 + 1)
    for a, b in zip(levels_of(tensor)[:3], whole[:3], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "kinds", [("Q4_1",), ("Q6_K",), ("BF16",), ("F32",), ("Q4_K", "Q4_K"), ("Q4_K", "Q6_K", "Q8_0")]
)
def test_stretches_of_rows_are_the_matrix(monkeypatch, kinds, exact):
    tensors = [random_tensor(kind, rows) for kind, rows in zip(kinds, (80, 48, 40), strict=False)]
    whole = pack_matrices(tensors, exact=exact)
    monkeypatch.setattr(packing, "_WEIGHTS_AT_ONCE", 33 * 256)  # two tiles and a row
    parts = pack_matrices(tensors, exact=exact)
    assert (parts.rows, parts.cols, parts.bits, parts.wide) == (whole.rows, whole.cols, whole.bits, whole.wide)
    np.testing.assert_array_equal(parts.data, whole.data)
    assert parts.data.ctypes.data % 64 == 0


@pytest.mark.parametrize(("kind", "most"), [("Q4_1", 1.3), ("Q8_0", 1.3), ("BF16", 1.3), ("Q6_K", 2.4)])
def test_a_large_matrix_is_packed_in_little_memory_beside_it(monkeypatch, kind, most):
    """What is requantised has all its levels first."""
    tensor = random_tensor(kind, 16384)
    monkeypatch.setattr(packing, "_WEIGHTS_AT_ONCE", 1 << 16)
    monkeypatch.setattr(packing, "_FLOATS_AT_ONCE", 1 << 16)
    tracemalloc.start()
    try:
        packed = pack_matrices([tensor])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < most * packed.data.nbytes


@pytest.mark.parametrize("tiny", [0, 1, 2, 3])
def test_wide_scales_of_one_stretch_are_all_of_the_matrix(monkeypatch, tiny):
    w = np.random.default_rng(0).standard_normal((4 * 32 + 5, 64)).astype(np.float32)
    w[32 * tiny + 3] *= 1e-9  # beyond float16 in one stretch only
    parts = [quantise_8bit(w[i : i + 32]) for i in range(0, len(w), 32)]
    whole = pack(*(np.concatenate([p[i] for p in parts]) for i in range(3)), 8)
    assert [pack(*part).wide for part in parts].count(True) == 1
    found = joined((pack(*part) for part in parts), len(w))
    np.testing.assert_array_equal(found.data, whole.data)
    assert (found.rows, found.wide) == (len(w), True)


def test_numbers_beyond_float16_keep_wide_scales():
    for factor in (1e-9, 1e9):
        w = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32) * np.float32(factor)
        got = unpacked(quantise_8bit(w))
        assert np.abs(got - w).max() < np.abs(w).max() / 250


def test_float64_is_not_squeezed_into_a_byte():
    w = np.random.default_rng(0).standard_normal((16, 64))
    assert pack_matrices([Tensor("t", w.shape, "F64", w.view(np.uint8).reshape(-1))]).bits == 16


# ---------------------------------------------------------------------------------------------- whole models


def random_matrix(rng, kind, rows, cols):
    """Blocks whose weights have about mean 0 and variance 1 / cols."""
    blocks = rng.integers(0, 256, (rows * cols // 256, GGML_TYPES[kind].block_bytes), dtype=np.uint8)
    if kind == "Q6_K":
        blocks[:, 192:208] = rng.integers(40, 80, (len(blocks), 16))  # its sixteen scales
    scale = 1.0
    for _ in range(2):  # the second time with the scale that the first has shown to be right
        for at, middle in zip(SCALES[kind], (1, {"Q4_K": 7.5, "Q5_K": 15.5}.get(kind)), strict=False):
            blocks[:, at : at + 2] = np.full((len(blocks), 1), scale * middle, np.float16).view(np.uint8)
        tensor = Tensor("", (rows, cols), kind, blocks.reshape(-1))
        scale *= cols**-0.5 / dense(tensor).std()
    return tensor


def mixed(main, other):
    """A llama in `main`, but values, half of the MLP's outputs and the head in `other`: what Q4_K_M does."""
    rng, weights = np.random.default_rng(1), decoder(hidden=256, inner=512, heads=4, kv_heads=2, dim=64, vocab=256)
    for name, tensor in weights.tensors.items():
        if len(tensor.shape) < 2:
            continue
        rich = name.endswith(("attn_v.weight", "output.weight")) or name == "blk.0.ffn_down.weight"
        made = random_matrix(rng, other if rich and "attn_output" not in name else main, *tensor.shape)
        weights.tensors[name] = Tensor(name, made.shape, made.ggml_type, made.data)
    return weights


@pytest.mark.parametrize(
    ("main", "other", "most"),
    [("Q4_K", "Q4_K", 1e-3), ("Q5_K", "Q4_K", 1e-3), ("Q4_K", "Q6_K", 0.02), ("Q3_K", "Q5_K", 0.03)],
)
def test_a_mixed_file_is_its_reference(main, other, most):
    """As closely as activations allow where no type is lossy, else with the error of a byte; exactly in float32."""
    weights, ids = mixed(main, other), list(range(3, 40))
    expected = Reference(weights).logits(ids)
    assert errors(run(weights, "llama", "fp32", "int8x2", ids), expected)[1] < most
    assert errors(run(weights, "llama", "fp32", "fp32", ids), expected)[0] < 1e-4


def write_mixed(path):
    weights = mixed("Q4_K", "Q6_K")
    tensors = {t.name: (t.shape, t.ggml_type, t.data.tobytes()) for t in weights.tensors.values()}
    keys = weights.metadata | {"tokenizer.chat_template": "{{ messages[0].content }}"} | byte_tokenizer(256)
    return write(path, keys, tensors)


def test_a_mixed_file_answers_and_says_what_it_converts(tmp_path, caplog):
    path, params = write_mixed(tmp_path / "m.gguf"), SamplingParams(temperature=0, max_tokens=4)
    told = "matrices are dequantised and kept in 8 bits, no kernel reads their type: 4 of Q6_K"
    with caplog.at_level(logging.WARNING, "kvledger"), LLM(str(path), kv_memory="1MiB", num_threads=1) as llm:
        assert llm.generate("abc", params)[0].outputs[0].token_ids
        assert llm.loaded.notes == (told,)
    assert told in caplog.text
    caplog.clear()
    with LLM(str(path), kv_memory="1MiB", num_threads=1, progress=lambda text: None) as llm:
        assert llm.loaded.notes == (told,)
    assert not caplog.text, "whoever listens to progress shows the notes"


def test_what_loads_a_file_several_times_says_once_what_it_converts(tmp_path, caplog, capsys):
    path = write_mixed(tmp_path / "m.gguf")
    with pytest.raises(SystemExit):
        main(["eval", str(path), "--tokens", "40", "--kv-dtype", "int8", "--activations", "int8,fp32", "--json"])
    out, err = capsys.readouterr()
    told = ["matrices are dequantised and kept in 8 bits", "matrices are dequantised and kept in float32"]
    assert [err.count(words) for words in told] == [1, 1]
    assert [note.partition(",")[0] for note in json.loads(out)["notes"]] == told
    trace = poisson(find_workload("20/8"), 2, 200.0, 12, max_prompt=32, max_output=12, vocab_size=250)
    measure_policies(str(path), trace, 1 << 20, 64, lambda text: None)
    assert not caplog.text


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["blk.0.ffn_up.bias"], "1 tensor of the file, .*: blk.0.ffn_up.bias$"),
        ([f"blk.{i}.ffn_{part}.bias" for i in (0, 1) for part in ("gate", "up")] + ["position_embd.weight"],
         r"5 tensors of the file, .*: blk\.0\.ffn_gate\.bias, .*, blk\.1\.ffn_gate\.bias and 2 more$"),
        (["rope_freqs.weight", "blk.0.attn_rot_embd.weight", "blk.1.attn.rotary_emb.inv_freq", "cls.weight"], None),
        (["blk.2.attn_q.weight", "blk.2.nextn.eh_proj.weight"], None),  # a layer beyond the two: drafts
    ],
)  # fmt: skip
def test_tensors_that_nothing_reads_are_told(tmp_path, extra, said):
    weights = mixed("Q4_K", "Q4_K")
    tensors = {t.name: (t.shape, t.ggml_type, t.data.tobytes()) for t in weights.tensors.values()}
    tensors |= {name: ((32,), "F32", np.ones(32, np.float32).tobytes()) for name in extra}
    path = write(tmp_path / "m.gguf", weights.metadata | byte_tokenizer(256), tensors)
    with LLM(str(path), kv_memory="1MiB", num_threads=1, progress=lambda text: None) as llm:
        notes = llm.loaded.notes
    assert len(notes) == (said is not None)
    assert said is None or re.search(f"answers may be wrong: {said}", notes[0]), notes


def test_what_is_requantised():
    facts = {"a": ((2, 256), "Q6_K", 0), "b": ((2, 256), "Q4_K", 0), "c": ((256,), "Q6_K", 0), "d": ((2, 2), "F16", 0)}
    assert requantised(facts) == {"Q6_K": 1}
