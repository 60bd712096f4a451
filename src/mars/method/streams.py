"""What one row feeds in one training forward: the clean text, and behind it masks that stand in for parts of it.

A mask stands in the place of a clean token and is asked what that token is asked: which token comes next. It may look
at the clean text up to its anchor, and at the masks between the anchor and itself, which stand for the text in between.
So a group of masks behind an anchor sees exactly what a decoding window shows it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label of a position that is not asked anything"""
PADDING = -1
"""The document of a position that belongs to none, and the anchor of a group that has none"""


class Pack(NamedTuple):
    """Rows of clean text, (rows, length) each. Several documents may follow each other in a row."""

    tokens: Tensor
    documents: Tensor
    """Number of the document within the row, `PADDING` behind the last one"""
    assistant: Tensor
    """Is this token the assistant's?"""


class Sight(NamedTuple):
    """What decides who sees whom, for queries or for keys: tensors of one shape."""

    document: Tensor
    group: Tensor
    """0 for the clean stream; the masks behind one anchor share a number"""
    place: Tensor
    """Index in the clean stream of the token itself, or of the one a mask stands for"""
    reach: Tensor
    """The last clean place it sees"""

    def at(self, row: Tensor, column: Tensor) -> Sight:
        return Sight(*(each[row, column] for each in self))


class Streams(NamedTuple):
    """Both streams of a batch, (rows, length + masks) each."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    """The next token where it is asked for, else `IGNORED`"""
    sight: Sight

    @property
    def offsets(self) -> Tensor:
        """0 for clean tokens, 1 for the first mask of a group, 2 for the second, …"""
        return self.sight.place - self.sight.reach


def sees(query: Sight, key: Sight, sliding: int | None = None) -> Tensor:
    """The one rule of who sees whom; the arguments may be broadcast against each other."""
    text = (key.group == 0) & (key.place <= query.reach)
    own = (key.group == query.group) & (key.place <= query.place)
    visible = (key.document == query.document) & (text | own)
    return visible if sliding is None else visible & (query.place - key.place < sliding)


def dense_visibility(sight: Sight, sliding: int | None = None) -> Tensor:
    """(rows, queries, keys): the rule as a table."""
    return sees(Sight(*(each[:, :, None] for each in sight)), Sight(*(each[:, None, :] for each in sight)), sliding)


def next_tokens(pack: Pack) -> Tensor:
    """The label of every clean token: the token behind it, if the assistant wrote that in the same document."""
    tokens, documents, assistant = (each[:, 1:] for each in pack)
    asked = assistant & (documents == pack.documents[:, :-1]) & (documents != PADDING)
    labels = torch.where(asked, tokens, IGNORED)
    return torch.cat([labels, labels.new_full((len(labels), 1), IGNORED)], 1)


def lay_out(pack: Pack, anchors: Tensor, masks: int, mask_token: int, width: int | None = None) -> Streams:
    """Put groups of ``masks`` masks behind the clean stream, one for each of the ``anchors`` (rows, groups).

    An anchor is a clean place, or `PADDING` for no group. ``width`` pads the masked stream, so that batches with
    different groups have one shape.
    """
    rows, length = pack.tokens.shape
    labels, positions = next_tokens(pack), _positions(pack.documents)
    used = anchors != PADDING
    reach = torch.where(used, anchors, 0)[:, :, None].expand(-1, -1, masks).reshape(rows, -1)
    place = reach + 1 + torch.arange(masks, device=reach.device).repeat(anchors.shape[1])
    group = (1 + torch.arange(anchors.shape[1], device=reach.device)).repeat_interleave(masks).expand(rows, -1)
    used = used[:, :, None].expand(-1, -1, masks).reshape(rows, -1)
    masked = Streams(
        tokens=torch.full_like(place, mask_token),
        positions=torch.where(used, positions.gather(1, reach) + place - reach, 0).clamp(max=length - 1),
        labels=torch.where(used & _same_turn(labels, reach, place), _take(labels, place), IGNORED),
        sight=Sight(torch.where(used, pack.documents.gather(1, reach), PADDING), group, place, reach),
    )
    here = torch.arange(length, device=reach.device).expand(rows, -1)
    clean = Streams(pack.tokens, positions, labels, Sight(pack.documents, torch.zeros_like(here), here, here))
    return _join(clean, masked if width is None else _pad(masked, width, mask_token))


def random_anchors(pack: Pack, groups: int, generator: torch.Generator | None = None) -> Tensor:
    """(rows, groups): places drawn without replacement among those whose first mask has something to guess."""
    labels = next_tokens(pack)
    asked = labels != IGNORED
    eligible = asked & asked.roll(-1, 1)
    eligible[:, -1] = False
    scores = torch.rand(labels.shape, generator=generator).masked_fill(~eligible, -1.0)
    best, anchors = scores.topk(min(groups, labels.shape[1]), 1)
    anchors = torch.where(best < 0, labels.shape[1], anchors).sort(1).values
    return torch.where(anchors == labels.shape[1], PADDING, anchors)


def fixed_anchors(pack: Pack, block_size: int) -> Tensor:
    """(rows, groups): blocks that tile every answer from its first token; the anchor is the place before a block."""
    asked = next_tokens(pack) != IGNORED
    here = torch.arange(asked.shape[1]).expand_as(asked)
    begins = asked & ~torch.cat([torch.zeros_like(asked[:, :1]), asked[:, :-1]], 1)
    start = torch.where(begins, here, 0).cummax(1).values
    chosen = asked & ((here - start) % block_size == 0)
    groups = int(chosen.sum(1).max())
    anchors = torch.where(chosen, here, asked.shape[1]).sort(1).values[:, :groups]
    return torch.where(anchors == asked.shape[1], PADDING, anchors)


def _positions(documents: Tensor) -> Tensor:
    """Position of every clean token within its document."""
    here = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.cat([torch.ones_like(here[:, :1]).bool(), documents[:, 1:] != documents[:, :-1]], 1)
    return here - torch.where(begins, here, 0).cummax(1).values


def _same_turn(labels: Tensor, anchor: Tensor, place: Tensor) -> Tensor:
    """Is everything from the anchor's label to the place's own label one uninterrupted answer?"""
    breaks = (labels == IGNORED).cumsum(1)
    inside = place < labels.shape[1]
    return inside & (_take(labels, anchor) != IGNORED) & (_take(breaks, place) == _take(breaks, anchor))


def _take(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(1, places.clamp(max=values.shape[1] - 1))


def _pad(streams: Streams, width: int, mask_token: int) -> Streams:
    """Fill up with masks that belong to no document: they see only each other, and nobody sees them."""
    spare = width - streams.tokens.shape[1]

    def fill(values: Tensor, value: int) -> Tensor:
        return torch.cat([values, values.new_full((len(values), spare), value)], 1)

    document, group, place, reach = streams.sight
    return Streams(
        fill(streams.tokens, mask_token),
        fill(streams.positions, 0),
        fill(streams.labels, IGNORED),
        Sight(fill(document, PADDING), fill(group, PADDING), fill(place, 0), fill(reach, 0)),
    )


def _join(clean: Streams, masked: Streams) -> Streams:
    tokens, positions, labels = (torch.cat(pair, 1) for pair in zip(clean[:3], masked[:3], strict=True))
    sight = Sight(*(torch.cat(pair, 1) for pair in zip(clean.sight, masked.sight, strict=True)))
    return Streams(tokens, positions, labels, sight)
