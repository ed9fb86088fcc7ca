"""A file mapped into memory, whose pages need not stay once they have been read. Knows no formats."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class MappedFile:
    """A file's bytes as `data`, read-only uint8[n]. Raises OSError, and ValueError for a file that is empty."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: Array = np.frombuffer(self._map, np.uint8)

    def release(self) -> None:
        """What has been read counts no longer as this process's memory; what is touched again is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
