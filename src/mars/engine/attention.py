"""Attention of fixed windows over a paged cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mars.decoding.attention import dense_attention
from mars.engine.cache import PagedCache
from mars.engine.layout import Layout, visibility
from mars.engine.pages import TRASH


@dataclass(slots=True)
class PagedWindows:
    """One forward's windows. They follow the cursors in the text, and so they do in the rows' pages."""

    cache: PagedCache
    layout: Layout
    table: Tensor
    """(rows, pages): which pages hold a row's tokens, in order; all that may be visible"""
    cursors: Tensor
    """(rows,): how many tokens of each row are cached"""
    offsets: Tensor
    """(rows, width): position of a token after the cursor"""
    sight: Tensor
    """(rows, width): how many trunk places a token sees"""
    lengths: Tensor
    """(rows,): places of each window that are not padding"""
    by_kernel: bool = False
    """With the Triton kernel, which needs a GPU"""
    calls: int = 0
    slides: bool = False
    _masks: dict[tuple[int | None, int], Tensor] = field(init=False, default_factory=dict)

    @property
    def positions(self) -> Tensor:
        return self.cursors[:, None] + self.offsets

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if self.by_kernel:
            return self.attend_by_kernel(layer, query, key, value, **options)
        return self.attend_densely(layer, query, key, value, **options)

    def attend_by_kernel(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from mars.engine.kernel import attend_and_store

        where = {name: getattr(self, name) for name in ("layout", "table", "cursors", "offsets", "sight", "lengths")}
        return attend_and_store(query, key, value, self.cache.layers[layer], **where, **options)

    def attend_densely(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, sliding: int | None, **options: Any
    ) -> Tensor:
        """The same spelled out, for a CPU and as the kernel's oracle."""
        places = torch.arange(self.layout.width, device=self.table.device)
        at, size = self.cursors[:, None] + places, self.cache.page_size
        pages = self.table.gather(1, (at // size).clamp(max=self.table.shape[1] - 1))
        self.cache.write(layer, key, value, torch.where(places < self.lengths[:, None], pages, TRASH), at % size)
        keys, values = self.cache.read(layer, self.table)
        folds = query.shape[1] // key.shape[1]
        if (sliding, folds) not in self._masks:
            self._masks[sliding, folds] = self._mask(sliding).repeat(1, folds, 1)[:, None]
        return dense_attention(query, keys, values, self._masks[sliding, folds], **options)

    def _mask(self, sliding: int | None) -> Tensor:
        """(rows, width, tokens): a token sees the row's cache, and in the window what the layout lets it see."""
        width = self.layout.width
        place = torch.arange(self.table.shape[1] * self.cache.page_size, device=self.table.device)
        inside = (place - self.cursors[:, None])[:, None].expand(-1, width, -1)
        window = visibility(self.layout, self.sight).gather(2, inside.clamp(0, width - 1))
        visible = torch.where(inside < 0, True, window & (inside < width))
        if sliding is not None:
            offsets = self.offsets.gather(1, inside[:, 0].clamp(0, width - 1))
            positions = torch.where(inside[:, 0] < 0, place, self.cursors[:, None] + offsets)
            visible &= self.positions[:, :, None] - positions[:, None] < sliding
        return visible
