"""Replay is worth something only if real decoding takes exactly as many forwards."""

from __future__ import annotations

import pytest
import torch

from mars.api import Model
from mars.method.streams import next_tokens
from mars.training.chats import Document
from mars.training.evaluation import Evaluation, evaluate, replay
from mars.training.objective import Objective
from mars.training.packing import pack
from mars.training.recipe import Loss
from tests.conftest import MASK, tiny_checkpoint

PROMPTS = [[1, 2, 3], [4, 5], [7, 7, 1, 0], [9]]


@pytest.fixture(scope="module", params=[2, 4])
def replayed(request: pytest.FixtureRequest) -> tuple[Evaluation, dict[str, tuple[int, int]]]:
    """What an evaluation says of a model's own greedy answers, and what decoding them took, by window."""
    block_size = request.param
    checkpoint = tiny_checkpoint("llama", seed=3)
    model = Model(checkpoint)
    options = {"max_new_tokens": 40, "block_size": block_size}
    answers = model.generate(PROMPTS, dial="one-token", **options)
    taken = {}
    for window in ("chain", "tree"):
        real = model.generate(PROMPTS, dial="exact", window=window, **options)
        taken[window] = sum(each.num_tokens for each in real), sum(each.forwards for each in real)
    documents = [
        Document(prompt + answer.token_ids, [False] * len(prompt) + [True] * answer.num_tokens)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    packed = pack(documents, 96, 0)
    with Objective(Loss()).installed(checkpoint.module):
        found = evaluate(
            lambda batch: checkpoint.module(predict=True, **batch),
            packed,
            block_size=block_size,
            mask_token=MASK,
            rows=1,
            width=20,
        )
    assert found.tokens == int((next_tokens(packed) >= 0).sum()) == sum(each.num_tokens for each in answers)
    return found, taken


@pytest.mark.parametrize("window", ["chain", "tree"])
def test_replay_takes_the_forwards_that_decoding_takes(
    window: str, replayed: tuple[Evaluation, dict[str, tuple[int, int]]]
) -> None:
    found, taken = replayed
    counts = [replay(each, found.block_size, tree=window == "tree") for each in found.answers]
    assert (sum(tokens for tokens, _ in counts), sum(forwards for _, forwards in counts)) == taken[window]
    assert found.tokens_per_forward(tree=window == "tree") == taken[window][0] / taken[window][1]


def test_a_random_models_masks_guess_right_now_and_then(
    replayed: tuple[Evaluation, dict[str, tuple[int, int]]],
) -> None:
    found, _ = replayed
    assert all(0 < accuracy < 0.6 for accuracy in found.mask_accuracy)
    assert found.guessed[0].tolist() == [
        sum(max(0, len(answer) - offset) for answer in found.answers) for offset in range(1, found.block_size)
    ]


@pytest.mark.parametrize(
    ("correct", "tree", "forwards"),
    [
        ([0, 0, 0, 0], False, 4),  # nothing guessed right: drafts fail, every forward writes one token
        ([3, 3, 3, 3, 3, 3, 3, 3, 3], False, 3),  # 1, then 4 and 4
        ([1, 0, 0, 3, 3, 3, 3, 3, 3], False, 5),  # 1, then 2, one without drafts, 4, and the last
        ([1, 0, 3, 0, 0, 0, 0, 0], True, 4),
        ([], False, 0),
    ],
)
def test_replay_by_hand(correct: list[int], tree: bool, forwards: int) -> None:
    assert replay(correct, 4, tree=tree) == (len(correct), forwards)


def test_the_loss_is_the_mean_over_answer_tokens() -> None:
    checkpoint = tiny_checkpoint("llama")
    documents = [Document([1, 2, 3, 4], [False, True, True, True]), Document([5, 6], [False, True])]
    with Objective(Loss()).installed(checkpoint.module):
        predict = lambda batch: checkpoint.module(predict=True, **batch)  # noqa: E731
        found = evaluate(predict, pack(documents, 8, 0), block_size=3, mask_token=MASK, rows=4, width=4)
    checkpoint.module.set_attn_implementation("eager")
    losses = []
    for document in documents:
        with torch.no_grad():
            logits = checkpoint.module(input_ids=torch.tensor([document.tokens])).logits[0]
        log_q = logits.log_softmax(-1)
        losses += [-log_q[at, token].item() for at, token in enumerate(document.tokens[1:])]
    assert found.clean_loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
