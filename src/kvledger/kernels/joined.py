"""Packed matrices of equal inputs as one, their outputs behind each other. Knows how tiles lie, and no kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvledger.kernels.packed import GROUP, TILE, PackedMatrix, aligned_zeros, group_bytes


def joined(parts: Iterator[PackedMatrix], rows: int) -> PackedMatrix:
    """`rows` outputs in all; every part but the last fills its tiles. Takes one part at a time: no two lie in memory.

    Scales are wide where those of any part are.
    """
    first = next(parts)
    if first.rows == rows:
        return first
    tiles = -(-rows // TILE)
    whole = replace(first, rows=rows, data=aligned_zeros(tiles * (len(first.data) // first.num_tiles)))
    whole.data[: len(first.data)] = first.data
    end = first.num_tiles
    for part in parts:
        assert end * TILE + part.rows <= rows, f"more than {rows} outputs, or a tile of {part.rows} not filled"
        if part.wide != whole.wide:
            whole, part = _widened(whole), _widened(part)
        start, end = end, end + part.num_tiles
        whole.data.reshape(tiles, -1)[start:end] = part.data.reshape(part.num_tiles, -1)
    return whole


def _widened(matrix: PackedMatrix) -> PackedMatrix:
    """With float32 scales and minima in place of float16."""
    if matrix.wide:
        return matrix
    size, weights = group_bytes(matrix.bits, True), TILE * GROUP * matrix.bits // 8
    narrow = matrix.data.reshape(-1, group_bytes(matrix.bits, False))
    data = aligned_zeros(len(narrow) * size)
    groups = data.reshape(-1, size)
    groups[:, :weights] = narrow[:, :weights]
    groups[:, weights:].view(np.float32)[:] = np.ascontiguousarray(narrow[:, weights:]).view(np.float16)
    return replace(matrix, wide=True, data=data)
