"""vLLM's schedulers with an honest count, since masks are no drafts; the asynchronous one also decides on windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from mars.integrations.vllm.arguments import METHOD, parse_dial
from mars.integrations.vllm.windows import masks_for
from mars.method.acceptance import Dial


class Unpadded(Scheduler):
    """A request of which one token is left to read is not padded to a window's length: a lenient dial would keep that.

    vLLM does so unless the number of drafts may change, for which it has a table.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)


class MarsScheduler(Unpadded):
    """Its speculation metrics are about drafts alone: their mean accepted length is the tokens per forward."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        mask = self.vllm_config.additional_config[METHOD]["mask"]
        invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
        for request, places in scheduler_output.scheduled_spec_decode_tokens.items():
            invalid[request] = invalid.get(request, 0) + places.count(mask)
        scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)


PATIENCE = 8
"""Steps for which wider windows must have been right before they come"""


class AsyncMarsScheduler(Unpadded, AsyncScheduler):
    """It sees no drafts, but knows how many there were: what a row emits says what its next window begins with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.vllm_config.additional_config[METHOD]
        self.masks: int = settings["masks"]
        self.windows: dict[int, int] = {int(rows): count for rows, count in settings["windows"].items()}
        self.dial = Dial.parse(settings["dial"])
        self._own: dict[str, Dial] = {}
        """Dials of requests that have one"""
        self._drafts: dict[str, int] = {}
        """At the beginning of each request's next window"""
        self._next = self.masks
        self._held, self._calm = self.masks, 0
        """The masks that the load allows, and for how many steps it has allowed more"""
        _hear_of_turns()

    def turn(self, dial: str) -> None:
        """The dial of all requests without one of their own."""
        self.dial = Dial.parse(dial)

    def add_request(self, request: Any) -> None:
        asked = (getattr(request.sampling_params, "extra_args", None) or {}).get("dial")
        if asked is not None:
            self._own[request.request_id] = parse_dial(asked)
        super().add_request(request)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The next step's windows: every row gets as many places, so that there is a graph for the step."""
        masks = 0 if self._all_alone() else self._masks_by_load()
        scheduler_output.num_spec_tokens_to_schedule = 2 * masks
        super()._update_after_schedule(scheduler_output)

    def _masks_by_load(self) -> int:
        """Fewer at once, more after a while: the first window after none has no drafts, and the last one's are lost."""
        masks = masks_for(len(self.running), self.windows, self.masks)
        self._calm = self._calm + 1 if masks > self._held else 0
        if masks < self._held or self._calm >= PATIENCE:
            self._held, self._calm = masks, 0
        return self._held

    def _all_alone(self) -> bool:
        """Whether nobody wants drafts."""
        if len(self._own) < len(self.running) and self.dial.kind != "one-token":
            return False
        return all(self._own.get(each.request_id, self.dial).kind == "one-token" for each in self.running)

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
        for known in (self._drafts, self._own):
            if len(known) > 2 * len(self.requests) + 64:
                for request in known.keys() - self.requests.keys():
                    del known[request]
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int],
        request_id: str,
    ) -> Any:
        """``num_draft_tokens`` are places: count the drafts among them, and let vLLM know of the others."""
        dial = self._own.get(request_id, self.dial)
        drafts = min(self._drafts.get(request_id, 0), num_draft_tokens)  # a window may be cut at the context's end
        if dial.kind == "threshold" or drafts < num_accepted_tokens:
            drafts = num_accepted_tokens  # all that are fed are kept, or the dial was turned a moment ago
        kept = num_accepted_tokens == drafts < num_draft_tokens and dial.kind != "one-token"
        self._drafts[request_id] = min(self._next, num_draft_tokens - drafts) if kept else 0
        num_invalid_spec_tokens[request_id] = num_draft_tokens - drafts
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )


def _hear_of_turns() -> None:
    """A turn of the dial goes to the workers: listen."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore.collective_rpc, "knows_mars"):
        EngineCore.collective_rpc = _listening(EngineCore.collective_rpc)


def _listening(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        answers = call(self, method, timeout, args, kwargs)
        if method == "mars_turn" and isinstance(self.scheduler, AsyncMarsScheduler):
            self.scheduler.turn(*args)
        return answers

    collective_rpc.knows_mars = True  # type: ignore[attr-defined]
    return collective_rpc
