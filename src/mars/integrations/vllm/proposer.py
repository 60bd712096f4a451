"""The synchronous road: the proposer that vLLM loads, and how it sees logits, requests and what these fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from operator import eq
from typing import Any

import torch

from mars.errors import MarsError
from mars.integrations.vllm.arguments import METHOD, parse_dial
from mars.integrations.vllm.windows import drafts_in, masks_for, next_window
from mars.method.acceptance import Dial

NEEDED = ("_sample", "propose_draft_token_ids", "_input_fits_in_drafter")
FORCED = 1e4
"""Added to the best logit: after it, nothing else is likely"""


@dataclass(slots=True)
class Seen:
    """Of the forward that is being sampled from."""

    best: list[int]
    """The likeliest token behind every place that has logits"""
    sure: list[float] | None
    """Its probability, where a dial asks for it"""
    starts: list[int]
    """Where each request's places begin"""


@dataclass(slots=True)
class Counts:
    """Since the start, of rows that decoded."""

    forwards: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    agreed: int = 0
    """Accepted drafts that are the AR model's own choice"""


class Proposer:
    """Drafts from the target's own masks. It keeps nothing between two steps but the server's dial and counts."""

    def __init__(self, vllm_config: Any) -> None:
        settings = vllm_config.additional_config[METHOD]
        self.mask: int = settings["mask"]
        self.masks: int = settings["masks"]
        self.dial = Dial.parse(settings["dial"])
        self.windows: dict[int, int] = {int(rows): count for rows, count in settings["windows"].items()}
        """Masks from so many requests on"""
        self.counts = Counts()
        self._seen: Seen | None = None
        _hook()

    def load_model(self, target: Any) -> None:
        without_mask(target, self.mask)

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        raise RuntimeError("the runner's own method is replaced")  # vLLM asks whether there is one

    def look(self, runner: Any, logits: torch.Tensor, metadata: Any) -> None:
        """Before tokens are sampled: note what the masks say, and let lenient dials have their way."""
        dials = [self.dial_of(runner, request) for request in runner.input_batch.req_ids]
        drafted = [0] * len(dials) if metadata is None else metadata.num_draft_tokens
        starts = [0]
        for count in drafted:
            starts.append(starts[-1] + count + 1)
        values, best = logits.max(dim=-1)
        sure = None
        if any(dial.kind == "threshold" for dial in dials):
            sure = (values - logits.float().logsumexp(dim=-1)).exp().tolist()
        self._seen = Seen(best.tolist(), sure, starts[:-1])
        if metadata is not None and any(dial.kind in ("relaxed", "threshold") for dial in dials):
            self._force(logits, metadata, values, dials)

    def _force(self, logits: torch.Tensor, metadata: Any, best: torch.Tensor, dials: list[Dial]) -> None:
        """Make drafts certain that a dial accepts though the AR model would not have written them."""
        rows, drafts = metadata.target_logits_indices.long(), metadata.draft_token_ids.long()
        least = torch.tensor([log_least(dial) for dial in dials], device=logits.device)
        counts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
        mine = logits[rows, drafts]
        keep = (drafts != self.mask) & (mine > -torch.inf)
        keep &= mine >= best[rows] + least.repeat_interleave(counts)
        logits[rows[keep], drafts[keep]] = best[rows[keep]] + FORCED

    def next_windows(self, runner: Any, scheduled: Any, sampled: list[list[int]]) -> list[list[int]]:
        """For every request the places behind its newest token."""
        seen, self._seen = self._seen, None
        assert seen is not None
        windows: list[list[int]] = []
        masks = masks_for(len(sampled), self.windows, self.masks)
        for index, request in enumerate(runner.input_batch.req_ids):
            tokens = sampled[index]
            dial = self.dial_of(runner, request)
            if not tokens or not masks or dial.kind == "one-token":  # it reads its prompt yet, or there are no drafts
                self._count([], tokens, None)
                windows.append([])
                continue
            fed = scheduled.scheduled_spec_decode_tokens.get(request, [])
            places = slice(seen.starts[index], seen.starts[index] + len(fed) + 1)
            best = seen.best[places]
            self._count(fed, tokens, None if dial.kind == "exact" else best)
            trusted = None
            if dial.kind == "threshold" and seen.sure is not None:
                trusted = _run(seen.sure[places], drafts_in(fed, self.mask), dial.value or 0.0)
            windows.append(next_window(fed, len(tokens), best, mask=self.mask, masks=masks, trusted=trusted))
        return windows

    def _count(self, fed: list[int], tokens: list[int], best: list[int] | None) -> None:
        """``best``: what the AR model would have written; None if all drafts were its own."""
        if not tokens:
            return
        accepted = tokens[:-1]
        self.counts.forwards += 1
        self.counts.tokens += len(tokens)
        self.counts.drafts += drafts_in(fed, self.mask) or 0
        self.counts.accepted += len(accepted)
        self.counts.agreed += sum(map(eq, accepted, accepted if best is None else best))

    def dial_of(self, runner: Any, request: str) -> Dial:
        """A request's own, or the server's. Where likelihoods are asked for, every token is checked."""
        sampling = runner.requests[request].sampling_params
        asked = (sampling.extra_args or {}).get("dial")
        dial = self.dial if asked is None else parse_dial(asked)
        checks = sampling.logprobs is not None
        return Dial("exact") if checks and dial.kind in ("relaxed", "threshold") else dial


def without_mask(target: Any, mask: int) -> None:
    """No text ever has a mask in it: take its logit out of everything."""
    compute = target.compute_logits

    @wraps(compute)
    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is not None:  # only some ranks have them
            logits[:, mask] = -torch.inf
        return logits

    target.compute_logits = compute_logits


def log_least(dial: Dial) -> float:
    """How far under the best logit a draft may be."""
    if dial.kind == "threshold":
        return -torch.inf
    if dial.kind == "relaxed":
        return float(torch.tensor(dial.value).log())
    return torch.inf


def _run(sure: list[float], known: int | None, least: float) -> int:
    """How many masks in a row are sure enough."""
    run = 0
    for each in sure[(known or 0) + 1 :]:
        if each < least:
            break
        run += 1
    return run


def _hook() -> None:
    """Let the model runner show its logits before it samples, and ask us for windows after."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if missing := [name for name in NEEDED if not hasattr(GPUModelRunner, name)]:
        raise MarsError(f"this vLLM's model runner has no {missing[0]}: use a version that MARS was tested with")
    if hasattr(GPUModelRunner, "knows_mars"):
        return
    GPUModelRunner.knows_mars = True
    _mend_sampling()
    for name, change in {
        "_sample": _looking,
        "propose_draft_token_ids": _proposing,
        "_input_fits_in_drafter": _always_fitting,
    }.items():
        setattr(GPUModelRunner, name, change(getattr(GPUModelRunner, name)))


def _mend_sampling() -> None:
    """On a CPU, vLLM 0.32 draws drafts with temperatures that nobody has set: spread them in plain torch."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        spread = x.repeat_interleave(counts, output_size=num_tokens)
        return torch.where(spread == replace_from, replace_to, spread).to(x.dtype)

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


Method = Callable[..., Any]


def _looking(sample: Method) -> Method:
    @wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if isinstance(drafter := getattr(self, "drafter", None), Proposer):
            if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
                spec_decode_metadata = None  # all windows were cut to nothing, which top-k on a CPU cannot stand
            drafter.look(self, logits, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    return _sample


def _proposing(propose: Method) -> Method:
    @wraps(propose)
    def propose_draft_token_ids(self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kw: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            return self.drafter.next_windows(self, scheduler_output, sampled_token_ids)
        return propose(self, scheduler_output, sampled_token_ids, *args, **kw)

    return propose_draft_token_ids


def _always_fitting(fits: Method) -> Method:
    """There is no draft model whose context could be too short; the scheduler cuts windows at the model's own end."""

    @wraps(fits)
    def _input_fits_in_drafter(self: Any, common: Any) -> bool:
        return common is not None if isinstance(self.drafter, Proposer) else fits(self, common)

    return _input_fits_in_drafter
