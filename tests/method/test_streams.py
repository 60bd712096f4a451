"""The layout of both streams against its description, spelled out position by position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.method.streams import (
    IGNORED,
    Pack,
    fixed_anchors,
    lay_out,
    next_tokens,
    random_anchors,
)
from mars.method.visibility import PADDING, sees, visibility_table

MASK = 99


def one_row(turns: list[tuple[int, bool]], padding: int = 0, documents: int = 1) -> Pack:
    """A row of chats, each made of ``(length, is it the assistant's?)`` turns; tokens count up from 10."""
    assistant = [said for _ in range(documents) for length, said in turns for _ in range(length)]
    numbers = [number for number in range(documents) for length, _ in turns for _ in range(length)]
    total = len(assistant) + padding
    return Pack(
        torch.arange(10, 10 + total)[None],
        torch.tensor([numbers + [PADDING] * padding]),
        torch.tensor([assistant + [False] * padding]),
    )


@st.composite
def packs(draw: st.DrawFn) -> Pack:
    turns = draw(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5))
    return one_row(turns, draw(st.integers(0, 3)), draw(st.integers(1, 3)))


def test_labels_are_the_assistants_next_tokens() -> None:
    pack = one_row([(3, False), (2, True), (2, False), (1, True)], padding=2)
    assert next_tokens(pack).tolist() == [[IGNORED, IGNORED, 13, 14, IGNORED, IGNORED, 17, IGNORED, IGNORED, IGNORED]]


def test_labels_stop_at_the_end_of_a_document() -> None:
    """The first token of the next document is nobody's to predict, even if an assistant wrote it."""
    pack = one_row([(2, True)], documents=2)
    assert next_tokens(pack).tolist() == [[11, IGNORED, 13, IGNORED]]


def test_a_group_of_masks_behind_an_anchor() -> None:
    pack = one_row([(3, False), (6, True)])
    streams = lay_out(pack, torch.tensor([[4, PADDING]]), 3, MASK, width=8)
    assert streams.tokens[0].tolist() == [*range(10, 19), *[MASK] * 8]
    assert streams.positions[0, 9:].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert streams.labels[0, 9:].tolist() == [16, 17, 18, *[IGNORED] * 5]
    assert streams.offsets[0, 9:12].tolist() == [1, 2, 3]


def test_masks_past_the_answer_are_not_asked() -> None:
    pack = one_row([(1, False), (3, True), (2, False), (3, True)])
    streams = lay_out(pack, torch.tensor([[1, 3, 7]]), 3, MASK)
    asked = streams.labels[0, 9:].view(3, 3).tolist()
    assert asked[0] == [13, IGNORED, IGNORED]  # the answer ends; the next one is not this one's to guess
    assert asked[1] == [IGNORED] * 3  # behind the answer's last token there is nothing
    assert asked[2] == [IGNORED] * 3  # past the end of the row


def test_positions_restart_with_every_document() -> None:
    pack = one_row([(1, False), (3, True)], documents=2)
    streams = lay_out(pack, torch.tensor([[5]]), 2, MASK)
    assert streams.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 2, 3]


