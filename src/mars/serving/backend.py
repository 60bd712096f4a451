"""The server's side of the engine: starts its process, hands requests over, and shares out what comes back."""

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

from mars.decoding.decoder import check_request
from mars.decoding.request import Answer, Request
from mars.engine import QueueFullError
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.serving import worker
from mars.serving.messages import (
    Ask,
    Drop,
    Failed,
    FromEngine,
    FromServer,
    Gauges,
    News,
    Ready,
    Refused,
    Turn,
    Written,
)

log = logging.getLogger("mars.serving")
RESTART_SECONDS = 1.0
"""Before the engine's process is started again"""
STOP_SECONDS = 5.0


class EngineGoneError(MarsError):
    """The engine's process has died; it is being started again."""


class Ticket:
    """A request on its way. News are kept until somebody takes them, several forwards at once if need be."""

    def __init__(self, number: int, answer: Answer, follows: bool) -> None:
        self.number = number
        self.follows = follows
        """Does it obey the server's dial?"""
        self.answer = answer
        self.started = time.perf_counter()
        self.is_begun = False
        """Has it a first token?"""
        self._news: list[Written] = []
        self._error: MarsError | None = None
        self._changed = asyncio.Event()

    def put(self, news: Written) -> None:
        self._news.append(news)
        self._changed.set()

    def fail(self, error: MarsError) -> None:
        self._error = error
        self._changed.set()

    @property
    def is_finished(self) -> bool:
        return self.answer.finish_reason is not None

    async def advance(self) -> None:
        """Wait for news and put them into the answer."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, []
        for each in news:
            for tokens in each.steps:
                self.answer.emit(tokens)
            self.answer.checked, self.answer.agreed = each.checked, each.agreed
            self.answer.likelihoods += each.likelihoods
            if each.finish_reason is not None and not self.is_finished:
                self.answer.cancel(each.finish_reason)  # by a grammar, of which only the engine knows


class Backend:
    """One engine in a process of its own."""

    def __init__(self, options: worker.EngineOptions) -> None:
        self._options = options
        self._numbers = count()
        self._tickets: dict[int, Ticket] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._is_stopping = False
        self._changed = asyncio.Event()
        self.facts: Ready | None = None
        """Of the model, once it is loaded"""
        self.is_ready = False
        self.failure: str | None = None
        """Why the engine is not there"""
        self.gauges = Gauges()
        self.restarts = 0
        self.dial: Dial | None = None
        """The server's; None: the model's own"""
        self.listeners: list[Callable[[FromEngine], None]] = []

    # --- its life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
        ours, other = socket.socketpair()
        theirs = Connection(other.detach())
        self._process = context.Process(
            target=worker.run, args=(theirs, self._options), daemon=True, name="mars-engine"
        )
        self._process.start()
        theirs.close()
        self._listening = self._loop.create_task(self._listen(ours))

    async def ready(self) -> None:
        """Wait until the model is loaded; raises if that fails the first time."""
        while not self.is_ready:
            await self._changed.wait()
            self._changed.clear()
            if self.failure is not None and self.facts is None:
                raise MarsError(self.failure)

    async def stop(self) -> None:
        self._is_stopping = True
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
            self._process.kill()

    async def _listen(self, ours: socket.socket) -> None:
        """Hear what the engine says until it hangs up; never wait for it, since it may be waiting for us."""
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=2**20)
        try:
            while True:
                (size,) = struct.unpack("!i", await reader.readexactly(4))  # as `Connection` writes it
                if size == -1:
                    (size,) = struct.unpack("!Q", await reader.readexactly(8))
                self._hear(pickle.loads(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            self._writer.close()
            if self._process is not None:
                self._process.kill()  # if it can no longer be heard, it is of no use
            self._lost()

    def _lost(self) -> None:
        """The process has ended: fail what was running, and start anew."""
        self.is_ready = False
        self.failure = self.failure or "the engine's process has ended"
        log.error("engine lost: %s", self.failure)
        self._changed.set()
        for ticket in list(self._tickets.values()):
            ticket.fail(EngineGoneError(f"{self.failure}; it is being started again: try again in a moment"))
        self._tickets.clear()
        self.gauges = Gauges()
        if self.facts is not None:  # it worked before
            self.restarts += 1
            self._loop.call_later(RESTART_SECONDS, self._restart)

    def _restart(self) -> None:
        if not self._is_stopping:
            self.start()

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self.facts, self.is_ready, self.failure = message, True, None
                if self.dial is not None:
                    self._send(Turn(self.dial))
                self._changed.set()
            case Refused(number, reason):
                if ticket := self._tickets.pop(number, None):
                    ticket.fail(MarsError(reason))
            case News(written, gauges):
                self.gauges = gauges
                for each in written:
                    self._share(each)
            case Failed(reason):
                self.failure = reason
        for listener in self.listeners:
            listener(message)

    def _share(self, news: Written) -> None:
        ticket = self._tickets.get(news.number)
        if ticket is not None:
            ticket.is_begun = True
            ticket.put(news)
            if news.finish_reason is not None:
                del self._tickets[news.number]

    @property
    def longest_wait(self) -> float:
        """Seconds that a request without a first token has waited"""
        now = time.perf_counter()
        return max((now - each.started for each in self._tickets.values() if not each.is_begun), default=0.0)

    # --- requests

    @property
    def open(self) -> Collection[int]:
        """Numbers of the requests that are not finished"""
        return self._tickets.keys()

    @property
    def capacity(self) -> float:
        """Requests that may run or wait at a time"""
        most = self._options.max_waiting
        return math.inf if most is None else self._options.rows + most

    def submit(self, request: Request, *, follows: bool) -> Ticket:
        if not self.is_ready or self.facts is None:
            raise EngineGoneError("the engine is not ready: try again in a moment")
        facts = self.facts
        check_request(facts, request)
        if len(self._tickets) >= self.capacity:
            raise QueueFullError(f"{len(self._tickets)} requests are running or waiting already: try again later")
        number = next(self._numbers)
        answer = Answer(request, facts.tokenizer, facts.end_tokens, facts.context)
        ticket = self._tickets[number] = Ticket(number, answer, follows)
        self._send(Ask(number, request, follows))
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Free its row at once, if it still has one."""
        if self._tickets.pop(ticket.number, None) is not None:
            self._send(Drop(ticket.number))

    def turn(self, dial: Dial) -> None:
        self.dial = dial
        for ticket in self._tickets.values():
            if ticket.follows:
                ticket.answer.request.obey(dial)
        if self.is_ready:
            self._send(Turn(dial))

    def _send(self, message: FromServer) -> None:
        if self._writer is not None:
            data = pickle.dumps(message)
            self._writer.write(struct.pack("!i", len(data)) + data)  # kept until the engine reads it
