"""How fast the engine is: prefill and decode of B equal requests, beside what the machine could do at most.

    kvledger bench engine --batch 64 --prompt 128 --output 32 --json

Prompts are random ids, so nothing is found in the prefix cache. Prefill and decode are measured in separate runs:
the first asks for one token each, the second is timed over the steps in which all sequences decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from kvledger.bench.common import plain
from kvledger.build import Loaded, Progress, build_engine
from kvledger.data.devices import local_device
from kvledger.engine import StepReport
from kvledger.errors import ConfigError, DoesNotFit, about_file
from kvledger.llm import engine_config
from kvledger.metrics import Metrics
from kvledger.plan.roofline import Roofline
from kvledger.sched.sequence import Request
from kvledger.spec.device import DeviceSpec
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.kv_computed import offered_name
from kvledger.spec.sampling import SamplingParams
from kvledger.spec.step import Work
from kvledger.units import format_bytes
from kvledger.weights.open import open_weights
from kvledger.weights.store import resolve

if TYPE_CHECKING:
    from kvledger.exec.cpu import CpuExecutor


@dataclass(frozen=True, slots=True)
class EngineBench:
    """One measurement. `ceiling_*` are the shares of the roofline's bound that were reached.

    `overhead` is the share of the decode steps' time spent outside the executor; `waste` the share of the blocks held
    at the end that no token fills. `ceiling_measured` is False where the machine's peaks are assumed.
    """

    model: str
    batch: int
    prompt: int
    output: int
    num_threads: int
    prefill_s: float
    decode_s: float
    step_p50_s: float
    step_max_s: float
    overhead: float
    ceiling_prefill: float
    ceiling_decode: float
    ceiling_measured: bool
    kv_dtype: str
    kv_bytes: int
    kv_pool_bytes: int
    waste: float
    num_decode_steps: int
    notes: tuple[str, ...] = ()  # what the user should know of the model, as `Loaded` has it

    def as_json(self) -> dict[str, Any]:
        """All fields, and tokens per second."""
        found: dict[str, Any] = plain(self)
        return found

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.batch * self.prompt / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        return self.batch * self.num_decode_steps / self.decode_s if self.decode_s else 0.0


def bench_engine(
    model: str = "smollm2", batch: int = 1, prompt: int = 128, output: int = 64, repeats: int = 3,
    progress: Progress | None = None, **options: Any,
) -> EngineBench:  # fmt: skip
    """Load the model, warm up, measure `repeats` times and keep the median. Options as for `LLM`.

    Raises ConfigError where the model's context does not hold a request, DoesNotFit where the pool does not the batch.
    """
    _check_context(model, prompt, output)
    loaded = load_for(model, [(batch, prompt, output)], progress, **options)
    try:
        _check_room(loaded, batch, prompt + output)
        return measure(loaded, batch, prompt, output, repeats)
    finally:
        loaded.engine.close()


def _check_context(model: str, prompt: int, output: int) -> None:
    """Before weights are read. A token of room is left, as the scheduler wants it."""
    path = resolve(model)
    with about_file(path.name):
        weights = open_weights(path)
        spec = model_from_gguf(weights.metadata, weights.facts, str(path))
    if prompt + output >= spec.max_context:
        asked = f"prompts of {prompt:,} tokens and {output:,} tokens written"
        raise ConfigError(f"{asked} are more than the context of {spec.max_context:,} holds with a token to spare")


def _check_room(loaded: Loaded, batch: int, num_tokens: int) -> None:
    """Raises DoesNotFit where not all sequences fit side by side: the rest would wait, and nothing be measured."""
    pool, in_flight = loaded.pool, loaded.config.sched.max_num_batched_tokens
    fits = pool.requests_at(num_tokens, in_flight)
    if fits < batch:
        missing = batch * pool.layout.blocks_for(num_tokens, in_flight) * pool.layout.block_bytes - pool.pool_bytes
        raise DoesNotFit(
            f"{batch:,} sequences of {num_tokens:,} tokens do not fit the KV pool of {format_bytes(pool.pool_bytes)}: "
            f"{format_bytes(missing)} are missing, {fits:,} sequences fit", missing,
        )  # fmt: skip


def load_for(
    model: str, shapes: Sequence[tuple[int, int, int]], progress: Progress | None = None, **options: Any
) -> Loaded:
    """An engine with seats and context for the largest of the shapes (batch, prompt, output), unless told otherwise.

    The pool follows: it is never larger than these can fill.
    """
    seats, context = max(b for b, _, _ in shapes), max(p + g for _, p, g in shapes) + 1
    options = {"max_num_seqs": seats, "max_model_len": context, "prefix_caching": False} | options
    return build_engine(model, engine_config(**options), progress)


def measure(loaded: Loaded, batch: int, prompt: int, output: int, repeats: int = 3) -> EngineBench:
    """Prefill and decode of `batch` sequences, the median of `repeats` runs after a short warm-up."""
    run_batch(loaded, batch, min(prompt, 32), 2)
    prefills = [_busy(run_batch(loaded, batch, prompt, 1)) for _ in range(repeats)]
    runs = [_decode_steps(run_batch(loaded, batch, prompt, output), batch) for _ in range(repeats)]
    steps = sorted(runs, key=_busy)[len(runs) // 2]
    decode_s, prefill_s = _busy(steps), median(prefills)
    roofline = ceiling(loaded, local_device())
    middle, num_threads = prompt + output // 2, cast("CpuExecutor", loaded.engine.executor).num_threads
    return EngineBench(
        loaded.model.name, batch, prompt, output, num_threads, prefill_s, decode_s,
        median(s.ended_s - s.started_s for s in steps) if steps else 0.0,
        max((s.ended_s - s.started_s for s in steps), default=0.0),
        1.0 - sum(s.exec_s for s in steps) / decode_s if decode_s else 0.0,
        roofline.seconds((Work(0, prompt),) * batch) / prefill_s,
        roofline.seconds((Work(middle, 1),) * batch) * len(steps) / decode_s if decode_s else 0.0,
        roofline.device.measured, offered_name(loaded.pool.layout.storage),
        batch * loaded.pool.layout.bytes_for(prompt + output - 1), loaded.pool.pool_bytes,
        _waste(loaded, prompt + output - 1), len(steps), loaded.notes,
    )  # fmt: skip


def ceiling(loaded: Loaded, device: DeviceSpec) -> Roofline:
    """The bound of what the engine computes on this machine: integer arithmetic where that has a peak for it."""
    dtype = "int8" if "int8" in device.peak_flops else "fp32"
    return Roofline(loaded.model, device, loaded.pool.layout, loaded.model.weight_bytes, dtype, skips_unread=True)


def run_batch(loaded: Loaded, batch: int, prompt: int, output: int, seed: int = 0) -> list[StepReport]:
    """`batch` random prompts of `prompt` tokens, `output` tokens each → the steps that it took."""
    metrics, rng, engine = Metrics(), Random(seed), loaded.engine
    engine.listeners.append(metrics)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for index in range(batch):
        ids = tuple(rng.randrange(loaded.model.vocab_size) for _ in range(prompt))
        engine.add(Request(f"bench-{index}", ids, params))
    while engine.has_work:
        engine.step()
    engine.listeners.remove(metrics)
    return list(metrics.steps)


def _busy(steps: Sequence[StepReport]) -> float:
    return sum(step.ended_s - step.started_s for step in steps)


def _decode_steps(steps: Sequence[StepReport], batch: int) -> list[StepReport]:
    return [step for step in steps if step.num_seqs == batch and step.num_tokens == batch]


def _waste(loaded: Loaded, num_tokens: int) -> float:
    layout = loaded.pool.layout
    return 1.0 - num_tokens * len(layout.groups) / (layout.blocks_for(num_tokens) * layout.block_size)
