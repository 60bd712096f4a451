"""The engine: requests in, tokens out, many at a time. A step is schedule, run, process output."""

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mars.core.grammar import BITS, grammar_compiler
from mars.core.request import Request, default_dial
from mars.core.sequence import Sequence
from mars.core.threads import lower_priority
from mars.engine.budget import BudgetPolicy
from mars.engine.cache import PagedCache, layer_shapes
from mars.engine.compilation import Compiled
from mars.engine.cpu import VECTOR, CpuRunner, RaggedPolicy, StepSeconds, cpu_model
from mars.engine.cuda_graphs import GraphRunner
from mars.engine.device_state import DeviceState
from mars.engine.pages import Pages
from mars.engine.policy import CapturedCosts, Cost, StepCosts, WindowPolicy
from mars.engine.runner import Runner
from mars.engine.scheduler import Schedule, Scheduler
from mars.engine.step import StepInputs, StepOutputs
from mars.errors import MarsError, require_integer, require_number
from mars.method.acceptance import Dial
from mars.method.lookup import MOST_DRAFTS
from mars.method.windows import Window
from mars.models.checkpoint import Checkpoint
from mars.models.support import has_plain_layers, is_llama_like

if TYPE_CHECKING:
    from mars.engine.invariant import InvariantModel

PAGE_SIZE = 16
WIDE_DRAFTS = 7  # of a window with what was looked up, where all sequences have one window
CPU_MEMORY = 2 * 2**30
GPU_SHARE = 0.5
MASK_SECONDS = 0.002
"""How long a step waits for grammar masks that were begun since the last one: nearly all take less. A sequence whose
masks take longer is left out of steps until they are there."""
IDLE_SECONDS = 0.01  # how long a step waits that has nothing to do until some masks are there

log = logging.getLogger("mars.engine")

