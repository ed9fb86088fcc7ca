"""This machine's memory: what it has, what is free (control groups included, read and never guessed), giving back what
was freed. And where things are kept on its disk.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _meminfo("MemAvailable") or total // 2
    for path in _CGROUP_LIMITS:
        limit = _read_int(path)
        if limit and limit < total:
            total, available = limit, min(available, limit)
    return total, available


def return_freed_memory() -> None:
    """What malloc keeps of memory that was freed goes back to the system, where the C library does that (glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _meminfo(field: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)


def _read_int(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0


def cache_dir() -> Path:
    """Where models and measurements are kept: $KVLEDGER_CACHE, or kvledger in the user's cache folder."""
    if given := os.environ.get("KVLEDGER_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvledger"
