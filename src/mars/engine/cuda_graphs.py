"""Steps captured as CUDA graphs, one for each number of sequences and window, and replayed.

A graph has a fixed number of sequences and a fixed window; what a batch does not need of them is padding. Dials and
sampling options are values that a graph reads, so they need no graph of their own. `GraphRunner.warm_up` captures all
that can be needed; from then on nothing is captured between steps, where everybody would wait for it.
"""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from mars.engine.budget import ragged_windows
from mars.engine.cache import PagedCache
from mars.engine.compilation import MOST_VARIANTS, Compiled, compiled
from mars.engine.device_state import DeviceState
from mars.engine.packing import Packing
from mars.engine.runner import Runner
from mars.engine.step import PADDING_SLOT, PrefillInputs, StepInputs, StepOutputs
from mars.method.acceptance import decide_by, written_tokens
from mars.method.windows import Window, WindowBatch
from mars.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mars.engine.invariant import InvariantModel

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of sequences that are captured; more than the last are a multiple of `BEYOND`. One sequence is computed as
two: the compiler makes a variant of its own for a dimension of one."""
BEYOND = 64
CHUNKS = (1, 2, 4, 8, 16, 32, 64)  # numbers of prefill chunks that are captured
MOST_GRAPHS = 320  # of steps: the least recently used goes when another is captured
RETRY_SECONDS = 60.0  # after memory ran out at a capture, before the next one is tried
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
    packing: Packing | None = None  # which it reads, too
    holds: Inputs | None = None  # the host's inputs that were last copied into its own


class GraphRunner(Runner):
    def __init__(
        self,
        checkpoint: Checkpoint,
        state: DeviceState,
        cache: PagedCache,
        block_size: int,
        invariant: "InvariantModel | None",
        model: Compiled | None,
    ) -> None:
        """``model``: the checkpoint's, if it is not ``invariant`` that runs."""
        super().__init__(checkpoint, state, cache, block_size, invariant)
        from mars.engine.kernels.sampling import KernelChoices  # triton is not installed everywhere

        self._choices = KernelChoices
        self._model = model
        torch._dynamo.mark_static(self._ends)
        self._prepare = compiled(self._prepare)  # type: ignore[method-assign]
        self._compiled_decide = compiled(self._decide_by_kernel)
        self._can_capture = True
        self._capture_after = 0.0  # memory ran out: no capture before this time
        self._is_warm = False  # is everything captured that steps need?
        self._steps: OrderedDict[tuple[int, Window], CapturedGraph[StepInputs]] = OrderedDict()
        self._prefills: dict[int, CapturedGraph[PrefillInputs]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # for work that is about to be captured
        self._padding = StepInputs.padding(1, block_size, checkpoint.vocabulary)

    def _decide(self, inputs: StepInputs, windows: WindowBatch, logits: torch.Tensor) -> StepOutputs:
        torch._dynamo.mark_static(logits, 1)
        outputs: StepOutputs = self._compiled_decide(inputs, windows, logits.contiguous())
        return outputs

    def _decide_by_kernel(self, inputs: StepInputs, windows: WindowBatch, logits: torch.Tensor) -> StepOutputs:
        """The same as `Runner._decide`, whatever the features of the inputs."""
        state, mask = self.state, self.checkpoint.banned_token
        choices = self._choices(
            *(logits, windows.drafts, inputs, state, self._ends, -1 if mask is None else mask),
            self.checkpoint.head,
            wants_shares=self._wants_shares(inputs),
        )
        emitted = state.drafts_emitted[inputs.slots]
        decision = decide_by(choices, windows, state.cursor[inputs.slots], emitted)
        written = written_tokens(windows.drafts, decision)
        known = choices.logprobs(windows.verified_rows(), written)
        decision = state.look_up(inputs, windows.drafts, decision)
        state.advance(inputs, windows.drafts, decision)
        return StepOutputs.of(decision, known, windows.draft_count)

    @torch.inference_mode()
    def step(self, inputs: StepInputs, window: Window, longest: int) -> StepOutputs:
        size = padded_size(len(inputs))
        captured = self._captured_step(size, window)
        if captured is None:
            with torch.compiler.set_stance("force_eager"):  # nobody shall wait for the compiler
                return super().step(inputs, window, longest)
        if captured.holds is not inputs:
            spare = size - len(inputs)
            for name in MATRICES:
                padding = getattr(self._padding, name).expand(-1, spare)
                whole = torch.cat([getattr(inputs, name), padding], 1)
                getattr(captured.inputs, name).copy_(whole.pin_memory(), non_blocking=True)
            captured.holds = inputs
        begun = torch.cuda.Event(enable_timing=True)
        begun.record()  # behind what the host prepares
        captured.graph.replay()
        assert captured.outputs is not None
        return captured.outputs.to_host(len(inputs), logprobs=inputs.features.logprobs, begun=begun)

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int, list[int]]]) -> None:
        left = PrefillInputs.of(chunks, self.CHUNK).matrix
        while len(left):
            count = next((each for each in CHUNKS if each >= len(left)), CHUNKS[-1])
            captured = self._captured_prefill(count)
            if captured is None:
                super().prefill(chunks)  # all of them once more
                return
            now, left = left[:count], left[count:]
            padding = PrefillInputs.padding(count - len(now), self.CHUNK).matrix
            captured.inputs.matrix.copy_(torch.cat([now, padding]).pin_memory(), non_blocking=True)
            captured.graph.replay()

    def warm_up(self, num_seqs: int, prefill_tokens: int, measure: Callable[[int], Any]) -> Iterator[tuple[int, int]]:
        """Capture all that up to so many sequences may need; yields how many graphs are done, and of how many.

        ``measure`` captures and times the steps of a number of sequences.
        """
        smallest, *larger = sorted({padded_size(each) for each in range(1, num_seqs + 1)})
        sizes = [smallest, *reversed(larger)]  # the compiler looks at the first; memory is reused from large to small
        most = prefill_tokens // self.CHUNK + num_seqs  # every prompt may end in a chunk that is not full
        counts = [each for each in reversed(CHUNKS) if each == 1 or each <= most]
        todo: list[Callable[[], Any]] = [partial(self._captured_prefill, count) for count in counts]
        todo += [partial(measure, size) for size in sizes]
        for done, work in enumerate(todo):
            yield done, len(todo)
            work()
        self._is_warm = num_seqs >= self.state.slots
        yield len(todo), len(todo)

    def fitting(self, num_seqs: int, window: Window) -> Window:
        """After the warm-up, the smallest captured window that holds this one."""
        size = padded_size(num_seqs)
        if not self._is_warm or (size, window) in self._steps:
            return window
        alike = (each for count, each in self._steps if count == size and each.budget == window.budget)
        captured = [each for each in alike if each | window == each]
        return min(captured, key=lambda each: each.width, default=window)

    def padded_size(self, num_seqs: int) -> int:
        return padded_size(num_seqs)

    def measured_steps(self, num_seqs: int) -> list[tuple[int, Window]]:
        size = padded_size(num_seqs)
        ragged = [] if self.state.values is None else ragged_windows(size, self.block_size)
        return [(size, window) for window in (*self.windows, *ragged)]

    def time_step(self, num_seqs: int, window: Window) -> float:
        """By the device's own clock, with `CONTEXT` tokens cached."""
        assert self.cache is not None
        room = self.state.page_table.shape[1] * self.cache.page_size - max(each.width for each in self.windows)
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
    def _captured_step(self, size: int, window: Window) -> CapturedGraph[StepInputs] | None:
        key = (size, window)
        if key not in self._steps:
            integers, floats = (getattr(self._padding, name).repeat(1, size).to(self.state.device) for name in MATRICES)
            inputs = replace(self._padding, integers=integers, floats=floats)
            packing = None if window.budget else Packing.whole(size, window, self.state.device)
            captured = self._capture(inputs, window, lambda: self._run_step(inputs, window))
            if captured is None:
                return None
            captured.packing = packing
            self._steps[key] = captured
            if len(self._steps) > MOST_GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    @torch.inference_mode()
    def _captured_prefill(self, count: int) -> CapturedGraph[PrefillInputs] | None:
        if count not in self._prefills:
            inputs = PrefillInputs(PrefillInputs.padding(count, self.CHUNK).matrix.to(self.state.device))
            captured = self._capture(inputs, Window(), lambda: self._run_prefill(inputs))
            if captured is None:
                return None
            self._prefills[count] = captured
        return self._prefills[count]

    def _capture(
        self, inputs: Inputs, window: Window, work: Callable[[], StepOutputs | None]
    ) -> CapturedGraph[Inputs] | None:
        """Run the work once, so that everything is compiled and loaded, then capture it.

        None if that is not possible: for good, as with experts that are chosen on the host, or for now, when there is
        not enough memory.
        """
        if not self._can_capture or time.monotonic() < self._capture_after:
            return None
        applied = nullcontext() if self._model is None else self._model.applied(has_masks=window.all_masks > 0)
        with applied, torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
            try:
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    work()
                torch.cuda.current_stream().wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool):
                    outputs = work()
            except RuntimeError as error:
                if not self._explain(error):
                    raise
                return None
        return CapturedGraph(graph, inputs, outputs)

    def _explain(self, error: RuntimeError) -> bool:
        """Warn of a capture that failed; False if the error has nothing to do with capturing."""
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        reason = next(iter(str(error).splitlines()), "")
        if any(isinstance(each, torch.OutOfMemoryError) or "out of memory" in str(each) for each in causes):
            self._capture_after = time.monotonic() + RETRY_SECONDS
            advice = "steps are slow without it: give the engine less memory for keys and values"
            warnings.warn(f"not enough memory to capture a step; {advice}", stacklevel=2)
            return True
        if any("captur" in str(each).lower() for each in causes):
            self._can_capture = False
            warnings.warn(f"{self.checkpoint.name} cannot be captured and will be slow: {reason}", stacklevel=2)
            return True
        return False
