"""Quantities as people type and read them."""

import pytest

from kvledger import units
from kvledger.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("512MiB", 2**29), ("2g", 2**31), ("1024", 1024),
        ("1.5 GiB", 3 * 2**29), (" 80 gb ", 80 * 10**9), ("0.5TB", 5 * 10**11),
    ],
)  # fmt: skip
def test_bytes_parse(text, num_bytes):
    assert units.parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 G B", "80gigs", "1e9", "nan", "8k8", "80GB!", "٣GB"])
def test_nonsense_bytes_do_not(text):
    with pytest.raises(ConfigError, match="80GB"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "count"), [("8k", 8192), ("32K", 32768), ("8192", 8192), ("1.5k", 1536), ("1M", 1 << 20)]
)
def test_counts_parse(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["8kb", "", "1.5", "-3", "many", "0x10"])
def test_nonsense_counts_do_not(text):
    with pytest.raises(ConfigError):
        units.parse_count(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("1s", 1.0), ("2min", 120.0), ("0.25", 0.25), ("10us", 1e-5)]
)
def test_seconds_parse(text, seconds):
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_count, units.parse_seconds])
def test_absurd_quantities_do_not(parse):
    with pytest.raises(ConfigError, match="larger than anything"):
        parse("9" * 400)


def test_printing():
    assert units.format_bytes(1.25 * 2**30) == "1.25 GiB"
    assert units.format_bytes(1000) == "1000 B"
    assert units.format_bytes(-(2**20)) == "-1.00 MiB"
    assert units.format_seconds(0.0209) == "20.9 ms"
    assert units.format_count(1_499_500) == "1,499,500"
    assert [units.format_tokens(n) for n in (400, 1024, 8000, 131072)] == [
        "400 tokens", "1K tokens", "8,000 tokens", "128K tokens"
    ]  # fmt: skip
    assert units.format_money(0.12345) == "$0.123"
    assert units.format_money(12) == "$12.00"


@pytest.mark.parametrize(("a", "b", "want"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (10**30 + 1, 10, 10**29 + 1)])
def test_whole_division_rounds_up(a, b, want):
    assert units.cdiv(a, b) == want
