"""The paper's decoders and the decoder's threshold dial are three ways to the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mars import MarsError
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.models import Checkpoint
from mars.reference import Decoder, block_cache, draft_model, jacobi, sliding_window
from tests.conftest import tiny_checkpoint
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


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_jacobi_is_lossless(checkpoint: Checkpoint, block_size: int) -> None:
    expected = decode(checkpoint, requests("one-token"))
    answers = [jacobi(checkpoint, request) for request in requests("one-token", block_size=block_size)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    if block_size == 4:
        assert sum(answer.forwards for answer in answers) < sum(answer.forwards for answer in expected)


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
