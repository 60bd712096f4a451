"""The asynchronous path: vLLM's second model runner, with a speculator that samples and drafts on the device.

vLLM schedules a step before the last one has ended, so nothing here may wait for the device or look at tokens. Only
the device knows how many tokens of a window are drafts. The host knows the shape of a step and the requests' dials.
"""

from copy import copy
from dataclasses import replace
from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars.errors import MarsError
from mars.integrations.vllm import gated, hooks
from mars.integrations.vllm.cuda_graphs import capture, init_candidates
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.kernel import add_head, greedy_step
from mars.integrations.vllm.options import has_seed, is_used, log, own_dial, own_sampling
from mars.integrations.vllm.step import (
    KINDS,
    THRESHOLD,
    Drafter,
    GreedyChoices,
    StepInputs,
    StepOutputs,
    select,
    step,
    token_scores,
)
from mars.method.acceptance import Dial, DialFeatures, DialTensors
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.tensors import send

EXACT = KINDS.index("exact")
ADJUSTED = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens"),
    *("thinking_token_budget", "logprob_token_ids", "repetition_detection"),
)  # parameters with which a greedy request does not simply take the argmax; not every version has all of them


class RequestTable:
    """What each request asked for, by its slot in the runner: on the host, and its dial on the device too."""

    def __init__(self, slots: int, device: torch.device, dial: Dial) -> None:
        self.argmax = np.zeros(slots, dtype=bool)
        """Requests whose next token is the argmax of the model's own logits, and nothing else is asked for"""
        self.seeded = np.zeros(slots, dtype=bool)  # requests that sample with a seed of their own
        self.kinds = np.zeros(slots, dtype=np.int32)
        self.sampling = [SamplingParams(seed=0)] * slots
        self._own: list[Dial | None] = [None] * slots
        self._device, self._on_device = device, (torch.empty(0), DialTensors.of([]))
        self.set_dial(dial)

    def set_dial(self, dial: Dial) -> None:
        """The dial of all requests without one of their own."""
        self.dial = dial
        self.kinds[:] = [KINDS.index((own or dial).kind) for own in self._own]
        self._stale = True

    def add(self, slot: int, params: Any, seed: int) -> None:
        self._own[slot], self.sampling[slot] = own_dial(params), own_sampling(params, seed)
        plain = params.temperature == 0 and params.logprobs is None and params.repetition_penalty == 1
        self.argmax[slot] = plain and not any(getattr(params, name, None) for name in ADJUSTED)
        self.seeded[slot] = has_seed(params)
        self.kinds[slot] = KINDS.index((self._own[slot] or self.dial).kind)
        self._stale = True

    def on_device(self) -> tuple[Tensor, DialTensors]:
        """The dials of all slots, and their kinds."""
        if self._stale:
            dials = [own or self.dial for own in self._own]
            self._on_device = send(torch.tensor(self.kinds), self._device), DialTensors.of(dials, self._device)
            self._stale = False
        return self._on_device

    def dials(self, index: Tensor, slots: np.ndarray[Any, Any]) -> DialTensors:
        """The dials of the slots at ``index``; ``slots`` are the same on the host."""
        features = DialFeatures.of([self._own[slot] or self.dial for slot in slots])
        return replace(select(self.on_device()[1], index.long()), features=features)


