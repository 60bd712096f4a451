"""From packed rows to the tensors of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars.method.streams import PADDING, Pack, fixed_anchors, lay_out, random_anchors
from mars.training import recipe
from mars.training.objective import Batch, batch_tensors

FIXED_STEP = 32
"""Groups of a fixed layout are counted up to a multiple of this, so that few shapes occur"""


@dataclass(frozen=True)
class Collator:
    """Lays out both streams of a step. What it draws depends on the item's number alone, never on the process."""

    pack: Pack
    streams: recipe.Streams | None
    """None: the clean stream alone"""
    mask_token: int
    decay: float
    seed: int
    rows_per_step: int
    """Over all devices and accumulation steps: these share a block size"""

    def __call__(self, items: Sequence[tuple[int, int]]) -> Batch:
        pack = take(self.pack, [row for row, _ in items])
        length = pack.tokens.shape[1]
        if self.streams is None:
            empty = torch.empty(len(items), 0, dtype=torch.long)
            return batch_tensors(lay_out(pack, empty, 1, self.mask_token), length)
        block_size = self._block_size(items[0][1] // self.rows_per_step)
        if self.streams.anchors == "fixed":
            anchors = fixed_anchors(pack, block_size)
            anchors = torch.nn.functional.pad(anchors, (0, -anchors.shape[1] % FIXED_STEP), value=PADDING)
            laid_out = lay_out(pack, anchors, block_size, self.mask_token)
        else:
            width = round(length * self.streams.masked)
            anchors = self._draw(pack, [item for _, item in items], max(1, width // (block_size - 1)))
            laid_out = lay_out(pack, anchors, block_size - 1, self.mask_token, max(width, block_size - 1))
        return batch_tensors(laid_out, length, self.decay)

    def _block_size(self, step: int) -> int:
        sizes = self.streams.block_sizes if self.streams else [2]
        return sizes[int(torch.randint(len(sizes), (), generator=self._generator(-1 - step)))]

    def _draw(self, pack: Pack, items: Sequence[int], groups: int) -> Tensor:
        rows = [Pack(*(each[row : row + 1] for each in pack)) for row in range(len(items))]
        drawn = [random_anchors(each, groups, self._generator(item)) for each, item in zip(rows, items, strict=True)]
        return torch.cat(drawn)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + number)


def take(pack: Pack, rows: Sequence[int]) -> Pack:
    tokens, documents, assistant = (each[list(rows)] for each in pack)
    return Pack(tokens.long(), documents.long(), assistant)
