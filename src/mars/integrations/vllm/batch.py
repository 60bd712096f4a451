"""A whole batch from one forward to the next, on the device and without the host: the asynchronous road's arithmetic.

The same rules as in ``windows``, for all rows at once. ``advance`` here is plain torch and says what is meant;
``kernel.advance`` does the same in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COUNTED = ("forwards", "tokens", "drafts", "accepted", "agreed")
"""What ``Forward.counts`` counts, in this order: the fields of ``proposer.Counts``"""


@dataclass(slots=True)
class Forward:
    """What rows were fed that had windows, and what came of it."""

    fed: Tensor
    """[places]: every row's sure token and the places behind it, one row after the other"""
    starts: Tensor
    """[rows + 1]: where each row begins, and the end"""
    best: Tensor
    """[places]: the likeliest token behind each"""
    slots: Tensor
    """[rows]: which of ``dials`` are theirs"""
    emitted: Tensor | None
    """[rows]: how many tokens came of it; None where all rows are greedy and ``best`` says it all"""
    sampled: Tensor | None
    """[rows, width + 1]: those tokens; None likewise"""
    dials: Tensor | None
    """[slots, 2]: how far a draft may be under the best logit, and the least trust; None where all rows are exact"""
    sure: Tensor | None
    """[places]: the probability of ``best``, where a dial asks for it"""
    counts: Tensor
    """``COUNTED``, added to"""
    keep: Tensor | None = None
    """[places], 1 where the next place's draft is kept though it is not ``best``; for greedy rows with lenient dials"""


@dataclass(slots=True)
class Next:
    """What came of a forward, and what the next one is fed."""

    sampled: Tensor
    """[rows, width + 1], -1 behind the last that was emitted"""
    emitted: Tensor
    rejected: Tensor
    """Places that were fed for nothing"""
    places: Tensor
    """[rows, width]: behind each row's newest token"""


def advance(forward: Forward, *, mask: int, masks: int, width: int) -> Next:
    """Accept, count, and lay out the next windows: at most ``masks`` drafts, ``width`` places in all."""
    starts, rows = forward.starts[:-1].long(), len(forward.slots)
    lengths = forward.starts.diff().long() - 1
    columns = torch.arange(width + 1, device=starts.device)
    inside = columns < lengths[:, None]
    best = _take(forward.best, starts[:, None] + columns, columns <= lengths[:, None])
    fed = _take(forward.fed, starts[:, None] + columns + 1, inside)
    known = _first(fed == mask, lengths)
    ours = (known < lengths) & ~((fed < 0) & inside).any(dim=1)
    if forward.emitted is None or forward.sampled is None:
        wrong = inside & (fed != best)
        if forward.keep is not None:
            wrong &= _take(forward.keep, starts[:, None] + columns, inside) != 1
        emitted = _first(wrong, lengths) + 1
        sampled = torch.where(columns < emitted[:, None] - 1, fed, best)
        sampled = torch.where(columns < emitted[:, None], sampled, -1)
    else:
        emitted, sampled = forward.emitted.long(), forward.sampled.long()
    drafts = torch.where(ours & (emitted == known + 1), lengths - known, 0).clamp(max=masks)
    first = starts + known + 1
    dials = None if forward.dials is None else forward.dials[forward.slots.long()]
    if dials is not None:
        drafts = _trusted(forward.sure, dials[:, 1], first, drafts)
    behind = columns[:-1]
    said = _take(forward.best, first[:, None] + behind, behind < drafts[:, None])
    places = torch.where(behind < drafts[:, None], said, mask).expand(rows, width)
    _count(forward.counts, dials, sampled, best, emitted, torch.where(ours, known, 0))
    return Next(sampled, emitted.int(), (lengths + 1 - emitted).int(), places.contiguous())


def _take(values: Tensor, index: Tensor, where: Tensor) -> Tensor:
    """``values[index]`` where that is meant, -1 elsewhere."""
    values = values if values.is_floating_point() else values.long()
    return torch.where(where, values[index.clamp(0, len(values) - 1)], -1)


def _first(found: Tensor, otherwise: Tensor) -> Tensor:
    """The first column in which something was found."""
    return torch.where(found.any(dim=1), found.int().argmax(dim=1), otherwise)


def _trusted(sure: Tensor | None, least: Tensor, first: Tensor, most: Tensor) -> Tensor:
    """How many masks in a row, from each row's first on, are sure enough."""
    if sure is None:
        return torch.where(least <= 1, most, 0)
    columns = torch.arange(len(sure), device=first.device)
    enough = _take(sure, first[:, None] + columns, columns < most[:, None]) >= least[:, None]
    return _first(~enough & (columns < most[:, None]), most)


def _count(counts: Tensor, dials: Tensor | None, sampled: Tensor, best: Tensor, emitted: Tensor, known: Tensor) -> None:
    spoke = emitted > 0
    accepted = (emitted - 1).clamp(min=0)
    agreed = accepted
    if dials is not None:
        columns = torch.arange(sampled.shape[1], device=sampled.device)
        same = ((sampled == best) & (columns < accepted[:, None])).sum(dim=1)
        agreed = torch.where(dials[:, 0] < torch.inf, same, accepted)
    known = torch.where(spoke, known, 0)
    counts += torch.stack([each.sum() for each in (spoke, emitted, known, accepted, agreed)])
