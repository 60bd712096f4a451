"""Windows: who follows whom, where masks sit, and how rows of different size share a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars import MarsError
from mars.method.windows import NOWHERE, Shape, Window, lay_out, stack

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=6)
MASK = 99


@st.composite
def windows(draw: st.DrawFn) -> Window:
    claims = draw(st.lists(st.integers(0, 9), max_size=5))
    points = draw(st.sets(st.integers(0, len(claims))))
    return lay_out(draw(tokens), claims, mask=MASK, masks=draw(st.integers(0, 4)), points=points)


def path(window: Window, index: int) -> list[int]:
    """Oracle: what a position sees, by walking up its parents."""
    return [] if index == NOWHERE else [*path(window, window.parents[index]), index]


@given(windows())
def test_a_position_sees_exactly_its_path_and_stands_behind_it(window: Window) -> None:
    visible, offsets = window.visibility(), window.offsets()
    for index in range(len(window.tokens)):
        assert visible[index].nonzero()[:, 0].tolist() == path(window, index)
        assert offsets[index] == len(path(window, index)) - 1


@given(tokens, st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4), st.data())
def test_a_group_sees_the_sure_tokens_its_claims_and_itself(sure, claims, masks, data) -> None:
    points = data.draw(st.sets(st.integers(0, len(claims)), min_size=1))
    window = lay_out(sure, claims, mask=MASK, masks=masks, points=points)
    assert {point for point, start in enumerate(window.groups) if start != NOWHERE} == points
    for point in points:
        for order in range(masks):
            seen = [window.tokens[i] for i in path(window, window.groups[point] + order)]
            assert seen == [*sure, *claims[:point], *[MASK] * (order + 1)]


@given(windows())
def test_anchor_and_trunk(window: Window) -> None:
    assert window.tokens[window.anchor + 1 : window.trunk] == window.claims
    assert set(window.tokens[window.trunk :]) <= {MASK}


def test_a_chain_is_plain_causal_and_a_tree_is_not() -> None:
    chain = lay_out([1, 2], [3, 4], mask=MASK, masks=3, points=Shape.parse("chain").points(2))
    assert chain.is_chain
    assert torch.equal(chain.visibility(), torch.ones(7, 7).tril().bool())
    assert chain.offsets() == list(range(7))
    assert not lay_out([1, 2], [3, 4], mask=MASK, masks=3, points={0, 2}).is_chain


@pytest.mark.parametrize(
    ("text", "claims", "points"),
    [("chain", 3, (3,)), ("tree", 3, (0, 1, 2, 3)), ("tree=2", 3, (0, 3)), ("tree=9", 1, (0, 1)), ("tree", 0, (0,))],
)
def test_shapes(text: str, claims: int, points: tuple[int, ...]) -> None:
    assert Shape.parse(text).points(claims) == points
    assert str(Shape.parse(text)) == text


@pytest.mark.parametrize("text", ["", "tree=", "tree=0", "tree=-1", "tree=x", "chain=2", "forest"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(MarsError, match="unknown window"):
        Shape.parse(text)


def test_windows_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="sure"):
        lay_out([])
    with pytest.raises(ValueError, match="do not fit"):
        lay_out([1], [2], points={2})


@given(st.lists(windows(), min_size=1, max_size=5))
def test_stacked_rows_find_their_own_logits(rows: list[Window]) -> None:
    """Logits that name (row, position in the window) come back where each row expects them."""
    batch = stack(rows)
    width = batch.tokens.shape[1]
    logits = torch.full((len(rows), width, 2), -1.0)
    for r, window in enumerate(rows):
        pad = width - len(window.tokens)
        assert batch.tokens[r, pad:].tolist() == list(window.tokens)
        assert batch.offsets[r, pad:].tolist() == window.offsets()
        for i in range(len(window.tokens)):
            logits[r, pad + i] = torch.tensor([r, i])
    tail = logits[:, width - batch.tail :]
    trunk = batch.trunk_logits(tail)
    for r, window in enumerate(rows):
        for j in range(len(window.claims) + 1):
            assert trunk[r, j].tolist() == [r, window.anchor + j]
            masks, count = batch.mask_logits(tail, torch.tensor([min(j, len(w.claims)) for w in rows]))
            start = window.groups[j]
            assert count[r] == (0 if start == NOWHERE else window.masks)
            for o in range(int(count[r])):
                assert masks[r, o].tolist() == [r, start + o]
