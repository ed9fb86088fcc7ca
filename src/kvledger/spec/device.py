"""What a device is: memory, bandwidth, peaks, links, price. A frozen row; the rows are in data/devices.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device. Bytes, bytes/s, FLOP/s (dense, never with sparsity) and dollars per hour.

    `memory_bytes` is what the driver offers (an "80 GB" H100: 81,559 MiB), `sold_bytes` what the label says.
    `peak_flops` goes by number type: `bf16`, `fp16`, `fp8`, `int8`, `fp4`, `fp32`. `assumed` names the fields that
    nobody stated.
    """

    name: str
    kind: str  # gpu, cpu, tpu, npu
    vendor: str
    sold_bytes: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    link_bytes_per_s: float = 0.0  # between devices of one node, each way
    price_per_hour: float | None = None
    source: str = ""
    date: str = ""
    measured: bool = False
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    assumed: tuple[str, ...] = ()
    price_source: str = ""

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOP per byte at which arithmetic overtakes bandwidth (roofline, Williams et al. 2009)."""
        return self.peak_flops[dtype] / self.bandwidth_bytes_per_s
