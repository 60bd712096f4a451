"""Tokens per second through HTTP streams, compared with the engine called directly and with vLLM's server.

    python benchmarks/serving_speed.py --model smollm2-135m --requests 1024 --at-once 32 --peer vllm --out speed.json

All get the same prompts, the same number of requests at once and the same client, each in a process of its own. All
are started first and then measured in turns; the best turn of each counts. Requests are distributed to clients
beforehand, and a client sends its next request as soon as one has ended: the longest share determines the time, for
the engine as for the servers. The engine detokenises, too. Prefix caches are on everywhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import Lane, ask_all, mars_serve, running, spread

import mars
from mars.core.sequence import Sequence as EngineSequence
from mars.engine.run import attach_processor
from mars.evaluation.plan import PROMPTS, read_prompts
from mars.evaluation.provenance import collect
from mars.models import load_checkpoint, save_checkpoint

Chat = list[dict[str, Any]]


@cache
def load(model: str, dtype: str | None, at_once: int, memory: float | None) -> mars.Model:
    loaded = mars.load(model, dtype=dtype, max_num_seqs=at_once, memory=memory)
    loaded.warm_up()
    return loaded


def directly(
    options: tuple[Any, ...], first: Sequence[Chat], chats: Sequence[Chat], at_once: int, limit: int
) -> dict[str, Any]:
    """The engine, in this process; it is loaded once, by these ``options``."""
    loaded = load(*options)
    engine = loaded.engine()

    def work(chats: Sequence[Chat]) -> dict[str, Any]:
        asked = [loaded.request(chat, dial="exact", max_new_tokens=limit) for chat in chats]
        lanes = [deque(asked[lane::at_once]) for lane in range(at_once)]
        going: dict[int, EngineSequence] = {}
        tokens, started, waits = 0, time.perf_counter(), list[float]()
        while any(lanes) or going:
            for number, lane in enumerate(lanes):
                if lane and number not in going:
                    going[number] = engine.add_request(lane.popleft())
                    attach_processor(engine, going[number])
            engine.step()
            for number, sequence in [each for each in going.items() if each[1].is_finished]:
                tokens += sequence.output.num_tokens
                assert sequence.output.text
                waits.append(sequence.output.times[0])
                del going[number]
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "tokens_per_second": tokens / seconds, "first_token": spread(waits)}

    work(first)
    return work(chats)


def through_http(
    first: Sequence[Chat],
    chats: Sequence[Chat],
    at_once: int,
    limit: int,
    processes: int,
    address: str,
    name: str,
) -> dict[str, Any]:
    def bodies(chats: Sequence[Chat]) -> list[dict[str, Any]]:
        asked = {"model": name, "temperature": 0, "max_tokens": limit}
        return [asked | {"messages": chat} for chat in chats]

    lanes = [Lane(bodies(chats[lane::at_once])) for lane in range(at_once)]
    ask_all(address, [Lane([body]) for body in bodies(first)], processes)
    seen = ask_all(address, lanes, processes)
    tokens = sum(each.tokens for each in seen)
    seconds = max(each.ended for each in seen) - min(each.started for each in seen)
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "first_token": spread([each.first for each in seen]),
        "per_token": spread([each.per_token for each in seen if each.per_token is not None]),
        "tokens_per_chunk": tokens / sum(each.chunks - 3 for each in seen),
    }


def best(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return max(turns, key=lambda each: float(each["tokens_per_second"]))


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    table = Table("", "tokens/s", "of the engine", "ms to the first token", "p99", "ms per token", "p99")
    engine = best(found["engine"])["tokens_per_second"]
    for name, turns in found.items():
        each = best(turns)
        row = [name, f"{each['tokens_per_second']:,.0f}", f"{each['tokens_per_second'] / engine:.2f}"]
        for kind in ("first_token", "per_token"):
            row += [f"{each[kind][part]:.2f}" for part in ("p50_ms", "p99_ms")] if kind in each else []
        table.add_row(*row)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8, help="that the clients are divided among")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", type=float, help="for keys and values, bytes: all are loaded at the same time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts: list[Any] = list(PROMPTS) if args.prompts is None else read_prompts(args.prompts)
    chats: list[Chat] = [
        [{"role": "user", "content": each}] if isinstance(each, str) else [dict(one) for one in each]
        for each in islice(cycle(prompts), args.at_once + args.requests)
    ]
    first, chats = chats[: args.at_once], chats[args.at_once :]  # to warm up with, and to measure
    shared = (args.at_once, args.max_new_tokens)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def keep(name: str, figures: dict[str, Any]) -> None:
        """Written at once, so that a run that is cut off leaves its results."""
        found[name].append(figures)
        if args.out:
            asked = {key: str(value) for key, value in vars(args).items()}
            results = {"found": {name: best(turns) for name, turns in found.items()}, "turns": found}
            args.out.write_text(json.dumps({"provenance": collect(), "options": asked, **results}, indent=2) + "\n")

    http = partial(through_http, first, chats, *shared, args.processes)
    loading = (args.model, args.dtype, args.at_once, args.memory)
    options = ["--model", args.model, "--name", "model", "--rows", args.at_once, "--dial", "exact"]
    options += [part for name in ("memory", "dtype") if (value := getattr(args, name)) for part in (f"--{name}", value)]
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
        ready = pool.submit(directly, loading, first, first, *shared)
        addresses = {"mars serve": stack.enter_context(mars_serve(*options, "--log-level", "warning")).address}
        ready.result()
        if args.peer:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            save_checkpoint(load_checkpoint(args.model, dtype=args.dtype, device="cpu"), folder)
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", 8123]
            command += ["--served-model-name", "model", "--max-num-seqs", args.at_once, "--enable-prefix-caching"]
            command += ["--disable-uvicorn-access-log", "--gpu-memory-utilization", 0.3]
            stack.enter_context(running(command, r"(Application startup complete)"))
            addresses["vllm serve"] = "http://127.0.0.1:8123"
        for _ in range(args.turns):
            keep("engine", pool.submit(directly, loading, first, chats, *shared).result())
            for name, address in addresses.items():
                keep(name, http(address, "model"))
    show(found)


if __name__ == "__main__":
    main()
