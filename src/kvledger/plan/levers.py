"""Levers: single changes to a plan, each answered anew, with what it buys and what it costs; and the rescue of a plan
that does not fit.

Ranked by requests per dollar against the plan as it is: a second device that doubles the requests gains nothing on
this scale. Changes that need another model or a shorter context come last, whatever they buy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvledger.errors import DoesNotFit, KvledgerError
from kvledger.plan.compression import LATENT, evidence_for
from kvledger.plan.outcome import Outcome, evaluate
from kvledger.plan.query import MOST_DEVICES, Query, number_types
from kvledger.spec.kv import CacheSpec, FullKV, KVStorage
from kvledger.spec.weights import scheme_bits
from kvledger.units import format_bytes

FREE, QUALITY, MONEY, MODEL, LESS = "free", "quality", "money", "another model", "serves less"
LEAST_GAIN = 1.02  # below it a change is not worth a line
_ORDER = {FREE: 0, QUALITY: 0, MONEY: 0, LESS: 1, MODEL: 2}


@dataclass(frozen=True, slots=True)
class Change:
    """A changed query: `flags` are what a person would type, `costs` what it costs in words."""

    name: str
    flags: str
    kind: str
    costs: str
    query: Query


@dataclass(frozen=True, slots=True)
class Lever:
    """A change and what it brings; `*_gain` are factors against the plan as it is."""

    change: Change
    outcome: Outcome
    requests_gain: float
    tokens_gain: float
    per_dollar_gain: float

    def to_json(self) -> dict[str, object]:
        """The lever as a JSON object."""
        return {
            "name": self.change.name,
            "flags": self.change.flags,
            "kind": self.change.kind,
            "costs": self.change.costs,
            "requests_at_context": self.outcome.total_requests,
            "requests_gain": self.requests_gain,
            "tokens_per_s": self.outcome.tokens_per_s,
            "tokens_gain": self.tokens_gain,
            "requests_per_dollar_gain": self.per_dollar_gain,
            "cost_per_million_tokens": self.outcome.cost_per_million,
        }


def changes(query: Query) -> Iterator[Change]:
    """Single changes that make sense for `query`, those that cannot be allowed included: answering them decides."""
    yield from _sharing(query)
    yield from _number_types(query)
    yield from _devices(query)
    if query.context >= 2048:
        half = query.context // 2
        shorter = replace(query, context=half, output=min(query.output, half // 2), prefix=min(query.prefix, half // 4))
        yield Change(f"context {half:,}", f"--context {half}", LESS, "requests may only be half as long", shorter)
    yield from _structures(query)


def _sharing(query: Query) -> Iterator[Change]:
    prefix = min(1024, (query.context - query.output) // 2)
    if query.prefix == 0 and prefix >= 16:
        words = "nothing, where requests really start alike"
        yield Change(f"a shared prefix of {prefix:,}", f"--prefix {prefix}", FREE, words, replace(query, prefix=prefix))


def _number_types(query: Query) -> Iterator[Change]:
    bits, types = (
        KVStorage.of("bf16" if query.kv_dtype == "auto" else query.kv_dtype).key.bits,
        number_types(query.engine),
    )
    for kind in types.kv if bits > 8 else ():
        known = (*evidence_for(kind), *evidence_for("int8"))[0]
        words = f"{known.finding} ({known.source})"
        yield Change(f"{kind} KV", f"--kv-dtype {kind}", QUALITY, words, replace(query, kv_dtype=kind))
    for scheme in types.weights:
        if scheme_bits(scheme) < 0.9 * scheme_bits(query.scheme):
            words = "little quality" if scheme_bits(scheme) >= 8 else "some quality"
            yield Change(f"{scheme} weights", f"--weights {scheme}", QUALITY, words, replace(query, weights=scheme))


def _devices(query: Query) -> Iterator[Change]:
    if query.device.link_bytes_per_s and 2 * query.num_devices <= MOST_DEVICES:
        tp, pp = 2 * query.tp, 2 * query.pp
        exchange = "twice the devices, and exchange within every layer"
        yield Change(f"TP = {tp}", f"--tp {tp}", MONEY, exchange, replace(query, tp=tp))
        yield Change(
            f"PP = {pp}", f"--pp {pp}", MONEY, "twice the devices; one request is no faster", replace(query, pp=pp)
        )


def _structures(query: Query) -> Iterator[Change]:
    """The same model with MLA or one KV head: what only training can change."""
    heads = [x.cache.num_kv_heads for x in query.model.layers if isinstance(x.cache, FullKV)]
    if heads:
        yield Change("MLA instead of KV heads", "", MODEL, "training anew", _with_caches(query, lambda _: LATENT))
    if max(heads, default=1) > 1:
        one = _with_caches(query, lambda spec: replace(spec, num_kv_heads=1))
        yield Change("one KV head (MQA)", "", MODEL, "training anew, and some quality", one)


def _with_caches(query: Query, change: Callable[[FullKV], CacheSpec]) -> Query:
    layers = tuple(replace(x, cache=change(x.cache)) if isinstance(x.cache, FullKV) else x for x in query.model.layers)
    return replace(query, model=replace(query.model, layers=layers))


def levers(base: Outcome) -> tuple[Lever, ...]:
    """Every change that can be answered and gains requests or tokens at as many as fit, best first."""
    base = evaluate(replace(base.query, batch=None), base.memory, base.timing) if base.query.batch else base
    found = [lever for change in changes(base.query) if (lever := _try(base, change)) is not None]
    return tuple(sorted(found, key=lambda x: (_ORDER[x.change.kind], -x.per_dollar_gain, -x.tokens_gain)))


def _try(base: Outcome, change: Change) -> Lever | None:
    try:
        outcome = evaluate(replace(change.query, batch=None))
    except KvledgerError:
        return None
    requests = outcome.total_requests / base.total_requests
    tokens = outcome.tokens_per_s / base.tokens_per_s
    price = outcome.query.num_devices / base.query.num_devices
    if max(requests, tokens) < LEAST_GAIN:
        return None
    return Lever(change, outcome, requests, tokens, requests / price)


def rescue(query: Query, error: DoesNotFit) -> DoesNotFit:
    """`error` with the nearest change that fits: one change, else two."""
    first = list(_rescues(query))
    found = next((c.flags for c in first if _fits(c.query)), "")
    if not found:
        pairs = ((one, two) for one in first for two in _rescues(one.query))
        found = next((f"{one.flags} {two.flags}" for one, two in pairs if _fits(two.query)), "")
    missing = f"; {format_bytes(error.missing_bytes)} are missing" if error.missing_bytes else ""
    hint = f"; nearest that fits: {found}" if found else "; no single or double change fits: try larger devices"
    text = str(error)
    return DoesNotFit(text + ("" if "missing" in text else missing) + hint, error.missing_bytes)


def _rescues(query: Query) -> Iterator[Change]:
    yield from (c for c in changes(query) if c.flags and c.kind in (QUALITY, MONEY, LESS))
    for count in (4 * query.tp, 8 * query.tp):
        if query.device.link_bytes_per_s and count * query.pp * query.dp <= MOST_DEVICES:
            yield Change(f"TP = {count}", f"--tp {count}", MONEY, "", replace(query, tp=count))


def _fits(query: Query) -> bool:
    try:
        evaluate(query)
    except KvledgerError:
        return False
    return True
