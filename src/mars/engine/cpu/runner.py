"""The runner on a CPU: prefill and steps through step.c."""

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mars.engine.cpu.model import CpuCache, CpuModel
from mars.engine.device_state import DeviceState
from mars.engine.runner import CONTEXT, Runner
from mars.engine.step import PADDING_SLOT, StepInputs, StepOutputs
from mars.method.acceptance import DialFeatures, decide_by
from mars.method.sampling import Features
from mars.method.visibility import Visibility
from mars.method.windows import NO_GROUP, Window, WindowBatch
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

    def time_drafts(self, num_seqs: int, window: Window, drafts: int) -> float:
        """Seconds of a step of padding, every sequence of which has so many drafts."""
        inputs = StepInputs.padding(num_seqs, self.block_size, self.checkpoint.vocabulary)
        self.state.put([(PADDING_SLOT, CONTEXT, 0, [0] * drafts, False)])
        started = time.perf_counter()
        self.step(inputs, window, CONTEXT + window.width)
        return time.perf_counter() - started

    def _run_step(self, inputs: StepInputs, window: Window, _longest: int | None = None) -> StepOutputs:
        windows, cursors, _, slots = self._prepare(inputs, window)
        tokens = windows.tokens.masked_fill(~real_tokens(windows), PADDING_TOKEN)
        logits = self._model.forward(tokens, windows.visibility, slots, cursors, self.state.page_table)
        if inputs.features != Features() or inputs.dial_features != DialFeatures():
            return self._decide(inputs, windows, logits)
        if self.checkpoint.banned_token is not None:
            logits[:, self.checkpoint.banned_token] = -torch.inf
        choices = GreedyChoices(self._model, logits, windows.drafts)
        decision = decide_by(choices, windows, cursors, self.state.drafts_emitted[slots])
        self.state.advance(inputs, windows.drafts, decision)
        return replace(StepOutputs.of(decision, None), probabilities=choices.probabilities)


def real_tokens(windows: WindowBatch) -> Tensor:
    """(sequences, width): which tokens of the windows are not padding."""
    columns = torch.arange(windows.tokens.shape[1])
    start = windows.groups[:, :, None]  # of the groups that there are
    in_group = (start != NO_GROUP) & (columns >= start) & (columns < start + windows.mask_count[:, None, None])
    return (columns <= windows.draft_count[:, None]) | in_group.any(1)


@dataclass(slots=True)
class GreedyChoices:
    """`mars.method.acceptance.Choices` of sequences that are all greedy and have no other option."""

    model: CpuModel
    logits: Tensor
    drafts: Tensor
    probabilities: Tensor | None = field(default=None, init=False)  # (sequences, masks): of what the masks predict

    def verify(self, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002, positions do not matter
        return self.model.argmax(self.logits, rows.flatten()).view_as(rows), torch.zeros_like(
            self.drafts, dtype=torch.bool
        )

    def predict(self, rows: Tensor, at: Tensor, accepted: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        found = list[tuple[Tensor, Tensor]]()
        for mask in rows.unbind(1):
            found.append(self.model.greedy(self.logits, mask, token))
            token = found[-1][0]
        if not found:
            return rows, torch.zeros_like(rows, dtype=torch.bool)
        tokens, self.probabilities = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return tokens, torch.zeros_like(rows, dtype=torch.bool)
