"""GGUF and safetensors files that are what they say, and the many that are not: refused with what and where."""

import contextlib
import json
import random
import struct
import sys
import time
import tracemalloc
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from kvledger import LLM, SamplingParams
from kvledger.build import build_engine
from kvledger.errors import ConfigError, DamagedFile, KvledgerError, UnsupportedModel
from kvledger.evaluate.quality import Asked, evaluate
from kvledger.models import resolve_model
from kvledger.spec.from_gguf import CACHE_RULES, model_from_gguf
from kvledger.spec.kv import ChunkedKV, FullKV, LatentKV, StateKV, WindowKV
from kvledger.text.chat import ChatTemplate
from kvledger.text.tokenizer import Tokenizer
from kvledger.weights.ggml_types import BY_CODE, GGML_TYPES
from kvledger.weights.gguf import open_gguf, read_header
from kvledger.weights.open import open_weights
from kvledger.weights.safetensors import read_safetensors
from tiny_model import write_tiny_model

SCRIPTS = Path(__file__).parents[1] / "scripts"


def write_small(path, arch="llama", **keys):
    """A file with every kind of metadata value and two tensors."""
    writer = GGUFWriter(path, arch)
    writer.add_uint32("u32", 7)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 你好")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("flags", [True, False])
    for key, value in keys.items():
        writer.add_uint32(key, value)
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    quantised = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("b", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def resident_bytes():
    """Of pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="nothing here tells what is resident")
def test_what_has_been_read_need_not_stay_in_memory(tmp_path):
    path, size = tmp_path / "large.gguf", 32 << 20
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a", np.arange(size // 4, dtype=np.float32))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    file = open_gguf(path)
    total = file.tensors["a"].data.view(np.float32).sum(dtype=np.float64)
    before = resident_bytes()
    file.release()
    assert resident_bytes() < before - size // 2
    assert file.tensors["a"].data.view(np.float32).sum(dtype=np.float64) == total


def test_values_of_every_kind(small):
    metadata = open_gguf(small).metadata
    expected = {"u32": 7, "i64": -(2**40), "f32": 0.5, "f64": 1e300, "yes": True, "text": "naïve 你好",
                "numbers": [1, 2, 3], "floats": [0.5, -1.0], "texts": ["a", "", "ü"], "flags": [True, False],
                "general.architecture": "llama"}  # fmt: skip
    assert metadata == expected


def test_tensors_are_views_of_the_exact_bytes(small):
    tensors = open_gguf(small).tensors
    assert {n: (t.shape, t.ggml_type) for n, t in tensors.items()} == {"a": ((3, 4), "F32"), "b": ((2, 32), "Q8_0")}
    np.testing.assert_array_equal(tensors["a"].data.view(np.float32), np.arange(12, dtype=np.float32))
    np.testing.assert_array_equal(tensors["b"].data, np.arange(68, dtype=np.uint8))
    ends = {n: t.data.ctypes.data + t.data.nbytes for n, t in tensors.items()}
    assert 0 <= tensors["b"].data.ctypes.data - ends["a"] < 64, "not one map"
    with pytest.raises(ValueError, match="read-only"):
        tensors["a"].data[0] = 1


def test_agrees_with_the_gguf_package(small):
    theirs = GGUFReader(small)
    ours = open_gguf(small)
    assert {t.name: (int(t.data_offset), int(t.n_bytes)) for t in theirs.tensors} == {
        i.name: (i.offset, i.num_bytes) for i in ours.header.tensor_infos.values()
    }


def test_type_table_is_ggmls():
    from gguf.constants import GGML_QUANT_SIZES

    assert {k: (t.name, t.block_elements, t.block_bytes) for k, t in BY_CODE.items()} == {
        int(k): (k.name, *GGML_QUANT_SIZES[k]) for k in GGMLQuantizationType if k.name in GGML_TYPES
    }


# ---------------------------------------------------------------------------------------------- hand-made damage


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(tensors=0, keys=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, keys)


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name, shape, kind=0, offset=0, dims=None):
    dims = len(shape) if dims is None else dims
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", dims, *shape, kind, offset)


ARRAY, STRING, U32, BOOL = 9, 8, 4, 7
BAD = {
    "empty": (b"", "0 bytes long"),
    "short": (b"GGUF\x03\0\0\0", "8 bytes long"),
    "foreign": (b"PK\x03\x04" + bytes(60), "begins with b'PK"),
    "old version": (header(version=1), "GGUF version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian version 3"),
    "absurd tensor count": (header(tensors=2**62), "4,611,686,018,427,387,904 tensors announced"),
    "absurd key count": (header(keys=2**40), "1,099,511,627,776 metadata keys announced"),
    "cut off in a key": (header(keys=1) + struct.pack("<Q", 5) + b"abc", "metadata key of 5 bytes; 3 are possible"),
    "key of absurd length": (header(keys=1) + struct.pack("<Q", 2**63) + bytes(40), "metadata key of 9,223,372"),
    "value of absurd length": (header(keys=1) + key(b"k", STRING, struct.pack("<Q", 2**40)), "value of 'k' of 1,099"),
    "unknown value type": (header(keys=1) + key(b"k", 99, bytes(8)), "value of 'k' has type 99"),
    "boolean 2": (header(keys=1) + key(b"k", BOOL, b"\x02"), "boolean is 0 or 1"),
    "absurd array": (header(keys=1) + key(b"k", ARRAY, struct.pack("<IQ", U32, 2**60)), "array of 1,152,921,504"),
    "array of arrays": (header(keys=1) + key(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(24)), "array of arrays"),
    "array of unknown": (header(keys=1) + key(b"k", ARRAY, struct.pack("<IQ", 77, 3) + bytes(24)), "type 77"),
    "strings that do not fit": (header(keys=1) + key(b"k", ARRAY, struct.pack("<IQQ", STRING, 2, 2**50) + bytes(9)),
                                "item 0 of 'k' does not fit"),
    "not UTF-8": (header(keys=1) + key(b"\xff\xfe", U32, bytes(4)), "metadata key is not UTF-8"),
    "string not UTF-8": (header(keys=1) + key(b"k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")),
                         "item 0 of 'k' is not UTF-8"),
    "key twice": (header(keys=2) + 2 * key(b"k", U32, bytes(4)), "'k' appears twice"),
    "one of many": (header(keys=1) + key(b"split.count", U32, struct.pack("<I", 5)), "one of 5 parts; join them"),
    "alignment 3": (header(keys=1) + key(b"general.alignment", U32, struct.pack("<I", 3)), "alignment is 3"),
    "alignment text": (header(keys=1) + key(b"general.alignment", STRING, text(b"x")), "alignment is 'x'"),
    "five dimensions": (header(tensors=1) + tensor(b"t", [1] * 5), "has 5 dimensions"),
    "no dimensions": (header(tensors=1) + tensor(b"t", [], dims=0) + bytes(8), "has 0 dimensions"),
    "absurd dimensions": (header(tensors=1) + tensor(b"t", [2**63, 2**63]) + bytes(64), "bytes, the file has"),
    "empty tensor": (header(tensors=1) + tensor(b"t", [0]) + bytes(64), "is empty"),
    "unknown tensor type": (header(tensors=1) + tensor(b"t", [1], kind=1234) + bytes(64), "type number 1234; known"),
    "not whole blocks": (header(tensors=1) + tensor(b"t", [31], kind=8) + bytes(64), "rows of 31 are not whole Q8_0"),
    "misaligned": (header(tensors=1) + tensor(b"t", [1], offset=7) + bytes(64), "not a multiple of 32"),
    "beyond the file": (header(tensors=1) + tensor(b"t", [4], offset=2**40) + bytes(64), "the download may be"),
    "tensor twice": (header(tensors=2) + 2 * tensor(b"t", [1]) + bytes(99), "'t' appears twice"),
    "overlap": (header(tensors=2) + tensor(b"t", [16]) + tensor(b"u", [1], offset=32) + bytes(199), "overlap"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_with_what_and_where(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises((DamagedFile, UnsupportedModel)) as caught:
        read_header(path)
    assert "bad.gguf" in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf", "/dev/null"):
        with pytest.raises(DamagedFile):
            read_header(path)


def test_an_announced_size_costs_no_memory(tmp_path):
    """Half a gigabyte announced, sixty bytes there."""
    path = tmp_path / "x.gguf"
    path.write_bytes(header(keys=1) + key(b"k", ARRAY, struct.pack("<IQ", U32, 1 << 27)) + bytes(60))
    tracemalloc.start()
    with pytest.raises(DamagedFile):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# ---------------------------------------------------------------------------------------------- fuzz


def model_file(path, arch="llama"):
    """A small model with a tokenizer and a template: everything that reads metadata has something to read."""
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv([1])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, rows in {"token_embd": 4, "blk.0.attn_q": 32, "blk.0.attn_k": 16, "output": 4}.items():
        writer.add_tensor(f"{name}.weight", np.ones((rows, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mutate(data, rng):
    """A few bytes changed, a length made extreme, a piece cut out, doubled or cut off, in the header if possible."""
    data = bytearray(data)
    end = min(len(data), 1300)  # metadata and directory of `model_file`
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(4, end)
        kind = rng.randrange(6)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            extreme = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), rng.randrange(2**64)])
            data[at : at + 8] = struct.pack("<Q", extreme)
        elif kind == 3:
            del data[at : at + rng.randrange(1, 20)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(1, 20)]
        else:
            del data[rng.randrange(4, len(data)) :]
        end = max(5, min(end, len(data)))
    return bytes(data)


def use(path):
    """Everything that start-up does with a file's metadata."""
    file = open_gguf(path)
    _ = {name: t.data.sum() for name, t in file.tensors.items()}
    model_from_gguf(file.metadata, file.facts).kv_layout()
    tokenizer = Tokenizer.from_metadata(file.metadata)
    tokenizer.decode(tokenizer.encode("abab <|im_end|>"))
    if template := ChatTemplate.from_metadata(file.metadata, tokenizer):
        template.render([{"role": "user", "content": "x"}])


def test_the_unharmed_file_is_read(tmp_path):
    use(model_file(tmp_path / "ok.gguf"))


@pytest.mark.parametrize("seed", range(8))
def test_mutated_files_load_or_are_refused(tmp_path, seed):
    """No other exception, no long time, no large memory."""
    rng = random.Random(seed)
    whole = model_file(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "mutant.gguf"
    loaded = 0
    for _ in range(500):
        path.write_bytes(mutate(whole, rng))
        start = time.perf_counter()
        with contextlib.suppress(KvledgerError):
            use(path)
            loaded += 1
        assert time.perf_counter() - start < 5
    assert loaded > 0, "some mutations are harmless"


ODD = [None, 0, -1, 1, 2**31, 2**63, 0.5, float("nan"), True, "", "x", "\x00", [], [0], [1, 2], ["a"],
       ["a", "a", "", "a"], [True] * 4, [-1] * 4, [float("nan")] * 4, [10**9] * 4, ["a b"], [" "], ["  "]]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_any_value_under_any_key(tmp_path, kind):
    """Well-formed files whose values are of the wrong kind or size."""
    file = open_gguf(model_file(tmp_path / "x.gguf"))
    base = {**file.metadata, "tokenizer.ggml.model": kind, "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0]}
    for name in [*base, "llama.rope.dimension_count", "llama.attention.sliding_window", "tokenizer.ggml.bos_token_id"]:
        for value in ODD:
            changed = {**base, name: value}
            with contextlib.suppress(KvledgerError):
                model_from_gguf(changed, file.facts).kv_layout()
            with contextlib.suppress(KvledgerError):
                tokenizer = Tokenizer.from_metadata(changed)
                tokenizer.decode(tokenizer.encode("ab é <|im_end|>", add_special=True))
                if template := ChatTemplate.from_metadata(changed, tokenizer):
                    template.render([{"role": "user", "content": "x"}])


# ---------------------------------------------------------------------------------------------- model facts


def facts_of(arch, layers=8, **keys):
    """Metadata and tensors of a model of that architecture with plain numbers."""
    base = {"block_count": layers, "context_length": 4096, "embedding_length": 64, "attention.head_count": 4,
            "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32}  # fmt: skip
    metadata = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in {**base, **keys}.items()}}
    tensors = {"token_embd.weight": ((100, 64), "Q8_0", 6800), "output_norm.weight": ((64,), "F32", 256)}
    tensors |= {f"blk.{i}.ffn_up.weight": ((128, 64), "Q4_1", 5120) for i in range(layers)}
    return metadata, tensors


MLA = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "attention.key_length_mla": 192}


def caches(arch, **keys):
    return [layer.cache for layer in model_from_gguf(*facts_of(arch, **keys)).layers]


def test_counts_come_from_the_tensors():
    metadata, tensors = facts_of("llama", layers=2, expert_count=8, expert_used_count=2)
    tensors |= {f"blk.{i}.ffn_up_exps.weight": ((8, 16, 64), "Q4_1", 5120) for i in range(2)}
    tensors |= {f"blk.{i}.ffn_down_exps.weight": ((8, 64, 16), "Q4_1", 5120) for i in range(2)}
    tensors["rope_freqs.weight"] = ((16,), "F32", 64)
    model = model_from_gguf(metadata, tensors)
    layer = model.layers[0]
    assert (layer.params, layer.num_experts, layer.experts_per_token, layer.expert_params) == (24576, 8, 2, 2048)
    assert (layer.score_dims, layer.mix_dims) == (128, 128)
    assert model.num_params == 100 * 64 + 64 + 2 * 24576  # rope factors are no weights
    assert model.active_params == model.num_params - 2 * 6 * 2048
    assert model.weight_bytes == 6800 + 256 + 2 * 5120 + 4 * 5120 + 64
    assert model.head_params == 0
    assert model.dtype == "q4_1"
    assert model.vocab_size == 100


def test_caches_by_architecture():
    full, window = FullKV(2, 32, 32), WindowKV(2, 32, 32, 512)
    assert caches("llama") == [full] * 8
    assert caches("qwen3", **{"attention.sliding_window": 512}) == [full] * 8
    assert caches("llama", **{"attention.sliding_window": 512}) == [window] * 8
    assert caches("phi3", **{"attention.sliding_window": 262144}) == [full] * 8  # longer than the context
    assert caches("gemma2", **{"attention.sliding_window": 512}) == [window, full] * 4
    assert caches("gemma3", **{"attention.sliding_window": 512}) == [window] * 5 + [full] + [window] * 2
    pattern = {"attention.sliding_window": 512, "attention.sliding_window_pattern": [True, False] + [True] * 6}
    assert caches("gemma3", **pattern) == [window, full] + [window] * 6
    assert caches("llama4") == [ChunkedKV(2, 32, 32, 8192)] * 3 + [full] + [ChunkedKV(2, 32, 32, 8192)] * 3 + [full]
    assert caches("deepseek2", **MLA) == [LatentKV(512, 64)] * 8
    shared = {"attention.sliding_window": 512, "attention.shared_kv_layers": 2, "attention.key_length_swa": 16,
              "attention.value_length_swa": 16}  # fmt: skip
    assert caches("gemma4", **shared) == [WindowKV(2, 16, 16, 512)] * 5 + [full, None, None]
    deci = {"attention.head_count_kv": [2, 0] * 4}
    assert caches("deci", **deci) == [full, None] * 4


def test_states():
    ssm = {"ssm.inner_size": 256, "ssm.state_size": 16, "ssm.conv_kernel": 4, "ssm.group_count": 2}
    state = StateKV(((3 * (256 + 2 * 2 * 16), 4, 256 + 2 * 2 * 16), (256 * 16, 4, 256)))
    assert caches("mamba2", **ssm) == [state] * 8
    assert caches("qwen3next", **ssm) == [state] * 3 + [FullKV(2, 32, 32)] + [state] * 3 + [FullKV(2, 32, 32)]
    heads = {"attention.head_count_kv": [0, 2] + [0] * 6, "feed_forward_length": [0] * 7 + [128]}
    assert caches("nemotron_h", **ssm, **heads) == [state, FullKV(2, 32, 32)] + [state] * 5 + [None]
    conv = {"shortconv.l_cache": 3, "attention.head_count_kv": [0] * 7 + [2]}
    assert caches("lfm2", **conv) == [StateKV(((2 * 64, 4, 64),))] * 7 + [FullKV(2, 32, 32)]


def test_draft_layers_stay_outside():
    model = model_from_gguf(*facts_of("deepseek2", layers=3, nextn_predict_layers=1, **MLA))
    assert (model.num_layers, model.draft_layers) == (2, 1)
    assert "draft" in model.notes[0]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"general.architecture": "lama"}, UnsupportedModel, r"unknown architecture 'lama'; nearest: .*llama.*known:"),
        ({"general.architecture": None}, DamagedFile, r"no 'general\.architecture'"),
        ({"llama.block_count": None}, DamagedFile, r"no 'llama\.block_count'"),
        ({"llama.block_count": 9}, DamagedFile, "layer 8 has no tensors"),
        ({"llama.block_count": 10**6}, DamagedFile, "1,000,000; 1,024 are accepted"),
        ({"llama.block_count": -1}, DamagedFile, "not a whole number"),
        ({"llama.context_length": "long"}, DamagedFile, "'long', not a whole number"),
        ({"llama.attention.head_count": 0, "llama.attention.key_length": None}, DamagedFile, "head_count' is 0"),
        ({"llama.attention.head_count_kv": [2, 2]}, DamagedFile, "has 2 values; layer 2 needs one more"),
    ],
)
def test_metadata_that_cannot_be_meant(change, error, match):
    metadata, tensors = facts_of("llama")
    metadata = {k: v for k, v in {**metadata, **change}.items() if v is not None}
    with pytest.raises(error, match=match):
        model_from_gguf(metadata, tensors)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"embedding_length": 64}, r"'token_embd\.weight' has shape \(4, 32\).*\(any, 64\)"),
        ({"embedding_length": 2**31}, "token_embd"),
        ({"attention.head_count": 4}, r"'blk\.0\.attn_k\.weight' has shape \(16, 32\).*\(8, 32\)"),
        ({"attention.head_count_kv": [2]}, r"attn_k\.weight' has shape \(16, 32\).*\(32, 32\)"),
        ({"attention.head_count_kv": 3}, "2 query heads of layer 0 do not share 3 KV heads evenly"),
        ({"attention.key_length": 7, "rope.dimension_count": 6}, "attn_q"),
        ({"rope.dimension_count": 3}, "rope.dimension_count' is 3; it must be even and at most 16"),
        ({"rope.dimension_count": 10**6}, "at most 16"),
    ],
)
def test_tensors_that_are_not_as_announced(tmp_path, change, match):
    """What kernels would take on trust."""
    file = open_gguf(model_file(tmp_path / "x.gguf"))
    with pytest.raises(DamagedFile, match=match):
        model_from_gguf({**file.metadata, **{f"llama.{k}": v for k, v in change.items()}}, file.facts)


