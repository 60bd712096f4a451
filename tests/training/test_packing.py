from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.method.visibility import PADDING
from mars.training.chats import Document
from mars.training.packing import Schedule, load_pack, pack, save_pack

LENGTH = 16


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, LENGTH), min_size=1, max_size=40), together=st.booleans())
def test_every_document_is_in_a_row_once_and_whole(sizes: list[int], together: bool) -> None:
    documents = [
        Document([100 * (i + 1) + k for k in range(n)], [k % 2 == 1 for k in range(n)]) for i, n in enumerate(sizes)
    ]
    packed = pack(documents, LENGTH, pad_token=7, together=together)
    found = []
    for tokens, numbers, assistant in zip(*(each.tolist() for each in packed), strict=True):
        used = [number for number in numbers if number != PADDING]
        assert used == sorted(used), "documents follow each other, padding comes last"
        assert numbers[: len(used)] == used
        assert all(token == 7 for token in tokens[len(used) :])
        for number in sorted(set(used)):
            at = [index for index in range(LENGTH) if numbers[index] == number]
            found.append(Document([tokens[p] for p in at], [assistant[p] for p in at]))
    assert sorted(each.tokens for each in found) == sorted(each.tokens for each in documents)
    assert all(each.assistant == [k % 2 == 1 for k in range(len(each.tokens))] for each in found)
    if not together:
        assert len(packed.tokens) == len(documents)


def test_packing_wastes_little() -> None:
    draw = random.Random(0)
    sizes = [draw.randint(1, 300) for _ in range(2000)]
    packed = pack([Document([1] * size, [True] * size) for size in sizes], 1024, 0)
    assert sum(sizes) / packed.tokens.numel() > 0.99


def test_a_pack_is_stored_and_loaded(tmp_path: Path) -> None:
    packed = pack([Document([1, 2, 3], [False, True, True])], 8, 0)
    save_pack(packed, tmp_path / "pack.safetensors")
    assert all(map(torch.equal, load_pack(tmp_path / "pack.safetensors"), packed))
    assert [path.name for path in tmp_path.iterdir()] == ["pack.safetensors"]


def test_every_epoch_meets_every_row_once_in_its_own_order() -> None:
    items = [Schedule(10, 30, seed=3)[item] for item in range(30)]
    epochs = [[row for row, _ in items[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [item for _, item in items] == list(range(30))


@pytest.mark.parametrize("item", [0, 7, 25])
def test_an_item_does_not_depend_on_what_was_asked_before(item: int) -> None:
    asked, fresh = Schedule(10, 30, seed=3), Schedule(10, 30, seed=3)
    for other in (29, 3, 11):
        asked[other]
    assert asked[item] == fresh[item]
