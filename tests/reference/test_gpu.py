"""The same promises on a CUDA device, and what only shows there: synchronisations and memory."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import pytest
import torch

import mars
from mars import SamplingParams
from mars.core.request import Request
from mars.method.acceptance import Dial
from mars.method.windows import parse_window
from mars.models import Checkpoint
from mars.reference import Decoder
from tests.conftest import END, FAMILIES, tiny_checkpoint
from tests.reference.test_exactness import QUESTIONS, decode, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def real() -> mars.Model:
    """The built-in model, or another one named by the environment where nothing can be downloaded."""
    return mars.load(os.environ.get("MARS_TEST_MODEL", "smollm2-135m"), device="cuda", dtype="float32")


def on_gpu(family: str) -> Checkpoint:
    checkpoint = tiny_checkpoint(family)
    return replace(checkpoint, module=checkpoint.module.cuda())


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_writes_what_the_cpu_writes(family: str) -> None:
    rows = prompts(7)
    expected = [answer.token_ids for answer in decode(tiny_checkpoint(family), rows, "one-token")]
    checkpoint = on_gpu(family)
    for dial, window in [("one-token", "chain"), ("exact", "chain"), ("exact", "tree=2"), ("exact", "tree")]:
        answers = decode(checkpoint, rows, dial, 4, window)
        assert [answer.token_ids for answer in answers] == expected, (dial, window)


def test_sampling_draws_the_same_on_both() -> None:
    def texts(checkpoint: Checkpoint) -> list[list[int]]:
        sampling = [SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.2, seed=seed) for seed in range(7)]
        requests = [
            Request(row, Dial("exact"), each, max_new_tokens=24, block_size=4)
            for row, each in zip(prompts(7), sampling, strict=True)
        ]
        return [answer.token_ids for answer in Decoder(checkpoint, requests).finish()]

    assert texts(tiny_checkpoint("llama")) == texts(on_gpu("llama"))


def test_real_model_exact_equals_one_token(real: mars.Model) -> None:
    checkpoint = real.checkpoint
    rows = [checkpoint.encode(question) for question in QUESTIONS]
    expected = [answer.token_ids for answer in decode(checkpoint, rows, "one-token")]
    for window in ("chain", "tree=2", "tree"):
        assert [answer.token_ids for answer in decode(checkpoint, rows, "exact", 4, window)] == expected


@pytest.mark.parametrize("dial", ["one-token", "exact", "relaxed=0.3", "threshold=0.5"])
@pytest.mark.parametrize("window", ["chain", "tree"])
def test_a_step_waits_for_the_device_once(dial: str, window: str) -> None:
    """Once per forward, to read the tokens; never per token."""
    decoder = endless_decoder(dial, window)
    for _ in range(3):
        decoder.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(10):
            decoder.step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in caught if "called a synchronizing" in str(each.message)]
    assert len(waits) == 10, set(waits)


def test_peak_memory_does_not_grow_with_steps() -> None:
    decoder = endless_decoder("exact", "tree")
    for _ in range(10):
        decoder.step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        decoder.step()
    early = torch.cuda.max_memory_allocated()
    for _ in range(30):
        decoder.step()
    # the attention mask has one byte per row, query and slot, rounded up to the allocator's 512
    assert torch.cuda.max_memory_allocated() - early < 200_000


def endless_decoder(dial: str, window: str) -> Decoder:
    forever = SamplingParams(logit_bias={END: -100.0})
    requests = [
        Request(row, Dial.parse(dial), forever, max_new_tokens=220, block_size=4, window=parse_window(window, 4))
        for row in prompts(4)
    ]
    return Decoder(on_gpu("llama"), requests)