class Wrapped:
    """An object of vLLM's with some methods replaced; ``call`` is what happens if it is called."""

    def __init__(self, inner: Any, **methods: Method) -> None:
        vars(self).update(methods, inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


class Speculator(Drafter):
    """What vLLM's runner asks for drafts. Between steps it keeps dials and counts."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req, num_extra_query_per_req = 1, 0

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.mask_token, self.width = self.options.mask, 2 * self.options.masks
        self.masks = self.options.masks  # masks per window of the next step: the scheduler decides
        slots = vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(slots, device, Dial.parse(self.options.dial))
        self.model = torch.nn.Module()  # there is no draft model; vLLM looks through it for experts
        self._only_masks = torch.full((slots, self.width), self.mask_token, device=device)
        self._next: Tensor | None = None

    @property
    def dial(self) -> Dial:
        return self.requests.dial

    @dial.setter
    def dial(self, dial: Dial) -> None:
        self.requests.set_dial(dial)

    def attach(self, runner: Any) -> None:
        """When the model is loaded: attach the adapter, and put our samplers in front of vLLM's."""
        if getattr(runner, "batch_sharder", None) is not None:
            raise MarsError("mars needs all logits on one rank: leave out the sharded sampler")
        self.prepare(runner.model)
        if runner.sampler is None:
            return
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        if type(runner.sampler) is not Sampler or getattr(runner.sampler, "return_sampling_mask", False):
            log("warning", f"mars cannot stand in for vLLM's {type(runner.sampler).__name__}: one token per step")
            return
        self._vllm, self._vllm_rejection = runner.sampler, runner.rejection_sampler
        self._adjuster, states = copy(runner.sampler), runner.sampler.sampling_states
        """Applies penalties, bias and bans; temperature and truncation are left to `decide`"""
        self._adjuster.sampling_states = Wrapped(states, apply_temperature=_do_nothing, apply_min_p=_do_nothing)
        self._always_adjusts = len(getattr(runner.sampler, "logits_processors", ())) > 3
        runner.sampler = Wrapped(runner.sampler, call=self.sample_one, add_request=self._add_request)
        runner.rejection_sampler = Wrapped(runner.rejection_sampler, call=self.sample)
        self._compile_kernel()

    def _add_request(self, slot: int, *others: Any) -> None:
        self._vllm.add_request(slot, *others)
        self.requests.add(slot, others[-1], int(self._vllm.sampling_states.seeds.np[slot]))

    def _compile_kernel(self) -> None:
        """Compile all variants of the kernel before the first request waits for one."""
        device, count = self._only_masks.device, 2
        tokens = torch.full((count * (self.width + 1),), self.mask_token, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device) * (self.width + 1)
        slots, flags = torch.arange(count, device=device), torch.zeros_like(tokens, dtype=torch.uint8)
        given = (None, flags)
        variants = [(None, None, None), *product((self.requests.on_device()[0],), given, given)]
        types = (torch.int32, torch.int64)  # of slots: vLLM's versions differ
        for (kinds, tolerated, confident), prefilling, kind in product(variants, given, types):
            inputs = StepInputs(tokens, starts, slots.to(kind), kinds, prefilling, *self._layout)
            choices = GreedyChoices(torch.zeros_like(tokens, dtype=torch.int64), tolerated, confident)
            if self.head is not None:
                logits = torch.zeros((len(tokens), len(self.head.after)), dtype=self.head.after.dtype, device=device)
                choices = add_head(choices, inputs, logits, self.head, None)._replace(confident=confident)
            greedy_step(inputs, choices)
        self.reset_counts()

    @property
    def _layout(self) -> tuple[Tensor, int, int, int]:
        return self.counted, self.mask_token, self.masks, self.width

    def sample_one(self, logits: Tensor, batch: Any) -> Any:
        """Without windows: vLLM's sampler, unless a request has a seed.

        Such a request samples with our noise in every step: its text must not depend on which steps have windows.
        """
        if not self.requests.seeded[batch.idx_mapping_np].any():
            return self._vllm(logits, batch)
        inputs = replace(self._inputs(batch), counts=torch.zeros_like(self.counted))
        outputs, logprobs = self._decide(inputs, logits, batch)
        outputs = outputs._replace(sampled=outputs.sampled[:, :1].contiguous())
        return self._sampler_output(outputs, logits, logprobs)

    def sample(self, logits: Tensor, batch: Any, _: None = None, invalid_drafts: Tensor | None = None) -> Any:
        """In the place of vLLM's rejection sampler. A grammar has not validated ``invalid_drafts``."""
        inputs, slots, logprobs = self._inputs(batch), batch.idx_mapping_np, None
        if invalid_drafts is None and self._takes_argmax(batch):
            lossy = inputs.kinds is not None
            dials = self.requests.dials(batch.expanded_idx_mapping, slots) if lossy else None
            choices = GreedyChoices.of(inputs.tokens, logits, dials)
            if self.head is not None:
                dials = self.requests.dials(batch.idx_mapping, slots) if lossy else None
                choices = add_head(choices, inputs, logits, self.head, dials)
            outputs = greedy_step(inputs, choices)
        else:
            outputs, logprobs = self._decide(inputs, logits, batch, invalid_drafts)
        self._next = outputs.windows
        return self._sampler_output(outputs, logits, logprobs)

    def _sampler_output(self, outputs: StepOutputs, logits: Tensor, logprobs: Any) -> Any:
        from vllm.v1.worker.gpu.metrics.logits import get_num_nans
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        nans = get_num_nans(logits) if self._vllm.compute_nans else None
        return SamplerOutput(outputs.sampled, logprobs, nans, outputs.emitted, outputs.rejected)

    def _inputs(self, batch: Any) -> StepInputs:
        tokens, prefilling = batch.input_ids[batch.logits_indices], _prefilling(batch)
        exact = (self.requests.kinds[batch.idx_mapping_np] == EXACT).all()
        kinds = None if exact else self.requests.on_device()[0]
        flags = send(torch.tensor(prefilling).view(torch.uint8), tokens.device) if prefilling.any() else None
        return StepInputs(tokens, batch.cu_num_logits, batch.idx_mapping, kinds, flags, *self._layout)

    def _takes_argmax(self, batch: Any) -> bool:
        """Can the kernel do this step? It accepts what ``threshold`` has drafted even if a grammar forbids it."""
        slots = batch.idx_mapping_np
        if self._always_adjusts or not self.requests.argmax[slots].all():
            return False
        return not (batch.has_structured_output_reqs and (self.requests.kinds[slots] == THRESHOLD).any())

    def _decide(
        self, inputs: StepInputs, logits: Tensor, batch: Any, barred: Tensor | None = None
    ) -> tuple[StepOutputs, Any]:
        positions, lengths = batch.positions[batch.logits_indices], batch.seq_lens_cpu_upper_bound.numpy()
        more = {"pos": positions, "input_ids": inputs.tokens, "seq_lens_upper_bound_np": lengths}
        adjusted = _call(self._adjuster.apply_sampling_params, batch, **more, logits=logits, skip_top_k_top_p=True)
        dials = self.requests.dials(batch.idx_mapping, batch.idx_mapping_np)
        sampling = [self.requests.sampling[slot] for slot in batch.idx_mapping_np]
        tensors = SamplingTensors.of(sampling, logits.shape[1], device=logits.device)
        outputs = step(inputs, adjusted, dials, tensors, positions[inputs.starts[:-1].long()], barred, self.head)
        most = self._vllm.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most < 0:
            return outputs, None
        if self._vllm.logprobs_mode.startswith("processed"):
            logits = token_scores(adjusted, sampling, np.diff(batch.cu_num_logits_np))
        more = {"sampled": outputs.sampled, "num_sampled": outputs.emitted, "max_num_logprobs": most}
        return outputs, _call(self._vllm_rejection._get_logprobs_tensors, batch, **more, logits=logits)

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
        self.single += batch.num_reqs - int(_prefilling(batch).sum())

    def init_cudagraph_manager(self, *_: Any) -> None:
        """There is no draft model to capture graphs of."""

    capture = init_cudagraph_manager


def _do_nothing(*_: Any) -> None: ...


def _prefilling(batch: Any) -> Any:
    """Sequences whose prompt is not prefilled to its end in this step."""
    return batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np


def _call(function: Method, batch: Any, **more: Any) -> Any:
    """Call it with those fields of the batch, and of ``more``, that it has as parameters: vLLM's versions differ."""
    given = vars(batch) | more | {"input_batch": batch}
    return function(**{name: given[name] for name in signature(function).parameters if name in given})


def install() -> None:
    """Hook into vLLM's second model runner; engines without our method stay as they are."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager as Graphs
    from vllm.v1.worker.gpu_worker import Worker

    runner = model_runner.GPUModelRunner
    hooks.install(
        (
            (model_runner, "init_speculator", _init_speculator, "vLLM cannot choose a speculator that is not its own"),
            (runner, "load_model", _load_model, "then there are a model and samplers to put ours in front of"),
            (runner, "execute_model", _execute_model, "vLLM 0.24 tells no speculator how long the next windows are"),
            (runner, "sample_tokens", _sample_tokens, "steps without windows should cost what they do without mars"),
            (Graphs, "_init_candidates", init_candidates, "vLLM captures no graphs of windows shorter than a full one"),
            (Graphs, "capture", capture, "graphs of single tokens need no low-rank products"),
            (Worker, "compile_or_warm_up_model", _warm_up, "vLLM's own requests at start-up should not be counted"),
        )
    )


def _init_speculator(original: Method, vllm_config: Any, device: Any, *others: Any) -> Any:
    method = getattr(vllm_config.speculative_config, "method", None)
    if not is_used(vllm_config) or method != "ngram_gpu":
        return original(vllm_config, device, *others)
    return Speculator(vllm_config, device)


def _load_model(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if isinstance(self.speculator, Speculator):
        before = torch.cuda.memory_allocated()
        self.speculator.attach(self)
        self.model_memory_usage += torch.cuda.memory_allocated() - before  # the adapter's: vLLM plans with it
    return result


def _execute_model(original: Method, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(speculator := self.speculator, Speculator):
        speculator.masks = scheduler_output.num_spec_tokens_to_schedule // 2
        gated.step.masks = bool(scheduler_output.scheduled_spec_decode_tokens or kwargs.get("dummy_run"))
    try:
        return original(self, scheduler_output, *args, **kwargs)
    finally:
        gated.step.masks = True


def _sample_tokens(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """If neither this step nor the next has windows, the runner does what it does without speculation."""
    speculator, state = self.speculator, self.execute_model_state
    windows = not isinstance(speculator, Speculator) or state is None or speculator.masks
    if windows or state.input_batch.num_draft_tokens:
        return original(self, *args, **kwargs)
    speculator.count_single(state.input_batch)
    steps, self.speculator, self.num_speculative_steps = self.num_speculative_steps, None, 0
    try:
        return original(self, *args, **kwargs)
    finally:
        self.speculator, self.num_speculative_steps = speculator, steps


def _warm_up(original: Method, self: Any) -> Any:
    result = original(self)
    if isinstance(speculator := getattr(self.model_runner, "speculator", None), Speculator):
        speculator.reset_counts()
    return result
