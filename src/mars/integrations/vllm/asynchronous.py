"""The asynchronous path: vLLM's second model runner, with a speculator that samples and drafts on the device.

vLLM schedules a step before the last one has ended, so nothing here may wait for the device or look at tokens. Only
the device knows how many tokens of a window are drafts. The host knows the shape of a step and the requests' dials.

===============================================  =================================================================
``init_speculator``                              vLLM has no speculator of ours to choose
``GPUModelRunner.load_model``                    afterwards there are a model and samplers to put ours in front of
``GPUModelRunner.execute_model``                 vLLM 0.24 does not tell a speculator how long the next windows are
``GPUModelRunner.sample_tokens``                 without windows, the runner should not handle drafts at all
``CudaGraphManager._init_candidates``            vLLM captures no graphs of windows shorter than a full one
``Worker.compile_or_warm_up_model``              vLLM's own requests at start-up should not be counted
===============================================  =================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars.errors import MarsError
from mars.integrations.vllm.cuda_graphs import capture_other_lengths
from mars.integrations.vllm.kernel import greedy_step
from mars.integrations.vllm.options import Options, own_dial
from mars.integrations.vllm.step import (
    KINDS,
    THRESHOLD,
    Drafter,
    GreedyChoices,
    StepCounter,
    StepInputs,
    StepOutputs,
    sampling_tensors,
    step,
)
from mars.integrations.vllm.synchronous import ban_mask_token
from mars.method.acceptance import MEASURES, Dial, DialFeatures, DialTensors
from mars.method.sampling import Features, SamplingTensors
from mars.method.tensors import send

Method = Callable[..., Any]
EXACT, RELAXED = KINDS.index("exact"), KINDS.index("relaxed")
ADJUSTED = ("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
NEWER = ("thinking_token_budget", "logprob_token_ids", "repetition_detection")
"""Parameters with which a greedy request does not simply take the argmax; not every version has the newer ones"""


class RequestTable:
    """What each request asked for, by its slot in the runner: on the host, and its dial on the device too."""

    def __init__(self, slots: int, device: torch.device, dial: Dial) -> None:
        self.argmax = np.zeros(slots, dtype=bool)
        """Requests whose next token is the argmax of the model's own logits, and nothing else is asked for"""
        self.seeded = np.zeros(slots, dtype=bool)
        """Requests that sample with a seed of their own"""
        self.kinds = np.zeros(slots, dtype=np.int32)
        self._limits = np.zeros((slots, 3))
        """Tolerance, trust and measure of each dial"""
        self._own: list[Dial | None] = [None] * slots
        self._device = device
        self._on_device: tuple[Tensor, Tensor] | None = None
        self.dial = dial
        self.set_dial(dial)

    def set_dial(self, dial: Dial) -> None:
        """The dial of all requests without one of their own."""
        self.dial = dial
        for slot in range(len(self._own)):
            self._set(slot)

    def add(self, slot: int, params: Any) -> None:
        self._own[slot] = own_dial(params)
        plain = params.temperature == 0 and params.logprobs is None and params.repetition_penalty == 1
        self.argmax[slot] = plain and not any(getattr(params, name, None) for name in (*ADJUSTED, *NEWER))
        scored = getattr(params, "logprob_token_ids", None)  # vLLM's sampler alone reports these
        self.seeded[slot] = params.temperature > 0 and params.seed is not None and not scored
        self._set(slot)

    def _set(self, slot: int) -> None:
        dial = self._own[slot] or self.dial
        self.kinds[slot] = KINDS.index(dial.kind)
        self._limits[slot] = dial.tolerance, dial.trust, MEASURES.index(dial.measure)
        self._on_device = None

    def on_device(self) -> tuple[Tensor, Tensor]:
        """Kinds and limits of all slots' dials."""
        if self._on_device is None:
            kinds, limits = (send(torch.tensor(each), self._device) for each in (self.kinds, self._limits))
            self._on_device = kinds, limits
        return self._on_device

    def dials(self, index: Tensor, slots: np.ndarray[Any, Any]) -> DialTensors:
        """The dials of the slots at ``index``; ``slots`` are the same on the host."""
        kinds = self.kinds[slots]
        measures = np.unique(self._limits[slots[kinds == THRESHOLD], 2]).astype(int)
        features = DialFeatures(bool((kinds == RELAXED).any()), frozenset(MEASURES[each] for each in measures))
        return DialTensors(*self.on_device()[1][index.long()].unbind(1), features)


