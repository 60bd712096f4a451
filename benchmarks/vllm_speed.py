"""Tokens per second of vLLM with the plugin, of vLLM as it is and of our own engine, by the number of requests at once.

    python benchmarks/vllm_speed.py --model smollm2-135m --dtype bfloat16 --prompts spec_bench.jsonl --out vllm.json
    python benchmarks/vllm_speed.py --shape qwen2.5-7b --tokenizer FOLDER --requests 1,4,16 --out shape.json
    python benchmarks/vllm_speed.py --variants mars --requests 8 --profile --out profile.json

Each variant has a process of its own and one model for all numbers of requests; a request that ends is followed by the
next at once. All write the same prompts greedily, in random order; the file is written after every row. With a shape
the weights are random, so that the time of a step is what counts: with ``threshold=0`` every draft is kept, with
``exact`` hardly any.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_shapes import SHAPES, prompts
from rich.console import Console
from rich.table import Table

import mars
from mars.evaluation.plan import PROMPTS, read_prompts
from mars.evaluation.provenance import collect
from mars.models import Settings, load_checkpoint, save_checkpoint

LEAST = 16
"""Requests of a measurement, at least"""


@dataclass(frozen=True)
class Work:
    """What a variant's process is told."""

    folder: str
    prompts: list[list[int]]
    sizes: list[int]
    new_tokens: int
    rounds: int
    dtype: str | None
    eager: bool
    random: bool
    out: Path
    windows: dict[str, int] | None = None
    dial: str = "exact"
    profile: bool = False

    def asked(self, size: int) -> list[list[int]]:
        count = max(size * self.rounds, LEAST)
        return (self.prompts * (count // len(self.prompts) + 1))[:count]


def note(path: Path, key: str, value: Any) -> None:
    found = json.loads(path.read_text())
    found[key].append(value)
    path.write_text(json.dumps(found, indent=1) + "\n")


def make_known() -> None:
    """Where the package runs from its source: have vLLM's processes find the plugin all the same."""
    if any(each.name == "mars" for each in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return
    folder = Path(tempfile.mkdtemp(prefix="mars-plugin-"))
    facts = folder / "mars_decoding-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mars-decoding\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nmars = mars.integrations.vllm:register\n")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))


def open_llm(work: Work, **options: Any) -> Any:
    from vllm import LLM

    length = max(map(len, work.prompts)) + work.new_tokens + 16
    shared: dict[str, Any] = {
        "max_model_len": max(512, length),
        "max_num_seqs": max(work.sizes),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": work.eager,
        "load_format": "dummy" if work.random else "auto",
        "seed": 0,
    }
    if work.dtype:
        shared["dtype"] = work.dtype
    return LLM(model=work.folder, **shared | options)


def through_vllm(name: str, work: Work, **options: Any) -> None:
    make_known()
    if work.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    begun = time.monotonic()
    llm = open_llm(work, **options)
    print(f"{name}: loaded in {time.monotonic() - begun:.0f} s", flush=True)
    engine = llm.llm_engine
    numbers = iter(range(10**9))
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def write(asked: Sequence[list[int]], size: int, limit: int) -> tuple[list[list[int]], int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=limit, ignore_eos=work.random, output_kind=RequestOutputKind.DELTA
        )
        left, steps = deque(enumerate(asked)), 0
        going: dict[str, int] = {}
        texts: list[list[int]] = [[] for _ in asked]
        while left or going:
            while left and len(going) < size:
                index, prompt = left.popleft()
                key = str(next(numbers))
                engine.add_request(key, {"prompt_token_ids": prompt}, params)
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

    measure(name, work, write, state)
    if work.profile:
        profile(work, lambda: write(work.asked(work.sizes[-1])[: work.sizes[-1]], work.sizes[-1], 24))
    engine.engine_core.shutdown()


def through_engine(name: str, work: Work) -> None:
    begun = time.monotonic()
    model = mars.load(work.folder, dtype=work.dtype, rows=max(work.sizes))
    model.warm_up()
    engine = model.engine()
    print(f"{name}: loaded in {time.monotonic() - begun:.0f} s", flush=True)

    def write(asked: Sequence[list[int]], size: int, limit: int) -> tuple[list[list[int]], int]:
        left, going, steps = deque(enumerate(asked)), list[tuple[int, Any]](), 0
        texts: list[list[int]] = [[] for _ in asked]
        while left or going:
            while left and len(going) < size:
                index, prompt = left.popleft()
                going.append((index, engine.add(model.request(prompt, dial=work.dial, max_new_tokens=limit))))
            engine.step()
            steps += 1
            for index, answer in [each for each in going if each[1].finish_reason]:
                texts[index] = list(answer.token_ids)
                going.remove((index, answer))
        return texts, steps

    measure(name, work, write, lambda: None)


def measure(name: str, work: Work, write: Callable[..., Any], state: Callable[[], Any]) -> None:
    """Once to warm up, once for the record."""
    for size in work.sizes:
        asked = work.asked(size)
        write(asked[:size], size, min(32, work.new_tokens))
        before, begun = state(), time.perf_counter()
        texts, steps = write(asked, size, work.new_tokens)
        seconds, after = time.perf_counter() - begun, state()
        tokens = sum(map(len, texts))
        row = {
            "variant": name,
            "requests": size,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "ms_per_step": 1000 * seconds / steps,
            "tokens_per_step": tokens / steps,
        }
        if after:
            counts = {key: after[key] - before[key] for key in ("forwards", "tokens", "drafts", "accepted")}
            row |= {"tokens_per_forward": counts["tokens"] / counts["forwards"], "counts": counts}
        plain = next((each for each in _rows(work.out) if (each["variant"], each["requests"]) == ("plain", size)), None)
        if plain is not None:
            row["same_text"] = sum(map(list.__eq__, texts, plain["texts"])) / len(texts)
        note(work.out, "rows", row | ({"texts": texts} if name == "plain" else {}))
        show(row, plain)


