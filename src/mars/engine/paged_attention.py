"""Attention of a step's windows over the paged cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mars.engine.cache import PagedCache
from mars.engine.packing import Packing
from mars.engine.pages import PADDING_PAGE
from mars.method.visibility import Visibility
from mars.method.windows import Window, visible_in_cache
from mars.models.attention import dense_attention, fold_mask


@dataclass(slots=True)
class PagedWindows:
    """The windows of one forward. They follow the cursors in the text, and so they do in the sequences' pages.

    The model gets them as one long sequence of tokens, in the order of the packing.
    """

    cache: PagedCache
    window: Window
    page_table: Tensor  # (slots, pages): which pages hold a slot's tokens, in order
    slots: Tensor  # (sequences,)
    cursors: Tensor  # (sequences,): how many tokens stand before each window
    visibility: Visibility  # (sequences, width) each
    lengths: Tensor  # (sequences,): how many tokens of each window are not padding
    packing: Packing
    longest: int | None = None  # no window ends behind this position, where that is known
    chained: bool = False  # may a window follow another one of the same slot? Then all are stored before one attends.
    uses_kernel: bool = False  # the Triton kernel needs a GPU
    calls: int = 0
    slides: bool = False
    _masks: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """(1, heads, tokens, size) queries in, (1, tokens, heads, size) out."""
        attend = self.attend_with_kernel if self.uses_kernel else self.attend_densely
        return attend(layer, query[0], key[0], value[0], **options)[None]

    def attend_with_kernel(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        from mars.engine.kernels.attention import attend_and_store

        return attend_and_store(
            query,
            key,
            value,
            self.cache.layers[layer],
            window=self.window,
            page_table=self.page_table,
            slots=self.slots,
            cursors=self.cursors,
            positions=self.visibility.position,
            reach=self.visibility.reach,
            lengths=self.lengths,
            rows=self.packing.rows,
            chained=self.chained,
            **options,
        )

    def attend_densely(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, sliding: int | None, **options: Any
    ) -> Tensor:
        """The same in plain torch, for a CPU and as the kernel's oracle."""
        rows = self.packing.rows.clamp(min=0)
        query, key, value = (each[:, rows].transpose(0, 1) for each in (query, key, value))
        columns = torch.arange(self.window.width, device=self.page_table.device)
        at, size, table = self.cursors[:, None] + columns, self.cache.page_size, self._tables()
        pages = table.gather(1, (at // size).clamp(max=table.shape[1] - 1))
        pages = torch.where(columns < self.lengths[:, None], pages, PADDING_PAGE)
        self.cache.write(layer, key, value, pages, at % size)
        keys, values = self.cache.read(layer, table)
        if sliding not in self._masks:
            visible = visible_in_cache(self.visibility, self.cursors, table.shape[1] * size, sliding)
            self._masks[sliding] = fold_mask(visible, query, key)
        out = dense_attention(query, keys, values, self._masks[sliding], **options)
        return out.flatten(0, 1)[self.packing.items.clamp(min=0)]

    def _tables(self) -> Tensor:
        """(sequences, pages), as far as they matter."""
        pages = None if self.longest is None else -(-self.longest // self.cache.page_size)
        return self.page_table[self.slots, :pages]
