"""Reading and printing quantities. Inside the package everything is in SI base units; only here are they dressed.

Bytes print in binary units (GiB = 2^30), because that is what allocators hand out; vendors' decimal GB are read, too.
"""

from __future__ import annotations

import re

from kvledger.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9
MOST = 1e18  # beyond it a float no longer holds every whole number, and nobody means it

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
    "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"{text!r} is not {what}; write for example {example}")
    value = float(match[1]) * units[match[2].lower()]
    if value > MOST:
        raise ConfigError(f"{text[:40]!r} is larger than anything meant here; write for example {example}")
    return value


def parse_bytes(text: str) -> int:
    """`80GB` (10^9), `80GiB` (2^30), `512MiB`, `2g` (binary) or a plain number of bytes → bytes.

    Raises ConfigError on anything else.
    """
    return int(_parse(text, _BYTE_UNITS, "a size in bytes", "80GB, 80GiB or 512MiB"))


def parse_count(text: str) -> int:
    """`8k`, `32K` (× 1024, as context lengths are meant) or a plain whole number → count. Raises ConfigError."""
    value = _parse(text, _COUNT_UNITS, "a whole number", "8192 or 8k")
    if value != int(value):
        raise ConfigError(f"{text!r} is not a whole number")
    return int(value)


def parse_seconds(text: str) -> float:
    """`50ms`, `1s`, `2min` or a plain number of seconds → seconds. Raises ConfigError."""
    return _parse(text, _SECOND_UNITS, "a time", "50ms or 1s")


def format_bytes(num_bytes: float) -> str:
    """`1.25 GiB`; exact below 1 KiB."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:,.2f} {name}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """`20.9 ms`, `1.10 µs`, `2.50 s`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"


def format_count(count: float) -> str:
    """`1,499,500` for whole numbers, three significant digits otherwise."""
    return f"{count:,.0f}" if count == int(count) else f"{count:,.3g}"


def format_tokens(count: int) -> str:
    """`8K tokens`, as context lengths are meant; `8,000 tokens` where that is no whole number of 1,024."""
    return f"{count // 1024}K tokens" if count >= 1024 and count % 1024 == 0 else f"{count:,} tokens"


def format_money(dollars: float) -> str:
    """`$0.123`: three significant digits below ten dollars, cents above."""
    return f"${dollars:,.2f}" if dollars >= 10 else f"${dollars:.3g}"


def cdiv(numerator: int, denominator: int) -> int:
    """Whole division rounded up; exact for integers of any size."""
    return -(-numerator // denominator)
