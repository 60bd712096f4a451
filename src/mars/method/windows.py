"""What a sequence feeds in one decoding forward: ``last token | draft tokens | mask groups | candidate groups``.

*last token*
    The newest token that is decided. Its keys and values are not cached yet.
*draft tokens*
    Predicted by the masks of the previous forward. Their logits come out of this forward, which therefore verifies
    them. Drafts of the dial ``threshold`` were emitted already; the others wait for the verification.
*mask groups*
    ``masks`` mask tokens each. A group follows the last token and some number of drafts, its *acceptance point*, as if
    exactly so many drafts had been accepted. Groups do not see each other.
*candidate groups*
    Mask groups whose first mask gives way to a *candidate*, another guess of the token at its place than the draft
    there. If the AR model writes just that, the group is the one to read: its logits go on behind the candidate, so
    the first of its predictions is the AR model's own.

The last token and the drafts are the *verified positions*. A window whose only mask group follows all drafts is a
*chain*, one with more of them a *tree*. All windows of a batch have one shape; what a sequence does not need of it is
computed and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.tensors import send
from mars.method.visibility import PADDING, Visibility, visibility_table

NARROW = 4  # tokens per forward of windows that pay where wider ones do not
NO_GROUP = -1  # stands for the start of a mask group that does not exist, and for the place of such a candidate
ALTERNATIVES = 3  # most candidates for one place
SOME_CANDIDATES = 3  # of a window that has them: the next ones bring much less


def parse_window(text: str, block_size: int) -> Window:
    """``chain``, ``tree`` (a mask group for every acceptance point) or ``tree=N``; then ``+N`` for N candidates."""
    known = re.fullmatch(r"(?:(chain)|tree(?:=0*([1-9]\d*))?)(?:\+(\d+))?", text)
    if known is None:
        raise MarsError(
            f"unknown window {text!r}: use chain, tree, or tree=N with N mask groups, each with or without candidates, "
            "such as tree+4"
        )
    chain, groups, candidates = known.groups()
    return Window.of(1 if chain else int(groups or block_size), block_size, int(candidates or 0))


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a window: room for ``drafts`` draft tokens, then ``groups`` mask groups of ``masks`` tokens each and
    ``candidates`` candidate groups as long as these.

    With a ``budget`` the windows of a step are *ragged*: each sequence feeds a part of this shape, and all of them
    together at most so many tokens.
    """

    drafts: int = 0
    groups: int = 0
    masks: int = 0
    candidates: int = 0
    budget: int = 0

    @classmethod
    def of(cls, groups: int, block_size: int, candidates: int = 0) -> Window:
        """The full window of a model that predicts ``block_size`` tokens per forward, with no more than it can use."""
        masks = block_size - 1
        return cls(masks, min(groups, block_size), masks, min(candidates, ALTERNATIVES * masks)) if masks else cls()

    @property
    def verified(self) -> int:
        return 1 + self.drafts

    @property
    def all_masks(self) -> int:
        """The masks of all groups."""
        return self.width - self.verified - self.candidates

    @property
    def width(self) -> int:
        return self.first_candidate + self.candidates * self.masks

    @property
    def first_candidate(self) -> int:
        """Where the candidate groups start."""
        return self.verified + self.groups * self.masks

    def is_text(self, column: Tensor) -> Tensor:
        """Which columns have no masks: verified positions and candidates."""
        first = self.first_candidate
        return (column < self.verified) | ((column >= first) & ((column - first) % max(self.masks, 1) == 0))

    def tokens(self, sequences: int) -> int:
        """Of a step of so many sequences."""
        return self.budget or sequences * self.width

    def __str__(self) -> str:
        if self.budget:
            return f"ragged={self.budget}"
        if not self.groups:
            return "one-token"
        name = "chain" if self.groups == 1 else "tree" if self.groups == self.verified else f"tree={self.groups}"
        return f"{name}+{self.candidates}" if self.candidates else name

    @classmethod
    @cache  # asked for in every step
    def useful(cls, block_size: int, candidates: int = 0) -> tuple[Window, ...]:
        """Windows that are worth a choice: of the model's block size and of narrower ones, the narrowest as chains.

        Also full trees with some and with all ``candidates`` that there is room for.
        """
        blocks = sorted({*range(2, min(block_size, NARROW) + 1), block_size})
        trees = {block: {2, block} if block in (NARROW, block_size) else set() for block in blocks}
        plain = [cls.of(groups, block) for block in blocks for groups in sorted({1, *trees[block]}) if block > 1]
        more = sorted({min(candidates, SOME_CANDIDATES), candidates} - {0}) if plain else []
        return (*plain, *(cls.of(block_size, block_size, each) for each in more))

    def __or__(self, other: Window) -> Window:
        """The smallest window that holds both."""
        return Window(
            max(self.drafts, other.drafts),
            max(self.groups, other.groups),
            max(self.masks, other.masks),
            max(self.candidates, other.candidates),
            max(self.budget, other.budget),
        )


