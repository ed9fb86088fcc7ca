"""Logits → one token, as the request's parameters ask. Pure: no state, no batch; the same row gives the same token.

Order: constraint, allowed tokens, min_tokens and bias; repetition, frequency and presence penalties; temperature;
min-p, top-k, top-p (each on what the one before left); draw. Ties go to the lowest id. Logprobs are those of the raw
logits.

Randomness is counter-based (the idea of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; here a
keyed BLAKE2b): a draw is a function of (seed, choice, number of tokens so far) and of nothing else, so neither the
batch nor a preemption can change it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from kvledger.errors import BadRequest
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Sample
from kvledger.spec.sampling import SamplingParams

Row = NDArray[np.float32]  # [vocabulary]
_NEVER = np.float32(-np.inf)
_HEIGHT, _LARGE = 256, 4096  # rows of at least so many weights are summed as columns of that height
_COLDEST = 1e-6  # temperature; below, its inverse soon leaves float32, and nothing but the best is left long before
_DEPTHS = (4.0, 12.0, math.inf)  # nats below the best token in which the nucleus is looked for, in turn
_REACH = 60.0  # nats: 2^20 tokens that far below the best weigh less than 2^-53 together, the step of `uniform`


def sample_rows(logits: Items[Row], sequences: Items[Sequence]) -> tuple[dict[int, Sample], dict[int, str]]:
    """Row i of `logits`, float32[vocabulary] each, belongs to sequence i → samples and failures, both by seq_id."""
    samples: dict[int, Sample] = {}
    failed: dict[int, str] = {}
    for row, seq in zip(logits, sequences, strict=True):
        try:
            samples[seq.seq_id] = sample(row, seq)
        except BadRequest as error:
            failed[seq.seq_id] = str(error)
    return samples, failed


def sample(row: Row, seq: Sequence) -> Sample:
    """The sequence's next token. `row` is not changed. Raises BadRequest when no token may follow."""
    params = seq.params
    shaped = _shape(row, seq)
    token = int(np.argmax(shaped)) if params.is_greedy else _draw(shaped, seq)
    if not math.isfinite(shaped[token]):
        raise BadRequest(_nothing_left(row))
    return Sample(token) if params.logprobs is None else score(row, token, params.logprobs)


def score(row: Row, token_id: int, num_top: int) -> Sample:
    """Logprob and rank (1: the most likely) of a token in the raw distribution, and the `num_top` most likely."""
    best = float(row.max())
    log_total = best + math.log(float(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    own = row[token_id]
    rank = 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token_id] == own))
    top = tuple((int(i), float(row[i]) - log_total) for i in top_ids(row, num_top))
    return Sample(token_id, float(own) - log_total, rank, top)


def top_ids(row: Row, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest, best first, lowest id first among equals. No full sort."""
    count = min(count, row.size)
    if count <= 0:
        return np.empty(0, np.int64)
    least = np.partition(row, row.size - count)[row.size - count]
    ids = np.flatnonzero(row >= least)  # more than `count` where the last place is tied
    return ids[np.argsort(-row[ids], kind="stable")][:count]


# ---------------------------------------------------------------------------------------------- shaping the logits


def _shape(row: Row, seq: Sequence) -> Row:
    """Logits after masks, bias and penalties; the row itself where the request asks for none."""
    params = seq.params
    banned = _banned_ends(seq)
    mask = None if seq.constraint is None else seq.constraint.mask()
    if not (banned or mask or params.logit_bias or params.allowed_token_ids or _has_penalties(params)):
        return row
    shaped = row.copy()
    if mask is not None:
        _forbid_unset(shaped, mask)
    if params.allowed_token_ids is not None:
        _forbid_others(shaped, params.allowed_token_ids)
    if banned:
        shaped[banned] = _NEVER
    for token, bias in params.logit_bias.items():
        shaped[token] += np.float32(bias)
    if _has_penalties(params):
        _penalise(shaped, seq)
    return shaped


def _banned_ends(seq: Sequence) -> list[int]:
    """Tokens that would end the text before `min_tokens`."""
    if seq.num_output_tokens >= seq.params.min_tokens:
        return []
    return [*seq.eos_token_ids, *seq.params.stop_token_ids]


def _forbid_unset(shaped: Row, mask: bytes) -> None:
    """Bit i of byte i // 8 allows token i; tokens past the mask's end are forbidden."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: shaped.size]
    shaped[: bits.size][bits == 0] = _NEVER
    shaped[bits.size :] = _NEVER


def _forbid_others(shaped: Row, allowed: Iterable[int]) -> None:
    ids = np.fromiter(allowed, np.int64)
    kept = shaped[ids]
    shaped[:] = _NEVER
    shaped[ids] = kept


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _penalise(shaped: Row, seq: Sequence) -> None:
    """Repetition (CTRL, arXiv:1909.05858) over prompt and output; frequency and presence over the output (OpenAI)."""
    params = seq.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(seq.token_ids, np.int64))
        values, penalty = shaped[seen], np.float32(params.repetition_penalty)
        shaped[seen] = np.where(values > 0, values / penalty, values * penalty)
    if seq.num_output_tokens:
        output = np.asarray(seq.token_ids[seq.num_prompt_tokens :], np.int64)
        ids, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        shaped[ids] -= penalties.astype(np.float32)


