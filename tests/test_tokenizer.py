"""Token for token what llama.cpp and sentencepiece say (fixtures: scripts/make_tokens.py)."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from kvledger.errors import BadRequest, DamagedFile, FetchError, UnsupportedModel
from kvledger.text.pieces import byte_alphabet
from kvledger.text.pretokenizers import PRE_TOKENIZERS
from kvledger.text.tokenizer import Tokenizer
from kvledger.weights.gguf import read_header
from kvledger.weights.store import resolve

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokens.json").read_text())
TEXTS = GOLDEN["texts"]
PIECES = GOLDEN["sentencepiece"]


@pytest.fixture(scope="module")
def metadata():
    try:
        return read_header(resolve("smollm2")).metadata
    except FetchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm(metadata):
    return Tokenizer.from_metadata(metadata)


def sentencepiece_metadata(**more):
    keys = {key: PIECES[key] for key in ("tokens", "scores", "token_type")}
    return {f"tokenizer.ggml.{k}": v for k, v in {"model": "llama", "bos_token_id": 1, **keys, **more}.items()}


@pytest.fixture(scope="module")
def spaced():
    return Tokenizer.from_metadata(sentencepiece_metadata())


@pytest.mark.parametrize("pre", GOLDEN["byte_level"]["by_pre"])
def test_byte_level_as_llama_cpp(metadata, pre):
    tokenizer = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.pre": pre})
    for text, expected in zip(TEXTS, GOLDEN["byte_level"]["by_pre"][pre], strict=True):
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected, skip_special=False) == text


def test_the_fixture_tells_pre_tokenizers_apart():
    """Rules that differ give different tokens on some text, so a mistaken table would be seen."""
    rows = GOLDEN["byte_level"]["by_pre"]
    assert len({json.dumps(rows[name]) for name in rows}) >= 9
    assert {PRE_TOKENIZERS[name] for name in rows} == set(PRE_TOKENIZERS.values())


def test_without_special_tokens_as_llama_cpp(smollm):
    for text, expected in zip(TEXTS, GOLDEN["byte_level"]["without_special"], strict=True):
        assert smollm.encode(text, parse_special=False) == expected, text


@pytest.mark.parametrize(("add_space", "column"), [(True, "with_space"), (False, "without_space")])
def test_sentencepiece_as_llama_cpp(add_space, column):
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(add_space_prefix=add_space))
    for text, expected in zip(TEXTS, PIECES[column], strict=True):
        assert tokenizer.encode(text) == expected, text


def test_sentencepiece_as_itself(spaced):
    for text, expected in zip(TEXTS, PIECES["sentencepiece"], strict=True):
        assert spaced.encode(text, parse_special=False) == expected, text
        assert spaced.decode(expected) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_survives(spaced, text):
    ids = spaced.encode(text, parse_special=False)
    assert spaced.decode(ids) == text
    assert b"".join(spaced.token_bytes(i) for i in ids).decode() == (" " + text if text else "")


def test_default_model(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.bos_token_id == 1
    assert smollm.eos_token_ids == (2, 0)  # <|im_end|> by the file, <|endoftext|> by its name
    assert smollm.is_special(2)
    assert not smollm.is_special(100)
    assert smollm.decode([1, *smollm.encode("Hi"), 2]) == "Hi"
    assert smollm.decode([2], skip_special=False) == "<|im_end|>"
    assert smollm.token_bytes(10**6) == b""


def test_begin_of_text_only_where_the_file_says(metadata, smollm, spaced):
    assert smollm.encode("Hi", add_special=True) == smollm.encode("Hi")  # add_bos_token is false in this file
    with_bos = Tokenizer.from_metadata({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode("Hi", add_special=True) == [1, *smollm.encode("Hi")]
    assert spaced.encode("Hi", add_special=True)[0] == 1
    with_eos = Tokenizer.from_metadata(sentencepiece_metadata(add_eos_token=True, eos_token_id=2))
    assert with_eos.encode("Hi", add_special=True)[-1] == 2


def test_ends_by_name():
    names = ["a", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"]
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": []}
    harmony = Tokenizer.from_metadata({**base, "tokenizer.ggml.tokens": names})
    assert harmony.eos_token_ids == (2, 3, 4)  # <|end|> ends a message, not the answer
    assert Tokenizer.from_metadata({**base, "tokenizer.ggml.tokens": names[:2]}).eos_token_ids == (1,)
    assert harmony.is_special(4), "a token that ends a generation is never shown"


def test_lone_surrogate_is_the_requests_fault(smollm):
    with pytest.raises(BadRequest, match="not valid Unicode"):
        smollm.encode("a\ud800b")


@pytest.mark.parametrize(
    "text", [" " * 300_000, "a" * 300_000, "!" * 300_000, "1" * 300_000, "\n" * 300_000, "ab " * 99999]
)
def test_long_texts_take_time_in_proportion(smollm, text):
    start = time.perf_counter()
    assert smollm.decode(smollm.encode(text)) == text
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"pre": "smolm"}, UnsupportedModel, "unknown pre-tokenizer 'smolm'; nearest: smollm"),
        ({"pre": None}, UnsupportedModel, "'tokenizer.ggml.pre' is missing"),
        ({"model": "t5"}, UnsupportedModel, "'t5' is not supported; supported: gpt2, llama"),
        ({"model": None}, DamagedFile, "the model has no tokenizer"),
        ({"merges": None}, DamagedFile, "merges' is missing"),
        ({"merges": ["a b"]}, DamagedFile, "contradict"),
        ({"tokens": []}, DamagedFile, "tokens' is missing"),
        ({"tokens": [1, 2]}, DamagedFile, "not a list of str"),
        ({"token_type": [1]}, DamagedFile, "1 entries for 2 tokens"),
    ],
)
def test_errors(change, error, match):
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "c"], "merges": [], **change}
    with pytest.raises(error, match=match):
        Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None})


# ---------------------------------------------------------------------------------------------- tokenizer.json


@pytest.fixture
def tokenizer_json():
    """A byte-level tokenizer with two special tokens."""
    letters = {chr(point): i for i, point in enumerate(sorted(byte_alphabet()))}
    made = HubTokenizer(models.BPE(vocab=letters | {"ab": 256}, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<s>"])
    return made.to_str()


def test_tokenizer_json(tokenizer_json):
    keys = {"tokenizer.huggingface.json": tokenizer_json, "tokenizer.ggml.bos_token_id": 258}
    tokenizer = Tokenizer.from_metadata(keys)
    ids = tokenizer.encode("ab é<|endoftext|>")
    assert ids[0] == 256
    assert ids[-1] == 257
    assert tokenizer.decode(ids, skip_special=False) == "ab é<|endoftext|>"
    assert tokenizer.decode(ids) == "ab é"
    assert 257 not in tokenizer.encode("<|endoftext|>", parse_special=False)
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.bos_token_id == 258
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "WordPiece"}}'])
def test_damaged_tokenizer_json(text):
    with pytest.raises((DamagedFile, UnsupportedModel), match=r"tokenizer\.json"):
        Tokenizer.from_metadata({"tokenizer.huggingface.json": text})


def test_tokenizer_json_of_a_sentencepiece_model(spaced):
    """As transformers writes Llama 2's: the space in front by the normaliser, taken away by the decoder."""
    from tokenizers import AddedToken, normalizers, processors

    from kvledger.text.gguf_tokenizer import merges_by_score

    ids = {name: i for i, name in enumerate(PIECES["tokens"])}
    normal = [i for i, kind in enumerate(PIECES["token_type"]) if kind == 1]
    merges = merges_by_score(PIECES["tokens"], PIECES["scores"], normal)
    made = HubTokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    made.add_tokens([AddedToken("<|user|>", normalized=False, special=False)])
    keys = {"tokenizer.huggingface.json": made.to_str(), "tokenizer.ggml.bos_token_id": 1}
    tokenizer = Tokenizer.from_metadata({**keys, "tokenizer.ggml.eos_token_id": [2]})
    for text in TEXTS:
        assert tokenizer.encode(text) == spaced.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == made.decode(made.encode(text).ids), text
    assert tokenizer.encode("Hi", add_special=True)[0] == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.pieces == spaced.pieces
