"""From figures back to causes: which KV type, block size, block counts or model would print these numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from kvledger.data import catalogue
from kvledger.errors import KvledgerError
from kvledger.plan.profiles.base import Allocation, parse_version
from kvledger.plan.profiles.vllm_groups import shard_spec
from kvledger.plan.verify.checks import PLENTY, allocate, setup_of
from kvledger.plan.verify.record import Record
from kvledger.plan.verify.residuals import Account
from kvledger.plan.verify.shapes import Shape
from kvledger.spec.kv import KVStorage
from kvledger.spec.model import ModelSpec

TYPES = ("fp32", "bf16", "fp8", "int8", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "nvfp4", "fp8_ds_mla")
CLOSE = 0.004


def bytes_per_token(model: ModelSpec, kv_dtype: str, tp: int) -> int:
    """The plain formula of one rank: every layer, every token."""
    storage = KVStorage.of(kv_dtype)
    return sum(shard_spec(x.cache, tp).tile_bytes(1, storage) for x in model.layers if x.cache is not None)


def kv_types(model: ModelSpec, tp: int, implied: float) -> list[str]:
    """KV types whose plain formula comes within 0.4 % of `implied` bytes per token and device."""
    return [t for t in TYPES if abs(bytes_per_token(model, t, tp) / implied - 1) < CLOSE]


def whole_blocks(tokens: int, length: int, per_request: int) -> int | None:
    """The pool's blocks if `tokens` = int(blocks ÷ per_request × length) for a whole number of them, else None.

    vLLM's figure since 0.21 inverted. With per_request far below length, few token counts pass by chance.
    """
    blocks = -(-tokens * per_request // length)
    return blocks if int(blocks / per_request * length) == tokens else None


def consistent_setups(record: Record, shape: Shape) -> Iterator[str]:
    """KV types and draft tokens under which the token figure is a whole number of blocks."""
    for kind, (layers, guessed) in product(("bf16", "fp8"), ((0, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5))):
        tried = replace(record, kv_dtype=kind, draft_layers=layers, draft_tokens=guessed)
        pool = allocate(tried, shape, setup_of(tried, shape, PLENTY)).pools[0]
        need = pool.blocks_for(record.max_model_len or 1)
        blocks = whole_blocks(record.kv_tokens or 0, record.max_model_len or 1, need)
        if blocks is None or (record.max_concurrency and abs(blocks / need - record.max_concurrency) > 0.0051):
            continue
        if record.kv_bytes and abs(blocks * pool.block_bytes / record.kv_bytes - 1) > CLOSE:
            continue
        size = max(g.block_size for g in pool.groups if g.kind != "state")
        draft = f", {guessed} draft tokens" if guessed else ""
        yield f"{blocks:,} blocks of {size} tokens at {need:,} a request: {kind}{draft}"


def models_by_bytes(implied: float, limit: int = 5) -> list[str]:
    """Models of the catalogue, with TP and KV type, that keep `implied` bytes per token and device."""
    found = []
    for row in catalogue.rows():
        try:
            model = catalogue.model(row.id)
        except KvledgerError:
            continue
        for tp in (1, 2, 4, 8):
            for kind in ("bf16", "fp8"):
                gap = abs(bytes_per_token(model, kind, tp) / implied - 1)
                if gap < CLOSE:
                    found.append((gap, f"{model.name} (TP {tp}, {kind})"))
    return [words for _, words in sorted(found)[:limit]]


def implications(
    record: Record, shape: Shape | None, ours: Allocation | None, books: Account | None = None
) -> Iterator[str]:
    """What the figures of `record` imply, each a sentence."""
    implied = _implied_bytes(record)
    model = None if shape is None or shape.is_sharded else shape.model
    if implied is not None:
        yield f"{implied:,.0f} B per token and device"
        yield from _shape_words(record, model, implied, books)
    if record.num_blocks and record.kv_tokens:
        yield f"{record.kv_tokens / record.num_blocks:g} tokens per block and group of the figure"
    if record.num_blocks and record.kv_bytes:
        yield f"{record.kv_bytes // record.num_blocks:,} B per block"
    derived = record.engine == "vllm" and (record.version is None or parse_version(record.version) >= (0, 21, 0))
    hybrid = ours is not None and any(g.kind == "state" for g in ours.pools[0].groups)
    if derived and hybrid and shape is not None and record.kv_tokens and record.max_model_len:
        for words in consistent_setups(record, shape):
            yield f"as concurrency × length: {words}"


def _shape_words(record: Record, model: ModelSpec | None, implied: float, books: Account | None) -> Iterator[str]:
    if model is None:
        near = models_by_bytes(implied)
        yield f"shapes that keep as much: {'; '.join(near)}" if near else "no model of the catalogue keeps as much"
        return
    factor = 1.0 if books is None else books.ours_bytes / books.stored_bytes
    types = kv_types(model, record.tp, implied / factor)
    if types:
        after = f", times the factors above ({factor:.4f})" if abs(factor - 1) > 1e-3 else ""
        yield f"KV type {' or '.join(types)}: the plain formula gives that{after}"
    else:
        yield "no KV type gives that by the plain formula: a shape, a draft layer or a rank must differ"


def _implied_bytes(record: Record) -> float | None:
    tokens = record.kv_tokens
    if not tokens:
        return None
    if record.kv_mib or record.key_mib:
        whole = record.kv_mib or (record.key_mib or 0) + (record.value_mib or 0)
        return whole * (1 << 20) / tokens
    return record.kv_bytes / tokens if record.kv_bytes and record.kv_bytes > 0 else None
