"""A real server process with a tiny model, shared by the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from mars.models.builtin import NAME
from tests.conftest import save_chat_model

MODEL = "letters"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "cae"}], "temperature": 0, "max_tokens": 8}


ALONE = {"OMP_NUM_THREADS": "1"}
"""So small a model is slower with several threads where others want the processor, too"""


class Address(str):
    """Where a server listens, and where its log is."""

    def __new__(cls, url: str, log: Path) -> Address:
        made = super().__new__(cls, url)
        made.log = log
        return made

    log: Path

    def events(self, event: str) -> list[dict]:
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        lines = [json.loads(line) for line in whole if line.startswith("{")]
        return [line for line in lines if line["event"] == event]


@contextmanager
def serving(*options: object, model: Path | str, name: str = MODEL) -> Iterator[Address]:
    """``mars serve`` on a free port; yields its address."""
    command = [sys.executable, "-m", "mars", "serve", "--model", str(model), "--name", name, "--port", "0"]
    if model != NAME:  # random models: their text should not depend on what this processor prefers
        command += ["--dtype", "float32"]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *map(str, options)], stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": "", **ALONE}
        )
        path = Path(log.name)
        try:
            until(lambda: "http://" in path.read_text() or process.poll() is not None, 120)
            found = re.search(r"http://[^\s\"]+", path.read_text())
            assert found, f"the server did not start: {path.read_text()}"
            yield Address(found[0], path)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, f"the server did not stop by itself: {path.read_text()[-2000:]}"
            plain = [line for line in path.read_text().splitlines() if not line.startswith("{")]
            assert not plain, f"the log has lines that are no JSON: {plain}"


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that calls itself trained."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "letters", trained=True)


@pytest.fixture(scope="session")
def server(letters: Path) -> Iterator[str]:
    with serving("--max-waiting", 8, "--rows", 4, model=letters) as address:
        yield address


@pytest.fixture
def http(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=30) as client:
        yield client


def until(condition, seconds: float = 10) -> None:
    """Wait for something that is bound to happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def number(address: str | httpx.URL, name: str) -> float:
    """The sum of a metric."""
    text = httpx.get(f"{str(address).rstrip('/')}/metrics").text
    return sum(float(each) for each in re.findall(rf"(?m)^vllm:{name}\S* (\S+)$", text))


@contextmanager
def crowd(address: str | httpx.URL, rows: int, waiting: int) -> Iterator[None]:
    """Others who keep a server's rows busy for a while, and some who wait; they do not read their answers."""
    url = httpx.URL(address)
    with ExitStack() as connections:
        for size in (rows, waiting):
            connection = connections.enter_context(closing(HTTPConnection(url.host, url.port)))
            body = json.dumps(CHAT | {"n": size, "max_tokens": 250, "ignore_eos": True, "dial": "one-token"})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            until(lambda: number(url, "num_requests_running") == rows)
        until(lambda: number(url, "num_requests_waiting") == waiting)
        yield
    until(lambda: number(url, "num_requests_running") == 0)


def process_at(address: str) -> psutil.Process:
    """The server that listens there, one of this process's children."""
    port = httpx.URL(address).port
    [found] = [
        each
        for each in psutil.Process().children()
        if any(connection.laddr.port == port for connection in each.net_connections())
    ]
    return found


def engine_at(address: str) -> psutil.Process:
    [engine] = [each for each in process_at(address).children() if "spawn_main" in " ".join(each.cmdline())]
    return engine


def kill_engine(address: str) -> None:
    engine_at(address).kill()
