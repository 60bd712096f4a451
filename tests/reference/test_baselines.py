"""The paper's decoders and the decoder's threshold dial are three ways to the same tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from mars import MarsError
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.reference import (
    Decoder,
    block_cache,
    draft_model,
    jacobi,
    paper_block_cache,
    paper_jacobi,
    sliding_window,
)
from tests.conftest import END, MASK, gated_checkpoint, tiny_checkpoint
from tests.reference.test_exactness import prompts

DIALS = ["threshold=0", "threshold=0.3", "threshold:entropy=0.3", "threshold:margin=0.2", "threshold=1"]


def requests(dial: str, rows: int = 5, block_size: int = 4) -> list[Request]:
    return [Request(row, Dial.parse(dial), max_new_tokens=30, block_size=block_size) for row in prompts(rows)]


def decode(checkpoint: Checkpoint, asked: list[Request]) -> list[RequestOutput]:
    return Decoder(checkpoint, asked).finish()


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return tiny_checkpoint(request.param)


@pytest.mark.parametrize("dial", DIALS)
def test_threshold_is_the_sliding_window(checkpoint: Checkpoint, dial: str) -> None:
    asked = requests(dial)
    expected = [sliding_window(checkpoint, request) for request in asked]
    answers = decode(checkpoint, asked)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.steps for answer in answers] == [answer.steps for answer in expected]
    assert [(a.num_verified, a.num_agreed) for a in answers] == [(a.num_verified, a.num_agreed) for a in expected]


def test_the_middle_dials_emit_runs_of_different_lengths() -> None:
    answers = decode(tiny_checkpoint("llama"), requests("threshold=0.3"))
    assert len({step for answer in answers for step in answer.steps}) >= 3
    assert any(answer.agreement < 1 for answer in answers)


@pytest.mark.parametrize("cached_block", [1, 3, 4, 16, 64])
def test_block_cache_emits_what_the_sliding_window_emits(checkpoint: Checkpoint, cached_block: int) -> None:
    asked = requests("threshold=0.3")
    expected = [sliding_window(checkpoint, request) for request in asked]
    answers = block_cache(checkpoint, asked, cached_block)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [(a.num_verified, a.num_agreed) for a in answers] == [(a.num_verified, a.num_agreed) for a in expected]
    assert [[step for step in a.steps if step] for a in answers] == [answer.steps for answer in expected]


def test_block_cache_makes_fast_rows_idle() -> None:
    checkpoint = tiny_checkpoint("llama")
    answers = block_cache(checkpoint, requests("threshold=0.3"), 8)
    assert any(0 in answer.steps for answer in answers)
    alone = block_cache(checkpoint, requests("threshold=0.3", rows=1), 8)
    assert 0 not in alone[0].steps


@torch.inference_mode()
def logits_of(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    """From transformers' own forward of the whole text, without a cache."""
    with own_attention(checkpoint.module) as model:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].clone()
    logits[:, MASK] = -torch.inf
    return logits


def taken(logits: Tensor, threshold: float) -> list[int]:
    """The paper's rule: the first token, then those behind it up to the first that is not confident."""
    shares, tokens = (each.tolist() for each in logits.softmax(1).max(1))
    return tokens[: next((i for i, share in enumerate(shares) if i and share < threshold), len(tokens))]


def up_to_the_end(tokens: list[int], most: int) -> list[int]:
    tokens = tokens[:most]
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def plain_block_cache(checkpoint: Checkpoint, request: Request, size: int) -> tuple[list[int], list[list[int]]]:
    """The loop of the authors' scripts for one text: what it writes, and for each block what its forwards write."""
    text, steps = [*request.prompt], list[list[int]]()
    most = len(text) + request.max_new_tokens
    while len(text) < most and END not in text:
        end = min(len(text) + size, most)
        steps.append([])
        while len(text) < end:
            logits = logits_of(checkpoint, text + [MASK] * (end - len(text)))
            text += (new := taken(logits[len(text) - 1 : -1], request.dial.trust))
            steps[-1].append(len(new))
    return up_to_the_end(text[len(request.prompt) :], request.max_new_tokens), steps


