"""A step's chunks as the flat arrays that kernels read: rows, segments, block tables, units of attention.

A *segment* is a run of consecutive rows of one sequence; a *unit* is up to MAX_ROWS query rows of one segment. Where
old tokens are read quantised in groups, a unit keeps to one group's positions, so that its rows read the same ones.
Holds no tensors of the model and decides nothing about the result: how work is cut cannot change a bit of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvledger.kernels.attention_loops import MAX_ROWS, SPAN, SPLIT_ROWS
from kvledger.sched.sequence import Sequence
from kvledger.spec.kv import KVLayout
from kvledger.units import cdiv

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions [start, start + num_rows) of a sequence; `num_logits` of its last rows go through the output head."""

    seq: Sequence
    start: int
    num_rows: int
    num_logits: int


def cut(chunks: Items[Any], max_rows: int) -> list[list[Segment]]:
    """A step's chunks, in order, as batches of at most `max_rows` rows. A sequence's rows stay in order."""
    batches: list[list[Segment]] = [[]]
    room = max_rows
    for chunk in chunks:
        start, end = chunk.start, chunk.start + chunk.num_tokens
        wants_from = end - chunk.num_logits
        while start < end:
            if room == 0:
                batches.append([])
                room = max_rows
            take = min(room, end - start)
            logits = max(0, min(take, start + take - wants_from))
            batches[-1].append(Segment(chunk.seq, start, take, logits))
            start, room = start + take, room - take
    return batches


def read(segments: Items[Segment]) -> list[Segment]:
    """The rows of `segments` that go through the output head, as segments."""
    return [
        replace(s, start=s.start + s.num_rows - s.num_logits, num_rows=s.num_logits) for s in segments if s.num_logits
    ]


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays for one run of the program; int32 unless noted. Kernels hold their addresses while it runs."""

    num_rows: int
    tokens: Array
    positions: Array
    segment_of: Array
    tables: tuple[Array, ...]  # per group [segments, table_stride]
    table_stride: int
    segments: Array  # int64[segments, 4]
    units: Array  # int64[units, 6]
    merges: Array  # int64[merges, 5]
    num_partials: int
    logit_rows: Array


def make_batch(segments: Items[Segment], layout: KVLayout, ratio: int, kv_heads: int, num_threads: int) -> Batch:
    """Lay out `segments`. `ratio` is query heads per KV head."""
    span = layout.storage.span if layout.storage.residual else 0
    tokens: list[int] = []
    for s in segments:
        tokens += s.seq.token_ids[s.start : s.start + s.num_rows]
    counts = np.array([s.num_rows for s in segments])
    starts = np.array([s.start for s in segments])
    first = np.cumsum(counts) - counts
    segment_of = np.repeat(np.arange(len(segments), dtype=np.int32), counts)
    rows = np.arange(len(tokens), dtype=np.int32)
    table = np.zeros((len(segments), 4), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = first, counts, starts
    units, merges, num_partials = _units(segments, ratio, kv_heads, num_threads, span)
    stride = max(len(t) for s in segments for t in s.seq.tables)
    wants = np.array([s.num_logits for s in segments])
    return Batch(
        len(tokens), np.array(tokens, np.int32), (rows + (starts - first)[segment_of]).astype(np.int32), segment_of,
        tuple(_tables(segments, g, stride) for g in range(len(layout.groups))), stride, table, units, merges,
        num_partials,
        np.flatnonzero(rows - first[segment_of] >= (counts - wants)[segment_of]),
    )  # fmt: skip


def _tables(segments: Items[Segment], group: int, stride: int) -> Array:
    table = np.zeros((len(segments), stride), np.int32)
    for row, segment in zip(table, segments, strict=True):
        blocks = segment.seq.tables[group]
        row[: len(blocks)] = blocks
    return table


def _runs(segment: Segment, span: int) -> Iterator[tuple[int, int]]:
    """Rows (first, end) of a segment, cut at positions that are multiples of `span` (0: not at all)."""
    first = 0
    while first < segment.num_rows:
        room = span - (segment.start + first) % span if span else segment.num_rows
        end = min(first + room, segment.num_rows)
        yield first, end
        first = end


def _units(
    segments: Items[Segment], ratio: int, kv_heads: int, num_threads: int, span: int
) -> tuple[Array, Array, int]:
    """(units, merges, number of partial results). Spans of few, long, thin units are dealt out one by one."""
    units: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    whole = [
        (i, row0, min(MAX_ROWS, end * ratio - row0), cdiv(s.start + end, SPAN))
        for i, s in enumerate(segments)
        for first, end in _runs(s, span)
        for row0 in range(first * ratio, end * ratio, MAX_ROWS)
    ]
    are_few = len(whole) * kv_heads < 4 * num_threads and num_threads > 1
    partials = 0
    for segment, row0, rows, spans in whole:
        if are_few and rows <= SPLIT_ROWS and spans > 1:
            units += [(segment, row0, rows, s, 1, partials + s) for s in range(spans)]
            merges.append((segment, row0, rows, partials, spans))
            partials += spans
        else:
            last = cdiv(segments[segment].start + (row0 + rows - 1) // ratio + 1, SPAN)
            units.append((segment, row0, rows, 0, last, -1))
    return np.array(units, np.int64), np.array(merges, np.int64).reshape(-1, 5), partials
