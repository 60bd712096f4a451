"""The engine's process, run by a thread of this one so that its parts can be made to fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

import pytest

from mars.core.grammar import lark_grammar
from mars.core.request import Request
from mars.engine import Engine
from mars.method.acceptance import Dial
from mars.serving import messages
from mars.serving.engine_process import EngineOptions, EngineProcess

ASK = Request([1, 2, 3], Dial("one-token"), max_new_tokens=200, ignore_end=True)
SHORT = Request([1, 2, 3], Dial("one-token"), max_new_tokens=3)
GRAMMAR = Request([1, 2, 3], Dial("one-token"), max_new_tokens=3, grammar=lark_grammar("start: /[a-j]+/"))


@pytest.fixture
def process(letters: Path) -> Iterator[tuple[Connection, EngineProcess]]:
    ours, theirs = Pipe()
    made = EngineProcess(theirs, EngineOptions(str(letters), device="cpu"))

    def run() -> None:
        try:
            made.run()
        except EOFError:
            theirs.close()

    thread = Thread(target=run)
    thread.start()
    assert isinstance(ours.recv(), messages.EngineReady)
    yield ours, made
    ours.close()
    thread.join()


def until_ended(connection: Connection, request_id: int) -> object:
    """What a request ends with."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        message = connection.recv()
        if isinstance(message, messages.EngineOutputs):
            ends = [each for each in message.outputs if each.request_id == request_id and each.finish_reason]
            if ends:
                return ends[0]
        elif getattr(message, "request_id", None) == request_id:
            return message
    raise AssertionError("it did not end")


def test_a_request_that_cannot_be_prepared_fails_alone(process, monkeypatch) -> None:
    connection, _ = process
    prepare = Engine.prepare

    def broken(self: Engine, request: Request) -> object:
        return 1 // 0 if request.max_new_tokens == 5 else prepare(self, request)

    monkeypatch.setattr(Engine, "prepare", broken)
    connection.send(messages.AddRequests({1: ASK}))
    connection.send(messages.AddRequests({2: Request([1], Dial("one-token"), max_new_tokens=5)}))
    connection.send(messages.AddRequests({3: Request([1], Dial("one-token"), block_size=99)}))
    failed, refused = until_ended(connection, 2), until_ended(connection, 3)
    assert failed.finish_reason == "error" and "ZeroDivisionError" in failed.error
    assert isinstance(refused, messages.RequestRefused) and "block_size" in str(refused.error)
    assert until_ended(connection, 1).finish_reason == "length"


def test_a_step_that_fails_ends_what_runs_and_not_the_process(process, monkeypatch) -> None:
    connection, made = process
    broken = Event()
    step = made._engine._runner.step

    def fail_once(*given: object) -> object:
        if not broken.is_set():
            broken.set()
            raise ZeroDivisionError
        return step(*given)

    monkeypatch.setattr(made._engine._runner, "step", fail_once)
    connection.send(messages.AddRequests({1: ASK}))
    assert until_ended(connection, 1).finish_reason == "error"
    connection.send(messages.AddRequests({2: SHORT}))
    assert until_ended(connection, 2).finish_reason in ("length", "stop")


def test_a_grammar_that_takes_long_to_compile_holds_nobody_up_and_can_be_aborted(process, monkeypatch) -> None:
    connection, made = process
    gate, prepare = Event(), Engine.prepare
    monkeypatch.setattr(
        Engine, "prepare", lambda self, request: (gate.wait(30) if request.grammar else None, prepare(self, request))[1]
    )
    connection.send(messages.AddRequests({1: GRAMMAR, 2: GRAMMAR}))
    connection.send(messages.AddRequests({3: SHORT}))
    assert until_ended(connection, 3).finish_reason in ("length", "stop")
    connection.send(messages.AbortRequest(1))
    assert until_ended(connection, 1) == messages.RequestClosed(1)
    gate.set()
    assert until_ended(connection, 2).finish_reason in ("length", "stop")
    connection.send(messages.AbortRequest(9))
    assert until_ended(connection, 9) == messages.RequestClosed(9)
    assert not made._preparing and not made._sequences


def test_the_cache_is_checked_once_when_the_engine_becomes_idle(process, monkeypatch) -> None:
    connection, made = process
    checks = []
    check = made._engine.check
    monkeypatch.setattr(made._engine, "check", lambda: checks.append(1) or check())
    connection.send(messages.AddRequests({1: SHORT}))
    until_ended(connection, 1)
    beats = 0
    while beats < 4:
        beats += isinstance(connection.recv(), messages.Heartbeat)
    assert len(checks) == 1
