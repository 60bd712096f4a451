"""Tokens per second of vLLM with the plugin, of plain vLLM and of our own engine, by the number of concurrent requests.

    python benchmarks/vllm_speed.py --model smollm2-135m --dtype bfloat16 --prompts spec_bench.jsonl --out vllm.json
    python benchmarks/vllm_speed.py --shape qwen2.5-7b --tokenizer FOLDER --requests 1,4,16 --out shape.json
    python benchmarks/vllm_speed.py --variants mars --requests 8 --profile --out profile.json

Each variant has a process of its own. All are loaded first; then they are measured in turns, never two at a time, for
each number of requests once to warm up and then repeatedly, so that a slow phase of the machine affects all of them.
The median is reported. A request that ends is replaced at once. All generate greedily from the same prompts, in random
order. With a shape the weights are random, and only the time of a step is meaningful: with ``threshold=0`` every draft
is accepted, with ``exact`` hardly any.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from model_shapes import SHAPES, prompts
from rich.console import Console
from rich.table import Table

import mars
from mars.evaluation.plan import PROMPTS, read_prompts
from mars.evaluation.provenance import collect
from mars.models import Settings, load_checkpoint, save_checkpoint

LEAST = 8
"""Requests of a measurement, at least"""
COUNTED = ("forwards", "tokens", "drafts", "accepted")


@dataclass(frozen=True)
class Work:
    """What a variant's process is to load."""

    folder: str
    length: int
    rows: int
    dtype: str | None
    eager: bool
    random: bool
    windows: dict[str, int] | None
    memory: int
    profile: bool


class Generate(Protocol):
    """Generates from prompts, ``size`` of them at a time; returns the texts and the number of steps."""

    def __call__(self, asked: Sequence[list[int]], size: int, limits: Sequence[int]) -> tuple[list[list[int]], int]: ...


class Variant(NamedTuple):
    """A loaded variant."""

    write: Generate
    state: Callable[[], dict[str, Any] | None] = lambda: None
    """The plugin's counts, if there is a plugin"""
    close: Callable[[], None] = lambda: None
    forget: Callable[[], None] = lambda: None
    """Clears the prefix cache; vLLM's is switched off"""


def add_entry_point() -> None:
    """If the package is not installed: let vLLM's processes find the plugin all the same."""
    if any(each.name == "mars" for each in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return
    folder = Path(tempfile.mkdtemp(prefix="mars-plugin-"))
    facts = folder / "mars_decoding-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mars-decoding\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nmars = mars.integrations.vllm:register\n")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def open_vllm(work: Work, **options: Any) -> Variant:
    add_entry_point()
    os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="mars-vllm-cache-")  # variants must not share a folder
    if work.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    shared: dict[str, Any] = {
        "max_model_len": max(512, work.length),
        "max_num_seqs": work.rows,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.02,  # the memory that is in use belongs to others
        "kv_cache_memory_bytes": work.memory,
        "enforce_eager": work.eager,
        "load_format": "dummy" if work.random else "auto",
        "seed": 0,
    }
    if work.dtype:
        shared["dtype"] = work.dtype
    llm = LLM(model=work.folder, **shared | options)
    engine = llm.llm_engine
    numbers = iter(range(10**9))

    def write(asked: Sequence[list[int]], size: int, limits: Sequence[int]) -> tuple[list[list[int]], int]:
        same: dict[str, Any] = {"temperature": 0.0, "ignore_eos": work.random, "output_kind": RequestOutputKind.DELTA}
        params = {limit: SamplingParams(max_tokens=limit, **same) for limit in set(limits)}
        left, steps = deque(enumerate(asked)), 0
        going: dict[str, int] = {}
        texts: list[list[int]] = [[] for _ in asked]
        while left or going:
            while left and len(going) < size:
                index, prompt = left.popleft()
                key = str(next(numbers))
                engine.add_request(key, {"prompt_token_ids": prompt}, params[limits[index]])
                going[key] = index
            outputs = engine.step()
            steps += bool(outputs)
            for each in outputs:
                texts[going[each.request_id]] += each.outputs[0].token_ids
                if each.finished:
                    del going[each.request_id]
        return texts, steps

    def state() -> dict[str, Any] | None:
        return llm.collective_rpc("mars_state")[0] if "speculative_config" in options else None

    return Variant(write, state, engine.engine_core.shutdown)


def open_plugin(work: Work, dial: str) -> Variant:
    windows = {} if work.windows is None else {"windows": work.windows}
    return open_vllm(work, speculative_config={"method": "mars", "dial": dial, **windows})


