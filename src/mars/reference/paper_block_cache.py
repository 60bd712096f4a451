"""The paper's cache for batches as the authors' scripts have it, to repeat their comparison of wall-clock times.

Prompts are padded at the left. Every forward feeds the whole block, what is written of it and mask tokens up to its
end, behind a copy of the cache of all that comes before; one more forward of the filled block extends that cache. A
sequence that ends within a block goes on to the block's end, even if it is the last one; then its place in the batch is
padding.

Unlike theirs, it never emits the mask token, measures confidence in float32, and copies a sequence's new tokens to the
host at once and not one by one.
"""

from collections.abc import Sequence as SequenceOf
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.method.tensors import send
from mars.models.attention import own_attention
from mars.models.checkpoint import Checkpoint
from mars.reference.block_cache import check_block
from mars.reference.common import ThresholdText, greedy_sequence


@torch.inference_mode()
def paper_block_cache(checkpoint: Checkpoint, requests: SequenceOf[Request], cached_block: int) -> list[RequestOutput]:
    """Decode a batch with the dial's threshold, caching ``cached_block`` tokens at a time.

    A forward predicts up to the end of the block, whatever the requests' ``block_size``. The forward of the prompts is
    not counted.
    """
    mask = check_block(checkpoint, cached_block)
    texts = [ThresholdText(checkpoint, greedy_sequence(checkpoint, request)) for request in requests]
    with own_attention(checkpoint.module) as model:
        batch = _Batch(model, checkpoint, [each.tokens for each in texts])
        while running := [row for row, each in enumerate(texts) if not each.sequence.is_finished]:
            size = min(cached_block, max(texts[row].sequence.room for row in running))
            starts = [len(each.tokens) for each in texts]
            blocks = [[0] * size for _ in texts]
            is_filled = False
            while not is_filled:
                for row in running:
                    blocks[row] = texts[row].tokens[starts[row] :]
                is_filled = all(len(block) == size for block in blocks)
                logits = batch.feed([block + [mask] * (size - len(block)) for block in blocks], extend=is_filled)
                for row in running:
                    texts[row].read(logits[row, len(blocks[row]) - texts[row].trusted :])
    return [each.sequence.output for each in texts]


class _Batch:
    """The texts of a batch in transformers' own cache, padded at the left."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, prompts: SequenceOf[list[int]]) -> None:
        self._model = model
        self._device = checkpoint.device
        self._context = checkpoint.context
        self._cache = DynamicCache(config=model.config)
        width = max(map(len, prompts))
        self._visible = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        self._last = self._forward([[0] * (width - len(each)) + each for each in prompts], self._cache)[:, -1:].clone()

    def feed(self, blocks: SequenceOf[list[int]], *, extend: bool) -> Tensor:
        """Logits (texts, block, vocabulary) that predict the tokens of a block; ``extend`` caches it."""
        logits = self._forward(blocks, self._cache if extend else deepcopy(self._cache))
        predicting = torch.cat([self._last, logits[:, :-1]], 1)
        if extend:
            self._last = logits[:, -1:].clone()
        return predicting

    def _forward(self, tokens: SequenceOf[list[int]], cache: DynamicCache) -> Tensor:
        ids = torch.tensor(tokens)
        end, width = cache.get_seq_length() + ids.shape[1], self._visible.shape[1]
        visible = pad(self._visible, (0, end - width), value=1)
        positions = (visible.cumsum(1) - 1)[:, -ids.shape[1] :].clamp(min=0)
        if self._context is not None:  # a block may reach past it, though no text does
            positions = positions.clamp(max=self._context - 1)
        ids, visible, positions = (send(each, self._device) for each in (ids, visible, positions))
        output = self._model(ids, attention_mask=visible, position_ids=positions, past_key_values=cache)
        logits: Tensor = output.logits
        return logits
