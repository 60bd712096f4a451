"""Windows: which tokens a sequence feeds, who sees whom, and where the logits of each part are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars import MarsError
from mars.method.visibility import visibility_table
from mars.method.windows import NO_GROUP, Candidates, Window, WindowBatch, build_windows, parse_window

MASK = 99


@dataclass
class State:
    """A sequence before a forward, and its window spelled out."""

    last: int
    drafts: list[int]
    emitted: bool
    groups: int
    block_size: int
    candidates: list[tuple[int, int]] = field(default_factory=list)

    @property
    def window(self) -> Window:
        return Window.of(self.groups, self.block_size, len(self.candidates))

    @property
    def points(self) -> list[int]:
        """Acceptance points that get a group: all accepted is likeliest, then the earliest misses."""
        likeliest = [len(self.drafts), *range(len(self.drafts))]
        return sorted(likeliest[: 1 if self.emitted else self.groups])

    def exists(self, point: int) -> bool:
        """Does a candidate behind so many accepted drafts get a group?"""
        return not self.emitted and NO_GROUP < point <= len(self.drafts)

    def paths(self) -> list[list[int]]:
        """For each token of the window, the tokens from the last one to itself: what it sees of the window."""
        verified = [self.last, *self.drafts]
        paths = [verified[: end + 1] for end in range(len(verified))]
        for point in self.points:
            paths += [[*verified[: point + 1], *[MASK] * (mask + 1)] for mask in range(self.block_size - 1)]
        for token, point in self.candidates:
            if self.exists(point):
                paths += [[*verified[: point + 1], token, *[MASK] * mask] for mask in range(self.block_size - 1)]
        return paths


@st.composite
def states(draw: st.DrawFn) -> State:
    block_size = draw(st.integers(2, 5))
    return State(
        last=draw(st.integers(0, 9)),
        drafts=draw(st.lists(st.integers(0, 9), max_size=block_size - 1)),
        emitted=draw(st.booleans()),
        groups=draw(st.sampled_from([1, 2, 3, block_size])),
        block_size=block_size,
        candidates=draw(st.lists(st.tuples(st.integers(0, 9), st.integers(NO_GROUP, block_size - 1)), max_size=3)),
    )


def build(batch: list[State], window: Window) -> WindowBatch:
    return build_windows(
        window,
        MASK,
        last=torch.tensor([each.last for each in batch]),
        drafts=torch.tensor([(each.drafts + [0] * 4)[:4] for each in batch]),
        draft_count=torch.tensor([len(each.drafts) for each in batch]),
        emitted=torch.tensor([each.emitted for each in batch]),
        groups=torch.tensor([each.groups for each in batch]),
        masks=torch.tensor([each.block_size - 1 for each in batch]),
        candidates=Candidates.of([each.candidates[: window.candidates] for each in batch], window.candidates),
    )


@settings(deadline=None, max_examples=300)
@given(st.lists(states(), min_size=1, max_size=4))
def test_a_batch_of_one_shape_holds_every_sequences_window(batch: list[State]) -> None:
    """Every token sees exactly its path, at the positions of that path; what the shape has beyond is seen by none."""
    window = Window()
    for each in batch:
        window |= each.window
    built = build(batch, window)
    visible = visibility_table(built.visibility, built.visibility)
    assert built.tokens.shape == (len(batch), window.width)
    for row, state in enumerate(batch):
        count = len(state.drafts)
        columns = list(range(count + 1))
        for point, start in enumerate(built.groups[row].tolist()):
            assert (start == NO_GROUP) == (point not in state.points)
            if start != NO_GROUP:
                columns += range(start, start + int(built.mask_count[row]))
        for number, (_, point) in enumerate(state.candidates):
            start = built.first_candidate + number * window.masks
            if state.exists(point):
                columns += range(start, start + int(built.mask_count[row]))
        assert len(columns) == len(state.paths())
        for column, path in zip(columns, state.paths(), strict=True):
            seen = visible[row, column].nonzero()[:, 0].tolist()
            assert built.tokens[row, seen].tolist() == path and seen[-1] == column
            assert built.visibility.position[row, seen].tolist() == list(range(len(path)))


@given(st.lists(states(), min_size=1, max_size=4), st.data())
def test_sequences_find_their_own_logits(batch: list[State], data) -> None:
    """Logits that name their row among all windows come back where each sequence expects them."""
    window = Window()
    for each in batch:
        window |= each.window
    built = build(batch, window)
    logits = torch.arange(len(batch) * window.width)[:, None].expand(-1, 2)
    accepted = [data.draw(st.integers(0, len(each.drafts))) for each in batch]
    token = [data.draw(st.integers(0, 9)) for _ in batch]
    rows, count, is_candidate = built.mask_rows(torch.tensor(accepted), torch.tensor(token))
    verified, masks = logits[built.verified_rows()], logits[rows]
    for row, state in enumerate(batch):
        start = row * window.width
        drafts = len(state.drafts)
        assert verified[row, : drafts + 1, 0].tolist() == list(range(start, start + drafts + 1))
        guess = (token[row], accepted[row])
        if guess in state.candidates and state.exists(accepted[row]):
            exists, group = True, built.first_candidate + state.candidates.index(guess) * window.masks
            assert is_candidate[row]
        else:
            exists, group = accepted[row] in state.points, int(built.groups[row, accepted[row]])
            assert not is_candidate[row]
        assert count[row] == (state.block_size - 1) * exists
        group += start
        assert masks[row, : count[row], 0].tolist() == list(range(group, group + int(count[row])))


def test_a_chain_is_plain_causal_and_a_tree_is_not() -> None:
    chain = build([State(1, [2, 3], False, 1, 3)], Window.of(1, 3)).visibility
    assert torch.equal(visibility_table(chain, chain)[0], torch.ones(5, 5).tril().bool())
    assert chain.position.tolist() == [list(range(5))]
    tree = build([State(1, [2, 3], False, 2, 3)], Window.of(2, 3)).visibility
    assert not torch.equal(visibility_table(tree, tree)[0], torch.ones(7, 7).tril().bool())


@pytest.mark.parametrize(
    ("text", "drafts", "points"),
    [("chain", 3, [3]), ("tree", 3, [0, 1, 2, 3]), ("tree=2", 3, [0, 3]), ("tree=9", 1, [0, 1]), ("tree", 0, [0])],
)
def test_acceptance_points(text: str, drafts: int, points: list[int]) -> None:
    window = parse_window(text, 4)
    found = build([State(0, [1] * drafts, False, window.groups, 4)], window).groups[0]
    assert (found != NO_GROUP).nonzero()[:, 0].tolist() == points


@pytest.mark.parametrize(
    "text", ["", "tree=", "tree=0", "tree=-1", "tree=x", "chain=2", "forest", "tree+", "+3", "tree=2+x"]
)
def test_bad_windows(text: str) -> None:
    with pytest.raises(MarsError, match="unknown window"):
        parse_window(text, 4)


def test_names() -> None:
    names = ("chain", "tree=2", "tree", "chain+1", "tree=2+4", "tree+9")
    assert [str(parse_window(name, 4)) for name in names] == list(names)
    assert parse_window("tree+10", 4) == Window(3, 4, 3, 9), "more candidates than places"
    assert str(Window()) == str(Window.of(1, 1)) == "one-token"
    assert (Window.of(1, 4).width, Window.of(4, 4).width) == (7, 16)
    assert (Window.of(4, 4, 2).width, Window.of(4, 4, 2).all_masks) == (22, 16)


def test_a_smaller_window_drops_drafts() -> None:
    built = build([State(3, [1, 2, 3], False, 1, 4)], Window())
    assert built.tokens.tolist() == [[3]]
    assert built.draft_count.tolist() == [0] and built.groups.tolist() == [[NO_GROUP]]
