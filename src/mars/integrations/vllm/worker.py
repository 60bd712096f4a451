"""What vLLM's workers can be asked by ``collective_rpc``: the dial and the counts."""

from typing import Any

from vllm import envs

from mars.integrations.vllm.step import Drafter
from mars.method.acceptance import Dial

if envs.VLLM_USE_V2_MODEL_RUNNER:  # vLLM imports this module in each of its workers before there is a runner
    from mars.integrations.vllm import asynchronous

    asynchronous.install()


class Extension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def mars_turn(self, dial: str) -> None:
        """Set the server's dial; the next step goes by it."""
        if (drafter := self._drafter()) is not None:
            drafter.dial = Dial.parse(dial)

    def mars_state(self) -> dict[str, Any] | None:
        """The dial and the counts; None on ranks that do not sample."""
        drafter = self._drafter()
        return None if drafter is None else {"dial": str(drafter.dial), **drafter.counts}

    def _drafter(self) -> Drafter | None:
        runner = self.model_runner
        drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
        return drafter if isinstance(drafter, Drafter) else None
