"""vLLM's rules against vLLM itself, on the catalogue's models.

`data/vllm_kv_blocks_more.jsonl` holds what the allocator of vLLM 0.32 answered when asked without weights or GPU, about
the layers that vLLM's own model code builds from each configuration (scripts/make_vllm_rows.py). Ours are worked out
from the same configurations by `spec/` and `plan/profiles/`, and must be equal, not close.
"""

import json
from pathlib import Path

import pytest

from kvledger.data.catalogue import model
from kvledger.plan.profiles.base import Setup
from kvledger.plan.profiles.vllm import VllmProfile
from kvledger.plan.verify.checks import check
from kvledger.plan.verify.record import from_row

ROWS = [json.loads(x) for x in (Path(__file__).parent / "data" / "vllm_kv_blocks_more.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}@{row['tp']}")
def test_row(row):
    verdict = check(from_row(row))
    assert [c.name for c in verdict.checks] == ["num_blocks", "kv_tokens", "max_concurrency", "groups"]
    assert [(c.name, c.expected, c.ours) for c in verdict.checks if c.status != "ok"] == []


def test_rows_cover_every_kind():
    """All of vLLM's kinds of caches, every TP up to 16, both KV types; many models of each."""
    assert len({row["model"] for row in ROWS}) == len(ROWS) >= 60
    kinds = {name for row in ROWS for name, _ in row["groups"]}
    assert kinds == {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec",
                     "MambaSpec"}  # fmt: skip
    assert {row["tp"] for row in ROWS} == {1, 2, 4, 8, 16}
    assert {row["kv_cache_dtype"] for row in ROWS} == {"bf16", "fp8"}


def test_float32_models_run_in_bf16():
    """`auto` is bf16 for a model published in float32, as `_resolve_auto_dtype` of vLLM has it."""
    setups = [Setup(available_bytes=10**10, kv_dtype=kv_dtype) for kv_dtype in ("auto", "bf16", "fp32")]
    auto, bf16, fp32 = (VllmProfile().allocate(model("gpt2-xl"), None, setup).num_blocks for setup in setups)
    assert auto == bf16 == 2 * fp32 + auto % 2


@pytest.mark.parametrize("change", [{"num_blocks": 1}, {"kv_tokens": 1}, {"max_concurrency": 0.0001}])
def test_smallest_difference_is_seen(change):
    """One block, one token or the last printed digit."""
    row = ROWS[0]
    ((name, delta),) = change.items()
    verdict = check(from_row({**row, name: row[name] + delta}))
    assert [c.name for c in verdict.checks if c.status == "off"] == [name]
