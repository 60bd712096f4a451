"""Attention of a window over a row's cached prefix and itself, plugged into transformers' attention interface.

A model switched to the implementation `NAME` builds no mask of its own and passes every extra keyword argument of its
call down to `attend`, so a forward brings its own cache and visibility as the keyword ``windows``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from mars.decoding.cache import Cache
from mars.errors import MarsError
from mars.method.windows import WindowBatch

NAME = "mars_windows"


class Windows(Protocol):
    """Where one forward's windows sit, and how they attend to a row's cached prefix and to each other."""

    calls: int
    """How many layers have attended"""
    slides: bool
    """Did one of them have a sliding window?"""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


@dataclass(slots=True)
class WindowAttention:
    """Windows of any shape over a cache with a contiguous stretch for each row."""

    cache: Cache
    batch: WindowBatch
    cursors: Tensor
    """(rows,): how much of each row's cache is valid"""
    length: int
    """Slots in use by the longest row, this forward's included"""
    calls: int = 0
    slides: bool = False
    slots: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    _masks: dict[tuple[int | None, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        width = self.batch.tokens.shape[1]
        index = torch.arange(width, device=self.cursors.device) - self.batch.padding[:, None]
        self.slots = torch.where(index < 0, self.cache.trash, self.cursors[:, None] + index)
        self.positions = torch.where(index < 0, 0, self.cursors[:, None] + self.batch.offsets)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, sliding: int | None, **options: Any
    ) -> Tensor:
        keys, values = self.cache.write(layer, key, value, self.slots, self.length)
        folds = query.shape[1] // key.shape[1]
        if (sliding, folds) not in self._masks:
            self._masks[sliding, folds] = self._mask(sliding).repeat(1, folds, 1)[:, None]
        return dense_attention(query, keys, values, self._masks[sliding, folds], **options)

    def _mask(self, sliding: int | None) -> Tensor:
        """(rows, width, length): which slots a query sees."""
        visible = self._causal() if self.batch.visible is None else self._tree(self.batch.visible)
        if sliding is not None:
            visible &= self.positions[:, :, None] - self._slot_positions()[:, None] < sliding
        visible[:, :, 0] |= self.slots == self.cache.trash  # padding sees one slot: a softmax needs something
        return visible

    def _causal(self) -> Tensor:
        last = torch.where(self.slots == self.cache.trash, -1, self.slots)
        return torch.arange(self.length, device=last.device) <= last[:, :, None]

    def _tree(self, visible: Tensor) -> Tensor:
        prefix = torch.arange(self.length + 1, device=visible.device) < self.cursors[:, None]
        seen = prefix[:, None].repeat(1, visible.shape[1], 1)
        return seen.scatter_(2, self._columns()[:, None].expand_as(visible), visible)[:, :, :-1]

    def _slot_positions(self) -> Tensor:
        positions = torch.arange(self.length + 1, device=self.slots.device).repeat(len(self.slots), 1)
        return positions.scatter_(1, self._columns(), self.positions)[:, :-1]

    def _columns(self) -> Tensor:
        """Slots as columns of a table that has one spare column for the padding."""
        return self.slots.clamp(max=self.length)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    windows: Windows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Let the windows attend: (rows, heads, width, size) queries in, (rows, width, heads, size) out."""
    if windows is None:
        raise MarsError(f"{type(module).__name__} does not hand the windows of a forward down to its attention")
    windows.calls += 1
    windows.slides |= sliding_window is not None
    out = windows.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scale=scaling or query.shape[3] ** -0.5,
        sliding=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out, None


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Heads that share keys are folded, so that each key is read once; ``mask`` is (rows, 1, folds x width, slots)."""
    rows, heads, width, size = query.shape
    shared = key.shape[1]
    folded = query.reshape(rows, shared, heads // shared * width, size)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        extra = None if sinks is None else sinks.view(1, shared, -1, 1).repeat_interleave(width, 2)
        out = spelled_out(folded, key, value, mask, scale, softcap, extra)
    return out.reshape(rows, heads, width, -1).transpose(1, 2).contiguous()


def spelled_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with a cap on the scores (Gemma 2) or an extra score that attends to nothing (gpt-oss)."""
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1].to(value.dtype) @ value


AttentionInterface.register(NAME, attend)


def use_windows(model: PreTrainedModel) -> None:
    """Switch a model to our attention, if it is not."""
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Lend the model with transformers' own attention: for its ``generate`` and for decoding without our cache."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    model.set_attn_implementation("sdpa" if model._supports_sdpa and capped is None else "eager")
    try:
        yield model
    finally:
        model.set_attn_implementation(NAME)