class Candidates(NamedTuple):
    """Other guesses of the token behind some of the drafts, the likeliest first."""

    tokens: Tensor  # (sequences, n)
    points: Tensor  # (sequences, n): behind how many accepted drafts; `NO_GROUP`: this one does not exist

    @classmethod
    def of(cls, known: Sequence[Sequence[tuple[int, int]]], n: int, device: torch.device | str = "cpu") -> Candidates:
        """Tokens and points of each sequence, and room for ``n``."""
        rows = [[*each, *[(0, NO_GROUP)] * (n - len(each))] for each in known]
        return cls(*send(torch.tensor(rows, dtype=torch.long).view(len(known), n, 2), device).unbind(2))


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """The windows of several sequences as tensors."""

    tokens: Tensor  # (sequences, width)
    visibility: Visibility  # (sequences, width) each; ``position`` and ``reach`` count from the last token
    drafts: Tensor  # (sequences, most drafts)
    draft_count: Tensor  # (sequences,)
    groups: Tensor  # (sequences, most drafts + 1): where the group behind so many accepted drafts starts, or `NO_GROUP`
    mask_count: Tensor  # (sequences,): masks in each group of the sequence
    masks: int  # masks in the largest group
    rows: Tensor  # (sequences, width): where each token of the windows is among the logits
    candidates: Candidates  # each of which begins a group of its own, behind the other groups
    first_candidate: int = 0  # where the first of these groups starts

    def fed(self) -> Tensor:
        """(sequences, width): which tokens of the windows there are."""
        columns, points = torch.arange(self.tokens.shape[1], device=self.tokens.device), self.candidates.points
        candidates = self.first_candidate + torch.arange(points.shape[1], device=points.device) * self.masks
        start = torch.cat([self.groups, torch.where(points == NO_GROUP, NO_GROUP, candidates)], 1)[:, :, None]
        in_group = (start != NO_GROUP) & (columns >= start) & (columns < start + self.mask_count[:, None, None])
        return (columns <= self.draft_count[:, None]) | in_group.any(1)

    def verified_rows(self) -> Tensor:
        """(sequences, most drafts + 1): rows of the logits that verify the drafts and yield the token after them."""
        steps = torch.arange(self.drafts.shape[1] + 1, device=self.drafts.device)
        return self.rows.gather(1, torch.minimum(steps, self.draft_count[:, None]))

    def mask_rows(self, accepted: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sequences, masks): rows of the group behind ``accepted`` drafts and the ``token`` after them.

        Also how many of them are real, and whether the first is that of a candidate instead of a mask.
        """
        start = self.groups.gather(1, accepted[:, None])
        tokens, points = self.candidates
        matches = (points == accepted[:, None]) & (tokens == token[:, None])
        number = (matches.cumsum(1) == 0).sum(1, keepdim=True)  # of the candidate that matches
        is_candidate = (number < tokens.shape[1])[:, 0]
        start = torch.where(is_candidate[:, None], self.first_candidate + number * self.masks, start)
        count = torch.where(start[:, 0] == NO_GROUP, 0, self.mask_count)
        steps = torch.arange(self.masks, device=self.drafts.device)
        rows = self.rows.gather(1, torch.where(steps < count[:, None], start + steps, 0))
        return rows, count, is_candidate


def build_windows(
    window: Window,
    mask_token: int,
    *,
    last: Tensor,
    drafts: Tensor,
    draft_count: Tensor,
    emitted: Tensor,
    groups: Tensor,
    masks: Tensor,
    candidates: Candidates | None = None,
) -> WindowBatch:
    """Windows of one shape from the state of their sequences; every tensor has an entry per sequence.

    ``drafts`` (sequences, most drafts) were ``emitted`` or wait for verification. Emitted ones are always accepted, so
    one group behind all of them will do. Otherwise a sequence gets at most ``groups`` groups, of ``masks`` masks each,
    at the likeliest acceptance points: all drafts accepted, then none, one, … It also gets a group for each of its
    ``candidates`` that the window has room for.
    """
    device = last.device
    drafts = drafts[:, : window.drafts]
    count = draft_count.clamp(max=window.drafts)[:, None]
    early = torch.minimum(torch.where(emitted, 1, groups.clamp(max=max(1, window.groups)))[:, None] - 1, count)
    """Groups at the acceptance points 0, 1, …, before the one behind all drafts"""

    number = torch.arange(window.groups, device=device)
    points = torch.where(number < early, number, count)
    if candidates is None:
        nowhere = torch.full((len(last), window.candidates), NO_GROUP, device=device)
        candidates = Candidates(torch.zeros_like(nowhere), nowhere)
    guesses, behind = (each[:, : window.candidates] for each in candidates)
    behind = torch.where(emitted[:, None] | (behind > count), NO_GROUP, behind)
    points = torch.cat([points, behind.clamp(min=0)], 1)

    verified = torch.arange(window.verified, device=device).expand(len(last), -1)
    ahead = torch.arange(1, window.masks + 1, device=device)
    mask_position = (points[:, :, None] + ahead).flatten(1)
    mask_group = torch.arange(1, points.shape[1] + 1, device=device).repeat_interleave(window.masks)
    mask_group = mask_group.expand_as(mask_position)
    masked = torch.full_like(mask_position, mask_token)
    if window.candidates:  # each is the first of its group
        first = torch.where(behind == NO_GROUP, mask_token, guesses)[:, :, None]
        rest = first.new_full((len(last), window.candidates, window.masks - 1), mask_token)
        plain = masked[:, : window.groups * window.masks]
        masked = torch.cat([plain, torch.cat([first, rest], 2).flatten(1)], 1)
    position = torch.cat([verified, mask_position], 1)
    visibility = Visibility(
        document=torch.zeros_like(position),
        group=torch.cat([torch.zeros_like(verified), mask_group], 1),
        position=position,
        reach=torch.cat([verified, points.repeat_interleave(window.masks, 1)], 1),
    )
    group_at = torch.where(verified == count, early, verified)  # the number of the group behind so many drafts
    exists = ((verified < early) | (verified == count)) & (group_at < window.groups)
    return WindowBatch(
        tokens=torch.cat([last[:, None], drafts, masked], 1),
        visibility=visibility,
        drafts=drafts,
        draft_count=count[:, 0],
        groups=torch.where(exists, window.verified + group_at * window.masks, NO_GROUP),
        mask_count=masks.clamp(max=window.masks),
        masks=window.masks,
        rows=torch.arange(len(last) * window.width, device=device).view(len(last), -1),
        candidates=Candidates(guesses, behind),
        first_candidate=window.first_candidate,
    )


def visible_in_cache(windows: Visibility, cursors: Tensor, length: int, sliding: int | None = None) -> Tensor:
    """(sequences, width, length): what the tokens of windows see of a cache where each window follows its cursor.

    Before the cursor (sequences,) is the text, behind the window there is nothing.
    """
    width = windows.position.shape[1]
    index = torch.arange(length, device=cursors.device).expand(len(cursors), -1)
    offset = index - cursors[:, None]
    column = offset.clamp(0, width - 1)
    keys = Visibility(
        document=torch.where(offset < width, 0, PADDING),
        group=torch.where(offset < 0, 0, windows.group.gather(1, column)),
        position=torch.where(offset < 0, offset, windows.position.gather(1, column)),
        reach=index,
    )
    return visibility_table(windows, keys, sliding)
