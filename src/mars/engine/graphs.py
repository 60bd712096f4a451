"""Steps recorded as CUDA graphs, one for each number of rows and layout, and replayed without the host's help.

A recording has a fixed number of rows; those that a batch does not need are nobody's. It is made when it is first
asked for, or ahead of time by `GraphRunner.warm_up`, which also measures what each of them costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mars.engine.cache import PagedCache
from mars.engine.compiled import Compiled, compiled
from mars.engine.layout import FixedWindows, Layout
from mars.engine.runner import Batch, Chunk, Result, Runner, Terms, pieces
from mars.engine.state import NOBODY, Place, State
from mars.method.acceptance import Dial, DialFeatures
from mars.method.sampling import Features, Sampling
from mars.method.windows import Shape
from mars.models.checkpoint import Checkpoint

ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of rows that are recorded; more than the last are a multiple of `BEYOND`. One row is computed as two: the
compiler makes a variant of its own for one of anything."""
BEYOND = 64
PIECES = (1, 2, 4, 8, 16, 32, 64)
"""Pieces of prompts that are read at once"""
CONTEXT = 256
"""Tokens before the windows whose cost is measured"""
REPEATS = 10


def bucket(rows: int) -> int:
    """The rows of the recording for this many."""
    return next((each for each in ROWS if each >= rows), -(-rows // BEYOND) * BEYOND)


@dataclass(slots=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    """What it reads"""
    out: Tensor | None
    """What it decides"""
    batch: Batch | None = None
    """Whose numbers it has"""


class GraphRunner(Runner):
    def __init__(self, checkpoint: Checkpoint, state: State, cache: PagedCache, block_size: int) -> None:
        super().__init__(checkpoint, state, cache)
        shapes = [Shape(groups) for groups in (*range(1, block_size), None)] if block_size > 1 else []
        self.layouts = [Layout(), *(Layout.of(shape, block_size) for shape in shapes)]
        self._compiled = Compiled(checkpoint.module)
        for constant in (self._ban, self._ends):
            torch._dynamo.mark_static(constant)
        self.prepare = compiled(self.prepare)  # type: ignore[method-assign]
        self._compiled_conclude = compiled(super().conclude)
        self._records = True
        """Can the model's steps be recorded?"""
        self._steps: dict[tuple[int, Layout, Features, DialFeatures], Recording | None] = {}
        self._reads: dict[int, Recording | None] = {}
        self._costs: dict[tuple[int, Layout], float] = {}
        self._pool = torch.cuda.graph_pool_handle()
        nobody = Terms(NOBODY, Dial("exact"), Sampling(seed=0), block_size, block_size - 1)
        self._nobody = torch.tensor([nobody.numbers(checkpoint.vocabulary)], dtype=torch.float64)

    def conclude(
        self, numbers: Tensor, fixed: FixedWindows, logits: Tensor, features: Features, dials: DialFeatures
    ) -> Tensor:
        torch._dynamo.mark_static(logits, 2)  # a compiler that knows how long it is divides the search for the best
        decided: Tensor = self._compiled_conclude(numbers, fixed, logits, features, dials)
        return decided

    @torch.inference_mode()
    def decode(self, batch: Batch, layout: Layout, reach: int) -> Result:
        rows = bucket(len(batch.numbers))
        recording = self._step(rows, layout, batch.features, batch.dials)
        if recording is None:
            return super().decode(batch, layout, reach)
        if recording.batch is not batch:
            whole = torch.cat([batch.numbers, self._nobody.expand(rows - len(batch.numbers), -1)])
            recording.numbers.copy_(whole.pin_memory(), non_blocking=True)
            recording.batch = batch
        recording.graph.replay()
        assert recording.out is not None
        return Result(recording.out[: len(batch.numbers)])

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        left = pieces(chunks, self.PIECE)
        while left:
            count = next((each for each in PIECES if each >= len(left)), PIECES[-1])
            recording = self._read(count)
            if recording is None:
                super().prefill(chunks)
                return
            now, left = left[:count], left[count:]
            padding = [[NOBODY, *[0] * (2 + self.PIECE)]] * (count - len(now))
            recording.numbers.copy_(torch.tensor([*now, *padding]).pin_memory(), non_blocking=True)
            recording.graph.replay()

    def warm_up(
        self, rows: int, prefill_tokens: int, loose: Sequence[tuple[Layout, DialFeatures]], *, sampled: bool
    ) -> Iterator[tuple[int, int]]:
        """Record all that up to this many rows may need; yields how many recordings are done, and of how many.

        What is rare is recorded when it comes: truncation, penalties, bias, grammars, likelihoods, ``loose`` dials that
        are not named, and draws unless ``sampled``.
        """
        smallest, *larger = sorted({bucket(each) for each in range(1, rows + 1)})
        sizes = [smallest, *reversed(larger)]  # the compiler looks at the first, memory is reused from large to small
        most = prefill_tokens // self.PIECE + rows  # every prompt may end in a piece that is not full
        counts = [each for each in reversed(PIECES) if each == 1 or each <= most]
        steps = [(layout, Features(), dials) for layout, dials in loose]
        if sampled:
            exact = [(layout, DialFeatures()) for layout in self.layouts]
            steps += [(layout, Features(greedy=False), dials) for layout, dials in (*exact, *loose)]
        todo: list[Callable[[], Any]] = [partial(self._read, count) for count in counts]
        todo += [partial(self._measure, size) for size in sizes]
        todo += [partial(self._step, size, *step) for step in steps for size in sizes]
        for done, work in enumerate(todo):
            yield done, len(todo)
            work()
        yield len(todo), len(todo)

    def cost(self, rows: int, layout: Layout) -> float:
        """Seconds of a step, by the recordings' own time."""
        rows = bucket(rows)
        if (rows, self.layouts[0]) not in self._costs:
            self._measure(rows)
        known = self._costs.get((rows, layout))  # a layout out of the ordinary costs what the next smaller one does
        return known or max(self._costs[rows, each] for each in self.layouts if each.width <= layout.width)

    def _measure(self, rows: int) -> None:
        """Time all layouts with rows of `CONTEXT` tokens, which nobody reads."""
        room = self.state.table.shape[1] * self.cache.page_size - self.layouts[-1].width
        self.state.put([Place(NOBODY, min(CONTEXT, room), 0)])
        batch = Batch(self._nobody.repeat(rows, 1), Features(), DialFeatures())
        for layout in self.layouts:
            self.decode(batch, layout, room)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                self.decode(batch, layout, room)
            end.record()
            end.synchronize()
            self._costs[rows, layout] = start.elapsed_time(end) / 1000 / REPEATS
        self.state.put([Place(NOBODY, 0, 0)])

    @torch.inference_mode()
    def _step(self, rows: int, layout: Layout, features: Features, dials: DialFeatures) -> Recording | None:
        key = (rows, layout, features, dials)
        if key not in self._steps:
            numbers = self._nobody.repeat(rows, 1).to(self.state.device)
            self._steps[key] = self._record(numbers, lambda: self.step(numbers, layout, features, dials))
        return self._steps[key]

    @torch.inference_mode()
    def _read(self, count: int) -> Recording | None:
        if count not in self._reads:
            numbers = torch.zeros(count, 3 + self.PIECE, dtype=torch.long, device=self.state.device)
            self._reads[count] = self._record(numbers, lambda: self.read(numbers))
        return self._reads[count]

    def _record(self, numbers: Tensor, work: Callable[[], Any]) -> Recording | None:
        """Once as it is, so that everything is compiled and loaded, and once more for the record.

        None if that cannot be done, as with experts that are chosen on the host.
        """
        if not self._records:
            return None
        with self._compiled.applied(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool):
                    out = work()
            except RuntimeError as error:
                self._records = False
                reason = next(iter(str(error).splitlines()), "")
                warnings.warn(f"{self.checkpoint.name} cannot be recorded and will be slow: {reason}", stacklevel=2)
                return None
        return Recording(graph, numbers, out)
