"""The sampler against a slow, obvious version of each rule."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.errors import BadRequest
from kvledger.exec.sampler import _invert, _survivors, sample, sample_rows, score, top_ids, uniform
from kvledger.sched.sequence import Sequence
from kvledger.spec.sampling import SamplingParams

ROWS = st.integers(2, 700).flatmap(
    lambda n: st.lists(st.sampled_from([-30.0, -3.0, -1.5, 0.0, 0.25, 0.5, 2.0, 7.0]), min_size=n, max_size=n)
)


def sequence(prompt=(1, 2, 3), output=(), seed=7, choice=0, constraint=None, eos=(), **params):
    ids = [*prompt, *output]
    return Sequence(
        1, "r", ids, len(prompt), SamplingParams(**params), 1 << 20, choice, seed=seed, constraint=constraint,
        eos_token_ids=eos,
    )  # fmt: skip


def slow_survivors(row, top_k=0, top_p=1.0, min_p=0.0):
    """Ids that min-p, then top-k, then top-p leave: sort everything, mask, renormalise."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    weight = {i: math.exp(float(row[i]) - float(row[order[0]])) for i in order}
    kept = [i for i in order if float(row[i]) - float(row[order[0]]) >= (math.log(min_p) if min_p else -math.inf)]
    kept = kept[:top_k] if top_k > 0 else kept
    total, mass, out = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        out.append(i)
        mass += weight[i]
        if top_p < 1.0 and mass >= top_p * total:
            break
    return sorted(out)


