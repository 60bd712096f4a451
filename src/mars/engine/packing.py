"""How the tokens of a step's windows lie one behind the other when the model gets them: the text's first, then masks.

So layers know a single shape, and a product with weights of its own for masks needs to know one number.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mars.method.windows import Window

NUM_TEXT: ContextVar[int | Tensor] = ContextVar("num_text")
"""`Packing.num_text` of the step that runs. Operators read it when they run, so compiled layers do not depend on it."""
ABSENT = -1  # the row of a token that is not fed, and the item of a row that nothing uses


@dataclass(frozen=True, slots=True)
class Packing:
    rows: Tensor  # (sequences, width): where each token of the windows is; `ABSENT`: it is not fed
    items: Tensor  # (tokens,): which token of the windows, counted through all of them, is there; `ABSENT`: none
    num_text: int | Tensor  # how many tokens are no masks; (1,) if only the device knows

    @classmethod
    def text(cls, sequences: int, width: int, device: torch.device) -> Packing:
        """Of windows without masks: one window behind the other."""
        items = torch.arange(sequences * width, device=device)
        return cls(items.view(sequences, width), items, sequences * width)

    @classmethod
    @lru_cache(maxsize=256)
    def whole(cls, sequences: int, window: Window, device: torch.device) -> Packing:
        """Of windows that are fed as a whole. It depends on nothing else, so it is made once."""
        if not window.all_masks:
            return cls.text(sequences, window.width, device)
        texts, masks = window.width - window.all_masks, window.all_masks
        first, grouped, long = window.first_candidate, window.groups * window.masks, window.masks
        sequence, column = torch.arange(sequences, device=device)[:, None], torch.arange(window.width, device=device)
        number, offset = (column - first).clamp(min=0) // long, (column - first) % long
        text = torch.where(column < window.verified, column, window.verified + number)
        mask = torch.where(column < first, column - window.verified, grouped + number * (long - 1) + offset - 1)
        rows = torch.where(window.is_text(column), sequence * texts + text, sequences * texts + sequence * masks + mask)

        row = torch.arange(sequences * window.width, device=device)
        text, mask = row % texts, (row - sequences * texts) % masks
        text = torch.where(text < window.verified, text, first + (text - window.verified) * long)
        number, offset = (mask - grouped) // max(long - 1, 1), (mask - grouped) % max(long - 1, 1)
        mask = torch.where(mask < grouped, window.verified + mask, first + number * long + 1 + offset)
        is_text = row < sequences * texts
        sequence = torch.where(is_text, row // texts, (row - sequences * texts) // masks)
        items = sequence * window.width + torch.where(is_text, text, mask)
        return cls(rows, items, sequences * texts)

    @classmethod
    def ragged(cls, window: Window, fed: Tensor, tokens: int) -> Packing:
        """Of windows of which some tokens are ``fed`` (sequences, width), at most ``tokens`` in all."""
        text = fed & window.is_text(torch.arange(window.width, device=fed.device))
        mask = fed & ~text
        num_text = text.sum().view(1)
        before = torch.where(text, _count(text), num_text + _count(mask))
        rows = torch.where(fed, before - 1, ABSENT)
        items = torch.full((tokens + 1,), ABSENT, device=fed.device)  # the last one for those that are not fed
        number = torch.arange(fed.numel(), device=fed.device)
        items = items.scatter(0, torch.where(rows == ABSENT, tokens, rows).flatten(), number)
        return cls(rows, items[:-1], num_text)

    def pack(self, values: Tensor) -> Tensor:
        """(tokens,) from (sequences, width)."""
        values = values.flatten()
        return values[self.items.clamp(min=0) if isinstance(self.num_text, Tensor) else self.items]


def _count(true: Tensor) -> Tensor:
    """How many are true up to each one, row by row."""
    return true.flatten().cumsum(0).view(true.shape)
