"""All rows at once, in torch and in the kernel, as one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from mars.integrations.vllm import batch
from mars.integrations.vllm.batch import COUNTED, Forward, Next
from mars.integrations.vllm.windows import drafts_in, next_window

MASK, WORDS, WIDTH = 9, 4, 8
"""Few enough words that drafts are right now and then"""
TOLD = {
    "exact": (torch.inf, 0.0),
    "relaxed": (-1.0, 0.0),
    "threshold": (-torch.inf, 0.5),
    "one-token": (torch.inf,) * 2,
}
"""Dials as the kernel knows them"""
Advance = Callable[..., Next]


def in_torch() -> Advance:
    return batch.advance


def in_triton() -> Advance:
    pytest.importorskip("triton")
    from mars.integrations.vllm.kernel import advance

    return advance


@some.composite
def rows(draw: Any) -> list[dict[str, Any]]:
    """What rows fed, what was likeliest behind each place, how many of the drafts were taken, and their dials."""
    word = some.integers(0, WORDS - 1)
    found = []
    for _ in range(draw(some.integers(1, 5))):
        drafts = draw(some.lists(word, max_size=4))
        fed = drafts + draw(some.sampled_from([[], [MASK] * 2, [MASK] * 4, [-1, -1], [MASK, -1]]))
        row = {
            "fed": fed,
            "best": draw(some.lists(word, min_size=len(fed) + 1, max_size=len(fed) + 1)),
            "taken": draw(some.integers(-1, len(drafts))),
            "dial": draw(some.sampled_from(list(TOLD))),
            "sure": [draw(some.sampled_from([0.2, 0.9])) for _ in range(len(fed) + 1)],
        }
        found.append(row)
    return found


def forward(found: list[dict[str, Any]], written: list[list[int]], *, greedy: bool, device: str) -> Forward:
    """Rows whose dials lie in slots in the other direction."""
    thresholds = any(row["dial"] == "threshold" for row in found)
    dials = torch.tensor([TOLD[row["dial"]] for row in reversed(found)], device=device)
    tokens = torch.tensor([each + [-1] * (WIDTH + 1 - len(each)) for each in written], device=device)
    return Forward(
        fed=torch.tensor([place for row in found for place in (7, *row["fed"])], dtype=torch.int32, device=device),
        starts=torch.tensor([0, *accumulate(len(row["best"]) for row in found)], dtype=torch.int32, device=device),
        best=torch.tensor([word for row in found for word in row["best"]], device=device),
        slots=torch.arange(len(found) - 1, -1, -1, dtype=torch.int32, device=device),
        emitted=None if greedy else torch.tensor(list(map(len, written)), dtype=torch.int32, device=device),
        sampled=None if greedy else tokens,
        dials=None if greedy else dials,
        sure=torch.tensor([p for row in found for p in row["sure"]], device=device) if thresholds else None,
        counts=torch.zeros(len(COUNTED), dtype=torch.int64, device=device),
    )


def greedily(fed: list[int], best: list[int]) -> list[int]:
    """What the AR model would write, for as long as the window goes along."""
    tokens = [best[0]]
    for place, word in zip(fed, best[1:], strict=True):
        if place != tokens[-1]:
            break
        tokens.append(word)
    return tokens


def check(advance: Advance, found: list[dict[str, Any]], masks: int, *, greedy: bool, device: str = "cpu") -> None:
    """Not ``greedy``: drafts were taken in any other way, or a prompt is still being read."""
    written = [
        greedily(row["fed"], row["best"]) if greedy else [*row["fed"][: row["taken"]], 1] if row["taken"] >= 0 else []
        for row in found
    ]
    told = forward(found, written, greedy=greedy, device=device)
    after = advance(told, mask=MASK, masks=masks, width=WIDTH)
    counts = dict.fromkeys(COUNTED, 0)
    for number, (row, tokens) in enumerate(zip(found, written, strict=True)):
        fed, best, dial = row["fed"], row["best"], "exact" if greedy else row["dial"]
        known = drafts_in(fed, MASK)
        trusted = 0 if dial == "one-token" else None
        if dial == "threshold":
            sure = [p >= 0.5 for p in row["sure"][(known or 0) + 1 :]]
            trusted = [*sure, False].index(False)
        window = next_window(fed, len(tokens), best, mask=MASK, masks=masks, trusted=trusted)
        assert after.places[number].tolist() == window + [MASK] * (WIDTH - len(window))
        assert after.sampled[number].tolist() == tokens + [-1] * (WIDTH + 1 - len(tokens))
        assert after.emitted[number] == len(tokens)
        if greedy:
            assert after.rejected[number] == len(fed) + 1 - len(tokens)
        if tokens:
            lenient = dial in ("relaxed", "threshold")
            counts["forwards"] += 1
            counts["tokens"] += len(tokens)
            counts["drafts"] += known or 0
            counts["accepted"] += len(tokens) - 1
            counts["agreed"] += sum(map(int.__eq__, tokens[:-1], best)) if lenient else len(tokens) - 1
    assert dict(zip(COUNTED, told.counts.tolist(), strict=True)) == counts


@pytest.mark.parametrize("made", [in_torch, in_triton])
@pytest.mark.parametrize("greedy", [True, False])
def test_rows_do_as_one_does(made: Callable[[], Advance], greedy: bool) -> None:
    advance = made()

    @settings(max_examples=60, deadline=None)
    @given(rows(), some.integers(0, 4))
    def holds(found: list[dict[str, Any]], masks: int) -> None:
        check(advance, found, masks, greedy=greedy)

    holds()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("greedy", [True, False])
def test_on_the_device(greedy: bool) -> None:
    advance = in_triton()

    @settings(max_examples=30, deadline=None)
    @given(rows(), some.integers(0, 4))
    def holds(found: list[dict[str, Any]], masks: int) -> None:
        check(advance, found, masks, greedy=greedy, device="cuda")

    holds()
