"""Fit the constants of `plan.profiles.overhead` to start-up logs, and say how well they carry to models left out.

    python scripts/fit_overheads.py ../shared/cases/engine_logs.jsonl

Prints the constants (to be copied into `Constants`), the records behind each, and the error of the available KV memory
with the fitted constants: in sample, and with every model in turn left out of the fit.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvledger.errors import KvledgerError
from kvledger.plan.profiles.base import parse_version
from kvledger.plan.profiles.overhead import (
    FITTED,
    LARGE_DEVICE_BYTES,
    Constants,
    default_batch,
    forward_bytes,
    has_vision,
    moe_workspace,
)
from kvledger.plan.profiles.vllm import VllmProfile
from kvledger.plan.verify.checks import contradicts, setup_of
from kvledger.plan.verify.devices import device_of
from kvledger.plan.verify.record import Record, from_row
from kvledger.plan.verify.shapes import Shape, shape_of
from kvledger.spec.device import DeviceSpec
from kvledger.units import GIB


class Sample(NamedTuple):
    """A vLLM record whose model, device and version are known."""

    record: Record
    shape: Shape
    device: DeviceSpec
    version: tuple[int, int, int]


def load(path: Path) -> list[Sample]:
    """All usable records of `path`."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = from_row(json.loads(line))
        device = device_of(record.gpu)
        if record.engine != "vllm" or record.is_fork or record.version is None or device is None:
            continue
        try:
            found.append(Sample(record, shape_of(record), device, parse_version(record.version)))
        except KvledgerError:
            continue
    return found


def fit(samples: Sequence[Sample]) -> Constants:
    """Constants from `samples` alone; those that no sample tells of stay as they are."""
    new = [s for s in samples if s.version >= (0, 17, 0) and _bound_by_sampler(s)]
    old = [s for s in samples if (0, 8, 0) <= s.version < (0, 17, 0) and _bound_by_sampler(s)]
    found = FITTED
    if len(new) > 3:
        logit, hidden, vision = _least_squares([_features(s) for s in new], [_activation(s) for s in new])
        found = replace(found, logit_bytes=logit, hidden_factor=hidden, vision=vision * GIB)
    if old:
        per_logit = [(_activation(s) - found.hidden_factor * _features(s)[1]) / _features(s)[0] for s in old]
        found = replace(found, logit_bytes_old=statistics.median(per_logit))
    return _fit_non_torch(samples, _fit_graphs(samples, found))


def _fit_graphs(samples: Sequence[Sample], c: Constants) -> Constants:
    """Graphs as captured after the pool; since 0.21 the engine estimates the same beforehand."""
    known = [s for s in samples if s.record.cuda_graph_gib]
    if len(known) < 3:
        return c
    layers = [s.shape.model.num_layers / s.record.pp for s in known]
    base, layer = _least_squares(
        [(GIB, n * GIB) for n in layers], [(s.record.cuda_graph_gib or 0) * GIB for s in known]
    )
    return replace(c, graph_base=base * GIB, graph_layer=layer * GIB)


def _fit_non_torch(samples: Sequence[Sample], c: Constants) -> Constants:
    def median(keep: Callable[[Sample], bool], default: float) -> float:
        sizes = [s.record.non_torch_gib * GIB for s in samples if s.record.non_torch_gib and keep(s)]
        return statistics.median(sizes) if sizes else default

    def one(s: Sample) -> bool:
        return s.record.tp == 1 and s.record.pp == 1

    def many(s: Sample) -> bool:
        return s.record.tp > 1 and s.device.memory_bytes >= LARGE_DEVICE_BYTES and s.version >= (0, 19, 0)

    two = median(lambda s: many(s) and s.record.tp == 2, c.non_torch_many)
    four = median(lambda s: many(s) and s.record.tp == 4, two + 2 * c.non_torch_rank)
    return replace(
        c,
        non_torch_one=median(lambda s: one(s) and s.version >= (0, 17, 0), c.non_torch_one),
        non_torch_v0=median(lambda s: one(s) and s.version < (0, 8, 0), c.non_torch_v0),
        non_torch_many=two,
        non_torch_rank=(four - two) / 2,
    )


