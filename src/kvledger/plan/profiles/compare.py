"""The engines' rules side by side for one model and device, and why their pools differ.

Every row is an `Allocation` of the same setup; the reasons are worked out from those, not written per model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvledger.errors import KvledgerError
from kvledger.plan.explain import Figure, given
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.profiles.base import ENGINES, Allocation, Setup, get_profile
from kvledger.spec.device import DeviceSpec
from kvledger.spec.model import ModelSpec
from kvledger.units import format_bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """One allocation per engine that can run the setup; `refusals` say why the others cannot."""

    allocations: tuple[Allocation, ...]
    refusals: tuple[str, ...]
    reasons: tuple[str, ...]


def compare(
    model: ModelSpec, device: DeviceSpec, setup: Setup, engines: Sequence[str] = ENGINES
) -> Comparison:  # fmt: skip
    """What each of `engines` would do. A memory fraction is an engine's own notion and is not carried over."""
    same = replace(setup, memory_fraction=None, block_size=None)
    found, refusals = [], []
    for name in engines:
        try:
            found.append(get_profile(name).allocate(model, device, same))
        except KvledgerError as error:
            refusals.append(f"{name}: {error}")
    return Comparison(tuple(found), tuple(refusals), tuple(_differences(found)))


def _differences(found: Sequence[Allocation]) -> Iterator[str]:
    """Sentences on what makes the pools and the requests differ."""
    if len(found) < 2:
        return
    most, least = max(found, key=lambda a: a.kv_bytes), min(found, key=lambda a: a.kv_bytes)
    gap = most.kv_bytes / max(1, least.kv_bytes)
    yield (
        f"KV memory: {most.engine} keeps {format_bytes(most.kv_bytes)}, {least.engine} "
        f"{format_bytes(least.kv_bytes)} ({gap:.2f} ×): they leave different shares free"
    )
    yield from (f"{a.engine} leaves {format_bytes(_unused(a))} of the device to neither weights nor KV" for a in found)
    yield from _request_sentences(found)
    for a in found:
        yield from (f"{a.engine}: {reason}" for reason in a.reasons)


def _unused(a: Allocation) -> int:
    return max(0, a.total_bytes - a.weights_bytes - a.kv_bytes)


def request_bytes(a: Allocation) -> int:
    """Bytes of all pools that one request of the full length holds."""
    return sum(p.blocks_for(a.max_model_len) * p.block_bytes for p in a.pools)


def _request_sentences(found: Sequence[Allocation]) -> Iterator[str]:
    costs = {a.engine: request_bytes(a) for a in found}
    least = min(costs.values())
    for engine, size in costs.items():
        if size > 1.02 * least:
            yield f"a full request costs {engine} {format_bytes(size)}, {size / least:.2f} × the least of the engines"


def compare_ledger(model: ModelSpec, device: DeviceSpec, setup: Setup) -> Ledger:
    """`compare` as a ledger: one table, and the reasons as notes."""
    made = compare(model, device, setup)
    columns = ("engine", "KV pool", "band", "pools", "block", "KV tokens as logged", "full request", "requests")
    length = setup.max_model_len or model.max_context
    title = f"{model.name} on {device.name}, TP {setup.tp}, requests of {length:,} tokens"
    table = Table(title, columns, tuple(map(_row, made.allocations)))
    notes = (*made.reasons, *(f"cannot: {r}" for r in made.refusals))
    return Ledger("compare", f"engines' rules side by side: {title}", (), (table,), notes)


def _row(a: Allocation) -> tuple[Cell, ...]:
    name, source = a.engine.replace(".", "").replace("-", "_"), f"profile of {a.engine} {a.version}"

    def figure(what: str, value: float, unit: str) -> Figure:
        return given(f"{name}_{what}", value, unit, source, "derived")

    low, high = format_bytes(a.available.low), format_bytes(a.available.high)
    pools = ", ".join(f"{p.name} {p.num_blocks:,}" for p in a.pools)
    return (
        f"{a.engine} {a.version}",
        figure("kv_bytes", a.kv_bytes, "B"),
        f"{low} to {high}",
        pools,
        figure("block_size", a.block_size, "tokens"),
        figure("kv_tokens", a.kv_tokens, "tokens"),
        figure("request_bytes", request_bytes(a), "B"),
        figure("max_concurrency", a.max_concurrency, "requests"),
    )
