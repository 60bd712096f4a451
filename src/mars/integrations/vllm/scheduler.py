"""vLLM's schedulers with metrics that count drafts only; the asynchronous one also decides on the next windows.

Mask tokens are always rejected: counted as drafts, they would lower the acceptance rate.
"""

import time
from importlib import import_module
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from mars.integrations.vllm import hooks
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.load import MasksByLoad
from mars.integrations.vllm.options import Options, own_dial
from mars.method.acceptance import Dial


class UnpaddedScheduler(Scheduler):
    """A prompt of which one token is left to prefill is not padded to a window's length with drafts that are none.

    vLLM pads unless the number of drafts may change, for which it has a table.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = Options.read(self.vllm_config)
        if self.options.adapter is not None:
            _hide_masks(self.options.mask)
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)


class MarsScheduler(UnpaddedScheduler):
    """Of the synchronous path. It sees the windows, and has vLLM leave out their masks."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
        for request, window in scheduler_output.scheduled_spec_decode_tokens.items():
            invalid[request] = invalid.get(request, 0) + window.count(self.options.mask)
        scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)


class AsyncMarsScheduler(UnpaddedScheduler, AsyncScheduler):
    """Of the asynchronous path. It sees no drafts, but what a sequence emits says how many its next window has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dial = Dial.parse(self.options.dial)
        self._own: dict[str, Dial] = {}  # dials of requests that have one
        self._drafts: dict[str, int] = {}  # drafts in each request's next window
        self._next = self.options.masks
        lengths = {self.options.masks, *self.options.windows.values()} if self.options.measures else ()
        largest = self.vllm_config.compilation_config.max_cudagraph_capture_size
        self._masks_by_load = MasksByLoad(self.options.masks_for, lengths, largest)
        self._updated: float | None = None  # when the last step's results came, if the engine was busy since
        _follow_dial()

    def add_request(self, request: Any) -> None:
        if (own := own_dial(request.sampling_params)) is not None:
            self._own[request.request_id] = own
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The next step's windows: all sequences have windows of one length, so that there is a graph for the step."""
        masks = self._masks_by_load(len(self.running)) if self._any_uses_masks() else 0
        scheduler_output.num_spec_tokens_to_schedule = 2 * masks
        super()._update_after_schedule(scheduler_output)

    def _any_uses_masks(self) -> bool:
        if len(self._own) < len(self.running) and self.dial.uses_masks:
            return True
        return any(self._own.get(each.request_id, self.dial).uses_masks for each in self.running)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        windows = scheduler_output.scheduled_spec_decode_tokens
        if not windows:
            self._drafts.clear()
        elif len(windows) < len(scheduler_output.num_scheduled_tokens):
            for request in scheduler_output.num_scheduled_tokens.keys() - windows.keys():
                self._drafts.pop(request, None)
        self._next = scheduler_output.num_spec_tokens_to_schedule // 2
        scheduler_output.num_invalid_spec_tokens = {}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._measure(scheduler_output, outputs)
        for table in (self._drafts, self._own):
            if len(table) > 2 * len(self.requests) + 64:
                for request in table.keys() - self.requests.keys():
                    del table[request]
        return outputs

    def _measure(self, scheduler_output: Any, outputs: Any) -> None:
        """What a step without prompts wrote since the one before it."""
        before, self._updated = self._updated, time.perf_counter() if self.running else None
        scheduled = scheduler_output.num_scheduled_tokens
        lengths = {len(each) for each in scheduler_output.scheduled_spec_decode_tokens.values()} or {0}
        length = max(lengths)
        if before is None or not scheduled or any(count != 1 + length for count in scheduled.values()):
            return
        written = sum(len(each.new_token_ids) for group in outputs.values() for each in group.outputs)
        seconds = (self._updated or time.perf_counter()) - before
        self._masks_by_load.observe(len(scheduled), length // 2, written, seconds)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int],
        request_id: str,
    ) -> Any:
        """``num_draft_tokens`` counts masks too: tell vLLM how many of them are not drafts."""
        dial = self._own.get(request_id, self.dial)
        drafts = min(self._drafts.get(request_id, 0), num_draft_tokens)  # a window may be cut at the context's end
        if dial.kind == "threshold" or drafts < num_accepted_tokens:
            drafts = num_accepted_tokens  # all that were fed are accepted, or the dial was set a moment ago
        follows = num_accepted_tokens == drafts < num_draft_tokens and dial.uses_masks
        self._drafts[request_id] = min(self._next, num_draft_tokens - drafts) if follows else 0
        num_invalid_spec_tokens[request_id] = num_draft_tokens - drafts
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )


_outside: set[int] = set()  # mask tokens that are outside the vocabulary


def _hide_masks(mask_token: int) -> None:
    """Grammars must not see a token outside the vocabulary: one backend warns of it, another one gives up."""
    backends = ("guidance", "lm_format_enforcer", "outlines", "xgrammar")
    modules = [import_module(f"vllm.v1.structured_output.backend_{name}") for name in backends]
    reason = "it gets drafts and masks, and need not know what a mask is"
    classes = modules[0].StructuredOutputGrammar.__subclasses__()
    hooks.install((each, "validate_tokens", _validate_tokens, reason) for each in classes)
    _outside.add(mask_token)


def _validate_tokens(original: Method, self: Any, tokens: list[int]) -> list[int]:
    return original(self, tokens[: next((n for n, token in enumerate(tokens) if token in _outside), len(tokens))])


def _follow_dial() -> None:
    from vllm.v1.engine.core import EngineCore

    reason = "the server's dial is set in the workers, and the scheduler must know it too"
    hooks.install([(EngineCore, "collective_rpc", _collective_rpc, reason)])


def _collective_rpc(
    original: Method, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    answers = original(self, method, timeout, args, kwargs)
    if method == "mars_turn" and isinstance(self.scheduler, AsyncMarsScheduler):
        self.scheduler.dial = Dial.parse(*args)
    return answers
