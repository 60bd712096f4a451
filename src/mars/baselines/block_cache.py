"""The paper's cache for batches: all rows work on a block until the slowest has filled it, then the block is cached.

Rows that are done with their block keep taking part in the forwards but emit nothing, which is what the cursor per
row of the decoder does away with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mars.baselines.common import believed, mask_token, open_answer, without_mask
from mars.decoding.attention import use_windows
from mars.decoding.cache import Cache
from mars.decoding.forward import forward
from mars.decoding.request import Answer, Generation, Request
from mars.errors import MarsError
from mars.method.windows import Window, lay_out
from mars.models.checkpoint import Checkpoint


class _Row:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.text = list(answer.request.prompt)
        self.cached = 0
        self.block_start = len(self.text)
        self.trusted = 0
        """Tokens at the end of the text that masks guessed and nobody has checked"""

    @property
    def finished(self) -> bool:
        return self.answer.finish_reason is not None

    def filled(self, block: int) -> bool:
        return self.finished or len(self.text) - self.block_start >= block

    def window(self, mask: int) -> Window:
        """Everything not cached yet, and a block of masks."""
        sure = len(self.text) - self.trusted
        masks = self.answer.request.block_size - 1
        return lay_out(self.text[self.cached : sure], self.text[sure:], mask=mask, masks=masks, points=(self.trusted,))

    def read(self, logits: Tensor) -> None:
        """Emit by the paper's rule from logits that begin at the last checked token."""
        ar_choice = logits[: self.trusted].argmax(1).tolist()
        guesses = self.text[len(self.text) - self.trusted :]
        self.answer.judge([mine == ar for mine, ar in zip(guesses, ar_choice, strict=True)])
        self.answer.judge([True])
        tokens = believed(logits[self.trusted :], self.answer.request.dial)
        taken = self.answer.emit(tokens)
        self.trusted = taken - 1
        self.text += tokens[:taken]


@torch.inference_mode()
def block_cache(checkpoint: Checkpoint, requests: Sequence[Request], cached_block: int) -> list[Generation]:
    """Decode a batch with the dial's threshold, caching ``cached_block`` tokens at a time.

    A run of accepted tokens may reach past the end of its block; the block simply ends a little later then.
    """
    if cached_block < 1:
        raise MarsError(f"cached_block must be at least 1, not {cached_block}")
    mask = mask_token(checkpoint)
    use_windows(checkpoint.module)
    rows = [_Row(open_answer(checkpoint, request)) for request in requests]
    cache = Cache(len(rows), max(len(row.text) + row.answer.limit + row.answer.request.block_size for row in rows))
    while not all(row.finished for row in rows):
        windows = [row.window(mask) for row in rows]
        batch, logits = forward(checkpoint, cache, [row.cached for row in rows], windows)
        if all(row.filled(cached_block) for row in rows):
            for row in rows:
                row.block_start = len(row.text)
        for row, anchor, own in zip(rows, batch.anchor.tolist(), without_mask(checkpoint, logits), strict=True):
            if row.block_start == len(row.text) and not row.finished:
                row.cached = len(row.text)  # the first forward of a block has just written the block before it
            if not row.filled(cached_block):
                row.read(own[anchor:])
            elif not row.finished:
                row.answer.emit([])  # idle: the forward was paid for
    return [row.answer.generation() for row in rows]
