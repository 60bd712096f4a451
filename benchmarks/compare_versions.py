"""The speed of two versions of this package, in turns: the engine, the plugin for vLLM, and the server.

    python benchmarks/compare_versions.py --before OLD/CHECKOUT --after . --model FOLDER --prompts FILE --out speed.json

Every part of both versions is loaded in a process of its own before the first measurement. Then they work in turns,
never two at a time; the best of the turns counts. ``--model`` is a folder that vLLM can load, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from inspect import signature
from itertools import cycle, islice
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

NEW_TOKENS = 256
DIALS = ("one-token", "exact")
Work = Callable[[str, int, list[list[int]]], int]
"""Answers prompts, so many at once and with this dial; returns the tokens generated"""


def open_engine(model: str, most: int) -> Work:
    """As `mars bench` measures it: ``generate`` of one batch after the other, without cached prompts."""
    import mars

    most_option = "max_num_seqs" if "max_num_seqs" in signature(mars.load).parameters else "rows"
    options: dict[str, Any] = {"dtype": "bfloat16", most_option: most, "memory": 8 * 2**30}
    loaded = mars.load(model, **options)
    loaded.warm_up()
    engine: Any = loaded.engine()

    def work(dial: str, size: int, prompts: list[list[int]]) -> int:
        tokens = 0
        for start in range(0, len(prompts), size):
            if hasattr(engine, "clear_prefix_cache"):
                engine.clear_prefix_cache()
            else:
                engine.pages.release(engine.pages.take(engine.pages.available))
            batch = prompts[start : start + size]
            tokens += sum(len(each.token_ids) for each in loaded.generate(batch, dial=dial, max_new_tokens=NEW_TOKENS))
        return tokens

    return work


def open_plugin(model: str, most: int) -> Work:
    """As the version's own vllm_speed.py measures it."""
    import vllm_speed

    variant = vllm_speed.VARIANTS["mars"](
        vllm_speed.Work(model, 2048, most, "bfloat16", False, False, None, 6 * 2**30, False)
    )

    def work(_dial: str, size: int, prompts: list[list[int]]) -> int:
        texts, _ = variant.write(prompts, size, [NEW_TOKENS] * len(prompts))
        return sum(map(len, texts))

    return work


def be_worker(kind: str, model: str, most: int, address: str) -> None:
    """A process: load one part of one version, then measure when told to."""
    with Client(address) as told:
        work = {"engine": open_engine, "plugin": open_plugin}[kind](model, most)
        told.send("ready")
        while (task := told.recv()) is not None:
            started = time.perf_counter()
            tokens = work(*task)
            told.send(tokens / (time.perf_counter() - started))


def environment(version: Path) -> dict[str, str]:
    paths = [str(version / "src"), str(version / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def worker(kind: str, version: Path, model: str, most: int) -> Iterator[Connection]:
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        command = [sys.executable, "-P", __file__, "--worker", kind, "--model", model, "--most", str(most)]
        command += ["--out", f"{folder}/socket"]  # -P: the scripts of its own version are imported
        process = subprocess.Popen(command, env=environment(version))
        try:
            with listener.accept() as told:
                yield told
                told.send(None)
            process.wait(60)
        finally:
            process.kill()


Speed = Callable[[str, int], float]
"""Tokens per second with a dial and so many requests at once"""


def ask_worker(told: Connection, prompts: list[list[int]], rounds: int) -> Speed:
    def measure(dial: str, size: int) -> float:
        told.send((dial, size, list(islice(cycle(prompts), max(32, rounds * size)))))
        return float(told.recv())

    return measure


def ask_server(address: str, chats: list[list[dict[str, Any]]]) -> Speed:
    from serving_speed import through_http

    def measure(_dial: str, size: int) -> float:
        asked = list(islice(cycle(chats), size + 512))
        found = through_http(asked[:size], asked[size:], size, NEW_TOKENS, 8, address, "model")
        return float(found["tokens_per_second"])

    return measure


@contextmanager
def loaded(
    args: argparse.Namespace, versions: dict[str, Path], chats: list[list[dict[str, Any]]], most: int
) -> Iterator[dict[tuple[str, str], Speed]]:
    """All parts of both versions, loaded at the same time."""
    from server_process import mars_serve

    from mars.models import load_checkpoint

    checkpoint = load_checkpoint(args.model, device="cpu")
    prompts = [checkpoint.encode(chat) for chat in chats]
    parts = [(part, name) for part in args.parts for name in versions]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        workers = {
            (part, name): stack.enter_context(worker(part, versions[name], args.model, most))
            for part, name in parts
            if part != "server"
        }
        options = ("--model", args.model, "--name", "model", "--rows", 32)
        starting = {
            (part, name): threads.submit(stack.enter_context, mars_serve(*options, env=environment(versions[name])))
            for part, name in parts
            if part == "server"
        }
        for key, told in workers.items():
            told.recv()
            print(*key, "ready", flush=True)
        speeds = {key: ask_worker(told, prompts, args.rounds) for key, told in workers.items()}
        yield speeds | {key: ask_server(each.result().address, chats) for key, each in starting.items()}


def measure(
    args: argparse.Namespace, versions: dict[str, Path], chats: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    sizes = [int(size) for size in args.requests.split(",")]
    tasks = [("engine", dial, size) for size in sizes for dial in DIALS]
    tasks += [("plugin", "exact", size) for size in sizes if size in (1, 32)]
    tasks = [task for task in [*tasks, ("server", "exact", 32)] if task[0] in args.parts]
    found: dict[tuple[str, str, int], dict[str, list[float]]] = {task: {} for task in tasks}
    with loaded(args, versions, chats, max(sizes)) as speeds:
        for turn in range(args.turns + 1):
            for part, dial, size in tasks:
                for name in versions if turn % 2 else reversed(versions):
                    speed = speeds[part, name](dial, size)
                    if turn:  # the first one is not counted
                        found[part, dial, size].setdefault(name, []).append(speed)
            print(f"turn {turn} of {args.turns}", flush=True)
            if turn:
                write(args.out, found)
    return rows_of(found)


def rows_of(found: dict[tuple[str, str, int], dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Tokens per second of all turns, the best of each version, and their ratio."""
    rows = []
    for (kind, dial, size), speeds in found.items():
        best = {name: max(each) for name, each in speeds.items()}
        ratio = best["after"] / best["before"]
        rows.append({"part": kind, "dial": dial, "requests": size, "turns": speeds, "best": best, "ratio": ratio})
    return rows


def write(out: Path, found: dict[tuple[str, str, int], dict[str, list[float]]]) -> None:
    from mars.evaluation.provenance import collect

    out.write_text(json.dumps({"provenance": collect(), "rows": rows_of(found)}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout: its src and benchmarks")
    parser.add_argument("--after", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--requests", default="1,8,32,128", help="at once")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["engine", "plugin", "server"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="requests per concurrent one, at least 32 in all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        be_worker(args.worker, args.model, args.most, str(args.out))
        return
    from mars.evaluation.plan import PROMPTS, read_prompts

    given: list[Any] = list(PROMPTS) if args.prompts is None else read_prompts(args.prompts)
    chats = [[{"role": "user", "content": each}] if isinstance(each, str) else list(each) for each in given]
    for row in measure(args, {"before": args.before, "after": args.after}, chats):
        best = ", ".join(f"{name} {speed:,.0f}" for name, speed in row["best"].items())
        print(f"{row['part']:7} {row['dial']:10} {row['requests']:4} requests: {best} tokens/s, {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
