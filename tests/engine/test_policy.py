"""Window choice: what a window brings, against a simulation; what it costs; which one wins."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars.engine.policy import PRIOR, Acceptance, fastest, interpolate, tokens_per_forward
from mars.method.windows import Window

WINDOWS = [Window(), *(Window.of(groups, 4) for groups in (1, 2, 3, 4))]


def simulate(window: Window, passes: list[float], forwards: int = 40_000) -> float:
    """Tokens per forward of a sequence whose drafts pass with these chances, each given that those before it did."""
    draw, tokens, drafts = random.Random(0), 0, False
    for _ in range(forwards):
        count = window.masks if drafts else 0
        accepted = next((i for i in range(count) if draw.random() >= passes[i]), count)
        tokens += accepted + 1
        drafts = accepted in [count, *range(count)][: window.groups]
    return tokens / forwards


@pytest.mark.parametrize("passes", [[0.8, 0.7, 0.6], [0.3, 0.9, 0.2], [1.0, 1.0, 1.0], [0.0, 0.5, 0.5]])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_expected_tokens(window: Window, passes: list[float]) -> None:
    rates = [passes[0], passes[0] * passes[1], passes[0] * passes[1] * passes[2]]
    assert tokens_per_forward(window, rates) == pytest.approx(simulate(window, passes), rel=0.02)


def test_acceptance_is_observed_and_decays() -> None:
    seen = Acceptance(3)
    assert seen.rates() == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    for _ in range(2000):
        seen.observe(3, 1)  # the first passes, the second does not, the third is never asked
    first, second, _third = seen.rates()
    assert first > 0.95 and second < 0.05
    for _ in range(20_000):
        seen.decay()
    assert seen.rates() == pytest.approx([PRIOR, PRIOR**2, PRIOR**3], abs=0.01)


def test_a_wide_window_pays_for_few_sequences_and_for_good_drafts() -> None:
    def cost(sequences: int, window: Window) -> float:
        return 1 + 0.01 * sequences * window.width

    good, bad = [0.9, 0.8, 0.7], [0.05, 0.0, 0.0]
    widths = [fastest(WINDOWS, good, sequences, cost).width for sequences in (1, 8, 32, 256)]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1] == 1
    assert fastest(WINDOWS, bad, 4, cost) == Window()


@given(st.integers(1, 1000))
def test_costs_between_and_beyond_what_was_measured(size: int) -> None:
    points = [(1, 1.0), (7, 1.6), (16, 2.5), (56, 6.5)]
    assert interpolate(points, size) == pytest.approx(0.9 + 0.1 * size)


def test_a_noisy_measurement_never_makes_a_forward_free() -> None:
    assert interpolate([(1, 3.0), (7, 1.0)], 500) > 0
