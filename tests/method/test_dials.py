"""Dials: random logits through windows, each rule beside a one-line oracle."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars import Dial, MarsError, Sampling
from mars.method.dials import MEASURES, Decision, DialBatch, confidence, decide
from mars.method.sampling import SamplingBatch
from mars.method.windows import NOWHERE, Shape, Window, lay_out, stack

VOCABULARY, MASK = 6, 5
"""Five real tokens: random claims are right often enough."""
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
def cases(draw: st.DrawFn) -> tuple[list[Dial], list[Window], torch.Tensor, list[bool]]:
    """Rows with any dial and any window that dial can feed, and logits for them."""
    rows, windows, settled = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        dial = draw(dials)
        claims = draw(st.lists(st.integers(0, MASK - 1), max_size=3))
        done = not dial.checks
        shape = Shape(draw(st.sampled_from([1, 2, None])))
        points = () if not dial.uses_masks else (len(claims),) if done else shape.points(len(claims))
        sure = draw(st.lists(st.integers(0, MASK - 1), min_size=1, max_size=3))
        rows.append(dial)
        settled.append(done)
        windows.append(lay_out(sure, claims, mask=MASK, masks=draw(st.integers(1, 3)), points=points))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tail = stack(windows).tail
    return rows, windows, torch.randn(len(rows), tail, VOCABULARY, generator=generator) * 2, settled


def run(rows, windows, logits, settled, sampling=None) -> Decision:
    return decide(
        stack(windows),
        logits,
        DialBatch.of(rows),
        SamplingBatch.of(sampling or [Sampling()] * len(rows), VOCABULARY, MASK),
        positions=torch.tensor([window.anchor for window in windows]),
        settled=torch.tensor(settled),
    )


@settings(deadline=None, max_examples=300)
@given(cases())
def test_greedy_decisions(case) -> None:
    rows, windows, logits, settled = case
    decision = run(*case)
    for r, (dial, window) in enumerate(zip(rows, windows, strict=True)):
        own = logits[r, logits.shape[1] - len(window.tokens) + window.anchor :].clone()
        own[:, MASK] = -math.inf
        probabilities, best = own.softmax(-1), own.argmax(-1).tolist()
        claims = window.claims

        agrees = [claim == ar for claim, ar in zip(claims, best, strict=False)]
        assert decision.agrees[r, : len(claims)].tolist() == agrees

        delta = dial.tolerance
        passes = [
            agrees[j] or (delta < 1 and probabilities[j, claim] >= delta * probabilities[j].max())
            for j, claim in enumerate(claims)
        ]
        accepted = len(claims) if settled[r] else len(list(takewhile(bool, passes)))
        assert decision.accepted[r] == accepted
        assert decision.token[r] == best[accepted]

        start = window.groups[accepted]
        group = [] if start == NOWHERE else range(start - window.anchor, start - window.anchor + window.masks)
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
    sure = confidence(logits, DialBatch.of([Dial("threshold", 0.5, measure)]))
    assert ((sure >= 0) & (sure <= 1 + 1e-6)).all()
    assert sure[0, 1].item() == pytest.approx(1)
    assert sure[0, 0].item() == pytest.approx(_confidence(logits[0, 0].softmax(-1), measure), abs=1e-5)


def test_relaxed_1_is_exact_even_at_a_tie() -> None:
    window = lay_out([0], [2], mask=MASK, masks=1, points=(1,))
    logits = torch.zeros(1, 3, VOCABULARY)  # all tied: the AR choice is token 0
    assert run([Dial("relaxed", 1.0)], [window], logits, [False]).accepted == 0
    assert run([Dial("relaxed", 0.99)], [window], logits, [False]).accepted == 1


def test_a_relaxed_claim_outside_the_truncated_policy_fails() -> None:
    window = lay_out([0], [2], mask=MASK, masks=1, points=(1,))
    logits = torch.zeros(1, 3, VOCABULARY)
    logits[:, :, 0] = 0.1
    sampling = [Sampling(temperature=1.0, top_k=1, seed=1)]
    assert run([Dial("relaxed", 0.5)], [window], logits, [False], sampling).accepted == 0


def test_penalties_count_the_claims_before_a_position() -> None:
    """The second claim repeats the first: a penalty that sees it must turn it down."""
    window = lay_out([0], [2, 2], mask=MASK, masks=1, points=(2,))
    logits = torch.zeros(1, 4, VOCABULARY)
    logits[:, :, 2] = 1.0
    seen, counts = torch.zeros(1, VOCABULARY).bool(), torch.zeros(1, VOCABULARY)
    for penalty, accepted in ((0.0, 2), (5.0, 1)):
        sampling = SamplingBatch.of([Sampling(presence_penalty=penalty)], VOCABULARY, MASK)
        decision = decide(
            stack([window]),
            logits,
            DialBatch.of([Dial("exact")]),
            sampling,
            positions=torch.tensor([0]),
            settled=torch.tensor([False]),
            seen=seen,
            counts=counts,
        )
        assert decision.accepted == accepted
