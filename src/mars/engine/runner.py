"""Runs batches of rows through the model: chunks of their prompts, and the step that decides what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mars.decoding.attention import use_windows
from mars.decoding.forward import check_layers, within
from mars.engine.attention import PagedWindows
from mars.engine.cache import PagedCache
from mars.engine.layout import Layout, lay_out
from mars.engine.state import State
from mars.method.dials import Dial, DialBatch, Measure, decide, measures_of
from mars.method.sampling import Features, Sampling, SamplingBatch, token_bias
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

    def numbers(self, vocabulary: int) -> list[float]:
        mine = [self.slot, self.dial.checks, self.groups, self.masks]
        return [*mine, *self.dial.numbers(), *self.sampling.numbers(vocabulary)]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step on the device."""

    numbers: Tensor
    """(rows, …): `Terms.numbers`"""
    bias: Tensor
    features: Features
    measures: frozenset[Measure]

    @classmethod
    def of(cls, rows: Sequence[Terms], checkpoint: Checkpoint) -> Batch:
        samplings = [row.sampling for row in rows]
        numbers = [row.numbers(checkpoint.vocabulary) for row in rows]
        bias = token_bias(samplings, checkpoint.vocabulary, checkpoint.mask_token_id)
        return cls(
            send(torch.tensor(numbers, dtype=torch.float64), checkpoint.device),
            send(bias, checkpoint.device),
            Features.of(samplings),
            measures_of([row.dial for row in rows]),
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
        """For each row: claims accepted, masks trusted, drafts, token; for each claim, does it agree; the drafts."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[list[int]] = self._numbers.tolist()
        return found


class Runner:
    """The model over the rows' state and cache. It knows slots and pages, and nothing of requests."""

    def __init__(self, checkpoint: Checkpoint, state: State, cache: PagedCache) -> None:
        self.checkpoint = checkpoint
        self._state = state
        self._cache = cache

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """Cache pieces of text, all rows together."""
        layout = Layout(max(len(chunk.tokens) for chunk in chunks))
        places = list(range(layout.width))
        numbers = [
            [chunk.slot, chunk.start, len(chunk.tokens), *chunk.tokens, *[0] * layout.width][: 3 + layout.width]
            for chunk in chunks
        ]
        sent = send(numbers, self._state.device)
        slots, starts, lengths = sent[:, :3].unbind(1)
        offsets = send([places] * len(chunks), self._state.device)
        windows = PagedWindows(
            self._cache,
            layout,
            self._table(slots, max(chunk.start for chunk in chunks) + layout.width),
            starts,
            offsets,
            sight=offsets + 1,
            lengths=lengths,
        )
        self._forward(sent[:, 3:], windows, keep=1)

    @torch.inference_mode()
    def decode(self, batch: Batch, layout: Layout, reach: int) -> Result:
        """Launch one step of every row; no row's window ends behind ``reach``. The state moves on with it."""
        slots, checks, groups, masks = batch.numbers[:, :4].long().unbind(1)
        split = 4 + DialBatch.NUMBERS
        state = self._state
        fixed = lay_out(layout, state.pending(slots, groups, masks), self.checkpoint.mask_token_id or 0)
        cursors = state.cursor[slots]
        windows = PagedWindows(
            self._cache,
            layout,
            self._table(slots, reach),
            cursors,
            fixed.batch.offsets,
            sight=fixed.sight,
            lengths=torch.full_like(cursors, layout.width),
        )
        logits = self._forward(fixed.batch.tokens, windows, keep=layout.width)
        decision = decide(
            fixed.batch,
            logits,
            DialBatch(batch.numbers[:, 4:split], batch.measures),
            SamplingBatch(batch.numbers[:, split:], batch.bias, batch.features),
            positions=cursors,
            settled=state.settled[slots],
            **(state.history(slots) if batch.features.penalises else {}),
        )
        state.commit(slots, fixed.batch.claims, decision, checks.bool(), penalises=batch.features.penalises)
        scalars = [decision.accepted, decision.trusted, decision.draft_count, decision.token]
        return Result(torch.cat([torch.stack(scalars, 1), decision.agrees, decision.drafts], 1))

    def _forward(self, tokens: Tensor, windows: PagedWindows, keep: int) -> Tensor:
        positions = within(self.checkpoint.context, windows.positions)
        use_windows(self.checkpoint.module)
        output = self.checkpoint.module(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, windows=windows
        )
        check_layers(self.checkpoint, windows)
        logits: Tensor = output.logits
        return logits

    def _table(self, slots: Tensor, reach: int) -> Tensor:
        """The rows' tables as far as they matter."""
        return self._state.table[slots, : -(-reach // self._cache.page_size)]
