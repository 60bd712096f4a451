"""Load on a real server: the outcome of every request, leaks, and speed.

    python benchmarks/serving_load.py --model smollm2-135m --clients 16 --minutes 5 --kill --out load.json

Clients chat without a pause, some as streams, some with temperature; one in ten hangs up on the way. With ``--kill``
the engine's process is killed half-way. Requests may fail from then until the server is ready again, and at no other
time; none may be lost, that is end without an answer and without an error. Afterwards no request may run and no page of
the cache may be in use. ``--memory`` is small, so that the cache is full soon and growing memory would show.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table
from server_process import mars_serve, spread

from mars.evaluation.plan import PROMPTS, read_prompts
from mars.evaluation.provenance import collect

HANG_UP = 0.1
"""Share of the requests"""
PATIENCE = 300.0
"""Seconds after which a request counts as lost"""
GRACE = 2.0
"""Seconds after the server is ready again in which an error may still arrive"""
MIB = 2**20


@dataclass(slots=True)
class Asked:
    """A request and its outcome."""

    started: float
    """Seconds since the load began, as all times here"""
    stream: bool
    ended: float = 0.0
    outcome: str = "lost"
    """finished, refused, failed, hung up, or lost"""
    error: str | None = None
    tokens: int = 0
    first: float | None = None
    """Seconds to the first text of a stream"""
    per_token: float | None = None
    """Seconds per token after those that came first"""


@dataclass(slots=True)
class Sample:
    """The state of the server at one time."""

    time: float
    server_mib: float
    engine: int | None
    """Its process; None: there is none"""
    engine_mib: float
    running: float
    waiting: float
    cache: float
    """Share in use"""
    tokens: float
    """Generated so far"""
    restarts: float


@dataclass(slots=True)
class Load:
    """The state that clients and monitors share."""

    address: str
    process: psutil.Process
    asked: list[Asked] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    killed: float | None = None
    ready: float | None = None
    """When it was ready again after that"""
    start: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.start

    @property
    def usual(self) -> float:
        """Seconds that an answer takes, at most of late"""
        times = [each.ended - each.started for each in self.asked[-100:] if each.outcome == "finished"]
        return max(times, default=1.0)

    def engine(self) -> psutil.Process | None:
        for each in self.process.children():
            with contextlib.suppress(psutil.Error):  # it may end while we look
                if "spawn_main" in " ".join(each.cmdline()):
                    return each
        return None

    def is_excused(self, asked: Asked) -> bool:
        """Did it fail because the engine was killed?"""
        if self.killed is None or asked.outcome != "failed":
            return False
        return self.killed <= asked.ended <= (self.ready or float("inf")) + GRACE


# --- the clients


async def chat(load: Load, prompts: Sequence[Any], limit: int, until: float, seed: int) -> None:
    """One request after the other."""
    draw = random.Random(seed)
    client = openai.AsyncOpenAI(base_url=f"{load.address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    async with client:
        model = (await client.models.list()).data[0].id
        while load.now < until:
            prompt = draw.choice(prompts)
            request = {
                "model": model,
                "messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
                "max_tokens": draw.randint(limit // 2, limit),
                "temperature": draw.choice([0, 0, 0.8]),
            }
            asked = Asked(load.now, stream=draw.random() < 0.5)
            load.asked.append(asked)
            patience = draw.random() if draw.random() < HANG_UP else None
            try:
                if asked.stream:
                    await _stream(client, request, asked, patience and patience * limit)
                else:
                    await _whole(client, request, asked, patience and patience * load.usual)
            except openai.RateLimitError as error:
                asked.outcome, asked.error = "refused", error.message
            except openai.APIConnectionError as error:
                asked.error = repr(error.__cause__ or error)
            except openai.APIError as error:
                asked.outcome, asked.error = "failed", error.message
            asked.ended = load.now
            if asked.outcome in ("refused", "failed"):
                await asyncio.sleep(1)  # as Retry-After says


async def _whole(client: openai.AsyncOpenAI, request: dict[str, Any], asked: Asked, patience: float | None) -> None:
    """``patience``: seconds after which to hang up."""
    try:
        async with asyncio.timeout(patience):
            answer = await client.chat.completions.create(**request)
    except TimeoutError:
        asked.outcome = "hung up"
        return
    if answer.choices[0].finish_reason and answer.usage:
        asked.outcome, asked.tokens = "finished", answer.usage.completion_tokens


async def _stream(client: openai.AsyncOpenAI, request: dict[str, Any], asked: Asked, patience: float | None) -> None:
    """``patience``: tokens after which to hang up."""
    asked_at, opening, last = time.perf_counter(), 0, 0.0
    more = {"stream_options": {"include_forwards": True}}
    async with await client.chat.completions.create(stream=True, extra_body=more, **request) as stream:
        async for chunk in stream:
            last = time.perf_counter() - asked_at
            new = sum(tokens for tokens, _ in (chunk.model_extra or {}).get("mars", {}).get("forwards", []))
            asked.tokens += new
            if new and asked.first is None:
                asked.first, opening = last, new
            if patience is not None and asked.tokens > patience:
                asked.outcome = "hung up"
                return
            if chunk.choices and chunk.choices[0].finish_reason:
                asked.outcome = "finished"
    if asked.first is not None and asked.tokens > opening:
        asked.per_token = (last - asked.first) / (asked.tokens - opening)


# --- monitoring


async def watch(load: Load, http: httpx2.AsyncClient) -> None:
    """Take a sample every second."""
    while True:
        load.samples.append(await look(load, http))
        await asyncio.sleep(1)


async def look(load: Load, http: httpx2.AsyncClient) -> Sample:
    engine, size = load.engine(), 0.0
    if engine is not None:
        with contextlib.suppress(psutil.Error):
            size = engine.memory_info().rss / MIB
    text = (await http.get("/metrics")).text

    def value(name: str) -> float:
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return Sample(
        time=load.now,
        server_mib=load.process.memory_info().rss / MIB,
        engine=None if engine is None else engine.pid,
        engine_mib=size,
        running=value("vllm:num_requests_running"),
        waiting=value("vllm:num_requests_waiting"),
        cache=value("vllm:kv_cache_usage_perc"),
        tokens=value("vllm:generation_tokens_total"),
        restarts=value("mars:engine_restarts"),
    )


async def kill(load: Load, http: httpx2.AsyncClient, moment: float) -> None:
    """End the engine's process the hard way, and wait until there is another."""
    await asyncio.sleep(moment - load.now)
    if engine := load.engine():
        load.killed = load.now
        engine.kill()
        await asyncio.sleep(0.5)
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.1)
        load.ready = load.now


