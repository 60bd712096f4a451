"""The asynchronous road: drafts from the target's own masks inside vLLM's second model runner, on the device alone.

vLLM schedules a step before it knows what came of the last, so nothing here may wait for the device or look at tokens.
Of what a row feeds, only the device knows how many places are drafts; the host knows the shape, which is always the
same, and the requests' dials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mars.errors import MarsError
from mars.integrations.vllm.arguments import METHOD, parse_dial
from mars.integrations.vllm.batch import COUNTED, Forward, advance
from mars.integrations.vllm.graphs import also_for_other_lengths
from mars.integrations.vllm.proposer import FORCED, Counts, log_least, without_mask
from mars.method.acceptance import Dial

Method = Callable[..., Any]


class Dials:
    """Each request's dial by its slot in the runner, on the host and on the device."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.server = Dial("exact")
        self.greedy = np.zeros(slots, dtype=bool)
        """Slots whose next token is the likeliest one, whatever the sampler knows to do"""
        self.loose = np.zeros(slots, dtype=bool)
        """Slots whose dial is not exact"""
        self.lenient = np.zeros(slots, dtype=bool)
        """Slots whose dial keeps what the AR model would not have written"""
        self.thresholds = np.zeros(slots, dtype=bool)
        self._asked: list[tuple[Dial | None, bool]] = [(None, False)] * slots
        self._told = torch.zeros((slots, 2))
        self._on_device = torch.zeros((slots, 2), device=device)
        self._stale = True
        self.turn(self.server)

    def turn(self, dial: Dial) -> None:
        """The dial of all requests without one of their own."""
        self.server = dial
        for slot in range(len(self._asked)):
            self._set(slot)

    def add(self, slot: int, sampling: Any) -> None:
        """A request takes a slot. Where likelihoods are asked for, every token is checked."""
        own = (sampling.extra_args or {}).get("dial")
        self._asked[slot] = (None if own is None else parse_dial(own), sampling.logprobs is not None)
        self.greedy[slot] = _takes_the_likeliest(sampling)
        self._set(slot)

    def _set(self, slot: int) -> None:
        own, checked = self._asked[slot]
        dial = own or self.server
        if checked and dial.kind in ("relaxed", "threshold"):
            dial = Dial("exact")
        trust = {"one-token": torch.inf, "threshold": dial.value or 0.0}.get(dial.kind, 0.0)
        self._told[slot] = torch.tensor([log_least(dial), trust])
        self.loose[slot], self.lenient[slot] = dial.kind != "exact", dial.is_loose
        self.thresholds[slot] = dial.kind == "threshold"
        self._stale = True

    def on_device(self) -> Tensor:
        """For every slot how far a draft may be under the best logit, and the least trust."""
        if self._stale:
            told = self._told.pin_memory() if self._on_device.is_cuda else self._told
            self._on_device.copy_(told, non_blocking=True)
            self._stale = False
        return self._on_device


def _takes_the_likeliest(sampling: Any) -> bool:
    changed = ("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens")
    newer = ("thinking_token_budget", "logprob_token_ids", "repetition_detection")
    return (
        sampling.temperature == 0
        and sampling.logprobs is None
        and sampling.repetition_penalty == 1
        and not any(getattr(sampling, name, None) for name in (*changed, *newer))
    )


