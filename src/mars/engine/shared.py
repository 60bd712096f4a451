"""An engine that any number of threads and event loops use at once.

A caller that needs tokens either makes a step for everybody, or waits while another caller does. What callers ask for
meanwhile (new requests, aborts, dials) waits in an inbox until the step is over.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from types import FrameType

import torch

from mars.core.output import OutputProcessor, RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.engine.engine import Engine
from mars.engine.run import attach_processor, stop_found
from mars.errors import MarsError
from mars.method.acceptance import Dial


class PendingRequest:
    """A request in a shared engine, as its caller sees it.

    Until it is finished, its sequence belongs to whoever steps: the caller reads the other attributes only.
    """

    __slots__ = ("error", "is_finished", "pieces", "processor", "sequence", "streams")

    def __init__(self, sequence: Sequence, processor: OutputProcessor, *, streams: bool) -> None:
        """``streams``: have `pieces` filled with the text of each forward, not only the output at the end."""
        self.sequence = sequence
        self.processor = processor
        self.streams = streams
        self.pieces: list[str] = []
        self.is_finished = False
        self.error: Exception | None = None

    @property
    def result(self) -> RequestOutput:
        """Its output, once it is finished; raises what went wrong instead."""
        if self.error is not None:
            raise self.error
        return self.sequence.output


class SharedEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self._pending: dict[Sequence, PendingRequest] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn = threading.Condition(threading.Lock())  # not reentrant: see `_settle`
        self._is_stepping = False
        self._num_exclusive = 0  # callers that wait for `exclusive`
        self._async_steps: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}

    # --- requests: these return at once

    def submit(self, request: Request, *, streams: bool = False) -> PendingRequest:
        """Queue a request; raises if it cannot be served. It is prepared in the caller's thread."""
        sequence = self.engine.prepare(request)
        self.engine.scheduler.require_room(sequence)
        pending = PendingRequest(sequence, attach_processor(self.engine, sequence), streams=streams)
        self._post(partial(self._add, pending))
        return pending

    def abort(self, pending: PendingRequest) -> None:
        """End a request before the next step. A finalizer may call this, whatever the thread is doing."""
        if not pending.is_finished:
            self._post(partial(self._abort, pending.sequence))

    def set_dial(self, pending: PendingRequest, dial: Dial) -> None:
        """Turn the dial of one request before the next step."""
        self._post(partial(pending.sequence.set_dial, dial))

    # --- waiting

    def run(
        self, requests: Iterable[Request], max_waiting: int = 64
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """`mars.engine.run.run` for a shared engine: every request's index and output as it finishes."""
        source, most = enumerate(requests), self.engine.max_num_seqs + max_waiting
        running: dict[PendingRequest, int] = {}
        try:
            while True:
                for index, request in islice(source, max(0, most - len(running))):
                    running[self.submit(request)] = index
                if not running:
                    return
                self.step_until(lambda: any(each.is_finished for each in running))
                for each in [each for each in running if each.is_finished]:
                    yield running.pop(each), each.result
        finally:
            for each in running:
                self.abort(each)

    def step_until(self, done: Callable[[], bool]) -> None:
        """Return when ``done`` is true: make steps, or wait while somebody else makes them."""
        try:
            while not done():
                if not self._step_unless_busy():
                    with self._turn:
                        self._turn.wait_for(lambda: not self._is_busy or done())
        finally:
            self._settle()

    def step(self) -> None:
        """Make a step, or wait until somebody has made one."""
        before = self.num_steps
        self.step_until(lambda: self.num_steps > before)

    async def async_step(self) -> None:
        """The same without blocking the event loop: all who await this on one loop share a thread and its step."""
        loop = asyncio.get_running_loop()
        step = self._async_steps.get(loop)
        if step is None or step.done():
            step = self._async_steps[loop] = loop.run_in_executor(None, self.step)
            step.add_done_callback(partial(self._forget_async_step, loop))
        await asyncio.shield(step)  # one who is cancelled does not cancel it for the others

    def _forget_async_step(self, loop: asyncio.AbstractEventLoop, step: asyncio.Future[None]) -> None:
        if self._async_steps.get(loop) is step:
            del self._async_steps[loop]

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine between two steps, for something that is not a step."""
        with self._turn:
            self._num_exclusive += 1
            try:
                self._turn.wait_for(lambda: not self._is_stepping)
                self._is_stepping = True
            finally:
                self._num_exclusive -= 1
        try:
            with self._own_context():
                yield self.engine
        finally:
            self._end_step()
            self._settle()

    @property
    def _is_busy(self) -> bool:
        return self._is_stepping or self._num_exclusive > 0

    # --- the step

    def _step_unless_busy(self) -> bool:
        with hold_interrupts():
            with self._turn:
                if self._is_busy:
                    return False
                self._is_stepping = True
            try:
                self._step()
            finally:
                self._end_step()
        return True

    def _end_step(self) -> None:
        with self._turn:
            self._is_stepping = False
            self.num_steps += 1
            self._turn.notify_all()

    def _step(self) -> None:
        try:
            with self._own_context():
                self._empty_inbox()
                for sequence in self.engine.step():
                    self._publish(sequence)
        except BaseException as error:
            self._fail(error if isinstance(error, Exception) else RuntimeError("the engine's step was interrupted"))
            if not isinstance(error, Exception):
                raise

    def _publish(self, sequence: Sequence) -> None:
        """Let the caller see what is new: pieces, if it streams, and whether the request is finished."""
        if (pending := self._pending.get(sequence)) is None:
            return  # it was added to the engine directly
        try:
            stop_found(self.engine, sequence)
            if pending.streams and pending.error is None:
                start = 0 if sequence.is_finished else len(pending.pieces)  # the end may add to the last piece
                pending.pieces[start:] = pending.processor.pieces[start:]
        except Exception as error:  # of the tokenizer
            pending.error = error
            self.engine.abort(sequence)
        if sequence.is_finished:
            del self._pending[sequence]
            pending.is_finished = True

    def _fail(self, error: Exception) -> None:
        """A step has failed: the requests that took part are lost, the others go on.

        Prompts may be marked as cached that never were, so the prefix cache is cleared.
        """
        for sequence in [*self.engine.scheduler.running] or [*self._pending]:
            if sequence in self._pending and not sequence.is_finished:
                self._pending[sequence].error = error
            self.engine.abort(sequence)
        self.engine.clear_prefix_cache()
        for sequence in [each for each in self._pending if each.is_finished]:
            self._publish(sequence)

    @contextmanager
    def _own_context(self) -> Iterator[None]:
        """Every thread has an inference mode and a CUDA stream of its own: all steps get the same."""
        device = self.engine.checkpoint.device
        on_gpu = device.type == "cuda"
        with (
            torch.inference_mode(False),
            torch.cuda.stream(torch.cuda.default_stream(device)) if on_gpu else nullcontext(),
        ):
            yield

    # --- the inbox

    def _post(self, change: Callable[[], None]) -> None:
        self._inbox.append(change)
        self._settle()

    def _settle(self) -> None:
        """Empty the inbox now if nobody steps; whoever steps does it otherwise.

        A finalizer may run this at any time, also in a thread that holds the lock. So it does not wait for the lock:
        whoever holds it calls this after letting go.
        """
        while self._inbox:
            with hold_interrupts():
                if not self._turn.acquire(blocking=False):
                    return
                try:
                    if self._is_stepping:
                        return
                    self._empty_inbox()
                finally:
                    self._turn.release()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(self, pending: PendingRequest) -> None:
        self._pending[pending.sequence] = pending
        try:
            self.engine.add(pending.sequence)
        except MarsError as error:
            pending.error = error
            self._abort(pending.sequence)

    def _abort(self, sequence: Sequence) -> None:
        self.engine.abort(sequence)
        self._publish(sequence)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, so that no step is left half done; a second one is not held back."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal held
        held = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt
