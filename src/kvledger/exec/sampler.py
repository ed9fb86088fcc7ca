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
_TILE = 256  # tokens summed at a time when drawing from the whole vocabulary
_DEPTHS = (2.0, 4.0, 8.0, 16.0, math.inf)  # nats below the best token in which survivors are looked for, in turn


def sample_rows(logits: NDArray[np.float32], sequences: Items[Sequence]) -> tuple[dict[int, Sample], dict[int, str]]:
    """Row i of `logits` [rows, vocabulary] belongs to sequence i → samples and failures, both by seq_id."""
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
    scaled *= np.float32(1.0 / params.temperature)
    chance = uniform(seq.seed, seq.choice, seq.num_output_tokens)
    if params.top_p >= 1.0 and params.top_k <= 0 and params.min_p == 0.0:
        return _draw_any(np.exp(scaled, out=scaled), chance)
    ids = _nucleus(scaled, params)
    return int(ids[_invert(np.cumsum(np.exp(scaled[ids]), dtype=np.float64), chance)])


def _draw_any(weights: Row, chance: float) -> int:
    """Inverse of the cumulative distribution in order of ids, in two levels: tiles, then tokens of one tile."""
    padded = np.zeros(-(-weights.size // _TILE) * _TILE, np.float32)
    padded[: weights.size] = weights
    tiles = padded.reshape(-1, _TILE)
    upto = np.cumsum(tiles.sum(axis=1), dtype=np.float64)
    target = chance * upto[-1]
    tile = min(int(np.searchsorted(upto, target, side="right")), len(upto) - 1)
    before = upto[tile - 1] if tile else 0.0
    inside = np.cumsum(tiles[tile], dtype=np.float64)
    place = int(np.searchsorted(inside, target - before, side="right"))
    if place == _TILE or not tiles[tile, place]:  # rounding between the two levels: the tile's last possible token
        place = int(np.flatnonzero(tiles[tile])[-1])
    return tile * _TILE + place


def _invert(cumulative: NDArray[np.float64], chance: float) -> int:
    return min(int(np.searchsorted(cumulative, chance * cumulative[-1], side="right")), len(cumulative) - 1)


def _nucleus(scaled: Row, params: SamplingParams) -> NDArray[np.int64]:
    """Ids that min-p, top-k and top-p leave, in order of ids. `scaled` has its maximum at 0."""
    values, total = _candidates(scaled, params)
    if params.top_k > 0:
        values = values[: params.top_k]
    kept = values.size
    if params.top_p < 1.0:
        upto = np.cumsum(np.exp(values), dtype=np.float64)
        target = params.top_p * (float(upto[-1]) if params.top_k > 0 else total)
        kept = min(int(np.searchsorted(upto, target)) + 1, kept)  # the token that reaches the target stays
    ids = np.flatnonzero(scaled >= values[kept - 1])
    if ids.size > kept:  # the last place is tied: the highest ids go
        tied = ids[scaled[ids] == values[kept - 1]]
        ids = np.setdiff1d(ids, tied[kept - ids.size :], assume_unique=True)
    return ids


def _candidates(scaled: Row, params: SamplingParams) -> tuple[Row, float]:
    """(values that can survive, largest first; mass of all that min-p leaves). Few, because sorting is what costs.

    Looks no deeper below the best token than top-k's count or top-p's mass requires.
    """
    floor = math.log(params.min_p) if params.min_p else -math.inf
    weights = np.exp(scaled)
    total = _mass(weights[scaled >= floor]) if params.min_p else _mass(weights)
    for depth in _DEPTHS:
        near = scaled >= max(-depth, floor)
        if params.top_k > 0:
            is_enough = int(np.count_nonzero(near)) >= params.top_k
        else:
            is_enough = params.top_p < 1.0 and _mass(weights[near]) >= params.top_p * total
        if is_enough or -depth <= floor:
            break
    return np.sort(scaled[near])[::-1], total


def _mass(weights: Row) -> float:
    return float(weights.sum(dtype=np.float64))


def _nothing_left(row: Row) -> str:
    if np.isnan(row).any():
        return "the model gave no numbers for this text (NaN): it cannot be continued"
    return "no token may follow: allowed tokens, constraint and bias exclude each other"
