"""What a packed row feeds in one training forward: the clean text, and behind it groups of masks.

A mask stands in for a clean token and has that token's label: the token that comes next. It sees the clean text up to
its anchor and the masks between the anchor and itself. So a mask group sees what a decoding window will show it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mars.method.visibility import PADDING, Visibility

IGNORED = -100  # the label of a position without a loss


class Pack(NamedTuple):
    """Rows of clean text, (rows, length) each. Several documents may follow each other in a row."""

    tokens: Tensor
    documents: Tensor  # number of the document within the row, `PADDING` behind the last one
    assistant: Tensor  # is this token the assistant's?


class Streams(NamedTuple):
    """Both streams of a batch, (rows, length + masks) each."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor  # the next token where it counts for the loss, else `IGNORED`
    visibility: Visibility  # ``position`` and ``reach`` count in the clean stream

    @property
    def offsets(self) -> Tensor:
        """0 for clean tokens, 1 for the first mask of a group, 2 for the second, …"""
        return self.visibility.position - self.visibility.reach


def next_tokens(pack: Pack) -> Tensor:
    """The label of every clean token: the token behind it, if the assistant wrote that in the same document."""
    tokens, documents, assistant = (each[:, 1:] for each in pack)
    labelled = assistant & (documents == pack.documents[:, :-1]) & (documents != PADDING)
    labels = torch.where(labelled, tokens, IGNORED)
    return torch.cat([labels, labels.new_full((len(labels), 1), IGNORED)], 1)


def lay_out(pack: Pack, anchors: Tensor, masks: int, mask_token: int, width: int | None = None) -> Streams:
    """Put groups of ``masks`` masks behind the clean stream, one for each of the ``anchors`` (rows, groups).

    An anchor is the index of a clean token, or `PADDING` for no group. ``width`` pads the masked stream, so that
    batches with different groups have one shape.
    """
    rows, length = pack.tokens.shape
    labels, positions = next_tokens(pack), _positions(pack.documents)
    used = anchors != PADDING
    reach = torch.where(used, anchors, 0)[:, :, None].expand(-1, -1, masks).reshape(rows, -1)
    index = reach + 1 + torch.arange(masks, device=reach.device).repeat(anchors.shape[1])
    group = (1 + torch.arange(anchors.shape[1], device=reach.device)).repeat_interleave(masks).expand(rows, -1)
    used = used[:, :, None].expand(-1, -1, masks).reshape(rows, -1)
    masked = Streams(
        tokens=torch.full_like(index, mask_token),
        positions=torch.where(used, positions.gather(1, reach) + index - reach, 0).clamp(max=length - 1),
        labels=torch.where(used & _same_turn(labels, reach, index), _take(labels, index), IGNORED),
        visibility=Visibility(torch.where(used, pack.documents.gather(1, reach), PADDING), group, index, reach),
    )
    here = torch.arange(length, device=reach.device).expand(rows, -1)
    clean = Streams(pack.tokens, positions, labels, Visibility(pack.documents, torch.zeros_like(here), here, here))
    return _join(clean, masked if width is None else _pad(masked, width, mask_token))


def random_anchors(pack: Pack, groups: int, generator: torch.Generator | None = None) -> Tensor:
    """(rows, groups): anchors drawn without replacement among those whose first mask has a label."""
    labels = next_tokens(pack)
    labelled = labels != IGNORED
    eligible = labelled & labelled.roll(-1, 1)
    eligible[:, -1] = False
    scores = torch.rand(labels.shape, generator=generator).masked_fill(~eligible, -1.0)
    top, anchors = scores.topk(min(groups, labels.shape[1]), 1)
    anchors = torch.where(top < 0, labels.shape[1], anchors).sort(1).values
    return torch.where(anchors == labels.shape[1], PADDING, anchors)


def fixed_anchors(pack: Pack, block_size: int) -> Tensor:
    """(rows, groups): blocks that tile every answer from its first token; the anchor is the token before a block."""
    labelled = next_tokens(pack) != IGNORED
    here = torch.arange(labelled.shape[1]).expand_as(labelled)
    begins = labelled & ~torch.cat([torch.zeros_like(labelled[:, :1]), labelled[:, :-1]], 1)
    start = torch.where(begins, here, 0).cummax(1).values
    chosen = labelled & ((here - start) % block_size == 0)
    groups = int(chosen.sum(1).max())
    anchors = torch.where(chosen, here, labelled.shape[1]).sort(1).values[:, :groups]
    return torch.where(anchors == labelled.shape[1], PADDING, anchors)


def _positions(documents: Tensor) -> Tensor:
    """Position of every clean token within its document."""
    here = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.cat([torch.ones_like(here[:, :1]).bool(), documents[:, 1:] != documents[:, :-1]], 1)
    return here - torch.where(begins, here, 0).cummax(1).values


def _same_turn(labels: Tensor, anchor: Tensor, index: Tensor) -> Tensor:
    """Is everything from the anchor's label to the mask's own one uninterrupted answer?"""
    breaks = (labels == IGNORED).cumsum(1)
    inside = index < labels.shape[1]
    return inside & (_take(labels, anchor) != IGNORED) & (_take(breaks, index) == _take(breaks, anchor))


def _take(values: Tensor, indices: Tensor) -> Tensor:
    return values.gather(1, indices.clamp(max=values.shape[1] - 1))


def _pad(streams: Streams, width: int, mask_token: int) -> Streams:
    """Fill up with masks that belong to no document: they see only each other."""
    spare = width - streams.tokens.shape[1]

    def fill(values: Tensor, value: int) -> Tensor:
        return torch.cat([values, values.new_full((len(values), spare), value)], 1)

    document, group, index, reach = streams.visibility
    return Streams(
        fill(streams.tokens, mask_token),
        fill(streams.positions, 0),
        fill(streams.labels, IGNORED),
        Visibility(fill(document, PADDING), fill(group, PADDING), fill(index, 0), fill(reach, 0)),
    )


def _join(clean: Streams, masked: Streams) -> Streams:
    tokens, positions, labels = (torch.cat(pair, 1) for pair in zip(clean[:3], masked[:3], strict=True))
    visibility = Visibility(*(torch.cat(pair, 1) for pair in zip(clean.visibility, masked.visibility, strict=True)))
    return Streams(tokens, positions, labels, visibility)
