"""The runner on a CPU: prefill and steps through step.c."""

import torch

from mars.engine.cpu.model import CpuCache, CpuModel
from mars.engine.device_state import DeviceState
from mars.engine.runner import Runner
from mars.engine.step import StepInputs, StepOutputs
from mars.method.acceptance import DialFeatures
from mars.method.sampling import Features
from mars.method.visibility import Visibility
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint

PADDING_TOKEN = -1  # in windows: left out of a step


class CpuRunner(Runner):
    def __init__(
        self, checkpoint: Checkpoint, state: DeviceState, model: CpuModel, pages: int, block_size: int
    ) -> None:
        super().__init__(checkpoint, state, None, block_size)
        model.set_cache(CpuCache(model.shapes, pages))
        self._model = model
        self._head = model.head if checkpoint.head is not None else None

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        """Every token is a window of its own: all keys are stored before one is read."""
        places = torch.tensor([(slot, start + at) for slot, start, part in chunks for at in range(len(part))])
        tokens = torch.tensor([[token] for _, _, part in chunks for token in part])
        visibility = Visibility(*[torch.zeros_like(tokens)] * 4)
        slots, cursors = places.unbind(1)
        self._model.forward(tokens, visibility, slots, cursors, self.state.page_table, wants_logits=False)

    def step(self, inputs: StepInputs, window: Window, longest: int) -> StepOutputs:
        is_plain = not window.candidates and self.state.values is None
        if is_plain and inputs.features == Features() and inputs.dial_features == DialFeatures():
            return self._model.decode(inputs, window, self.state)
        return super().step(inputs, window, longest)

    def _run_step(self, inputs: StepInputs, window: Window, _longest: int | None = None) -> StepOutputs:
        windows = self.state.windows(window, inputs, self.checkpoint.mask_token_id or 0)
        cursors, slots = self.state.cursor[inputs.slots], inputs.slots.contiguous()
        tokens = windows.tokens.masked_fill(~windows.fed(), PADDING_TOKEN)
        logits = self._model.forward(tokens, windows.visibility, slots, cursors, self.state.page_table)
        return self._decide(inputs, windows, logits)
