"""Small pieces that the baselines share."""

from __future__ import annotations

import torch
from torch import Tensor

from mars.decoding.decoder import check_request
from mars.decoding.request import Answer, Request
from mars.errors import MarsError
from mars.method.acceptance import Dial, DialBatch, confidence, leading
from mars.method.sampling import Sampling
from mars.models.checkpoint import Checkpoint


def open_answer(checkpoint: Checkpoint, request: Request) -> Answer:
    check_request(checkpoint, request)
    if request.sampling != Sampling(seed=request.sampling.seed):
        raise MarsError("the baselines are greedy: temperature, penalties and logit_bias must be off")
    return Answer(request, checkpoint.tokenizer, checkpoint.end_tokens, checkpoint.context)


def mask_token(checkpoint: Checkpoint) -> int:
    if checkpoint.mask_token_id is None:
        raise MarsError(f"{checkpoint.name} has no MARS settings: this baseline needs a mask token")
    return checkpoint.mask_token_id


def without_mask(checkpoint: Checkpoint, logits: Tensor) -> Tensor:
    """Logits in float32 with the mask token ruled out."""
    logits = logits.float()
    if checkpoint.mask_token_id is not None:
        logits = logits.clone()
        logits[..., checkpoint.mask_token_id] = -torch.inf
    return logits


def believed(logits: Tensor, dial: Dial) -> list[int]:
    """The paper's rule on logits (block, vocabulary): the AR token, then masks from the left while confident."""
    confident = confidence(logits[None, 1:], DialBatch.of([dial], logits.device)) >= dial.trust
    count = 1 + int(leading(confident))
    return [int(token) for token in logits[:count].argmax(1)]
