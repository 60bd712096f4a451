"""Windows of one fixed shape for a whole batch, built on the device from what the last forward decided.

A window is laid out as in `mars.method.windows`, but every row gets the same number of places, so that a step has one
shape for all rows and can be recorded once::

    token | claims, as many as the trunk holds | a group of masks | another group | …

Row by row, ``count`` says how many claims are real, and ``points`` after how many claims each group is attached.
Places that a row does not need are computed and ignored: nothing that matters sees them, and what they leave in the
cache lies past the cursor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mars.method.windows import NOWHERE, Shape, WindowBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """``trunk`` places for the sure token and claims, then ``groups`` times ``masks`` places for masks."""

    trunk: int = 1
    groups: int = 0
    masks: int = 0

    @classmethod
    def of(cls, shape: Shape, block_size: int) -> Layout:
        """Room for a full window of this shape."""
        if block_size < 2:
            return cls()
        groups = block_size if shape.groups is None else min(shape.groups, block_size)
        return cls(block_size, groups, block_size - 1)

    @property
    def width(self) -> int:
        return self.trunk + self.groups * self.masks

    def __str__(self) -> str:
        if not self.groups:
            return "one-token"
        return "chain" if self.groups == 1 else "tree" if self.groups == self.trunk else f"tree={self.groups}"

    def __or__(self, other: Layout) -> Layout:
        """The smallest layout that holds both."""
        return Layout(max(self.trunk, other.trunk), max(self.groups, other.groups), max(self.masks, other.masks))


@dataclass(frozen=True, slots=True)
class Pending:
    """What rows feed next, and how: each tensor has one entry per row."""

    token: Tensor
    claims: Tensor
    """(rows, most claims)"""
    count: Tensor
    settled: Tensor
    groups: Tensor
    """Most groups the row may have"""
    masks: Tensor
    """Masks of each of its groups"""


@dataclass(frozen=True, slots=True)
class FixedWindows:
    batch: WindowBatch
    """As `mars.method.dials.decide` wants it"""
    sight: Tensor
    """(rows, width): how many trunk places a place sees"""


def lay_out(layout: Layout, pending: Pending, mask_token: int) -> FixedWindows:
    rows, device = len(pending.token), pending.token.device
    claims = pending.claims[:, : layout.trunk - 1]
    count = pending.count.clamp(max=layout.trunk - 1)
    trunk = torch.arange(layout.trunk, device=device)
    groups = pending.groups.clamp(max=max(1, layout.groups))
    early = torch.minimum(torch.where(pending.settled, 1, groups) - 1, count)[:, None]
    """Groups attached before the last claim: after 0, 1, … claims"""

    slot = torch.arange(layout.groups, device=device)
    points = torch.where(slot < early, slot, count[:, None])
    behind = torch.arange(layout.masks, device=device)
    mask_offsets = (points[:, :, None] + 1 + behind).flatten(1)
    tokens = torch.cat([pending.token[:, None], claims, torch.full_like(mask_offsets, mask_token)], 1)
    place = torch.where(trunk == count[:, None], early, trunk)  # the slot of the group behind this many claims
    attached = ((trunk < early) | (trunk == count[:, None])) & (place < layout.groups)
    batch = WindowBatch(
        tokens=tokens,
        offsets=torch.cat([trunk.expand(rows, -1), mask_offsets], 1),
        padding=torch.zeros_like(count),
        visible=None,
        claims=claims,
        claim_count=count,
        anchor=torch.zeros_like(count),
        groups=torch.where(attached, layout.trunk + place * layout.masks, NOWHERE),
        masks=layout.masks,
        mask_count=pending.masks.clamp(max=layout.masks),
        tail=layout.width,
    )
    sight = points[:, :, None].expand(rows, layout.groups, layout.masks).flatten(1) + 1
    return FixedWindows(batch, torch.cat([(trunk + 1).expand(rows, -1), sight], 1))


def visibility(layout: Layout, sight: Tensor) -> Tensor:
    """(rows, width, width): who sees whom inside the windows."""
    place = torch.arange(layout.width, device=sight.device)
    group = (place - layout.trunk).div(max(1, layout.masks), rounding_mode="floor")  # negative in the trunk
    in_trunk = place < layout.trunk
    own_group = (group[:, None] == group) & ~in_trunk & (place <= place[:, None])
    return torch.where(in_trunk, place < sight[:, :, None], own_group)
