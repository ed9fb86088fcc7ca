"""The device a record means: `2x RTX 3090`, `H100-80GB`, `RTX 4090 (25,250,627,584 B)`, `80GB (79.22 GiB)`.

A size in brackets replaces the catalogue's, because it is what that machine offered.
"""

from __future__ import annotations

import re
from dataclasses import replace

from kvledger.data.devices import find_device
from kvledger.errors import UnknownName
from kvledger.spec.device import DeviceSpec
from kvledger.units import GIB

_TIMES = re.compile(r"^\s*\d{1,5}\s*[x×]\s*")
_GIB = re.compile(r"\(([\d.]{1,8})\s*GiB\)")
_BYTES = re.compile(r"\(([\d,]{10,20})\s*B\)")


def device_of(text: str | None) -> DeviceSpec | None:
    """The device, or None where the words name none."""
    if not text:
        return None
    bare = _TIMES.sub("", text)
    size = _size(bare)
    name = bare.split("(")[0].strip()
    for candidate in _spellings(name):
        try:
            found = find_device(candidate)
        except UnknownName:
            continue
        return replace(found, memory_bytes=size, measured=True) if size else found
    return DeviceSpec("as-logged", "gpu", "", size, size, 1.0, {}, measured=True) if size else None


def _size(text: str) -> int | None:
    found = _GIB.search(text)
    if found:
        return int(float(found[1]) * GIB)
    found = _BYTES.search(text)
    return int(found[1].replace(",", "")) if found else None


def _spellings(name: str) -> list[str]:
    """The name, and the name without its memory size (`RTX PRO 6000 96GB`) or make."""
    words = name.split()
    shorter = [" ".join(words[:n]) for n in range(len(words), 0, -1)]
    return [*shorter, re.sub(r"[- ]\d+\s*GB.*$", "", name)]
