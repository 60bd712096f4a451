"""Runs batches of rows through the model: chunks of their prompts, and the step that decides what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mars.decoding.attention import use_windows
from mars.decoding.forward import check_layers, within
from mars.engine.attention import PagedWindows
from mars.engine.cache import PagedCache
from mars.engine.layout import FixedWindows, Layout, lay_out
from mars.engine.state import State
from mars.method.acceptance import Dial, DialBatch, DialFeatures, decide, likelihoods
from mars.method.sampling import Features, Sampling, SamplingBatch, mark, token_bias
from mars.method.tensors import send
from mars.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a row's text whose keys and values are to be cached."""

    slot: int
    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Terms:
    """How one row takes part in a step."""

    slot: int
    dial: Dial
    sampling: Sampling
    groups: int
    """Most groups of masks it may have"""
    masks: int
    """Masks in each of its groups"""
    likelihoods: bool = False
    """Does it want to know how likely its tokens were?"""
    restricted: bool = False
    """Does it follow a grammar?"""

    def numbers(self, vocabulary: int) -> list[float]:
        mine = [self.slot, self.dial.checks, self.groups, self.masks]
        return [*mine, *self.dial.numbers(), *self.sampling.numbers(vocabulary)]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step."""

    numbers: Tensor
    """(rows, …): `Terms.numbers`, on the host"""
    features: Features
    dials: DialFeatures

    @classmethod
    def of(cls, rows: Sequence[Terms], vocabulary: int) -> Batch:
        features = replace(
            Features.of([row.sampling for row in rows]),
            likelihoods=any(row.likelihoods for row in rows),
            restricts=any(row.restricted for row in rows),
        )
        return cls(
            torch.tensor([row.numbers(vocabulary) for row in rows], dtype=torch.float64),
            features,
            DialFeatures.of([row.dial for row in rows]),
        )


class Result:
    """What a step decided, on its way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[list[int]]:
        """For each row: claims accepted, masks trusted, drafts, token; for each claim, does it agree; the drafts; and
        the bits of `likelihoods`, if some row wants them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[list[int]] = self._numbers.tolist()
        return found


class Runner:
    """The model over the rows' state and cache. It knows slots and pages, and nothing of requests."""

    PIECE = 64
    """Most places of a window when a prompt is read; longer ones are cut into several windows"""

    def __init__(self, checkpoint: Checkpoint, state: State, cache: PagedCache) -> None:
        self.checkpoint = checkpoint
        self.state = state
        self.cache = cache
        self._by_kernel = cache.is_even and checkpoint.device.type == "cuda"
        self._ends = send(mark(checkpoint.end_tokens, checkpoint.vocabulary), checkpoint.device)
        self._ban = send(token_bias([Sampling()], checkpoint.vocabulary, checkpoint.mask_token_id), checkpoint.device)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Cache pieces of text, all rows together."""
        longest = max(len(chunk.tokens) for chunk in chunks)
        reach = max(chunk.start + len(chunk.tokens) for chunk in chunks)
        self.read(send(pieces(chunks, min(longest, self.PIECE)), self.state.device), reach)

    @torch.inference_mode()
    def decode(self, batch: Batch, layout: Layout, reach: int) -> Result:
        """Launch one step of every row; no row's window ends behind ``reach``. The state moves on with it."""
        numbers = send(batch.numbers, self.state.device)
        return Result(self.step(numbers, layout, batch.features, batch.dials, reach))

    def read(self, numbers: Tensor, reach: int | None = None) -> None:
        """Run windows (slot, start, length, tokens …) of prompts through the model, on the device alone."""
        slots, starts, lengths = numbers[:, :3].T.contiguous()
        tokens = numbers[:, 3:]
        offsets = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        layout = Layout(tokens.shape[1])
        self._forward(tokens, self._windows(layout, slots, starts, offsets, offsets + 1, lengths, reach, True), keep=1)

    def step(
        self,
        numbers: Tensor,
        layout: Layout,
        features: Features,
        dials: DialFeatures,
        reach: int | None = None,
    ) -> Tensor:
        """Lay the windows out, run them, decide, and move the state on, all on the device; returns the decisions."""
        fixed, cursors, lengths, slots = self.prepare(numbers, layout)
        windows = self._windows(layout, slots, cursors, fixed.batch.offsets, fixed.sight, lengths, reach)
        logits = self._forward(fixed.batch.tokens, windows, keep=0).view(*fixed.batch.tokens.shape, -1)
        return self.conclude(numbers, fixed, logits, features, dials)

    def prepare(self, numbers: Tensor, layout: Layout) -> tuple[FixedWindows, Tensor, Tensor, Tensor]:
        """What the rows feed: their windows, cursors, lengths and slots."""
        slots, _, groups, masks = numbers[:, :4].long().T.contiguous()
        fixed = lay_out(layout, self.state.pending(slots, groups, masks), self.checkpoint.mask_token_id or 0)
        cursors = self.state.cursor[slots]
        return fixed, cursors, torch.full_like(cursors, layout.width), slots

    def conclude(
        self,
        numbers: Tensor,
        fixed: FixedWindows,
        logits: Tensor,
        features: Features,
        dials: DialFeatures,
    ) -> Tensor:
        """What the rows emit, and the state behind it."""
        state, split = self.state, 4 + DialBatch.NUMBERS
        slots, checks = numbers[:, :2].long().unbind(1)
        bias = self._ban + state.bias(slots) if features.biases else self._ban
        decision = decide(
            fixed.batch,
            logits,
            DialBatch(numbers[:, 4:split], dials),
            SamplingBatch(numbers[:, split:], bias, features, self._ends),
            positions=state.cursor[slots],
            settled=state.settled[slots],
            allowed=state.allowed(slots, fixed.batch.claims.shape[1] + 1) if features.restricts else None,
            **(state.history(slots) if features.penalises else {}),
        )
        state.commit(slots, fixed.batch.claims, decision, checks.bool(), penalises=features.penalises)
        scalars = [decision.accepted, decision.trusted, decision.draft_count, decision.token]
        columns = [torch.stack(scalars, 1), decision.agrees, decision.drafts]
        if features.likelihoods:
            likely = likelihoods(fixed.batch, logits, decision, self._ban)
            columns.append(likely.float().view(torch.int32).flatten(1))  # as they are, bit by bit
        return torch.cat(columns, 1)

    def _windows(
        self,
        layout: Layout,
        slots: Tensor,
        cursors: Tensor,
        offsets: Tensor,
        sight: Tensor,
        lengths: Tensor,
        reach: int | None,
        chained: bool = False,
    ) -> PagedWindows:
        table = self.state.table
        where = (slots, cursors, offsets, sight, lengths, reach, chained)
        return PagedWindows(self.cache, layout, table, *where, by_kernel=self._by_kernel)

    def _forward(self, tokens: Tensor, windows: PagedWindows, keep: int) -> Tensor:
        """Logits of the last ``keep`` tokens, or of all if it is 0."""
        positions = within(self.checkpoint.context, windows.positions)
        use_windows(self.checkpoint.module)
        output = self.checkpoint.module(
            input_ids=tokens.flatten()[None],
            position_ids=positions.flatten()[None],
            use_cache=False,
            logits_to_keep=keep,
            windows=windows,
        )
        check_layers(self.checkpoint, windows)
        logits: Tensor = output.logits
        return logits


def pieces(chunks: Sequence[Chunk], width: int) -> list[list[int]]:
    """Chunks as windows of one width: slot, start, length and tokens of each."""
    return [
        [chunk.slot, chunk.start + first, len(part), *part, *[0] * (width - len(part))]
        for chunk in chunks
        for first in range(0, len(chunk.tokens), width)
        for part in [chunk.tokens[first : first + width]]
    ]
