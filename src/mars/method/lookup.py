"""Drafts from the text itself: what followed its last tokens where they occurred before.

They cost no masks, and the model need not be trained for them. Masks know what is likely, a lookup what was quoted: the
drafts of masks come first, as many of them as lead to something that can be looked up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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


def look_up(text: Tensor, length: Tensor, predicted: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The same for several texts at once, on the device: ``most`` drafts (texts, most), and how many of them are real.

    ``text`` (texts, room) has ``length`` (texts,) tokens in each row, behind which masks have ``predicted`` (texts,
    masks) the first ``count``. Where something is found, all drafts are real, whatever the match.
    """
    kept = torch.arange(predicted.shape[1] + 1, device=text.device)
    last = (length[:, None] - KEY + torch.arange(KEY, device=text.device)).clamp(min=0)
    ending = torch.cat([text.gather(1, last), predicted], 1)[:, :, None]
    index = torch.arange(KEY, text.shape[1], device=text.device)
    first, second = text[:, None, :-KEY], text[:, None, 1 : 1 - KEY]
    occurs = (first == ending[:, :-1]) & (second == ending[:, 1:]) & (index < length[:, None, None])
    place = (occurs * index).amax(
        2
    )  # (texts, masks + 1): where the text goes on behind so many predictions; 0: nowhere
    usable = (place > 0) & (kept <= count[:, None]) & (length >= KEY)[:, None]
    best = (usable * (kept + 1)).amax(1)[:, None] - 1  # -1: none
    behind = best.clamp(min=0)
    start = place.gather(1, behind)

    columns = torch.arange(most, device=text.device).expand(len(text), -1)
    source = start + (columns - behind).clamp(min=0) % (length[:, None] + behind - start).clamp(min=1)
    within = text.gather(1, source.clamp(max=text.shape[1] - 1))
    own = torch.nn.functional.pad(predicted, (0, most - predicted.shape[1]))
    beyond = own.gather(1, (source - length[:, None]).clamp(0, most - 1))
    copied = torch.where(source < length[:, None], within, beyond)
    drafts = torch.where((best < 0) | (columns < behind), own, copied)
    return drafts, torch.where(best[:, 0] < 0, count, most)
