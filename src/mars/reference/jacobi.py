"""Jacobi decoding: an AR model verifies a block of guesses, and its own corrections are the next guesses."""

import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.models.checkpoint import Checkpoint
from mars.reference.common import Text, emit, greedy_sequence


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


def count_matches(guesses: list[int], choices: list[int]) -> int:
    """How many guesses, from the left, are what the AR model chose."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
