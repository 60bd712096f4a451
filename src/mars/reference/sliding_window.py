"""The paper's decoder in its plainest form: no cache, the whole text and a block of masks in every forward."""

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.models.attention import own_attention
from mars.models.checkpoint import Checkpoint
from mars.reference.common import emit, greedy_sequence, mask_token, predicted, without_mask


@torch.inference_mode()
def sliding_window(checkpoint: Checkpoint, request: Request) -> RequestOutput:
    """Feed text and ``block_size - 1`` masks, emit the AR token and the masks that pass the dial's threshold."""
    sequence = greedy_sequence(checkpoint, request)
    masks = [mask_token(checkpoint)] * (request.block_size - 1)
    trusted: list[int] = []
    with own_attention(checkpoint.module) as model:
        while not sequence.is_finished:
            fed = [*sequence.tokens, *masks]
            keep = len(trusted) + request.block_size
            output = model(torch.tensor([fed], device=checkpoint.device), use_cache=False, logits_to_keep=keep)
            logits = without_mask(checkpoint, output.logits[0])
            ar_choice = logits[: len(trusted)].argmax(1).tolist()
            tokens = predicted(checkpoint, logits[len(trusted) :], sequence.dial)
            agrees = [mine == ar for mine, ar in zip(trusted, ar_choice, strict=True)]
            trusted = tokens[1 : emit(sequence, tokens, [*agrees, True])]
            sequence.tokens += [tokens[0], *trusted]
    return sequence.output
