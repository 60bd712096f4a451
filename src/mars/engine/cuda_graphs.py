"""Steps captured as CUDA graphs, one for each number of sequences and window, and replayed.

A graph has a fixed number of sequences; what a batch does not need of it is padding. It is captured when it is first
needed, or ahead of time by `GraphRunner.warm_up`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from mars.engine.cache import PagedCache
from mars.engine.compilation import Compiled, compiled
from mars.engine.device_state import DeviceState
from mars.engine.runner import Runner
from mars.engine.step import PADDING_SLOT, PrefillInputs, StepInputs, StepOutputs
from mars.method.acceptance import DialFeatures
from mars.method.sampling import Features
from mars.method.windows import Window, WindowBatch
from mars.models.checkpoint import Checkpoint

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of sequences that are captured; more than the last are a multiple of `BEYOND`. One sequence is computed as
two: the compiler makes a variant of its own for a dimension of one."""
BEYOND = 64
CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # numbers of prefill chunks that are captured
CONTEXT = 256  # cached tokens of the sequences whose steps are timed
REPEATS = 10
MATRICES = ("integers", "floats")
Inputs = TypeVar("Inputs", StepInputs, PrefillInputs)


def padded_size(num_seqs: int) -> int:
    """Sequences of the graph for so many."""
    return next((size for size in SIZES if size >= num_seqs), -(-num_seqs // BEYOND) * BEYOND)


@dataclass(slots=True)
class CapturedGraph(Generic[Inputs]):
    graph: torch.cuda.CUDAGraph
    inputs: Inputs  # what it reads
    outputs: StepOutputs | None  # what it writes
    holds: Inputs | None = None  # the host's inputs that were last copied into its own


class GraphRunner(Runner):
    def __init__(self, checkpoint: Checkpoint, state: DeviceState, cache: PagedCache, block_size: int) -> None:
        super().__init__(checkpoint, state, cache, block_size)
        self._compiled = Compiled(checkpoint.module)
        for constant in (self._bias, self._ends):
            torch._dynamo.mark_static(constant)
        self._prepare = compiled(self._prepare)  # type: ignore[method-assign]
        self._compiled_decide = compiled(super()._decide)
        self._can_capture = True
        self._steps: dict[tuple[int, Window, Features, DialFeatures], CapturedGraph[StepInputs] | None] = {}
        self._prefills: dict[int, CapturedGraph[PrefillInputs] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._padding = StepInputs.padding(1, block_size, checkpoint.vocabulary)

    def _decide(self, inputs: StepInputs, windows: WindowBatch, logits: torch.Tensor) -> StepOutputs:
        torch._dynamo.mark_static(logits, 1)  # a static vocabulary size lets the compiler split the argmax
        outputs: StepOutputs = self._compiled_decide(inputs, windows, logits)
        return outputs

    @torch.inference_mode()
    def step(self, inputs: StepInputs, window: Window, longest: int) -> StepOutputs:
        size = padded_size(len(inputs))
        captured = self._captured_step(size, window, inputs.features, inputs.dial_features)
        if captured is None:
            return super().step(inputs, window, longest)
        if captured.holds is not inputs:
            spare = size - len(inputs)
            for name in MATRICES:
                padding = getattr(self._padding, name).expand(-1, spare)
                whole = torch.cat([getattr(inputs, name), padding], 1)
                getattr(captured.inputs, name).copy_(whole.pin_memory(), non_blocking=True)
            captured.holds = inputs
        captured.graph.replay()
        assert captured.outputs is not None
        return captured.outputs.to_host(len(inputs))

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        left = PrefillInputs.of(chunks, self.CHUNK).matrix
        while len(left):
            count = next((each for each in CHUNKS if each >= len(left)), CHUNKS[-1])
            captured = self._captured_prefill(count)
            if captured is None:
                super().prefill(chunks)
                return
            now, left = left[:count], left[count:]
            padding = PrefillInputs.padding(count - len(now), self.CHUNK).matrix
            captured.inputs.matrix.copy_(torch.cat([now, padding]).pin_memory(), non_blocking=True)
            captured.graph.replay()

    def warm_up(
        self,
        num_seqs: int,
        prefill_tokens: int,
        measure: Callable[[int], Any],
        lossy: Sequence[tuple[Window, DialFeatures]],
        *,
        sampled: bool,
    ) -> Iterator[tuple[int, int]]:
        """Capture all that up to so many sequences may need; yields how many graphs are done, and of how many.

        ``measure`` captures and times the greedy steps of a number of sequences. What is rare is captured when it
        comes: truncation, penalties, bias, grammars, logprobs, ``lossy`` dials that are not named, and sampling unless
        ``sampled``.
        """
        smallest, *larger = sorted({padded_size(each) for each in range(1, num_seqs + 1)})
        sizes = [smallest, *reversed(larger)]  # the compiler looks at the first; memory is reused from large to small
        most = prefill_tokens // self.CHUNK + num_seqs  # every prompt may end in a chunk that is not full
        counts = [each for each in reversed(CHUNKS) if each == 1 or each <= most]
        steps = [(window, Features(), dials) for window, dials in lossy]
        if sampled:
            exact = [(window, DialFeatures()) for window in self.windows]
            steps += [(window, Features(greedy=False), dials) for window, dials in (*exact, *lossy)]
        todo: list[Callable[[], Any]] = [partial(self._captured_prefill, count) for count in counts]
        todo += [partial(measure, size) for size in sizes]
        todo += [partial(self._captured_step, size, *step) for step in steps for size in sizes]
        for done, work in enumerate(todo):
            yield done, len(todo)
            work()
        yield len(todo), len(todo)

    def padded_size(self, num_seqs: int) -> int:
        return padded_size(num_seqs)

    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]:
        return [(padded_size(num_seqs), window) for window in self.windows]

    def time_step(self, num_seqs: int, window: Window) -> float:
        """By the device's own clock, with `CONTEXT` tokens cached."""
        room = self.state.page_table.shape[1] * self.cache.page_size - self.windows[-1].width
        inputs = StepInputs.padding(num_seqs, self.block_size, self.checkpoint.vocabulary)
        self.state.put([(PADDING_SLOT, min(CONTEXT, room), 0, [], True)])
        self.step(inputs, window, room)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            self.step(inputs, window, room)
        end.record()
        end.synchronize()
        self.state.put([(PADDING_SLOT, 0, 0, [], True)])
        return start.elapsed_time(end) / 1000 / REPEATS

    @torch.inference_mode()
    def _captured_step(
        self, size: int, window: Window, features: Features, dials: DialFeatures
    ) -> CapturedGraph[StepInputs] | None:
        key = (size, window, features, dials)
        if key not in self._steps:
            device = self.state.device
            integers, floats = (getattr(self._padding, name).repeat(1, size).to(device) for name in MATRICES)
            inputs = StepInputs(integers, floats, features, dials)
            self._steps[key] = self._capture(inputs, lambda: self._run_step(inputs, window))
        return self._steps[key]

    @torch.inference_mode()
    def _captured_prefill(self, count: int) -> CapturedGraph[PrefillInputs] | None:
        if count not in self._prefills:
            inputs = PrefillInputs(PrefillInputs.padding(count, self.CHUNK).matrix.to(self.state.device))
            self._prefills[count] = self._capture(inputs, lambda: self._run_prefill(inputs))
        return self._prefills[count]

    def _capture(self, inputs: Inputs, work: Callable[[], StepOutputs | None]) -> CapturedGraph[Inputs] | None:
        """Run the work once, so that everything is compiled and loaded, then capture it.

        None if that is not possible, as with experts that are chosen on the host.
        """
        if not self._can_capture:
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
                    outputs = work()
            except RuntimeError as error:
                self._can_capture = False
                reason = next(iter(str(error).splitlines()), "")
                warnings.warn(f"{self.checkpoint.name} cannot be captured and will be slow: {reason}", stacklevel=2)
                return None
        return CapturedGraph(graph, inputs, outputs)
