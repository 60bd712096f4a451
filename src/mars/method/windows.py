"""What a sequence feeds in one decoding forward: ``last token | draft tokens | mask groups``.

*last token*
    The newest token that is decided. Its keys and values are not cached yet.
*draft tokens*
    Predicted by the masks of the previous forward. Their logits come out of this forward, which therefore verifies
    them. Drafts of the dial ``threshold`` were emitted already; the others wait for the verification.
*mask groups*
    ``masks`` mask tokens each. A group follows the last token and some number of drafts, its *acceptance point*, as if
    exactly so many drafts had been accepted. Groups do not see each other.

The last token and the drafts are the *verified positions*. A window whose only group follows all drafts is a *chain*,
one with more groups a *tree*. All windows of a batch have one shape; what a sequence does not need of it is computed
and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.visibility import PADDING, Visibility, visibility_table

NARROW = 4  # tokens per forward of windows that pay where wider ones do not
NO_GROUP = -1  # stands for the start of a mask group that does not exist


def parse_window(text: str, block_size: int) -> int:
    """How many mask groups ``chain``, ``tree`` (one for every acceptance point) or ``tree=N`` ask for."""
    if text in ("chain", "tree"):
        return 1 if text == "chain" else block_size
    number = text.removeprefix("tree=")
    if number != text and number.isdecimal() and int(number) > 0:
        return int(number)
    raise MarsError(f"unknown window {text!r}: use chain, tree, or tree=N with N mask groups")


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a window: room for ``drafts`` draft tokens, then ``groups`` groups of ``masks`` masks."""

    drafts: int = 0
    groups: int = 0
    masks: int = 0

    @classmethod
    def of(cls, groups: int, block_size: int) -> Window:
        """The full window of a model that predicts ``block_size`` tokens per forward."""
        return cls(block_size - 1, min(groups, block_size), block_size - 1) if block_size > 1 else cls()

    @property
    def verified(self) -> int:
        return 1 + self.drafts

    @property
    def all_masks(self) -> int:
        """The masks of all groups."""
        return self.groups * self.masks

    @property
    def width(self) -> int:
        return self.verified + self.all_masks

    def __str__(self) -> str:
        if not self.groups:
            return "one-token"
        return "chain" if self.groups == 1 else "tree" if self.groups == self.verified else f"tree={self.groups}"

    @classmethod
    def useful(cls, block_size: int) -> list[Window]:
        """Windows that are worth a choice: of the model's block size and, if that is large, of a narrower one."""
        blocks = sorted({min(block_size, NARROW), block_size})
        return [cls.of(groups, block) for block in blocks for groups in sorted({1, min(block, 2), block})]

    def __or__(self, other: Window) -> Window:
        """The smallest window that holds both."""
        return Window(max(self.drafts, other.drafts), max(self.groups, other.groups), max(self.masks, other.masks))


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
    starts: Tensor  # (sequences,): the row of each window's first token among the logits of all windows

    def verified_rows(self) -> Tensor:
        """(sequences, most drafts + 1): rows of the logits that verify the drafts and yield the token after them."""
        steps = torch.arange(self.drafts.shape[1] + 1, device=self.drafts.device)
        return self.starts[:, None] + torch.minimum(steps, self.draft_count[:, None])

    def mask_rows(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """(sequences, masks): rows of the group behind ``accepted`` drafts, and how many of them are real."""
        start = self.groups.gather(1, accepted[:, None])
        count = torch.where(start[:, 0] == NO_GROUP, 0, self.mask_count)
        steps = torch.arange(self.masks, device=self.drafts.device)
        return self.starts[:, None] + torch.where(steps < count[:, None], start + steps, 0), count


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
) -> WindowBatch:
    """Windows of one shape from the state of their sequences; every tensor has an entry per sequence.

    ``drafts`` (sequences, most drafts) were ``emitted`` or wait for verification. Emitted ones are always accepted, so
    one group behind all of them will do. Otherwise a sequence gets at most ``groups`` groups, of ``masks`` masks each,
    at the likeliest acceptance points: all drafts accepted, then none, one, …
    """
    device = last.device
    drafts = drafts[:, : window.drafts]
    count = draft_count.clamp(max=window.drafts)[:, None]
    early = torch.minimum(torch.where(emitted, 1, groups.clamp(max=max(1, window.groups)))[:, None] - 1, count)
    """Groups at the acceptance points 0, 1, …, before the one behind all drafts"""

    number = torch.arange(window.groups, device=device)
    points = torch.where(number < early, number, count)
    verified = torch.arange(window.verified, device=device).expand(len(last), -1)
    ahead = torch.arange(1, window.masks + 1, device=device)
    mask_position = (points[:, :, None] + ahead).flatten(1)
    mask_group = (number + 1).repeat_interleave(window.masks).expand_as(mask_position)
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
        tokens=torch.cat([last[:, None], drafts, torch.full_like(mask_position, mask_token)], 1),
        visibility=visibility,
        drafts=drafts,
        draft_count=count[:, 0],
        groups=torch.where(exists, window.verified + group_at * window.masks, NO_GROUP),
        mask_count=masks.clamp(max=window.masks),
        masks=window.masks,
        starts=torch.arange(len(last), device=device) * window.width,
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
