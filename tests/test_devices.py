"""The device catalogue: every row complete and plausible, names found, this machine kept apart as `local`."""

import pytest

from kvledger.data import devices
from kvledger.errors import ConfigError, DamagedFile, UnknownName

ROWS = list(devices.catalogue().values())
KINDS = {"gpu", "cpu", "tpu", "npu"}
TYPES = {"bf16", "fp16", "fp8", "int8", "fp4", "fp32"}


def test_at_least_thirty_six_rows():
    assert len(ROWS) >= 36


@pytest.mark.parametrize("spec", ROWS, ids=lambda s: s.name)
def test_row_is_complete_and_plausible(spec):
    assert spec.kind in KINDS
    assert spec.source
    assert spec.date[:2] == "20"
    assert 0.6 * spec.sold_bytes < spec.memory_bytes < 1.1 * spec.sold_bytes
    assert 5e10 < spec.bandwidth_bytes_per_s < 1e13
    assert set(spec.peak_flops) <= TYPES
    assert all(1e12 < peak < 3e16 for peak in spec.peak_flops.values())
    if "fp8" in spec.peak_flops and "bf16" in spec.peak_flops:
        assert spec.peak_flops["bf16"] <= spec.peak_flops["fp8"]
    if spec.price_per_hour is not None:
        assert "price_per_hour" in spec.assumed
        assert spec.price_source


def test_every_alias_leads_to_one_row():
    names = [n for s in ROWS for n in (s.name, *s.aliases)]
    assert len(names) == len(set(names))
    assert all(devices.find_device(n.upper()).name in {s.name for s in ROWS} for n in names)


def test_h100_is_what_its_driver_says():
    assert devices.find_device("H100").memory_bytes == 81_559 * 2**20
    assert devices.find_device("nvidia h100 sxm").name == "h100-sxm"
    assert round(devices.find_device("h100-sxm").ridge("bf16"), 1) == 295.3


def test_unknown_device_names_the_nearest():
    with pytest.raises(UnknownName) as error:
        devices.find_device("h1000")
    assert any("h100" in name for name in error.value.nearest)


def test_local_is_assumed_until_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    before = devices.find_device("local")
    assert not before.measured
    assert "peak_flops" in before.assumed
    assert "--measure" in before.notes[0]
    after = devices.save_local({1: 14e9, 2: 27e9}, {"fp32": 1e11, "int8": 9e11}, 2, "2026-11-29")
    assert after.measured
    assert not after.assumed
    assert after.bandwidth_bytes_per_s == 27e9
    assert devices.find_device("local") == after
    assert after.memory_bytes == before.memory_bytes


def test_damaged_or_impossible_measurement(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    devices.local_path().write_text("date = 3\n[peak_flops")
    with pytest.raises(DamagedFile, match="--measure"):
        devices.find_device("local")
    with pytest.raises(ConfigError):
        devices.save_local({1: 0.0}, {"fp32": 1.0}, 1, "2026-11-29")
