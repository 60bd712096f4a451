"""What vLLM's workers can be asked by ``collective_rpc``: the dial, and how it does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm import envs

from mars.integrations.vllm import speculator
from mars.integrations.vllm.proposer import Proposer
from mars.integrations.vllm.speculator import Speculator
from mars.method.acceptance import Dial

if envs.VLLM_USE_V2_MODEL_RUNNER:  # vLLM imports this module in each worker of ours, before there is a runner
    speculator.install()


class Extension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def mars_turn(self, dial: str) -> None:
        """Turn the server's dial; the next step obeys."""
        if (proposer := self._proposer()) is not None:
            proposer.dial = Dial.parse(dial)

    def mars_state(self) -> dict[str, Any] | None:
        """The dial and the counts; None on ranks that do not sample."""
        proposer = self._proposer()
        return None if proposer is None else {"dial": str(proposer.dial), **asdict(proposer.counts)}

    def _proposer(self) -> Proposer | Speculator | None:
        runner = self.model_runner
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        return drafter if isinstance(drafter, Proposer | Speculator) else None
