"""Requests that come and go: tokens per second of a server with `exact` and of one with `one-token` at the same load.

    python benchmarks/serving_ramp.py --levels 1,4,16,64,256,64,16,4,1 --prompts spec_bench.jsonl --out ramp.json

Both servers are loaded at once and get the same clients in turns. At each level so many clients are there, each with
one request after the other; a level's first second is not counted, as clients leave or arrive. Tokens of an answer are
divided among seconds as its chunks are.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import Lane, Server, ask_all, mars_serve, spread, stream

from mars.evaluation.plan import PROMPTS, read_prompts, sizes_of
from mars.evaluation.provenance import collect

DIALS = ("one-token", "exact")


def lanes_of(levels: Sequence[int], seconds: float, bodies: Sequence[dict[str, Any]]) -> list[Lane]:
    """A client comes when a level needs it and stays until one does not."""
    lanes, draw = [], random.Random(0)
    for number in range(max(levels)):
        is_here = [False, *(level > number for level in levels), False]
        begins = [index for index, (before, now) in enumerate(pairwise(is_here)) if now and not before]
        ends = [index for index, (before, now) in enumerate(pairwise(is_here)) if before and not now]
        for begin, end in zip(begins, ends, strict=True):
            own = draw.sample(bodies, min(len(bodies), 64))
            lanes.append(Lane(own, delay=begin * seconds, until=end * seconds))
    return lanes


def measure(server: Server, lanes: Sequence[Lane], levels: Sequence[int], seconds: float, processes: int) -> Any:
    """What each level wrote in its whole seconds but the first, and how long a token took."""
    seen = ask_all(server.address, lanes, processes)
    begun = min(each.started for each in seen)
    written: dict[int, float] = defaultdict(float)
    for each in seen:
        for second, chunks in each.by_second.items():
            written[int(second)] += each.tokens * chunks / each.chunks
    rows = []
    for index, level in enumerate(levels):
        start, end = begun + index * seconds, begun + (index + 1) * seconds
        counted = [written[second] for second in range(int(start) + 2, int(end))]
        times = [each.per_token for each in seen if start <= each.started < end and each.per_token is not None]
        rows.append({"requests": level, "by_second": counted, "per_token": spread(times) if len(times) > 1 else None})
    every = spread([each.per_token for each in seen if each.per_token is not None])
    return {"levels": rows, "per_token": every, "answers": len(seen)}


def compare(passes: dict[str, list[Any]], levels: Sequence[int]) -> list[dict[str, Any]]:
    """By level and dial, the pass with the most tokens; `exact`'s slowest second over one-token's average one."""
    rows = []
    for index, level in enumerate(levels):
        best = {
            dial: max((each["levels"][index] for each in found), key=lambda row: mean(row["by_second"]))
            for dial, found in passes.items()
        }
        speeds = {dial: mean(row["by_second"]) for dial, row in best.items()}
        rows.append(
            {
                "requests": level,
                "tokens_per_second": speeds,
                "ratio": speeds["exact"] / speeds["one-token"],
                "slowest_second": min(best["exact"]["by_second"]) / speeds["one-token"],
                "p99_ms": {dial: row["per_token"] and row["per_token"]["p99_ms"] for dial, row in best.items()},
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("requests", "one-token, tokens/s", "exact", "over one-token", "slowest second", "ms per token, p99")
    for row in rows:
        one, exact = (f"{row['tokens_per_second'][dial]:,.0f}" for dial in DIALS)
        times = " / ".join("-" if row["p99_ms"][dial] is None else f"{row['p99_ms'][dial]:.1f}" for dial in DIALS)
        cells = (one, exact, f"{row['ratio']:.2f}", f"{row['slowest_second']:.2f}", times)
        table.add_row(str(row["requests"]), *cells)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--levels", default="1,4,16,64,256,64,16,4,1", help="requests at once, one after the other")
    parser.add_argument("--seconds", type=float, default=8, help="of a level")
    parser.add_argument("--turns", type=int, default=2, help="of each server")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--memory", type=float, help="of each server's cache: bytes, or on a GPU a share of what is free"
    )
    parser.add_argument("--dtype")
    parser.add_argument("--processes", type=int, default=1, help="that the clients are divided among")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    levels = [size for each in args.levels.split(",") for size in sizes_of("--levels", each)]
    if args.seconds < 4:
        parser.error("--seconds must be 4 or more: the first second of a level is not counted")
    prompts = list(PROMPTS) if args.prompts is None else read_prompts(args.prompts)
    bodies = [
        {"model": args.model, "messages": [{"role": "user", "content": each}] if isinstance(each, str) else each}
        for each in prompts
    ]
    bodies = [each | {"temperature": 0, "max_tokens": args.max_new_tokens} for each in bodies]
    lanes = lanes_of(levels, args.seconds, bodies)
    options = ["--model", args.model, "--rows", max(levels)]
    options += [part for name in ("memory", "dtype") if (value := getattr(args, name)) for part in (f"--{name}", value)]
    passes: dict[str, list[Any]] = {dial: [] for dial in DIALS}
    with ExitStack() as stack:
        servers = {dial: stack.enter_context(mars_serve(*options, "--dial", dial)) for dial in DIALS}
        for server in servers.values():
            stream(server.address, bodies[0])  # the first request is slower
        for _ in range(args.turns):
            for dial, server in servers.items():
                passes[dial].append(measure(server, lanes, levels, args.seconds, args.processes))
    rows = compare(passes, levels)
    show(rows)
    for dial, found in passes.items():
        print(f"{dial}: p99 of a token {min(each['per_token']['p99_ms'] for each in found):.2f} ms over all levels")
    if args.out:
        asked = {key: str(value) for key, value in vars(args).items()}
        facts = {"options": asked, "rows": rows, "passes": passes, "provenance": collect()}
        args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
