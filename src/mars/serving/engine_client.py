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
from collections.abc import Callable, Collection
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


class EngineGoneError(MarsError):
    """The engine's process has died; it is being started again."""


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
        self._writer: asyncio.StreamWriter | None = None
        self._receiving: asyncio.Task[None] | None = None
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
        self._receiving = self._loop.create_task(self._receive_all(ours))

    async def ready(self) -> None:
        """Wait until the model is loaded; raises if that fails the first time."""
        while not self.is_ready:
            await self._changed.wait()
            self._changed.clear()
            if self.failure is not None and self.model is None:
                raise MarsError(self.failure)

    async def stop(self) -> None:
        self._is_stopping = True
        if self._receiving is not None:
            self._receiving.cancel()
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
        except (asyncio.IncompleteReadError, OSError):
            self._writer.close()
            if self._process is not None:
                self._process.kill()  # without a connection it is of no use
            self._lost()

    def _lost(self) -> None:
        """The process has ended: fail what was running, and start anew."""
        self.is_ready = False
        self.failure = self.failure or "the engine's process has ended"
        log.error("engine lost: %s", self.failure)
        self._changed.set()
        for stream in list(self._streams.values()):
            stream.fail(EngineGoneError(f"{self.failure}; it is being started again: try again in a moment"))
        self._streams.clear()
        self.load = messages.EngineLoad()
        if self.model is not None:  # it worked before
            self.restarts += 1
            self._loop.call_later(RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if not self._is_stopping:
            self.start()

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.EngineReady():
                self.model, self.is_ready, self.failure = message, True, None
                if self._dial is not None:
                    self._send(messages.SetDial(self._dial))
                self._changed.set()
            case messages.RequestRefused(request_id, reason):
                if stream := self._streams.pop(request_id, None):
                    stream.fail(MarsError(reason))
            case messages.EngineOutputs(outputs, load):
                self.load = load
                for output in outputs:
                    self._hand_out(output)
            case messages.EngineFailed(reason):
                self.failure = reason
        for listener in self.listeners:
            listener(message)

    def _hand_out(self, output: RequestOutput) -> None:
        if stream := self._streams.get(output.request_id):
            stream.put(output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]

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

    def add_request(self, request: Request) -> RequestStream:
        if not self.is_ready or self.model is None:
            raise EngineGoneError("the engine is not ready: try again in a moment")
        request.validate(self.model)
        if len(self._streams) >= self.capacity:
            raise QueueFullError(f"{len(self._streams)} requests are running or waiting already: try again later")
        stream = RequestStream(request, self.model, self.dial, self.abort)
        stream.output.request_id = next(self._request_ids)
        self._streams[stream.output.request_id] = stream
        self._send(messages.AddRequest(stream.output.request_id, request))
        return stream

    def abort(self, stream: RequestStream) -> None:
        """End the request in the engine at once, if it is still there."""
        if self._streams.pop(stream.output.request_id, None) is not None:
            self._send(messages.AbortRequest(stream.output.request_id))

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
