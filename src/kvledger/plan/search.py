"""Search: the cheapest devices, spread and number types that meet a target, and what trades price against speed.

Every combination is answered by `plan.outcome` like a single plan, at the batch that the target puts on a replica;
memory is worked out once per replica shape and shared by all numbers of replicas. Prices decide, so devices without
a price are left out unless they are asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvledger.data.devices import catalogue, find_device
from kvledger.errors import ConfigError, KvledgerError
from kvledger.plan.outcome import Outcome, evaluate, kv_dtype_of, memory_of, timing_of
from kvledger.plan.planner import make_query
from kvledger.plan.query import Query, number_types
from kvledger.plan.timing import rank_weights
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import KVLayout
from kvledger.spec.model import ModelSpec
from kvledger.spec.weights import WeightBytes, scheme_bits
from kvledger.units import cdiv, parse_count, parse_seconds

TP = (1, 2, 4, 8)
PP = (1, 2, 4)
DP = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Target:
    """What must be met: requests at once, their length, and the times a person feels (None: any)."""

    concurrency: int = 1
    context: int = 8192
    output: int | None = None
    prefix: int = 0
    tpot_s: float | None = None
    ttft_s: float | None = None

    @staticmethod
    def parse(text: str) -> Target:
        """`concurrency=64 context=8192 tpot=50ms ttft=1s output=512 prefix=1k` → target. Raises ConfigError."""
        fields: dict[str, float] = {}
        for word in text.replace(",", " ").split():
            key, sign, value = word.partition("=")
            if key in ("tpot", "ttft") and sign:
                fields[f"{key}_s"] = parse_seconds(value)
            elif key in ("concurrency", "context", "output", "prefix") and sign:
                fields[key] = parse_count(value)
            else:
                raise ConfigError(
                    f"{word!r} is no part of a target; write for example concurrency=64 context=8k tpot=50ms"
                )
        if any(value <= 0 for key, value in fields.items() if key != "prefix"):
            raise ConfigError(f"every part of a target must be above 0: {text!r}")
        return Target(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination and how it stands to the target; `misses` are empty where it meets it."""

    outcome: Outcome
    misses: tuple[str, ...]

    @property
    def query(self) -> Query:
        return self.outcome.query

    @property
    def price_per_hour(self) -> float:
        """Dollars per hour of all devices; infinite where unknown, so that it never wins."""
        price = self.outcome.price_per_hour
        return float("inf") if price is None else price

    @property
    def rank(self) -> tuple[float, int, float, float]:
        """Cheapest first; among equals fewer devices, then the least change to the numbers, then speed."""
        bits = scheme_bits(self.query.scheme) + (16 if self.query.kv_dtype == "auto" else 8)
        return (self.price_per_hour, self.query.num_devices, -bits, self.outcome.speed.tpot_sustained_s)

    @property
    def name(self) -> str:
        """`4 × h100-sxm, TP 2 × DP 2, fp8 weights, fp8 KV`."""
        query = self.query
        spread = " × ".join(f"{n} {v}" for n, v in (("TP", query.tp), ("PP", query.pp), ("DP", query.dp)) if v > 1)
        kv = "" if query.kv_dtype == "auto" else f", {query.kv_dtype} KV"
        return f"{query.num_devices} × {query.device.name}{', ' + spread if spread else ''}, {query.scheme} weights{kv}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a search saw: `meeting` cheapest first, `near` those that missed least, the Pareto `front`."""

    target: Target
    num_tried: int
    meeting: tuple[Candidate, ...]
    near: tuple[Candidate, ...]
    front: tuple[Candidate, ...]


def find(
    model: ModelSpec,
    target: Target,
    devices: Sequence[str] = (),
    *,
    engine: str = "vllm",
    tp: Sequence[int] = TP,
    pp: Sequence[int] = PP,
    dp: Sequence[int] = DP,
    weights: Sequence[str | None] | None = None,
    kv_dtypes: Sequence[str] | None = None,
    efficiency: float = 1.0,
) -> Found:
    """Try every combination. Raises UnknownName for a device, ConfigError where nothing could be tried."""
    types = number_types(engine)
    smaller = [w for w in types.weights if scheme_bits(w) < 0.9 * scheme_bits(model.dtype)]
    schemes, kinds = weights or (None, *smaller), kv_dtypes or ("auto", *types.kv)
    tried, seen = 0, list[Candidate]()
    shards = _Shards()
    first = make_query(
        model, _devices(devices)[0], context=target.context, output=target.output, prefix=target.prefix, engine=engine,
        efficiency=efficiency,
    )  # fmt: skip
    for base in _shapes(first, _devices(devices), tp, pp, schemes, kinds):
        tried += len(dp)
        seen += _replicas(base, target, dp, shards)
    if not tried:
        raise ConfigError("nothing to try: no device, or a context beyond the model's own")
    meeting = sorted((c for c in seen if not c.misses), key=lambda c: c.rank)
    near = sorted((c for c in seen if c.misses), key=lambda c: (len(c.misses), *c.rank))
    return Found(target, tried, tuple(meeting), tuple(near[:10]), pareto(seen))


