"""Windows by sequence on a CPU: seconds of steps, chances, and what is worth being fed."""

from __future__ import annotations

import pytest

from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.cpu.policy import (
    HOPE,
    MATCH_PRIOR,
    PROBE,
    REST,
    STALE,
    Calibration,
    Outlook,
    RaggedPolicy,
    StepSeconds,
)
from mars.method.acceptance import Dial
from mars.method.windows import Window
from tests.conftest import tiny_checkpoint


def machine(step: float, token: float, masks: float, mask: float, free: int = 0) -> StepSeconds:
    """Seconds on a machine: of a step, of a token after the first and ``free`` others, of masks at all, of a mask."""

    def seconds(count: int, window: Window) -> float:
        fed, predicting = count * window.width, count * window.all_masks
        return step + token * max(fed - 1 - free, 0) + masks * bool(predicting) + mask * predicting

    made = StepSeconds(seconds, 3)
    made.measure(1)
    return made


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


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 12, 16, 40])
def test_seconds_are_measured(tokens: int) -> None:
    seconds = machine(10.0, 1.0, 3.0, 0.5)
    assert seconds(tokens) == pytest.approx(9.0 + tokens)
    assert seconds(tokens, 3) == pytest.approx(9.0 + tokens + 3)
    assert seconds(tokens, 3, 2) == pytest.approx(9.0 + tokens + 5 + 3.0 + 1.0)
    assert seconds.slope(tokens) == pytest.approx(1.0) and seconds.mask_price() == pytest.approx(0.5)


def test_tokens_are_free_up_to_a_number() -> None:
    seconds = machine(10.0, 1.0, 0.0, 0.0, free=7)
    assert seconds(8) == pytest.approx(10.0) and seconds.slope(1) == pytest.approx(0.0)
    assert seconds(16) == pytest.approx(18.0) and seconds.slope(8) == pytest.approx(1.0)


def test_large_steps_are_measured_when_there_are_many_sequences() -> None:
    asked = list[int]()

    def time_step(count: int, _window: Window) -> float:
        asked.append(count)
        return 1.0

    seconds = StepSeconds(time_step, 3, turns=1)
    for sequences, largest in ((1, 16), (2, 16), (8, 32), (512, 64), (1, 64)):
        before = len(asked)
        seconds.measure(sequences)
        assert max(asked) == largest
        assert (len(asked) > before) == (largest > max([0, *asked[:before]])), "measured though it was known"


def test_seconds_follow_real_steps() -> None:
    seconds = machine(10.0, 1.0, 3.0, 0.5)
    for _ in range(100):
        seconds.observe(1, 0, 0, 20.0)
        seconds.observe(1, 4, 0, 26.0)
        seconds.observe(1, 0, 3, 38.0)
    assert seconds(1) == pytest.approx(20.0, rel=0.05)
    assert seconds(1, 4) == pytest.approx(26.0, rel=0.05)
    assert seconds(1, 0, 3) == pytest.approx(38.0, rel=0.05)


def test_single_tokens_that_become_cheaper_make_no_others_cheaper() -> None:
    """As where memory is read faster than a minute ago, and computing takes what it took."""
    seconds = machine(10.0, 1.0, 3.0, 0.5)
    for _ in range(100):
        seconds.observe(1, 0, 0, 5.0)
        seconds.observe(1, 4, 0, 9.0)
    assert seconds(1) == pytest.approx(5.0, rel=0.05) and seconds(1, 4) == pytest.approx(9.0, rel=0.05)


def test_single_tokens_are_timed_now_and_then() -> None:
    """Steps with masks take what they took; single tokens have become twice as fast."""
    policy, one = RaggedPolicy(4, machine(10.0, 0.2, 0.5, 0.1)), drafted(0.99, 0.99, 0.99)
    for _ in range(2 * PROBE):
        (window,) = policy.windows([one])
        assert window.masks
        policy.observe_step([window], 4, policy.seconds(1, window.drafts, window.all_masks))
    before = policy.seconds(1, 0, 3) - policy.seconds(1)
    assert policy.windows([one]) == [Window()], "nothing else shows what single tokens take"
    policy.observe_step([Window()], 1, 5.0)
    assert policy.seconds(1) == pytest.approx(10.0 * 0.5**STALE)
    assert policy.seconds(1, 0, 3) - policy.seconds(1) == pytest.approx(before, rel=0.1)
    assert policy.windows([one])[0].drafts, "one such step is enough"