@pytest.mark.parametrize("cached_block", [1, 3, 8, 16, 64])
def test_the_papers_block_cache_is_its_plain_loop(checkpoint: Checkpoint, cached_block: int) -> None:
    asked = requests("threshold=0.3")
    answers = paper_block_cache(checkpoint, asked, cached_block)
    expected = [plain_block_cache(checkpoint, request, cached_block) for request in asked]
    assert [answer.token_ids for answer in answers] == [tokens for tokens, _ in expected]
    for answer, (tokens, mine) in zip(answers, expected, strict=True):
        steps: list[int] = []
        for number, block in enumerate(mine):  # it waits for the slowest, and for the forward that caches the block
            slowest = max(len(blocks[number]) for _, blocks in expected if number < len(blocks))
            steps += block + [0] * (slowest - len(block) + 1)
        before = accumulate(steps, initial=0)
        assert answer.steps == [
            min(step, max(0, len(tokens) - done)) for step, done in zip(steps, before, strict=False)
        ]
    if cached_block > 1:
        assert any(max(answer.steps) > 2 for answer in answers)


def test_the_papers_block_cache_verifies_what_it_emits() -> None:
    """What masks predicted at the end of a block is verified by the forward that caches it."""
    checkpoint, request = tiny_checkpoint("llama"), replace(requests("threshold=0.3", rows=1)[0], ignore_end=True)
    (answer,) = paper_block_cache(checkpoint, [request], 8)
    text = request.prompt + answer.token_ids
    choices = logits_of(checkpoint, text)[len(request.prompt) - 1 : -1].argmax(1).tolist()
    agrees = [mine == ar for mine, ar in zip(answer.token_ids, choices, strict=True)]
    assert 24 <= answer.num_verified <= len(agrees) == 30 and not all(agrees)
    assert answer.agrees == agrees[: answer.num_verified]


@pytest.mark.parametrize("is_gated", [False, True])
def test_one_block_for_the_whole_answer_is_the_sliding_window(is_gated: bool) -> None:
    checkpoint = gated_checkpoint("llama") if is_gated else tiny_checkpoint("llama")
    for request in requests("threshold=0.3", block_size=30):
        (answer,), expected = paper_block_cache(checkpoint, [request], 30), sliding_window(checkpoint, request)
        assert (answer.token_ids, [step for step in answer.steps if step]) == (expected.token_ids, expected.steps)


