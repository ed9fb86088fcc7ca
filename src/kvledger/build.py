"""A model's name and a configuration → a running engine with exactly the pool that the plan says.

The only place where weights, executor and scheduler meet. Heavy imports happen inside, so that importing this is cheap.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvledger.cache.tiers import TierPlan
from kvledger.data.devices import local_device
from kvledger.data.host import host_memory
from kvledger.engine import Engine
from kvledger.errors import ConfigError, about_file
from kvledger.plan.pool import PoolPlan, check_memory, local_pool
from kvledger.plan.roofline import Roofline
from kvledger.sched.scheduler import Scheduler
from kvledger.spec.config import EngineConfig
from kvledger.spec.model import ModelSpec
from kvledger.spec.step import Work
from kvledger.units import format_bytes

if TYPE_CHECKING:
    from kvledger.exec.base import Executor
    from kvledger.text.chat import ChatTemplate
    from kvledger.text.tokenizer import Tokenizer
    from kvledger.weights.open import WeightsFile

Progress = Callable[[str], None]
_LISTED = 3  # tensors that a note names
_LOG = logging.getLogger("kvledger")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to answer. `template` None: the file has no chat template. `notes`: for the user."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model: ModelSpec
    pool: PoolPlan
    max_model_len: int
    path: Path
    metadata: Mapping[str, object]
    config: EngineConfig
    notes: tuple[str, ...] = ()


def build_engine(model: str | Path, config: EngineConfig | None = None, progress: Progress | None = None) -> Loaded:
    """Find (or fetch) the model, plan the pool, load the weights, start the engine.

    `progress` is told in words what is being done; without it, notes on the model are logged. Raises UnknownName,
    FetchError, DamagedFile, UnsupportedModel, DoesNotFit, ConfigError.
    """
    say = progress or _say_nothing
    path = _locate(str(model), say)
    with about_file(path.name):
        loaded = _load(path, config or EngineConfig(), say)
    if progress is None:
        for note in loaded.notes:
            _LOG.warning("%s: %s", loaded.model.name, note)
    return loaded


def _load(path: Path, config: EngineConfig, say: Progress) -> Loaded:
    from kvledger.exec.block_store import BlockStore
    from kvledger.exec.cpu import CpuExecutor
    from kvledger.spec.from_gguf import model_from_gguf
    from kvledger.text.chat import ChatTemplate
    from kvledger.text.tokenizer import Tokenizer
    from kvledger.weights.open import open_weights

    gguf = open_weights(path, config.exec.quantise.upper())
    spec = model_from_gguf(gguf.metadata, gguf.facts, str(path))
    max_model_len = context_of(spec, config)
    memory = host_memory()
    check_memory(spec, config, memory[0])
    pool = local_pool(spec, config, *memory)
    tokenizer = Tokenizer.from_metadata(gguf.metadata)
    template = ChatTemplate.from_metadata(gguf.metadata, tokenizer)
    namespace = _fingerprint(gguf, pool, config)
    tiers = plan_tiers(spec, pool, config, namespace)
    store = BlockStore(tiers.num_host_slots, tiers.disk)
    executor = CpuExecutor(gguf, spec, pool.layout, pool.num_blocks, config.exec, _in_percent(say), store)
    engine = assemble(spec, pool, config, executor, namespace, tiers)
    notes = (*_notes(gguf, config), *_unread(executor.unread))
    return Loaded(engine, tokenizer, template, spec, pool, max_model_len, path, gguf.metadata, config, notes)


def assemble(
    spec: ModelSpec,
    pool: PoolPlan,
    config: EngineConfig,
    executor: Executor,
    namespace: bytes = b"",
    tiers: TierPlan | None = None,
) -> Engine:
    """An engine over any executor that has the planned blocks."""
    scheduler = Scheduler(
        pool, config.sched, context_of(spec, config), prefix_caching=config.cache.prefix_caching,
        vocab_size=spec.vocab_size, namespace=namespace, tiers=tiers,
    )  # fmt: skip
    return Engine(scheduler, executor)


def plan_tiers(spec: ModelSpec, pool: PoolPlan, config: EngineConfig, namespace: bytes) -> TierPlan:
    """Host slots and disk records as configured. Raises ConfigError where the disk cannot be used.

    Moving a block out and in again is four passes over its bytes; recomputing is a prefill on the local roofline.
    """
    cache, device, available_bytes = config.cache, local_device(), host_memory()[1]
    if cache.swap_bytes > available_bytes:
        free = f"the {format_bytes(available_bytes)} of memory that are free"
        raise ConfigError(f"a host tier of {format_bytes(cache.swap_bytes)} is more than {free}")
    roofline = Roofline(spec, device, pool.layout, compute_dtype="int8" if "int8" in device.peak_flops else "fp32")

    def prefers_swap(num_tokens: int, num_blocks: int) -> bool:
        move_s = 4 * num_blocks * pool.layout.block_bytes / device.bandwidth_bytes_per_s
        return move_s < roofline.seconds((Work(0, num_tokens),))

    disk = None
    if cache.disk_dir is not None:
        from kvledger.cache.disk import DiskTier

        folder = Path(os.path.expanduser(cache.disk_dir))  # a user who is not there stays as written
        disk = DiskTier(folder, cache.disk_bytes, pool.layout.block_bytes, namespace)
    return TierPlan(pool.layout.blocks_in(cache.swap_bytes), disk, prefers_swap)


def context_of(spec: ModelSpec, config: EngineConfig) -> int:
    """The longest prompt and output together. Raises ConfigError beyond what the model knows."""
    if config.max_model_len is None:
        return spec.max_context
    if not 2 <= config.max_model_len <= spec.max_context:
        limit = f"2 … {spec.max_context}, the context of {spec.name}"
        raise ConfigError(f"max_model_len {config.max_model_len} is not within {limit}")
    return config.max_model_len


def _notes(weights: WeightsFile, config: EngineConfig) -> tuple[str, ...]:
    """What happens to the weights that nobody asked for: types that no kernel reads are converted."""
    from kvledger.model.packing import requantised

    found = requantised(weights.facts)
    if not found:
        return ()
    kept = "float32" if config.exec.activations == "fp32" else "8 bits"
    tensors = ", ".join(f"{count} of {kind}" for kind, count in found.items())
    return (f"matrices are dequantised and kept in {kept}, no kernel reads their type: {tensors}",)


def _unread(names: Sequence[str]) -> Iterator[str]:
    """What the file has and the program does not compute with."""
    if names:
        listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        yield f"answers may be wrong: {tensors} of the file, unknown for this architecture, not computed with: {listed}"


def _locate(name: str, say: Progress) -> Path:
    from kvledger.weights.store import resolve

    say(f"looking for {name}")
    return resolve(name, lambda done, total: say(_share("fetching", done, total)))


def _share(what: str, done: int, total: int | None) -> str:
    return f"{what} {done / 1e6:.0f} MB" if not total else f"{what} {100 * done // total} % of {total / 1e6:.0f} MB"


def _in_percent(say: Progress) -> Callable[[float], None]:
    """Tell shares in steps of ten per cent."""
    told = -1

    def tell(share: float) -> None:
        nonlocal told
        if int(share * 10) > told:
            told = int(share * 10)
            say(f"loading weights {share:.0%}")

    return tell


def _say_nothing(text: str) -> None:
    return


def _fingerprint(weights: WeightsFile, pool: PoolPlan, config: EngineConfig) -> bytes:
    """Tells apart caches that must not be mixed. On disk that includes everything that changes a bit of K or V.

    Another fine-tune has tensors of the same names and shapes, so the files themselves are hashed where blocks outlive
    the process: about a second per GB, once.
    """
    facts: tuple[object, ...] = (sorted(weights.facts.items()), repr(pool.layout))
    if config.cache.disk_dir is not None:
        from kvledger import __version__
        from kvledger.kernels.isa import ISA

        facts += (config.exec.activations, repr(ISA), __version__, _content_digests(weights.path))
    return hashlib.sha256(repr(facts).encode()).digest()


def _content_digests(path: Path) -> list[tuple[str, str]]:
    """(name, SHA-256) of a model's file, or of the files of its folder that hold weights and shape."""
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    found = []
    for file in files:
        with file.open("rb") as content:
            found.append((file.name if path.is_dir() else "", hashlib.file_digest(content, "sha256").hexdigest()))
    return found
