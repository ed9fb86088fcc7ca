"""What a profile is: an engine's rules from device memory to a KV pool, and the allocation that they give.

A profile holds rules only. Bytes come from `spec.kv` (page bytes of a `LayerGroup`), so that no engine here has a
byte formula of its own. Knows no log files and no workloads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvledger.errors import ConfigError, UnknownName
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import LayerGroup
from kvledger.spec.model import ModelSpec
from kvledger.units import cdiv, format_bytes

Basis = Literal["given", "computed", "fitted", "assumed"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engine is told. None: the engine's own default. Bytes are per device.

    `available_bytes` skips the estimate of overheads (a log's "available KV cache memory"); `weights_bytes` replaces
    the computed weights. `draft_layers` keep KV beside the model's layers, `draft_tokens` are guessed per step.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    concurrent_batches: int | None = None  # steps whose tokens may be unsettled at once (asynchronous scheduling: 2)
    memory_fraction: float | None = None
    draft_layers: int = 0
    draft_tokens: int = 0
    prefix_caching: bool = True
    hybrid: bool = True  # False: windows are kept as if they were full (vLLM's --disable-hybrid-kv-cache-manager)
    available_bytes: int | None = None
    weights_bytes: int | None = None
    weight_dtype: str | None = None  # None: as published

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory fraction must be above 0 and at most 1, got {self.memory_fraction}")


@dataclass(frozen=True, slots=True)
class Band:
    """A figure in bytes with the least and the most it is likely to be."""

    low: int
    mid: int
    high: int

    @staticmethod
    def exactly(num_bytes: int) -> Band:
        return Band(num_bytes, num_bytes, num_bytes)

    @property
    def spread(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that occupies device memory before any KV: weights, activation, …; `basis` says how it is known."""

    name: str
    size: Band
    basis: Basis
    note: str = ""


def remaining(budget_bytes: int, terms: Iterable[Term]) -> Band:
    """What `terms` leave of a budget: least where all of them are largest."""
    sizes = [t.size for t in terms]
    high, mid, low = sum(b.high for b in sizes), sum(b.mid for b in sizes), sum(b.low for b in sizes)
    return Band(budget_bytes - high, budget_bytes - mid, budget_bytes - low)


def required(device: DeviceSpec | None, example: str = "h100-sxm") -> DeviceSpec:
    """`device`, which is needed where no KV memory is given. Raises ConfigError."""
    if device is None:
        raise ConfigError(f"a device or the available KV memory is needed; name one, for example {example}")
    return device


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share one block table. `parts` differ in spec or storage but not in tokens per block.

    `page_bytes` is what the engine really reserves per layer and block where that is more than the layer fills
    (state pages, unified pages). A request holds `extra_blocks` beside those of its tokens; `context_shards` ranks
    each hold their share of a full context (decode context parallelism).
    """

    parts: tuple[LayerGroup, ...]
    page_bytes: int | None = None
    extra_blocks: int = 0
    context_shards: int = 1

    @property
    def kind(self) -> str:
        """`full`, `window`, `chunked`, `latent` or `state`."""
        return self.parts[0].spec.kind

    @property
    def num_layers(self) -> int:
        return sum(len(p.layers) for p in self.parts)

    @property
    def block_size(self) -> int:
        return self.parts[0].block_size

    @property
    def block_bytes(self) -> int:
        """Bytes that the layers of this group take of one block."""
        return sum(len(p.layers) * (self.page_bytes or p.page_bytes) for p in self.parts)

    @property
    def used_bytes(self) -> int:
        """Bytes of a block that hold something: `block_bytes` without page padding."""
        return sum(len(p.layers) * p.page_bytes for p in self.parts)

    def blocks_for(self, num_tokens: int, in_flight: int) -> int:
        """Most blocks that one request of `num_tokens` holds in this group."""
        tokens = num_tokens if self.kind in ("window", "chunked") else cdiv(num_tokens, self.context_shards)
        return max(p.spec.blocks(tokens, p.block_size, in_flight) for p in self.parts) + self.extra_blocks


@dataclass(frozen=True, slots=True)
class Pool:
    """`num_blocks` equal blocks of `block_bytes` that `groups` draw from; `in_flight` tokens may be new in a step."""

    name: str
    groups: tuple[BlockGroup, ...]
    num_blocks: int
    block_bytes: int
    in_flight: int = 1

    @property
    def block_size(self) -> int:
        """Tokens per block (the smallest of any group)."""
        return min(g.block_size for g in self.groups)

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds, over all groups."""
        return sum(g.blocks_for(num_tokens, self.in_flight) for g in self.groups)

    def concurrency(self, num_tokens: int) -> float:
        """Requests of `num_tokens` that fit side by side, as a fraction."""
        need = self.blocks_for(num_tokens)
        return self.num_blocks / need if need else float("inf")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an engine would do with a device's memory, all figures per device.

    `kv_tokens` and `lines` are as that version of the engine prints them; `available` is the KV budget with its
    band, `terms` what was taken off before. Every decision leaves one sentence in `reasons`.
    """

    engine: str
    version: str
    max_model_len: int
    total_bytes: int
    budget_bytes: int  # share of the total that the engine may use
    terms: tuple[Term, ...]
    available: Band
    pools: tuple[Pool, ...]
    kv_tokens: int
    max_concurrency: float
    lines: tuple[str, ...] = ()
    reasons: tuple[str, ...] = field(default=())

    @property
    def num_blocks(self) -> int:
        """Blocks of the first (main) pool."""
        return self.pools[0].num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block of the first pool."""
        return self.pools[0].block_size

    @property
    def block_bytes(self) -> int:
        return self.pools[0].block_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(p.pool_bytes for p in self.pools)

    @property
    def weights_bytes(self) -> int:
        return sum(t.size.mid for t in self.terms if t.name == "weights")

    @property
    def overhead_bytes(self) -> int:
        """What neither weights nor KV take of the budget."""
        return sum(t.size.mid for t in self.terms if t.name != "weights")

    @property
    def dominant(self) -> Term | None:
        """The term whose uncertainty makes most of the band."""
        return max(self.terms, key=lambda t: t.size.spread, default=None)

    def concurrency(self, context: int) -> float:
        """Requests of `context` tokens that fit side by side (the scarcest pool decides)."""
        return min(p.concurrency(context) for p in self.pools)

    def requests_at(self, context: int) -> int:
        """Whole requests of `context` tokens that fit side by side."""
        return int(self.concurrency(context))