def _devices(names: Sequence[str]) -> list[DeviceSpec]:
    if names:
        return [find_device(name) for name in names]
    return [spec for spec in catalogue().values() if spec.price_per_hour is not None]


def _shapes(
    first: Query, devices: Sequence[DeviceSpec], tp: Sequence[int], pp: Sequence[int], schemes: Sequence[str | None],
    kv_dtypes: Sequence[str],
) -> Iterator[Query]:  # fmt: skip
    """Replicas to try: `first` on every device, spread and stored in every way."""
    for device in devices:
        for ranks in tp:
            for stages in pp:
                if ranks * stages > 1 and not device.link_bytes_per_s:
                    continue
                for scheme in schemes:
                    for kv_dtype in kv_dtypes:
                        yield replace(first, device=device, tp=ranks, pp=stages, weights=scheme, kv_dtype=kv_dtype)


@dataclass(frozen=True, slots=True)
class _Shards:
    """One TP rank's layout and weights, worked out once for all devices."""

    layouts: dict[tuple[str, int], KVLayout] = field(default_factory=dict)
    weight_bytes: dict[tuple[str, int], WeightBytes] = field(default_factory=dict)

    def layout(self, query: Query) -> KVLayout:
        key = (kv_dtype_of(query), query.tp)
        if key not in self.layouts:
            self.layouts[key] = query.model.kv_layout(key[0], 16, query.tp)
        return self.layouts[key]

    def weights(self, query: Query) -> WeightBytes:
        key = (query.scheme, query.tp)
        if key not in self.weight_bytes:
            self.weight_bytes[key] = rank_weights(query.model, query.scheme, query.tp)
        return self.weight_bytes[key]


def _replicas(base: Query, target: Target, dp: Sequence[int], shards: _Shards) -> Iterator[Candidate]:
    """Candidates of one replica shape; memory, layout and timing are the same for all numbers of replicas."""
    try:
        weights = shards.weights(base)
        if weights.total > base.pp * base.device.memory_bytes:
            return  # the fullest stage holds at least its share: no need to ask the engine
        memory = memory_of(base)
        timing = timing_of(base, shards.layout(base), weights)
        for count in dp:
            query = replace(base, dp=count, batch=cdiv(target.concurrency, count))
            outcome = evaluate(query, memory, timing)
            yield Candidate(outcome, misses(outcome, target))
    except KvledgerError:
        return


def misses(outcome: Outcome, target: Target) -> tuple[str, ...]:
    """Which parts of `target` the outcome does not meet, each with both figures."""
    found, speed = [], outcome.speed
    if outcome.total_requests < target.concurrency:
        found.append(f"holds {outcome.total_requests} requests, not {target.concurrency}")
    if target.tpot_s is not None and speed.tpot_sustained_s > target.tpot_s:
        found.append(f"TPOT {speed.tpot_sustained_s * 1e3:.1f} ms, not {target.tpot_s * 1e3:.1f}")
    if target.ttft_s is not None and speed.ttft_s > target.ttft_s:
        found.append(f"TTFT {speed.ttft_s:.2f} s, not {target.ttft_s:.2f}")
    return tuple(found)


def pareto(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that hold all requests and that no other beats in both price per hour and TPOT, cheapest first."""
    best, front = float("inf"), []
    holding = [c for c in candidates if not any(m.startswith("holds") for m in c.misses)]
    for candidate in sorted(holding, key=lambda c: (c.price_per_hour, c.outcome.speed.tpot_sustained_s)):
        tpot = candidate.outcome.speed.tpot_sustained_s
        if tpot < best and candidate.price_per_hour < float("inf"):
            best = tpot
            front.append(candidate)
    return tuple(front)