def open_second_runner(work: Work) -> Variant:
    """vLLM's second model runner, which the plugin always uses and vLLM only for some models."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return open_vllm(work)


def open_engine(work: Work) -> Variant:
    model = mars.load(work.folder, dtype=work.dtype, max_num_seqs=work.rows, memory=work.memory)

    @cache
    def engine() -> Any:
        """Made on first use, since it measures what its steps cost."""
        model.warm_up()
        return model.engine()

    def write(asked: Sequence[list[int]], size: int, limits: Sequence[int]) -> tuple[list[list[int]], int]:
        left, going, steps = deque(enumerate(asked)), list[tuple[int, Any]](), 0
        texts: list[list[int]] = [[] for _ in asked]
        while left or going:
            while left and len(going) < size:
                index, prompt = left.popleft()
                request = model.request(prompt, dial="exact", max_new_tokens=limits[index])
                going.append((index, engine().add_request(request)))
            engine().step()
            steps += 1
            for index, sequence in [each for each in going if each[1].is_finished]:
                texts[index] = sequence.output.token_ids
                going.remove((index, sequence))
        return texts, steps

    return Variant(write, forget=lambda: engine().clear_prefix_cache())


VARIANTS: dict[str, Callable[[Work], Variant]] = {
    "plain": open_vllm,
    "plain-v2": open_second_runner,
    "plain-sync": lambda work: open_vllm(work, async_scheduling=False),
    "mars": lambda work: open_plugin(work, "exact"),
    "one-token": lambda work: open_plugin(work, "one-token"),
    "all-kept": lambda work: open_plugin(work, "threshold=0"),
    "engine": open_engine,
}


def work_alone(variant: str, work: Work, told: Connection) -> None:
    """A variant's process: load, then do what the parent asks."""
    try:
        begun = time.monotonic()
        mine = VARIANTS[variant](work)
        print(f"{variant}: loaded in {time.monotonic() - begun:.0f} s", flush=True)
        told.send(None)
        with suppress(EOFError):  # until the parent closes the connection
            while True:
                what, *asked = told.recv()
                told.send(profile(mine.write, *asked) if what == "profile" else timed(mine, *asked))
        mine.close()
    except BaseException:
        traceback.print_exc()
        print(f"{variant}: failed", flush=True)


def timed(mine: Variant, *asked: Any) -> dict[str, Any]:
    mine.forget()
    before, begun = mine.state(), time.perf_counter()
    texts, steps = mine.write(*asked)
    seconds, after = time.perf_counter() - begun, mine.state()
    counts = {key: after[key] - before[key] for key in COUNTED} if before and after else None
    return {"texts": texts, "steps": steps, "seconds": seconds, "counts": counts}


def profile(write: Generate, *asked: Any) -> dict[str, Any]:
    """The time of a step by kernel and by host function."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        _, steps = write(*asked)
    events = seen.key_averages()
    kernels = [each for each in events if each.device_type.name == "CUDA"]
    calls = {each.key: each.count / steps for each in events if each.key.startswith(("cuda", "cu"))}
    largest = sorted(kernels, key=lambda each: -each.self_device_time_total)[:12]
    host = sorted(events, key=lambda each: -each.self_cpu_time_total)[:12]
    return {
        "steps": steps,
        "kernels_us_per_step": sum(each.self_device_time_total for each in kernels) / steps,
        "calls_per_step": calls,
        "kernels_us": {each.key: each.self_device_time_total / steps for each in largest},
        "host_us": {each.key: each.self_cpu_time_total / steps for each in host},
    }


@dataclass
class Measured:
    """A variant's process, seen from the parent."""

    variant: str
    process: Any
    line: Connection

    def ask(self, what: str, *asked: Any) -> Any:
        self.line.send((what, *asked))
        return self.line.recv()


@contextmanager
def started(variants: Sequence[str], work: Work) -> Iterator[list[Measured]]:
    """The variants that could be loaded."""
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for variant in variants:
        here, there = spawn.Pipe()
        process = spawn.Process(target=work_alone, args=(variant, work, there))
        process.start()
        there.close()
        processes.append(Measured(variant, process, here))
    try:
        yield [each for each in processes if _is_loaded(each)]
    finally:
        for each in processes:
            each.line.close()
        for each in processes:
            each.process.join()


def _is_loaded(measured: Measured) -> bool:
    try:
        measured.line.recv()
    except EOFError:
        return False
    return True


def measure(variants: Sequence[Measured], asked: list[list[int]], size: int, limit: int, repeats: int) -> list[Any]:
    first = [min(8 + index % 24, limit) for index in range(2 * size)]  # requests that end one by one
    for each in variants:
        each.ask("warm up", (asked * 2)[: 2 * size], size, first)
    passes: dict[str, list[Any]] = {each.variant: [] for each in variants}
    for _ in range(repeats):
        for each in variants:
            passes[each.variant].append(each.ask("write", asked, size, [limit] * len(asked)))
    plain = passes.get("plain", [None])[0]
    rows = [summed(name, size, found, plain and plain["texts"]) for name, found in passes.items()]
    for row in rows:
        show(row, rows[0])
    return rows


