"""Measurements of one decoder: its speed, the time of a forward, and whether the text is the model's own."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from typing import Any

import torch

from mars.api import Model
from mars.core.output import RequestOutput
from mars.engine.cache import layer_shapes
from mars.engine.policy import Acceptance
from mars.evaluation import vllm
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint

WARM_UP_TOKENS = 16
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
COPIES = 5


@dataclass(frozen=True)
class Round:
    """Prompts that were answered at once."""

    answers: list[RequestOutput]
    forwards: int | None = None  # of the whole batch; None: unknown
    window_tokens: int | None = None  # sum of the widths of all sequences' windows
    drafts: int | None = None  # that were verified
    accepted: int | None = None  # … and passed
    expected: tuple[float, float] | None = None  # tokens and seconds that the policy expects of these steps


Decode = Callable[[Sequence[list[int]], int], Round]
"""Answers prompts at once and greedily, each with at most so many tokens"""


@dataclass(frozen=True, slots=True)
class Decoder:
    """What is measured."""

    label: dict[str, str | None]  # ``dial`` or ``peer``, and ``window``
    decode: Decode
    device: torch.device | None  # None: it runs in another process, whose memory cannot be measured


@dataclass(frozen=True, kw_only=True)
class Run(Round):
    """All rounds of one measurement."""

    prompts: list[list[int]]
    seconds: float
    peak_memory: int | None

    @property
    def tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def with_dial(model: Model, dial: str, window: str | None) -> Decoder:
    """The engine with one setting of the dial, without prompts and acceptance statistics of earlier rounds."""
    engine = model.engine()
    engine.policy.acceptance = Acceptance(engine.block_size - 1)

    def counts() -> list[int]:
        return [engine.num_steps, engine.num_fed, engine.num_drafts, engine.num_accepted]

    def expected(before: Counter[tuple[int, Window]]) -> tuple[float, float] | None:
        steps = engine.windows_fed - before
        found = [(count, engine.policy.expects(*each)) for each, count in steps.items()]
        return _totals(each and (count * each[0], count * each[1]) for count, each in found)

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        engine.clear_prefix_cache()
        before, windows = counts(), engine.windows_fed.copy()
        answers = model.generate(list(prompts), dial=dial, window=window, max_new_tokens=max_new_tokens)
        steps, fed, drafts, accepted = (now - then for now, then in zip(counts(), before, strict=True))
        return Round(answers, steps, fed, drafts, accepted, expected(windows))

    return Decoder({"dial": dial, "window": window or "auto"}, decode, model.checkpoint.device)


def with_vllm(llm: Any, model: Model, dial: str) -> Decoder:
    """vLLM and the plugin with one setting of the dial."""

    def decode(prompts: Sequence[list[int]], max_new_tokens: int) -> Round:
        requests = [model.request(each, dial=dial, max_new_tokens=max_new_tokens) for each in prompts]
        answers = dict(vllm.generate(llm, model.checkpoint, requests))
        return Round([answers[index] for index in range(len(requests))])

    return Decoder({"dial": dial, "window": "auto"}, decode, device=None)


def measure(
    decoder: Decoder, prompts: Sequence[list[int]], *, batch_size: int, requests: int, max_new_tokens: int
) -> Run:
    """Answer batch after batch until there were enough requests; prompts are repeated where there are too few."""
    asked = list(islice(cycle(prompts), -(-requests // batch_size) * batch_size))
    batches = [asked[start : start + batch_size] for start in range(0, len(asked), batch_size)]
    decoder.decode(batches[0], min(WARM_UP_TOKENS, max_new_tokens))
    if decoder.device and decoder.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(decoder.device)
    started = time.perf_counter()
    rounds = [decoder.decode(batch, max_new_tokens) for batch in batches]
    return Run(
        [answer for each in rounds for answer in each.answers],
        _sum(each.forwards for each in rounds),
        _sum(each.window_tokens for each in rounds),
        _sum(each.drafts for each in rounds),
        _sum(each.accepted for each in rounds),
        _totals(each.expected for each in rounds),
        prompts=asked,
        seconds=time.perf_counter() - started,
        peak_memory=_peak_memory(decoder.device),
    )


def _totals(pairs: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Of tokens and seconds; None if some are not known."""
    known = list(pairs)
    if not known or None in known:
        return None
    tokens, seconds = zip(*filter(None, known), strict=True)
    return sum(tokens), sum(seconds)


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(filter(None, known))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the forwards of a model read from memory, and how fast the machine copies."""

    weights: int
    per_token: int  # bytes of keys and values
    bandwidth: float  # bytes read and written per second

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Traffic:
        weights = sum(each.numel() * each.element_size() for each in checkpoint.module.parameters())
        per_token = sum(shape.bytes_per_token for shape in layer_shapes(checkpoint))
        return cls(weights, per_token, copy_bandwidth(checkpoint.device))

    def share(self, run: Run) -> float | None:
        """Share of the bandwidth used to read all weights and the cached text; None if forwards are unknown."""
        if not run.forwards:
            return None
        pairs = zip(run.prompts, run.answers, strict=True)
        cached = sum(sum(accumulate(answer.steps[:-1], initial=len(prompt))) for prompt, answer in pairs)
        return (run.forwards * self.weights + cached * self.per_token) / run.seconds / self.bandwidth


def to_row(decoder: Decoder, batch_size: int, run: Run, one_token: Run, traffic: Traffic) -> dict[str, Any]:
    """A measurement as it stands in the results file; None: unknown."""
    request_forwards, verified, agreed = (
        sum(getattr(answer, name) for answer in run.answers) for name in ("forwards", "num_verified", "num_agreed")
    )
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(run.answers, one_token.answers, strict=True)]
    return {
        **decoder.label,
        "batch_size": batch_size,
        "requests": len(run.answers),
        "tokens": run.tokens,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_forward": run.tokens / request_forwards if request_forwards else None,
        "forwards": run.forwards,
        "ms_per_forward": 1000 * run.seconds / run.forwards if run.forwards else None,
        "width": run.window_tokens / request_forwards if run.window_tokens and request_forwards else None,
        "drafts_passed": run.accepted / run.drafts if run.drafts and run.accepted is not None else None,
        "expected_tokens_per_second": run.expected[0] / run.expected[1] if run.expected else None,
        "ratio_to_one_token": run.tokens_per_second / one_token.tokens_per_second,
        "agreement": agreed / verified if verified else None,
        "same_text": sum(same) / len(same),
        "bandwidth_share": traffic.share(run),
        **_milliseconds("ttft", [answer.times[0] for answer in run.answers if answer.times]),
        **_milliseconds("tpot", [each for answer in run.answers if (each := _seconds_per_token(answer)) is not None]),
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


def _peak_memory(device: torch.device | None) -> int | None:
    """Bytes on the GPU since the last reset, or on a CPU of the whole process since its start."""
    if device is None:
        return None
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _seconds_per_token(answer: RequestOutput) -> float | None:
    """The mean over the tokens after the first forward's."""
    later = answer.num_tokens - answer.steps[0]
    return (answer.times[-1] - answer.times[0]) / later if answer.times and later else None


def _milliseconds(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile."""
    values = 1000 * torch.tensor(seconds, dtype=torch.float64)
    shares = {f"{name}_ms_p50": 0.5, f"{name}_ms_p99": 0.99}
    return {key: float(values.quantile(share)) if seconds else None for key, share in shares.items()}