@contextlib.asynccontextmanager
async def watched(load: Load, http: httpx2.AsyncClient) -> AsyncIterator[None]:
    task = asyncio.create_task(watch(load, http))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def run(load: Load, options: argparse.Namespace) -> Sample:
    """The whole load; returns what the server looks like when it is over."""
    prompts = list(PROMPTS) if options.prompts is None else read_prompts(options.prompts)
    seconds = options.minutes * 60
    async with httpx2.AsyncClient(base_url=load.address, timeout=60) as http, watched(load, http):
        load.start = time.perf_counter()
        work = [chat(load, prompts, options.max_new_tokens, seconds, seed) for seed in range(options.clients)]
        if options.kill:
            work.append(kill(load, http, seconds / 2))
        await asyncio.gather(*work)
        end = await look(load, http)
        while (end.running or end.waiting or end.cache) and load.now < seconds + 60:
            await asyncio.sleep(0.5)
            end = await look(load, http)
        return end


# --- what came of it


def memory(load: Load) -> list[dict[str, Any]]:
    """Of every process when a fifth of its time at work was over, and at its end."""
    series = {"server": [(each.time, each.server_mib) for each in load.samples]}
    for each in load.samples:
        is_loading = load.killed is not None and load.killed <= each.time <= (load.ready or float("inf"))
        if each.engine is not None and not is_loading:
            series.setdefault(f"engine {each.engine}", []).append((each.time, each.engine_mib))
    rows = []
    for name, sizes in series.items():
        early, late = sizes[len(sizes) // 5][1], sizes[-1][1]
        rows.append({"process": name, "early_mib": early, "late_mib": late, "growth": late / early - 1})
    return rows


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [each for each in values if each is not None]
    return spread(known) if len(known) > 1 else None


def summary(load: Load, end: Sample, seconds: float) -> dict[str, Any]:
    outcomes = Counter("failed (killed)" if load.is_excused(each) else each.outcome for each in load.asked)
    kinds = ("finished", "hung up", "refused", "failed (killed)", "failed", "lost")
    within = [each for each in load.samples if each.time <= seconds]
    wrong = []
    if outcomes["failed"] or outcomes["lost"]:
        wrong.append("requests failed or were lost")
    if end.running or end.waiting or end.cache:
        wrong.append("requests or pages are in use after the end")
    if end.restarts != (load.killed is not None):
        wrong.append(f"the engine was started again {end.restarts:g} times")
    return {
        "requests": {kind: outcomes[kind] for kind in kinds},
        "requests_per_second": outcomes["finished"] / seconds,
        "tokens_per_second": within[-1].tokens / within[-1].time,
        "first_token": _spread([each.first for each in load.asked]),
        "per_token": _spread([each.per_token for each in load.asked]),
        "most_running": max(each.running for each in load.samples),
        "most_waiting": max(each.waiting for each in load.samples),
        "most_cache": max(each.cache for each in load.samples),
        "seconds_without_engine": load.ready - load.killed if load.ready and load.killed else None,
        "memory": memory(load),
        "end": asdict(end),
        "errors": dict(Counter(each.error for each in load.asked if each.error).most_common(20)),
        "wrong": wrong,
    }


def show(found: dict[str, Any]) -> None:
    table = Table("what", "value", show_header=False)
    for kind, count in found["requests"].items():
        table.add_row(f"requests {kind}", str(count))
    table.add_row("requests/s, tokens/s", f"{found['requests_per_second']:.2f}, {found['tokens_per_second']:.1f}")
    for name in ("first_token", "per_token"):
        if times := found[name]:
            table.add_row(f"{name.replace('_', ' ')}, p50 and p99", "{p50_ms:.0f} ms, {p99_ms:.0f} ms".format(**times))
    for row in found["memory"]:
        table.add_row("MiB of the {process}".format(**row), "{early_mib:.0f} → {late_mib:.0f}".format(**row))
    end = found["end"]
    table.add_row("running, waiting, cache at the end", f"{end['running']:g}, {end['waiting']:g}, {end['cache']:g}")
    if found["seconds_without_engine"]:
        table.add_row("seconds without engine", f"{found['seconds_without_engine']:.1f}")
    table.add_row("wrong", "; ".join(found["wrong"]) or "nothing")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--memory", type=float, default=256 * MIB, help="of the server's cache")
    parser.add_argument("--kill", action="store_true", help="the engine's process, half-way")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    limits = ["--rows", options.rows, "--max-waiting", options.max_waiting, "--memory", options.memory]
    with mars_serve("--model", options.model, *limits) as server:
        load = Load(server.address, psutil.Process(server.pid))
        end = asyncio.run(run(load, options))
    found = summary(load, end, options.minutes * 60)
    show(found)
    if options.out:
        record = {
            "provenance": collect(),
            "options": vars(options),
            **found,
            "samples": [asdict(each) for each in load.samples],
        }
        options.out.write_text(json.dumps(record, indent=2, default=str) + "\n")
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
