"""Other decoders of the same model: transformers, vLLM, and the paper's two."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mars.api import Model
from mars.baselines import block_cache, sliding_window
from mars.decoding.attention import own_attention
from mars.decoding.decoder import require_masks
from mars.decoding.request import Generation, Request
from mars.errors import MarsError
from mars.evaluation.speed import Decode, Decoder, Round
from mars.evaluation.vllm import import_vllm, load_vllm
from mars.method.dials import Dial
from mars.models import Checkpoint

KNOWN = "transformers, vllm, block-cache=16 (any block size) or sliding-window"
PAPER_DIAL = "threshold=0.95"


def check_peer(name: str) -> None:
    """Raise if the peer is unknown or not installed."""
    kind, _, size = name.partition("=")
    if name not in ("transformers", "vllm", "sliding-window") and not (
        kind == "block-cache" and size.isdecimal() and int(size) > 0
    ):
        raise MarsError(f"unknown peer {name!r}: use {KNOWN}")
    if name == "vllm":
        import_vllm()


def check_model(name: str, checkpoint: Checkpoint) -> None:
    """Raise if the peer needs a MARS model and this is not one."""
    if name.startswith(("block-cache", "sliding-window")):
        require_masks(checkpoint, Dial.parse(PAPER_DIAL))


@contextmanager
def open_peer(name: str, checkpoint: Checkpoint, source: str | None, rows: int, length: int) -> Iterator[Decoder]:
    """A peer that can answer ``rows`` prompts at once, with texts of at most ``length`` tokens.

    ``source`` is a folder or hub id with the very same weights; None: there is none.
    """
    label = {"peer": name, "window": None}
    if name == "vllm":
        with open_vllm(checkpoint, source, rows, length) as decode:
            yield Decoder(label, decode, is_elsewhere=True)
    elif name == "transformers":
        yield Decoder(label, _transformers(checkpoint))
    elif name == "sliding-window":
        yield Decoder(label, _sliding_window(checkpoint))
    else:
        yield Decoder(label, _block_cache(checkpoint, int(name.partition("=")[2])))


# --- transformers


class _Clock:
    """A streamer that keeps the times at which tokens come."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.times: list[float] = []

    def put(self, _tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter() - self._started)

    def end(self) -> None:
        pass


def _transformers(checkpoint: Checkpoint) -> Decode:
    """The model's own ``generate``, prompts padded at the left."""
    ends = sorted(checkpoint.end_tokens)
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": ends[0] if ends else 0}
    options["eos_token_id"] = ends or None
    if checkpoint.mask_token_id is not None:
        options["suppress_tokens"] = [checkpoint.mask_token_id]

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        clock = _Clock()
        longest = max(map(len, prompts))
        padded = [[options["pad_token_id"]] * (longest - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, attention_mask = (torch.tensor(each, device=checkpoint.device) for each in (padded, seen))
        with own_attention(checkpoint.module) as model:
            out = model.generate(
                ids, attention_mask=attention_mask, streamer=clock, max_new_tokens=max_new_tokens, **options
            )
        times = clock.times[1:]  # the first is the prompt's
        texts = [_cut(row, checkpoint.end_tokens) for row in out[:, longest:].tolist()]
        return Round([_answer(checkpoint, text, times[: len(text)], checked=len(text)) for text in texts], len(times))

    return decode


def _cut(tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
    """Without the padding after the end token."""
    last = next((index for index, token in enumerate(tokens) if token in end_tokens), len(tokens))
    return tokens[: last + 1]


def _answer(checkpoint: Checkpoint, tokens: list[int], times: list[float], checked: int = 0) -> Generation:
    """An answer of one token per forward; ``checked`` tokens are known to be the model's own greedy ones."""
    return Generation(
        text="",
        token_ids=tokens,
        finish_reason="stop" if tokens[-1] in checkpoint.end_tokens else "length",
        dial="one-token",
        steps=[1] * len(tokens),
        checked=checked,
        agreed=checked,
        seconds=times[-1] if times else 0.0,
        times=times,
    )


# --- vLLM


@contextmanager
def open_vllm(checkpoint: Checkpoint, source: str | None, rows: int, length: int, **options: Any) -> Iterator[Decode]:
    """One token at a time through vLLM's own ``generate``. ``options`` are vLLM's."""
    vllm = import_vllm()
    with load_vllm(checkpoint, source, rows, length, **options) as llm:

        def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
            sampling = vllm.SamplingParams(
                temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=sorted(checkpoint.end_tokens)
            )
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, sampling, use_tqdm=False)
            return Round(
                [_answer(checkpoint, list(each.outputs[0].token_ids), _times(each.metrics)) for each in outputs]
            )

        yield decode


def _times(metrics: Any) -> list[float]:
    """When the first and the last token came, if vLLM says so."""
    if metrics is None:
        return []
    first = metrics.first_token_latency
    return [first, first + metrics.last_token_ts - metrics.first_token_ts]


# --- the paper's decoders


def _paper_requests(checkpoint: Checkpoint, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Request]:
    model = Model(checkpoint)
    return [model.request(prompt, dial=PAPER_DIAL, max_new_tokens=max_new_tokens) for prompt in prompts]


def _block_cache(checkpoint: Checkpoint, size: int) -> Decode:
    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        answers = block_cache(checkpoint, _paper_requests(checkpoint, prompts, max_new_tokens), size)
        return Round(answers, max(answer.forwards for answer in answers))

    return decode


def _sliding_window(checkpoint: Checkpoint) -> Decode:
    """One request after another; the time a request waits for the others counts."""

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        answers: list[Generation] = []
        started = time.perf_counter()
        for request in _paper_requests(checkpoint, prompts, max_new_tokens):
            waited = time.perf_counter() - started
            answer = sliding_window(checkpoint, request)
            answers.append(replace(answer, times=[waited + each for each in answer.times]))
        return Round(answers, sum(answer.forwards for answer in answers))

    return decode
