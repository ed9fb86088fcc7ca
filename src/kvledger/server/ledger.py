"""`/ledger`: the live books as JSON. Bytes by owner, blocks by state, waste, and the plan beside what was built.

Every figure is counted from the engine at the moment of asking, in the engine's own thread.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvledger.engine import Engine
from kvledger.plan.pool import PoolPlan
from kvledger.sched.books import Books
from kvledger.sched.scheduler import Scheduler
from kvledger.units import cdiv

if TYPE_CHECKING:
    from kvledger.cache.disk import DiskTier

CONTEXTS = (1024, 2048, 4096, 8192)
MAX_CELLS = 2048  # of the block map; larger pools show several blocks in one cell


def live_books(model_name: str, weights_bytes: int, engine: Engine) -> dict[str, Any]:
    """The whole ledger. O(blocks)."""
    scheduler, executor = engine.scheduler, engine.executor
    books, plan = scheduler.books(), scheduler.plan
    planned = {"num_blocks": plan.num_blocks, "kv_bytes": plan.pool_bytes}
    built = {"num_blocks": executor.num_blocks, "kv_bytes": executor.kv_bytes}
    return {
        "model": model_name,
        "bytes": _bytes(books, weights_bytes, executor.kv_bytes),
        "blocks": _blocks(books, plan.layout.block_size),
        "waste": {"share": books.waste, "bytes": _waste_bytes(books)},
        "requests": {"running": len(scheduler.running), "waiting": len(scheduler.waiting)},
        "requests_at_context": {str(c): n for c, n in requests_at_contexts(plan, scheduler.max_model_len).items()},
        "prefix_cache": {"queries": scheduler.prefix.num_queried_tokens, "hits": scheduler.prefix.num_hit_tokens},
        "tiers": tiers(scheduler),
        "plan": {**planned, "budget_bytes": plan.budget_bytes, "reason": plan.reason},
        "built": {**built, "agrees": planned == built},
        "block_map": block_map(scheduler),
    }


def requests_at_contexts(pool: PoolPlan, max_model_len: int) -> dict[int, int]:
    """How many requests fit, by their tokens: no length that would be refused as longer than `max_model_len`."""
    served = [context for context in CONTEXTS if context <= max_model_len] or [max_model_len]
    return {context: pool.requests_at(context) for context in served}


def _bytes(books: Books, weights_bytes: int, kv_bytes: int) -> dict[str, int]:
    """Bytes by owner: the pool is split by state, the rest of the process is what remains of its resident memory."""
    size, resident = books.block_bytes, resident_bytes()
    return {
        "weights": weights_bytes,
        "kv_pool": kv_bytes,
        "kv_used": books.num_used * size,
        "kv_reserved": books.num_reserved * size,
        "kv_cached": books.num_idle * size,
        "kv_free": books.num_blank * size,
        "process_resident": resident,
    }


def _blocks(books: Books, block_size: int) -> dict[str, int]:
    return {
        "total": books.num_blocks,
        "used": books.num_used,
        "reserved": books.num_reserved,
        "cached": books.num_idle,
        "free": books.num_blank,
        "shared": books.num_shared,
        "block_size": block_size,
        "block_bytes": books.block_bytes,
    }


def tiers(scheduler: Scheduler) -> dict[str, Any]:
    """What lies beyond the pool: host memory for preempted sequences, prefix blocks on disk. null: no such tier."""
    found, size, disk = scheduler.tiers, scheduler.plan.layout.block_bytes, scheduler.tiers.disk
    slots, used = found.plan.num_host_slots, found.num_host_used
    host = {"blocks": slots, "used": used, "bytes": slots * size, "used_bytes": used * size}
    return {"host": host if slots else None, "disk": None if disk is None else _disk(disk)}


def _disk(disk: DiskTier) -> dict[str, Any]:
    size = disk.record_bytes
    counts = {"blocks": disk.num_records, "used": len(disk)}
    places = {"bytes": disk.num_records * size, "used_bytes": len(disk) * size, "path": str(disk.path)}
    return {**counts, **places, "failure": disk.failure or None}


def _waste_bytes(books: Books) -> int:
    """Bytes of held blocks that no token fills."""
    return round(books.waste * (books.num_used + books.num_reserved) * books.block_bytes)


def block_map(scheduler: Scheduler) -> dict[str, Any]:
    """The pool as a row of cells, each the liveliest state of its blocks: `s`hared, `u`sed, `c`ached, `.` free."""
    pool, num_blocks = scheduler.pool, scheduler.plan.num_blocks
    per_cell = cdiv(num_blocks, MAX_CELLS)
    ranks = bytearray(cdiv(num_blocks, per_cell))
    for block in range(num_blocks):
        refs = pool.refs(block)
        rank = 3 if refs > 1 else 2 if refs else int(pool.is_idle(block))
        cell = block // per_cell
        ranks[cell] = max(ranks[cell], rank)
    return {"blocks_per_cell": per_cell, "cells": "".join(".cus"[rank] for rank in ranks)}


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
