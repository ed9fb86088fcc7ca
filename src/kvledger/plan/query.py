"""What a plan is asked: a model, a device, how it is spread, what is sent to it. Checked here, answered elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvledger.errors import ConfigError
from kvledger.plan.profiles.base import Setup
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import FullKV
from kvledger.spec.model import ModelSpec

MOST_DEVICES = 1 << 16
MOST_TOKENS = 1 << 40  # of anything that is counted


@dataclass(frozen=True, slots=True)
class Query:
    """One question. None: the engine's, the model's or the device's own. Counts are at least 1.

    `context` is a whole request, `output` of it written; the first `prefix` tokens are shared by the share
    `hit_rate` of the requests. `batch` is the number of requests per replica to time (None: as many as fit).
    """

    model: ModelSpec
    device: DeviceSpec
    tp: int = 1
    pp: int = 1
    dp: int = 1
    context: int = 8192
    output: int = 512
    prefix: int = 0
    hit_rate: float = 1.0
    batch: int | None = None
    kv_dtype: str = "auto"
    weights: str | None = None
    engine: str = "vllm"
    engine_version: str | None = None
    block_size: int | None = None
    memory_fraction: float | None = None
    kv_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    efficiency: float = 1.0
    price_per_hour: float | None = None
    allow_long_context: bool = False
    dp_attention: bool = False  # TP ranks keep whole caches of different requests (DeepSeek-V3 deployments)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "context", "output"):
            _at_least(1, name, getattr(self, name))
        for name in ("batch", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            _at_least(1, name, getattr(self, name))
        if self.kv_memory_bytes is not None and self.kv_memory_bytes < 1:
            raise ConfigError(f"KV memory must be positive, got {self.kv_memory_bytes} bytes")
        _at_least(0, "prefix", self.prefix)
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(f"TP × PP × DP = {self.num_devices:,} devices; at most {MOST_DEVICES:,} make sense")
        if not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"hit rate must be between 0 and 1, got {self.hit_rate}")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < 1e6:
            raise ConfigError(f"price must be a positive number of dollars per hour, got {self.price_per_hour}")

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.dp

    @property
    def ranks(self) -> int:
        """Pools of one replica that hold different requests."""
        return self.tp if self.dp_attention else 1

    @property
    def scheme(self) -> str:
        """How the weights are stored."""
        return self.weights or self.model.dtype

    @property
    def cached(self) -> int:
        """Prompt tokens that a request finds in the prefix cache, on average."""
        return int(self.prefix * self.hit_rate)

    def setup(self) -> Setup:
        """The same for an engine's profile; the longest request is `context`."""
        return Setup(
            tp=self.tp, pp=self.pp, kv_dtype=self.kv_dtype, block_size=self.block_size, max_model_len=self.context,
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs,
            memory_fraction=self.memory_fraction, weight_dtype=self.weights, available_bytes=self.kv_memory_bytes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NumberTypes:
    """Smaller types that an engine offers, largest first."""

    weights: tuple[str, ...]
    kv: tuple[str, ...]


_GPU_TYPES = NumberTypes(("fp8", "awq"), ("fp8",))
_ENGINE_TYPES = {"llama.cpp": NumberTypes(("q8_0", "q4_k_m"), ("q8_0",)), "kvledger": NumberTypes((), ("int8",))}


def number_types(engine: str) -> NumberTypes:
    """What a lever or a search may try under `engine`."""
    return _ENGINE_TYPES.get(engine, _GPU_TYPES)


def check(query: Query) -> tuple[str, ...]:
    """Warnings about a query that can be answered. Raises ConfigError for one that cannot."""
    check_split(query.model, query.tp, query.pp)
    if query.dp_attention:
        check_dp_attention(query.model)
    if query.engine == "kvledger" and query.device.kind != "cpu":
        raise ConfigError(f"kvledger computes on CPUs, not on {query.device.name}; use --engine vllm or --device local")
    if query.output >= query.context:
        raise ConfigError(f"output {query.output:,} leaves no prompt in a context of {query.context:,} tokens")
    if query.prefix > query.context - query.output:
        room = query.context - query.output
        raise ConfigError(f"a prefix of {query.prefix:,} tokens is longer than the prompt of {room:,}")
    return check_context(query)


def check_dp_attention(model: ModelSpec) -> None:
    """Raises ConfigError for a model whose KV heads TP could split instead."""
    if any(isinstance(x.cache, FullKV) for x in model.layers):
        raise ConfigError(
            f"DP attention is for latent caches, which TP replicates; {model.name} has KV heads: use TP or DP"
        )


def unsplit_attention(model: ModelSpec) -> ModelSpec:
    """`model` with attention weights whole on every rank, as DP attention keeps them."""
    layers = tuple(
        replace(x, weights=tuple(replace(w, split="") if w.part == "attention" else w for w in x.weights))
        for x in model.layers
    )
    return replace(model, layers=layers)


def check_split(model: ModelSpec, tp: int, pp: int) -> None:
    """Raises ConfigError where `tp` does not divide the heads or `pp` exceeds the layers."""
    heads = {x.cache.num_kv_heads for x in model.layers if isinstance(x.cache, FullKV)}
    if not _splits(model.num_heads, heads, tp):
        fits = [t for t in range(1, model.num_heads + 1) if _splits(model.num_heads, heads, t)]
        near = sorted(sorted(fits, key=lambda t: abs(t - tp))[:2])
        kv = f" and {', '.join(map(str, sorted(heads)))} KV heads" if heads else ""
        raise ConfigError(
            f"TP = {tp} does not divide {model.name}: {model.num_heads} query heads{kv}; "
            f"nearest that does: {' or '.join(map(str, near))}"
        )
    if pp > model.num_layers:
        raise ConfigError(f"PP = {pp} is more than the {model.num_layers} layers of {model.name}")


def _splits(num_heads: int, kv_heads: set[int], tp: int) -> bool:
    return num_heads % tp == 0 and all(h % tp == 0 or tp % h == 0 for h in kv_heads)


def check_context(query: Query) -> tuple[str, ...]:
    """Warnings about a context beyond what the model was trained or made for. Raises ConfigError beyond both."""
    model, context = query.model, query.context
    if context > MOST_TOKENS:
        raise ConfigError(f"a context of {context:,} tokens cannot be meant")
    limit = model.max_context
    if context <= limit:
        stretched = model.trained_context is not None and context > model.trained_context
        return (
            (f"beyond the {model.trained_context:,} tokens trained; rope scaling stretches to {limit:,}",)
            if stretched
            else ()
        )
    if model.trained_context is not None or query.allow_long_context:
        return (
            f"context {context:,} is beyond the {limit:,} tokens of {model.name}: memory is counted, quality is not",
        )
    raise ConfigError(
        f"context {context:,} is beyond the {limit:,} tokens of {model.name}, which has no rope scaling; "
        f"nearest: {limit:,}; kvledger plan --allow-long-context counts it all the same"
    )


def _at_least(low: int, name: str, value: int | None) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value:,}")
    if value is not None and value > MOST_TOKENS:
        raise ConfigError(f"{name} {str(value)[:24]} cannot be meant; at most {MOST_TOKENS:,}")
