"""The governor in a burst: the same arrivals at a server with a fixed dial and at servers with ``--dial auto``.

    python benchmarks/serving_burst.py --floor threshold=0.5 --rate 0.4 --burst-rate 2 --out burst.json

Requests arrive at random (Poisson) with ``--rate`` per second, and with ``--burst-rate`` from ``--burst`` on. Servers:
``--dial exact``; ``--dial auto`` with the floor; ``--dial auto`` without one. Times are those of the requests that came
in the burst. ``--trace`` keeps the arrivals, which the tests of the governor replay.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from server_process import Lane, Server, ask_all, mars_serve, spread, stream

from mars.evaluation.plan import PROMPTS, read_prompts
from mars.evaluation.provenance import collect


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    body: dict[str, Any]
    in_burst: bool


def arrivals(args: argparse.Namespace) -> list[Arrival]:
    draw, now = random.Random(args.seed), 0.0
    prompts = list(PROMPTS) if args.prompts is None else read_prompts(args.prompts)
    found = list[Arrival]()
    while True:
        in_burst = args.burst[0] <= now < args.burst[1]
        now += draw.expovariate(args.burst_rate if in_burst else args.rate)
        if now >= args.seconds:
            return found
        prompt, limit = draw.choice(prompts), draw.randint(args.max_new_tokens // 2, args.max_new_tokens)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        body = {"model": args.model, "messages": messages, "temperature": 0, "max_tokens": limit}
        found.append(Arrival(now, body, args.burst[0] <= now < args.burst[1]))


def measure(server: Server, coming: Sequence[Arrival], processes: int) -> dict[str, Any]:
    stream(server.address, coming[0].body)  # the first request is slower
    seen = ask_all(server.address, [Lane([each.body], delay=each.at) for each in coming], processes)
    burst = [each for each, arrival in zip(seen, coming, strict=True) if arrival.in_burst]
    weights = [each.tokens for each in seen]
    agreement = sum((each.figures or {})["agreement"] * each.tokens for each in seen) / sum(weights)
    moves = [
        {key: line[key] for key in ("time", "dial", "running", "per_token", "wait")}
        for line in server.events("governor")
    ]
    return {
        "requests": len(seen),
        "in_burst": len(burst),
        "per_token": spread([each.per_token for each in burst if each.per_token is not None]),
        "first_token": spread([each.first for each in burst]),
        "agreement": agreement,
        "tokens": sum(weights),
        "seconds": max(each.ended for each in seen) - min(each.started for each in seen),
        "moves": moves,
        "answers": [asdict(each) for each in seen],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--floor", default="threshold=0.5")
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--burst-rate", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--burst", type=float, nargs=2, default=(30, 60), metavar=("FROM", "TO"), help="in seconds")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--target-token", type=float, default=0.05)
    parser.add_argument("--target-wait", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="that the clients are divided among")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    coming = arrivals(args)
    auto = ["--dial", "auto", "--target-token", args.target_token, "--target-wait", args.target_wait]
    servers = {"exact": ["--dial", "exact"], f"auto, floor {args.floor}": [*auto, "--floor", args.floor], "auto": auto}
    found = {}
    for name, options in servers.items():
        with mars_serve("--model", args.model, "--rows", args.rows, *options) as server:
            found[name] = measure(server, coming, args.processes)
    table = Table("", "ms per token, p50", "p99", "ms to the first, p50", "p99", "agreement", "moves")
    for name, each in found.items():
        times = [each[key][part] for key in ("per_token", "first_token") for part in ("p50_ms", "p99_ms")]
        row = [*(f"{value:.1f}" for value in times), f"{each['agreement']:.4f}"]
        table.add_row(name, *row, ", ".join(move["dial"] for move in each["moves"]))
    Console(width=130).print(table)
    if args.trace:
        tokens = [each["tokens"] for each in found["exact"]["answers"]]
        lines = [[round(each.at, 3), count] for each, count in zip(coming, tokens, strict=True)]
        args.trace.write_text(json.dumps({"arrivals": lines}) + "\n")
    if args.out:
        asked = {key: str(value) for key, value in vars(args).items()}
        args.out.write_text(json.dumps({"provenance": collect(), "options": asked, "found": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
