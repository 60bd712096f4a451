"""The server's side of the engine, against a socket whose other end the test holds."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import pytest

from mars.core.output import RequestOutput
from mars.core.request import Request
from mars.engine import QueueFullError
from mars.method.sampling import SamplingParams
from mars.serving import engine_client, messages
from mars.serving.engine_client import EngineClient, EngineGoneError, RequestFailedError
from mars.serving.engine_process import EngineOptions
from tests.conftest import END, VOCABULARY, tiny_tokenizer

READY = messages.EngineReady("letters", tiny_tokenizer(), frozenset({END}), 256, VOCABULARY, None, True)
ASK = Request([1, 2, 3])


class LoneClient(EngineClient):
    """Has the test for an engine."""

    engine: Connection
    starts = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self.engine, self.starts = Connection(theirs.detach()), self.starts + 1
        self._tasks = [self._loop.create_task(self._receive_all(ours))]
        self.engine.send(READY)

    def received(self) -> list[messages.ToEngine]:
        got = []
        while self.engine.poll(0):
            got.append(self.engine.recv())
        return got


def with_client(test: Callable[[LoneClient], Awaitable[None]], monkeypatch, **options: object) -> None:
    monkeypatch.setattr(engine_client, "RESTART_SECONDS", 0.01)

    async def run() -> None:
        client = LoneClient(EngineOptions("", **options))
        client.start()
        await client.ready()
        try:
            await test(client)
        finally:
            await client.stop()

    asyncio.run(run())


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("data", [b"nonsense", pickle.dumps(messages.EngineOutputs)[:-1], b""])
def test_messages_that_cannot_be_read_are_a_lost_engine(data: bytes, monkeypatch, caplog) -> None:
    async def test(client: LoneClient) -> None:
        [stream] = client.add_requests([ASK])
        client.engine._send(struct.pack("!i", len(data)) + data)
        with pytest.raises(EngineGoneError, match="cannot be read"):
            await stream.advance()
        await eventually(lambda: client.is_ready)
        assert client.starts == 2 and client.restarts == 1

    with_client(test, monkeypatch)
    assert "Traceback" in caplog.text


def test_an_engine_is_lost_once(monkeypatch) -> None:
    """Whatever it has sent besides."""

    async def test(client: LoneClient) -> None:
        for _ in range(3):
            client._receive(messages.Heartbeat(2 * engine_client.STEP_SECONDS))
        await eventually(lambda: client.is_ready)
        await asyncio.sleep(0.1)
        assert client.starts == 2 and client.restarts == 1

    with_client(test, monkeypatch)


def test_each_failure_has_its_reason_in_the_log(monkeypatch, caplog) -> None:
    async def test(client: LoneClient) -> None:
        client._receive(messages.EngineFailed("no memory"))
        monkeypatch.setattr(engine_client, "RESTART_SECONDS", 60.0)
        await eventually(lambda: client.starts == 2)
        client._receive(messages.EngineFailed("no such folder"))
        assert client.failure == "no such folder"

    with_client(test, monkeypatch)
    assert [each for each in ("no memory", "no such folder") if f"engine lost: {each}" in caplog.text] == [
        "no memory",
        "no such folder",
    ]


def test_a_listener_that_fails_does_not_end_the_listening(monkeypatch, caplog) -> None:
    async def test(client: LoneClient) -> None:
        client.listeners.append(lambda _: 1 / 0)
        [stream] = client.add_requests([ASK])
        client.engine.send(messages.EngineOutputs([RequestOutput(0, [1], [1], [True], [1])]))
        await stream.advance()
        assert stream.output.token_ids == [1] and client.starts == 1

    with_client(test, monkeypatch)
    assert "ZeroDivisionError" in caplog.text


def test_silence_counts_and_a_held_up_server_does_not_blame_the_engine(monkeypatch) -> None:
    monkeypatch.setattr(engine_client, "TICK_SECONDS", 0.05)

    async def test(client: LoneClient) -> None:
        for _ in range(20):
            client.engine.send(messages.Heartbeat(0.0))
            await asyncio.sleep(0.05)
        time.sleep(0.05 * (engine_client.SILENT_TICKS + 4))
        await asyncio.sleep(0.06)
        assert client.is_ready and client.starts == 1
        await eventually(lambda: not client.is_ready)
        assert client.failure == "the engine does not answer"
        await eventually(lambda: client.starts == 2)

    with_client(test, monkeypatch)


def test_a_step_that_never_ends_is_a_hung_engine(monkeypatch) -> None:
    async def test(client: LoneClient) -> None:
        [stream] = client.add_requests([ASK])
        client.engine.send(messages.Heartbeat(engine_client.STEP_SECONDS + 1))
        with pytest.raises(EngineGoneError, match="a step of the engine"):
            await stream.advance()

    with_client(test, monkeypatch)


def test_an_aborted_request_counts_until_the_engine_has_closed_it(monkeypatch) -> None:
    async def test(client: LoneClient) -> None:
        streams = client.add_requests([ASK, ASK])
        for stream in streams:
            client.abort(stream)
        for _ in range(3):
            with pytest.raises(QueueFullError):
                client.add_requests([ASK])
        client.engine.send(messages.RequestClosed(0))
        await eventually(lambda: client.num_open == 1)
        client.add_requests([ASK])
        client.engine.send(messages.EngineOutputs([RequestOutput(1, finish_reason="stop")]))  # it had ended by itself
        await eventually(lambda: client.num_open == 1)

    with_client(test, monkeypatch, max_num_seqs=1, max_waiting=1)


def test_what_the_engine_has_not_read_is_bounded(monkeypatch) -> None:
    async def test(client: LoneClient) -> None:
        big = Request([1] * 3, grammar="x" * 2**20)
        with pytest.raises(QueueFullError, match="not read"):
            for _ in range(100):
                client.add_requests([big])
        assert client.num_open < 80

    with_client(test, monkeypatch)


def test_all_choices_of_a_prompt_are_one_message_that_shares_what_is_the_same(monkeypatch) -> None:
    async def test(client: LoneClient) -> None:
        bias = dict.fromkeys(range(VOCABULARY), 1.0)
        shared = {"prompt": [1] * 200, "grammar": "x" * 1000}
        client.add_requests([Request(**shared, sampling=SamplingParams(seed=n, logit_bias=bias)) for n in range(50)])
        [message] = client.received()
        assert len(message.requests) == 50
        assert len({id(each.prompt) for each in message.requests.values()}) == 1
        assert len({id(each.sampling.logit_bias) for each in message.requests.values()}) == 1
        assert len(pickle.dumps(message)) < 20000

    with_client(test, monkeypatch)


def test_a_request_that_fails_in_the_engine(monkeypatch) -> None:
    async def test(client: LoneClient) -> None:
        bad, good = client.add_requests([ASK, ASK])
        failed = RequestOutput(0, [1], [1], [True], [1], finish_reason="error", error="too bad")
        client.engine.send(messages.EngineOutputs([failed, RequestOutput(1, [1], [1], [True], [1])]))
        with pytest.raises(RequestFailedError, match="too bad"):
            await bad.advance()
        await good.advance()
        assert bad.output.finish_reason == "error" and client.num_open == 1

    with_client(test, monkeypatch)
