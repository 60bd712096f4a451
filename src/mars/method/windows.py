"""What a row feeds in one forward: ``sure | claims | mask groups``.

*sure*
    decided tokens whose keys and values are not cached yet.
*claims*
    tokens guessed by the masks of the previous forward. Their logits come out of this forward, so it can check
    them. Claims that wait for that check are *drafts*; claims that were emitted on trust are *settled*.
*mask groups*
    ``masks`` mask tokens each, attached after an acceptance point: group ``j`` follows the ``j``-th claim, as if
    exactly ``j`` claims had passed. Groups do not see each other.

Sure tokens and claims form the *trunk*. A window whose only group follows the last claim is a *chain*: plain causal
attention. Any other set of groups makes it a *tree*, whose visibility is given explicitly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.method.tensors import send

NOWHERE = -1
"""Stands for "the cached prefix" among parents and for "no such group" among groups."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which acceptance points get a mask group: the last one (chain), the likeliest few, or all of them."""

    groups: int | None = 1

    @classmethod
    def parse(cls, text: str | Shape) -> Shape:
        """Read ``chain``, ``tree`` (a group for every outcome) or ``tree=2``."""
        if isinstance(text, Shape):
            return text
        if text in ("chain", "tree"):
            return cls(1 if text == "chain" else None)
        number = text.removeprefix("tree=")
        if number != text and number.isdecimal() and int(number) > 0:
            return cls(int(number))
        raise MarsError(f"unknown window {text!r}: use chain, tree, or tree=N with N mask groups")

    def __str__(self) -> str:
        return {1: "chain", None: "tree"}.get(self.groups, f"tree={self.groups}")

    def points(self, claims: int) -> tuple[int, ...]:
        """Acceptance points that get a group. All claims passing is likeliest, then the earliest misses."""
        likeliest = (claims, *range(claims))
        return tuple(sorted(likeliest[: self.groups]))


@dataclass(frozen=True, slots=True)
class Window:
    """One row's tokens in feeding order; ``parents[i]`` is the position that ``i`` directly follows."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    claims: tuple[int, ...]
    groups: tuple[int, ...]
    """For each number of accepted claims, where its group starts in the window, or ``NOWHERE``."""
    masks: int

    @property
    def anchor(self) -> int:
        """Index of the last sure token."""
        return self.trunk - len(self.claims) - 1

    @property
    def trunk(self) -> int:
        """How many sure tokens and claims there are."""
        return len(self.tokens) - self.masks * sum(start != NOWHERE for start in self.groups)

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def offsets(self) -> list[int]:
        """Position of each token, counted from the first one fed."""
        offsets: list[int] = []
        for parent in self.parents:
            offsets.append(0 if parent == NOWHERE else offsets[parent] + 1)
        return offsets

    def visibility(self) -> Tensor:
        """Who sees whom inside the window: a token sees itself and what it follows."""
        visible = torch.eye(len(self.tokens), dtype=torch.bool)
        for index, parent in enumerate(self.parents):
            if parent != NOWHERE:
                visible[index] |= visible[parent]
        return visible


def lay_out(
    sure: Sequence[int], claims: Sequence[int] = (), *, mask: int = 0, masks: int = 0, points: Collection[int] = ()
) -> Window:
    """Build a window with a group of ``masks`` mask tokens after each acceptance point in ``points``."""
    if not sure:
        raise ValueError("a window needs at least one sure token")
    if any(point not in range(len(claims) + 1) for point in points):
        raise ValueError(f"acceptance points {sorted(points)} do not fit {len(claims)} claims")
    tokens = [*sure, *claims]
    parents = list(range(-1, len(tokens) - 1))
    groups = [NOWHERE] * (len(claims) + 1)
    for point in sorted(points) if masks else ():
        groups[point] = len(tokens)
        parents += [len(sure) - 1 + point, *range(len(tokens), len(tokens) + masks - 1)]
        tokens += [mask] * masks
    return Window(tuple(tokens), tuple(parents), tuple(claims), tuple(groups), masks if points else 0)


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows of several rows as tensors, aligned at the right so that one slice of logits serves all rows.

    ``anchor``, ``groups`` and everything else that points into logits counts from the start of the last ``tail``
    positions; the logits before those are never needed.
    """

    tokens: Tensor
    """(rows, width)"""
    offsets: Tensor
    """(rows, width): position after the cursor; 0 in the padding"""
    padding: Tensor
    """(rows,): unused positions at the left"""
    visible: Tensor | None
    """(rows, width, width), or None where all windows are chains"""
    claims: Tensor
    """(rows, most claims)"""
    claim_count: Tensor
    """(rows,)"""
    anchor: Tensor
    """(rows,)"""
    groups: Tensor
    """(rows, most claims + 1)"""
    masks: int
    """Masks in the largest group"""
    mask_count: Tensor
    """(rows,): masks in each group of the row"""
    tail: int

    def trunk_logits(self, logits: Tensor) -> Tensor:
        """Logits (rows, most claims + 1, vocabulary) that decide the claims and the token after them."""
        steps = torch.arange(self.claims.shape[1] + 1, device=logits.device)
        return _pick(logits, self.anchor[:, None] + torch.minimum(steps, self.claim_count[:, None]))

    def mask_logits(self, logits: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rows, masks, vocabulary) of the group behind ``accepted`` claims, and how many are real."""
        start = self.groups.gather(1, accepted[:, None])
        count = torch.where(start[:, 0] == NOWHERE, 0, self.mask_count)
        steps = torch.arange(self.masks, device=logits.device)
        return _pick(logits, torch.where(steps < count[:, None], start + steps, 0)), count


def _pick(logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(1, index[:, :, None].expand(-1, -1, logits.shape[2]))


def stack(windows: Sequence[Window], device: torch.device | str = "cpu") -> WindowBatch:
    """Pad windows at the left into one batch."""
    width = max(len(window.tokens) for window in windows)
    most = max(len(window.claims) for window in windows)
    tail = max(len(window.tokens) - window.anchor for window in windows)
    pads = [width - len(window.tokens) for window in windows]
    shifts = [tail - len(window.tokens) for window in windows]
    columns = [
        [
            *([0] * pad + list(window.tokens)),
            *([0] * pad + window.offsets()),
            *_fill(window.claims, most, 0),
            *_fill([start if start == NOWHERE else start + shift for start in window.groups], most + 1, NOWHERE),
            *(pad, len(window.claims), window.anchor + shift, window.masks),
        ]
        for window, pad, shift in zip(windows, pads, shifts, strict=True)
    ]
    tokens, offsets, claims, groups, scalars = send(columns, device).split([width, width, most, most + 1, 4], dim=1)
    padding, claim_count, anchor, mask_count = scalars.unbind(1)
    return WindowBatch(
        tokens=tokens,
        offsets=offsets,
        padding=padding,
        visible=_visibility(windows, width, device),
        claims=claims,
        claim_count=claim_count,
        anchor=anchor,
        groups=groups,
        masks=max(window.masks for window in windows),
        mask_count=mask_count,
        tail=tail,
    )


def _fill(values: Sequence[int], length: int, filler: int) -> list[int]:
    return [*values, *[filler] * (length - len(values))]


def _visibility(windows: Sequence[Window], width: int, device: torch.device | str) -> Tensor | None:
    if all(window.is_chain for window in windows):
        return None
    visible = torch.zeros(len(windows), width, width, dtype=torch.bool)
    for row, window in enumerate(windows):
        pad = width - len(window.tokens)
        visible[row, pad:, pad:] = window.visibility()
    return send(visible, device)