def test_every_rule_survives_missing_keys():
    for arch in CACHE_RULES:
        with pytest.raises(DamagedFile, match=rf"'{arch}\.\w"):
            model_from_gguf({"general.architecture": arch}, {})


# ---------------------------------------------------------------------------------------------- safetensors


def st_file(path, head, body=b""):
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


ROW = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("head", "body", "match"),
    [
        (b"not json", b"", "not JSON"),
        (b"[]", b"", "a JSON list"),
        (b"[" * 5000, b"", "not JSON"),
        ({"t": 5}, b"", "a JSON int"),
        ({"t": ROW}, b"", "does not lie in the file"),
        ({"t": {**ROW, "shape": [3]}}, bytes(8), "of 12 bytes does not lie"),
        ({"t": {**ROW, "shape": [-2]}}, bytes(8), "no shape or offsets"),
        ({"t": {**ROW, "data_offsets": [0]}}, bytes(8), "does not lie"),
        ({"t": {**ROW, "shape": [2**62, 2**62]}}, bytes(8), "does not lie"),
        ({"t": {**ROW, "dtype": "F8_E4M3"}}, bytes(8), "of type 'F8_E4M3'; read are F32"),
        ({"t": {**ROW, "dtype": []}}, bytes(8), "of type"),
        ({"t": ROW, "u": {**ROW, "data_offsets": [4, 12]}}, bytes(12), "tensors 't' and 'u' overlap"),
        (b'{"t": {}, "t": {}}', bytes(8), "'t' appears twice"),
    ],
)
def test_damaged_safetensors(tmp_path, head, body, match):
    path = st_file(tmp_path / "m.safetensors", head, body)
    with pytest.raises((DamagedFile, UnsupportedModel), match=match):
        read_safetensors(path)


