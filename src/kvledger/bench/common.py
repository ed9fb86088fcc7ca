"""Small parts that the lesson's measurements share: engines without kernels, requests of an exact length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from kvledger.build import assemble
from kvledger.clock import VirtualClock
from kvledger.engine import Engine
from kvledger.exec.simulated import SimulatedExecutor, StepTimer
from kvledger.metrics import Metrics
from kvledger.plan.pool import PoolPlan
from kvledger.sched.sequence import Request
from kvledger.spec.config import EngineConfig
from kvledger.spec.model import ModelSpec
from kvledger.spec.sampling import SamplingParams
from kvledger.spec.step import StepShape


def plain(value: Any) -> Any:
    """Frozen results → JSON values: fields and properties of dataclasses, without the times of single requests."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in fields(value)] + [
            name for name, kind in vars(type(value)).items() if isinstance(kind, property)
        ]
        return {name: plain(getattr(value, name)) for name in names if name != "requests"}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


class Instant:
    """A timer for runs that only count."""

    def seconds(self, shape: StepShape) -> float:
        return 0.0


def simulated(spec: ModelSpec, pool: PoolPlan, timer: StepTimer, config: EngineConfig) -> Engine:
    """An engine without kernels whose clock stands still between steps."""
    engine = assemble(spec, pool, config, SimulatedExecutor(pool, timer))
    engine.clock = VirtualClock()
    return engine


def exactly(num_tokens: int, **params: Any) -> SamplingParams:
    """Greedy, that many tokens, no early end."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **params)


def run_to_end(engine: Engine, requests: Iterable[Request]) -> Metrics:
    """Add all, step until nothing is left."""
    metrics = Metrics()
    engine.listeners.append(metrics)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.listeners.remove(metrics)
    return metrics
