"""Backwards: what, if it were so, would make a record's figures come out.

Each hypothesis changes one or two things that logs often leave unsaid (a draft layer, the KV type, the step's token
budget …); it counts only where every figure then agrees. What it finds is a reading, not a proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from kvledger.errors import KvledgerError
from kvledger.plan.verify.record import Record
from kvledger.plan.verify.shapes import Shape, without_indexer
from kvledger.spec.kv import FullKV, LatentKV, StateKV, WindowKV
from kvledger.spec.model import Layer
from kvledger.units import GIB

if TYPE_CHECKING:
    from kvledger.plan.verify.checks import Check

_BATCHES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BLOCKS = (16, 32, 64, 128, 256)
LARGEST_RANK_GAP = 0.25

Hypothesis = tuple[str, Record, Shape]


def hypotheses(record: Record, shape: Shape) -> Iterator[Hypothesis]:
    """Readings of `record`, the likeliest first."""
    yield from _types(record, shape)
    yield from _drafts(record, shape)
    yield from _batches(record, shape)
    yield from _caches(record, shape)
    pairs = product(tuple(_types(record, shape)), ("drafts", "batches"))
    for (words, changed, same), second in pairs:
        more = _drafts(changed, same) if second == "drafts" else _batches(changed, same)
        for other, again, form in more:
            yield f"{words}, and {other}", again, form


def _types(record: Record, shape: Shape) -> Iterator[Hypothesis]:
    latent = any(isinstance(x.cache, LatentKV) for x in shape.model.layers)
    words = {"auto": "the KV type is bf16", "fp8": "the KV type is fp8"}
    if latent:
        words["fp8_e5m2"] = "latents are plain fp8 rows, not packed with scales"
    for name, text in words.items():
        if name != record.kv_dtype:
            yield text, replace(record, kv_dtype=name), shape


def _drafts(record: Record, shape: Shape) -> Iterator[Hypothesis]:
    has_state = any(isinstance(x.cache, StateKV) for x in shape.model.layers)
    for layers in (1, 0):
        for tokens in range(6 if has_state else 1):
            if (layers, tokens) == (record.draft_layers, record.draft_tokens):
                continue
            what = "one draft layer (MTP or EAGLE) keeps KV of its own" if layers else "no draft layer keeps KV"
            guessed = f" and {tokens} guessed tokens keep states" if tokens else ""
            yield what + guessed, replace(record, draft_layers=layers, draft_tokens=tokens), shape


def _batches(record: Record, shape: Shape) -> Iterator[Hypothesis]:
    local = any(isinstance(x.cache, WindowKV) or (x.cache and x.cache.kind == "chunked") for x in shape.model.layers)
    if not local:
        return
    for tokens in _BATCHES:
        yield f"max_num_batched_tokens is {tokens}", replace(record, max_num_batched_tokens=tokens), shape
    for size, tokens in product(_BLOCKS, _BATCHES):
        words = f"the block size is {size} and max_num_batched_tokens {tokens}"
        yield words, replace(record, block_size=size, max_num_batched_tokens=tokens), shape


def _caches(record: Record, shape: Shape) -> Iterator[Hypothesis]:
    yield "windows are kept in full (hybrid manager off)", replace(record, hybrid=False), shape
    yield "no state is kept for prefix caching", replace(record, prefix_caching=False), shape
    if any(isinstance(x.cache, LatentKV) for x in shape.model.layers):
        yield "MLA is off: keys and values of every head are kept", record, expanded(shape)
        bare = replace(shape, model=without_indexer(shape.model))
        packed = replace(record, kv_dtype="fp8_ds_mla") if record.kv_dtype.startswith("fp8") else record
        yield "the log leaves out the keys of the sparse-attention indexer", packed, bare


def expanded(shape: Shape) -> Shape:
    """MLA as if it were multi-head attention: every head's key and value."""
    return replace(shape, model=replace(shape.model, layers=tuple(map(_expand, shape.model.layers))))


def _expand(layer: Layer) -> Layer:
    heads = _heads(layer)
    if not isinstance(layer.cache, LatentKV) or not heads:
        return layer
    return replace(layer, cache=FullKV(heads, layer.score_dims // heads, layer.mix_dims // heads))


def _heads(layer: Layer) -> int:
    """Query heads of an MLA layer: the absorbed scores run over latent and rope dimensions in each."""
    spec = layer.cache
    return layer.latent_score_dims // (spec.latent_dim + spec.rope_dim) if isinstance(spec, LatentKV) else 0


def explain(record: Record, shape: Shape, checks: list[Check]) -> list[Check]:
    """`checks`, with a cause and status `explained` where a reading makes every capacity figure agree."""
    wrong = [c for c in checks if c.status == "off" and c.name != "available_gib"]
    if not wrong:
        return checks
    cause = reading(record, shape) or rank_minimum(record, wrong) or unknown_drafter(record)
    if not cause:
        return checks
    return [replace(c, status="explained", cause=cause) if c in wrong else c for c in checks]


def reading(record: Record, shape: Shape) -> str:
    """The first hypothesis under which all capacity figures agree; nothing where none does."""
    from kvledger.plan.verify.checks import checks_of

    for words, changed, form in hypotheses(record, shape):
        try:
            found = [c for c in checks_of(changed, form) if c.name != "available_gib"]
        except KvledgerError:
            continue
        if found and all(c.status == "ok" for c in found):
            return f"agrees if {words}"
    return ""


def rank_minimum(record: Record, wrong: list[Check]) -> str:
    """The memory printed is one rank's, the blocks are those of the rank with least."""
    gaps = [c.difference for c in wrong if c.name in ("kv_tokens", "num_blocks") and c.difference is not None]
    if record.tp * record.pp < 2 or not gaps or record.kv_bytes is None:
        return ""
    if not 0 < max(gaps) <= LARGEST_RANK_GAP or min(gaps) <= 0:
        return ""
    least = record.kv_bytes / (1 + max(gaps)) / GIB
    return f"the printed {record.kv_bytes / GIB:.2f} GiB are one rank's; the rank with least has {least:.2f} GiB"


def unknown_drafter(record: Record) -> str:
    """A draft model beside the one named."""
    if "+" in record.model and "drafter" in record.model.lower():
        return "a draft model whose layers are not known shares the pool"
    return ""
