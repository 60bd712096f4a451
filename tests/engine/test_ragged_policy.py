"""Windows by sequence on a CPU: prices, chances, and what is worth being fed."""

from __future__ import annotations

import pytest

from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.cpu.policy import HOPE, Calibration, Prices, RaggedPolicy, StepPrices
from mars.method.acceptance import Dial
from mars.method.windows import Window
from tests.conftest import tiny_checkpoint


def timed(step: float, draft: float, masks: float, mask: float) -> StepPrices:
    """A machine with these prices: of single tokens, a draft, masks at all, and one of them."""

    def seconds(count: int, window: Window, drafts: int) -> float:
        return step + count * (drafts * draft + window.all_masks * mask) + masks * bool(window.all_masks)

    return StepPrices(seconds, 4)


def sequence(dial: str = "exact", **options: object) -> Sequence:
    request = Request(prompt=[1, 2], dial=Dial.parse(dial), block_size=4, **options)  # type: ignore[arg-type]
    return Sequence.of(request, tiny_checkpoint("llama"))


def drafted(*probabilities: float) -> Sequence:
    made = sequence()
    made.drafts, made.drafts_emitted = [0] * len(probabilities), False
    made.draft_probabilities = list(probabilities)
    return made


def experienced(policy: RaggedPolicy) -> RaggedPolicy:
    for probability, accepted, times in ((0.95, True, 200), (0.05, False, 200)):
        for _ in range(times):
            policy.calibration.observe(probability, accepted)
    return policy


@pytest.mark.parametrize("count", [1, 2, 4])
def test_prices_are_measured(count: int) -> None:
    prices = timed(10.0, 1.0, 3.0, 2.0)(count)
    assert prices == pytest.approx((10.0, 1.0, 3.0, 2.0))
    assert prices.of(2, 0) == pytest.approx(12.0) and prices.of(2, 3) == pytest.approx(21.0)


def test_prices_follow_real_steps() -> None:
    prices = timed(10.0, 1.0, 3.0, 2.0)
    for _ in range(100):
        prices.observe(1, 0, 0, 20.0)
        prices.observe(1, 0, 3, 38.0)
    assert prices(1).of(0, 0) == pytest.approx(20.0, rel=0.05)
    assert prices(1).of(0, 3) == pytest.approx(38.0, rel=0.05)


def test_calibration() -> None:
    learnt = Calibration()
    assert learnt(0.9) > 0.8 and learnt(0.1) < 0.3
    for _ in range(500):
        learnt.observe(0.9, accepted=False)
    assert learnt(0.9) < 0.05 and learnt(0.1) < 0.3


def test_cheap_windows_are_full_and_dear_ones_empty() -> None:
    assert RaggedPolicy(4, timed(1.0, 0.0, 0.0, 0.0)).windows([drafted(0.9, 0.9, 0.9)]) == [Window(3, 1, 3)]
    assert RaggedPolicy(4, timed(1.0, 2.0, 2.0, 2.0)).windows([drafted(0.9, 0.9, 0.9), sequence()]) == [Window()] * 2


def test_unlikely_drafts_are_not_fed() -> None:
    policy = experienced(RaggedPolicy(4, timed(1.0, 0.1, 5.0, 1.0)))
    assert policy.windows([drafted(0.95, 0.05, 0.95), drafted(0.05, 0.95), drafted(0.95, 0.95)]) == [
        *(Window(1), Window(), Window(2))
    ]


def test_masks_are_fed_behind_likely_drafts() -> None:
    policy = experienced(RaggedPolicy(4, timed(1.0, 0.05, 0.4, 0.1)))
    likely, unlikely = policy.windows([drafted(0.95, 0.95), drafted(0.3, 0.3)])
    assert (likely, unlikely) == (Window(2, 1, 3), Window(0, 1, 3))


def test_masks_are_tried_again() -> None:
    """Drafts that were never accepted are not asked for, until enough text has passed."""
    policy, one = RaggedPolicy(4, timed(1.0, 0.05, 0.4, 0.2)), sequence()
    assert policy.windows([one])[0].masks
    for _ in range(20):
        policy.observe_predictions(one, [0.02, 0.02, 0.02])
    one.drafts, one.draft_probabilities = [], []
    steps = next(number for number in range(1000) if policy.windows([one])[0].masks)
    assert 10 < steps < 500


def test_sampled_sequences_learn_from_what_was_accepted() -> None:
    policy, one = RaggedPolicy(4, timed(1.0, 0.05, 0.4, 0.2)), sequence()
    assert policy._outlook(one).survival[0] == HOPE
    for _ in range(20):
        policy.observe_drafts(one, 3, 1)
    first, second, _third = policy._outlook(one).survival
    assert first > 0.95 and second < 0.05


def test_windows_that_are_slower_than_single_tokens_stop() -> None:
    policy, one = RaggedPolicy(4, timed(1.0, 0.0, 0.0, 0.0)), sequence()
    assert policy.windows([one])[0].masks
    for _ in range(40):
        policy.prices._masks = 1.0  # they are believed to be cheap, whatever they take
        policy.observe_step([Window(0, 1, 3)], 1, 3.0)
    assert not policy.windows([one])[0].masks


def test_dials_whose_text_depends_on_the_window_get_theirs() -> None:
    policy = RaggedPolicy(4, timed(1.0, 9.0, 9.0, 9.0))
    wanted = [sequence("relaxed=0.5"), sequence("exact", mask_groups=2), sequence("one-token")]
    assert policy.windows(wanted) == [Window.of(1, 4), Window.of(2, 4), Window()]


def test_prices_of_nothing() -> None:
    assert Prices(1.0, 2.0, 3.0, 4.0).of(0, 0) == 1.0