@settings(deadline=None)
@given(pack=packs(), masks=st.integers(1, 4), groups=st.integers(0, 4), seed=st.integers(0, 99))
def test_visibility_is_the_description(pack: Pack, masks: int, groups: int, seed: int) -> None:
    """Clean sees earlier clean of its document; a mask the clean text up to its anchor and its own group before it."""
    anchors = random_anchors(pack, groups, torch.Generator().manual_seed(seed))
    streams = lay_out(pack, anchors, masks, MASK)
    visible = visibility_table(streams.visibility, streams.visibility)[0]
    length = pack.tokens.shape[1]
    documents = pack.documents[0].tolist()

    def described(query: int, key: int) -> bool:
        if query < length:
            return key <= query and documents[key] == documents[query]
        group, place = divmod(query - length, masks)
        anchor = int(anchors[0, group])
        if key < length:
            return key <= anchor and documents[key] == documents[anchor]
        return (key - length) // masks == group and (key - length) % masks <= place

    for query in range(visible.shape[0]):
        if query >= length and anchors[0, (query - length) // masks] == PADDING:
            continue  # an unused group: nobody sees it and nobody asks it
        assert visible[query].tolist() == [described(query, key) for key in range(visible.shape[1])]


@settings(deadline=None)
@given(pack=packs(), masks=st.integers(1, 4), seed=st.integers(0, 99))
def test_everybody_sees_something_and_nobody_sees_padding(pack: Pack, masks: int, seed: int) -> None:
    streams = lay_out(pack, random_anchors(pack, 3, torch.Generator().manual_seed(seed)), masks, MASK, 3 * masks + 2)
    visible = visibility_table(streams.visibility, streams.visibility)[0]
    real = streams.visibility.document[0] != PADDING
    assert visible.any(1).all()
    assert not visible[real][:, ~real].any()


@settings(deadline=None)
@given(pack=packs(), masks=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_mask_is_asked_what_its_place_is_asked(pack: Pack, masks: int, seed: int) -> None:
    streams = lay_out(pack, random_anchors(pack, 3, torch.Generator().manual_seed(seed)), masks, MASK)
    labels, length = next_tokens(pack)[0], pack.tokens.shape[1]
    for label, place in zip(
        streams.labels[0, length:].tolist(), streams.visibility.position[0, length:].tolist(), strict=True
    ):
        assert label == IGNORED or label == labels[place]


@settings(deadline=None)
@given(pack=packs(), groups=st.integers(1, 6), seed=st.integers(0, 99))
def test_random_anchors_are_different_places_with_something_to_guess(pack: Pack, groups: int, seed: int) -> None:
    anchors = random_anchors(pack, groups, torch.Generator().manual_seed(seed))[0].tolist()
    used = [anchor for anchor in anchors if anchor != PADDING]
    labels = next_tokens(pack)[0].tolist()
    able = [place for place in range(len(labels) - 1) if IGNORED not in labels[place : place + 2]]
    assert len(set(used)) == len(used) == min(groups, len(able))
    assert set(used) <= set(able)
    assert used == sorted(used)


def test_random_anchors_reach_every_place() -> None:
    pack = one_row([(2, False), (6, True)])
    drawn = {int(random_anchors(pack, 1, torch.Generator().manual_seed(seed))) for seed in range(200)}
    assert drawn == {1, 2, 3, 4, 5}


def test_the_papers_layout() -> None:
    """Blocks tile the answer; the masked copy of a block sees the clean blocks before it and predicts one further."""
    prompt, answer, block_size = 3, 8, 4
    pack = one_row([(prompt, False), (answer, True)])
    anchors = fixed_anchors(pack, block_size)
    assert anchors.tolist() == [[prompt - 1, prompt - 1 + block_size]]
    streams = lay_out(pack, anchors, block_size, MASK)
    length = prompt + answer
    masked = slice(length, None)
    assert streams.tokens[0, masked].tolist() == [MASK] * answer  # the answer once more, all of it masked
    assert streams.positions[0, masked].tolist() == list(range(prompt, length))
    visible = visibility_table(streams.visibility, streams.visibility)[0]
    for block in range(2):
        for place in range(block_size):
            row = visible[length + block * block_size + place].tolist()
            clean_before = prompt + block * block_size
            assert row[:length] == [key < clean_before for key in range(length)]
            own = range(block * block_size, block * block_size + place + 1)
            assert row[length:] == [key in own for key in range(answer)]
            offset = place + 2  # from the last clean token: 2 … B + 1
            target = clean_before - 1 + offset
            assert streams.labels[0, length + block * block_size + place] == (
                10 + target if target < length else IGNORED
            )


def test_fixed_anchors_begin_anew_with_every_answer() -> None:
    pack = one_row([(2, False), (5, True)], padding=1, documents=2)
    assert fixed_anchors(pack, 2).tolist() == [[1, 3, 5, 8, 10, 12]]


@pytest.mark.parametrize("window", [1, 3])
def test_a_sliding_window_counts_positions_not_columns(window: int) -> None:
    pack = one_row([(2, False), (6, True)])
    streams = lay_out(pack, torch.tensor([[4]]), 2, MASK)
    seen = visibility_table(streams.visibility, streams.visibility, window)[0]
    places = streams.visibility.position[0]
    everything = visibility_table(streams.visibility, streams.visibility)[0]
    assert torch.equal(seen, everything & (places[:, None] - places[None, :] < window))


def test_the_rule_is_the_same_for_single_positions() -> None:
    """FlexAttention asks about one query and one key at a time."""
    pack = one_row([(2, False), (6, True)], padding=1, documents=2)
    streams = lay_out(pack, random_anchors(pack, 4, torch.Generator().manual_seed(0)), 3, MASK, width=14)
    size = streams.tokens.shape[1]
    row = torch.zeros((), dtype=torch.long)
    v = streams.visibility
    pairs = [[sees(v.at(row, torch.tensor(q)), v.at(row, torch.tensor(k))) for k in range(size)] for q in range(size)]
    assert torch.equal(torch.tensor(pairs), visibility_table(v, v)[0])
