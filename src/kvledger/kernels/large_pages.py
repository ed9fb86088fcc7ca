"""Memory in pages of 2 MiB for many arrays that stay: whoever reads them all looks up five hundred times fewer pages.

NumPy asks for such pages for every array of 4 MiB and more, malloc for none, so a model's many smaller matrices would
lie in pages of 4 KiB. Knows not what the arrays are.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
PAGE = 2 << 20
PIECE = 128 << 20  # bytes reserved at once; pages that are never written take no memory
OWN = 4 << 20  # arrays from here on have large pages of their own
_ALIGNMENT = 64


class LargePages:
    """Moves arrays into pieces of memory, one behind the other. A piece goes back when all arrays in it are gone."""

    def __init__(self) -> None:
        self._left: Array = np.empty(0, np.uint8)

    def move(self, array: Array) -> Array:
        """uint8[n] → the same bytes at a multiple of 64; `array` itself where that gains nothing or is refused."""
        if array.nbytes >= OWN:
            return array
        if array.nbytes > len(self._left):
            self._left = _piece()
        if array.nbytes > len(self._left):
            return array
        moved = self._left[: array.nbytes]
        self._left = self._left[array.nbytes + -array.nbytes % _ALIGNMENT :]
        moved[:] = array
        return moved


def _piece() -> Array:
    """uint8[PIECE] at a multiple of PAGE; empty where the system has no large pages on request."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(0, np.uint8)
    try:
        memory = mmap.mmap(-1, PIECE + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return np.empty(0, np.uint8)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + PIECE]
