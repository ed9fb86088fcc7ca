"""The default model: closeness to float32 arithmetic, and the exact text of ten greedy answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvledger.errors import FetchError
from kvledger.exec.cpu import CpuExecutor
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Chunk, Step
from kvledger.spec.config import ExecConfig
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.sampling import SamplingParams
from kvledger.weights.gguf import open_gguf
from kvledger.weights.store import resolve

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def gguf():
    try:
        return open_gguf(resolve("smollm2"))
    except FetchError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def computed(gguf):
    """Prompt → (reference arrays, our logits of all positions)."""
    spec = model_from_gguf(gguf.metadata, gguf.facts)
    layout = spec.kv_layout()
    executor = CpuExecutor(gguf, spec, layout, 8, ExecConfig(2))
    with np.load(GOLDEN / "reference_logits.npz") as file:
        arrays = dict(file)
    found = {}
    for name in sorted({key.split("/")[0] for key in arrays}):
        reference = {part: arrays[f"{name}/{part}"] for part in ("ids", "top_ids", "top_logits", "last")}
        ids = reference["ids"].tolist()
        params = SamplingParams(prompt_logprobs=0, max_tokens=1)
        seq = Sequence(0, name, ids, len(ids), params, len(ids) + 1, tables=(list(range(8)),))
        found[name] = reference, executor.logits(Step((Chunk(seq, 0, len(ids), True),)))
    executor.close()
    return found


def test_tokens_are_those_of_the_reference(gguf, computed):
    from kvledger.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(gguf.metadata)
    for reference, _ in computed.values():
        ids = reference["ids"].tolist()
        assert tokenizer.encode(tokenizer.decode(ids, skip_special=False)) == ids


def test_same_top_token_wherever_the_reference_is_clear(computed):
    """Clear: its first two logits differ by more than 0.5."""
    compared = 0
    for name, (reference, logits) in computed.items():
        clear = reference["top_logits"][:, 0] - reference["top_logits"][:, 1] > 0.5
        np.testing.assert_array_equal(logits.argmax(1)[clear], reference["top_ids"][clear, 0], err_msg=name)
        compared += clear.sum()
    assert compared > 250


def test_logits_correlate(computed):
    """Whole rows at the last position; the 32 largest everywhere."""
    whole = [np.corrcoef(logits[-1], ref["last"].astype(np.float32))[0, 1] for ref, logits in computed.values()]
    assert np.mean(whole) >= 0.999
    for reference, logits in computed.values():
        ours = np.take_along_axis(logits, reference["top_ids"], 1)
        assert np.corrcoef(ours.ravel(), reference["top_logits"].ravel())[0, 1] >= 0.999


def test_transcripts(gguf):
    """Greedy, exact text, all ten in one batch (scripts/make_transcripts.py)."""
    from kvledger.llm import LLM

    expected = json.loads((GOLDEN / "transcripts.json").read_text())
    with LLM(str(gguf.path), kv_memory="64MiB") as llm:
        assert [llm.tokenizer.encode(row["prompt"]) for row in expected] == [row["token_ids"] for row in expected]
        params = [SamplingParams(temperature=0.0, max_tokens=row["max_tokens"]) for row in expected]
        outputs = llm.generate([row["token_ids"] for row in expected], params)
    for row, output in zip(expected, outputs, strict=True):
        assert output.text == row["text"], row["name"]
        assert output.outputs[0].finish_reason == row["finish_reason"], row["name"]
    assert "Paris" in expected[0]["text"]
