"""Ledger 5, compression: fewer heads, fewer bytes, a latent instead of heads, a window; and what is known of quality.

Each alternative is another `KVLayout` of the same layers, so every figure comes from the one formula. What a change
costs in quality is quoted from data/evidence.toml with its source. Knows no device.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from kvledger.errors import ConfigError
from kvledger.plan.explain import Input, derive, given
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.memory import request_figure, token_figure
from kvledger.spec.kv import CacheSpec, ChunkedKV, FullKV, KVLayout, KVStorage, LatentKV, WindowKV
from kvledger.spec.model import ModelSpec

KV_DTYPES = ("fp32", "bf16", "fp8", "int8", "q8_0", "nvfp4", "int4", "q4_0", "kivi2")
LATENT = LatentKV(512, 64)  # DeepSeek-V2's dimensions
WINDOW = 4096
Change = Callable[[CacheSpec], CacheSpec]


@dataclass(frozen=True, slots=True)
class Evidence:
    """One finding on the quality of a lever; `recalled` where the figure was not looked up again."""

    lever: str
    finding: str
    source: str
    recalled: bool


@cache
def evidence() -> tuple[Evidence, ...]:
    """All findings of data/evidence.toml."""
    text = files("kvledger.data").joinpath("evidence.toml").read_text(encoding="utf-8")
    return tuple(Evidence(**row) for row in tomllib.loads(text)["evidence"])


def evidence_for(lever: str) -> tuple[Evidence, ...]:
    """Findings on `lever`: heads, mla, fp8, int8, int4, window."""
    return tuple(e for e in evidence() if e.lever == lever)


def compression(
    model: ModelSpec,
    kv_dtype: str = "bf16",
    context: int = 8192,
    block_size: int = 16,
    dtypes: Sequence[str] = KV_DTYPES,
) -> Ledger:
    """Bytes of every alternative of `model`'s cache, relative to the one it has. Raises ConfigError, UnknownName."""
    if context < 1:
        raise ConfigError(f"context must be at least 1 token, got {context}")
    specs, storage = [x.cache for x in model.layers], KVStorage.of(kv_dtype)
    base = KVLayout.of(specs, storage, block_size)
    heads = [_row(name, key, _changed(specs, f), storage, base, context) for name, key, f in _structures(model)]
    types = [
        _row(f"{dtype} KV", f"type_{dtype}", specs, KVStorage.of(dtype), base, context)
        for dtype in dict.fromkeys([kv_dtype, *dtypes])
    ]
    columns = ("alternative", "per token", f"{context:,} tokens", "of today's")
    known = tuple((e.lever, e.finding + (" (recalled)" if e.recalled else ""), e.source) for e in evidence())
    tables = (
        Table("structure: decided when the model is trained", columns, tuple(heads)),
        Table("number type: decided at deployment", columns, tuple(types)),
        Table("quality: what is known", ("lever", "finding", "source"), known),
    )
    figures = (token_figure(base), request_figure(base, context, "kv_of_request"))
    return Ledger("compression", f"Making KV smaller: {model.name}", figures, tables)


def _structures(model: ModelSpec) -> list[tuple[str, str, Change]]:
    """(title, key, change) of the structures to compare with the model's own."""
    own = {x.cache.num_kv_heads for x in model.layers if isinstance(x.cache, FullKV)}
    counts = sorted({model.num_heads, *own, 8, 1} if own else {model.num_heads}, reverse=True)
    names = {model.num_heads: "MHA", 1: "MQA"}
    rows: list[tuple[str, str, Change]] = [("as it is", "today", lambda spec: spec)]
    if own:
        rows += [
            (f"{names.get(n, 'GQA')}, {n} KV heads", f"heads_{n}", _with_heads(n))
            for n in counts
            if n <= model.num_heads
        ]
        rows.append((f"MLA, {LATENT.latent_dim} + {LATENT.rope_dim} per layer", "mla", _as_latent))
        rows.append((f"window of {WINDOW:,} in every layer", "window", _with_window(WINDOW)))
    return rows


def _with_heads(count: int) -> Change:
    return lambda spec: replace(spec, num_kv_heads=count) if isinstance(spec, FullKV) else spec


def _as_latent(spec: CacheSpec) -> CacheSpec:
    return LATENT if isinstance(spec, FullKV) else spec


def _with_window(window: int) -> Change:
    def change(spec: CacheSpec) -> CacheSpec:
        if not isinstance(spec, FullKV) or isinstance(spec, WindowKV | ChunkedKV):
            return spec
        return WindowKV(spec.num_kv_heads, spec.key_dim, spec.value_dim, window)

    return change


def _changed(specs: Sequence[CacheSpec | None], change: Change) -> list[CacheSpec | None]:
    return [None if s is None else change(s) for s in specs]


def _row(
    title: str, key: str, specs: Sequence[CacheSpec | None], storage: KVStorage, base: KVLayout, context: int
) -> tuple[Cell, ...]:
    layout = KVLayout.of(specs, storage, base.block_size)
    token, request = token_figure(layout, f"token_{key}"), request_figure(layout, context, f"request_{key}")
    share = derive(
        f"share_{key}", "×", "K ÷ K_0", request.as_input("K"), request_figure(base, context, "today").as_input("K_0")
    )
    return (title, token, request, share)


# ---------------------------------------------------------------------------------------------- MLA in the small


def latent_saving(
    latent_dim: int = 512, rope_dim: int = 64, layers: int = 60, against_layers: int = 95, kv_heads: int = 8,
    head_dim: int = 128, bits: int = 6,
) -> Ledger:  # fmt: skip
    """What MLA saves per token against a GQA model: by shape, and with KV of `bits` instead of 16 bits.

    The defaults are DeepSeek-V2 against DeepSeek 67B (arXiv:2405.04434, section 2.1 and table 1).
    """
    d_c, d_r = Input("d_c", latent_dim, "", "latent dimensions"), Input("d_r", rope_dim, "", "rope key dimensions")
    h, d, one = Input("H_kv", kv_heads, "KV heads"), Input("d_h", head_dim), Input("L_0", against_layers, "layers")
    latent = derive("latent_elements", "", "L × (d_c + d_r)", Input("L", layers, "layers"), d_c, d_r)
    heads = derive("gqa_elements", "", "2 × L_0 × H_kv × d_h", one, h, d)
    by_shape = derive("saved_by_shape", "%", "100 × (1 − K ÷ K_0)", latent.as_input("K"), heads.as_input("K_0"))
    by_bits = derive(
        "saved_with_bits", "%", "100 × (1 − K × q ÷ (K_0 × 16))", latent.as_input("K"), heads.as_input("K_0"),
        Input("q", bits, "bits"),
    )  # fmt: skip
    groups = derive("equal_gqa_groups", "", "(d_c + d_r) ÷ (2 × d_h)", d_c, d_r, d)
    smaller = derive("times_smaller_per_layer", "×", "H_kv ÷ g", h, groups.as_input("g"))
    left = derive("left_of_it", "×", "(100 − p) ÷ 100", by_bits.as_input("p"))
    figures = (latent, heads, by_shape, by_bits, left, groups, smaller, given("bits", bits, "bits"))
    return Ledger("latent", "MLA against grouped heads", figures)
