"""The server's side of the engine: starts its process, sends requests to it, and hands out what comes back."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import pickle
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from multiprocessing.connection import Connection

from mars.core.output import OutputProcessor, RequestOutput
from mars.core.request import Request, default_dial
from mars.engine import QueueFullError
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.serving import engine_process, messages

log = logging.getLogger("mars.serving")
RESTART_SECONDS = 1.0  # before the engine's process is started again
STOP_SECONDS = 5.0
TICK_SECONDS = 1.0  # between two looks at whether the engine shows signs of life
SILENT_TICKS = 6
"""After so many looks without a message the engine is taken for hung. Looks, not seconds: a server that was held up
itself must not blame the engine"""
STEP_SECONDS = 300.0  # and after so long a step
UNREAD_BYTES = 64 * 2**20  # that the engine has not read: no more requests are sent to it then


class EngineGoneError(MarsError):
    """The engine's process has died; it is being started again."""


class RequestFailedError(MarsError):
    """The engine could not finish a request, which nobody else is affected by."""


class RequestStream:
    """A request that the engine works on. What comes is kept until it is read, several forwards at once if need be."""

    def __init__(
        self, request: Request, model: messages.EngineReady, dial: Dial, on_stop: Callable[[RequestStream], None]
    ) -> None:
        """``dial``: of requests that have none of their own; ``on_stop`` is called at a stop string."""
        self.request = request
        self._on_stop = on_stop
        self.end_tokens = frozenset() if request.ignore_end else model.end_tokens
        self.output = RequestOutput(dial=str(request.follow(request.dial or dial)))
        self.processor = OutputProcessor(self.output, model.tokenizer, self.end_tokens, request.stop)
        self.has_begun = False  # has it a first token?
        self._received: list[RequestOutput] = []
        self._error: MarsError | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self.has_begun = True
        self._received.append(output)
        self._changed.set()

    def fail(self, error: MarsError) -> None:
        self._error = error
        self._changed.set()

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    async def advance(self) -> None:
        """Wait for new tokens and add them to the output, up to a stop string."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        received, self._received = self._received, []
        for each in received:
            self.output.extend(each)
            if each.finish_reason == "error":
                self.output.finish("error", each.error)
                raise RequestFailedError(f"the request has failed: {each.error}")
            self.processor.update()
            if self.is_finished:
                self._on_stop(self)
                return
            if each.finish_reason is not None:
                self.output.finish(each.finish_reason)


class EngineClient:
    """One engine in a process of its own."""

    def __init__(self, options: engine_process.EngineOptions) -> None:
        self._options = options
        self._request_ids = count()
        self._streams: dict[int, RequestStream] = {}
        self._closing: set[int] = set()  # requests that were aborted, and that the engine may still have
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._silent_ticks = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._is_stopping = False
        self._changed = asyncio.Event()
        self.model: messages.EngineReady | None = None  # once it is loaded
        self.is_ready = False
        self.failure: str | None = None  # why the engine is not there
        self.load = messages.EngineLoad()
        self.restarts = 0
        self._dial: Dial | None = None
        self.listeners: list[Callable[[messages.FromEngine], None]] = []

    # --- the process

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
        ours, other = socket.socketpair()
        theirs = Connection(other.detach())
        self._process = context.Process(
            target=engine_process.main, args=(theirs, self._options), daemon=True, name="mars-engine"
        )
        self._process.start()
        theirs.close()
        self._tasks = [self._loop.create_task(self._receive_all(ours))]

    async def ready(self) -> None:
        """Wait until the model is loaded; raises if that fails the first time."""
        while not self.is_ready:
            await self._changed.wait()
            self._changed.clear()
            if self.failure is not None and self.model is None:
                raise MarsError(self.failure)

    async def stop(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
            self._process.kill()

    async def _receive_all(self, ours: socket.socket) -> None:
        """Take the engine's messages until it hangs up; never wait for it, since it may be waiting for us."""
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=2**20)
        try:
            while True:
                (size,) = struct.unpack("!i", await reader.readexactly(4))  # as `Connection` writes it
                if size == -1:
                    (size,) = struct.unpack("!Q", await reader.readexactly(8))
                self._receive(pickle.loads(await reader.readexactly(size)))
                self._silent_ticks = 0
        except (asyncio.IncompleteReadError, OSError):
            self._lost("the engine's process has ended")
        except Exception as error:
            log.exception("the engine's messages cannot be read")
            self._lost(f"the engine's messages cannot be read: {type(error).__name__}")

    async def _watch(self) -> None:
        """Take the engine for hung when it shows no signs of life."""
        self._silent_ticks = 0
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(TICK_SECONDS)
            self._silent_ticks += 1
        self._lost("the engine does not answer")

    def _lost(self, reason: str) -> None:
        """The engine is gone or of no use: end its process, fail what was running, and start anew."""
        if not self._tasks:
            return  # that is known, and it is being started again
        self.is_ready = False
        self.failure = reason
        log.error("engine lost: %s", reason)
        self._changed.set()
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if self._writer is not None:
            self._writer.transport.abort()
        if self._process is not None:
            self._process.kill()  # also if it is stopped
        for stream in self._streams.values():
            stream.fail(EngineGoneError(f"{reason}; it is being started again: try again in a moment"))
        self._streams.clear()
        self._closing.clear()
        self.load = messages.EngineLoad()
        if self.model is not None:  # it worked before
            self.restarts += 1
            self._loop.call_later(RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if self._is_stopping:
            return
        try:
            self.start()
        except OSError:
            log.exception("the engine's process cannot be started")
            self._loop.call_later(RESTART_SECONDS, self._restart)

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.EngineReady():
                self.model, self.is_ready, self.failure = message, True, None
                if self._dial is not None:
                    self._send(messages.SetDial(self._dial))
                self._tasks.append(self._loop.create_task(self._watch()))
                self._changed.set()
            case messages.RequestRefused(request_id, error):
                if stream := self._forget(request_id):
                    stream.fail(error)
            case messages.RequestClosed(request_id):
                self._forget(request_id)
            case messages.EngineOutputs(outputs, load):
                self.load = load
                for output in outputs:
                    self._hand_out(output)
            case messages.Heartbeat(step_seconds):
                if step_seconds > STEP_SECONDS:
                    self._lost(f"a step of the engine has taken more than {STEP_SECONDS:.0f} seconds")
            case messages.EngineFailed(reason):
                self._lost(reason)
        for listener in self.listeners:
            try:
                listener(message)
            except Exception:
                log.exception("a listener to the engine has failed")

    def _hand_out(self, output: RequestOutput) -> None:
        if stream := self._streams.get(output.request_id):
            stream.put(output)
        if output.finish_reason is not None:
            self._forget(output.request_id)

    def _forget(self, request_id: int) -> RequestStream | None:
        """The engine has nothing of this request any more."""
        self._closing.discard(request_id)
        return self._streams.pop(request_id, None)

    @property
    def longest_wait(self) -> float:
        """Seconds that a request without a first token has waited"""
        now = time.perf_counter()
        return max((now - each.output.started for each in self._streams.values() if not each.has_begun), default=0.0)

    # --- requests

    @property
    def open(self) -> Collection[int]:
        """Ids of the requests that are not finished"""
        return self._streams.keys()

    @property
    def capacity(self) -> float:
        """Requests that may run or wait at a time"""
        most = self._options.max_waiting
        return math.inf if most is None else self._options.max_num_seqs + most

    @property
    def dial(self) -> Dial:
        """Of requests that have none of their own"""
        if self._dial is not None:
            return self._dial
        return Dial("one-token") if self.model is None else default_dial(self.model)

    @property
    def num_open(self) -> int:
        """Requests that the engine may have, those included that were aborted and that it has not closed yet"""
        return len(self._streams) + len(self._closing)

    def add_requests(self, requests: Sequence[Request]) -> list[RequestStream]:
        """The choices of one prompt: they differ in how they sample alone."""
        if not self.is_ready or self.model is None or self._writer is None:
            raise EngineGoneError("the engine is not ready: try again in a moment")
        requests[0].validate(self.model)
        if self.num_open + len(requests) > self.capacity:
            raise QueueFullError(f"{self.num_open} requests are running or waiting already: try again later")
        if self._writer.transport.get_write_buffer_size() > UNREAD_BYTES:
            raise QueueFullError("the engine has not read all requests yet: try again later")
        streams = {}
        for request in requests:
            request_id = next(self._request_ids)
            streams[request_id] = stream = RequestStream(request, self.model, self.dial, self.abort)
            stream.output.request_id = request_id
        self._streams |= streams
        self._send(messages.AddRequests({number: each.request for number, each in streams.items()}))
        return list(streams.values())

    def abort(self, stream: RequestStream) -> None:
        """End the request in the engine at once, if it is still there."""
        request_id = stream.output.request_id
        if self._streams.pop(request_id, None) is not None:
            self._closing.add(request_id)
            self._send(messages.AbortRequest(request_id))

    def set_dial(self, dial: Dial) -> None:
        self._dial = dial
        for stream in self._streams.values():
            stream.output.dial = str(stream.request.follow(stream.request.dial or dial))
        if self.is_ready:
            self._send(messages.SetDial(dial))

    def _send(self, message: messages.ToEngine) -> None:
        if self._writer is not None:
            data = pickle.dumps(message)
            self._writer.write(struct.pack("!i", len(data)) + data)  # kept until the engine reads it
