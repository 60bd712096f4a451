"""The synchronous path: vLLM's first model runner, with a proposer that samples and drafts from the target's logits.

======================  ======================================================================================
``_sample``             of the model runner: drafts are verified by `decide` instead of vLLM's rejection sampler
======================  ======================================================================================

vLLM asks the proposer for the next windows by itself, and ``load_model`` gives it the target.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mars.errors import MarsError
from mars.integrations.vllm.options import Options, own_dial
from mars.integrations.vllm.step import KINDS, Drafter, StepCounter, StepInputs, sampling_tensors, step
from mars.method.acceptance import Dial, DialTensors
from mars.method.sampling import Features, SamplingTensors
from mars.method.tensors import send

Method = Callable[..., Any]


class Proposer(Drafter):
    """Drafts from the target's own masks. Between steps it keeps the server's dial, counts and the next windows."""

    def __init__(self, vllm_config: Any) -> None:
        options = Options.read(vllm_config)
        assert options is not None
        self.options = options
        self.dial = Dial.parse(options.dial)
        self.seed: int = vllm_config.model_config.seed
        self.counter = StepCounter("cpu")
        self._next: list[list[int]] = []
        install()

    def load_model(self, target: Any) -> None:
        ban_mask_token(target, self.options.mask)

    def propose(self, sampled: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """For every sequence the tokens behind its newest one; none while its prompt is prefilled."""
        return [window if tokens else [] for window, tokens in zip(self._next, sampled, strict=True)]

    def sample(self, sampler: Method, runner: Any, logits: Tensor, metadata: Any) -> Any:
        """In the place of vLLM's sampler, which is left what has neither windows nor a seed."""
        runner.effective_drafter_max_model_len = sys.maxsize  # no draft model's context could be too short
        params = [runner.requests[name].sampling_params for name in runner.input_batch.req_ids]
        masks = self.options.masks_for(len(params))
        if metadata is not None and not any(metadata.num_draft_tokens):
            metadata = None
        if metadata is None and not any(_has_seed(each) for each in params):
            dials = [own_dial(each) or self.dial for each in params]
            self._next = [[self.options.mask] * (2 * masks if dial.uses_masks else 0) for dial in dials]
            self.counter.single += int((runner.discard_request_mask.np[: len(params)] == 0).sum())
            return sampler(logits, None)
        return self._decide(runner, logits, metadata or _no_drafts(len(params), logits.device), params, masks)

    def _decide(self, runner: Any, logits: Tensor, metadata: Any, params: list[Any], masks: int) -> Any:
        from vllm.v1.outputs import SamplerOutput

        device, count = logits.device, len(params)
        if self.counter.on_device.device != device:
            self.counter.on_device = self.counter.on_device.to(device)
        dials = [own_dial(each) or self.dial for each in params]
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
        tokens[metadata.target_logits_indices + 1] = metadata.draft_token_ids.long()
        inputs = StepInputs(
            tokens=tokens,
            starts=send([0, *accumulate(drafts + 1 for drafts in metadata.num_draft_tokens)], device),
            slots=torch.arange(count, device=device),
            kinds=send([KINDS.index(dial.kind) for dial in dials], device),
            prefilling=send(torch.tensor(runner.discard_request_mask.np[:count]), device),
            counts=self.counter.on_device,
            mask_token=self.options.mask,
            masks=masks,
            width=2 * self.options.masks,
        )
        adjusted = _adjust(runner, logits, metadata)
        sampling = self._sampling(params, runner.input_batch.req_ids, logits)
        positions = send(torch.tensor(runner.input_batch.num_tokens_no_spec[:count]).long() - 1, device)
        outputs = step(inputs, adjusted, DialTensors.of(dials, device), sampling, positions)
        windows = outputs.windows[:, : 2 * masks].tolist()
        self._next = [each if dial.uses_masks else [] for each, dial in zip(windows, dials, strict=True)]
        sampled = outputs.sampled[:, : metadata.max_spec_len + 1].int().contiguous()
        return SamplerOutput(sampled, self._logprobs(runner, logits, adjusted, metadata, params, sampled))

    def _sampling(self, params: Sequence[Any], names: Sequence[str], logits: Tensor) -> SamplingTensors:
        size = logits.shape[1]
        floats = send([[each.temperature, each.top_p, each.min_p] for each in params], logits.device)
        top_k = send([each.top_k if 0 < each.top_k < size else size for each in params], logits.device)
        seeds = send([self._seed(each, name) for each, name in zip(params, names, strict=True)], logits.device)
        temperature, top_p, min_p = floats.unbind(1)
        features = Features(
            greedy=all(each.temperature == 0 for each in params),
            truncates=any(0 < each.top_k < size or each.top_p < 1 or each.min_p > 0 for each in params),
        )
        bias = torch.zeros(1, size, device=logits.device)
        return sampling_tensors(temperature, top_k, top_p, min_p, seeds, bias, features)

    def _seed(self, params: Any, name: str) -> int:
        """The request's own; otherwise from its name, which all ranks know."""
        if params.seed is not None:
            return int(params.seed) & (2**63 - 1)
        digest = blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _logprobs(
        self, runner: Any, logits: Tensor, adjusted: Tensor, metadata: Any, params: list[Any], sampled: Tensor
    ) -> Any:
        """As vLLM reports them: of the model's own logits, or of those that tokens are sampled from."""
        most, sampler = runner.input_batch.sampling_metadata.max_num_logprobs, runner.rejection_sampler
        if most is None:
            return None
        shown = logits.float()
        if sampler.is_processed_logprobs_mode:
            lengths = metadata.num_draft_tokens
            each = [one for one, drafts in zip(params, lengths, strict=True) for _ in range(drafts + 1)]
            shown = self._sampling(each, [""] * len(each), logits).scores(adjusted[:, None])[:, 0]
        target, bonus = shown[metadata.target_logits_indices], shown[metadata.bonus_logits_indices]
        return sampler._get_logprobs_tensors(most, metadata, logits, target, bonus, sampled)


