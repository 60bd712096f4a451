"""A real server process with a tiny model, shared by the tests of this folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.conftest import save_chat_model

MODEL = "letters"


@contextmanager
def serving(*options: object, model: Path | str, name: str = MODEL) -> Iterator[str]:
    """``mars serve`` on a free port; yields its address."""
    command = [sys.executable, "-m", "mars", "serve", "--model", str(model), "--name", name, "--port", "0"]
    process = subprocess.Popen(
        [*command, *map(str, options)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"http://\S+", said)):
            line = process.stderr.readline()
            assert line, f"the server did not start: {said}"
            said += line
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, "the server did not stop by itself"


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
