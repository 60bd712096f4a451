"""What batch-invariant kernels cost: the engine with them over the engine without, in turns, best of three.

    python benchmarks/invariant_speed.py --model smollm2-135m --prompts spec_bench.jsonl --requests 1,8,32,128,256 \
        --out invariant-speed.json
    python benchmarks/invariant_speed.py --shape qwen2.5-7b --requests 1,4,16,64 --out invariant-speed-7b.json

With a model: tokens per second of one-token and `exact`, and of prefill (answers of a single token). With a shape of
random weights: milliseconds of captured steps, and how much of the copy bandwidth single tokens reach.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mars import Model
from mars.engine import cuda_graphs, memory_for
from mars.engine.cuda_graphs import padded_size
from mars.evaluation.plan import read_prompts
from mars.evaluation.provenance import collect
from mars.evaluation.speed import Traffic
from mars.method.windows import Window
from mars.models import Checkpoint, Settings, load_checkpoint

BLOCK_SIZE = 4
WINDOWS = {"one-token": Window(), "chain": Window.of(1, BLOCK_SIZE), "tree": Window.of(BLOCK_SIZE, BLOCK_SIZE)}
LENGTH = 512  # of texts that a shape's cache has room for
TURNS, REPEATS = 3, 50
KINDS = {"as always": False, "batch-invariant": True}


def texts(args: argparse.Namespace, sizes: list[int]) -> list[dict[str, Any]]:
    """Tokens per second of a real model."""
    checkpoint = load_checkpoint(args.model, dtype=args.dtype)
    prompts = [checkpoint.encode(each) for each in read_prompts(args.prompts)]
    models = {
        name: Model(checkpoint, max_num_seqs=max(sizes), memory=args.memory, batch_invariant=invariant)
        for name, invariant in KINDS.items()
    }
    for model in models.values():
        model.warm_up()
    rows = []
    for size, dial in product(sizes, ("one-token", "exact", "prefill")):
        asked = list(islice(cycle(prompts), max(32, 2 * size)))
        best = dict.fromkeys(models, 0.0)
        for turn in range(TURNS + 1):  # the first one is not counted
            for name, model in models.items():
                speed = tokens_per_second(model, asked, size, dial, args.max_new_tokens)
                best[name] = max(best[name], speed if turn else 0.0)
        rows.append(row(dial, size, best, best["batch-invariant"] / best["as always"]))
    return rows


def tokens_per_second(model: Model, prompts: list[list[int]], size: int, dial: str, most: int) -> float:
    """Without cached prompts; of prefill, the prompts' tokens."""
    tokens, started = 0, time.perf_counter()
    for start in range(0, len(prompts), size):
        model.engine().clear_prefix_cache()
        batch = prompts[start : start + size]
        if dial == "prefill":
            model.generate(batch, dial="one-token", max_new_tokens=1)
            tokens += sum(map(len, batch))
        else:
            answers = model.generate(batch, dial=dial, max_new_tokens=most)
            tokens += sum(each.num_tokens for each in answers)
    return tokens / (time.perf_counter() - started)


def steps(args: argparse.Namespace, sizes: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of steps of a shape; needs a GPU."""
    module = random_model(SHAPES[args.shape], "cuda")
    module.generation_config.eos_token_id = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    checkpoint = Checkpoint(args.shape, module, tokenizer, Settings(5, block_size=BLOCK_SIZE, dial="exact"))
    memory = memory_for(checkpoint, max(sizes), LENGTH)
    runners: dict[str, Any] = {
        name: Model(checkpoint, max_num_seqs=max(sizes), memory=memory, batch_invariant=invariant).engine()._runner
        for name, invariant in KINDS.items()
    }
    cuda_graphs.REPEATS = REPEATS
    traffic, rows = Traffic.of(checkpoint), []
    for size, (name, window) in product(sizes, WINDOWS.items()):
        best = dict.fromkeys(runners, float("inf"))
        for _ in range(TURNS):
            for kind, runner in runners.items():
                best[kind] = min(best[kind], 1000 * runner.time_step(padded_size(size), window))
        found = row(name, size, best, best["as always"] / best["batch-invariant"])
        if name == "one-token":
            read = traffic.weights + size * cuda_graphs.CONTEXT * traffic.per_token
            found["bandwidth_share"] = {kind: 1000 * read / ms / traffic.bandwidth for kind, ms in best.items()}
            print(f"  of the bandwidth: {found['bandwidth_share']}")
        rows.append(found)
    return rows


def row(what: str, size: int, best: dict[str, float], ratio: float) -> dict[str, Any]:
    """``ratio``: speed with the invariant kernels over speed without."""
    print(f"{what:10} {size:4} requests  {best}  {ratio:.3f}", flush=True)
    return {"what": what, "requests": size, "best": best, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in place of a model")
    parser.add_argument("--prompts", type=Path, help="JSONL file, for a model")
    parser.add_argument("--requests", default="1,8,32,128,256", help="at once")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, default=16e9, help="bytes of each engine's cache")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.shape is None and args.prompts is None:
        parser.error("give --prompts, or --shape")
    sizes = [int(each) for each in args.requests.split(",")]
    with torch.inference_mode():
        rows = texts(args, sizes) if args.shape is None else steps(args, sizes)
    facts = {"model": args.shape or args.model, "dtype": args.dtype, "provenance": collect()}
    args.out.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
