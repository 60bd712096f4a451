"""Clean tokens per second and peak memory of the MARS stage against the AR stage of the same trainer, in one run.

python benchmarks/training_speed.py --model smollm2-135m-base --out speed.json
python benchmarks/training_speed.py --model smollm2-135m-base --lora 128 --out gated.json

A gated adapter has no AR stage. It is compared with the AR stage of a merged adapter of its rank (``time_ratio``,
``memory_ratio``) and with that of all weights (``full_time_ratio``, ``full_memory_ratio``).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from mars.evaluation.provenance import collect
from mars.training.chats import Document
from mars.training.packing import pack
from mars.training.prepare import Prepared
from mars.training.recipe import Recipe, parse_recipe
from mars.training.run import load_model, stage_trainer


class Clock(TrainerCallback):
    """Times the steps after the first ones, which compile."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.begin = self.end = 0.0

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step in (self.warm_up, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.begin, self.end = self.end, time.perf_counter()


def synthetic(rows: int, length: int, vocabulary: int) -> Prepared:
    """Packed chats of random tokens: a third prompt, two thirds answer."""
    draw = random.Random(0)
    documents = []
    for _ in range(rows * 4):
        size = draw.randrange(length // 8, length // 2)
        tokens = [draw.randrange(vocabulary // 2, vocabulary) for _ in range(size)]
        documents.append(Document(tokens, [index >= size // 3 for index in range(size)]))
    packed = pack(documents, length, 0)
    return Prepared(packed, type(packed)(*(each[:0] for each in packed)), "")


def recipes(options: argparse.Namespace) -> list[Recipe]:
    """Each with the stages that are measured of it."""
    streams = {"block_size": options.block_size, "masked": options.masked}
    ar, mars = {"stage": "ar"}, {"stage": "mars", "streams": streams}
    lora: dict[str, Any] = {"lora": {"r": options.lora}}
    parts: list[dict[str, Any]]
    if not options.lora:
        parts = [{"stages": [ar, mars]}]
    elif options.adapter == "merged":
        parts = [lora | {"adapter": "merged", "stages": [ar, mars]}]
    else:
        parts = [{"stages": [ar]}, lora | {"adapter": "merged", "stages": [ar]}, lora | {"stages": [mars]}]
    shared = {
        "model": options.model,
        "output": "unused",
        "data": {"train": ["unused"], "length": options.length},
        "compile": not options.no_compile,
        "trainer": {
            "max_steps": options.steps,
            "per_device_train_batch_size": options.rows,
            "save_strategy": "no",
            "logging_steps": 1000,
        },
    }
    return [parse_recipe(shared | part) for part in parts]


def measure(recipe: Recipe, warm_up: int) -> list[dict[str, Any]]:
    results = []
    for stage in recipe.stages:
        model = load_model(recipe)
        data = synthetic(256, recipe.data.length, model.language_model.config.vocab_size)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        clock = Clock(warm_up)
        with stage_trainer(recipe, stage, Path(tempfile.mkdtemp()), model, data) as trainer:
            trainer.add_callback(clock)
            trainer.train()
        tokens = trainer.args.per_device_train_batch_size * recipe.data.length * (trainer.args.max_steps - warm_up)
        results.append(
            {
                "stage": stage.stage,
                "lora": recipe.lora is not None,
                "adapter": "gated" if recipe.gated else recipe.adapter,
                "clean_tokens_per_second": tokens / (clock.end - clock.begin),
                "ms_per_step": 1000 * (clock.end - clock.begin) / (trainer.args.max_steps - warm_up),
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
            }
        )
        print(results[-1], flush=True)
    return results


def ratios(ar: dict[str, Any], mars: dict[str, Any], prefix: str = "") -> dict[str, float | None]:
    return {
        f"{prefix}time_ratio": ar["clean_tokens_per_second"] / mars["clean_tokens_per_second"],
        f"{prefix}memory_ratio": mars["peak_gib"] / ar["peak_gib"] if ar["peak_gib"] else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-base")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--masked", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--lora", type=int, help="rank; without it all weights are trained")
    parser.add_argument("--adapter", choices=["gated", "merged"], default="gated", help="what --lora trains")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [result for recipe in recipes(options) for result in measure(recipe, options.warm_up)]
    *full, ar, mars = results
    summary = ratios(ar, mars)
    for each in full:
        summary |= ratios(each, mars, "full_")
    print(summary, flush=True)
    if options.out:
        record = {
            "options": vars(options) | {"out": str(options.out)},
            "results": results,
            **summary,
            "provenance": collect(),
        }
        options.out.write_text(json.dumps(record, indent=2, default=str))


if __name__ == "__main__":
    main()
