"""The engine in a process of its own: its steps do not wait for the network, and the server outlives it."""

import gc
import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NoReturn

import torch

from mars.core.grammar import grammar_compiler
from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.core.sequence import Sequence
from mars.core.threads import lower_priority
from mars.engine import Engine, error_text
from mars.errors import MarsError
from mars.models import load_checkpoint
from mars.serving import logs, messages

log = logging.getLogger("mars.serving")
IDLE_SECONDS = 0.5  # how long to wait for a message while there is nothing to do
PREPARING_SECONDS = 0.005  # and while requests are being prepared
PREPARING_THREADS = 2
INLINE_TOKENS = 2**16
"""Requests without a grammar and with no more tokens than this in their prompts are not worth another thread"""
BEAT_SECONDS = 0.5  # between two signs of life
UPDATE_SECONDS = 0.04
"""Between two messages to the server: 25 updates per second; short messages cost as much as long ones"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine's process makes its engine."""

    model: str
    name: str | None = None  # what it is called; None: as it calls itself
    adapter: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_num_seqs: int = 64
    memory: int | float | None = None
    batch_invariant: bool = False
    max_waiting: int | None = None  # more than so many besides those that run are refused by the server
    log_level: str | None = None  # of a log in JSON; None: as Python logs by default


def main(connection: Connection, options: EngineOptions) -> None:
    """The process: load, say so, and step until the server hangs up."""
    leave(_run(connection, options))


def leave(code: int) -> NoReturn:
    """End this process without taking Python apart, which only makes libraries warn of leaks."""
    util._exit_function()  # type: ignore[attr-defined]  # gives semaphores back
    logging.shutdown()
    os._exit(code)


def _run(connection: Connection, options: EngineOptions) -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    if options.log_level is not None:
        logs.install(options.log_level)
    try:
        EngineProcess(connection, options).run()
    except (EOFError, ConnectionError):
        pass  # the server is gone
    except MarsError as error:  # somebody's mistake, not ours: the message is all it needs
        connection.send(messages.EngineFailed(str(error)))
    except Exception as error:
        log.exception("the engine has failed")
        connection.send(messages.EngineFailed(error_text(error)))
        return 1
    return 0