def test_calibration() -> None:
    learnt = Calibration()
    assert learnt(0.9) > 0.8 and learnt(0.1) < 0.3
    for _ in range(500):
        learnt.observe(0.9, accepted=False)
    assert learnt(0.9) < 0.05 and learnt(0.1) < 0.3


def test_what_the_host_takes_per_step_makes_windows_pay() -> None:
    """A token more costs as much as a step of one, so nothing is gained, unless steps cost something besides."""
    seconds = machine(1.0, 1.0, 0.0, 0.0)
    assert RaggedPolicy(4, seconds).windows([drafted(0.9, 0.9)]) == [Window()]
    assert RaggedPolicy(4, seconds).windows([drafted(0.9, 0.9)], host_seconds=2.0)[0].drafts == 2


def test_slow_windows_of_other_dials_do_not_stop_those_of_exact() -> None:
    policy, threshold = RaggedPolicy(4, machine(10.0, 0.2, 0.5, 0.1)), sequence("threshold=0.9")
    for _ in range(PROBE // 2):
        (window,) = policy.windows([threshold])
        assert window.masks
        policy.observe_step([window], 1, 20.0)  # one token in the time of two
    assert policy.windows([sequence()])[0].masks


def test_cheap_windows_are_full_and_dear_ones_empty() -> None:
    assert RaggedPolicy(4, machine(1.0, 0.0, 0.0, 0.0)).windows([drafted(0.9, 0.9, 0.9)]) == [Window(3, 2, 3)]
    assert RaggedPolicy(4, machine(1.0, 2.0, 2.0, 2.0)).windows([drafted(0.9, 0.9, 0.9), sequence()]) == [Window()] * 2


def test_unlikely_drafts_are_not_fed() -> None:
    policy = experienced(RaggedPolicy(4, machine(1.0, 0.1, 5.0, 1.0)))
    assert policy.windows([drafted(0.95, 0.05, 0.95), drafted(0.05, 0.95), drafted(0.95, 0.95)]) == [
        *(Window(1), Window(), Window(2))
    ]


def test_masks_are_fed_behind_likely_drafts() -> None:
    policy = experienced(RaggedPolicy(4, machine(1.0, 0.05, 0.2, 0.05)))
    likely, unlikely = policy.windows([drafted(0.95, 0.95), drafted(0.05, 0.05)])
    assert (likely, unlikely) == (Window(2, 1, 3), Window(0, 1, 3))


def test_a_draft_in_doubt_has_masks_behind_it_and_behind_the_token_before() -> None:
    policy = RaggedPolicy(4, machine(1.0, 0.02, 0.2, 0.0))
    assert policy.windows([drafted(0.5)]) == [Window(1, 2, 3)]


def test_no_more_is_fed_than_is_cheap() -> None:
    """Up to eight tokens cost nothing, each further one as much as it can bring."""
    policy = RaggedPolicy(4, machine(1.0, 0.6, 0.0, 0.0, free=7))
    (window,) = policy.windows([drafted(0.6, 0.6, 0.6)])
    assert 4 <= window.width <= 8 and window.masks


def test_masks_are_tried_again() -> None:
    """Drafts that were never accepted are not asked for, until enough text has passed."""
    policy, one = RaggedPolicy(4, machine(1.0, 0.05, 0.4, 0.2)), sequence()
    assert policy.windows([one])[0].masks
    for _ in range(20):
        policy.observe_predictions(one, [0.02, 0.02, 0.02])
    one.drafts, one.draft_probabilities = [], []
    steps = next(number for number in range(1000) if policy.windows([one])[0].masks)
    assert 2 * REST < steps < 500


def test_nothing_is_weighed_for_a_while_where_nothing_pays() -> None:
    policy, one = RaggedPolicy(4, machine(1.0, 2.0, 2.0, 2.0)), sequence()
    assert policy.windows([one]) == [Window()]
    policy.seconds = machine(1.0, 0.0, 0.0, 0.0)
    assert [policy.windows([one])[0].masks for _ in range(REST + 1)] == [*[0] * REST, 3]
    policy.seconds = machine(1.0, 0.1, 5.0, 5.0)
    assert policy.windows([sequence()]) == [Window()]
    assert policy.windows([drafted(0.95)]) == [Window(1)], "drafts that are there are weighed at once"


def test_what_is_expected_goes_by_what_came_before() -> None:
    policy, one = RaggedPolicy(4, machine(1.0, 0.05, 0.4, 0.2)), sequence()
    for accepted, probability in ((3, 0.99), (0, 0.2)):
        for _ in range(30):
            policy.observe_predictions(one, [probability] * 3)
            policy.observe_drafts(one, 3, accepted)
    outlook = policy._outlook(one)
    assert outlook.after_hit[0] > outlook.after_miss[0] + 0.3
    new = policy._outlook(sequence())
    assert new.after_hit[0] > new.after_miss[0] + 0.2, "other sequences begin with what is usual"


def test_sampled_sequences_learn_from_what_was_accepted() -> None:
    policy, one = RaggedPolicy(4, machine(1.0, 0.05, 0.4, 0.2)), sequence()
    assert policy._outlook(one).after_miss[0] == HOPE
    for _ in range(20):
        policy.observe_drafts(one, 3, 1)
        policy.observe_predictions(one, [])
    first, second, _third = policy._outlook(one).after_miss
    assert first > 0.95 and second < 0.05


def test_an_outlook_is_copied_whole() -> None:
    outlook = Outlook(2)
    copy = outlook.copy()
    copy.learn([0.0, 0.0], True, 1.0)
    assert copy.after_hit == [0.0, 0.0] and outlook.after_hit == [HOPE, HOPE**2] == copy.after_miss


def test_windows_that_are_slower_than_single_tokens_stop() -> None:
    policy, one = RaggedPolicy(4, machine(1.0, 0.0, 0.0, 0.0)), sequence()
    assert policy.windows([one])[0].masks
    for _ in range(40):
        policy.seconds._masks_lately = 1.0  # they are believed to be cheap, whatever they take
        policy.observe_step([Window(0, 1, 3)], 1, 3.0)
    assert not policy.windows([one])[0].masks


def test_dials_whose_text_depends_on_the_window_get_theirs() -> None:
    policy = RaggedPolicy(4, machine(1.0, 9.0, 9.0, 9.0))
    wanted = [sequence("relaxed=0.5"), sequence("exact", window=Window.of(2, 4)), sequence("one-token")]
    assert policy.windows(wanted) == [Window.of(1, 4), Window.of(2, 4), Window()]


def looked_up(*matches: int) -> Sequence:
    made = drafted(*(0.95 for match in matches if not match))
    made.drafts, made.matches = [0] * len(matches), list(matches)
    return made


def test_drafts_that_were_looked_up_are_worth_what_such_drafts_were_worth() -> None:
    policy = experienced(RaggedPolicy(4, machine(1.0, 0.1, 5.0, 1.0)))
    for _ in range(100):
        policy.observe_drafts(looked_up(2, 3, 4), 3, 0)
        policy.observe_drafts(looked_up(12, 13, 14), 3, 3)
    assert policy.matches(2) < 0.1 and policy.matches(13) > 0.95
    assert policy.matches(3) == MATCH_PRIOR, "nothing is learnt of drafts behind one that was not accepted"
    assert policy.windows([looked_up(12, 13, 14), looked_up(2, 3, 4)]) == [Window(3), Window()]
    assert policy.windows([looked_up(0, 12, 13), looked_up(0, 2, 3)]) == [Window(3), Window(1)]


def test_what_masks_are_worth_is_learnt_from_their_own_drafts() -> None:
    policy, one = RaggedPolicy(4, machine(1.0, 0.05, 0.4, 0.2)), looked_up(0, 9, 10)
    one.draft_probabilities = []
    for _ in range(30):
        policy.observe_drafts(one, 3, 0)
    assert policy._outlook(one).after_miss[0] < 0.1 and policy._outlook(one).after_miss[1:] == [HOPE**2, HOPE**3]
    one.draft_probabilities = [0.9]
    policy.observe_drafts(one, 3, 3)
    assert policy.matches(9) > MATCH_PRIOR < policy.matches(10)
