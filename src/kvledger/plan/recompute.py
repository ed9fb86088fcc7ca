"""Ledger 1, recompute: how many token forwards the cache saves, and how arithmetic each phase is.

A *forward* is one token going through the model. Counting stops there: what a forward costs is `plan.roofline`'s.
"""

from __future__ import annotations

from kvledger.errors import ConfigError
from kvledger.plan.explain import Figure, Input, derive, given
from kvledger.plan.ledger import Ledger, Table
from kvledger.plan.roofline import Roofline, StepCost
from kvledger.spec.step import Work

_SOURCE = "causal attention: token t needs the keys and values of all before it"
_FIRST = "the first new token comes out of the prefill itself, so m new tokens take m − 1 further forwards"


def recompute(
    prompt: int = 1000, output: int = 1000, roofline: Roofline | None = None, as_lesson: bool = False
) -> Ledger:
    """Forwards without and with a cache for `prompt` + `output` tokens; intensities of `roofline`'s model if given.

    `as_lesson` counts n + m forwards with a cache, one more than an engine runs. Raises ConfigError below 1 token.
    """
    if min(prompt, output) < 1:
        raise ConfigError(f"prompt and output need at least 1 token, got {prompt} and {output}")
    n, m = Input("n", prompt, "tokens", "prompt"), Input("m", output, "tokens", "output")
    without = derive(
        "forwards_without_cache", "", "m × n + m × (m − 1) // 2", n, m, source=_SOURCE, label="forwards without a cache"
    )
    with_cache = derive(
        "forwards_with_cache", "", "n + m" if as_lesson else "n + m − 1", n, m, source=_SOURCE,
        label="forwards with a cache", note="" if as_lesson else _FIRST,
    )  # fmt: skip
    ratio = derive("saved_times", "×", "without ÷ cached", without.as_input("without"), with_cache.as_input("cached"))
    share = derive(
        "wasted_share", "%", "100 × (1 − cached ÷ without)", without.as_input("without"), with_cache.as_input("cached"),
        label="share of forwards that only repeat",
    )  # fmt: skip
    figures = [without, with_cache, ratio, share, *weight_intensities(prompt)]
    if roofline is not None:
        figures += model_intensities(roofline, prompt, output)
    return Ledger("recompute", "What the cache saves", tuple(figures), (_by_token(n, m),))


def _by_token(n: Input, m: Input) -> Table:
    picks = sorted({t for t in (1, 2, 3, int(m.value) // 2, int(m.value)) if 1 <= t <= m.value})
    rows = tuple(
        (
            str(t),
            derive(f"without_{t}", "", "n + t − 1", n, Input("t", t)),
            given(f"with_{t}", int(n.value) if t == 1 else 1, "", "prefill" if t == 1 else "its own position"),
        )
        for t in picks
    )
    return Table("forwards to produce token t", ("t", "without a cache", "with a cache"), rows)


def weight_intensities(prompt: int, bytes_per_weight: int = 2) -> tuple[Figure, Figure]:
    """FLOP per byte of weights of prefill and of a decode step at batch 1, weights alone: 2 per weight and token."""
    b = Input("b", bytes_per_weight, "B", "bytes per weight")
    source = "2 operations per weight and token; weights read once a step"
    return (
        derive("intensity_prefill", "FLOP/B", "2 × n ÷ b", Input("n", prompt, "tokens"), b, source=source,
               label="prefill: FLOP per byte of weights"),
        derive("intensity_decode", "FLOP/B", "2 × B ÷ b", Input("B", 1, "requests"), b, source=source,
               label="decode at batch 1: FLOP per byte of weights"),
    )  # fmt: skip


def model_intensities(roofline: Roofline, prompt: int, output: int) -> tuple[Figure, ...]:
    """The same for a real model with attention and KV traffic, and the memory that the saving costs."""
    layout = roofline.layout
    kept = given("kv_kept", layout.bytes_for(prompt + output - 1), "B", "KVLayout.bytes_for(n + m − 1)", "derived",
                 "price: KV kept at the end")  # fmt: skip
    return (
        _intensity("model_prefill", roofline.cost((Work(0, prompt),)), f"{roofline.model.name}, prefill"),
        _intensity("model_decode", roofline.cost((Work(prompt, 1),)), f"{roofline.model.name}, decode at batch 1"),
        kept,
    )


def _intensity(name: str, cost: StepCost, label: str) -> Figure:
    flops = Input("F", cost.flops, "FLOP", "plan.roofline: products with weights, and attention")
    weights = Input("W", cost.weight_bytes, "B", "plan.roofline: weights read once")
    return derive(
        name, "FLOP/B", "F ÷ (W + K)", flops, weights, Input("K", cost.kv_bytes, "B", "plan.roofline: KV traffic"),
        source="roofline, Williams et al. 2009", label=label,
    )  # fmt: skip