class Profile(Protocol):
    """An engine's rules. `name` and `version` say whose."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def allocate(self, model: ModelSpec, device: DeviceSpec | None, setup: Setup) -> Allocation:
        """The pool that this engine builds for `model`.

        `device` may be None where `setup.available_bytes` is given. Raises ConfigError for settings the engine
        refuses, DoesNotFit when nothing is left for KV.
        """
        ...


_PROFILES = {
    "vllm": ("kvledger.plan.profiles.vllm", "VllmProfile"),
    "sglang": ("kvledger.plan.profiles.sglang", "SglangProfile"),
    "llama.cpp": ("kvledger.plan.profiles.llamacpp", "LlamaCppProfile"),
    "tensorrt-llm": ("kvledger.plan.profiles.tensorrt", "TensorRtProfile"),
    "kvledger": ("kvledger.plan.profiles.kvledger", "KvledgerProfile"),
}
_ALIASES = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "trtllm": "tensorrt-llm", "trt-llm": "tensorrt-llm",
            "tensorrt": "tensorrt-llm", "ollama": "llama.cpp", "ik_llama.cpp": "llama.cpp"}  # fmt: skip

ENGINES = tuple(_PROFILES)


def get_profile(name: str, version: str | None = None) -> Profile:
    """The rules of engine `name` (one of `ENGINES` or an alias) at `version` (None: the newest known).

    Raises UnknownName for an engine, ConfigError for a version that cannot be read.
    """
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in _PROFILES:
        raise UnknownName("engine", name, [*_PROFILES, *_ALIASES])
    module, cls = _PROFILES[key]
    profile: Profile = getattr(importlib.import_module(module), cls)(**({"version": version} if version else {}))
    return profile


def parse_version(text: str) -> tuple[int, int, int]:
    """`0.19.0`, `0.20.2rc1`, `v0.26` → (0, 20, 2). Raises ConfigError."""
    parts = text.strip().lstrip("vV").split(".")
    numbers = []
    for part in parts[:3]:
        digits = "".join(_leading_digits(part))
        if not digits or len(digits) > 6:
            break
        numbers.append(int(digits))
    if not numbers:
        raise ConfigError(f"version {text!r} is not like 0.19.0")
    return (*numbers, 0, 0, 0)[:3]  # type: ignore[return-value]


def _leading_digits(text: str) -> str:
    end = next((i for i, ch in enumerate(text) if not ch.isdecimal()), len(text))
    return text[:end]


def left_for_kv(num_bytes: float) -> str:
    """What is left, for a sentence: a size, or "nothing" where weights and overhead take more than there is."""
    return format_bytes(num_bytes) if num_bytes > 0 else "nothing"