@given(
    row=ROWS, top_k=st.integers(0, 40), top_p=st.sampled_from([0.13, 0.52, 0.97, 1.0]), min_p=st.sampled_from([0, 0.02])
)
@settings(deadline=None, max_examples=300)
def test_survivors_are_those_of_a_full_sort(row, top_k, top_p, min_p):
    scaled = np.array(row, np.float32) - np.float32(max(row))
    found = _survivors(scaled, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    found = list(range(len(row))) if found is None else found.tolist()
    assert found == slow_survivors(scaled, top_k, top_p, min_p)


@given(row=ROWS, count=st.integers(0, 20))
def test_top_ids_break_ties_by_lowest_id(row, count):
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert top_ids(np.array(row, np.float32), count).tolist() == expected


@given(row=ROWS, data=st.data())
def test_logprobs_are_those_of_the_raw_logits(row, data):
    token = data.draw(st.integers(0, len(row) - 1))
    found = score(np.array(row, np.float32), token, 3)
    total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert found.logprob == pytest.approx(row[token] - total, abs=1e-5)
    assert found.rank == order.index(token) + 1
    assert [i for i, _ in found.top] == order[:3]
    assert [lp for _, lp in found.top] == pytest.approx([row[i] - total for i in order[:3]], abs=1e-5)


def test_greedy_takes_the_lowest_of_equal_logits_and_leaves_the_row_alone():
    row = np.array([1, 5, 5, 2], np.float32)
    before = row.copy()
    assert sample(row, sequence(temperature=0.0)).token_id == 1
    sample(row, sequence(temperature=0.0, repetition_penalty=2.0, prompt=(1, 2)))
    assert (row == before).all()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(params):
    """Chi-square over 4,000 draws at different positions, against the survivors' renormalised probabilities."""
    row = np.random.default_rng(0).normal(0, 1.5, 12).astype(np.float32)
    scaled = row / params.get("temperature", 1.0)
    kept = slow_survivors(scaled, **{k: v for k, v in params.items() if k != "temperature"})
    weights = np.array([math.exp(scaled[i]) for i in kept])
    expected = 4000 * weights / weights.sum()
    counts = dict.fromkeys(kept, 0)
    for i in range(4000):
        counts[sample(row, sequence(output=[0] * (i % 40), seed=i // 40, **params)).token_id] += 1
    chi2 = sum((counts[t] - e) ** 2 / e for t, e in zip(kept, expected, strict=True))
    assert chi2 < 45  # 11 degrees of freedom: 5e-6


@pytest.mark.parametrize("size", [1, 3, 4095, 4096, 4097, 49152])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(size):
    """Every chance lands on a token, and each token gets its share of evenly spread chances."""
    weights = np.random.default_rng(size).random(size).astype(np.float32) ** 8
    weights[size // 2 :: 7] = 0.0
    weights[0] = 1.0
    chances = (np.arange(3000) + 0.5) / 3000
    places = [_invert(weights, chance) for chance in chances]
    assert (weights[places] > 0).all()
    big = np.argsort(-weights)[:3]
    for token in big:
        assert abs(places.count(token) / 3000 - weights[token] / weights.sum(dtype=np.float64)) < 2 / 3000
    assert weights[_invert(weights, 0.0)] > 0
    assert weights[_invert(weights, 1.0 - 2.0**-53)] > 0


def test_whole_vocabulary_draw_never_returns_an_impossible_token():
    row = np.full(1000, -np.inf, np.float32)
    row[[3, 256, 511, 999]] = 0.0
    tokens = [sample(row, sequence(seed=i)).token_id for i in range(400)]
    assert set(tokens) == {3, 256, 511, 999}


def test_a_draw_depends_on_seed_choice_and_position_alone():
    row = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    other = np.random.default_rng(2).normal(0, 1, 5000).astype(np.float32)
    one, two = sequence(output=[4, 5]), sequence(prompt=(9,), output=[1], seed=8)
    alone = sample(row, one).token_id
    samples, failed = sample_rows([other, row], [two, sequence(output=[7, 7])])
    assert not failed
    assert samples[1].token_id == alone  # the other row and the other tokens do not matter, their number does
    assert len({uniform(s, c, p) for s in range(20) for c in range(4) for p in range(50)}) == 4000


def test_penalties_follow_their_formulas():
    row = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    base = {"temperature": 0.0, "logprobs": 0}
    # 2 / 1.5 and 1 / 1.5: token 0 still wins; without its own penalty token 2 could not
    seq = sequence(prompt=(0, 1), output=(2, 2, 2), repetition_penalty=1.5, **base)
    assert sample(row, seq).token_id == 0
    seq = sequence(prompt=(1,), output=(0, 0), frequency_penalty=0.6, presence_penalty=0.1, **base)
    assert sample(row, seq).token_id == 2  # 2 − 2 × 0.6 − 0.1 = 0.7 < 1
    seq = sequence(prompt=(0, 0), output=(), frequency_penalty=2.0, presence_penalty=2.0, **base)
    assert sample(row, seq).token_id == 0  # the prompt does not count for these two


def test_bias_allowed_tokens_and_min_tokens():
    row = np.array([9.0, 8.0, 7.0, 6.0], np.float32)
    greedy = {"temperature": 0.0}
    assert sample(row, sequence(logit_bias={3: 10.0}, **greedy)).token_id == 3
    assert sample(row, sequence(allowed_token_ids=(2, 3), **greedy)).token_id == 2
    assert sample(row, sequence(min_tokens=2, stop_token_ids=(1,), eos=(0,), **greedy)).token_id == 2
    assert sample(row, sequence(output=(3, 3), min_tokens=2, eos=(0,), **greedy)).token_id == 0


class Bits:
    """A constraint that allows the given tokens."""

    def __init__(self, *ids, size=1):
        self.bits = bytearray(size)
        for i in ids:
            self.bits[i // 8] |= 1 << (i % 8)

    def mask(self):
        return bytes(self.bits)


def test_constraint_mask_and_its_short_end():
    row = np.arange(12, dtype=np.float32)
    assert sample(row, sequence(temperature=0.0, constraint=Bits(1, 5))).token_id == 5
    assert sample(row, sequence(temperature=0.0, constraint=Bits(10, 2, size=2))).token_id == 10
    draws = {sample(row, sequence(seed=i, temperature=50.0, constraint=Bits(1, 5))).token_id for i in range(50)}
    assert draws == {1, 5}


def test_what_cannot_be_sampled_fails_alone():
    good, poison = np.zeros(4, np.float32), np.full(4, np.nan, np.float32)
    bad = sequence(temperature=0.0)
    bad.seq_id = 2
    samples, failed = sample_rows([good, poison], [sequence(), bad])
    assert set(samples) == {1}
    assert "NaN" in failed[2]
    with pytest.raises(BadRequest, match="no token may follow"):
        sample(good, sequence(allowed_token_ids=(1,), constraint=Bits(2)))
