"""Time of a step with a gated adapter, over that of a merged model.

    python benchmarks/adapter_speed.py --shape smollm2-135m --batch-sizes 1,2,4,8,16,32 --rank 128 --out adapter.json
    python benchmarks/adapter_speed.py --cpu int8,bfloat16,float32 --batch-sizes 1,2,4,8 --out adapter-cpu.json

With ``--cpu``, steps of the built-in model on a CPU in these precisions; its base stands for a merged model. Otherwise
a shape with random weights on a GPU, where steps are captured CUDA graphs as the engine replays them. A step is a
chain of block size 4, or one token. Each form of the adapter's products is timed, in turns with the merged model, best
of three. With ``--tune``, tiles of the kernels are timed for each product of a layer instead, and the fastest are
printed as ``mars.engine.kernels.products`` has them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from model_shapes import SHAPES, random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mars.engine import Engine, compilation, cuda_graphs, memory_for
from mars.engine.cuda_graphs import GraphRunner
from mars.engine.runner import Runner
from mars.evaluation.provenance import collect
from mars.method.windows import Window
from mars.models import Checkpoint, Settings, load_checkpoint
from mars.models.builtin import NAME
from mars.models.gated import GatedAdapter, layer_sizes

BLOCK_SIZE = 4
CHAIN = Window.of(1, BLOCK_SIZE)
WINDOWS = {"chain": CHAIN, "one-token": Window()}
FORMS = {"merged": None, "two sets": 2**60, "low rank": 0}
"""What is timed, with the ``SECOND_SET_BYTES`` that lead to it"""
LENGTH = 512  # of texts that the cache has room for
TURNS, REPEATS = 3, 50
COLD_BYTES = 2**28  # of weights that a kernel is timed over, so that they come from memory as in a step
SHARED_BYTES = 220_000  # that a program may use for its stages
KINDS = (16, 32, 64, 1 << 30)  # most tokens of a kind in a row of the table
WIDE = 1024  # outputs that still count as few


def random_adapter(module: PreTrainedModel, rank: int, markov: int) -> GatedAdapter:
    rows, hidden = module.get_input_embeddings().weight.shape
    with torch.device("cuda"):
        adapter = GatedAdapter(layer_sizes(module), rank, hidden, rows, markov).to(module.dtype)
    for weight in adapter.parameters():
        weight.data.normal_(std=0.02)
    adapter.eval().requires_grad_(False).attach(module)
    return adapter


def checkpoint_of(shape: str, form: str, rank: int, markov: int) -> Checkpoint:
    module = random_model(SHAPES[shape], "cuda")
    module.generation_config.eos_token_id = None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    if form == "merged":
        return Checkpoint(shape, module, tokenizer, Settings(5, block_size=BLOCK_SIZE, dial="exact"))
    adapter = random_adapter(module, rank, markov)
    settings = Settings(adapter.mask_token, block_size=BLOCK_SIZE, dial="exact")
    return Checkpoint(shape, module, tokenizer, settings, adapter)


def runner_of(checkpoint: Checkpoint, form: str, most: int) -> GraphRunner:
    compilation.SECOND_SET_BYTES = FORMS[form] or 0
    engine = Engine(checkpoint, max_num_seqs=most, memory=memory_for(checkpoint, most, LENGTH))
    assert isinstance(engine._runner, GraphRunner)
    return engine._runner


def gpu_runners(args: argparse.Namespace, most: int) -> dict[str, Runner]:
    forms = [each for each in FORMS if each in ("merged", *args.forms.split(","))]
    cuda_graphs.REPEATS = REPEATS
    made = ((form, checkpoint_of(args.shape, form, args.rank, args.markov_rank)) for form in forms)
    return {form: runner_of(checkpoint, form, most) for form, checkpoint in made}


def cpu_runners(precision: str, most: int) -> dict[str, Runner]:
    base, gated = (load_checkpoint(name, device="cpu", dtype=precision) for name in (f"{NAME}-base", NAME))
    merged = replace(base, settings=Settings(5, block_size=BLOCK_SIZE, dial="exact"))
    forms = {"merged": merged, f"gated, {precision}": gated}
    return {
        form: Engine(each, block_size=BLOCK_SIZE, max_num_seqs=most, memory=2**30)._runner
        for form, each in forms.items()
    }


def compare(runners: dict[str, Runner], sizes: list[int]) -> list[dict[str, Any]]:
    """In turns; a GPU's runner repeats a step by itself."""
    rows: list[dict[str, Any]] = []
    for name, size in product(WINDOWS, sizes):
        best = dict.fromkeys(runners, float("inf"))
        for _ in range(TURNS):
            for form, runner in runners.items():
                repeats = 1 if isinstance(runner, GraphRunner) else REPEATS
                times = [runner.time_step(runner.padded_size(size), WINDOWS[name]) for _ in range(repeats)]
                best[form] = min(best[form], median(times))
        for form, seconds in best.items():
            ratio = seconds / best["merged"]
            rows.append(
                {"window": name, "batch_size": size, "form": form, "ms_per_step": 1000 * seconds, "ratio": ratio}
            )
            print(f"{name:10} {size:4} requests  {form:10} {1000 * seconds:8.3f} ms  {ratio:.3f}x merged", flush=True)
    return rows