def _has_seed(params: Any) -> bool:
    """Such a request samples with our noise in every step: its text must not depend on which steps have windows."""
    return params.temperature > 0 and params.seed is not None and not getattr(params, "logprob_token_ids", None)


def _adjust(runner: Any, logits: Tensor, metadata: Any) -> Tensor:
    """Logits after vLLM's penalties, bans and minimum lengths, in float32; a copy."""
    adjusted = logits.to(torch.float32, copy=True)
    sampling = runner.input_batch.sampling_metadata
    bonus, target = metadata.bonus_logits_indices.long(), metadata.target_logits_indices.long()
    adjusted[bonus] = runner.sampler.apply_logits_processors(adjusted[bonus], sampling, True)
    if len(target):
        adjusted[target] = runner.rejection_sampler.apply_logits_processors(adjusted[target], sampling, metadata)
    return adjusted


def _no_drafts(count: int, device: torch.device) -> Any:
    """What vLLM would say of a step in which no sequence has drafts."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    none, rows = torch.zeros(0, dtype=torch.int32, device=device), torch.arange(count, device=device)
    return SpecDecodeMetadata(none, [0] * count, torch.zeros_like(rows), rows + 1, none, rows, rows)


def ban_mask_token(target: Any, mask_token: int) -> None:
    """No text ever contains the mask token: set its logit to minus infinity wherever logits are computed."""
    compute = target.compute_logits

    @wraps(compute)
    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is not None:  # only some ranks have them
            logits[:, mask_token] = -torch.inf
        return logits

    target.compute_logits = compute_logits


def install() -> None:
    """Hook into vLLM's first model runner; engines without our method stay as they are."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = getattr(GPUModelRunner, "_sample", None)
    if sample is None:
        raise MarsError("this vLLM's model runner has no _sample: use a version that MARS was tested with")
    if hasattr(sample, "knows_mars"):
        return

    @wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if isinstance(drafter := getattr(self, "drafter", None), Proposer):
            return drafter.sample(lambda *args: sample(self, *args), self, logits, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    _sample.knows_mars = True  # type: ignore[attr-defined]
    GPUModelRunner._sample = _sample
