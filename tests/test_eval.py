"""Quality figures: against sums written out, on a tiny model through the whole command, and what users get wrong."""

import json
import math
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest

from conftest import byte_tokenizer
from kvledger.cli.main import main
from kvledger.errors import ConfigError, UnknownName
from kvledger.evaluate import quality
from kvledger.evaluate.contender import ROWS, Ours, force
from kvledger.evaluate.divergence import Reference, Tally, log_softmax
from kvledger.evaluate.peer import LlamaCpp
from kvledger.evaluate.quality import Asked, compare, evaluate
from kvledger.evaluate.retrieval import DEPTHS, FACTS, make_needle
from kvledger.evaluate.text import read_text, windows
from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("eval") / "tiny.gguf")


class Given:
    """A contender whose rows are written down."""

    kv_bytes_per_token, notes = 1.0, ()

    def __init__(self, name, rows, block=3):
        self.name, self.rows, self.block = name, np.asarray(rows, np.float32), block

    def logits(self, token_ids):
        for first in range(0, len(token_ids), self.block):
            yield self.rows[first : min(first + self.block, len(token_ids))]

    def close(self): ...


def test_divergence_is_the_sum_over_the_vocabulary():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    tally = Tally()
    tally.add(Reference(log_softmax(np.log(np.float32([p, p]))), np.array([0, 1])), np.log(np.float32([p, q])))
    found = tally.result("x", None)
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert found.kl_max == pytest.approx(kl, rel=1e-6)
    assert found.kl_mean == pytest.approx(kl / 2, rel=1e-6)
    assert found.top1_agreement == 0.5
    assert found.perplexity == pytest.approx(math.exp(-(math.log(0.5) + math.log(0.5)) / 2), rel=1e-6)
    assert found.perplexity_change == pytest.approx(2**-0.5 - 1, rel=1e-6)  # 0.25 became 0.5 at one of two


def test_kl_is_not_lost_in_rounding():
    rows = np.random.default_rng(0).normal(0, 4, (8, 50_000)).astype(np.float32)
    nudged = rows.copy()
    nudged[:, 7] += 1e-3
    tally = Tally()
    tally.add(Reference(log_softmax(rows), np.zeros(8, np.int64)), nudged)
    p = np.exp(log_softmax(rows)[:, 7])
    expected = np.log1p(p * np.expm1(1e-3)) - p * 1e-3  # log of the new total, less what the nudged one gains
    assert tally.result("x", None).kl_max == pytest.approx(expected.max(), rel=1e-3)


def test_targets_are_the_following_tokens_across_blocks_and_windows():
    """A contender that is sure of the right token everywhere has perplexity 1."""
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5]]
    sure = {len(t): [[30.0 * (token == v) for v in range(10)] for token in t[1:]] for t in texts}

    class Sure(Given):
        def logits(self, token_ids):
            self.rows = np.asarray(sure[len(token_ids) + 1], np.float32)
            return super().logits(token_ids)

    found = compare([Sure("sure", [])], texts)[0]
    assert found.num_positions == 9
    assert found.perplexity == pytest.approx(1.0, abs=1e-6)
    assert found.top1_agreement == 1.0


def test_the_engine_scores_as_it_does_for_prompt_logprobs(model):
    """The logits that are compared are those that the engine's own prompt logprobs come from."""
    from kvledger.spec.sampling import SamplingParams

    ours = Ours("x", str(model), "int8", "auto", 200, 1)
    ids = [Random(1).randrange(256) for _ in range(ROWS + 9)]
    rows = np.concatenate(list(ours.logits(ids)))
    (output,) = ours.llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    ours.close()
    said = [sample.logprob for sample in output.prompt_logprobs[1:]]
    assert log_softmax(rows)[np.arange(len(ids) - 1), ids[1:]] == pytest.approx(said, abs=1e-5)


