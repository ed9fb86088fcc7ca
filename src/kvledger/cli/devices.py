"""`kvledger devices`: the catalogue as a table, one device in full, or a measurement of this machine."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from kvledger.cli.output import emit_json, say
from kvledger.cli.tables import console, rich_table
from kvledger.data.devices import ADVICE, catalogue, find_device, local_device, save_local
from kvledger.plan.explain import dress
from kvledger.plan.ledger import Table
from kvledger.spec.device import DeviceSpec

app = typer.Typer(add_completion=False)


@app.command()
def devices(
    name: str = typer.Argument(None, help="One device in full; all of them where absent."),
    measure: bool = typer.Option(False, "--measure", help="Measure this machine and keep it as device `local`."),
    kind: str = typer.Option(None, help="Only gpu, cpu, tpu or npu."),
    as_json: bool = typer.Option(False, "--json", help="Rows as JSON."),
) -> None:
    """List known devices, or measure this one."""
    if measure:
        _measure()
        name = "local"
    rows = [find_device(name)] if name else [local_device(), *catalogue().values()]
    rows = [r for r in rows if kind is None or r.kind == kind]
    if as_json:
        emit_json([device_json(r) for r in rows])
    elif name:
        _show_one(rows[0])
    else:
        console().print(rich_table(device_table(rows)))
        console().print("~ assumed: no vendor or driver states it; prices are typical, --price gives your own")


def _measure() -> None:
    """Keep what `measure_ceilings` finds: threads, bytes/s read by threads, operations/s by number type."""
    say("measuring this machine: some seconds, best with nothing else running")
    from kvledger.kernels.ceilings import measure_ceilings  # type: ignore[import-not-found,unused-ignore]

    found = measure_ceilings()
    save_local(
        {int(k): float(v) for k, v in found["read_bytes_per_s"].items()},
        {k: float(v) for k, v in found["peak_ops_per_s"].items() if v},
        int(found["threads"]),
        datetime.now(tz=UTC).date().isoformat(),
    )


def device_table(rows: list[DeviceSpec]) -> Table:
    """One line per device."""
    types = ("bf16", "fp16", "fp8", "int8", "fp4", "fp32")
    columns = ("device", "memory", "bandwidth", *types, "link", "$/h", "known as")
    return Table("devices: usable memory, dense peaks in TFLOP/s", columns, tuple(_line(r, types) for r in rows))


def _line(row: DeviceSpec, types: tuple[str, ...]) -> tuple[str, ...]:
    def mark(text: str, *fields: str) -> str:
        return text + "~" if text and any(f in row.assumed for f in fields) else text

    peaks = [mark(f"{row.peak_flops[t] / 1e12:,.4g}" if t in row.peak_flops else "", "peak_flops") for t in types]
    return (
        row.name,
        mark(dress(row.memory_bytes, "B"), "memory_bytes"),
        mark(dress(row.bandwidth_bytes_per_s, "B/s"), "bandwidth_bytes_per_s"),
        *peaks,
        dress(row.link_bytes_per_s, "B/s") if row.link_bytes_per_s else "",
        mark("" if row.price_per_hour is None else f"{row.price_per_hour:.2f}", "price_per_hour"),
        ", ".join(row.aliases[:2]),
    )


def _show_one(row: DeviceSpec) -> None:
    out = console()
    dressed = {
        "sold_bytes": dress(row.sold_bytes, "B"),
        "memory_bytes": dress(row.memory_bytes, "B"),
        "bandwidth_bytes_per_s": dress(row.bandwidth_bytes_per_s, "B/s"),
        "peak_flops": ", ".join(f"{kind} {peak / 1e12:,.4g}" for kind, peak in row.peak_flops.items()) + " (× 10^12/s)",
        "link_bytes_per_s": dress(row.link_bytes_per_s, "B/s") if row.link_bytes_per_s else "",
    }
    for key, value in (device_json(row) | dressed).items():
        if value not in ("", None) and value != []:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            out.print(f"{key:24}{shown}", markup=False)
    if row.name == "local" and not row.measured:
        say(ADVICE)


def device_json(row: DeviceSpec) -> dict[str, object]:
    """A row as a JSON object."""
    return {
        "name": row.name,
        "kind": row.kind,
        "vendor": row.vendor,
        "sold_bytes": row.sold_bytes,
        "memory_bytes": row.memory_bytes,
        "bandwidth_bytes_per_s": row.bandwidth_bytes_per_s,
        "peak_flops": dict(row.peak_flops),
        "link_bytes_per_s": row.link_bytes_per_s,
        "price_per_hour": row.price_per_hour,
        "source": row.source,
        "price_source": row.price_source,
        "date": row.date,
        "measured": row.measured,
        "assumed": list(row.assumed),
        "aliases": list(row.aliases),
        "notes": list(row.notes),
    }