class Speculator:
    """What vLLM's runner asks for drafts; it keeps nothing between two steps but dials and counts."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req, num_extra_query_per_req = 1, 0

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        settings = vllm_config.additional_config[METHOD]
        self.mask: int = settings["mask"]
        self.width: int = vllm_config.speculative_config.num_speculative_tokens
        self.masks = self.width // 2
        """Of the next step's windows: the scheduler says"""
        self.dials = Dials(vllm_config.scheduler_config.max_num_seqs, device)
        self.dials.turn(Dial.parse(settings["dial"]))
        self.model = torch.nn.Module()  # there is none; vLLM looks through it for experts
        self._advance = advance if device.type == "cpu" else _kernel()
        self._counts = torch.zeros(len(COUNTED), dtype=torch.int64, device=device)
        self._alone = 0
        """Tokens of rows without windows, one per forward"""
        self._masks = torch.full(
            (vllm_config.scheduler_config.max_num_seqs, self.width), self.mask, dtype=torch.int64, device=device
        )
        self._forward: Forward | None = None
        self._places: Tensor | None = None

    @property
    def dial(self) -> Dial:
        return self.dials.server

    @dial.setter
    def dial(self, dial: Dial) -> None:
        self.dials.turn(dial)

    @property
    def counts(self) -> Counts:
        """Asks the device, which therefore is waited for."""
        counts = Counts(*self._counts.tolist())
        counts.forwards += self._alone
        counts.tokens += self._alone
        return counts

    def forget(self) -> None:
        """Count from here on."""
        self._counts.zero_()
        self._alone = 0

    def attach(self, runner: Any) -> None:
        """When the model is there: watch what is sampled from it, and by whom."""
        if getattr(runner, "batch_sharder", None) is not None:
            raise MarsError("mars needs all logits in one place: leave out the sharded sampler")
        without_mask(runner.model, self.mask)
        if runner.sampler is not None:
            runner.sampler.mars = runner.rejection_sampler.mars = self
            if not _is_plain(runner.sampler):
                self.dials.add = _never_greedy(self.dials.add, self.dials)  # type: ignore[method-assign]

        self._warm_up()

    def _warm_up(self) -> None:
        """Have the kernel compiled before the first request waits for it."""
        rows, device = 2, self._counts.device
        tokens = torch.full((rows * (self.width + 1),), self.mask, device=device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * (self.width + 1)
        slots, dials = torch.arange(rows, dtype=torch.int32, device=device), self.dials.on_device()
        emitted, sampled = torch.ones_like(slots), tokens.view(rows, -1)
        greedy = Forward(tokens.int(), starts, tokens, slots, None, None, None, None, self._counts)
        exact = replace(greedy, emitted=emitted, sampled=sampled)
        loose = [replace(each, dials=dials) for each in (greedy, exact)]
        keep, sure = torch.zeros_like(tokens, dtype=torch.uint8), tokens.float()
        loose += [replace(loose[0], keep=keep), replace(loose[0], keep=keep, sure=sure), replace(loose[1], sure=sure)]
        for forward in (greedy, exact, *loose):
            for kind in (torch.int32, torch.int64):  # releases of vLLM differ
                told = replace(forward, slots=slots.to(kind))
                self._advance(told, mask=self.mask, masks=self.masks, width=self.width)
        self.forget()

    def sample(self, sampler: Method, logits: Tensor, batch: Any, *others: Any) -> Any:
        """In vLLM's sampler's place where rows have windows: note what the masks say, let lenient dials have their way.

        Where all rows are greedy and nothing else is asked for, what it would say is known already.
        """
        slots = batch.idx_mapping_np
        loose, lenient = self.dials.loose[slots].any(), self.dials.lenient[slots].any()
        fed = batch.input_ids[batch.logits_indices]
        forward = Forward(
            fed=fed,
            starts=batch.cu_num_logits,
            best=logits.argmax(dim=-1),
            slots=batch.idx_mapping,
            emitted=None,
            sampled=None,
            dials=self.dials.on_device() if loose else None,
            sure=None,
            counts=self._counts,
        )
        if lenient:
            self._judge(forward, logits, batch.expanded_idx_mapping, self.dials.thresholds[slots].any())
        if not any(each is not None for each in others) and self._needs_no_sampler(batch, slots):
            return self._at_once(forward)
        if lenient:
            _make_certain(forward, logits)
        output = sampler(logits, batch, *others)
        forward.emitted, forward.sampled = output.num_sampled, output.sampled_token_ids
        self._forward = forward
        return output

    def _needs_no_sampler(self, batch: Any, slots: np.ndarray[Any, Any]) -> bool:
        return bool(self.dials.greedy[slots].all()) and not _still_reading(batch).any()

    def _at_once(self, forward: Forward) -> Any:
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        after = self._advance(forward, mask=self.mask, masks=self.masks, width=self.width)
        self._places = after.places
        return SamplerOutput(
            sampled_token_ids=after.sampled,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=after.emitted,
            num_rejected=after.rejected,
        )

    def _judge(self, forward: Forward, logits: Tensor, slots: Tensor, thresholds: bool) -> None:
        """Which drafts a dial keeps though the AR model would not have written them, and how sure the masks are."""
        assert forward.dials is not None
        best = logits.gather(1, forward.best[:, None])[:, 0].float()
        if thresholds:
            forward.sure = (best - logits.float().logsumexp(dim=-1)).exp()
        drafts = _drafts(forward)
        mine = logits.gather(1, drafts.clamp(min=0)[:, None])[:, 0].float()
        behind = slots.roll(-1) == slots
        behind[-1:].fill_(False)
        allowed = (drafts >= 0) & (mine > -torch.inf) & (mine >= best + forward.dials[slots.long(), 0])
        forward.keep = (behind & allowed).view(torch.uint8)

    def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> Tensor:
        """The places behind every row's newest token."""
        rows = input_batch.num_reqs
        if dummy_run:
            return self._masks[:rows]
        forward, self._forward = self._forward, None
        places, self._places = self._places, None
        if forward is not None:
            places = self._advance(forward, mask=self.mask, masks=self.masks, width=self.width).places
        if places is not None:
            return places
        self.count_alone(input_batch)
        return self._masks[:rows] if self.masks == self.width // 2 else self._masks[:rows].clone()

    def count_alone(self, batch: Any) -> None:
        """Rows without windows have written one token each."""
        self._alone += batch.num_reqs - int(_still_reading(batch).sum())

    def init_cudagraph_manager(self, *_: Any) -> None:
        """There is no model whose graphs could be taken."""

    capture = init_cudagraph_manager


def _drafts(forward: Forward) -> Tensor:
    """[places]: what is fed behind each, masks among them."""
    return forward.fed.long().roll(-1)


def _make_certain(forward: Forward, logits: Tensor) -> None:
    """Have vLLM's sampler keep what is to be kept."""
    assert forward.keep is not None
    drafts, best = _drafts(forward).clamp(min=0)[:, None], logits.gather(1, forward.best[:, None])
    logits.scatter_(1, drafts, torch.where(forward.keep[:, None].bool(), best + FORCED, logits.gather(1, drafts)))
    forward.keep = None


def _still_reading(batch: Any) -> Any:
    """Rows whose prompt is not read to its end: nothing comes of them yet."""
    return batch.num_computed_tokens_np + batch.num_scheduled_tokens < batch.prefill_len_np


def _kernel() -> Method:
    from mars.integrations.vllm.kernel import advance

    return advance


def _is_plain(sampler: Any) -> bool:
    """Whether nobody has put anything into vLLM's sampler that a greedy row would notice."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    more = ("compute_nans", "return_sampling_mask", "trace_replay_state")
    processors = getattr(sampler, "logits_processors", ())
    return type(sampler) is Sampler and len(processors) <= 3 and not any(getattr(sampler, name, None) for name in more)


def _never_greedy(add: Method, dials: Dials) -> Method:
    def add_request(slot: int, sampling: Any) -> None:
        add(slot, sampling)
        dials.greedy[slot] = False

    return add_request


def is_ours(vllm_config: Any) -> bool:
    """Whether the engine was started with the method ``mars`` and takes this road."""
    speculative = vllm_config.speculative_config
    return METHOD in (vllm_config.additional_config or {}) and getattr(speculative, "method", None) == "ngram_gpu"


def install() -> None:
    """Hook into vLLM's second model runner; engines without our method stay as they are."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    runner = model_runner.GPUModelRunner
    if hasattr(runner, "knows_mars"):
        return
    hooks: list[tuple[Any, str, Callable[[Method], Method]]] = [
        (model_runner, "init_speculator", _ours_first),
        (runner, "load_model", _attached),
        (runner, "execute_model", _told_of_masks),
        (runner, "sample_tokens", _plain_without_windows),
        (RejectionSampler, "__call__", _through_us),
        (Sampler, "add_request", _noted),
        (CudaGraphManager, "_init_candidates", also_for_other_lengths),
    ]
    if missing := [name for place, name, _ in hooks if not hasattr(place, name)]:
        raise MarsError(f"this vLLM's model runner has no {missing[0]}: use a version that MARS was tested with")
    from vllm.v1.worker.gpu_worker import Worker

    runner.knows_mars = True
    hooks.append((Worker, "compile_or_warm_up_model", _forgetting))
    for place, name, change in hooks:
        setattr(place, name, change(getattr(place, name)))


def _ours_first(init: Method) -> Method:
    @wraps(init)
    def init_speculator(vllm_config: Any, device: Any, *others: Any) -> Any:
        return Speculator(vllm_config, device) if is_ours(vllm_config) else init(vllm_config, device, *others)

    return init_speculator


def _attached(load: Method) -> Method:
    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        if isinstance(self.speculator, Speculator):
            self.speculator.attach(self)
        return loaded

    return load_model


def _told_of_masks(execute: Method) -> Method:
    @wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(speculator := self.speculator, Speculator):
            speculator.masks = scheduler_output.num_spec_tokens_to_schedule // 2
        return execute(self, scheduler_output, *args, **kwargs)

    return execute_model


def _plain_without_windows(sample: Method) -> Method:
    """Where neither this step nor the next has windows, the runner does what it does without speculation."""

    @wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        speculator, state = self.speculator, self.execute_model_state
        windows = not isinstance(speculator, Speculator) or state is None or speculator.masks
        if windows or state.input_batch.num_draft_tokens:
            return sample(self, *args, **kwargs)
        speculator.count_alone(state.input_batch)
        steps, self.speculator, self.num_speculative_steps = self.num_speculative_steps, None, 0
        try:
            return sample(self, *args, **kwargs)
        finally:
            self.speculator, self.num_speculative_steps = speculator, steps

    return sample_tokens


def _through_us(sample: Method) -> Method:
    @wraps(sample)
    def call(self: Any, logits: Any, input_batch: Any, *others: Any) -> Any:
        speculator = getattr(self, "mars", None)
        if speculator is None:
            return sample(self, logits, input_batch, *others)
        return speculator.sample(lambda *told: sample(self, *told), logits, input_batch, *others)

    return call


def _forgetting(warm_up: Method) -> Method:
    """vLLM tries itself with requests of its own."""

    @wraps(warm_up)
    def compile_or_warm_up_model(self: Any) -> Any:
        told = warm_up(self)
        if isinstance(speculator := getattr(self.model_runner, "speculator", None), Speculator):
            speculator.forget()
        return told

    return compile_or_warm_up_model


def _noted(add: Method) -> Method:
    @wraps(add)
    def add_request(self: Any, slot: int, *others: Any) -> Any:
        if (speculator := getattr(self, "mars", None)) is not None:
            speculator.dials.add(slot, others[-1])
        return add(self, slot, *others)

    return add_request