Batch = list[tuple[Sequence, int, Dial]]
"""The sequences of a step, with the number of their admission and their dial at that time"""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was dispatched and whose result the host has not processed yet."""

    batch: Batch
    windows: list[Window]
    outputs: StepOutputs
    seconds: float | None  # that it took, if the host has timed it


class Engine:
    """Decodes requests together. `add_request`, then `step` until its sequence is finished."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_num_seqs: int = 64,
        memory: int | float | None = None,
        page_size: int = PAGE_SIZE,
        prefill_tokens: int | None = None,
        max_waiting: int | None = None,
        block_size: int | None = None,
        candidates: int = 0,
        async_steps: int | None = None,
        cost: Cost | None = None,
        batch_invariant: bool = False,
        lookup: bool | None = None,
        ragged: bool = False,
    ) -> None:
        """``max_num_seqs`` run at once. ``memory`` for keys and values: bytes, or a share of what the device has free.

        ``prefill_tokens`` are prefilled per step, so that a long prompt does not stall the others; by default 512, and
        2048 on a GPU. Requests may ask for blocks of at most ``block_size``, by default the model's own, and windows of
        at most so many ``candidates``. The device may be ahead of the host by ``async_steps``: one on a GPU, which then
        never waits. ``cost``: seconds of a step by number of sequences and window; measured, if it is not given.
        ``batch_invariant``: on a GPU, run kernels whose bits do not depend on the other requests, if there are some for
        this model; see `is_batch_invariant`.
        ``lookup``: draft from the text itself, too; by default with the compiled step on a CPU alone. ``ragged``: let
        the sequences of a step have windows of different lengths, which the compiled step on a CPU always does.
        """
        on_gpu = checkpoint.device.type == "cuda"
        prefill_tokens = (2048 if on_gpu else 512) if prefill_tokens is None else prefill_tokens
        _check_limits(max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens)
        invariant = invariant_model(checkpoint) if batch_invariant and on_gpu else None  # before memory is measured
        model = Compiled(checkpoint.module, checkpoint.adapter) if on_gpu and invariant is None else None
        available = cache_bytes(memory, checkpoint.device)
        cpu = cpu_model(checkpoint, page_size)
        shapes = layer_shapes(checkpoint) if cpu is None else cpu.shapes
        num_pages = available // (page_bytes := page_size * sum(each.bytes_per_token for each in shapes))
        self.checkpoint = checkpoint
        self.weight_bytes = cpu.weight_bytes if cpu else sum(each.nbytes for each in checkpoint.module.parameters())
        """What a step of single tokens reads, besides keys and values"""
        self.is_batch_invariant = cpu is not None or invariant is not None
        """Do a token's logits depend on the model and the tokens before it alone, to the bit?"""
        self.max_num_seqs = max_num_seqs
        self.block_size = max(1, checkpoint.block_size if block_size is None else block_size)
        self.dial = default_dial(checkpoint)  # of requests that have none of their own; see `set_dial`
        self._looks_up = cpu is not None and not async_steps and self.block_size > 1 and lookup is not False
        """Windows differ, and the host knows the text before the next step: it looks drafts up, not the device"""
        keeps_text = bool(lookup) and cpu is None and self.block_size > 1
        ragged = ragged and self.block_size > 1 and (cpu is None or bool(async_steps))  # otherwise it is the policy's
        most_drafts = max(self.block_size - 1, MOST_DRAFTS * self._looks_up, WIDE_DRAFTS * keeps_text)
        widest = Window(most_drafts) | Window.of(self.block_size, self.block_size, candidates)
        self.candidates, margin = widest.candidates, widest.width
        _check_memory(checkpoint.name, available, page_bytes, page_size, margin)
        self._async_steps = int(on_gpu) if async_steps is None else async_steps
        text = checkpoint.context or num_pages * page_size
        table = min(num_pages, -(-(text + margin + self._async_steps * (1 + most_drafts)) // page_size))
        self._state = DeviceState(
            *(max_num_seqs, most_drafts, table, checkpoint.vocabulary, checkpoint.device),
            candidates=self.candidates,
            text=table * page_size * keeps_text,
            ragged=ragged,
        )
        if cpu is not None:
            self._runner: Runner = CpuRunner(checkpoint, self._state, cpu, num_pages, self.block_size)
        else:
            cache = PagedCache(shapes, num_pages, page_size, checkpoint.device)
            parts = (checkpoint, self._state, cache, self.block_size, invariant)
            self._runner = GraphRunner(*parts, model) if on_gpu else Runner(*parts)
        self._costs = CapturedCosts(self._runner) if on_gpu else StepCosts(self._runner, turns=3)
        self._follows_costs = cost is None
        self.policy = self._new_policy(cost)
        self.scheduler = Scheduler(
            Pages(num_pages, page_size),
            max_num_seqs=max_num_seqs,
            prefill_tokens=prefill_tokens,
            margin=margin,
            step_tokens=1 + most_drafts,
            max_waiting=max_waiting,
        )
        self._prefill_tokens = prefill_tokens
        self._in_flight: deque[InFlightStep] = deque()
        self._failed: list[Sequence] = []  # since the last step
        self._fresh_masks: list[Future[Tensor]] = []  # begun in the last step
        self._mask_threads = ThreadPoolExecutor(max(2, min(16, os.cpu_count() or 1)), "grammar-masks", lower_priority)
        self._inputs: tuple[Batch, StepInputs] | None = None
        self.num_steps = self.num_fed = self.num_drafts = self.num_accepted = 0
        """Steps in which sequences decoded, tokens that they fed, drafts that were verified, and those that passed"""
        self.windows_fed: Counter[tuple[int, Window]] = Counter()  # steps by number of sequences and window
        self._host_seconds = math.inf  # what a step took lately besides waiting for the device

    def _new_policy(self, cost: Cost | None) -> WindowPolicy:
        if isinstance(self._runner, CpuRunner) and not self._async_steps:  # it has to know the drafts
            return RaggedPolicy(self.block_size, StepSeconds(cost or self._runner.time_step, self.block_size - 1))
        on_gpu = self.checkpoint.device.type == "cuda"
        default_groups = 2 if on_gpu else 1  # on a GPU, width costs little
        if self._state.values is not None:
            given = (self.block_size, default_groups, cost or self._costs, self._state.values)
            return BudgetPolicy(*given, self._runner.padded_size, self.candidates, checks=on_gpu and cost is None)
        return WindowPolicy(
            *(self.block_size, default_groups, cost or self._costs),
            explores=not on_gpu and cost is None,
            checks=on_gpu and cost is None,
            most_drafts=WIDE_DRAFTS * bool(len(self._state.text)),
            candidates=self.candidates,
        )

    # --- requests

    def add_request(self, request: Request, priority: int = 0) -> Sequence:
        """Queue a request; the smaller its priority, the sooner it runs. The sequence's output grows with the steps."""
        sequence = self.prepare(request)
        self.add(sequence, priority)
        return sequence

    def prepare(self, request: Request) -> Sequence:
        """The sequence of a request, validated and with its grammar compiled.

        It does not change the engine, so another thread may call it while a step runs.
        """
        if request.block_size > self.block_size:
            raise MarsError(f"block_size {request.block_size} is more than the engine's {self.block_size}")
        if request.window is not None and request.window.candidates > self.candidates:
            raise MarsError(f"window {request.window} needs an engine with candidates={request.window.candidates}")
        if request.lookup and not self._looks_up:
            raise MarsError("lookup takes a number with the compiled step on a CPU alone: leave it out", param="lookup")
        return Sequence.of(request, self.checkpoint, self.dial)

    def add(self, sequence: Sequence, priority: int = 0) -> None:
        """Queue a sequence that `prepare` has made."""
        if sequence.request.dial is None:
            sequence.set_dial(self.dial)  # it may have been turned since
        self.scheduler.add(sequence, priority)
        self._start_masks(sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a request at once, if it is not finished; its output keeps what has come out so far."""
        if not sequence.is_finished:
            sequence.output.finish("abort")
        self.scheduler.remove(sequence)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a request that has run into an error: its output tells which, and the others go on.

        An error of the device is raised again: after one, the device is of no use to this process.
        """
        if isinstance(error, torch.AcceleratorError):
            raise error
        log.error("a request has failed", exc_info=error)
        self._end_failed(sequence, error)

    def fail_running(self, error: Exception) -> list[Sequence]:
        """After an error in a step that no sequence can be blamed for: end all that run, and keep those that wait.

        Returns the sequences that have failed; raises if the engine cannot go on.
        """
        if isinstance(error, torch.AcceleratorError) or not self.scheduler.running:
            raise error
        log.error("a step has failed", exc_info=error)
        self._in_flight.clear()
        self._inputs = None
        for sequence in list(self.scheduler.running):
            self._end_failed(sequence, error)
        self.clear_prefix_cache()  # it may name pages that the step was to fill
        self.check()
        return self._take_failed()

    def _take_failed(self) -> list[Sequence]:
        failed, self._failed = self._failed, []
        return failed

    def _end_failed(self, sequence: Sequence, error: Exception) -> None:
        if not sequence.is_finished:
            sequence.output.finish("error", error_text(error))
        self.scheduler.remove(sequence)
        self._failed.append(sequence)

    def set_dial(self, dial: Dial) -> None:
        """Turn the dial of all requests that have none of their own, those in progress included."""
        self.dial = dial
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            if sequence.request.dial is None:
                sequence.set_dial(dial)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    # --- steps

    def step(self) -> list[Sequence]:
        """Prefill a part of the prompts, then let every sequence that has its prompt cached decode.

        Returns the sequences that have emitted tokens or failed. After an exception, call `fail_running`.
        """
        self._await_masks()
        started, waited, moved = time.perf_counter(), 0.0, list[Sequence]()
        while (schedule := self.scheduler.schedule(len(self._in_flight))) is None:
            waited += self._process_output(moved)
        steps = self.num_steps
        waited += self._run(schedule)
        while len(self._in_flight) > (self._async_steps if schedule.decode else 0):
            waited += self._process_output(moved)
        if self.num_steps > steps and not schedule.prefill:
            self._host_seconds = min(time.perf_counter() - started - waited, self._host_seconds * 1.05)
        self._start_masks(*self.scheduler.running)
        return moved + self._take_failed()

    def _run(self, schedule: Schedule) -> float:
        """Dispatch a step to the device, which need not have finished the one before.

        Returns the seconds that its forward took, if it was waited for.
        """
        if schedule.page_updates:
            self._state.set_pages(schedule.page_updates)
        if schedule.prefill:
            self._runner.prefill(schedule.prefill)
        self._begin(schedule.begin)
        sequences = self._take_masks(schedule.decode)
        if not sequences:
            return 0.0
        batch = [(each, each.admissions, each.dial) for each in sequences]
        inputs = self._step_inputs(batch)
        host_seconds = self._host_seconds if self._host_seconds < math.inf else 0.0
        if isinstance(self.policy, RaggedPolicy):
            windows = self.policy.windows(sequences, host_seconds)
            window = reduce(or_, windows)
            self._set_drafts(sequences, windows)
            inputs = inputs.feeding(windows)
        else:
            is_ahead = self._follows_costs and self._async_steps > 0  # no step takes less than the host needs for one
            chosen = self.policy.choose(sequences, host_seconds if is_ahead else 0.0)
            window = self._runner.fitting(len(sequences), chosen)
            windows = [window] * len(sequences)
        ahead = len(self._in_flight) * (1 + self._state.drafts.shape[1])
        longest = max(each.cursor for each in sequences) + ahead + window.width
        started = time.perf_counter()
        outputs = self._runner.step(inputs, window, longest)
        seconds = None
        if self._follows_costs and not isinstance(self._runner, GraphRunner):  # captured steps time themselves
            outputs.wait()
            seconds = time.perf_counter() - started
        self._in_flight.append(InFlightStep(batch, windows, outputs, seconds))
        for sequence in sequences:
            sequence.trusts_masks = sequence.dial.kind == "threshold"
        self.num_steps += 1
        self.num_fed += window.budget or sum(each.width for each in windows)
        self.windows_fed[len(windows), window] += 1
        return seconds or 0.0

    def _set_drafts(self, sequences: SequenceOf[Sequence], windows: SequenceOf[Window]) -> None:
        """Drop drafts that are not worth their verification, and tell the device of those that were looked up."""
        changed = list[Sequence]()
        for sequence, window in zip(sequences, windows, strict=True):
            sequence.drafts = sequence.drafts[: window.drafts]
            if sequence.drafts != sequence.device_drafts:
                sequence.device_drafts = sequence.drafts
                changed.append(sequence)
        if changed:
            self._state.set_drafts([each.slot or 0 for each in changed], [each.drafts for each in changed])

    def _observe(self, windows: SequenceOf[Window], tokens: int, seconds: float) -> None:
        """What a step took that emitted so many tokens."""
        if not isinstance(self.policy, RaggedPolicy):
            self._costs.observe(len(windows), windows[0], seconds)
        self.policy.observe_step(windows, tokens, seconds)

    def _process_output(self, moved: list[Sequence]) -> float:
        """Take the result of the oldest step in flight; returns the seconds that the device was waited for.

        Sequences that were aborted or preempted since it was dispatched do not take part.
        """
        step, started = self._in_flight.popleft(), time.perf_counter()
        step.outputs.wait()
        waited = time.perf_counter() - started
        verified = None
        results = step.outputs.results([each.request.logprobs is not None for each, _, _ in step.batch])
        probabilities = step.outputs.draft_probabilities()
        if step.windows[0].budget and isinstance(self.policy, BudgetPolicy):
            self.policy.observe_ragged(len(results), sum(each.accepted for each in results))
        seconds = step.outputs.seconds() if step.seconds is None and self._follows_costs else step.seconds
        if seconds is not None:
            self._observe(step.windows, len(results) + sum(each.accepted for each in results), seconds)
        moves = zip(step.batch, step.windows, results, probabilities, strict=True)
        for (sequence, admission, dial), window, result, known in moves:
            if sequence.slot is None or sequence.admissions != admission:
                continue
            candidates = sequence.candidates[: window.candidates]
            try:
                verified_now = sequence.process(result, dial)
            except Exception as error:
                self.fail(sequence, error)
                continue
            if verified_now:
                verified = verified_now
                self.num_drafts, self.num_accepted = self.num_drafts + verified[0], self.num_accepted + verified[1]
                if len(self._state.text):  # where there were fewer drafts than room, the rest count as not accepted
                    verified = (window.drafts, verified[1])
                self.policy.observe_drafts(sequence, *verified)
                if candidates and verified[0] > verified[1]:
                    right = (result.token, result.accepted)
                    hit = candidates.index(right) if right in candidates else None
                    self.policy.candidate_hits.observe(len(candidates), hit)
            self.policy.observe_predictions(sequence, known[: len(sequence.drafts)])
            if self._looks_up:
                asked = sequence.request.lookup
                sequence.look_up(MOST_DRAFTS if asked is None else asked)
            self.scheduler.cache_pages(sequence)
            moved.append(sequence)
            if sequence.is_finished:
                self.scheduler.remove(sequence)
        if verified is None:
            self.policy.acceptance.decay()
        return waited

    def _step_inputs(self, batch: Batch) -> StepInputs:
        """Built anew only when the batch or a dial has changed."""
        if self._inputs is None or self._inputs[0] != batch:
            sequences = [sequence for sequence, _, _ in batch]
            windows = [self.policy.widest(each) for each in sequences]
            self._inputs = batch, StepInputs.of(sequences, windows, self.checkpoint.vocabulary)
        return self._inputs[1]

    def _begin(self, sequences: SequenceOf[Sequence]) -> None:
        """Put new sequences into their slots; if that fails, one by one to see whose fault it is."""
        try:
            self._state.begin(sequences)
        except Exception:
            for each in sequences:
                try:
                    self._state.begin([each])
                except Exception as error:
                    self.fail(each, error)

    # --- grammars

    def _start_masks(self, *sequences: Sequence) -> None:
        """Have threads compute what grammars allow next.

        A matcher is touched by one thread at a time: `Sequence.process` only after the step that has taken the masks.
        """
        for each in sequences:
            if each.matcher is not None and each.masks is None and not each.awaits_result:
                compiler = grammar_compiler(self.checkpoint)
                each.masks = self._mask_threads.submit(compiler.masks, each.matcher, list(each.drafts))
                self._fresh_masks.append(each.masks)

    def _await_masks(self) -> None:
        """Wait a moment for masks that were begun in the last step; if there is nothing else to do, for some masks."""
        if self._fresh_masks:
            wait(self._fresh_masks, MASK_SECONDS)
            self._fresh_masks = []
        running = self.scheduler.running
        if not self._in_flight and not any(each.can_decode or not each.is_prefilled for each in running):
            wait([each.masks for each in running if each.masks is not None], IDLE_SECONDS, FIRST_COMPLETED)

    def _take_masks(self, sequences: SequenceOf[Sequence]) -> list[Sequence]:
        """Tell the device what grammars allow; returns the sequences that can decode, which is all but failed ones."""
        words = -(-self.checkpoint.vocabulary // BITS)
        slots, masks, able = list[int](), list[Tensor](), list[Sequence]()
        for each in sequences:
            if each.slot is None:
                continue  # it failed when it began
            if each.masks is not None:
                try:
                    known = each.masks.result()
                except Exception as error:
                    self.fail(each, error)
                    continue
                positions = self._state.drafts.shape[1] + 1
                unknown = torch.full((positions - len(known), words), -1, dtype=known.dtype)  # beyond the drafts
                slots.append(each.slot)
                masks.append(torch.cat([known, unknown]))
                each.masks, each.awaits_result = None, True
            able.append(each)
        if masks:
            self._state.set_grammar_mask(slots, torch.stack(masks))
        return able

    # --- before the first request, and in between

    def warm_up(self, num_seqs: int | None = None) -> Iterator[tuple[int, int]]:
        """Get ready for up to so many sequences, all by default; yields how much is done, and of how much."""
        most = min(num_seqs or self.max_num_seqs, self.max_num_seqs)
        if isinstance(self.policy, RaggedPolicy):
            self.policy.seconds.measure(most)
        if isinstance(self._runner, GraphRunner):
            yield from self._runner.warm_up(most, self._prefill_tokens, self._costs.measure)

    def clear_prefix_cache(self) -> None:
        self.scheduler.pages.clear_prefix_cache()

    def check(self) -> None:
        """Raise if a page of the cache or a slot is lost."""
        self.scheduler.check()


def _check_memory(name: str, available: int, page_bytes: int, page_size: int, margin: int) -> None:
    least = 1 + -(-(margin + 2) // page_size)  # pages for a prompt of one token and an answer of one
    if available // page_bytes < least:
        raise MarsError(
            f"{available} bytes of memory are too few for {name}: give at least {least * page_bytes}, "
            f"and {page_bytes} for every {page_size} tokens"
        )


def _check_limits(**limits: int) -> None:
    for name, limit in limits.items():
        require_integer(name, limit, 1)


def invariant_model(checkpoint: Checkpoint) -> "InvariantModel | None":
    """The model in kernels whose bits do not depend on the batch; None, and a warning, if there are none for it."""
    if is_llama_like(checkpoint.module.config) and has_plain_layers(checkpoint.module):
        from mars.engine.invariant import InvariantModel  # triton is not installed everywhere

        return InvariantModel(checkpoint)
    log.warning(
        "there are no batch-invariant kernels for models like %s: near ties may fall either way", checkpoint.name
    )
    return None


def error_text(error: Exception) -> str:
    return str(error) if isinstance(error, MarsError) else f"{type(error).__name__}: {error}"


def cache_bytes(memory: int | float | None, device: torch.device) -> int:
    """Bytes for keys and values. ``memory``: bytes, on a GPU also a share of what is free; None: the default."""
    if memory is not None:
        require_number("memory", memory)
        if memory <= 0:
            raise MarsError(f"memory must be a number of bytes, or on a GPU a share of what is free, not {memory}")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return int(free * GPU_SHARE if memory is None else memory if memory > 1 else free * memory)
    if memory is not None and memory <= 1:
        raise MarsError(f"memory={memory} is a share, which works on a GPU only: give bytes, such as {CPU_MEMORY}")
    return int(CPU_MEMORY if memory is None else memory)


def memory_for(checkpoint: Checkpoint, num_seqs: int, length: int) -> int:
    """Bytes with which an engine never runs out of pages, if no text is longer than ``length``."""
    shapes = layer_shapes(checkpoint)
    shapes = [replace(each, value_size=-(-each.value_size // VECTOR) * VECTOR) for each in shapes]  # as a CPU pads them
    per_token = sum(shape.bytes_per_token for shape in shapes)
    return num_seqs * (length + checkpoint.block_size**2 + 4 * PAGE_SIZE) * per_token
