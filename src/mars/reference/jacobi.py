"""Jacobi decoding: an AR model verifies a block of guesses, and its own corrections are the next guesses.

`jacobi` guesses a few tokens ahead behind a cache. `paper_jacobi` guesses the whole answer, as the authors' scripts do.
"""

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.models.attention import own_attention
from mars.models.checkpoint import Checkpoint
from mars.reference.common import Text, emit, greedy_sequence, without_mask


@torch.inference_mode()
def jacobi(checkpoint: Checkpoint, request: Request) -> RequestOutput:
    """Guess ``block_size - 1`` tokens ahead; the first guesses repeat the prompt's last token. Lossless."""
    sequence = greedy_sequence(checkpoint, request)
    ahead = request.block_size - 1
    text = Text(checkpoint, len(request.prompt) + sequence.max_tokens + ahead)
    tokens = sequence.tokens
    guesses = [tokens[-1]] * ahead
    while not sequence.is_finished:
        choices = text.feed(tokens, guesses).argmax(1).tolist()
        accepted = count_matches(guesses, choices)
        emit(sequence, choices[: accepted + 1], [True] * (accepted + 1))
        tokens += choices[: accepted + 1]
        text.cursor = len(tokens) - 1
        later = choices[accepted + 1 :]
        guesses = [*later, *[choices[-1]] * (ahead - len(later))][: sequence.room]
    return sequence.output


@torch.inference_mode()
def paper_jacobi(checkpoint: Checkpoint, request: Request) -> RequestOutput:
    """Guess all that may be generated, at first at random, and feed it without a cache. Lossless.

    A forward emits the guesses that it confirms, or the first token where it confirms none. `jacobi` also emits the
    token behind the confirmed ones, which is as certain.
    """
    sequence = greedy_sequence(checkpoint, request)
    random = torch.Generator().manual_seed(request.sampling.seed or 0)
    guesses = torch.randint(checkpoint.vocabulary, (sequence.max_tokens,), generator=random).tolist()
    with own_attention(checkpoint.module) as model:
        while not sequence.is_finished:
            fed = torch.tensor([[*sequence.tokens, *guesses]], device=checkpoint.device)
            output = model(fed, use_cache=False, logits_to_keep=len(guesses) + 1)
            choices = without_mask(checkpoint, output.logits[0, :-1]).argmax(1).tolist()
            count = max(1, count_matches(guesses, choices))
            emit(sequence, choices[:count], [True] * count)
            sequence.tokens += choices[:count]
            guesses = choices[count:]
    return sequence.output


def count_matches(guesses: list[int], choices: list[int]) -> int:
    """How many guesses, from the left, are what the AR model chose."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
