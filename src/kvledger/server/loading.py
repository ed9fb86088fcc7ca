"""From a model's name and the engine's configuration to what the server needs: engine, text, limits, books.

Runs in the engine's thread and may take long the first time (download, compilation); it says how far it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvledger.build import Loaded, build_engine
from kvledger.cache.tiers import Tiers
from kvledger.data.devices import local_device
from kvledger.engine import Engine
from kvledger.errors import ConfigError
from kvledger.plan.pool import PoolPlan, weights_in_memory
from kvledger.plan.roofline import Roofline
from kvledger.sched.sequence import Request
from kvledger.server.ledger import live_books, requests_at_contexts
from kvledger.server.served import Served, StepCosts
from kvledger.server.state import Loader, Progress
from kvledger.spec.config import EngineConfig
from kvledger.spec.kv import KVLayout
from kvledger.spec.model import ModelSpec
from kvledger.spec.sampling import SamplingParams
from kvledger.spec.step import StepShape, num_tokens
from kvledger.text.chat import ChatTemplate, compile_template, require_template
from kvledger.text.structured import GrammarCompiler
from kvledger.units import format_bytes, format_count, format_tokens

# what a model's makers recommend where the file does not say; source: the model's card
RECOMMENDED: dict[str, dict[str, float]] = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
_SAMPLING_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


def make_loader(
    model: str,
    config: EngineConfig,
    names: tuple[str, ...] = (),
    defaults: Mapping[str, float] | None = None,
    announce: Callable[[Loaded, Served], None] = lambda loaded, served: None,
) -> Loader:
    """A loader for `ServerState`. `defaults` are sampling values that go before the model's own recommendation.

    Raises ConfigError for a name that nobody could ask for.
    """
    if not all(name.strip() for name in names):
        raise ConfigError("a name that the model answers to is empty")

    def load(progress: Progress) -> tuple[Served, Engine]:
        loaded = build_engine(model, config, progress)
        served = describe(loaded, names or served_names(model, loaded), config, sampling_defaults(model, loaded))
        if defaults:
            served = _with_defaults(served, defaults)
        progress("warming up: the first step may compile for a minute or two")
        warm_up(loaded.engine)
        return replace(served, on_ready=lambda: announce(loaded, served)), loaded.engine

    return load


def describe(loaded: Loaded, names: tuple[str, ...], config: EngineConfig, defaults: Mapping[str, float]) -> Served:
    """What the routes know of the model."""
    source = loaded.metadata.get("tokenizer.chat_template")
    knows_tools = loaded.template is not None and (
        loaded.template.tool_template is not None or (isinstance(source, str) and "tools" in source)
    )
    weights_bytes = weights_in_memory(loaded.model)
    return Served(
        names=names,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model.vocab_size,
        tokenizer=loaded.tokenizer,
        render=lambda messages, **given: render(loaded.template, messages, **given),
        compile_constraint=GrammarCompiler(loaded.tokenizer).compile,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
        knows_tools=knows_tools,
        defaults=defaults,
        cache_info=cache_info(loaded.pool, config),
        step_cost=cost_of_steps(loaded.model, loaded.pool.layout),
        books=lambda engine: live_books(loaded.model.name, weights_bytes, engine),
    )


def cost_of_steps(model: ModelSpec, layout: KVLayout) -> StepCosts:
    """The planner's roofline of this model, as metrics: (FLOPs, bytes read, bytes written) of a step's shape."""
    roofline = Roofline(model, local_device(), layout)

    def cost(shape: StepShape) -> tuple[float, float, float]:
        read = roofline.weights_read(shape) + sum(layout.read_bytes(w.context + w.new_tokens) for w in shape)
        return roofline.flops(shape), read, num_tokens(shape) * layout.bytes_per_token

    return cost


def _with_defaults(served: Served, defaults: Mapping[str, float]) -> Served:
    return replace(served, defaults={**served.defaults, **defaults})


def render(
    template: ChatTemplate | None,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    **given: Any,
) -> str:
    """The chat template's text, by the client's own template where it sent one. Raises BadRequest."""
    known = require_template(template)
    if chat_template is not None:
        known = compile_template(chat_template, names=known.names)
    opens = add_generation_prompt and not continue_final_message
    text = known.render(messages, add_generation_prompt=opens, **given)
    if not continue_final_message:
        return text
    last = messages[-1]["content"].rstrip()
    return text[: text.rindex(last) + len(last)] if last in text else text


def served_names(model: str, loaded: Loaded) -> tuple[str, ...]:
    """Names the model answers to: as it was asked for, and as its file calls it."""
    asked = loaded.path.stem if Path(model).exists() else model
    inner = loaded.metadata.get("general.name")
    found = [asked, loaded.path.stem, *([inner] if isinstance(inner, str) and inner else [])]
    return tuple(dict.fromkeys(found))


def sampling_defaults(model: str, loaded: Loaded) -> dict[str, float]:
    """Sampling that the file recommends, else the model's card, else nothing (OpenAI's defaults)."""
    found = {
        ours: float(value)
        for theirs, ours in _SAMPLING_KEYS.items()
        if isinstance(value := loaded.metadata.get(f"general.sampling.{theirs}"), int | float)
    }
    names = f"{model} {loaded.metadata.get('general.name', '')}".lower()
    return found or next((values for name, values in RECOMMENDED.items() if name in names), {})


def cache_info(pool: PoolPlan, config: EngineConfig) -> dict[str, object]:
    """Labels of `vllm:cache_config_info`, under vLLM's names."""
    return {
        "block_size": pool.layout.block_size,
        "cache_dtype": config.cache.kv_dtype,
        "enable_prefix_caching": config.cache.prefix_caching,
        "num_gpu_blocks": pool.num_blocks,
        "num_cpu_blocks": pool.layout.blocks_in(config.cache.swap_bytes),
        "kv_cache_memory_bytes": pool.pool_bytes,
    }


