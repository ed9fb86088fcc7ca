"""Lengths of real requests: distributions of prompt and output tokens, and how many blocks a request holds.

A distribution is its quantile function, so that means, percentiles and samples all come from one place. Prompt and
output lengths are taken as independent (rank correlation in the Azure conversation trace: 0.07). Knows no arrivals.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import NormalDist, fmean

from kvledger.errors import ConfigError, UnknownName
from kvledger.units import cdiv, parse_count

GRID = 1024  # points of the quantile function that expectations are taken over


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts by its quantile function; `source` says where its figures come from."""

    name: str
    quantile: Callable[[float], float]
    source: str
    assumed: bool = False  # the shape is assumed, only the named moments are published

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Whole token counts at the midpoints of `GRID` equal shares, ascending."""
        return tuple(max(1, round(self.quantile((i + 0.5) / GRID))) for i in range(GRID))

    @cached_property
    def mean(self) -> float:
        """Expected tokens."""
        return fmean(self.grid)


@dataclass(frozen=True)
class Workload:
    """Requests: how long their prompts and outputs are, and how much of a prompt is shared.

    `shared_prefix` tokens start the prompt of a share `hit_rate` of the requests and are kept once.
    """

    name: str
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0
    hit_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit rate must be between 0 and 1, got {self.hit_rate}")
        if self.shared_prefix < 0:
            raise ConfigError(f"shared prefix must not be negative, got {self.shared_prefix}")

    def held_tokens(self, count: int = 4096) -> list[int]:
        """Tokens that a running request holds at a random moment: its prompt and what it has written so far.

        Long answers are seen more often than short ones, so outputs are drawn in proportion to their length. The
        draws are spread evenly instead of at random (Kronecker sequence), so means are right to a few parts in 1000.
        """
        outputs = self.output.grid
        sums = list(accumulate(outputs))
        held = []
        for u, v, w in _evenly(count):
            output = outputs[bisect_left(sums, v * sums[-1])]
            held.append(max(1, round(self.prompt.quantile(u))) + 1 + int(w * output))
        return held

    def final_tokens(self, count: int = 4096) -> list[int]:
        """Tokens that requests hold when they end, spread like `held_tokens`."""
        return [
            max(1, round(self.prompt.quantile(u))) + max(1, round(self.output.quantile(v)))
            for u, v, _ in _evenly(count)
        ]

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return (
            self.prompt.source
            if self.prompt.source == self.output.source
            else f"{self.prompt.source}; {self.output.source}"
        )


def _evenly(count: int) -> Iterator[tuple[float, float, float]]:
    """`count` points that fill the unit cube evenly (the R3 sequence: powers of the root of x⁴ = x + 1)."""
    root = 1.2207440846057596
    steps = (1 / root, 1 / root**2, 1 / root**3)
    for index in range(count):
        u, v, w = ((0.5 + (index + 1) * step) % 1 for step in steps)
        yield u, v, w


# ---------------------------------------------------------------------------------------------- shapes


def fixed(tokens: int) -> Lengths:
    """Always `tokens`. Raises ConfigError below 1."""
    if tokens < 1:
        raise ConfigError(f"a request needs at least 1 token, got {tokens}")
    return Lengths(f"fixed {tokens}", lambda _: float(tokens), "given")


def uniform(low: int, high: int, source: str = "given") -> Lengths:
    """Evenly from `low` to `high`."""
    return Lengths(f"uniform {low}–{high}", lambda u: low + (high - low) * u, source)


def exponential(mean: float, source: str) -> Lengths:
    """The least that a mean says: an exponential shape, marked as assumed."""
    return Lengths(f"exponential, mean {mean:g}", lambda u: -mean * math.log1p(-u), source, assumed=True)


def lognormal(median: float, p90: float, source: str) -> Lengths:
    """A lognormal through a published median and 90th percentile; the shape is assumed."""
    sigma = math.log(p90 / median) / NormalDist().inv_cdf(0.9)
    curve = NormalDist(math.log(median), sigma)
    return Lengths(
        f"lognormal, median {median:g}, p90 {p90:g}", lambda u: math.exp(curve.inv_cdf(u)), source, assumed=True
    )


def knots(name: str, points: tuple[tuple[float, float], ...], source: str) -> Lengths:
    """A distribution through known quantiles (share, tokens), logarithmic between them."""

    def quantile(u: float) -> float:
        for (a, low), (b, high) in pairwise(points):
            if u <= b:
                return math.exp(math.log(low) + (math.log(high) - math.log(low)) * (u - a) / (b - a))
        return points[-1][1]

    return Lengths(name, quantile, source)


# ---------------------------------------------------------------------------------------------- presets

_AZURE = "Azure LLM inference dataset 2023, conversation, CC-BY (Patel et al., Splitwise, ISCA 2024): quantiles"
_VLLM = "Kwon et al., PagedAttention, SOSP 2023, figure 11: means; shape assumed"
_SARATHI = "Agrawal et al., Sarathi-Serve, OSDI 2024, table 2: median and p90; shape assumed"
_ORCA = "Yu et al., Orca, OSDI 2022, section 6: uniform lengths"

_AZURE_PROMPT = (
    (0.0, 2), (0.01, 29), (0.05, 181), (0.1, 207), (0.25, 396), (0.4, 703), (0.5, 1020), (0.6, 1071), (0.75, 1189),
    (0.9, 2735), (0.95, 4083), (0.99, 4142), (0.999, 6179), (1.0, 14050),
)  # fmt: skip
_AZURE_OUTPUT = (
    (0.0, 7), (0.01, 16), (0.05, 41), (0.1, 54), (0.25, 85), (0.4, 103), (0.5, 129), (0.6, 177), (0.75, 395),
    (0.9, 424), (0.95, 451), (0.99, 601), (0.999, 954), (1.0, 1000),
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("azure-conv-2023", knots("prompt", _AZURE_PROMPT, _AZURE), knots("output", _AZURE_OUTPUT, _AZURE)),
        Workload("sharegpt", exponential(161.31, _VLLM), exponential(337.99, _VLLM)),
        Workload("alpaca", exponential(19.31, _VLLM), exponential(58.45, _VLLM)),
        Workload("openchat-sharegpt4", lognormal(1730, 5696, _SARATHI), lognormal(415, 834, _SARATHI)),
        Workload("arxiv-summarization", lognormal(7059, 12985, _SARATHI), lognormal(208, 371, _SARATHI)),
        Workload("orca-synthetic", uniform(32, 512, _ORCA), uniform(1, 128, _ORCA)),
    )
}  # fmt: skip


def find_workload(text: str, shared_prefix: int = 0, hit_rate: float = 0.0) -> Workload:
    """A preset by name, or `PROMPT/OUTPUT` in tokens (`2k/256`). Raises UnknownName, ConfigError."""
    prompt, slash, output = text.partition("/")
    if slash:
        made = Workload(text, fixed(parse_count(prompt)), fixed(parse_count(output)))
    elif text in WORKLOADS:
        made = WORKLOADS[text]
    else:
        raise UnknownName("workload", text, [*WORKLOADS, "2k/256"])
    return Workload(made.name, made.prompt, made.output, shared_prefix, hit_rate)


# ---------------------------------------------------------------------------------------------- capacity


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean, standard deviation and skewness of the blocks that one request holds."""

    mean: float
    sd: float
    skew: float

    @staticmethod
    def of(values: list[int]) -> Moments:
        """Moments of a sample; a constant has neither spread nor skew."""
        mean = fmean(values)
        variance = fmean((v - mean) ** 2 for v in values)
        if variance == 0:
            return Moments(mean, 0.0, 0.0)
        third = fmean((v - mean) ** 3 for v in values)
        return Moments(mean, math.sqrt(variance), third / variance**1.5)

    def total_at(self, count: int, percentile: float) -> float:
        """The `percentile` (0–100) of the sum over `count` independent requests (Cornish-Fisher, first term)."""
        z = NormalDist().inv_cdf(percentile / 100)
        shift = z + (z * z - 1) * self.skew / math.sqrt(count) / 6
        return count * self.mean + math.sqrt(count) * self.sd * shift


