"""A server in a process of its own, and clients in others that read streams from it; shared by the serving benchmarks.

Run as a script, this is one of the client processes. It imports the standard library only, so it starts quickly.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle, takewhile
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    pid: int
    log: Path

    def events(self, event: str) -> list[dict[str, Any]]:
        """Lines of its log."""
        whole = self.log.read_text().rpartition("\n")[0].splitlines()
        lines = [json.loads(line) for line in whole if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


@contextmanager
def running(command: Sequence[object], ready: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server, once its output matches the pattern ``ready``, whose first group is the address."""
    with tempfile.NamedTemporaryFile("w+") as said:
        log = Path(said.name)
        process = subprocess.Popen([*map(str, command)], stdout=said, stderr=said, env=env)
        try:
            while not (found := re.search(ready, log.read_text(errors="replace"))):
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start: {log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.2)
            yield Server(found[1], process.pid, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def mars_serve(*options: object, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    command = [sys.executable, "-m", "mars", "serve", "--port", 0, *options]
    with running(command, r"(http://[^\s\"]+)", env) as server:
        yield server


@dataclass(slots=True)
class Streamed:
    """One answer as its client received it; times in seconds."""

    started: float
    tokens: int = 0
    first: float = 0.0
    """From the request to the first text"""
    ended: float = 0.0
    chunks: int = 0
    figures: dict[str, Any] | None = None
    by_second: dict[str, int] = field(default_factory=dict)
    """Chunks by the second in which they came"""

    @property
    def per_token(self) -> float | None:
        """After the first text"""
        return (self.ended - self.started - self.first) / (self.tokens - 1) if self.tokens > 1 else None


def stream(address: str, body: dict[str, Any]) -> Streamed:
    """Read one chat to its end. The client does as little as possible, so that the server is measured."""
    url = urlsplit(address)
    seen = Streamed(time.time())
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=600)
    request = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/chat/completions", request, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()}")
    last = b""
    for line in response:
        if line.startswith(b"data: {"):
            seen.chunks += 1
            last, second = line, str(int(time.time()))
            seen.by_second[second] = seen.by_second.get(second, 0) + 1
            if not seen.first and b'"content":""' not in line and b'"content": ""' not in line:
                seen.first = time.time() - seen.started
    seen.ended = time.time()
    connection.close()
    account = json.loads(last.removeprefix(b"data: "))
    if account.get("usage") is None:
        raise RuntimeError(f"the stream ended early: {last.decode()}")
    seen.tokens, seen.figures = account["usage"]["completion_tokens"], account.get("mars")
    return seen


@dataclass(frozen=True, slots=True)
class Lane:
    """The requests of one client, one after the other."""

    bodies: list[dict[str, Any]]
    delay: float = 0.0
    """Seconds until the first"""
    until: float | None = None
    """Seconds after which none is begun; before that, the requests are repeated"""


def ask_all(address: str, lanes: Sequence[Lane], processes: int) -> list[Streamed]:
    """The answers, lane by lane. The lanes are divided among processes, which start together."""
    clients = [
        subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    pipes = [(each.stdin, each.stdout) for each in clients if each.stdin and each.stdout]
    for first, (asked, said) in enumerate(pipes):
        print(json.dumps([asdict(lane) for lane in lanes[first::processes]]), file=asked, flush=True)
        said.readline()  # wait until it is ready
    start = time.time() + 0.2
    for asked, _ in pipes:
        print(start, file=asked, flush=True)
    answers = [json.loads(said.readline() or "null") for _, said in pipes]
    for each in clients:
        if each.wait():
            raise SystemExit("a client failed: see above")
    return [Streamed(**one) for number in range(len(lanes)) for one in answers[number % processes][number // processes]]


def _be_clients(address: str) -> None:
    lanes = [Lane(**each) for each in json.loads(input())]
    print("ready", flush=True)
    start = float(input())

    def drive(lane: Lane) -> list[Streamed]:
        time.sleep(max(0.0, start + lane.delay - time.time()))
        if lane.until is None:
            return [stream(address, body) for body in lane.bodies]
        end = start + lane.until
        return [stream(address, body) for body in takewhile(lambda _: time.time() < end, cycle(lane.bodies))]

    with ThreadPoolExecutor(max(1, len(lanes))) as threads:
        print(json.dumps([[asdict(one) for one in each] for each in threads.map(drive, lanes)]))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(1000 * cuts[49], 2), "p99_ms": round(1000 * cuts[98], 2)}


if __name__ == "__main__":
    _be_clients(sys.argv[1])
