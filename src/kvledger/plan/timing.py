"""Step times of one replica spread over TP ranks and PP stages: floors from the roofline, plus what ranks exchange.

A TP group is priced as one device with the peaks of all ranks and the memory traffic of one. Pipeline stages work
on micro-batches in turn, so a request waits for the whole model, `pp` micro-batches run at a time, and a device
sees its own stage only. Exchange is counted by bytes; the latency of a message is not, so all figures are floors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kvledger.errors import ConfigError
from kvledger.plan.roofline import Roofline, StepCost
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import KVLayout
from kvledger.spec.model import ModelSpec
from kvledger.spec.step import Work
from kvledger.spec.weights import WeightBytes, stage_weights
from kvledger.units import cdiv

ACTIVATION_BYTES = 2  # activations travel between ranks in 16 bits
# number types that can multiply weights of a scheme, best first; a device uses the first that it has
_COMPUTE = {
    "fp8": ("fp8", "bf16", "fp16"), "fp8_block": ("fp8", "bf16", "fp16"), "fp8_channel": ("fp8", "bf16", "fp16"),
    "mxfp8": ("fp8", "bf16", "fp16"), "int8": ("int8", "bf16", "fp16"), "nvfp4": ("fp4", "bf16", "fp16"),
    "fp32": ("fp32",), "fp16": ("fp16", "bf16", "fp32"),
}  # fmt: skip
_USUAL = ("bf16", "fp16", "fp32")


def compute_dtype(device: DeviceSpec, scheme: str) -> str:
    """The number type in which `device` multiplies weights stored as `scheme`: weight-only types compute in 16 bits.

    A CPU with an int8 peak multiplies quantised types in int8; a device with fp4 units takes mxfp4 weights with fp8
    activations. Raises ConfigError where the device has none.
    """
    prefer = _COMPUTE.get(scheme, _USUAL)
    if device.kind == "cpu" and scheme not in _USUAL:
        prefer = ("int8", *prefer)
    if scheme == "mxfp4" and "fp4" in device.peak_flops:
        prefer = ("fp8", *prefer)
    found = next((t for t in prefer if t in device.peak_flops), None)
    if found is None:
        has = ", ".join(device.peak_flops)
        raise ConfigError(f"{device.name} states no peak for {' or '.join(prefer)}; it has {has}")
    return found


def rank_weights(model: ModelSpec, scheme: str, tp: int = 1) -> WeightBytes:
    """Weights of one TP rank over all pipeline stages. Raises ConfigError, UnknownName."""
    return stage_weights(model, scheme, tp)[0]


@dataclass(frozen=True)
class Timing:
    """Step times of one replica. `weights` and `layout` are one TP rank's, over all pipeline stages."""

    model: ModelSpec
    device: DeviceSpec
    layout: KVLayout
    weights: WeightBytes
    scheme: str
    tp: int = 1
    pp: int = 1
    efficiency: float = 1.0  # share of peak and of bandwidth that is reached; 1 gives floors
    ranks: int = 1  # TP ranks that keep the KV of different requests (DP attention)

    def __post_init__(self) -> None:
        if self.tp * self.pp > 1 and not self.device.link_bytes_per_s:
            raise ConfigError(f"{self.device.name} has no link to a second device: only TP = PP = 1")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"efficiency must be above 0 and at most 1, got {self.efficiency}")

    @cached_property
    def roofline(self) -> Roofline:
        """Arithmetic of the whole group against the memory traffic of one rank."""
        peaks = {kind: peak * self.tp for kind, peak in self.device.peak_flops.items()}
        group = replace(self.device, peak_flops=peaks)
        kind = compute_dtype(self.device, self.scheme)
        return Roofline(
            self.model, group, self.layout, self.weights.total, kind, self.efficiency, self.efficiency,
            weight_parts=self.weights.parts or None, kv_share=1 / self.ranks,
        )  # fmt: skip

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights of one TP rank, over all pipeline stages."""
        return self.weights.total

    def decode(self, batch: int, context: int) -> StepCost:
        """One token more for each of `batch` requests that hold `context` tokens, the new one included.

        Its `seconds` are what a request waits for a token: all stages, one micro-batch of ⌈batch / pp⌉.
        """
        micro = cdiv(batch, self.pp)
        cost = self.roofline.cost((Work(max(0, context - 1), 1),), micro)
        return replace(cost, seconds=cost.seconds + self.exchange_s(micro))

    def prefill(self, prompt: int, cached: int = 0) -> StepCost:
        """The forward of `prompt` tokens of which `cached` need not be computed; at least one is."""
        new = max(1, prompt - cached)
        cost = self.roofline.cost((Work(prompt - new, new),))
        return replace(cost, seconds=cost.seconds + self.exchange_s(new))

    def exchange_s(self, num_tokens: int) -> float:
        """Seconds of traffic between ranks for `num_tokens`: two all-reduces a layer, one hop a stage.

        A ring all-reduce sends 2 (tp − 1) / tp of its data over each link (Patarasuk & Yuan, 2009).
        """
        if self.tp * self.pp == 1:
            return 0.0
        size = num_tokens * self.model.hidden_size * ACTIVATION_BYTES
        reduces = 2 * self.model.num_layers * 2 * (self.tp - 1) / self.tp
        return float(size * (reduces + self.pp - 1) / self.device.link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """A replica at a steady load: `batch` requests, each `prompt` tokens in and `output` tokens out, over and over."""

    batch: int
    step: StepCost
    ttft_s: float  # prefill of one prompt on an idle replica
    tpot_s: float  # a decode step alone
    tpot_sustained_s: float  # with the prefills of the other requests in between
    tokens_per_s: float  # output tokens, prefills paid for


def speed(timing: Timing, batch: int, context: int, output: int, cached: int = 0) -> Speed:
    """Steady state of `batch` requests that end at `context` tokens, `output` of them written.

    While a request writes its `output` tokens, each of the others ends once and its successor's prompt is computed,
    so every request pays `batch` prefills per life. Pipeline stages overlap, which hides prefills of other stages.
    """
    prompt = max(1, context - output)
    prefill = timing.prefill(prompt, cached)
    step = timing.decode(batch, context)
    life_s = output * step.seconds + batch * prefill.seconds / timing.pp
    sustained = step.seconds + (batch - 1) * prefill.seconds / timing.pp / output
    return Speed(batch, step, prefill.seconds, step.seconds, sustained, batch * output / life_s)