class InFront:
    """An object of vLLM's with another ``__call__``."""

    def __init__(self, inner: Any, call: Method) -> None:
        self._inner, self._call = inner, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class OnlyAdjusts:
    """In the place of vLLM's sampling states: temperature and truncation are left to `decide`."""

    def apply_temperature(self, *_: Any) -> None: ...

    def apply_min_p(self, *_: Any) -> None: ...


class Speculator(Drafter):
    """What vLLM's runner asks for drafts. Between steps it keeps dials, counts and the next windows."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req, num_extra_query_per_req = 1, 0

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        options = Options.read(vllm_config)
        assert options is not None
        self.mask_token, self.width = options.mask, 2 * options.masks
        self.masks = options.masks
        """Masks per window of the next step: the scheduler decides"""
        slots = vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(slots, device, Dial.parse(options.dial))
        self.counter = StepCounter(device)
        self.model = torch.nn.Module()  # there is no draft model; vLLM looks through it for experts
        self._only_masks = torch.full((slots, self.width), self.mask_token, device=device)
        self._uses_kernel = device.type != "cpu"
        self._next: Tensor | None = None

    @property  # type: ignore[override]
    def dial(self) -> Dial:
        return self.requests.dial

    @dial.setter
    def dial(self, dial: Dial) -> None:
        self.requests.set_dial(dial)

    def attach(self, runner: Any) -> None:
        """When the model is loaded: ban the mask token, and put our samplers in front of vLLM's."""
        if getattr(runner, "batch_sharder", None) is not None:
            raise MarsError("mars needs all logits on one rank: leave out the sharded sampler")
        ban_mask_token(runner.model, self.mask_token)
        if runner.sampler is None:
            return
        if not _is_known(runner.sampler):
            from vllm.logger import init_logger

            warning = "mars does not know vLLM's %s: requests get one token per step"
            init_logger("vllm.mars").warning(warning, type(runner.sampler).__name__)
            return
        self._vllm, self._vllm_rejection = runner.sampler, runner.rejection_sampler
        self._adjuster = copy(runner.sampler)
        self._adjuster.sampling_states = OnlyAdjusts()
        self._always_adjusts = len(getattr(runner.sampler, "logits_processors", ())) > 3
        runner.sampler = InFront(runner.sampler, self.sample_one)
        runner.sampler.add_request = self._add_request
        runner.rejection_sampler = InFront(runner.rejection_sampler, self.sample)
        if self._uses_kernel:
            self._compile_kernel()

    def _add_request(self, slot: int, *others: Any) -> None:
        self.requests.add(slot, others[-1])
        self._vllm.add_request(slot, *others)

    def _compile_kernel(self) -> None:
        """Compile all variants of the kernel before the first request waits for one."""
        device, count = self._only_masks.device, 2
        tokens = torch.full((count * (self.width + 1),), self.mask_token, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * (self.width + 1)
        slots = torch.arange(count, dtype=torch.int32, device=device)
        flags = torch.zeros_like(tokens, dtype=torch.uint8)
        kinds, _ = self.requests.on_device()
        plain = GreedyChoices(tokens.long())
        variants = [(None, plain)] + [
            (kinds, replace(plain, tolerated=tolerated, confident=confident))
            for tolerated in (None, flags)
            for confident in (None, flags)
        ]
        for each, choices in variants:
            for prefilling in (None, flags[:count]):
                for kind in (torch.int32, torch.int64):  # vLLM's versions differ
                    inputs = self._inputs(tokens, starts, slots.to(kind), each, prefilling)
                    greedy_step(inputs, choices)
        self.counter.reset()

    def _inputs(
        self, tokens: Tensor, starts: Tensor, slots: Tensor, kinds: Tensor | None, prefilling: Tensor | None
    ) -> StepInputs:
        return StepInputs(
            tokens, starts, slots, kinds, prefilling, self.counter.on_device, self.mask_token, self.masks, self.width
        )

    def sample_one(self, logits: Tensor, batch: Any) -> Any:
        """Without windows: vLLM's sampler, unless a request has a seed.

        Such a request samples with our noise in every step: its text must not depend on which steps have windows.
        """
        if not self.requests.seeded[batch.idx_mapping_np].any():
            return self._vllm(logits, batch)
        inputs = replace(self._inputs_of(batch), counts=torch.zeros_like(self.counter.on_device))
        outputs, logprobs = self._decide(inputs, logits, batch)
        outputs = replace(outputs, sampled=outputs.sampled[:, :1].contiguous())
        return self._sampler_output(outputs, logits, logprobs)

    def sample(self, logits: Tensor, batch: Any, _: None = None, invalid_drafts: Tensor | None = None) -> Any:
        """In the place of vLLM's rejection sampler. A grammar has not validated ``invalid_drafts``."""
        inputs, logprobs = self._inputs_of(batch), None
        if invalid_drafts is None and self._takes_argmax(batch):
            outputs = greedy_step(inputs, self._choices(inputs, logits, batch))
        else:
            outputs, logprobs = self._decide(inputs, logits, batch, invalid_drafts)
        self._next = outputs.windows
        return self._sampler_output(outputs, logits, logprobs)

    def _sampler_output(self, outputs: StepOutputs, logits: Tensor, logprobs: Any) -> Any:
        from vllm.v1.worker.gpu.metrics.logits import get_num_nans
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        return SamplerOutput(
            sampled_token_ids=outputs.sampled,
            logprobs_tensors=logprobs,
            num_nans=get_num_nans(logits) if self._vllm.compute_nans else None,
            num_sampled=outputs.emitted,
            num_rejected=outputs.rejected,
        )

    def _inputs_of(self, batch: Any) -> StepInputs:
        tokens, prefilling = batch.input_ids[batch.logits_indices], _prefilling(batch)
        lossless = (self.requests.kinds[batch.idx_mapping_np] == EXACT).all()
        return self._inputs(
            tokens,
            batch.cu_num_logits,
            batch.idx_mapping,
            None if lossless else self.requests.on_device()[0],
            send(torch.tensor(prefilling).view(torch.uint8), tokens.device) if prefilling.any() else None,
        )

    def _takes_argmax(self, batch: Any) -> bool:
        """Can the kernel do this step? It accepts what ``threshold`` has drafted even if a grammar forbids it."""
        slots = batch.idx_mapping_np
        if not self._uses_kernel or self._always_adjusts or not self.requests.argmax[slots].all():
            return False
        return not (batch.has_structured_output_reqs and (self.requests.kinds[slots] == THRESHOLD).any())

    def _choices(self, inputs: StepInputs, logits: Tensor, batch: Any) -> GreedyChoices:
        dials = None
        if inputs.kinds is not None:
            dials = self.requests.dials(batch.expanded_idx_mapping, batch.idx_mapping_np)
        return GreedyChoices.of(inputs.tokens, logits, dials)

    def _decide(
        self, inputs: StepInputs, logits: Tensor, batch: Any, barred: Tensor | None = None
    ) -> tuple[StepOutputs, Any]:
        positions = batch.positions[batch.logits_indices]
        adjusted = _call(
            self._adjuster.apply_sampling_params,
            logits=logits,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            idx_mapping=batch.idx_mapping,
            idx_mapping_np=batch.idx_mapping_np,
            pos=positions,
            input_ids=inputs.tokens,
            expanded_local_pos=batch.expanded_local_pos,
            seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
            skip_top_k_top_p=True,
        )
        dials = self.requests.dials(batch.idx_mapping, batch.idx_mapping_np)
        sampling = self._sampling(batch.idx_mapping, batch.idx_mapping_np)
        outputs = step(inputs, adjusted, dials, sampling, positions[inputs.starts[:-1].long()], barred)
        most = self._vllm.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most < 0:
            return outputs, None
        if self._vllm.logprobs_mode.startswith("processed"):
            per_token = self._sampling(batch.expanded_idx_mapping, batch.idx_mapping_np)
            logits = per_token.scores(adjusted.float()[:, None])[:, 0]
        logprobs = _call(
            self._vllm_rejection._get_logprobs_tensors,
            input_batch=batch,
            sampled=outputs.sampled,
            num_sampled=outputs.emitted,
            logits=logits,
            cu_num_logits=batch.cu_num_logits,
            cu_num_logits_np=batch.cu_num_logits_np,
            max_num_logprobs=most,
        )
        return outputs, logprobs

    def _sampling(self, index: Tensor, slots: np.ndarray[Any, Any]) -> SamplingTensors:
        """The sampling parameters of the slots at ``index``; ``slots`` are the same on the host."""
        states = self._vllm.sampling_states
        temperature, top_k, top_p, min_p = (
            getattr(states, name).np[slots] for name in ("temperature", "top_k", "top_p", "min_p")
        )
        truncates = (top_k < states.vocab_size) | (top_p < 1) | (min_p > 0)
        features = Features(greedy=bool((temperature == 0).all()), truncates=bool(truncates.any()))
        names = ("temperature", "top_k", "top_p", "min_p", "seeds")
        values = (getattr(states, name).gpu[index.long()] for name in names)
        bias = torch.zeros(1, states.vocab_size, device=index.device)
        return sampling_tensors(*values, bias, features)

    def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> Tensor:
        """The tokens behind every sequence's newest one."""
        count = input_batch.num_reqs
        if dummy_run:
            return self._only_masks[:count]
        following, self._next = self._next, None
        if following is not None:
            return following
        self.count_single(input_batch)
        return self._only_masks[:count] if self.masks == self.width // 2 else self._only_masks[:count].clone()

    def count_single(self, batch: Any) -> None:
        """Sequences without windows have emitted one token each."""
        self.counter.single += batch.num_reqs - int(_prefilling(batch).sum())

    def init_cudagraph_manager(self, *_: Any) -> None:
        """There is no draft model to capture graphs of."""

    capture = init_cudagraph_manager


def _prefilling(batch: Any) -> Any:
    """Sequences whose prompt is not prefilled to its end in this step."""
    return batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np


def _is_known(sampler: Any) -> bool:
    """Does vLLM sample as it does by default, so that ours can stand in?"""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    return type(sampler) is Sampler and not getattr(sampler, "return_sampling_mask", False)


def _call(function: Method, **arguments: Any) -> Any:
    """Call it with those arguments that it has: vLLM's versions differ."""
    names = signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in names})