def test_forced_answers_are_scored_as_greedy_decoding_would(model):
    """What greedy decoding writes has rank 1 throughout; one token changed has not, and what follows is conditioned."""
    from kvledger.spec.sampling import SamplingParams

    ours, prompt = Ours("x", str(model), "bf16", "auto", 200, 1), [Random(2).randrange(256) for _ in range(90)]
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    (output,) = ours.llm.generate(prompt, greedy)
    chosen = output.outputs[0]
    forced = force(ours.llm.engine, prompt, chosen.token_ids)
    assert [s.rank for s in forced] == [1] * 5
    assert [s.logprob for s in forced] == [s.logprob for s in chosen.logprobs]
    other = [chosen.token_ids[0], (chosen.token_ids[1] + 1) % 256, *chosen.token_ids[2:]]
    changed = force(ours.llm.engine, prompt, other)
    ours.close()
    assert changed[0] == forced[0]
    assert changed[1].rank > 1
    assert changed[2].logprob != forced[2].logprob


def test_the_command_as_json(model, capsys):
    with pytest.raises(SystemExit) as end:
        main(["eval", str(model), "--tokens", "150", "--window", "100", "--retrieval", "200", "--json",
              "--kv-dtype", "fp32,int8,fp8", "--activations", "fp32,int8", "--threads", "1"])  # fmt: skip
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    kv, arithmetic = ({row["name"]: row for row in study["rows"]} for study in found["studies"])
    assert found["num_tokens"] == 150
    assert all(row["num_positions"] == 148 for row in (*kv.values(), *arithmetic.values()))
    assert list(kv) == ["bf16", "fp32", "int8", "fp8"]
    assert kv["bf16"]["kl_max"] == 0.0
    assert kv["bf16"]["top1_agreement"] == 1.0
    assert 0 < kv["int8"]["kl_mean"] < kv["fp8"]["kl_mean"]
    assert kv["fp32"]["kv_bytes_per_token"] == 2 * kv["bf16"]["kv_bytes_per_token"]
    assert 0 < arithmetic["fp32, bf16 KV"]["kl_mean"] < arithmetic["int8, bf16 KV"]["kl_mean"]
    assert {item["context"] for item in found["retrieval"]} == {200}
    assert len(found["retrieval"]) == len(kv) * len(DEPTHS)


def test_the_command_as_tables(model, capsys):
    with pytest.raises(SystemExit):
        main(["eval", str(model), "--tokens", "60", "--activations", "", "--kv-dtype", "int8", "--retrieval", "150"])
    lines = capsys.readouterr().out.splitlines()
    assert "60 tokens" in lines[0]
    assert any(line.split()[:1] == ["int8"] and line.endswith("%") for line in lines)
    assert any("90%" in line for line in lines)


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_needle_stands_between_paragraphs_near_its_depth(depth):
    tokenizer = byte_tokenizer()
    filler = tokenizer.encode("Some words of a paragraph.\n\n" * 100)
    needle = make_needle(tokenizer, filler, 1000, depth, FACTS[0], Random(0))
    text = tokenizer.decode(needle.prompt)
    number = tokenizer.decode(needle.answer)
    assert len(needle.prompt) + len(needle.answer) == 1000
    assert text.count(number) == 1
    assert text.endswith(f"\n\n{FACTS[0]}")
    at = text.index(f"{FACTS[0]}{number}.\n\n")
    assert text[at - 2 : at] == "\n\n"
    assert abs(at / len(text) - depth) < 0.1


def test_windows_hold_all_tokens_and_begin_as_the_model_wants():
    assert windows([1, 2, 3, 4, 5], [], 2) == [[1, 2], [3, 4]]  # 5 alone predicts nothing
    assert windows([1, 2, 3, 4, 5], [9], 3) == [[9, 1, 2], [9, 3, 4], [9, 5]]


def test_the_bundled_text_is_long_enough():
    assert len(read_text(None, 1).split()) > 8192  # a word is at least a token


def test_only_the_beginning_of_a_large_file_is_read(tmp_path):
    path = tmp_path / "large.txt"
    path.write_bytes(b"x" + "é".encode() * 1_000_000)  # the cut falls inside a character
    assert 30_000 < len(read_text(path, 100)) < 40_000


