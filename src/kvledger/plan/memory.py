"""Ledger 2, bytes: what one token and one request keep, factor by factor, and where KV overtakes the weights.

Values come from `spec.kv.KVLayout` alone; the formulas here are that layout put into words, and a test computes the
words and compares. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvledger.errors import ConfigError
from kvledger.plan.explain import Figure, Input, derive
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.spec.kv import (
    CacheSpec,
    ChunkedKV,
    FullKV,
    KVLayout,
    KVStorage,
    KVType,
    LatentKV,
    LayerGroup,
    StateKV,
    WindowKV,
)
from kvledger.units import cdiv

CONTEXTS = (2048, 4096, 8192, 32768)
BATCHES = (1, 4, 16)
_LAYOUT = "spec.kv.KVLayout"
_FORMULA = "2 × L × H_kv × d_h × s × b (keys and values of every layer, head and token)"


@dataclass(frozen=True, slots=True)
class Part:
    """All layers of one spec and storage, whatever groups they were dealt into. `tag` ends its symbols."""

    spec: CacheSpec
    storage: KVStorage
    groups: tuple[LayerGroup, ...]
    tag: str

    @property
    def is_residual(self) -> bool:
        """The newest tokens of another part's layers."""
        return self.groups[0].is_residual

    @property
    def kind(self) -> str:
        """The spec's kind, or `newest` for a residual."""
        return "newest" if self.is_residual else self.spec.kind

    @property
    def num_layers(self) -> int:
        return sum(len(g.layers) for g in self.groups)

    def input(self, name: str, value: int, unit: str, source: str) -> Input:
        """An input whose symbol carries this part's tag."""
        return Input(name + self.tag, value, unit, source)


def parts_of(layout: KVLayout) -> tuple[Part, ...]:
    """The kinds of layers of `layout`, in order of first appearance; tags only where there are several."""
    kinds: dict[tuple[CacheSpec, KVStorage], list[LayerGroup]] = {}
    for group in layout.groups:
        kinds.setdefault((group.spec, group.storage), []).append(group)
    names = ["newest" if groups[0].is_residual else spec.kind for (spec, _), groups in kinds.items()]
    tags = [f"_{n}" + (str(names[: i + 1].count(n)) if names.count(n) > 1 else "") for i, n in enumerate(names)]
    return tuple(
        Part(spec, storage, tuple(groups), tag if len(kinds) > 1 else "")
        for ((spec, storage), groups), tag in zip(kinds.items(), tags, strict=True)
    )


# ---------------------------------------------------------------------------------------------- figures


def token_figure(layout: KVLayout, name: str = "kv_bytes_per_token", source: str = "") -> Figure:
    """Bytes that one more token stores, as a figure."""
    terms, inputs = [], []
    for part in parts_of(layout):
        term, symbols = _token_term(part)
        if term and not part.is_residual:  # a constant of a request
            terms.append(term)
            inputs += symbols
    formula = " + ".join(terms) or "0"
    label = "KV per token" if not name.endswith("_per_device") else "KV per token and device"
    return Figure(name, layout.bytes_per_token, "B", formula, tuple(inputs), source or _FORMULA, label=label)


def request_figure(layout: KVLayout, context: int, name: str = "") -> Figure:
    """Bytes that one request of `context` tokens stores, without block rounding."""
    s = Input("s", context, "tokens", "prompt and what is written")
    terms, inputs = [], [s]
    for part in parts_of(layout):
        term, symbols = _request_term(part, context)
        terms.append(term)
        inputs += symbols
    name = name or f"kv_bytes_at_{context}"
    return Figure(name, layout.bytes_for(context), "B", " + ".join(terms), tuple(inputs), _LAYOUT,
                  label=f"KV of one request, {context:,} tokens")  # fmt: skip