def _is_ours(vllm_config: Any) -> bool:
    """Was the engine started with the method ``mars``, and is this its path?"""
    method = getattr(vllm_config.speculative_config, "method", None)
    return Options.read(vllm_config) is not None and method == "ngram_gpu"


def install() -> None:
    """Hook into vLLM's second model runner; engines without our method stay as they are."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu_worker import Worker

    runner = model_runner.GPUModelRunner
    if hasattr(runner, "knows_mars"):
        return
    hooks: list[tuple[Any, str, Callable[[Method], Method]]] = [
        (model_runner, "init_speculator", _with_our_speculator),
        (runner, "load_model", _attached),
        (runner, "execute_model", _with_window_length),
        (runner, "sample_tokens", _plain_without_windows),
        (CudaGraphManager, "_init_candidates", capture_other_lengths),
        (Worker, "compile_or_warm_up_model", _not_counted),
    ]
    if missing := [name for target, name, _ in hooks if not hasattr(target, name)]:
        raise MarsError(f"this vLLM's model runner has no {missing[0]}: use a version that MARS was tested with")
    runner.knows_mars = True
    for target, name, wrap in hooks:
        setattr(target, name, wrap(getattr(target, name)))


def _with_our_speculator(init: Method) -> Method:
    @wraps(init)
    def init_speculator(vllm_config: Any, device: Any, *others: Any) -> Any:
        if not _is_ours(vllm_config):
            return init(vllm_config, device, *others)
        return Speculator(vllm_config, device)

    return init_speculator


def _attached(load: Method) -> Method:
    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        if isinstance(self.speculator, Speculator):
            self.speculator.attach(self)
        return loaded

    return load_model


def _with_window_length(execute: Method) -> Method:
    @wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(speculator := self.speculator, Speculator):
            speculator.masks = scheduler_output.num_spec_tokens_to_schedule // 2
        return execute(self, scheduler_output, *args, **kwargs)

    return execute_model


def _plain_without_windows(sample: Method) -> Method:
    """If neither this step nor the next has windows, the runner does what it does without speculation."""

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        speculator, state = self.speculator, self.execute_model_state
        windows = not isinstance(speculator, Speculator) or state is None or speculator.masks
        if windows or state.input_batch.num_draft_tokens:
            return sample(self, *args, **kwargs)
        speculator.count_single(state.input_batch)
        steps, self.speculator, self.num_speculative_steps = self.num_speculative_steps, None, 0
        try:
            return sample(self, *args, **kwargs)
        finally:
            self.speculator, self.num_speculative_steps = speculator, steps

    return sample_tokens


def _not_counted(warm_up: Method) -> Method:
    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        result = warm_up(self)
        if isinstance(speculator := getattr(self.model_runner, "speculator", None), Speculator):
            speculator.counter.reset()
        return result

    return compile_or_warm_up_model
