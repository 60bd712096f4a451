"""vLLM's scheduler with an honest count: masks are no drafts."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from mars.integrations.vllm.arguments import METHOD


class MarsScheduler(Scheduler):
    """Its speculation metrics are about drafts alone: their mean accepted length is the tokens per forward."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        mask = self.vllm_config.additional_config[METHOD]["mask"]
        invalid = dict(scheduler_output.num_invalid_spec_tokens or {})
        for request, places in scheduler_output.scheduled_spec_decode_tokens.items():
            invalid[request] = invalid.get(request, 0) + places.count(mask)
        scheduler_output.num_invalid_spec_tokens = invalid
        return super().update_from_output(scheduler_output, model_runner_output)
