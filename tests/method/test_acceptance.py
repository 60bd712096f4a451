"""Dials: random logits through windows, each rule beside a one-line oracle."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars import Dial, MarsError, SamplingParams
from mars.method.acceptance import MEASURES, Decision, DialTensors, confidence, decide
from mars.method.sampling import SamplingTensors
from mars.method.windows import NO_GROUP, Window, WindowBatch, build_windows

VOCABULARY, MASK = 6, 5
"""Five real tokens: random drafts are right often enough."""
dials = st.one_of(
    st.sampled_from([Dial("one-token"), Dial("exact")]),
    st.floats(0.01, 1).map(lambda value: Dial("relaxed", value)),
    st.builds(Dial, st.just("threshold"), st.floats(0, 1), st.sampled_from(MEASURES)),
)


@given(dials)
def test_round_trip(dial: Dial) -> None:
    assert Dial.parse(str(dial)) == dial


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one-token", Dial("one-token")),
        ("exact", Dial("exact")),
        ("relaxed=0.3", Dial("relaxed", 0.3)),
        ("threshold=.95", Dial("threshold", 0.95)),
        ("threshold:probability=1", Dial("threshold", 1.0)),
        (" threshold:entropy=0.5 ", Dial("threshold", 0.5, "entropy")),
        ("threshold:margin=0", Dial("threshold", 0.0, "margin")),
    ],
)
def test_parse(text: str, expected: Dial) -> None:
    assert Dial.parse(text) == expected


def test_a_measure_belongs_to_threshold() -> None:
    with pytest.raises(MarsError, match="unknown dial"):
        Dial("exact", measure="margin")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fast", "unknown dial"),
        ("", "unknown dial"),
        ("exact:margin", "unknown dial"),
        ("threshold:luck=0.5", "unknown dial"),
        ("threshold", "needs a value"),
        ("relaxed=", "needs a value"),
        ("exact=0.5", "takes no value"),
        ("threshold=high", "not a number"),
        ("threshold=1.5", "between 0 and 1"),
        ("threshold=-0.1", "between 0 and 1"),
        ("threshold=nan", "between 0 and 1"),
        ("relaxed=0", "above 0"),
        ("relaxed=1.01", "above 0"),
    ],
)
def test_bad_dials_say_what_to_do(text: str, says: str) -> None:
    with pytest.raises(MarsError, match=says):
        Dial.parse(text)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Dial], WindowBatch, torch.Tensor, list[bool]]:
    """Sequences with any dial and any window that dial can feed, and logits for them."""
    sequences, emitted, drafts, groups, masks = [], [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        dial = draw(dials)
        sequences.append(dial)
        emitted.append(not dial.verifies)
        masks.append(draw(st.integers(1, 3)))
        drafts.append(draw(st.lists(st.integers(0, MASK - 1), max_size=3)))
        groups.append(draw(st.sampled_from([1, 2, 4])))
    window = Window(3, 4, 3) if any(dial.uses_masks for dial in sequences) else Window(3)
    windows = batch_of(drafts, emitted, groups, masks, window)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return sequences, windows, torch.randn(windows.tokens.numel(), VOCABULARY, generator=generator) * 2, emitted


def batch_of(drafts, emitted, groups, masks, window: Window) -> WindowBatch:
    return build_windows(
        window,
        MASK,
        last=torch.zeros(len(drafts), dtype=torch.long),
        drafts=torch.tensor([(each + [0] * 3)[:3] for each in drafts]),
        draft_count=torch.tensor([len(each) for each in drafts]),
        emitted=torch.tensor(emitted),
        groups=torch.tensor(groups),
        masks=torch.tensor(masks),
    )


def run(sequences, windows, logits, emitted, params=None, **history) -> Decision:
    return decide(
        windows,
        logits,
        DialTensors.of(sequences),
        SamplingTensors.of(params or [SamplingParams()] * len(sequences), VOCABULARY, MASK),
        positions=torch.zeros(len(sequences), dtype=torch.long),
        emitted=torch.tensor(emitted),
        **history,
    )


@settings(deadline=None, max_examples=300)
@given(cases())
def test_greedy_decisions(case) -> None:
    sequences, windows, logits, emitted = case
    decision = run(*case)
    for r, dial in enumerate(sequences):
        own = logits[int(windows.rows[r, 0]) :].clone()
        own[:, MASK] = -math.inf
        probabilities, best = own.softmax(-1), own.argmax(-1).tolist()
        drafts = windows.drafts[r, : windows.draft_count[r]].tolist()

        agrees = [draft == ar for draft, ar in zip(drafts, best, strict=False)]
        assert decision.agrees[r, : len(drafts)].tolist() == agrees

        delta = dial.tolerance
        passes = [
            agrees[j] or (delta < 1 and probabilities[j, draft] >= delta * probabilities[j].max())
            for j, draft in enumerate(drafts)
        ]
        accepted = len(drafts) if emitted[r] else len(list(takewhile(bool, passes)))
        assert decision.accepted[r] == accepted
        assert decision.token[r] == best[accepted]

        start = int(windows.groups[r, accepted])
        group = [] if start == NO_GROUP else range(start, start + int(windows.mask_count[r]))
        assert decision.draft_count[r] == len(group)
        assert decision.drafts[r, : len(group)].tolist() == [best[i] for i in group]
        sure_of = [_confidence(probabilities[i], dial.measure) >= dial.trust for i in group]
        assert decision.trusted[r] == len(list(takewhile(bool, sure_of)))
    assert MASK not in decision.token and MASK not in decision.drafts


def _confidence(p: torch.Tensor, measure: str) -> float:
    first, second = p.topk(2).values
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    return {"probability": float(first), "margin": float(first - second), "entropy": math.exp(-entropy)}[measure]


@given(st.sampled_from(MEASURES), st.integers(0, 1000))
def test_confidence_lies_between_0_and_1_and_a_certain_position_has_1(measure, seed) -> None:
    logits = torch.randn(1, 2, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    logits[0, 1] = torch.tensor([100.0] + [0.0] * (VOCABULARY - 1))
    sure = confidence(logits, DialTensors.of([Dial("threshold", 0.5, measure)]))
    assert ((sure >= 0) & (sure <= 1 + 1e-6)).all()
    assert sure[0, 1].item() == pytest.approx(1)
    assert sure[0, 0].item() == pytest.approx(_confidence(logits[0, 0].softmax(-1), measure), abs=1e-5)


def chain(*drafts: int) -> WindowBatch:
    return batch_of([list(drafts)], [False], [1], [1], Window(len(drafts), 1, 1))


def test_relaxed_1_is_exact_even_at_a_tie() -> None:
    logits = torch.zeros(3, VOCABULARY)  # all tied: the AR choice is token 0
    assert run([Dial("relaxed", 1.0)], chain(2), logits, [False]).accepted == 0
    assert run([Dial("relaxed", 0.99)], chain(2), logits, [False]).accepted == 1


def test_a_relaxed_draft_outside_the_truncated_policy_fails() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 0] = 0.1
    params = [SamplingParams(temperature=1.0, top_k=1, seed=1)]
    assert run([Dial("relaxed", 0.5)], chain(2), logits, [False], params).accepted == 0


def test_penalties_count_the_drafts_before_a_position() -> None:
    """The second draft repeats the first: a penalty that counts it must reject it."""
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 2] = 1.0
    history = {"seen": torch.zeros(1, VOCABULARY).bool(), "counts": torch.zeros(1, VOCABULARY)}
    for penalty, accepted in ((0.0, 2), (5.0, 1)):
        params = [SamplingParams(presence_penalty=penalty)]
        assert run([Dial("exact")], chain(2, 2), logits, [False], params, **history).accepted == accepted
