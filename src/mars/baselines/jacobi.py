"""Jacobi decoding: an AR model checks a block of guesses and its own corrections are the next guesses."""

from __future__ import annotations

import torch

from mars.baselines.common import open_answer, without_mask
from mars.decoding.attention import use_windows
from mars.decoding.cache import Cache
from mars.decoding.forward import forward
from mars.decoding.request import Generation, Request
from mars.method.windows import lay_out
from mars.models.checkpoint import Checkpoint


@torch.inference_mode()
def jacobi(checkpoint: Checkpoint, request: Request) -> Generation:
    """Guess ``block_size - 1`` tokens ahead; the first guesses repeat the prompt's last token. Lossless."""
    answer = open_answer(checkpoint, request)
    use_windows(checkpoint.module)
    ahead = request.block_size - 1
    cache = Cache(1, len(request.prompt) + answer.limit + ahead)
    cursor, sure = 0, list(request.prompt)
    guesses = [sure[-1]] * ahead
    while answer.finish_reason is None:
        _, logits = forward(checkpoint, cache, [cursor], [lay_out(sure, guesses)])
        choices = without_mask(checkpoint, logits[0]).argmax(1).tolist()
        accepted = count_matches(guesses, choices)
        taken = answer.emit(choices[: accepted + 1])
        answer.judge([True] * taken)
        cursor += len(sure) + accepted
        sure = [choices[accepted]]
        later = choices[accepted + 1 :]
        guesses = [*later, *[choices[-1]] * (ahead - len(later))][: answer.room]
    return answer.generation()


def count_matches(guesses: list[int], choices: list[int]) -> int:
    """How many guesses, from the left, are what the AR model chose."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
