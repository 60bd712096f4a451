"""The pages of the KV cache: who uses which, and the prefix cache. Pages are numbers here, no tensors.

A page holds the keys and values of ``size`` consecutive tokens. Once it is full it is *cached* under a hash of its
tokens and everything before them, so that another text with the same prefix can share it; it is never written again. A
cached page without users stays until its memory is needed, the least recently used going first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

PADDING_PAGE = 0  # what padding writes goes here; it belongs to no sequence.
NO_PREFIX = 0  # the hash of an empty prefix


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A full page. ``hash`` is a number of its own; with the ``prefix``, the hash of the page before, it is unique."""

    hash: int
    prefix: int
    tokens: tuple[int, ...]
    page: int


class Pages:
    """Hands out pages, shares cached ones, takes them back."""

    def __init__(self, num_pages: int, size: int) -> None:
        if num_pages < 2 or size < 1:
            raise ValueError("a cache needs at least two pages of one token")
        self.count = num_pages
        self.size = size
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._users: Counter[int] = Counter()
        self._by_hash: dict[tuple[int, tuple[int, ...]], CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached pages without users, the least recently used first
        self._hashes = count(NO_PREFIX + 1)

    @property
    def available(self) -> int:
        """How many pages could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.count - 1 - self.available

    def needed(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.size)

    def find(self, tokens: Sequence[int]) -> list[CachedPage]:
        """The cached pages that hold the beginning of a text, in order. They are not taken yet: see `share`."""
        found: list[CachedPage] = []
        prefix = NO_PREFIX
        for start in range(0, len(tokens) - self.size + 1, self.size):
            cached = self._by_hash.get((prefix, tuple(tokens[start : start + self.size])))
            if cached is None:
                break
            found.append(cached)
            prefix = cached.hash
        return found

    def share(self, cached: Iterable[CachedPage]) -> list[int]:
        """Use cached pages, together with whoever uses them already."""
        pages = [each.page for each in cached]
        for page in pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return pages

    def take(self, wanted: int) -> list[int]:
        """Pages for the caller alone; idle cached ones are evicted if need be."""
        if wanted > self.available:
            raise ValueError(f"{wanted} pages wanted, {self.available} available")
        while len(self._free) < wanted:
            self._evict(next(iter(self._idle)))
        pages = [self._free.pop() for _ in range(wanted)]
        self._users.update(pages)
        return pages

    def cache(self, prefix: int, tokens: Sequence[int], page: int) -> int:
        """Put a full page into the prefix cache; returns its hash for the page after it.

        If the same tokens are cached already, that page stays the one to share, and this one stays the caller's.
        """
        key = (prefix, tuple(tokens))
        if key not in self._by_hash:
            self._by_hash[key] = self._by_page[page] = CachedPage(next(self._hashes), prefix, key[1], page)
        return self._by_hash[key].hash

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back. The end of a text is evicted before its beginning."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._by_page:
                self._idle[page] = None
            else:
                self._free.append(page)

    def clear_prefix_cache(self) -> None:
        """Forget all cached pages without users."""
        while self._idle:
            self._evict(next(iter(self._idle)))

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise if a page is lost or counted wrong. ``holders`` are the pages of everybody who has some."""
        users = Counter(page for pages in holders for page in pages)
        if users != +self._users:
            raise RuntimeError(f"pages in use are {dict(users)}, but counted are {dict(self._users)}")
        where = Counter([*self._free, *self._idle, *self._users])
        if set(where) != set(range(1, self.count)) or max(where.values()) > 1:
            raise RuntimeError("a page is lost, or in two lists at once")
        if any(page not in self._by_page for page in self._idle) or any(page in self._by_page for page in self._free):
            raise RuntimeError("a cached page is free, or one that is not cached is idle")
        if {cached.page: cached for cached in self._by_hash.values()} != self._by_page:
            raise RuntimeError("the hashes and the cached pages do not match")

    def _evict(self, page: int) -> None:
        cached = self._by_page.pop(page)
        del self._by_hash[cached.prefix, cached.tokens]
        del self._idle[page]
        self._free.append(page)
