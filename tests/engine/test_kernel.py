"""The Triton kernel against dense attention, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from mars.engine.cache import LayerShape, PagedCache
from mars.engine.packing import ABSENT, Packing
from mars.engine.paged_attention import PagedWindows
from mars.method.windows import Window, build_windows

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, PAGES = 16, 40


WINDOWS = {
    "one-token": Window(),
    "chain": Window.of(1, 4),
    "tree=2": Window.of(2, 4),
    "tree": Window.of(4, 4),
    "prefill": Window(drafts=69),
}


def windows_for(
    window: Window, cursors: list[int], counts: list[int], lengths: list[int], cache: PagedCache, packing: Packing
):
    count = torch.tensor(counts, device=DEVICE)
    built = build_windows(
        window,
        0,
        last=count,
        drafts=torch.zeros(len(counts), max(1, window.drafts), dtype=torch.long, device=DEVICE),
        draft_count=count,
        emitted=count < 0,
        groups=torch.full_like(count, window.groups),
        masks=torch.full_like(count, window.masks),
    )
    table = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(0))[: 12 * len(counts)] + 1
    slots = torch.arange(len(counts), device=DEVICE)
    where = slots, torch.tensor(cursors, device=DEVICE), built.visibility, torch.tensor(lengths, device=DEVICE)
    return PagedWindows(cache, window, table.view(len(counts), 12).to(DEVICE), *where, packing)


@pytest.mark.parametrize(
    ("heads", "shared", "size", "special"),
    [
        (6, 2, 16, {}),
        (4, 4, 24, {"sliding": 9}),
        (4, 2, 16, {"softcap": 1.5}),
        (4, 2, 16, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding": 30}),
    ],
    ids=["grouped", "sliding", "capped", "sinks"],
)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", WINDOWS)
def test_the_kernel_is_dense_attention(
    name: str, heads: int, shared: int, size: int, special: dict, splits: int, is_ragged: bool
) -> None:
    """Ragged: the sequences feed none, one and all of their masks; with few drafts they feed no others."""
    torch.manual_seed(1)
    window = WINDOWS[name]
    width = window.width
    shape = LayerShape(shared, size, size, torch.float32)
    dense, paged = (PagedCache([shape], PAGES, PAGE, DEVICE) for _ in range(2))
    for one, other in zip(dense.layers[0], paged.layers[0], strict=True):
        other.copy_(one.normal_())
    cursors, counts = [0, 37, 100], [0, min(1, window.drafts), window.drafts]
    packing = Packing.whole(3, window, DEVICE)
    if is_ragged:
        column = torch.arange(width, device=DEVICE)
        text = column <= torch.tensor(counts, device=DEVICE)[:, None]
        masks = (column - window.verified) % max(window.masks, 1) < torch.tensor([[0], [1], [9]], device=DEVICE)
        fed = torch.where(column < window.verified, text, masks)
        packing = Packing.ragged(window, fed, int(fed.sum()) + 5)
        assert int((packing.rows != ABSENT).sum()) == int(fed.sum()) and (packing.items[-5:] == ABSENT).all()
    windows = windows_for(window, cursors, counts, [width, width, 40 if name == "prefill" else width], dense, packing)
    tokens = len(packing.items)
    query = torch.randn(heads, tokens, size, device=DEVICE)
    key, value = torch.randn(2, shared, tokens, size, device=DEVICE)
    options = {"scale": 0.3, "sliding": None, "softcap": None, "sinks": None} | special
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(DEVICE)
    expected = windows.attend_densely(0, query, key, value, **options)
    windows.cache = paged
    found = windows.attend_with_kernel(0, query, key, value, **options, splits=splits)
    for row, length in zip(packing.rows, windows.lengths.tolist(), strict=True):
        fed = row[:length][row[:length] != ABSENT]
        torch.testing.assert_close(found[fed], expected[fed], atol=2e-5, rtol=1e-4)
    if not is_ragged:  # then what is not fed is stored by one of them, too
        for mine, theirs in zip(paged.layers[0], dense.layers[0], strict=True):
            assert torch.equal(mine[1:], theirs[1:])  # page 0 is where padding goes


def test_chunks_of_one_text_see_each_other() -> None:
    torch.manual_seed(2)
    window, shape = Window(drafts=15), LayerShape(2, 16, 16, torch.float32)
    dense, paged = (PagedCache([shape], PAGES, PAGE, DEVICE) for _ in range(2))
    for one, other in zip(dense.layers[0], paged.layers[0], strict=True):
        other.copy_(one.normal_())
    packing = Packing.text(3, 16, DEVICE)
    windows = windows_for(window, [5, 21, 37], [15] * 3, [16, 16, 9], dense, packing)
    windows.slots.zero_()
    windows.chained = True
    query = torch.randn(4, 48, 16, device=DEVICE)
    key, value = torch.randn(2, 2, 48, 16, device=DEVICE)
    options = {"scale": 0.3, "sliding": None, "softcap": None, "sinks": None}
    expected = windows.attend_densely(0, query, key, value, **options)
    windows.cache = paged
    found = windows.attend_with_kernel(0, query, key, value, **options)
    for row, length in zip(packing.rows, windows.lengths.tolist(), strict=True):
        torch.testing.assert_close(found[row[:length]], expected[row[:length]], atol=2e-5, rtol=1e-4)
    for mine, theirs in zip(paged.layers[0], dense.layers[0], strict=True):
        assert torch.equal(mine[1:], theirs[1:])
