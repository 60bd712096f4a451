"""The paper's decoder in its plainest form: no cache, the whole text and a block of masks in every forward."""

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.models.attention import own_attention
from mars.models.checkpoint import Checkpoint
from mars.reference.common import ThresholdText, greedy_sequence, mask_token


@torch.inference_mode()
def sliding_window(checkpoint: Checkpoint, request: Request) -> RequestOutput:
    """Feed text and ``block_size - 1`` masks, emit the AR token and the masks that pass the dial's threshold."""
    text = ThresholdText(checkpoint, greedy_sequence(checkpoint, request))
    masks = [mask_token(checkpoint)] * (request.block_size - 1)
    with own_attention(checkpoint.module) as model:
        while not text.sequence.is_finished:
            fed = torch.tensor([[*text.tokens, *masks]], device=checkpoint.device)
            output = model(fed, use_cache=False, logits_to_keep=text.trusted + request.block_size)
            text.read(output.logits[0])
    return text.sequence.output