def _token_term(part: Part) -> tuple[str, list[Input]]:
    layers = part.input("L", part.num_layers, "layers", "layers of this kind")
    match part.spec:
        case FullKV() as spec:
            term, inputs = _head_term(part, spec)
        case LatentKV() as spec if spec.ratio > 1:
            term, inputs = _shared_row_term(part, spec)
        case LatentKV() as spec:
            term, inputs = _latent_term(part, spec)
        case _:
            return "", []
    two, rest = ("2 × ", term[4:]) if term.startswith("2 × ") else ("", term)  # the usual order: 2 × L × H_kv × …
    return f"{two}L{part.tag} × {rest}", [layers, *inputs]


def _head_term(part: Part, spec: FullKV) -> tuple[str, list[Input]]:
    tag, key, value = part.tag, part.storage.key, part.storage.value
    heads = part.input("H_kv", spec.num_kv_heads, "KV heads", "KV heads kept here, not query heads")
    k, v = (
        part.input("d_k", spec.key_dim, "", "key dimensions"),
        part.input("d_v", spec.value_dim, "", "value dimensions"),
    )
    if is_plain(key) and key == value and spec.key_dim == spec.value_dim:
        dims = part.input("d_h", spec.key_dim, "", "dimensions of a head")
        return f"2 × H_kv{tag} × d_h{tag} × b{tag}", [heads, dims, _element(part, key, "b")]
    if is_plain(key) and is_plain(value):
        inputs = [heads, k, v, _element(part, key, "b_k"), _element(part, value, "b_v")]
        return f"H_kv{tag} × (d_k{tag} × b_k{tag} + d_v{tag} × b_v{tag})", inputs
    rows = [_row(part, key, spec.key_dim, "r_k"), _row(part, value, spec.value_dim, "r_v")]
    return f"H_kv{tag} × (r_k{tag} + r_v{tag})", [heads, *rows]


def _latent_term(part: Part, spec: LatentKV) -> tuple[str, list[Input]]:
    tag, inputs = part.tag, []
    if is_plain(part.storage.key):
        row = f"(d_c{tag} + d_r{tag}) × b{tag}"
        inputs += [part.input("d_c", spec.latent_dim, "", "latent dimensions"),
                   part.input("d_r", spec.rope_dim, "", "rope key dimensions"),
                   _element(part, part.storage.key, "b")]  # fmt: skip
    else:
        row = f"r{tag}"
        inputs.append(_row(part, part.storage.key, spec.latent_dim + spec.rope_dim, "r"))
    if not spec.index_bytes:
        return row, inputs
    return f"({row} + i{tag})", [*inputs, part.input("i", spec.index_bytes, "B", "sparse-attention index key")]


def _shared_row_term(part: Part, spec: LatentKV) -> tuple[str, list[Input]]:
    """One row for several tokens: a token's share of it."""
    row, inputs = _latent_term(part, spec)
    ratio = part.input("q", spec.ratio, "tokens", "tokens that share a row")
    if part.storage.span == 1:
        return f"ceil({row} ÷ q{part.tag})", [*inputs, ratio]
    span = spec.ratio * part.storage.span
    share = cdiv(spec.tile_bytes(span, part.storage), span)
    return f"k{part.tag}", [part.input("k", share, "B", f"{_LAYOUT}: rows and scales spread over {span} tokens")]


def _request_term(part: Part, context: int) -> tuple[str, list[Input]]:
    tag = part.tag
    if isinstance(part.spec, StateKV):
        layers = part.input("L", part.num_layers, "layers", "layers with a state")
        return f"L{tag} × S{tag}", [layers, part.input("S", part.spec.state_bytes, "B", "state of one layer")]
    if part.storage.key.residual or "column" in (part.storage.key.axis, part.storage.value.axis):
        total = sum(g.bytes_for(context) for g in part.groups)
        return f"K{tag}", [part.input("K", total, "B", f"{_LAYOUT}: whole groups of tokens, with their scales")]
    if isinstance(part.spec, LatentKV):
        return _latent_rows_term(part, part.spec)
    term, inputs = _token_term(part)
    if isinstance(part.spec, WindowKV):
        return f"{term} × min(s, W{tag})", [*inputs, part.input("W", part.spec.window, "tokens", "sliding window")]
    if isinstance(part.spec, ChunkedKV):
        return f"{term} × min(s, C{tag})", [*inputs, part.input("C", part.spec.chunk, "tokens", "attention chunk")]
    return f"{term} × s", inputs