def warm_up(engine: Engine) -> None:
    """One short request of the engine's own, so that nobody's first request waits for compilation. In no books."""
    with engine.scheduler.prefix.aside():
        engine.add(Request("warm-up", tuple(range(32)), SamplingParams(max_tokens=2, ignore_eos=True)))
        while engine.has_work:
            engine.step()


def plan_lines(model: ModelSpec, pool: PoolPlan, max_model_len: int) -> list[tuple[str, str]]:
    """The plan that `serve` prints at its start: label and text."""
    at = requests_at_contexts(pool, max_model_len)
    return [
        (
            "model",
            f"{model.name}: {model.architecture}, {model.num_params / 1e6:,.1f} M weights, context {max_model_len}",
        ),
        ("weights", format_bytes(weights_in_memory(model))),
        ("KV budget", f"{format_bytes(pool.budget_bytes)}: {pool.reason}"),
        (
            "KV pool",
            f"{format_count(pool.num_blocks)} blocks × {format_count(pool.layout.block_bytes)} B "
            f"({pool.layout.block_size} tokens each) = {format_bytes(pool.pool_bytes)}",
        ),
        ("requests", ", ".join(f"{format_count(n)} of {format_tokens(c)}" for c, n in at.items())),
    ]


def tier_lines(tiers: Tiers) -> list[tuple[str, str]]:
    """What `serve` says at its start of the tiers beyond the pool; nothing where there are none."""
    lines, disk, num_slots = [], tiers.disk, tiers.plan.num_host_slots
    if num_slots:
        lines.append(("host tier", f"{format_count(num_slots)} blocks for preempted sequences"))
    if disk is not None:
        size = f"{format_count(disk.num_records)} blocks = {format_bytes(disk.num_records * disk.record_bytes)}"
        lines.append(("disk tier", f"{size} in {disk.path.parent}, {format_count(disk.num_found)} found there"))
    return lines
