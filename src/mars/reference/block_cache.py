"""The paper's cache for batches: all sequences work on a block until the slowest has filled it, then it is cached.

Sequences that are done with their block keep taking part in the forwards but emit nothing. A cursor per sequence, as
the plain decoder and the engine have it, does away with that.

It differs from the authors' scripts, which `paper_block_cache` follows: a forward feeds ``block_size - 1`` masks and
not as many as the cached block has left, the first forward of a block also caches the block before, and no cache is
copied.
"""

from collections.abc import Sequence as SequenceOf

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.errors import MarsError
from mars.method.tensors import send
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint
from mars.reference.cache import Cache, forward_windows, prefill, windows_of
from mars.reference.common import ThresholdText, emit, greedy_sequence, mask_token


class _Block(ThresholdText):
    """A sequence and the block it works on."""

    def __init__(self, checkpoint: Checkpoint, sequence: Sequence) -> None:
        super().__init__(checkpoint, sequence)
        self.cached = len(self.tokens) - 1
        self.start = len(self.tokens)

    def is_filled(self, size: int) -> bool:
        return self.sequence.is_finished or len(self.tokens) - self.start >= size


def check_block(checkpoint: Checkpoint, cached_block: int) -> int:
    """Raise if the checkpoint has no masks, or the block no tokens; returns the mask token."""
    if cached_block < 1:
        raise MarsError(f"cached_block must be at least 1, not {cached_block}")
    return mask_token(checkpoint)


@torch.inference_mode()
def block_cache(checkpoint: Checkpoint, requests: SequenceOf[Request], cached_block: int) -> list[RequestOutput]:
    """Decode a batch with the dial's threshold, caching ``cached_block`` tokens at a time.

    A run of accepted tokens may reach past the end of its block; the block ends a little later then.
    """
    check_block(checkpoint, cached_block)
    blocks = [_Block(checkpoint, greedy_sequence(checkpoint, request)) for request in requests]
    masks = [request.block_size - 1 for request in requests]
    most = max(len(each.tokens) + each.sequence.max_tokens for each in blocks)
    cache = Cache(len(blocks), most + 2 * (cached_block + max(masks) + 1))
    texts = {row: each.tokens[:-1] for row, each in enumerate(blocks)}
    prefill(checkpoint, cache, texts, dict.fromkeys(texts, 0))
    rows = torch.arange(len(blocks), device=checkpoint.device)
    while not all(each.sequence.is_finished for each in blocks):
        fed = [each.tokens[each.cached :] for each in blocks]
        window = Window(max(map(len, fed)) - 1, 1, max(masks))
        windows = windows_of(checkpoint, window, [(tokens[0], tokens[1:]) for tokens in fed], masks=masks)
        cursors = send([each.cached for each in blocks], checkpoint.device)
        logits = forward_windows(checkpoint, cache, rows, cursors, windows)
        if all(each.is_filled(cached_block) for each in blocks):
            for each in blocks:
                each.start = len(each.tokens)
        for each, tokens, own, count in zip(blocks, fed, logits.split(window.width), masks, strict=True):
            if each.start == len(each.tokens) and not each.sequence.is_finished:
                each.cached = len(each.tokens)  # the first forward of a block has just written the block before it
            if not each.is_filled(cached_block):
                verified = own[len(tokens) - each.trusted - 1 : len(tokens)]
                each.read(torch.cat([verified, own[window.verified : window.verified + count]]))
            elif not each.sequence.is_finished:
                emit(each.sequence, [], [])  # idle: the forward was paid for
    return [each.sequence.output for each in blocks]