def _latent_rows_term(part: Part, spec: LatentKV) -> tuple[str, list[Input]]:
    tag, (row, inputs) = part.tag, _latent_term(part, spec)
    inputs = [part.input("L", part.num_layers, "layers", "layers of this kind"), *inputs]
    kept = f"min(s, W{tag})" if spec.window else "s"
    if spec.window:
        inputs.append(part.input("W", spec.window, "tokens", "latents kept"))
    if spec.ratio > 1:
        kept = f"ceil({kept} ÷ q{tag})"
        inputs.append(part.input("q", spec.ratio, "tokens", "tokens that share a row"))
    return f"L{tag} × {row} × {kept}", inputs


def is_plain(kind: KVType) -> bool:
    """Whole bytes per element and nothing beside them."""
    return not kind.scale_bytes and not kind.row_bytes and kind.bits % 8 == 0


def _element(part: Part, kind: KVType, symbol: str) -> Input:
    return part.input(symbol, kind.bits // 8, "B", f"{kind.name}: bytes per element")


def _row(part: Part, kind: KVType, channels: int, symbol: str) -> Input:
    span = part.storage.span
    row = cdiv(kind.tile_bytes(span, channels), span)
    return part.input(symbol, row, "B", f"{kind.name}: {channels} elements with their scales")


# ---------------------------------------------------------------------------------------------- the ledger


def bytes_ledger(
    layout: KVLayout,
    weights: Figure,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    title: str = "",
) -> Ledger:
    """Per token, per request, contexts × batches, and where KV overtakes `weights`. Raises ConfigError below 1."""
    if min(*contexts, *batches) < 1:
        raise ConfigError("contexts and batch sizes must be at least 1")
    requests = {s: request_figure(layout, s) for s in contexts}
    rows: list[tuple[Cell, ...]] = [(f"{s:,}", *(_cell(requests[s], s, b) for b in batches)) for s in contexts]
    table = Table("KV by context and batch", ("context", *(f"batch {b}" for b in batches)), tuple(rows))
    figures = (token_figure(layout), weights, *_overtakes(layout, weights), *requests.values())
    return Ledger("bytes", title or "What KV costs in bytes", figures, (table, _share_table(layout, contexts)))


def _cell(request: Figure, context: int, batch: int) -> Figure:
    return derive(f"kv_{context}_x{batch}", "B", "B × K", Input("B", batch, "requests"), request.as_input("K"))


def _overtakes(layout: KVLayout, weights: Figure) -> Iterator[Figure]:
    """Tokens in flight, over all requests, from which KV is more than the weights."""
    token = token_figure(layout)
    if token.value:
        yield derive("kv_overtakes_weights", "tokens", "ceil(W ÷ K)", weights.as_input("W"), token.as_input("K"),
                     label="KV overtakes the weights at",
                     note="tokens over all requests while no window is full")  # fmt: skip


def _share_table(layout: KVLayout, contexts: Sequence[int]) -> Table:
    """Which kind of layer keeps how much of a request: what windows and states save is seen here."""
    parts = parts_of(layout)
    rows: list[tuple[Cell, ...]] = []
    for context in contexts:
        cells: list[Cell] = [f"{context:,}"]
        for part in parts:
            kept = sum(g.bytes_for(context) for g in part.groups)
            term, inputs = _request_term(part, context)
            s = Input("s", context, "tokens")
            cells.append(Figure(f"part_{context}{part.tag}", kept, "B", term, (s, *inputs), _LAYOUT))
        rows.append(tuple(cells))
    names = tuple(f"{p.num_layers} × {p.kind}" + (f" ({p.tag[1:]})" if p.tag[-1:].isdigit() else "") for p in parts)
    return Table("one request by kind of layer", ("context", *names), tuple(rows))
