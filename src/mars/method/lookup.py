"""Drafts from the text itself: what followed its last tokens where they occurred before.

They cost no masks, and the model need not be trained for them. Masks know what is likely, a lookup what was quoted: the
drafts of masks come first, as many of them as lead to something that can be looked up.
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST_DRAFTS = 15  # that a window may have
KEY = 2  # tokens that are looked up
REACH = 3  # drafts for each token that matches
LONGEST = 16  # of a match: what a longer one is worth is the same


class Found(NamedTuple):
    drafts: list[int]
    matches: list[int]
    """Of each draft: 0 if it was predicted; otherwise, how many tokens before it, the drafts among them, are those of
    the earlier place. Empty if nothing was found"""


class Lookup:
    """An index of one text, which grows with it."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}  # where the text went on after two tokens, the last time
        self._indexed = KEY  # tokens before this index have been seen as the next ones

    def drafts(self, text: Sequence[int], predicted: Sequence[int], most: int) -> Found:
        """At most ``most`` drafts behind the text, of which masks have ``predicted`` the first ones.

        ``text`` is what it was at the last call, and what has been written since.
        """
        for index in range(self._indexed, len(text)):
            self._next[text[index - 2], text[index - 1]] = index
        self._indexed = max(self._indexed, len(text))
        drafts = list(predicted)
        if len(text) < KEY:
            return Found(drafts, [])
        ending = [*text[-KEY:], *drafts]
        for kept in range(len(drafts), -1, -1):
            place = self._next.get(tuple(ending[kept : kept + KEY]))  # type: ignore[arg-type]
            if place is not None:
                return _continue(text, drafts[:kept], place, most)
        return Found(drafts, [])


def _continue(text: Sequence[int], drafts: list[int], place: int, most: int) -> Found:
    """Drafts that go on as the text does from ``place``; where it ends there, with the drafts themselves."""
    match = _match(text, drafts, place)
    more = min(most - len(drafts), REACH * match)
    matches = [*[0] * len(drafts), *(min(match + ahead, LONGEST) for ahead in range(more))]
    for index in range(place, place + more):
        drafts.append(text[index] if index < len(text) else drafts[index - len(text)])
    return Found(drafts, matches)


def _match(text: Sequence[int], drafts: Sequence[int], place: int) -> int:
    """How many tokens before ``place`` are those at the end of text and drafts."""
    end, match = len(text) + len(drafts), KEY
    while match < min(LONGEST, place):
        index = end - match - 1
        if (text[index] if index < len(text) else drafts[index - len(text)]) != text[place - match - 1]:
            break
        match += 1
    return match
