"""How far one model's predictions are from another's, position by position. Pure arithmetic on rows of logits.

All of it in float64 and over the whole vocabulary. KL divergence is KL(reference‖x) = Σ p·(log p − log q) in nats
(Kullback and Leibler, "On information and sufficiency", 1951); perplexity is exp of the mean −log p(next token).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # [rows, vocabulary]
LogProbs = NDArray[np.float64]  # [rows, vocabulary]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One contender against the reference, over `num_positions` predictions of a next token.

    `kl_*` are nats per position; `kl_error` is the standard error of the mean. `top1_agreement` is the share of
    positions whose most likely token is the reference's.
    """

    name: str
    kv_bytes_per_token: float | None  # None: not ours to know
    num_positions: int
    perplexity: float
    perplexity_change: float  # relative to the reference's, on the same positions
    kl_mean: float
    kl_error: float
    kl_p99: float
    kl_max: float
    top1_agreement: float


def log_softmax(logits: Logits) -> LogProbs:
    """Logits → natural logs of probabilities, float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows


@dataclass(slots=True)
class Reference:
    """A block of the reference's rows, worked out once for all contenders. `targets`: the tokens that really follow."""

    log_probs: LogProbs
    targets: NDArray[np.int64]
    probs: LogProbs = field(init=False)
    best: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.probs, self.best = np.exp(self.log_probs), self.log_probs.argmax(axis=1)

    def surprise(self, log_probs: LogProbs) -> NDArray[np.float64]:
        """−log p of the tokens that follow. [rows]"""
        return -log_probs[np.arange(len(self.targets)), self.targets]


@dataclass(slots=True)
class Tally:
    """Figures of one contender, gathered block by block: three numbers a position are kept, no logits."""

    kl: list[NDArray[np.float64]] = field(default_factory=list)
    surprise: list[NDArray[np.float64]] = field(default_factory=list)
    reference_surprise: list[NDArray[np.float64]] = field(default_factory=list)
    num_agreeing: int = 0

    def add(self, reference: Reference, logits: Logits) -> None:
        """Count the same rows of this contender."""
        log_probs = log_softmax(logits)
        self.surprise.append(reference.surprise(log_probs))
        self.reference_surprise.append(reference.surprise(reference.log_probs))
        self.num_agreeing += int(np.count_nonzero(log_probs.argmax(axis=1) == reference.best))
        np.subtract(reference.log_probs, log_probs, out=log_probs)
        self.kl.append(np.einsum("rv,rv->r", reference.probs, log_probs))

    def result(self, name: str, kv_bytes_per_token: float | None) -> Divergence:
        """What has been counted."""
        kl, surprise = np.concatenate(self.kl), np.concatenate(self.surprise)
        drift = surprise.mean() - np.concatenate(self.reference_surprise).mean()
        return Divergence(
            name, kv_bytes_per_token, len(kl), float(np.exp(surprise.mean())), float(np.expm1(drift)),
            float(kl.mean()), float(kl.std() / np.sqrt(len(kl))), float(np.quantile(kl, 0.99)), float(kl.max()),
            self.num_agreeing / len(kl),
        )  # fmt: skip
