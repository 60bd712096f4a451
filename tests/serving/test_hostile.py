"""Hostile clients beside well-behaved ones.

Ten polite clients stream answers all the time, before, during and after an attack. They have to get the same texts, and
p99 of their time per token may be at most 1.5 times what it is in the calm before and after. Two things would make that
comparison unfair, and the set-up keeps them out of it:

- Requests that are admitted share the steps of the engine with the polite ones, by right. So ``--rows`` is as many as
  there are polite clients and neighbours together, and in the calm phases the neighbours' rows are kept busy by polite
  requests of the same length: hostile requests take over rows that are in use anyway.
- Hostile clients need processor time, and here they run on the server's machine. They are a process of their own with
  the lowest priority, and do a bounded number of things per second.

``MARS_HOSTILE_SECONDS``: how long it all takes, 90 by default; 3600 for the long run.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx2 as httpx
import psutil

from tests.serving.conftest import CHAT, Address, engine_at, number, process_at, serving, until

SECONDS = float(os.environ.get("MARS_HOSTILE_SECONDS", "90"))
ROUNDS = 2  # of calm and attack; the better one counts, since something else may use the machine
POLITE, NEIGHBOURS = 10, 6
LENGTH = 200
PAUSE = 0.15  # seconds between two deeds of a hostile client
SLOWER = 1.5
GROWTH = 48 * 2**20  # bytes that a process may grow by in the second half of the attack


@dataclass
class Phase:
    texts: list[str] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.per_token, n=100)[98]


def polite_request(client: int) -> dict:
    letters = "abcdefghij"[client % 10 :] + "abcdefghij"[: client % 10]
    content = [{"role": "user", "content": letters}]
    return CHAT | {"messages": content, "max_tokens": LENGTH, "ignore_eos": True, "stream": True, "dial": "one-token"}


async def stream(http: httpx.AsyncClient, body: dict, phase: Phase | None = None) -> str:
    """One answer; the time of each chunk's tokens goes into the phase."""
    text, last, ended = "", None, False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200 and phase is not None:
            phase.problems.append(f"{response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            ended |= line == "data: [DONE]"
            if not line.startswith("data: {") or not (choices := json.loads(line[6:]).get("choices")):
                continue
            if piece := choices[0]["delta"].get("content"):
                now = time.perf_counter()
                if last is not None and phase is not None:
                    phase.per_token.append((now - last) / len(piece))
                text, last = text + piece, now
    if not ended and phase is not None:
        phase.problems.append(f"an answer broke off after {text!r}")
    return text


async def polite(address: str, seconds: float, *, neighbours: bool) -> Phase:
    phase, end = Phase(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)

    async def repeat(client: int, counted: Phase | None) -> None:
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
            while time.monotonic() < end:
                text = await stream(http, polite_request(client), counted)
                if counted is not None:
                    counted.texts.append(f"{client}: {text}")

    others = [repeat(POLITE + n, None) for n in range(NEIGHBOURS if neighbours else 0)]
    await asyncio.gather(*(repeat(client, phase) for client in range(POLITE)), *others)
    return phase


# --- the others


def hostile_body(dice: random.Random) -> dict:
    """Any combination of options, some of which are refused."""
    options = {
        "n": dice.choice([1, 1, 2, 5, 128]),
        "temperature": dice.choice([0, 0.7, 2]),
        "top_p": dice.choice([1, 0.3]),
        "top_k": dice.choice([0, 3]),
        "min_p": dice.choice([0, 0.2]),
        "presence_penalty": dice.choice([0, 1.5]),
        "repetition_penalty": dice.choice([1, 1.3]),
        "logit_bias": {str(token): dice.uniform(-9, 9) for token in range(dice.choice([1, 10, 5000]))},
        "stop": dice.choice(["a", ["ab", "cc"], [str(n) for n in range(16)]]),
        "logprobs": True,
        "top_logprobs": dice.choice([0, 5]),
        "seed": dice.randrange(2**40),
        "min_tokens": 5,
        "ignore_eos": True,
        "dial": dice.choice(["one-token", "exact", "relaxed=0.2", "threshold=0.3", "nonsense"]),
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": hostile_schema(dice)}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": hostile_schema(dice), "strict": True}}],
        "tool_choice": dice.choice(["auto", "required", "none"]),
        "unknown": 1,
    }
    chosen = dice.sample(sorted(options), dice.choice([0, 1, 2, 4]))
    body = CHAT | {"max_tokens": dice.choice([1, 50, LENGTH]), "stream": dice.random() < 0.5}
    return body | {name: options[name] for name in chosen}


def hostile_schema(dice: random.Random) -> dict:
    big = {"anyOf": [{"type": "object", "properties": {f"k{n}": {"type": "string"}}} for n in range(300)]}
    patterns = ("(a|a)*b", "(a{1,99}){1,99}", "((a?){50}){50}", "(.*a){20}")
    return dice.choice([big, {"type": "nonsense"}, *({"type": "string", "pattern": each} for each in patterns)])


