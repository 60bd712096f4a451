"""The engine in a process of its own: its steps do not wait for the network, and the server outlives it."""

import gc
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from mars.core.grammar import grammar_compiler
from mars.core.sequence import Sequence
from mars.engine import Engine
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models import load_checkpoint
from mars.serving import messages

IDLE_SECONDS = 0.5  # between two checks of the cache's integrity while there is nothing to do
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
    max_waiting: int | None = None  # more than so many besides those that run are refused by the server
    warm_up: Literal["all", "greedy"] = "all"  # what a GPU is made ready for before the first request comes
    dials: tuple[Dial, ...] = (Dial("relaxed", 0.5), Dial("threshold", 0.9))
    """And for which dials besides exact: one of each kind, since they will be turned"""


def main(connection: Connection, options: EngineOptions) -> None:
    """The process: load, say so, and step until the server hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    try:
        EngineProcess(connection, options).run()
    except (EOFError, BrokenPipeError):
        pass  # the server is gone
    except MarsError as error:  # somebody's mistake, not ours: the message is all it needs
        connection.send(messages.EngineFailed(str(error)))
    except Exception as error:
        connection.send(messages.EngineFailed(f"{type(error).__name__}: {error}"))
        raise


class EngineProcess:
    def __init__(self, connection: Connection, options: EngineOptions) -> None:
        checkpoint = load_checkpoint(options.model, adapter=options.adapter, dtype=options.dtype, device=options.device)
        with suppress(MarsError):  # where grammars are possible, the first one shall not wait
            grammar_compiler(checkpoint)
        self._connection = connection
        self._engine = Engine(checkpoint, max_num_seqs=options.max_num_seqs, memory=options.memory)
        dials = options.dials if checkpoint.settings else ()
        for done, total in self._engine.warm_up(dials=dials, sampled=options.warm_up == "all"):
            self._send(messages.WarmingUp(done, total))
        self._sequences: dict[int, Sequence] = {}  # in progress, by request
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
        )
        gc.collect()
        gc.freeze()  # all this stays: a collection that looks through it takes a quarter of a second
        self._send(ready)

    def run(self) -> None:
        while True:
            while self._connection.poll(0 if self._sequences else IDLE_SECONDS):
                self._receive(self._connection.recv())
            if self._sequences:
                self._changed.update(sequence.output.request_id for sequence in self._engine.step())
            else:
                self._engine.check()
            self._update()

    def _receive(self, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest(request_id, request):
                try:
                    sequence = self._engine.add_request(request)
                except MarsError as error:
                    self._send(messages.RequestRefused(request_id, str(error)))
                    return
                sequence.output.request_id = request_id
                self._sequences[request_id], self._sent[request_id] = sequence, 0
            case messages.AbortRequest(request_id):
                if closed := self._close(request_id):
                    self._engine.abort(closed)
            case messages.SetDial(dial):
                self._engine.set_dial(dial)

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
        load = messages.EngineLoad(engine.num_running, engine.num_waiting, pages.used / max(1, pages.count - 1))
        if outputs or (is_due and load != self._load):
            self._load = load
            self._send(messages.EngineOutputs(outputs, load))

    def _close(self, request_id: int) -> Sequence | None:
        self._changed.discard(request_id)
        self._sent.pop(request_id, None)
        return self._sequences.pop(request_id, None)

    def _send(self, message: messages.FromEngine) -> None:
        self._connection.send(message)
