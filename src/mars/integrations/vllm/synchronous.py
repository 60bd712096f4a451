"""The synchronous path: vLLM's first model runner, with a proposer that samples and drafts from the target's logits.
vLLM asks the proposer for the next windows by itself, and ``load_model`` gives it the target.
"""

import sys
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mars.integrations.vllm import hooks
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.options import has_seed, own_dial, own_sampling
from mars.integrations.vllm.step import KINDS, Drafter, StepInputs, step, token_scores
from mars.method.acceptance import Dial, DialTensors
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.tensors import send


class Proposer(Drafter):
    """Drafts from the target's own masks. Between steps it keeps the server's dial and counts."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config, vllm_config.device_config.device)
        self.dial = Dial.parse(self.options.dial)
        self.seed: int = vllm_config.model_config.seed
        self._next: list[list[int]] = []
        install()

    def load_model(self, target: Any) -> None:
        self.prepare(target)

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
        if metadata is None and not any(map(has_seed, params)):
            dials = [own_dial(each) or self.dial for each in params]
            self._next = [[self.options.mask] * (2 * masks if dial.uses_masks else 0) for dial in dials]
            self.single += int((runner.discard_request_mask.np[: len(params)] == 0).sum())
            return sampler(logits, None)
        return self._decide(runner, logits, metadata or _no_drafts(len(params), logits.device), params, masks)

    def _decide(self, runner: Any, logits: Tensor, metadata: Any, params: list[Any], masks: int) -> Any:
        from vllm.v1.outputs import SamplerOutput

        device, count = logits.device, len(params)
        dials = [own_dial(each) or self.dial for each in params]
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=device)
        tokens[metadata.target_logits_indices + 1] = metadata.draft_token_ids.long()
        inputs = StepInputs(
            tokens=tokens,
            starts=send([0, *accumulate(drafts + 1 for drafts in metadata.num_draft_tokens)], device),
            slots=torch.arange(count, device=device),
            kinds=send([KINDS.index(dial.kind) for dial in dials], device),
            prefilling=send(torch.tensor(runner.discard_request_mask.np[:count]), device),
            counts=self.counted,
            mask_token=self.options.mask,
            masks=masks,
            width=2 * self.options.masks,
        )
        adjusted, sampling = _adjust(runner, logits, metadata), self._sampling(runner)
        tensors = SamplingTensors.of(sampling, logits.shape[1], device=device)
        positions = send(torch.tensor(runner.input_batch.num_tokens_no_spec[:count]).long() - 1, device)
        outputs = step(inputs, adjusted, DialTensors.of(dials, device), tensors, positions, head=self.head)
        windows = outputs.windows[:, : 2 * masks].tolist()
        self._next = [each if dial.uses_masks else [] for each, dial in zip(windows, dials, strict=True)]
        sampled = outputs.sampled[:, : metadata.max_spec_len + 1].int().contiguous()

        most, sampler = runner.input_batch.sampling_metadata.max_num_logprobs, runner.rejection_sampler
        if most is None:
            return SamplerOutput(sampled, None)
        if sampler.is_processed_logprobs_mode:
            logits = token_scores(adjusted, sampling, [drafts + 1 for drafts in metadata.num_draft_tokens])
        target, bonus = logits[metadata.target_logits_indices], logits[metadata.bonus_logits_indices]
        return SamplerOutput(sampled, sampler._get_logprobs_tensors(most, metadata, logits, target, bonus, sampled))

    def _sampling(self, runner: Any) -> list[SamplingParams]:
        """Of all sequences. A request without a seed gets one from its name, which all ranks know."""
        found = []
        for name in runner.input_batch.req_ids:
            params, text = runner.requests[name].sampling_params, f"{self.seed}:{name}"
            own = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
            found.append(own_sampling(params, own if params.seed is None else params.seed))
        return found


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


def install() -> None:
    """Hook into vLLM's first model runner; engines without our method stay as they are."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reason = "drafts are verified by `decide`, not by vLLM's rejection sampler"
    hooks.install([(GPUModelRunner, "_sample", _sample, reason)])


def _sample(original: Method, self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    if isinstance(drafter := getattr(self, "drafter", None), Proposer):
        return drafter.sample(partial(original, self), self, logits, spec_decode_metadata)
    return original(self, logits, spec_decode_metadata)