def _rows(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def show(row: dict[str, Any], plain: dict[str, Any] | None) -> None:
    said = f"{row['variant']:12} {row['requests']:4} requests {row['tokens_per_second']:9,.0f} tokens/s"
    said += f" {row['ms_per_step']:7.3f} ms a step {row.get('tokens_per_forward', 1):5.2f} tokens a forward"
    if plain is not None:
        said += f"  {row['tokens_per_second'] / plain['tokens_per_second']:.2f}x plain"
        said += f", step {row['ms_per_step'] / plain['ms_per_step']:.2f}x, same text {row['same_text']:.0%}"
    print(said, flush=True)


def profile(work: Work, run: Callable[[], Any]) -> None:
    """Where a step's time goes, on the host and on the device."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as seen:
        _, steps = run()
    events = seen.key_averages()
    device = sum(each.self_device_time_total for each in events)
    launches = {each.key: each.count / steps for each in events if each.key.startswith(("cuda", "cu"))}
    print(f"profile: {steps} steps, {device / steps:.0f} us of kernels a step, calls a step: {launches}", flush=True)
    for order in ("self_cpu_time_total", "self_device_time_total"):
        print(events.table(sort_by=order, row_limit=30, max_name_column_width=60), flush=True)
    note(work.out, "profiles", {"steps": steps, "kernel_us_per_step": device / steps, "calls_per_step": launches})


VARIANTS: dict[str, Callable[[Work], None]] = {
    "plain": lambda work: through_vllm("plain", work),
    "plain-v2": lambda work: in_second_runner("plain-v2", work),
    "plain-sync": lambda work: through_vllm("plain-sync", work, async_scheduling=False),
    "mars": lambda work: through_vllm("mars", work, speculative_config=asking(work, "exact")),
    "one-token": lambda work: through_vllm("one-token", work, speculative_config=asking(work, "one-token")),
    "all-kept": lambda work: through_vllm("all-kept", work, speculative_config=asking(work, "threshold=0")),
    "engine": lambda work: through_engine("engine", work),
}


def in_second_runner(name: str, work: Work) -> None:
    """vLLM's newer model runner, which it does not take for all models by itself, and the plugin does."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    through_vllm(name, work)


def asking(work: Work, dial: str) -> dict[str, Any]:
    return {"method": "mars", "dial": dial} | ({} if work.windows is None else {"windows": work.windows})


def run(variant: str, work: Work) -> None:
    try:
        VARIANTS[variant](work)
    except BaseException:
        traceback.print_exc()
        print(f"{variant}: failed", flush=True)
        sys.exit(1)


def save_model(model: str, dtype: str | None, folder: str) -> None:
    save_checkpoint(load_checkpoint(model, dtype=dtype, device="cpu"), Path(folder))


def save_shape(shape: str, tokenizer: str, folder: str) -> None:
    """No weights: they are made up where they are needed."""
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
    parser.add_argument("--as-it-is", action="store_true", help="the model is such a folder: nothing is put together")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--tokenizer", help="for a shape: any; its tokens mean nothing here")
    parser.add_argument("--dtype")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default a few questions")
    parser.add_argument("--requests", default="1,8,32,64,128,256", help="at once")
    parser.add_argument("--rounds", type=int, default=1, help="requests one after the other in each place")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--variants", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--windows", type=json.loads, help='the plugin\'s setting, such as {"128": 0}')
    parser.add_argument("--eager", action="store_true", help="no compiling, no graphs: to see whether it runs at all")
    parser.add_argument("--profile", action="store_true", help="print where the last number of requests' steps go")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chosen = args.variants or (
        "plain,plain-v2,mars,all-kept" if args.shape else "plain,mars,one-token,plain-sync,engine"
    )
    args.out.write_text(json.dumps({"provenance": collect(), "rows": [], "profiles": []}))
    spawn = multiprocessing.get_context("spawn")
    sizes = [int(each) for each in args.requests.split(",")]
    with tempfile.TemporaryDirectory(prefix="mars-vllm-") as scratch:
        folder = args.model if args.as_it_is else str(Path(scratch) / "model")
        if args.shape:
            save_shape(args.shape, args.tokenizer, folder)
            asked = prompts(max(sizes), SHAPES[args.shape]["vocab_size"])
        else:
            if not args.as_it_is:
                saving = spawn.Process(target=save_model, args=(args.model, args.dtype, folder))
                saving.start()
                saving.join()
            asked = tokenized(folder, list(PROMPTS) if args.prompts is None else read_prompts(args.prompts))
            random.Random(0).shuffle(asked)  # files have one kind of prompt after the other
        work = Work(
            folder, asked, sizes, args.max_new_tokens, args.rounds, args.dtype, args.eager, bool(args.shape), args.out
        )
        work = replace(work, windows=args.windows, profile=args.profile)
        for variant in chosen.split(","):
            process = spawn.Process(target=run, args=(variant, work))
            process.start()
            process.join()
    found = json.loads(args.out.read_text())
    for row in found["rows"]:
        row.pop("texts", None)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=140).print(table(found["rows"]))


def tokenized(folder: str, asked: Sequence[Any]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": each}] if isinstance(each, str) else list(each) for each in asked]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]


if __name__ == "__main__":
    main()
