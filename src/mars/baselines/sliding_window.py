"""The paper's decoder in its plainest form: no cache, the whole text and a block of masks in every forward."""

from __future__ import annotations

import torch

from mars.baselines.common import believed, mask_token, open_answer, without_mask
from mars.decoding.attention import own_attention
from mars.decoding.request import Generation, Request
from mars.models.checkpoint import Checkpoint


@torch.inference_mode()
def sliding_window(checkpoint: Checkpoint, request: Request) -> Generation:
    """Feed text and ``block_size - 1`` masks, emit the AR token and the masks that pass the dial's threshold."""
    answer = open_answer(checkpoint, request)
    masks = [mask_token(checkpoint)] * (request.block_size - 1)
    trusted: list[int] = []
    with own_attention(checkpoint.module) as model:
        while answer.finish_reason is None:
            fed = [*request.prompt, *answer.token_ids, *masks]
            keep = len(trusted) + request.block_size
            output = model(torch.tensor([fed], device=checkpoint.device), use_cache=False, logits_to_keep=keep)
            logits = without_mask(checkpoint, output.logits[0])
            ar_choice = logits[: len(trusted)].argmax(1).tolist()
            answer.judge([mine == ar for mine, ar in zip(trusted, ar_choice, strict=True)])
            tokens = believed(logits[len(trusted) :], request.dial)
            answer.judge([True])
            trusted = tokens[1 : answer.emit(tokens)]
    return answer.generation()