async def attack(address: str, seconds: float, seed: int) -> None:
    """One hostile client: something bad, a pause, and so on."""
    url, dice = httpx.URL(address), random.Random(seed)
    end = time.monotonic() + seconds
    held: list[asyncio.StreamWriter] = []

    async def connect(*parts: bytes, read: int = 0) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if read:
            await asyncio.wait_for(reader.read(read), 10)
        return writer

    def head(length: int) -> bytes:
        return f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()

    def post(body: bytes) -> tuple[bytes, bytes]:
        return head(len(body)), body

    async def nothing() -> None:
        held.append(await connect())

    async def slow_headers() -> None:
        held.append(await connect(b"POST /v1/", b"chat/comp", b"letions HTTP/1.1\r\nHost: local"))

    async def slow_body() -> None:
        held.append(await connect(head(1000), b'{"model"', b': "let'))

    async def hang_up() -> None:
        body = json.dumps(hostile_body(dice) | {"stream": True, "max_tokens": LENGTH}).encode()
        (await connect(*post(body), read=dice.choice([0, 1, 300]))).transport.abort()

    async def never_read() -> None:
        held.append(await connect(*post(json.dumps(hostile_body(dice)).encode())))

    async def huge() -> None:
        (await connect(head(50_000_000), b" " * 2**20, read=10)).close()

    async def deep() -> None:
        (await connect(*post(b"[" * 100_000 + b"]" * 100_000), read=10)).close()

    async def anything() -> None:
        (await connect(*post(json.dumps(hostile_body(dice)).encode()), read=100)).close()

    deeds: list[Callable[[], Awaitable[None]]] = [
        *(nothing, slow_headers, slow_body, hang_up, hang_up, never_read, huge, deep, anything, anything, anything)
    ]
    while time.monotonic() < end:
        with suppress(OSError, TimeoutError):
            await dice.choice(deeds)()
        if len(held) > 20:
            held.pop(0).transport.abort()
        await asyncio.sleep(PAUSE * dice.uniform(0.5, 1.5))
    for each in held:
        each.transport.abort()


def be_hostile(address: str, seconds: float, ready: Event) -> None:
    ready.set()

    async def all_of_them() -> None:
        await asyncio.gather(*(attack(address, seconds, seed) for seed in range(NEIGHBOURS)))

    asyncio.run(all_of_them())


def memory(address: str) -> list[int]:
    return [each.memory_info().rss for each in (process_at(address), engine_at(address))]


def test_hostile_clients_neither_stall_nor_break_the_others(letters: Path) -> None:
    options = ("--rows", POLITE + NEIGHBOURS, "--max-waiting", 64, "--max-connections", 100)
    with serving(*options, model=letters) as address:
        asyncio.run(polite(address, SECONDS / 15, neighbours=True))  # to warm up
        calm = [asyncio.run(polite(address, SECONDS / 8, neighbours=True))]
        attacked, ratios = list[Phase](), list[float]()
        for _ in range(ROUNDS):
            during, sizes = under_attack(address, SECONDS / 4)
            calm.append(asyncio.run(polite(address, SECONDS / 8, neighbours=True)))
            attacked.append(during)
            ratios.append(during.p99 / max(calm[-1].p99, calm[-2].p99))
        for phase in (*calm, *attacked):
            assert not phase.problems and phase.texts
            assert set(phase.texts) == set(calm[0].texts) and len(set(phase.texts)) == POLITE
        print(
            f"p99 per token: calm {[each.p99 for each in calm]}, attacked {[each.p99 for each in attacked]} s; {sizes}"
        )
        print(Counter((line["path"], line["status"]) for line in address.events("request")))
        assert min(ratios) < SLOWER, f"p99 per token is {ratios} times as long"
        for first, last in zip(*sizes, strict=True):
            assert last - first < GROWTH, f"a process has grown from {first} to {last} bytes"
        until(lambda: not any(number(address, name) for name in ("num_requests_running", "num_requests_waiting")), 30)
        assert number(address, "kv_cache_usage_perc") == 0
        assert 'mars:open_requests{model_name="letters"} 0.0' in httpx.get(f"{address}/metrics").text
        until(lambda: open_connections(address) == 0, 30)
        assert number_of_restarts(address) == 0
        assert not [line for line in address.log.read_text().splitlines() if "engine lost" in line]


def under_attack(address: Address, seconds: float) -> tuple[Phase, tuple[list[int], list[int]]]:
    """What polite clients see of an attack, and the memory of both processes in its middle and at its end."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    attackers = context.Process(target=be_hostile, args=(str(address), seconds, ready))
    attackers.start()
    psutil.Process(attackers.pid).nice(19)
    assert ready.wait(60)  # its imports take seconds
    first = asyncio.run(polite(address, seconds / 2, neighbours=False))
    middle = memory(address)
    second = asyncio.run(polite(address, seconds / 2, neighbours=False))
    attackers.join(60)
    assert attackers.exitcode == 0
    whole = Phase(*(one + two for one, two in zip(vars(first).values(), vars(second).values(), strict=True)))
    return whole, (middle, memory(address))


def open_connections(address: str) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in process_at(address).net_connections("tcp"))


def number_of_restarts(address: str) -> float:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("mars:engine_restarts{")).split()[1])
