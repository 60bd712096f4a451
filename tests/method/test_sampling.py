"""Sampling against transformers' processors, and randomness that depends on nothing but seed and position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mars import MarsError, SamplingParams
from mars.method.sampling import SamplingTensors, argmax, gumbel

VOCABULARY = 20


def logits_for(rows: int, positions: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, positions, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, VOCABULARY),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
)
def test_scores_are_what_transformers_samples_by(seed, temperature, top_k, top_p, min_p) -> None:
    logits = logits_for(1, seed=seed)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mine = SamplingTensors.of([sampling], VOCABULARY).scores(logits)[0]
    scores = TemperatureLogitsWarper(temperature)(None, logits[0])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    torch.testing.assert_close(mine.softmax(-1), scores.softmax(-1))


def test_rows_keep_to_their_own_sampling() -> None:
    rows = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1, top_p=0.4),
    ]
    logits = logits_for(len(rows))
    batch = SamplingTensors.of(rows, VOCABULARY)
    together = batch.scores(logits)
    for index, row in enumerate(rows):
        alone = SamplingTensors.of([row], VOCABULARY).scores(logits[index : index + 1])
        assert torch.equal(together[index], alone[0])
    assert torch.equal(batch.sample(together, torch.zeros(len(rows), 3).long())[0], logits[0].argmax(-1))
    assert (together[1].isfinite().sum(-1) == 3).all()


def test_penalties() -> None:
    logits = logits_for(1, 1)
    seen, counts = torch.zeros(1, 1, VOCABULARY).bool(), torch.zeros(1, 1, VOCABULARY)
    seen[..., [3, 5]], counts[..., 5] = True, 2.0
    batch = SamplingTensors.of([SamplingParams(repetition_penalty=1.3)], VOCABULARY)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[3, 5]]), logits[0].clone())
    torch.testing.assert_close(batch.adjust(logits, seen, counts)[0], expected)
    batch = SamplingTensors.of([SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)], VOCABULARY)
    change = (batch.adjust(logits, seen, counts) - logits)[0, 0]
    assert change.nonzero()[:, 0].tolist() == [5]
    assert change[5].item() == pytest.approx(-0.5 - 2 * 0.25)


def test_bias_and_ban() -> None:
    batch = SamplingTensors.of(
        [SamplingParams(logit_bias={4: 100.0, 7: 200.0}), SamplingParams()], VOCABULARY, banned=7
    )
    adjusted = batch.adjust(logits_for(2))
    assert (adjusted[0].argmax(-1) == 4).all()
    assert (adjusted[:, :, 7] == -math.inf).all()
    assert batch.scores(adjusted)[:, :, 7].max() == -math.inf
    with pytest.raises(MarsError, match="vocabulary has 20"):
        SamplingTensors.of([SamplingParams(logit_bias={20: 1.0})], VOCABULARY)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {"1": 1.0}},
    ],
)
def test_bad_sampling(bad: dict) -> None:
    with pytest.raises(MarsError, match=next(iter(bad))):
        SamplingParams(**bad)


def noise_as_numbers(seed: int, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """The uniform numbers behind the noise, (positions, tokens)."""
    return (-(-gumbel(torch.tensor([seed]), positions[None], tokens)[0]).exp()).exp().double()


def test_noise_is_uniform_and_independent() -> None:
    numbers = [noise_as_numbers(seed, torch.arange(50_000), 4) for seed in (0, 1)]
    streams = torch.cat([each.T for each in numbers])
    for stream in streams:
        assert stream.min() >= 0 and stream.max() <= 1
        counts = torch.histc(stream, 100, 0, 1)
        assert (((counts - 500) ** 2) / 500).sum() < 160  # chi-square, 99 degrees of freedom, p < 1e-4
        assert abs(torch.corrcoef(torch.stack([stream[:-1], stream[1:]]))[0, 1]) < 0.02
    assert torch.corrcoef(streams).fill_diagonal_(0).abs().max() < 0.02


def test_a_row_draws_the_same_in_any_batch() -> None:
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([[1, 2], [9, 8], [4, 4]])
    together = gumbel(seeds, positions, 30)
    assert torch.equal(together[1:2], gumbel(seeds[1:2], positions[1:2], 30))
    assert together.isfinite().all()


def test_a_draw_follows_the_scores() -> None:
    wanted = torch.tensor([0.1, 0.0, 0.6, 0.3])
    batch = SamplingTensors.of([SamplingParams(temperature=1.0, seed=3)], 4)
    drawn = batch.sample(wanted.log().expand(1, 100_000, -1), torch.arange(100_000)[None])[0]
    assert 1 not in drawn
    torch.testing.assert_close(torch.bincount(drawn, minlength=4) / 100_000, wanted, atol=0.006, rtol=0)


@given(st.sampled_from([1, 3, 12, 64, 100, 192]), st.integers(0, 2**32))
def test_the_argmax_is_the_argmax(vocabulary: int, seed: int) -> None:
    scores = torch.randint(-4, 4, (2, 3, vocabulary), generator=torch.Generator().manual_seed(seed)).float()
    expected = [[row.index(max(row)) for row in position] for position in scores.tolist()]
    assert argmax(scores).tolist() == expected