# ---------------------------------------------------------------------------------------------- drawing


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53, that depends on these three alone."""
    text = b"%d,%d,%d" % (seed, choice, position)
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def _draw(shaped: Row, seq: Sequence) -> int:
    params = seq.params
    best = shaped.max()
    if not math.isfinite(best):
        return int(np.argmax(shaped))  # the caller sees that nothing is left
    scaled = shaped - best
    if params.temperature != 1.0:
        scaled *= np.float32(1.0 / max(params.temperature, _COLDEST))
    ids = _survivors(scaled, params)
    weights = np.exp(scaled if ids is None else scaled[ids])
    place = _invert(weights, uniform(seq.seed, seq.choice, seq.num_output_tokens))
    return place if ids is None else int(ids[place])


def _invert(weights: Row, chance: float) -> int:
    """Inverse of the cumulative distribution. Large rows in two levels: columns of a matrix, then one column."""
    height = _HEIGHT if weights.size >= _LARGE else 1
    if weights.size % height:
        weights = np.concatenate([weights, np.zeros(-weights.size % height, np.float32)])
    grid = weights.reshape(height, -1)
    upto = np.cumsum(grid.sum(axis=0), dtype=np.float64)
    target = chance * upto[-1]
    column = _place(upto, target)
    before = upto[column - 1] if column else 0.0
    row = _place(np.cumsum(grid[:, column], dtype=np.float64), target - before) if height > 1 else 0
    return row * grid.shape[1] + column


def _place(upto: NDArray[np.float64], target: float) -> int:
    """First place whose sum passes the target; where rounding leaves none, the last that adds anything."""
    place = int(np.searchsorted(upto, target, side="right"))
    return place if place < upto.size else int(np.searchsorted(upto, upto[-1]))


def _survivors(scaled: Row, params: SamplingParams) -> NDArray[np.int64] | None:
    """Ids that min-p, top-k and top-p leave, in order; None: all. `scaled` has its maximum at 0."""
    ids = _reachable(scaled, params.min_p)
    if params.top_k <= 0 and params.top_p >= 1.0:
        return ids
    kept = _top(scaled if ids is None else scaled[ids], params)
    return kept if ids is None else ids[kept]


def _reachable(scaled: Row, min_p: float) -> NDArray[np.int64] | None:
    """Ids that min-p leaves and that a draw can reach, in order; None where that is most of them anyway."""
    near = scaled >= (max(math.log(min_p), -_REACH) if min_p else -_REACH)
    if not min_p and 2 * int(np.count_nonzero(near)) > scaled.size:
        return None
    return np.flatnonzero(near)


def _top(values: Row, params: SamplingParams) -> NDArray[np.int64]:
    """Places of the values that top-k and then top-p leave, in order."""
    largest, total = _largest(values, params)
    count = largest.size
    if params.top_p < 1.0:
        upto = np.cumsum(np.exp(largest), dtype=np.float64)
        count = min(int(np.searchsorted(upto, params.top_p * total)) + 1, count)  # who reaches the target stays
    places = np.flatnonzero(values >= largest[count - 1])
    if places.size > count:  # the last place is tied: the highest ids go
        tied = places[values[places] == largest[count - 1]]
        places = np.setdiff1d(places, tied[count - places.size :], assume_unique=True)
    return places


def _largest(values: Row, params: SamplingParams) -> tuple[Row, float]:
    """(enough of the largest values, in falling order; the mass that top-p is a share of)."""
    if params.top_k > 0:
        rest = max(0, values.size - params.top_k)
        largest = np.sort(np.partition(values, rest)[rest:])[::-1]
        return largest, _mass(np.exp(largest))
    weights = np.exp(values)
    total = _mass(weights)
    for depth in _DEPTHS:
        near = values >= -depth
        if depth == math.inf or _mass(weights[near]) >= params.top_p * total:
            break
    return np.sort(values[near])[::-1], total


def _mass(weights: Row) -> float:
    return float(weights.sum(dtype=np.float64))


def _nothing_left(row: Row) -> str:
    if np.isnan(row).any():
        return "the model gave no numbers for this text (NaN): it cannot be continued"
    return "no token may follow: allowed tokens, constraint and bias exclude each other"
