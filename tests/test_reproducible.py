"""The same request gives the same logits, bit for bit, whatever stands beside it and however it is cut."""

import numpy as np
import pytest

from golden_models import described, write_folder
from kvledger.sched.step import Chunk, Step
from kvledger.weights.open import open_weights
from test_cpu_executor import decoder, executor, sequence, tokens

CASES = {  # what is other than Llama's, or the name of a model with fixtures; KV type; activations
    "llama": ({}, "bf16", "auto"),
    "int8": ({}, "bf16", "int8"),
    "two terms": ({}, "bf16", "int8x2"),
    "int8 cache": ({}, "int8", "auto"),
    "fp8 cache": ({}, "fp8", "auto"),
    "int4 cache": ({}, "int4", "auto"),
    "int4 windows": ({"attention__sliding_window": 200}, "int4", "auto"),
    "int4 narrow windows": ({"attention__sliding_window": 48}, "int4", "auto"),
    "windows": ({"attention__sliding_window": 48}, "bf16", "auto"),
    "float32": ({}, "fp32", "fp32"),
    "latents": ("deepseek2", "bf16", "auto"),
    "int8 latents": ("deepseek2", "int8", "auto"),
    "fp8 latents": ("deepseek2", "fp8", "auto"),
}
LENGTH = 600  # three spans of attention


def weights_of(changes, folder):
    if not isinstance(changes, str):
        return decoder(dim=32, hidden=128, **changes)
    row = described()[changes]
    longer = row | {"config": row["config"] | {"max_position_embeddings": 1024}}
    return open_weights(write_folder(folder, longer), "Q8_0")


def run_in(ex, ids, sizes, others=(), asked=0):
    """Logits of all positions (`asked` None: of the last); chunks of `sizes` in turn, and `others` beside the first."""
    where = {"block": ex.layout.block_size, "groups": len(ex.layout.groups)}
    seq, rows, at = sequence(ids, prompt_logprobs=asked, **where), [], 0
    beside = [Chunk(sequence(o, 100 + 10 * i, i + 1, **where), 0, len(o), False) for i, o in enumerate(others)]
    while at < len(ids):
        n = min(sizes[len(rows) % len(sizes)], len(ids) - at)
        chunk = Chunk(seq, at, n, at + n == len(ids))
        rows.append(ex.logits(Step((*beside[:2], chunk, *beside[2:]))))
        at, beside = at + n, []
    return np.concatenate(rows)


@pytest.mark.parametrize("case", CASES)
def test_chunks_batch_and_threads_change_nothing(case, tmp_path):
    changes, kv, activations = CASES[case]
    weights = weights_of(changes, tmp_path)
    ids, others = tokens(LENGTH), [tokens(n) for n in (3, 40, 17, 64, 1)]
    how = {"kv": kv, "activations": activations, "num_blocks": 200, "block": 32 if kv == "int4" else 16}
    ex = executor(weights, **how)
    whole = run_in(ex, ids, [LENGTH])
    assert np.isfinite(whole).all()
    for sizes in ([7], [512], [1, 30, 2, 200]):
        assert np.array_equal(run_in(ex, ids, sizes), whole), sizes
    assert np.array_equal(run_in(ex, ids, [LENGTH], others), whole)
    assert np.array_equal(run_in(ex, ids, [33, 400], others), whole)
    assert np.array_equal(run_in(ex, ids[:70], [1]), whole[:70])
    for sizes in ([LENGTH], [LENGTH - 20, 20], [LENGTH - 1, 1]):  # the last layer of one row, not of all
        assert np.array_equal(run_in(ex, ids, sizes, others, asked=None), whole[-1:]), sizes
    ex.close()
    ex = executor(weights, **how, threads=1)
    assert np.array_equal(run_in(ex, ids, [100]), whole)
    ex.close()


def test_decoding_sixty_four_at_once_and_long_contexts():
    """One row per sequence: the widest batch, and spans dealt out to threads for the narrowest."""
    ex = executor(decoder(), num_blocks=400)
    prompts = [tokens(20) for _ in range(63)] + [tokens(700)]
    where = [6 * i for i in range(64)]
    seqs = [sequence(ids, at, i, room=8) for i, (ids, at) in enumerate(zip(prompts, where, strict=True))]
    seqs[63].tables = (list(range(340, 390)),)
    for s in seqs[:63]:
        s.tables = (s.tables[0][:5],)
    for i, s in enumerate(seqs[:56] + seqs[63:]):
        s.tables = (s.tables[0] if i == 56 else [6 * i, 6 * i + 1],)
    chosen = seqs[:56] + seqs[63:]
    for s in chosen:
        ex.run(Step((Chunk(s, 0, len(s.token_ids), False),)))
        s.token_ids.append(9)
    chunks = [Chunk(s, len(s.token_ids) - 1, 1, True) for s in chosen]
    together = ex.logits(Step(tuple(chunks)))
    for i in (0, 1, 30, 56):
        assert np.array_equal(ex.logits(Step((chunks[i],)))[0], together[i])
    ex.close()
