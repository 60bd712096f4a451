"""Which pages of the cache belong to whom. Pages are numbers here: nothing in this file needs a device.

A page holds the keys and values of ``size`` consecutive tokens. Once a page is full it is *known* by its tokens and
everything before them, so that another text with the same beginning can share it; nobody writes to it any more. A
known page that nobody uses any longer stays until its place is needed, the one longest unused going first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

TRASH = 0
"""The page that padding is written to; it belongs to nobody."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a full page holds. ``before`` numbers the content of the page before it, which makes it unique."""

    number: int
    before: int
    tokens: tuple[int, ...]
    page: int


START = 0
"""Stands for "nothing before"."""


class Pages:
    """Hands out pages, shares full ones, takes them back."""

    def __init__(self, count_: int, size: int) -> None:
        if count_ < 2 or size < 1:
            raise ValueError("a cache needs at least two pages of one token")
        self.count = count_
        self.size = size
        self._free = list(range(count_ - 1, TRASH, -1))
        self._users: Counter[int] = Counter()
        self._known: dict[tuple[int, tuple[int, ...]], Content] = {}
        self._content: dict[int, Content] = {}
        """By page"""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Known pages without users, the longest idle first"""
        self._numbers = count(START + 1)

    @property
    def available(self) -> int:
        """How many pages could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - 1 - self.available

    def find(self, tokens: Sequence[int]) -> list[Content]:
        """The known pages that hold the beginning of a text, in order. They are not taken yet: see `share`."""
        found: list[Content] = []
        before = START
        for start in range(0, len(tokens) - self.size + 1, self.size):
            content = self._known.get((before, tuple(tokens[start : start + self.size])))
            if content is None:
                break
            found.append(content)
            before = content.number
        return found

    def share(self, contents: Iterable[Content]) -> list[int]:
        """Use known pages together with whoever uses them already."""
        pages = [content.page for content in contents]
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return pages

    def take(self, wanted: int) -> list[int]:
        """Empty pages for the caller alone; idle known ones are forgotten if need be."""
        if wanted > self.available:
            raise ValueError(f"{wanted} pages wanted, {self.available} available")
        while len(self._free) < wanted:
            self._forget(next(iter(self._idle)))
        pages = [self._free.pop() for _ in range(wanted)]
        self._users.update(pages)
        return pages

    def learn(self, before: int, tokens: Sequence[int], page: int) -> int:
        """Note that a page is full; returns the number of its content for the page after it.

        If the same content is known already, its page stays the one to share, and this one stays the caller's.
        """
        key = (before, tuple(tokens))
        if key not in self._known:
            self._known[key] = self._content[page] = Content(next(self._numbers), before, key[1], page)
        return self._known[key].number

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The end of a text is forgotten before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._content:
                self._idle[page] = None
            else:
                self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise if the books do not balance. ``holders`` are the pages of everybody who has some."""
        users = Counter(page for pages in holders for page in pages)
        if users != +self._users:
            raise RuntimeError(f"pages in use are {dict(users)}, but the books say {dict(self._users)}")
        places = Counter([*self._free, *self._idle, *self._users])
        if set(places) != set(range(1, self.count)) or max(places.values()) > 1:
            raise RuntimeError("a page is lost, or in two places at once")
        if any(page not in self._content for page in self._idle) or any(page in self._content for page in self._free):
            raise RuntimeError("a known page is free, or an unknown one idle")
        if {content.page: content for content in self._known.values()} != self._content:
            raise RuntimeError("the known contents and their pages do not match")

    def _forget(self, page: int) -> None:
        content = self._content.pop(page)
        del self._known[content.before, content.tokens]
        del self._idle[page]
        self._free.append(page)
