"""What the engine may be told. Frozen values, composed; CLI defaults are read from here, so help cannot drift."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from kvledger.errors import ConfigError, UnknownName
from kvledger.spec.kv_computed import check_block_size, computed_storage
from kvledger.units import GIB

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
Policy = Literal["continuous", "static", "orca"]
Queueing = Literal["fcfs", "priority"]
Activations = Literal["auto", "int8", "int8x2", "fp32"]
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: tokens per block (None: as the type has it), storage type, and bytes of the pool (None: a share
    of free memory).
    """

    block_size: int | None = None
    kv_dtype: str = "bf16"
    kv_memory_bytes: int | None = None
    prefix_caching: bool = True
    swap_bytes: int = 0  # host tier that preempted sequences may be swapped to
    disk_dir: str | None = None
    disk_bytes: int = 4 * GIB  # most that `disk_dir` keeps, per model and layout

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block size {self.block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}")
        _check_whole(self, "swap_bytes", "disk_bytes")
        _check_whole(self, "block_size", "kv_memory_bytes", low=None, optional=True)
        _check_flag(self, "prefix_caching")
        if not isinstance(self.kv_dtype, str):
            raise ConfigError(f"kv_dtype is the name of a type, not {self.kv_dtype!r}")
        check_block_size(computed_storage(self.kv_dtype), self.tokens_per_block)
        if self.kv_memory_bytes is not None and self.kv_memory_bytes <= 0:
            raise ConfigError(f"KV memory must be positive, got {self.kv_memory_bytes} bytes")
        if self.disk_dir is not None and (not isinstance(self.disk_dir, str) or not self.disk_dir.strip()):
            raise ConfigError(f"disk_dir is the path of a folder, not {self.disk_dir!r}")
        if self.disk_dir is not None and not self.prefix_caching:
            raise ConfigError("a disk tier keeps prefix blocks: it needs the prefix cache, which is off")

    @property
    def tokens_per_block(self) -> int:
        """`block_size`, or what is usual for the type."""
        return self.block_size or computed_storage(self.kv_dtype).usual_block_size


def kv_dtype_meant(name: str) -> str:
    """The KV type that an engine is told: `auto` is the default."""
    return CacheConfig().kv_dtype if name == "auto" else name


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs in a step: at most `max_num_seqs` sequences and `max_num_batched_tokens` new tokens."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    policy: Policy = "continuous"
    queueing: Queueing = "fcfs"
    chunked_prefill: bool = True  # False: every prompt in one step, as before Sarathi
    growth_tokens: int = 32  # room kept for each running sequence before another is admitted
    max_queue: int | None = None  # waiting requests; beyond it the server answers 503

    def __post_init__(self) -> None:
        _check_whole(self, "max_num_batched_tokens", "max_num_seqs", low=1)
        _check_whole(self, "growth_tokens")
        _check_whole(self, "max_queue", low=1, optional=True)
        _check_flag(self, "chunked_prefill")
        for name, known in (("policy", Policy), ("queueing", Queueing)):
            if getattr(self, name) not in get_args(known):
                raise UnknownName(name, str(getattr(self, name)), get_args(known))


@dataclass(frozen=True, slots=True)
class ExecConfig:
    """How the CPU executor computes: threads (None: all cores) and int8 terms per activation (see docs).

    `quantise` turns the matrices of safetensors into that type of GGUF as they are read; a GGUF file is used as it is.
    """

    num_threads: int | None = None
    activations: Activations = "auto"
    quantise: Literal["", "q8_0", "q4_1"] = ""

    def __post_init__(self) -> None:
        if self.quantise not in ("", "q8_0", "q4_1"):
            raise ConfigError(f"weights are quantised to q8_0 or q4_1, not {self.quantise!r}")
        if self.activations not in get_args(Activations):
            raise ConfigError(f"activations are {', '.join(get_args(Activations))}, not {self.activations!r}")
        _check_whole(self, "num_threads", low=None, optional=True)
        if self.num_threads is not None and not 0 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(f"num_threads must be at most {MAX_THREADS:,} and not negative, got {self.num_threads}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine is told. `max_model_len` None: the model's own context."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedulerConfig = field(default_factory=SchedulerConfig)
    exec: ExecConfig = field(default_factory=ExecConfig)
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _check_whole(self, "max_model_len", low=None, optional=True)


def _check_whole(config: object, *names: str, low: int | None = 0, optional: bool = False) -> None:
    """Raises ConfigError for a field that is no whole number of at least `low`, nor None where that is possible."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")
        if low is not None and value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}")


def _check_flag(config: object, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
