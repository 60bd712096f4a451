"""Drafts that are looked up in the text, beside a search through all of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars.method.lookup import KEY, LONGEST, REACH, Lookup, look_up

tokens = st.lists(st.integers(0, 3), max_size=40)


def searched(text: list[int], predicted: list[int], most: int) -> tuple[list[int], list[int]]:
    """Keep as many predictions as lead to tokens that were followed by something before, the last time counts."""
    for kept in range(len(predicted), -1, -1):
        whole = [*text, *predicted[:kept]]
        places = [at for at in range(KEY, len(text)) if len(text) >= KEY and text[at - KEY : at] == whole[-KEY:]]
        if not places:
            continue
        match = next(
            (
                size
                for size in range(KEY, LONGEST)
                if size == places[-1] or text[places[-1] - size - 1] != whole[-size - 1]
            ),
            LONGEST,
        )
        copied = min(most - kept, REACH * match)
        for at in range(places[-1], places[-1] + copied):
            whole.append(whole[at])
        matches = [min(match + ahead, LONGEST) for ahead in range(copied)]
        return whole[len(text) :], [*[0] * kept, *matches]
    return predicted, []


@given(st.lists(tokens, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3), st.integers(3, 15))
def test_drafts_are_what_a_search_finds(parts: list[list[int]], predicted: list[int], most: int) -> None:
    lookup, text = Lookup(), list[int]()
    for part in parts:
        text += part
        assert lookup.drafts(text, predicted, most) == searched(text, predicted, most)


@pytest.mark.parametrize(
    ("text", "predicted", "drafts", "matches"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [], [7, 8, 9, 5, 6, 7], [2, 3, 4, 5, 6, 7]),  # beyond the end: the drafts themselves
        ([5, 6, 7, 8, 9, 1, 5], [6], [6, 7, 8, 9], [0, 2, 3, 4]),  # a prediction leads to an earlier place
        ([5, 6, 7, 8, 9, 5, 6], [3], [7, 8, 9, 5], [2, 3, 4, 5]),  # none does: the text says something else
        ([1, 2, 3, 1, 2, 4, 1, 2], [], [4, 1, 2, 4, 1, 2], [2, 3, 4, 5, 6, 7]),  # the last time counts
        ([1, 2, 3, 4], [5, 6], [5, 6], []),
        ([1], [2, 3], [2, 3], []),
        ([], [], [], []),
    ],
)
def test_examples(text: list[int], predicted: list[int], drafts: list[int], matches: list[int]) -> None:
    found = Lookup().drafts(text, predicted, 15)
    assert (found.drafts[: len(drafts)], found.matches[: len(matches)]) == (drafts, matches)
    assert len(found.matches) in (0, len(found.drafts)) and bool(found.matches) == bool(matches)


@given(st.lists(tokens, min_size=1, max_size=4), st.data())
def test_several_texts_at_once_on_the_device(texts: list[list[int]], data: st.DataObject) -> None:
    """The same drafts; where the match is short, the device drafts more of them."""
    most, room = 7, 48
    masks = data.draw(st.integers(0, 3))
    predicted = [data.draw(st.lists(st.integers(0, 3), max_size=masks)) for _ in texts]
    rows = torch.tensor([[*text, *[9] * (room - len(text))] for text in texts])
    found, count = look_up(
        rows,
        torch.tensor([len(text) for text in texts]),
        torch.tensor([[*each, *[8] * (masks - len(each))] for each in predicted]).view(len(texts), masks).long(),
        torch.tensor([len(each) for each in predicted]),
        most,
    )
    for text, own, drafts, real in zip(texts, predicted, found.tolist(), count.tolist(), strict=True):
        expected, matches = Lookup().drafts(text, own, most)
        assert drafts[: len(expected)] == expected
        assert real == (most if matches else len(own))
