"""Runs the model over the device state and the paged cache: prefill chunks, and steps that decide what comes next."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mars.engine.budget import FEWEST
from mars.engine.cache import PagedCache
from mars.engine.device_state import DeviceState
from mars.engine.packing import NUM_TEXT, Packing
from mars.engine.paged_attention import PagedWindows
from mars.engine.step import PADDING_SLOT, PrefillInputs, StepInputs, StepOutputs
from mars.method.acceptance import decide, logprobs
from mars.method.sampling import SamplingParams, bias_tensor, token_mask
from mars.method.tensors import send
from mars.method.visibility import Visibility
from mars.method.windows import Window, WindowBatch
from mars.models.attention import forward
from mars.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mars.engine.invariant import InvariantModel  # triton is not installed everywhere

CONTEXT = 64  # cached tokens of the sequences whose steps are timed


class Fed(NamedTuple):
    """What the sequences of a step feed."""

    windows: WindowBatch
    tokens: Tensor  # (tokens,), as they are packed
    positions: Tensor  # (tokens,): of these in the text
    slots: Tensor
    cursors: Tensor
    lengths: Tensor
    packing: Packing


class Runner:
    """The model over slots and pages; it knows nothing of requests."""

    CHUNK = 64  # most tokens of a window in prefill; longer chunks are cut into several windows

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: DeviceState,
        cache: PagedCache | None,
        block_size: int,
        invariant: "InvariantModel | None" = None,
    ) -> None:
        """``cache``: None for a runner that attends in a way of its own. ``invariant`` runs in place of the module."""
        self._invariant = invariant
        self.checkpoint = checkpoint
        self.state = state
        self.cache = cache
        self.block_size = block_size
        self.windows = [Window(), *Window.useful(block_size, state.candidates.tokens.shape[1])]
        """All shapes that steps ordinarily have"""
        if len(state.text):
            self.windows += [replace(each, drafts=state.drafts.shape[1]) for each in self.windows[1:]]
        vocabulary = checkpoint.vocabulary
        self._uses_kernel = cache is not None and cache.is_even and checkpoint.device.type == "cuda"
        self._ends = send(token_mask(checkpoint.end_tokens, vocabulary), checkpoint.device)
        self._bias = send(bias_tensor([SamplingParams()], vocabulary, checkpoint.banned_token), checkpoint.device)
        """Keeps the mask token from being sampled"""
        self._head: Callable[[Tensor], Tensor] | None = checkpoint.head

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        """Cache chunks of texts, given by slot, start and tokens, all together."""
        width = min(max(len(tokens) for _, _, tokens in chunks), self.CHUNK)
        inputs = PrefillInputs(send(PrefillInputs.of(chunks, width).matrix, self.state.device))
        self._run_prefill(inputs, longest=max(start + len(tokens) for _, start, tokens in chunks))

    @torch.inference_mode()
    def step(self, inputs: StepInputs, window: Window, longest: int) -> StepOutputs:
        """Dispatch one step of every sequence; no window ends behind ``longest``. The state moves on with it."""
        integers, floats = (send(each, self.state.device) for each in (inputs.integers, inputs.floats))
        sent = StepInputs(integers, floats, inputs.features, inputs.dial_features)
        return self._run_step(sent, window, longest).to_host(len(inputs), logprobs=inputs.features.logprobs)

    def fitting(self, num_seqs: int, window: Window) -> Window:  # noqa: ARG002, the same for any number here
        """The window that a step of so many sequences has which needs at least this one."""
        return window

    # --- cost

    def padded_size(self, num_seqs: int) -> int:
        """Sequences in a step, padding included, that has so many real ones."""
        return num_seqs

    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]:  # noqa: ARG002, the same for any number here
        """Steps to time, by sequences and window, for the cost of steps with so many sequences."""
        chain = Window.of(1, self.block_size)
        return [(1, Window()), (1, chain), (1, Window.of(self.block_size, self.block_size)), (8, chain)]

    def time_step(self, num_seqs: int, window: Window) -> float:
        """Seconds of a step of padding."""
        inputs = StepInputs.padding(num_seqs, self.block_size, self.checkpoint.vocabulary)
        self.state.put([(PADDING_SLOT, CONTEXT, 0, [], True)])
        started = time.perf_counter()
        self.step(inputs, window, CONTEXT + window.width).wait()
        return time.perf_counter() - started

    # --- on the device alone

    def _run_prefill(self, inputs: PrefillInputs, longest: int | None = None) -> None:
        tokens = inputs.tokens
        columns = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        zeros = torch.zeros_like(columns)
        visibility = Visibility(zeros, zeros, columns, columns)
        window = Window(drafts=tokens.shape[1] - 1)
        packing = Packing.text(len(tokens), tokens.shape[1], tokens.device)
        attention = self._attention(
            window, inputs.slots, inputs.starts, visibility, inputs.lengths, packing, longest, chained=True
        )
        positions = inputs.starts[:, None] + columns
        self._forward(tokens.flatten(), positions.flatten(), attention, wants_logits=False)

    def _run_step(self, inputs: StepInputs, window: Window, longest: int | None = None) -> StepOutputs:
        """Build the windows, run them, decide, and move the state on."""
        packing = None if window.budget else Packing.whole(len(inputs), window, self.state.device)
        fed = self._prepare(inputs, window, packing)
        where = (fed.slots, fed.cursors, fed.windows.visibility, fed.lengths, fed.packing, longest)
        logits = self._forward(fed.tokens, fed.positions, self._attention(window, *where))
        return self._decide(inputs, fed.windows, logits)

    def _prepare(self, inputs: StepInputs, window: Window, packing: Packing | None) -> Fed:
        """What the sequences feed. ``packing``: None if it depends on the sequences."""
        windows = self.state.windows(window, inputs, self.checkpoint.mask_token_id or 0)
        cursors = self.state.cursor[inputs.slots]
        packing = packing or Packing.ragged(window, windows.fed(), window.budget)
        return Fed(
            windows=replace(windows, rows=packing.rows),
            tokens=packing.pack(windows.tokens),
            positions=packing.pack(cursors[:, None] + windows.visibility.position),
            slots=inputs.slots.contiguous(),
            cursors=cursors,
            lengths=torch.full_like(cursors, window.width),
            packing=packing,
        )

    def _wants_shares(self, inputs: StepInputs) -> bool:
        """Has it to be found out how probable drafts are? The next step may be ragged."""
        return self.state.values is not None and len(inputs) >= FEWEST

    def _decide(self, inputs: StepInputs, windows: WindowBatch, logits: Tensor) -> StepOutputs:
        """What the sequences emit, and the state after it."""
        state, slots, features = self.state, inputs.slots, inputs.features
        bias = self._bias + state.logit_bias(inputs) if features.biases else self._bias
        decision = decide(
            windows,
            logits,
            inputs.dials,
            inputs.sampling(bias, self._ends),
            positions=state.cursor[slots],
            emitted=state.drafts_emitted[slots],
            head=self._head,
            wants_shares=self._wants_shares(inputs),
            **state.options(inputs, windows.drafts.shape[1] + 1),
        )
        known = logprobs(windows, logits, decision, self._bias) if features.logprobs else None
        decision = state.look_up(inputs, windows.drafts, decision)
        state.advance(inputs, windows.drafts, decision)
        return StepOutputs.of(decision, known, windows.draft_count)

    def _attention(
        self,
        window: Window,
        slots: Tensor,
        cursors: Tensor,
        visibility: Visibility,
        lengths: Tensor,
        packing: Packing,
        longest: int | None,
        *,
        chained: bool = False,
    ) -> PagedWindows:
        assert self.cache is not None
        where = (self.state.page_table, slots, cursors, visibility, lengths, packing, longest, chained)
        return PagedWindows(self.cache, window, *where, uses_kernel=self._uses_kernel)

    def _forward(
        self, tokens: Tensor, positions: Tensor, windows: PagedWindows, *, wants_logits: bool = True
    ) -> Tensor:
        """Logits (tokens, vocabulary), if they are wanted. Without masks, a gated model is its base model."""
        if self._invariant is not None:
            return self._invariant.forward(tokens, windows, wants_logits=wants_logits)
        NUM_TEXT.set(windows.packing.num_text)
        adapter = self.checkpoint.adapter
        with nullcontext() if adapter is None or windows.window.all_masks else adapter.nowhere():
            return forward(self.checkpoint, tokens[None], positions[None], windows, int(not wants_logits))[0]