def test_safetensors_that_are_no_file(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    with pytest.raises(DamagedFile, match=r"m\.safetensors cannot be read"):
        read_safetensors(tmp_path / "m.safetensors")


def test_tensors_of_two_files_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("a", "b"):
        st_file(tmp_path / f"{name}.safetensors", {"t": ROW}, bytes(8))
    with pytest.raises(DamagedFile, match=r"tensor 't' is in a\.safetensors and in b\.safetensors"):
        open_weights(tmp_path)


def test_safetensors_of_absurd_header(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(DamagedFile, match=r"header of 1,152,921,504,606,846,976 bytes in a file of 8"):
        read_safetensors(path)


def test_folders_that_cannot_be_meant(tmp_path):
    with pytest.raises(ConfigError, match="0 GGUF files and no config"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(DamagedFile, match="0 safetensors files"):
        open_weights(tmp_path)
    st_file(tmp_path / "model.safetensors", {"t": ROW}, bytes(8))
    with pytest.raises(UnsupportedModel, match="model_type 'bert' are not read; read are llama"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "", "gone": ""}}))
    with pytest.raises(DamagedFile, match=r"1 tensors that .* are missing, first 'gone'"):
        open_weights(tmp_path)
    with pytest.raises(ConfigError, match="Q8_0 or Q4_1"):
        open_weights(tmp_path, "Q3_K")


