"""Fixed layouts against `mars.method.windows`: the same tokens see the same tokens at the same positions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.engine.layout import Layout, Pending, lay_out, visibility
from mars.method import windows
from mars.method.windows import NOWHERE, Shape

MASK = 99
shapes = st.sampled_from([Shape(1), Shape(2), Shape(3), Shape(None)])


@st.composite
def rows(draw: st.DrawFn) -> dict:
    block = draw(st.integers(2, 4))
    claims = draw(st.lists(st.integers(0, 50), max_size=block - 1))
    return {
        "block": block,
        "token": draw(st.integers(0, 50)),
        "claims": claims,
        "settled": draw(st.booleans()),
        "shape": draw(shapes),
    }


@settings(deadline=None, max_examples=300)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_a_fixed_layout_holds_every_rows_window(batch: list[dict]) -> None:
    layout = Layout()
    for row in batch:
        layout |= Layout.of(row["shape"], row["block"])
    most = layout.trunk - 1
    pending = Pending(
        token=torch.tensor([row["token"] for row in batch]),
        claims=torch.tensor([row["claims"] + [0] * (most - len(row["claims"])) for row in batch]),
        count=torch.tensor([len(row["claims"]) for row in batch]),
        settled=torch.tensor([row["settled"] for row in batch]),
        groups=torch.tensor([Layout.of(row["shape"], row["block"]).groups for row in batch]),
        masks=torch.tensor([row["block"] - 1 for row in batch]),
    )
    fixed = lay_out(layout, pending, MASK)
    sees = visibility(layout, fixed.sight)
    assert fixed.batch.tokens.shape == fixed.batch.offsets.shape == (len(batch), layout.width)
    for index, row in enumerate(batch):
        count = len(row["claims"])
        points = (count,) if row["settled"] else row["shape"].points(count)
        window = windows.lay_out([row["token"]], row["claims"], mask=MASK, masks=row["block"] - 1, points=points)
        where = list(range(count + 1))  # places of the window's tokens in the fixed layout
        for point, start in enumerate(window.groups):
            fixed_start = int(fixed.batch.groups[index, point])
            assert (fixed_start == NOWHERE) == (start == NOWHERE)
            if start != NOWHERE:
                where += range(fixed_start, fixed_start + window.masks)
        assert (fixed.batch.groups[index, count + 1 :] == NOWHERE).all()
        assert fixed.batch.tokens[index, where].tolist() == list(window.tokens)
        assert fixed.batch.offsets[index, where].tolist() == window.offsets()
        assert torch.equal(sees[index][where][:, where], window.visibility())
        others = [place for place in range(layout.width) if place not in where]
        assert not sees[index][where][:, others].any()


def test_names() -> None:
    assert [str(Layout.of(Shape.parse(name), 4)) for name in ("chain", "tree=2", "tree")] == ["chain", "tree=2", "tree"]
    assert str(Layout()) == str(Layout.of(Shape(), 1)) == "one-token"
    assert (Layout.of(Shape(1), 4).width, Layout.of(Shape(None), 4).width) == (7, 16)


def test_a_smaller_layout_drops_claims() -> None:
    ones = torch.tensor([3])
    pending = Pending(ones, torch.tensor([[1, 2, 3]]), ones, ones < 0, ones, ones)
    fixed = lay_out(Layout(), pending, MASK)
    assert fixed.batch.tokens.tolist() == [[3]]
    assert fixed.batch.claim_count.tolist() == [0] and fixed.batch.groups.tolist() == [[NOWHERE]]
