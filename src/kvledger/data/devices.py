"""The device catalogue: rows of devices.toml as `DeviceSpec`, and this machine as device `local`. Measures nothing."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvledger.data.host import cache_dir, host_memory
from kvledger.errors import ConfigError, DamagedFile, UnknownName
from kvledger.spec.device import DeviceSpec

LOCAL = "local"
ADVICE = "speeds of this machine are assumed; measure them once with `kvledger devices --measure`"


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("kvledger.data").joinpath("devices.toml").read_text(encoding="utf-8"))


@cache
def catalogue() -> dict[str, DeviceSpec]:
    """Every row of devices.toml by name, without `local`."""
    return {name: _from_row(name, row) for name, row in _tables().items() if name != LOCAL}


@cache
def _by_alias() -> dict[str, str]:
    return {alias: spec.name for spec in catalogue().values() for alias in (spec.name, *spec.aliases)}


def find_device(name: str) -> DeviceSpec:
    """The device called `name` (or one of its aliases; case and spaces do not matter). Raises UnknownName."""
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    if key == LOCAL:
        return local_device()
    found = _by_alias().get(key) or _by_alias().get(key.removeprefix("nvidia-").removeprefix("amd-"))
    if found is None:
        raise UnknownName("device", name, [LOCAL, *_by_alias()])
    return catalogue()[found]


def _from_row(name: str, row: dict[str, Any]) -> DeviceSpec:
    price = row.get("price")
    return DeviceSpec(
        name=name,
        kind=row["kind"],
        vendor=row["vendor"],
        sold_bytes=row["sold_bytes"],
        memory_bytes=row["memory_bytes"],
        bandwidth_bytes_per_s=float(row["bandwidth"]),
        peak_flops={kind: tera * 1e12 for kind, tera in row["peak_tflops"].items()},
        link_bytes_per_s=float(row.get("link", 0.0)),
        price_per_hour=None if price is None else float(price),
        source=row["source"],
        date=str(row["date"]),
        aliases=tuple(row.get("aliases", ())),
        notes=tuple(row.get("notes", ())),
        assumed=tuple(row.get("assumed", ())),
        price_source=row.get("price_source", ""),
    )


def local_path() -> Path:
    """Where the measurement of this machine is kept."""
    return cache_dir() / "local.toml"


def local_device() -> DeviceSpec:
    """This machine: memory as found now; speeds as measured once, else assumed and marked so."""
    path = local_path()
    if path.is_file():
        return _measured(path)
    row, cores = _tables()[LOCAL], usable_cores()
    total, _ = host_memory()
    return DeviceSpec(
        name=LOCAL,
        kind=row["kind"],
        vendor=row["vendor"],
        sold_bytes=total,
        memory_bytes=total,
        bandwidth_bytes_per_s=min(cores * row["bandwidth_per_core"], row["bandwidth_most"]),
        peak_flops={kind: cores * tera * 1e12 for kind, tera in row["peak_tflops_per_core"].items()},
        source=row["source"],
        date=str(row["date"]),
        notes=(ADVICE,),
        assumed=tuple(row["assumed"]),
    )


def _measured(path: Path) -> DeviceSpec:
    total, _ = host_memory()
    try:
        row = tomllib.loads(path.read_text(encoding="utf-8"))
        return DeviceSpec(
            name=LOCAL,
            kind="cpu",
            vendor="this machine",
            sold_bytes=total,
            memory_bytes=total,
            bandwidth_bytes_per_s=float(row["bandwidth"]),
            peak_flops={kind: float(value) for kind, value in row["peak_flops"].items()},
            source=f"measured on this machine with {row['threads']} threads",
            date=str(row["date"]),
            measured=True,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFile(f"{path} is not a measurement ({error!r}); run `kvledger devices --measure` again") from error


def save_local(bandwidth: dict[int, float], peak_flops: dict[str, float], threads: int, date: str) -> DeviceSpec:
    """Keep a measurement: bytes/s read by number of threads, operations/s by number type. Returns the new `local`.

    Raises ConfigError where a figure is not positive or nothing can be written.
    """
    if not bandwidth or not peak_flops or min([*bandwidth.values(), *peak_flops.values()]) <= 0:
        raise ConfigError(f"not a measurement: bandwidth {bandwidth}, peaks {peak_flops}")
    lines = [f'date = "{date}"', f"threads = {threads}", f"bandwidth = {max(bandwidth.values()):.6e}", "[peak_flops]"]
    lines += [f"{kind} = {value:.6e}" for kind, value in peak_flops.items()]
    lines += ["[bandwidth_by_threads]", *(f"{count} = {value:.6e}" for count, value in bandwidth.items())]
    path = local_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        said = f"{error.strerror}; KVLEDGER_CACHE names the folder that is used"
        raise ConfigError(f"the measurement cannot be kept in {path.parent}: {said}") from error
    return local_device()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
