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
    """One forward's windows. They follow the cursors in the text, and so they do in the rows' pages.

    The model sees them as one long row, window behind window, so that its layers know a single shape.
    """

    cache: PagedCache
    layout: Layout
    table: Tensor
    """(slots, pages): which pages hold a slot's tokens, in order"""
    slots: Tensor
    """(rows,)"""
    cursors: Tensor
    """(rows,): how many tokens stand before each window"""
    offsets: Tensor
    """(rows, width): position of a token after the cursor"""
    sight: Tensor
    """(rows, width): how many trunk places a token sees"""
    lengths: Tensor
    """(rows,): places of each window that are not padding"""
    reach: int | None = None
    """No window ends behind it, where that is known"""
    chained: bool = False
    """May a window follow another one of the same slot? Then all are stored before one attends."""
    by_kernel: bool = False
    """With the Triton kernel, which needs a GPU"""
    calls: int = 0
    slides: bool = False
    _masks: dict[tuple[int | None, int], Tensor] = field(init=False, default_factory=dict)

    @property
    def positions(self) -> Tensor:
        return self.cursors[:, None] + self.offsets

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """(1, heads, rows x width, size) queries in, (1, rows x width, heads, size) out."""
        states = (each[0].unflatten(1, self.offsets.shape).transpose(0, 1) for each in (query, key, value))
        way = self.attend_by_kernel if self.by_kernel else self.attend_densely
        return way(layer, *states, **options).flatten(0, 1)[None]

    def attend_by_kernel(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from mars.engine.kernel import attend_and_store

        names = ("layout", "table", "slots", "cursors", "offsets", "sight", "lengths", "chained")
        where = {name: getattr(self, name) for name in names}
        return attend_and_store(query, key, value, self.cache.layers[layer], **where, **options)

    def attend_densely(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, sliding: int | None, **options: Any
    ) -> Tensor:
        """The same spelled out, for a CPU and as the kernel's oracle."""
        places = torch.arange(self.layout.width, device=self.table.device)
        at, size, table = self.cursors[:, None] + places, self.cache.page_size, self._tables()
        pages = table.gather(1, (at // size).clamp(max=table.shape[1] - 1))
        self.cache.write(layer, key, value, torch.where(places < self.lengths[:, None], pages, TRASH), at % size)
        keys, values = self.cache.read(layer, table)
        folds = query.shape[1] // key.shape[1]
        if (sliding, folds) not in self._masks:
            self._masks[sliding, folds] = self._mask(sliding).repeat(1, folds, 1)[:, None]
        return dense_attention(query, keys, values, self._masks[sliding, folds], **options)

    def _tables(self) -> Tensor:
        """(rows, pages), as far as they matter."""
        pages = None if self.reach is None else -(-self.reach // self.cache.page_size)
        return self.table[self.slots, :pages]

    def _mask(self, sliding: int | None) -> Tensor:
        """(rows, width, tokens): a token sees the row's cache, and in the window what the layout lets it see."""
        width = self.layout.width
        place = torch.arange(self._tables().shape[1] * self.cache.page_size, device=self.table.device)
        inside = (place - self.cursors[:, None])[:, None].expand(-1, width, -1)
        window = visibility(self.layout, self.sight).gather(2, inside.clamp(0, width - 1))
        visible = torch.where(inside < 0, True, window & (inside < width))
        if sliding is not None:
            offsets = self.offsets.gather(1, inside[:, 0].clamp(0, width - 1))
            positions = torch.where(inside[:, 0] < 0, place, self.cursors[:, None] + offsets)
            visible &= self.positions[:, :, None] - positions[:, None] < sliding
        return visible