def test_a_flipped_bit_in_a_shape_is_told_with_file_and_tensor(tmp_path):
    """Whoever finds it, in the header or by comparison with the metadata: the program, the plan, the evaluation."""
    data = bytearray(write_tiny_model(tmp_path / "whole.gguf").read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name) + 4  # the number of dimensions, then the columns
    data[at + 8] ^= 64  # 256 rows of 320
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    said = r"^flipped\.gguf: tensor 'output\.weight' has shape \(\d+, 64\); the metadata announces \(\d+, 64\)"
    for read in (build_engine, resolve_model, lambda path: evaluate(Asked(str(path)))):
        with pytest.raises(DamagedFile, match=said):
            read(str(path))


@pytest.mark.parametrize(("types", "file_type"), [("q4_1", 3), ("q4_k_m", 15)])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_file_of_random_weights_answers_and_names_its_type(tmp_path, monkeypatch, arch, types, file_type):
    """Peers read the kind of quantisation from the header; OpenVINO reads no file without it."""
    spec = spec_from_file_location("make_random_gguf", SCRIPTS / "make_random_gguf.py")
    script = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    spec.loader.exec_module(script)
    has = {"qk_norm": arch == "qwen3", "llama3_rope": arch == "llama"}
    tiny = script.Shape(arch, 2, 256, 512, 4, 2, 64, 300, 128, 1e4, **has)
    monkeypatch.setitem(script.SHAPES, "tiny", tiny)
    script.write("tiny", tmp_path / "tiny.gguf", types)
    with LLM(tmp_path / "tiny.gguf", kv_memory="1MiB", num_threads=1, progress=lambda text: None) as llm:
        assert llm.loaded.metadata["general.file_type"] == file_type
        assert llm.generate("a b", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].text