class EngineProcess:
    def __init__(self, connection: Connection, options: EngineOptions) -> None:
        checkpoint = load_checkpoint(options.model, adapter=options.adapter, dtype=options.dtype, device=options.device)
        with suppress(MarsError):  # where grammars are possible, the first one shall not wait
            grammar_compiler(checkpoint)
        self._connection = connection
        self._incoming = select.poll()  # far cheaper than `Connection.poll`
        self._incoming.register(connection.fileno(), select.POLLIN)
        self._sending = Lock()
        self._engine = Engine(
            checkpoint,
            max_num_seqs=options.max_num_seqs,
            memory=options.memory,
            batch_invariant=options.batch_invariant,
        )
        for done, total in self._engine.warm_up():
            self._send(messages.WarmingUp(done, total))
        self._sequences: dict[int, Sequence] = {}  # in progress, by request
        self._preparing: set[int] = set()  # requests that have not become sequences yet
        self._prepared: SimpleQueue[tuple[int, Sequence | Exception]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(PREPARING_THREADS, "prepare", lower_priority)
        self._step_started: float | None = None
        self._is_checked = True  # has nothing run since the cache's integrity was checked?
        self._sent: dict[int, int] = {}  # forwards that the server has been told of, by request
        self._changed: set[int] = set()  # requests with tokens that the server has not been told of
        self._next_update = 0.0
        self._load = messages.EngineLoad()
        longest = self._engine.scheduler.max_length
        ready = messages.EngineReady(
            options.name or checkpoint.name,
            checkpoint.tokenizer,
            checkpoint.end_tokens,
            min(checkpoint.context or longest, longest),
            checkpoint.vocabulary,
            checkpoint.settings,
            self._engine.is_batch_invariant,
        )
        gc.collect()
        gc.freeze()  # all this stays: a collection that looks through it takes a quarter of a second
        self._send(ready)
        Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def run(self) -> None:
        while True:
            self._receive_all()
            self._add_prepared()
            if self._sequences:
                self._step()
            elif not self._is_checked:
                self._engine.check()
            self._is_checked = not self._sequences
            self._update()

    def _receive_all(self) -> None:
        patience = 0.0 if self._sequences else PREPARING_SECONDS if self._preparing else IDLE_SECONDS
        while self._incoming.poll(1000 * patience):
            self._receive(self._connection.recv())
            patience = 0.0

    def _receive(self, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequests(requests):
                self._preparing.update(requests)
                asked = requests.values()
                if any(each.grammar for each in asked) or sum(len(each.prompt) for each in asked) > INLINE_TOKENS:
                    self._threads.submit(self._prepare, requests)
                else:
                    self._prepare(requests)
            case messages.AbortRequest(request_id):
                self._preparing.discard(request_id)
                if closed := self._close(request_id):
                    self._engine.abort(closed)
                self._send(messages.RequestClosed(request_id))
            case messages.SetDial(dial):
                self._engine.set_dial(dial)

    def _prepare(self, requests: Mapping[int, Request]) -> None:
        """Make sequences, in any thread; `_add_prepared` takes them from there."""
        for request_id, request in requests.items():
            if request_id not in self._preparing:
                continue  # it was aborted
            try:
                self._prepared.put((request_id, self._engine.prepare(request)))
            except Exception as error:
                self._prepared.put((request_id, error))

    def _add_prepared(self) -> None:
        while not self._prepared.empty():
            request_id, prepared = self._prepared.get()
            if request_id not in self._preparing:
                continue
            self._preparing.remove(request_id)
            try:
                if isinstance(prepared, Exception):
                    raise prepared
                self._engine.add(prepared)
            except MarsError as error:
                self._send(messages.RequestRefused(request_id, error))
            except torch.AcceleratorError:
                raise
            except Exception as error:
                log.exception("a request could not be prepared")
                output = RequestOutput(request_id, finish_reason="error", error=error_text(error))
                self._send(messages.EngineOutputs([output], self._load))
            else:
                prepared.output.request_id = request_id
                self._sequences[request_id], self._sent[request_id] = prepared, 0

    def _step(self) -> None:
        self._step_started = time.monotonic()
        try:
            moved = self._engine.step()
        except Exception as error:
            self._engine.fail_running(error)
            moved = [each for each in self._sequences.values() if self._has_news(each.output)]
        self._step_started = None
        self._changed.update(sequence.output.request_id for sequence in moved)

    def _has_news(self, output: RequestOutput) -> bool:
        return output.finish_reason is not None or output.forwards > self._sent[output.request_id]

    def _beat(self) -> None:
        """Show signs of life for as long as the server listens, also in the middle of a step."""
        with suppress(OSError):
            while True:
                time.sleep(BEAT_SECONDS)
                started = self._step_started
                self._send(messages.Heartbeat(0.0 if started is None else time.monotonic() - started))

    def _update(self) -> None:
        """Tell the server of new tokens: the first and the last of a request at once, the others when it is time."""
        now = time.monotonic()
        is_due = now >= self._next_update
        if is_due:
            self._next_update = now + UPDATE_SECONDS
        outputs = []
        for request_id in list(self._changed):
            output, sent = self._sequences[request_id].output, self._sent[request_id]
            if not is_due and sent and output.finish_reason is None:
                continue
            outputs.append(output.since(sent))
            self._changed.discard(request_id)
            self._sent[request_id] = output.forwards
            if output.finish_reason is not None:
                self._close(request_id)
        engine, pages = self._engine, self._engine.scheduler.pages
        waiting = engine.num_waiting + len(self._preparing)
        load = messages.EngineLoad(engine.num_running, waiting, pages.used / max(1, pages.count - 1))
        if outputs or (is_due and load != self._load):
            self._load = load
            self._send(messages.EngineOutputs(outputs, load))

    def _close(self, request_id: int) -> Sequence | None:
        self._changed.discard(request_id)
        self._sent.pop(request_id, None)
        return self._sequences.pop(request_id, None)

    def _send(self, message: messages.FromEngine) -> None:
        with self._sending:
            self._connection.send(message)