def test_a_block_may_reach_past_the_context() -> None:
    checkpoint = tiny_checkpoint("gpt2")
    asked = [
        Request([1] * length, Dial.parse("threshold=0.3"), max_new_tokens=30, block_size=4, ignore_end=True)
        for length in (246, 200)
    ]
    answers = paper_block_cache(checkpoint, asked, 16)
    assert [answer.num_tokens for answer in answers] == [10, 30]
    assert answers[1].token_ids == paper_block_cache(checkpoint, asked[1:], 16)[0].token_ids


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_jacobi_is_lossless(checkpoint: Checkpoint, block_size: int) -> None:
    expected = decode(checkpoint, requests("one-token"))
    answers = [jacobi(checkpoint, request) for request in requests("one-token", block_size=block_size)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    if block_size == 4:
        assert sum(answer.forwards for answer in answers) < sum(answer.forwards for answer in expected)


def test_the_papers_jacobi_iterates_the_whole_answer(checkpoint: Checkpoint) -> None:
    asked = requests("one-token")
    expected = decode(checkpoint, asked)
    answers = [paper_jacobi(checkpoint, request) for request in asked]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    if checkpoint.name != "gemma2":
        assert sum(answer.forwards for answer in answers) < sum(answer.forwards for answer in expected)
    for request, answer in zip(asked, answers, strict=True):
        guesses = torch.randint(12, (30,), generator=torch.Generator().manual_seed(0))
        fixed = 0  # tokens that will not change any more
        for step in answer.steps[:-1]:
            choices = logits_of(checkpoint, request.prompt + guesses.tolist())[len(request.prompt) - 1 : -1].argmax(1)
            confirmed = int((choices == guesses)[fixed:].long().cumprod(0).sum())
            assert step == max(1, confirmed)
            fixed, guesses = fixed + step, choices


@pytest.mark.parametrize("target_masks", [False, True])
@pytest.mark.parametrize("draft_dial", ["one-token", "threshold=0.2"])
def test_draft_model_is_lossless(checkpoint: Checkpoint, target_masks: bool, draft_dial: str) -> None:
    draft = tiny_checkpoint("llama", seed=3)
    expected = decode(checkpoint, requests("one-token"))
    answers = [
        draft_model(checkpoint, draft, request, 4, draft_dial=draft_dial, target_masks=target_masks)
        for request in requests("one-token")
    ]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert sum(answer.forwards for answer in answers) < sum(answer.forwards for answer in expected)
    assert all(answer.draft_forwards > 0 for answer in answers)


@pytest.mark.parametrize("drafts", [0, 3])
def test_with_a_threshold_the_target_emits_what_its_masks_are_sure_of(checkpoint: Checkpoint, drafts: int) -> None:
    draft = tiny_checkpoint("llama", seed=3)
    asked = requests("threshold=0.3")
    for request in asked:
        answer = draft_model(checkpoint, draft, request, drafts, target_masks=True)
        text, steps = [*request.prompt], list[int]()
        most = len(text) + request.max_new_tokens
        while len(text) < most and END not in text:
            proposed, new = list[int](), list[int]()
            while len(proposed) < min(drafts, most - len(text) - 1):
                proposed.append(int(logits_of(draft, text + proposed)[-1].argmax()))
            while len(new) < len(proposed) and logits_of(checkpoint, text + new)[-1].argmax() == proposed[len(new)]:
                new.append(proposed[len(new)])
            new += taken(logits_of(checkpoint, text + new + [MASK] * 3)[-4:], 0.3)
            text, steps = text + new, [*steps, len(new)]
        assert answer.token_ids == up_to_the_end(text[len(request.prompt) :], request.max_new_tokens)
        assert answer.steps[:-1] == steps[:-1]
        if not drafts:
            alone = sliding_window(checkpoint, request)
            assert (answer.steps, answer.agrees) == (alone.steps, alone.agrees)


def test_target_masks_save_draft_forwards() -> None:
    checkpoint, draft = tiny_checkpoint("llama"), tiny_checkpoint("llama", seed=3)
    asked = requests("one-token")
    alone = sum(draft_model(checkpoint, draft, request).draft_forwards for request in asked)
    helped = sum(draft_model(checkpoint, draft, request, target_masks=True).draft_forwards for request in asked)
    assert helped < alone / 2


def test_a_perfect_draft_is_accepted_whole() -> None:
    checkpoint, request = tiny_checkpoint("llama"), requests("one-token", rows=1)[0]
    answer = draft_model(checkpoint, checkpoint, request, drafts=4)
    assert answer.steps[:-1] == [5] * (answer.forwards - 1)


def test_refusals() -> None:
    checkpoint = tiny_checkpoint("llama")
    with pytest.raises(MarsError, match="greedy"):
        jacobi(checkpoint, Request([1, 2], sampling=SamplingParams(temperature=1.0)))
    with pytest.raises(MarsError, match="vocabularies differ"):
        draft_model(checkpoint, tiny_checkpoint("llama", vocab_size=20), Request([1, 2]))
    untrained = replace(checkpoint, settings=None)
    with pytest.raises(MarsError, match="mars train"):
        draft_model(checkpoint, untrained, Request([1, 2]), draft_dial="threshold=0.5")
    with pytest.raises(MarsError, match="cached_block"):
        block_cache(checkpoint, requests("threshold=0.5"), 0)
    with pytest.raises(MarsError, match="cached_block"):
        paper_block_cache(checkpoint, requests("threshold=0.5"), 0)
    with pytest.raises(MarsError, match="mask token"):
        paper_block_cache(untrained, requests("one-token"), 4)
