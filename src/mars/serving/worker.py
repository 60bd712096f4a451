"""The engine in a process of its own: its steps do not wait for the network, and the server outlives it."""

from __future__ import annotations

import gc
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from mars.decoding.grammar import lexicon_of
from mars.decoding.request import Answer
from mars.engine import Engine
from mars.errors import MarsError
from mars.method.acceptance import Dial
from mars.models import load_checkpoint
from mars.serving.messages import Ask, Drop, Failed, FromServer, Gauges, News, Ready, Refused, Turn, WarmingUp, Written

IDLE_SECONDS = 0.5
"""Between two looks at the cache's integrity while there is nothing to do"""
PACE_SECONDS = 0.04
"""Between two messages to the server: as often as a film, and short ones cost as much as long ones"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine's process makes its engine."""

    model: str
    name: str | None = None
    """What it is called; None: as it calls itself"""
    adapter: str | None = None
    dtype: str | None = None
    device: str | None = None
    rows: int = 64
    memory: int | float | None = None
    max_waiting: int | None = None
    """More than so many besides those that run are refused; the server sees to that"""
    warm_up: Literal["all", "greedy"] = "all"
    """What a GPU is made ready for before the first request comes"""
    dials: tuple[Dial, ...] = (Dial("relaxed", 0.5), Dial("threshold", 0.9))
    """And for which dials besides exact: one of each kind, since they will be turned"""


def run(connection: Connection, options: EngineOptions) -> None:
    """The process: load, say so, and step until the server hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    try:
        Worker(connection, options).work()
    except (EOFError, BrokenPipeError):
        pass  # the server is gone
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        raise


@dataclass(slots=True)
class _Open:
    """A request that is not finished."""

    number: int
    answer: Answer
    follows: bool
    told: int = 0
    """Forwards that the server knows of"""

    @property
    def has_news(self) -> bool:
        return self.told < len(self.answer.steps)

    @property
    def is_urgent(self) -> bool:
        """The beginning and the end are told at once."""
        return self.has_news and (not self.told or self.answer.finish_reason is not None)


class Worker:
    def __init__(self, connection: Connection, options: EngineOptions) -> None:
        checkpoint = load_checkpoint(options.model, adapter=options.adapter, dtype=options.dtype, device=options.device)
        with suppress(MarsError):  # where grammars are possible, the first one shall not wait
            lexicon_of(checkpoint)
        self._connection = connection
        self._engine = Engine(checkpoint, rows=options.rows, memory=options.memory)
        dials = options.dials if checkpoint.settings else ()
        for done, total in self._engine.warm_up(dials=dials, sampled=options.warm_up == "all"):
            self._say(WarmingUp(done, total))
        self._open: dict[int, _Open] = {}
        self._due = 0.0
        """When the server is told how all requests go on"""
        self._gauges = Gauges()
        ready = Ready(
            options.name or checkpoint.name,
            checkpoint.tokenizer,
            checkpoint.end_tokens,
            min(checkpoint.context or self._engine.longest, self._engine.longest),
            checkpoint.vocabulary,
            checkpoint.settings,
        )
        self._dial = ready.dial
        gc.collect()
        gc.freeze()  # all this stays: a look through it for garbage takes a quarter of a second
        self._say(ready)

    def work(self) -> None:
        while True:
            while self._connection.poll(0 if self._open else IDLE_SECONDS):
                self._hear(self._connection.recv())
            if self._open:
                self._engine.step()
            else:
                self._engine.check()
            self._tell()

    def _hear(self, message: FromServer) -> None:
        match message:
            case Ask():
                self._add(message)
            case Drop(number):
                if gone := self._open.pop(number, None):
                    self._engine.cancel(gone.answer)
            case Turn(dial):
                self._dial = dial
                for each in self._open.values():
                    if each.follows:
                        each.answer.request.obey(dial)

    def _add(self, ask: Ask) -> None:
        request = ask.request
        if ask.follows:
            request.obey(self._dial)
        try:
            self._open[ask.number] = _Open(ask.number, self._engine.add(request), ask.follows)
        except MarsError as error:
            self._say(Refused(ask.number, str(error)))

    def _tell(self) -> None:
        """Send the news of all requests together, and how full the engine is, if that has changed."""
        now = time.monotonic()
        is_due = now >= self._due
        if is_due:
            self._due = now + PACE_SECONDS
        written = [self._news_of(each) for each in self._open.values() if each.is_urgent or (is_due and each.has_news)]
        for each in written:
            if each.finish_reason is not None:
                del self._open[each.number]
        engine = self._engine
        gauges = Gauges(engine.running, engine.waiting, engine.pages.used / max(1, engine.pages.count - 1))
        if written or (is_due and gauges != self._gauges):
            self._gauges = gauges
            self._say(News(written, gauges))

    def _news_of(self, each: _Open) -> Written:
        answer = each.answer
        new = answer.steps[each.told :]
        each.told = len(answer.steps)
        start = len(answer.token_ids) - sum(new)
        steps = []
        for size in new:
            steps.append(answer.token_ids[start : start + size])
            start += size
        likely = answer.likelihoods[-sum(new) :] if answer.likelihoods else []
        return Written(each.number, steps, answer.checked, answer.agreed, answer.finish_reason, likely)

    def _say(self, message: Any) -> None:
        self._connection.send(message)