def _bound_by_sampler(s: Sample) -> bool:
    """Whether the record's activation is the sampler's peak, as the rules see it, with a clear margin."""
    if s.record.activation_gib is None or s.record.pp > 1 or s.shape.model.activation_dtype == "fp32":
        return False
    return s.record.kv_dtype != "fp32" and _features(s)[0] * 12 > 1.1 * forward_bytes(
        s.shape.model, s.record.tp, _batch(s).num_tokens
    )


def _batch(s: Sample):
    setup = setup_of(s.record, s.shape, None)
    return default_batch(s.device, s.version, setup, s.record.max_model_len or s.shape.model.max_context)


def _features(s: Sample) -> tuple[float, float, float]:
    """What the three constants of the new era multiply: logits, hidden bytes, GiB of a vision tower."""
    model, batch = s.shape.model, _batch(s)
    return batch.num_seqs * model.vocab_size, batch.num_tokens * model.hidden_size * 2, float(has_vision(model)) * GIB


def _activation(s: Sample) -> float:
    """Logged activation without the expert workspace, whose size needs no constant."""
    spaces = moe_workspace(s.shape.model, s.record.tp, _batch(s).num_tokens)
    return (s.record.activation_gib or 0.0) * GIB - spaces


def _least_squares(features: Iterable[tuple[float, ...]], targets: Sequence[float]) -> list[float]:
    """Least absolute deviations by iterated weights: a few odd records must not bend the rest."""
    matrix, goal = np.array(list(features)), np.array(targets)
    weights = np.ones(len(goal))
    solution = np.zeros(matrix.shape[1])
    for _ in range(50):
        solution, *_ = np.linalg.lstsq(matrix * weights[:, None], goal * weights, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ solution - goal), 0.01 * GIB))
    return [float(x) for x in solution]


def errors(samples: Sequence[Sample], constants: Constants) -> list[tuple[float, bool]]:
    """(relative error of the available memory, whether the band holds it) of the records that allow it."""
    found = []
    for s in samples:
        logged = s.record.available_gib
        if logged is None or s.record.weights_gib is None or s.record.memory_fraction is None:
            continue
        if contradicts(s.record, s.device):
            continue
        profile = VllmProfile(s.record.version or "", constants=constants)
        band = profile.budget(s.shape.model, s.device, setup_of(s.record, s.shape, None))[0]
        found.append((band.mid / GIB / logged - 1, band.low <= logged * GIB <= band.high))
    return found


def graph_error(samples: Sequence[Sample], c: Constants) -> float:
    """Mean relative error of captured graphs."""
    known = [(s, s.record.cuda_graph_gib) for s in samples if s.record.cuda_graph_gib]
    sizes = [
        (c.graph_base + c.graph_layer * s.shape.model.num_layers / s.record.pp) / GIB / logged for s, logged in known
    ]
    return statistics.mean(abs(size - 1) for size in sizes)


def left_out(samples: Sequence[Sample]) -> list[tuple[float, bool]]:
    """The same with each model predicted by constants that never saw it."""
    found = []
    for name in sorted({s.shape.model.name for s in samples}):
        rest = [s for s in samples if s.shape.model.name != name]
        found += errors([s for s in samples if s.shape.model.name == name], fit(rest))
    return found


def summary(label: str, found: Sequence[tuple[float, bool]]) -> str:
    """One line: mean and worst absolute error, share inside the band."""
    sizes = [abs(e) for e, _ in found]
    inside = sum(ok for _, ok in found)
    return f"{label}: {len(found)} records, mean absolute error {100 * statistics.mean(sizes):.2f} %, worst " \
        f"{100 * max(sizes):.1f} %, {inside} inside the band"  # fmt: skip


def main(path: str) -> None:
    samples = load(Path(path))
    constants = fit(samples)
    for name in Constants.__slots__:
        value, now = getattr(constants, name), getattr(FITTED, name)
        unit = ("", 1.0) if name.startswith(("logit", "hidden")) else (" GiB", GIB)
        print(f"{name:20s} fitted {value / unit[1]:8.3f}{unit[0]}   in use {now / unit[1]:8.3f}{unit[0]}")
    print(summary("in use   ", errors(samples, FITTED)))
    print(summary("in sample", errors(samples, constants)))
    print(summary("left out ", left_out(samples)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "../shared/cases/engine_logs.jsonl")
