"""Measure one way of decoding: how fast it is, what a forward costs, and whether the text is the model's own."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any

import torch

from mars.api import Model
from mars.decoding.request import Generation
from mars.engine import Engine
from mars.engine.cache import layer_shapes
from mars.engine.choice import Acceptance
from mars.evaluation import vllm
from mars.models.checkpoint import Checkpoint

WARM_UP_TOKENS = 16
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
COPIES = 5


@dataclass(frozen=True, slots=True)
class Round:
    """Prompts that were answered at once."""

    answers: list[Generation]
    forwards: int | None = None
    """Of the whole batch, where that is known"""
    places: int | None = None
    """Sum of the widths of these forwards' windows"""


Decode = Callable[[Sequence[list[int]], int], Round]
"""Answers prompts at once and greedily, each with at most so many tokens"""


@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody who decodes."""

    label: dict[str, str | None]
    """``dial`` or ``peer``, and ``window``"""
    decode: Decode
    is_elsewhere: bool = False
    """Does it run in another process, whose memory cannot be seen?"""


@dataclass(frozen=True, slots=True)
class Run:
    """All rounds of one measurement."""

    prompts: list[list[int]]
    answers: list[Generation]
    seconds: float
    forwards: int | None
    places: int | None
    peak_memory: int | None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def with_dial(model: Model, dial: str, window: str | None) -> Contender:
    """The engine with one setting of the dial. It profits from no prompt and no draft that it saw before."""
    engine = model.engine()
    engine.acceptance = Acceptance(engine.block_size - 1)

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        forget_prompts(engine)
        forwards, places = engine.steps, engine.places
        answers = model.generate(list(prompts), dial=dial, window=window, max_new_tokens=max_new_tokens)
        return Round(answers, engine.steps - forwards, engine.places - places)

    return Contender({"dial": dial, "window": window or "auto"}, decode)


def with_vllm(llm: Any, model: Model, dial: str) -> Contender:
    """vLLM and the plugin with one setting of the dial."""

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        requests = [model.request(each, dial=dial, max_new_tokens=max_new_tokens) for each in prompts]
        answers = dict(vllm.write(llm, model.checkpoint, requests))
        return Round([answers[index] for index in range(len(requests))])

    return Contender({"dial": dial, "window": "chain"}, decode, is_elsewhere=True)


def forget_prompts(engine: Engine) -> None:
    """Let no request profit from the beginning of an earlier one: whoever takes all pages makes them forgotten."""
    engine.pages.release(engine.pages.take(engine.pages.available))


def measure(
    contender: Contender,
    prompts: Sequence[list[int]],
    device: torch.device,
    *,
    batch_size: int,
    requests: int,
    max_new_tokens: int,
) -> Run:
    """Answer batch after batch, until there were enough requests; the prompts begin anew when they are used up."""
    asked = list(islice(cycle(prompts), -(-requests // batch_size) * batch_size))
    batches = [asked[start : start + batch_size] for start in range(0, len(asked), batch_size)]
    contender.decode(batches[0], min(WARM_UP_TOKENS, max_new_tokens))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    rounds = [contender.decode(batch, max_new_tokens) for batch in batches]
    return Run(
        asked,
        [answer for each in rounds for answer in each.answers],
        time.perf_counter() - started,
        _sum([each.forwards for each in rounds]),
        _sum([each.places for each in rounds]),
        None if contender.is_elsewhere else _peak_memory(device),
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the forwards of a model have to read, and how fast the machine copies."""

    weights: int
    per_token: int
    """Bytes of keys and values"""
    bandwidth: float
    """Bytes read and written per second"""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Traffic:
        weights = sum(each.numel() * each.element_size() for each in checkpoint.module.parameters())
        return cls(weights, _bytes_per_token(checkpoint), copy_bandwidth(checkpoint.device))

    def share(self, run: Run) -> float | None:
        """Part of the bandwidth that reading all weights and the text so far takes up; None if forwards are unknown."""
        if not run.forwards:
            return None
        pairs = zip(run.prompts, run.answers, strict=True)
        cached = sum(sum(accumulate(answer.steps[:-1], initial=len(prompt))) for prompt, answer in pairs)
        return (run.forwards * self.weights + cached * self.per_token) / run.seconds / self.bandwidth


def to_row(contender: Contender, batch_size: int, run: Run, one_token: Run, traffic: Traffic) -> dict[str, Any]:
    """A measurement as the file keeps it; what is not known is None."""
    row_forwards, checked, agreed = (
        sum(getattr(answer, name) for answer in run.answers) for name in ("forwards", "checked", "agreed")
    )
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(run.answers, one_token.answers, strict=True)]
    first = [1000 * answer.times[0] for answer in run.answers if answer.times]
    later = [1000 * each for answer in run.answers if (each := _seconds_per_token(answer)) is not None]
    return {
        **contender.label,
        "batch_size": batch_size,
        "requests": len(run.answers),
        "tokens": run.tokens,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_forward": run.tokens / row_forwards if row_forwards else None,
        "forwards": run.forwards,
        "ms_per_forward": 1000 * run.seconds / run.forwards if run.forwards else None,
        "width": run.places / run.forwards if run.places and run.forwards else None,
        "ratio_to_one_token": run.tokens_per_second / one_token.tokens_per_second,
        "agreement": agreed / checked if checked else None,
        "same_text": sum(same) / len(same),
        "bandwidth_share": traffic.share(run),
        "ttft_ms_p50": _quantile(first, 0.5),
        "ttft_ms_p99": _quantile(first, 0.99),
        "tpot_ms_p50": _quantile(later, 0.5),
        "tpot_ms_p99": _quantile(later, 0.99),
        "peak_memory_bytes": run.peak_memory,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of the fastest of a few copies of a big tensor, counting what is read and what is written."""
    size = COPY_BYTES[device.type]
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(COPIES):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def _bytes_per_token(checkpoint: Checkpoint) -> int:
    return sum(shape.bytes_per_token for shape in layer_shapes(checkpoint))


def _peak_memory(device: torch.device) -> int:
    """Bytes on the GPU since the last reset, or on a CPU of the whole process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds_per_token(answer: Generation) -> float | None:
    """Of the tokens that came after the first forward's."""
    later = answer.tokens - answer.steps[0]
    return (answer.times[-1] - answer.times[0]) / later if answer.times and later else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share)) if values else None