def requests_at_percentile(
    num_blocks: int, blocks_of: Callable[[int], int], workload: Workload, percentile: float, whole: bool = False
) -> int:
    """Requests that may run together so that, at `percentile` of moments, their blocks fit in `num_blocks`.

    `blocks_of(tokens)` are the blocks of a request. The shared prefix is held once, and requests that hit it hold
    only the rest. `whole` counts every request at its end instead of at a random moment. Raises ConfigError.
    """
    if not 0 < percentile < 100:
        raise ConfigError(f"percentile must be between 0 and 100, got {percentile}")
    tokens = workload.final_tokens() if whole else workload.held_tokens()
    shared = growth_blocks(blocks_of, workload.shared_prefix)
    moments = Moments.of(_blocks_held(tokens, blocks_of, workload, shared))
    room = num_blocks - (shared if workload.hit_rate else 0)
    low, high = 0, max(0, room) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if moments.total_at(middle, percentile) <= room else (low, middle)
    return low


def growth_blocks(blocks_of: Callable[[int], int], num_tokens: int) -> int:
    """Blocks of `num_tokens` that others could share: growth, without what every request holds for itself (states)."""
    return blocks_of(2 * num_tokens) - blocks_of(num_tokens) if num_tokens else 0


def _blocks_held(tokens: list[int], blocks_of: Callable[[int], int], workload: Workload, shared: int) -> list[int]:
    cached: dict[int, int] = {}
    held = []
    for index, count in enumerate(tokens):
        if count not in cached:
            cached[count] = blocks_of(count)
        hit = (index + 0.5) / len(tokens) < workload.hit_rate and count > workload.shared_prefix
        held.append(max(1, cached[count] - (shared if hit else 0)))
    return held


def mean_rounded(lengths: list[int], unit: int) -> float:
    """Expected tokens reserved when lengths are rounded up to whole `unit`s."""
    return fmean(cdiv(n, unit) * unit for n in lengths)
