"""Angles of rotary position embedding, and the ways in which models stretch them. Pure NumPy.

Su et al., arXiv:2104.09864; YaRN: Peng et al., arXiv:2309.00071.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvledger.kernels.packed import aligned

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rope:
    """`dim` channels of a head turn, at base^(−2j/dim). `factors` divide the frequencies one by one (Llama 3).

    `linear` divides all positions. `magnitude` multiplies cosines and sines (YaRN's attention factor).
    """

    dim: int
    base: float
    linear: float = 1.0
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0

    def frequencies(self) -> Array:
        """float64[dim / 2], radians per position."""
        frequency = self.base ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim) / self.linear
        return frequency if self.factors is None else frequency / np.asarray(self.factors)

    def angles(self, num_positions: int) -> Array:
        """float32[positions, dim]: cosines, then sines."""
        turn = np.arange(num_positions, dtype=np.float64)[:, None] * self.frequencies()
        table: Array = aligned((num_positions, self.dim))
        table[:, : self.dim // 2] = np.cos(turn) * self.magnitude
        table[:, self.dim // 2 :] = np.sin(turn) * self.magnitude
        return table


def llama3_factors(dim: int, base: float, factor: float, low: float, high: float, trained: int) -> tuple[float, ...]:
    """Llama 3.1's stretching: long waves × factor, short ones as they are, a ramp between (`rope_type: llama3`)."""
    wave = 2 * np.pi / base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((trained / wave - low) / (high - low), 0.0, 1.0)
    return tuple(1 / ((1 - smooth) / factor + smooth))


def yarn_factors(dim: int, base: float, factor: float, trained: int, fast: float = 32.0, slow: float = 1.0) -> tuple[float, ...]:  # fmt: skip # noqa: E501
    """YaRN's frequencies as divisors: between `fast` and `slow` turns over the trained length, a linear ramp."""

    def channel(turns: float) -> float:
        return float(dim * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base)))

    low, high = max(np.floor(channel(fast)), 0), min(np.ceil(channel(slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return tuple(1 / (ramp / factor + (1 - ramp)))


def yarn_magnitude(factor: float) -> float:
    """YaRN's attention temperature, on cosines and sines: 0.1 ln s + 1."""
    return 0.1 * float(np.log(factor)) + 1.0 if factor > 1 else 1.0
