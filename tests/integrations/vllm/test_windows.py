"""What a row feeds next."""

from __future__ import annotations

import pytest

from mars.integrations.vllm.windows import drafts_in, next_window

M = 9
"""The mask"""


def after(fed: list[int], emitted: int, best: list[int], trusted: int | None = None) -> list[int]:
    return next_window(fed, emitted, best, mask=M, masks=2, trusted=trusted)


def test_masks_alone_after_the_prompt() -> None:
    assert after([], 1, [5]) == [M, M, M, M]


def test_what_the_masks_said_becomes_the_drafts() -> None:
    assert after([M, M, M, M], 1, [1, 2, 3, 4, 5]) == [2, 3, M, M]


def test_accepted_drafts_are_followed_by_what_the_masks_behind_them_said() -> None:
    assert after([7, 8, M, M], 3, [7, 8, 1, 2, 3]) == [2, 3, M, M]


@pytest.mark.parametrize("emitted", [1, 2])
def test_a_miss_leaves_masks_alone(emitted: int) -> None:
    assert after([7, 8, M, M], emitted, [7, 8, 1, 2, 3]) == [M, M, M, M]


def test_a_window_that_was_cut_has_fewer_drafts() -> None:
    assert after([7, 8, M], 3, [7, 8, 1, 2]) == [2, M, M, M]
    assert after([7, 8], 3, [7, 8, 1]) == [M, M, M, M]  # no mask was left


def test_padding_is_no_window() -> None:
    assert drafts_in([-1, -1], M) is None
    assert after([7, -1, -1, -1], 2, [7, 1, 2, 3, 4]) == [M, M, M, M]


def test_only_trusted_words_are_taken() -> None:
    assert after([M, M, M, M], 1, [1, 2, 3, 4, 5], trusted=1) == [2, M, M, M]
    assert after([M, M, M, M], 1, [1, 2, 3, 4, 5], trusted=0) == [M, M, M, M]
