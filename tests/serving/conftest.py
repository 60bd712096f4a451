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
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.conftest import save_chat_model

MODEL = "letters"


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
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *map(str, options)], stderr=log, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        )
        path = Path(log.name)
        try:
            until(lambda: "http://" in path.read_text() or process.poll() is not None, 120)
            found = re.search(r"http://\S+", path.read_text())
            assert found, f"the server did not start: {path.read_text()}"
            yield Address(found[0], path)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0, f"the server did not stop by itself: {path.read_text()[-2000:]}"


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