# --- tiles


def products(shape: dict[str, Any]) -> dict[str, tuple[list[int], int]]:
    """The outputs and inputs of a layer's products, by name; several outputs where layers are joined."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    key = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        "qkv": ([hidden, key, key], hidden),
        "o": ([hidden], hidden),
        "gate_up": ([inner, inner], hidden),
        "down": ([hidden], inner),
    }


def microseconds(call: Callable[[int], Any], copies: int) -> float:
    """Of a call, by a captured graph of one call for each copy of the weights."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    best = float("inf")
    for _ in range(TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return 1000 * best / copies


def attempt(call: Callable[[int], Any], copies: int) -> float:
    """As `microseconds`; infinite for tiles that do not compile or need too much memory."""
    try:
        return microseconds(call, copies)
    except Exception as error:  # each compiler pass has errors of its own
        print(f"  skipped: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return float("inf")


def candidates(tokens: int, step: int) -> Iterator[Any]:
    """Tiles worth a try for so many tokens of a kind, with ``step`` inputs at once."""
    from mars.engine.kernels.products import Tile

    for wide, outputs, warps, stages in product((16, 32, 64), (16, 32, 64, 128), (4, 8), (3, 6)):
        fits = (wide + outputs) * step * 2 * (stages - 1) < SHARED_BYTES
        if fits and wide < 2 * max(16, tokens) and (warps == 4 or outputs * wide >= 4096):
            yield Tile(wide, outputs, warps, stages)


def tune_two_sets(shape: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    from mars.engine.kernels import products as kernels

    rows: list[dict[str, Any]] = []
    for name, (split, inputs) in products(shape).items():
        outputs = sum(split)
        copies = max(8, min(128, COLD_BYTES // (4 * outputs * inputs)))
        weights = torch.randn(copies, 2, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        for size, step in product(sizes, (64, 128) if inputs % 128 == 0 else (64,)):
            kernels.inputs_at_once = lambda *_, step=step: step
            x = torch.randn(size * CHAIN.width, inputs, device="cuda", dtype=torch.bfloat16)
            kind = size * CHAIN.verified
            plain = microseconds(lambda copy: linear(x, weights[copy, 0]), copies)  # noqa: B023
            for tile in candidates(kind, step):
                us = attempt(lambda copy: kernels.product(x, weights[copy], None, kind, tile=tile), copies)  # noqa: B023
                row = {"product": name, "outputs": outputs, "tokens": len(x), "kind": kind, "inputs_at_once": step}
                rows.append(row | {"tile": list(tile), "us": us, "plain_us": plain})
            mine = [each for each in rows if (each["product"], each["tokens"]) == (name, len(x))]
            mine = [each for each in mine if each["inputs_at_once"] == step]
            best = min(mine, key=lambda each: each["us"])
            print(
                f"{name:8} {len(x):4} tokens, {step:3} inputs at once: {best['us']:6.2f} us "
                f"({best['us'] / plain:.2f}x cuBLAS with one set) {best['tile']}",
                flush=True,
            )
    print_table(rows)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """`mars.engine.kernels.products.TILES`: the tile with the least time over all products of a row of the table."""
    for step in sorted({each["inputs_at_once"] for each in rows}):
        print(f"# {step} inputs at once where there is a choice")
        for (least, most), few in product(zip((0, *KINDS), KINDS, strict=False), (True, False)):
            mine = [each for each in rows if least < each["kind"] <= most and (each["outputs"] <= WIDE) == few]
            odd = {each["product"] for each in mine if each["inputs_at_once"] == step}
            mine = [each for each in mine if each["inputs_at_once"] == step or each["product"] not in odd]
            sums: dict[tuple[int, ...], list[float]] = {}
            for each in mine:
                sums.setdefault(tuple(each["tile"]), []).append(each["us"])
            full = max(map(len, sums.values()), default=0)
            complete = {tile: sum(times) for tile, times in sums.items() if len(times) == full}
            if complete:
                tile, total = min(complete.items(), key=lambda each: each[1])
                bound = [str(each) if each < 1 << 30 else "1 << 30" for each in (most, WIDE if few else 1 << 30)]
                print(f"    ({', '.join(bound)}, Tile({', '.join(map(str, tile))})),  # {total:.1f} us", flush=True)


def tune_expand(shape: dict[str, Any], sizes: list[int], rank: int) -> list[dict[str, Any]]:
    from mars.engine.kernels.products import Tile, expand

    rows: list[dict[str, Any]] = []
    for name, (split, inputs) in products(shape).items():
        outputs, columns = sum(split), sum(split) + len(split) * rank
        copies = max(4, min(32, COLD_BYTES // (2 * columns * inputs)))
        weights = torch.randn(copies, columns, inputs, device="cuda", dtype=torch.bfloat16)
        factors = torch.randn(max(copies, 32), outputs, rank, device="cuda", dtype=torch.bfloat16)
        for size in sizes:
            x = torch.randn(size * CHAIN.width, inputs, device="cuda", dtype=torch.bfloat16)
            y: Tensor = linear(x, weights[0])
            plain = microseconds(lambda copy: linear(x, weights[copy, :outputs]), copies)  # noqa: B023
            wider = microseconds(lambda copy: linear(x, weights[copy]), copies)  # noqa: B023
            best = (float("inf"), Tile(0, 0, 0, 0))
            for wide, out, warps, stages in product((16, 32, 64), (32, 64, 128, 256), (4, 8), (1, 2)):
                tile = Tile(wide, out, warps, stages)
                if wide >= 2 * max(16, size * CHAIN.all_masks):
                    continue
                us = attempt(lambda copy: expand(y, factors[copy], split, size * CHAIN.verified, tile), len(factors))  # noqa: B023
                rows.append({"product": name, "tokens": len(x), "tile": list(tile), "us": us, "plain_us": plain})
                best = min(best, (us, tile))
            print(
                f"{name:8} {len(x):4} tokens: product {plain:6.2f} us, with projections {wider:6.2f} us, "
                f"expansion {best[0]:5.2f} us {tuple(best[1])}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--cpu", help="precisions of the built-in model on a CPU, with commas between")
    parser.add_argument("--batch-sizes", default="1,2,4,8,16,32")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--markov-rank", type=int, default=0, help="of a Markov head, which the merged model has not")
    parser.add_argument("--forms", default="two sets,low rank")
    parser.add_argument("--tune", choices=["two sets", "low rank"], help="time tiles of this form's kernel")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sizes, shape = [int(each) for each in args.batch_sizes.split(",")], SHAPES[args.shape]
    with torch.inference_mode():
        if args.cpu:
            rows = [row for each in args.cpu.split(",") for row in compare(cpu_runners(each, max(sizes)), sizes)]
        elif args.tune == "two sets":
            rows = tune_two_sets(shape, sizes)
        elif args.tune == "low rank":
            rows = tune_expand(shape, sizes, args.rank)
        else:
            precisions = args.cpu.split(",") if args.cpu else []
            compared = (
                (cpu_runners(each, max(sizes)) for each in precisions) if args.cpu else [gpu_runners(args, max(sizes))]
            )
            rows = [row for runners in compared for row in compare(runners, sizes)]
    made = {"shape": args.shape, "rank": args.rank, "markov_rank": args.markov_rank}
    facts = ({} if args.cpu else made) | {"provenance": collect()}
    args.out.write_text(json.dumps(facts | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
