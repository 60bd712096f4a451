"""`exact` is the AR model: token for token one-token, and token for token transformers' own greedy generate."""

from __future__ import annotations

import random

import pytest
import torch

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.method.acceptance import Dial
from mars.method.windows import parse_window
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference import Decoder
from tests.conftest import END, FAMILIES, MASK, tiny_checkpoint

NEW_TOKENS = 24
WINDOWS = ["chain", "tree=2", "tree"]
"""Trees of one, two and all groups"""


def prompts(rows: int, seed: int = 1, longest: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10) for _ in range(rng.randint(1, longest))] for _ in range(rows)]


def decode(
    checkpoint: Checkpoint,
    rows: list[list[int]],
    dial: str,
    block_size: int = 4,
    window: str = "chain",
    lookup: int | None = None,
) -> list[RequestOutput]:
    requests = [
        Request(
            row,
            Dial.parse(dial),
            max_new_tokens=NEW_TOKENS,
            block_size=block_size,
            window=parse_window(window, block_size),
            lookup=lookup,
        )
        for row in rows
    ]
    return Decoder(checkpoint, requests).finish()


def transformers_greedy(checkpoint: Checkpoint, prompt: list[int], new_tokens: int, mask: int, end: int) -> list[int]:
    with own_attention(checkpoint.module) as model:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            suppress_tokens=[mask],
            eos_token_id=end,
            pad_token_id=end,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_equals_one_token_equals_transformers(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    ragged = prompts(7)
    expected = [transformers_greedy(checkpoint, row, NEW_TOKENS, MASK, END) for row in ragged]
    assert len({tuple(row) for row in expected}) > 3, "the model says the same to everybody: a weak test"

    assert [answer.token_ids for answer in decode(checkpoint, ragged, "one-token")] == expected
    several = 0
    for block_size in (2, 4, 8):
        for window, lookup in zip(WINDOWS, (0, 5, 15), strict=True):
            for rows in (ragged, ragged[:1]):
                answers = decode(checkpoint, rows, "exact", block_size, window, lookup)
                assert [answer.token_ids for answer in answers] == expected[: len(rows)], (block_size, window)
                assert all(answer.agreement == 1 for answer in answers)
                several += sum(answer.num_tokens - answer.forwards for answer in answers)
    assert several > 0, "no draft was ever accepted: a weak test"


def test_wider_trees_need_fewer_forwards() -> None:
    checkpoint, rows = tiny_checkpoint("llama"), prompts(7)
    forwards = [sum(a.forwards for a in decode(checkpoint, rows, "exact", window=window)) for window in WINDOWS]
    assert forwards[0] >= forwards[1] >= forwards[2]
    assert forwards[0] > forwards[2]


@pytest.mark.parametrize("window", WINDOWS)
def test_drafts_from_the_text_save_forwards(window: str) -> None:
    """Random models repeat themselves."""
    checkpoint, rows = tiny_checkpoint("llama"), prompts(7)
    masks, both = (decode(checkpoint, rows, "exact", window=window, lookup=most) for most in (0, 15))
    assert [answer.token_ids for answer in masks] == [answer.token_ids for answer in both]
    assert sum(answer.forwards for answer in both) < 0.9 * sum(answer.forwards for answer in masks)


QUESTIONS = [
    "Why is the sky blue?",
    "Count from one to twenty.",
    "Write a haiku about autumn.",
    "What is 17 + 25?",
    "Translate 'good morning' into French, then list the days of the week.",
    "Repeat the word 'mars' ten times.",
    "Name a colour.",
]


def test_smollm_exact_equals_one_token_equals_transformers(smollm) -> None:
    checkpoint = smollm.checkpoint
    rows = [checkpoint.encode(question) for question in QUESTIONS]
    mask, end = checkpoint.settings.mask_token_id, checkpoint.tokenizer.eos_token_id
    expected = [transformers_greedy(checkpoint, row, NEW_TOKENS, mask, end) for row in rows]
    assert [answer.token_ids for answer in decode(checkpoint, rows, "one-token")] == expected
    for block_size, batch in ((4, rows), (8, rows[:1])):
        for window in WINDOWS:
            answers = decode(checkpoint, batch, "exact", block_size, window)
            assert [answer.token_ids for answer in answers] == expected[: len(batch)], (block_size, window)
