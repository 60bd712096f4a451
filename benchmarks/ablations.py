"""Short trainings that differ in one option each, on the same data, evaluated on the same held-out chats.

    python benchmarks/ablations.py recipes/smollm2-135m.yaml variations.yaml --out ablations.json

A variation is a name and what it changes in the recipe's last stage and its adapter, for example

    labels only: {loss: {labels: 1.0, distill: 0.0}}
    rank 64: {lora: {r: 64}, trainer: {learning_rate: 1.0e-3}}
    no Markov head: {markov_rank: 0}

``rows`` limits how many packed rows there are to train on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from mars.evaluation.provenance import collect
from mars.method.streams import Pack
from mars.training.evaluation import evaluate
from mars.training.prepare import Prepared, prepare
from mars.training.recipe import Recipe, parse_recipe, read_recipe
from mars.training.run import load_model, stage_trainer


def vary(recipe: Recipe, change: dict[str, Any]) -> Recipe:
    """The recipe with its last stage (and adapter) changed."""
    content = recipe.model_dump(mode="json")
    stage = content["stages"][-1]
    for section in ("streams", "loss", "trainer"):
        stage[section] |= change.get(section, {})
    if "lora" in change:
        content["lora"] = None if change["lora"] is None else (content["lora"] or {}) | change["lora"]
    content |= {name: change[name] for name in ("adapter", "markov_rank") if name in change}
    return parse_recipe(content | {"stages": [stage]})


def run(recipe: Recipe, data: Prepared, block_sizes: list[int]) -> dict[str, Any]:
    started = time.perf_counter()
    model = load_model(recipe)
    with stage_trainer(recipe, recipe.stages[-1], Path(tempfile.mkdtemp()), model, data) as trainer:
        before = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - before
        trainer.model_wrapped.eval()
        result: dict[str, Any] = {"seconds": seconds, "steps": trainer.state.global_step}
        for block_size in block_sizes:
            found = evaluate(
                trainer._predict,
                data.held_out,
                block_size=block_size,
                mask_token=model.mask_token,
                rows=trainer.args.per_device_eval_batch_size,
                width=recipe.data.length // 2,
            )
            result[f"B={block_size}"] = found.metrics()
    return result | {"total_seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("variations", type=Path)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recipe = read_recipe(options.recipe)
    data = prepare(recipe, load_model(recipe).tokenizer)
    print(data.report, len(data.train.tokens), "rows", flush=True)
    results: dict[str, Any] = {}
    for name, given in yaml.safe_load(options.variations.read_text()).items():
        change = given or {}
        rows = change.get("rows")
        some = data if rows is None else Prepared(Pack(*(e[:rows] for e in data.train)), data.held_out, data.report)
        try:
            results[name] = {"change": change} | run(vary(recipe, change), some, options.block_sizes)
        except torch.cuda.OutOfMemoryError:
            results[name] = {"change": change, "error": "out of memory"}
        print(name, json.dumps(results[name]), flush=True)
        if options.out:
            options.out.write_text(
                json.dumps({"results": results, "report": data.report, "provenance": collect()}, indent=2)
            )


if __name__ == "__main__":
    main()
