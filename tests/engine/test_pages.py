"""The pages of the cache: any history of taking, sharing and giving back leaves none lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars.engine.pages import NO_PREFIX, PADDING_PAGE, Pages

SIZE = 2
texts = st.lists(st.integers(0, 1), min_size=0, max_size=9)


def store(pages: Pages, text: list[int]) -> list[int]:
    """Hold a text: share what is cached, take the rest, and cache its full pages."""
    found = pages.find(text)
    held = pages.share(found)
    held += pages.take(-(-len(text) // SIZE) - len(held))
    before = NO_PREFIX
    for index in range(len(text) // SIZE):
        before = pages.cache(before, text[index * SIZE : (index + 1) * SIZE], held[index])
    return held


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(texts, st.integers(0, 5)), max_size=40))
def test_any_history_balances(history: list) -> None:
    pages = Pages(12, SIZE)
    content: dict[int, list[int]] = {}
    held: list[list[int]] = []
    for event in history:
        if isinstance(event, int):
            if held:
                pages.release(held.pop(event % len(held)))
        elif -(-len(event) // SIZE) <= pages.available:
            found = pages.find(event)
            for index, each in enumerate(found):  # what is shared holds this very text
                assert content[each.page] == event[: (index + 1) * SIZE]
            if -(-len(event) // SIZE) - len(found) <= pages.available - sum(e.page in pages._idle for e in found):
                mine = store(pages, event)
                for index in range(len(event) // SIZE):
                    content[mine[index]] = event[: (index + 1) * SIZE]
                held.append(mine)
        pages.check(held)
        assert PADDING_PAGE not in {page for mine in held for page in mine}
    for mine in held:
        pages.release(mine)
    pages.check([])
    assert pages.available == 11


def test_the_same_beginning_is_shared_and_survives_its_first_owner() -> None:
    pages = Pages(8, SIZE)
    first = store(pages, [1, 2, 3, 4, 5])
    second = store(pages, [1, 2, 3, 4, 6, 7])
    assert second[:2] == first[:2] and second[2] != first[2]
    pages.release(first)
    pages.check([second])
    pages.release(second)
    assert [each.page for each in pages.find([1, 2, 3, 4, 6, 7, 8])] == second
    pages.take(7)
    assert pages.find([1, 2]) == []


def test_a_page_is_known_by_all_that_comes_before_it() -> None:
    pages = Pages(12, SIZE)
    store(pages, [1, 1, 2, 2])
    assert len(pages.find([3, 3, 2, 2])) == 0
    store(pages, [3, 3, 2, 2])
    assert len(pages.find([3, 3, 2, 2])) == 2


def test_the_end_of_a_text_is_forgotten_first() -> None:
    pages = Pages(4, SIZE)
    held = store(pages, [1, 1, 2, 2, 3, 3])
    pages.release(held)
    pages.take(1)
    assert len(pages.find([1, 1, 2, 2, 3, 3])) == 2


def test_books_that_do_not_balance_are_noticed() -> None:
    pages = Pages(4, SIZE)
    held = store(pages, [1, 1])
    with pytest.raises(RuntimeError, match="counted"):
        pages.check([])
    with pytest.raises(RuntimeError, match="counted"):
        pages.check([held, held])
    with pytest.raises(ValueError, match="available"):
        pages.take(3)