def summed(name: str, size: int, passes: Sequence[dict[str, Any]], plain: list[list[int]] | None) -> dict[str, Any]:
    tokens = [sum(map(len, each["texts"])) for each in passes]
    row: dict[str, Any] = {
        "variant": name,
        "requests": size,
        "seconds": [each["seconds"] for each in passes],
        "tokens": tokens,
        "tokens_per_second": median(count / each["seconds"] for count, each in zip(tokens, passes, strict=True)),
        "ms_per_step": median(1000 * each["seconds"] / each["steps"] for each in passes),
        "tokens_per_step": median(count / each["steps"] for count, each in zip(tokens, passes, strict=True)),
    }
    if passes[0]["counts"]:
        counts = {key: sum(each["counts"][key] for each in passes) for key in COUNTED}
        row |= {"tokens_per_forward": counts["tokens"] / counts["forwards"], "counts": counts}
    if plain is not None:
        row["same_text"] = sum(map(list.__eq__, passes[0]["texts"], plain)) / len(plain)
    return row


def show(row: dict[str, Any], first: dict[str, Any]) -> None:
    said = f"{row['variant']:12} {row['requests']:4} requests {row['tokens_per_second']:9,.0f} tokens/s"
    said += f" {row['ms_per_step']:7.3f} ms a step {row.get('tokens_per_forward', 1):5.2f} tokens a forward"
    said += f"  {row['tokens_per_second'] / first['tokens_per_second']:.2f}x {first['variant']}"
    said += f", step {row['ms_per_step'] / first['ms_per_step']:.2f}x, same text {row.get('same_text', 1):.0%}"
    print(said, flush=True)


def save_model(model: str, dtype: str | None, folder: str) -> None:
    save_checkpoint(load_checkpoint(model, dtype=dtype, device="cpu"), Path(folder))


def save_shape(shape: str, tokenizer: str, folder: str) -> None:
    """Without weights: vLLM makes random ones."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.for_model(**SHAPES[shape])
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    generation = GenerationConfig()
    Settings(5, block_size=4, dial="exact").write(generation)
    generation.save_pretrained(folder)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(row["variant"] for row in rows))
    made = Table("requests", *names)
    for size in dict.fromkeys(row["requests"] for row in rows):
        here = {row["variant"]: row for row in rows if row["requests"] == size}
        plain = here.get("plain")
        cells = []
        for name in names:
            row = here.get(name)
            ratio = f" {row['tokens_per_second'] / plain['tokens_per_second']:.2f}x" if row and plain else ""
            cells.append("" if row is None else f"{row['tokens_per_second']:,.0f}{ratio}")
        made.add_row(str(size), *cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="or a folder that vLLM can load, with --as-it-is")
    parser.add_argument("--as-it-is", action="store_true", help="the model is such a folder: do not save a copy")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--tokenizer", help="for a shape: any tokenizer")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--requests", default="1,8,32,64,128,256", help="at once")
    parser.add_argument("--rounds", type=int, default=2, help="requests per concurrent one")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--variants", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--windows", type=json.loads, help='the plugin\'s setting, such as {"128": 0}')
    parser.add_argument("--memory", type=float, default=6, help="GiB of each variant's cache")
    parser.add_argument("--eager", action="store_true", help="no compiling, no CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="only report where the time of steps goes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chosen = args.variants or (
        "plain,plain-v2,mars,all-kept" if args.shape else "plain,mars,one-token,plain-sync,engine"
    )
    sizes = [int(each) for each in args.requests.split(",")]
    found: dict[str, Any] = {"provenance": collect(), "rows": [], "profiles": []}
    with tempfile.TemporaryDirectory(prefix="mars-vllm-") as scratch:
        folder = args.model if args.as_it_is else str(Path(scratch) / "model")
        if args.shape:
            save_shape(args.shape, args.tokenizer, folder)
            asked = prompts(max(sizes), SHAPES[args.shape]["vocab_size"])
        else:
            if not args.as_it_is:
                save_model(args.model, args.dtype, folder)
            asked = tokenized(folder, list(PROMPTS) if args.prompts is None else read_prompts(args.prompts))
            random.Random(0).shuffle(asked)  # files have one kind of prompt after the other
        length = max(map(len, asked)) + args.max_new_tokens + 16
        memory = int(args.memory * 2**30)
        work = Work(
            folder, length, max(sizes), args.dtype, args.eager, bool(args.shape), args.windows, memory, args.profile
        )
        with started(chosen.split(","), work) as variants:
            for size in sizes:
                if args.profile:
                    told = ([*asked, *asked][:size], size, [24] * size)
                    for each in variants:
                        each.ask("warm up", *told)
                        about = {"variant": each.variant, "requests": size}
                        found["profiles"].append(about | each.ask("profile", *told))
                else:
                    count = max(size * args.rounds, LEAST)
                    these = (asked * (count // len(asked) + 1))[:count]
                    found["rows"] += measure(variants, these, size, args.max_new_tokens, args.repeats)
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=140).print(table(found["rows"]) if found["rows"] else found["profiles"])


def tokenized(folder: str, asked: Sequence[Any]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": each}] if isinstance(each, str) else list(each) for each in asked]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]


if __name__ == "__main__":
    main()