def test_what_users_get_wrong(model, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match="byte 3 is 0xff"):
        read_text(binary, 10)
    with pytest.raises(ConfigError, match="No such file"):
        read_text(tmp_path / "absent", 10)
    with pytest.raises(ConfigError, match="num_tokens must be at least 2"):
        Asked(num_tokens=1)
    with pytest.raises(ConfigError, match="a context of 10 tokens hides nothing"):
        make_needle(byte_tokenizer(), [65] * 20, 10, 0.5, FACTS[0], Random(0))
    (tmp_path / "empty").write_text("")
    with pytest.raises(UnknownName, match="int9"):
        Asked(kv_dtypes=("bf16", "int9"))
    with pytest.raises(ConfigError, match="has 0 tokens"):
        evaluate(Asked(str(model), tmp_path / "empty"))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_dtypes": ("bf16", "q4_0")}, "bf16, int8, fp8, int4, fp32 are"),
        ({"activations": ("int9",)}, "activations are auto"),
        ({"threads": -1}, "num_threads"),
        ({"window": 4}, "window must be at least 8, got 4"),
        ({"kv_dtypes": (), "activations": ()}, "nothing to compare"),
        ({"kv_activations": ()}, "none is named; int8x2 is usual"),
        ({"kv_dtypes": (), "contexts": (200,)}, "none is named; bf16 is usual"),
    ],
)
def test_what_no_model_could_answer_is_refused_at_once(asked, said):
    with pytest.raises(ConfigError, match=said):
        Asked(**asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"window": 513}, "a window of 513 tokens is beyond .*, whose context is 512"),
        ({"contexts": (200, 600)}, "a context of 600 tokens to hide a fact in is more than .* has: 511"),
        ({"contexts": (200, -4)}, "a context of -4 tokens hides nothing: fact and question take"),
        ({"contexts": (20,)}, "a context of 20 tokens hides nothing"),
        ({"peer_python": Path("absent")}, "--peer-python absent cannot be run"),
        ({"peer_python": Path("/bin/false")}, "--peer-python /bin/false cannot load .*: it ended without a word"),
        ({"peer_python": Path(sys.executable)}, "cannot load llama-cpp-python: .*No module named 'llama_cpp'"),
    ],
)
def test_what_this_model_cannot_answer_is_refused_before_weights_are_read(model, monkeypatch, asked, said):
    monkeypatch.setattr(quality, "Ours", lambda *args: pytest.fail("weights were read"))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match=said):
        evaluate(Asked(str(model), **asked))


def test_types_that_are_not_computed_for_a_model_are_left_out_unless_asked_for(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf", head_dim=16)
    with pytest.raises(ConfigError, match="int4 KV needs a multiple of 32 channels"):
        evaluate(Asked(str(path), kv_dtypes=("int4",)))
    found = evaluate(Asked(str(path), activations=(), num_tokens=40, contexts=()))
    assert [row.name for row in found.studies[0].rows] == ["bf16", "fp32", "int8", "fp8"]


def test_a_peer_that_cannot_run_says_why(tmp_path, model):
    with pytest.raises(ConfigError, match="cannot be run"):
        LlamaCpp(tmp_path / "no-python", model, 100, 1, 320)
    stranger = tmp_path / "python"
    stranger.write_text("#!/bin/sh\necho 'No module named llama_cpp' >&2; exit 1\n")
    stranger.chmod(0o755)
    with pytest.raises(ConfigError, match="No module named llama_cpp"):
        LlamaCpp(stranger, model, 100, 1, 320)


def test_a_peer_answers_through_the_pipe(tmp_path):
    """A script in llama.cpp's place: logits of token t are t in every column; then it dies."""
    peer = tmp_path / "python"
    peer.write_text(f"""#!{sys.executable}
import json, sys
import numpy as np
sys.stdout.write(json.dumps(dict(vocab_size=5, version="0")) + "\\n"); sys.stdout.flush()
ids = json.loads(sys.stdin.readline())
sys.stdout.buffer.write(np.repeat(np.float32(ids)[:, None], 5, 1).tobytes()); sys.stdout.flush()
sys.exit("enough")
""")
    peer.chmod(0o755)
    with pytest.raises(ConfigError, match="5 tokens in its vocabulary, the model 6"):
        LlamaCpp(peer, tmp_path, 100, 1, 6)
    llama = LlamaCpp(peer, tmp_path, 100, 1, 5)
    blocks = list(llama.logits(range(ROWS + 3)))
    assert [len(block) for block in blocks] == [ROWS, 3]
    assert np.concatenate(blocks)[:, 4].tolist() == list(range(ROWS + 3))
    with pytest.raises((ConfigError, BrokenPipeError)):
        list(llama.logits([1]))
    llama.close()
