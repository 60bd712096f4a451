"""A leaderboard of trainings that differ from a recipe in one thing each, scored by decoding.

    python benchmarks/leaderboard.py recipes/smollm2-135m.yaml benchmarks/leaderboard.yaml --prompts spec_bench.jsonl \
        --work runs/leaderboard --at-once 3 --out results/leaderboard.json

A run is a name and what it changes: options of the recipe's last stage (``streams``, ``loss``, ``trainer``) or of the
recipe (``lora``, ``markov_rank``, ``data``, …), merged into what is there. Each is trained in a process and a folder of
its own, published, and decoded from there with the same prompts: tokens per forward of `exact` in a chain and in a
tree, greedy, and in a chain at temperature 0.7.

Started again, it keeps the runs that are scored and goes on with one that was cut off, so a run is added by adding its
line to the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from conversion import read_prompts, summary

import mars
from mars.errors import MarsError
from mars.evaluation.provenance import collect
from mars.training.files import write_whole
from mars.training.prepare import check_owner, prepare
from mars.training.recipe import Recipe, parse_recipe, read_recipe
from mars.training.run import load_model, train

SCORES: dict[str, dict[str, Any]] = {
    "chain": {"window": "chain"},
    "tree": {"window": "tree"},
    "chain, temperature 0.7": {"window": "chain", "temperature": 0.7, "seed": 0},
}
STAGE = ("streams", "loss", "trainer")  # sections of a change that belong to the recipe's last stage


def vary(recipe: Recipe, change: Mapping[str, Any], output: Path) -> Recipe:
    """The recipe with a change, writing to ``output``."""
    content = recipe.model_dump(mode="json") | {"output": str(output)}
    for name, value in change.items():
        section = content["stages"][-1] if name in STAGE else content
        merges = isinstance(value, dict) and isinstance(section.get(name), dict)
        section[name] = section[name] | value if merges else value
    return parse_recipe(content)


def digest(recipe: Recipe) -> str:
    """Of all but the folder it writes to."""
    content = recipe.model_dump(mode="json") | {"output": ""}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def run(recipe: Recipe, prompts: list[Any], kinds: list[str], max_new_tokens: int, batch: int) -> dict[str, Any]:
    """Train, unless that is done already, and score; raises if the folder belongs to another recipe."""
    check_owner(recipe)
    started = time.perf_counter()
    folder = recipe.output / "model"
    if not folder.exists():
        train(recipe)
    seconds = time.perf_counter() - started
    last = recipe.output / f"{len(recipe.stages)}-{recipe.stages[-1].stage}" / "finished" / "metrics.json"
    model = mars.load(folder, dtype="float32", max_num_seqs=batch)
    scores = {name: score(model, prompts, kinds, max_new_tokens, **options) for name, options in SCORES.items()}
    return {"scores": scores, "held_out": json.loads(last.read_text()), "seconds": seconds, "provenance": collect()}


def share_data(shared: Recipe, recipe: Recipe) -> None:
    """Give a run the rows that are packed already."""
    if recipe.output.exists():
        return
    unfinished = recipe.output.with_name(f"{recipe.output.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(shared.output / "data", unfinished / "data")
    write_whole(unfinished / "recipe.json", recipe.model_dump_json(indent=2))
    unfinished.rename(recipe.output)


def score(model: mars.Model, prompts: list[Any], kinds: list[str], most: int, **options: Any) -> dict[str, float]:
    """Tokens per forward by kind of prompt, and of all."""
    answers = model.generate(prompts, dial="exact", max_new_tokens=most, **options)
    groups = defaultdict(list, {"all": answers})
    for kind, answer in zip(kinds, answers, strict=True):
        if kind != "all":
            groups[kind].append(answer)
    return {kind: summary(each)["tokens_per_forward"] for kind, each in groups.items()}


def table(runs: Mapping[str, Any]) -> str:
    """Markdown, the best tree first."""
    head = ["run", *SCORES, "minutes of training", "date"]
    rows = [
        [
            name,
            *(f"{found['scores'][each]['all']:.3f}" for each in SCORES),
            f"{found['seconds'] / 60:.1f}",
            found["provenance"]["date"][:10],
        ]
        for name, found in sorted(runs.items(), key=lambda item: -item[1]["scores"]["tree"]["all"])
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * (len(head) - 1)], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("runs", type=Path, help="YAML: a name and a change for each run")
    parser.add_argument("--prompts", type=Path, required=True, help="never trained on")
    parser.add_argument("--limit", type=int, help="so many prompts, spread over the file")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128, help="prompts that are decoded together")
    parser.add_argument("--work", type=Path, required=True, help="folder of the trainings")
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = {name: change or {} for name, change in yaml.safe_load(options.runs.read_text()).items()}
    try:
        recipe = read_recipe(options.recipe)
        recipes = {name: vary(recipe, change, options.work / name.replace(" ", "-")) for name, change in wanted.items()}
    except MarsError as error:
        parser.error(str(error))
    prompts, kinds = read_prompts([options.prompts], options.limit)
    asked = {"prompts": len(prompts), "max_new_tokens": options.max_new_tokens}
    known = json.loads(options.out.read_text()) if options.out.exists() else {"asked": asked, "runs": {}}
    if known["asked"] != asked:
        parser.error(f"{options.out} was scored with {known['asked']}, not {asked}: choose another --out")
    runs = known["runs"]
    todo = [name for name, each in recipes.items() if runs.get(name, {}).get("recipe") != digest(each)]

    shared = vary(recipe, {}, options.work / "data")
    if todo:
        print(prepare(shared, load_model(shared).tokenizer).report, flush=True)
    with ProcessPoolExecutor(options.at_once, get_context("spawn"), max_tasks_per_child=1) as pool:
        begun = {}
        for name in todo:
            if "data" not in wanted[name]:
                share_data(shared, recipes[name])
            rest = (prompts, kinds, options.max_new_tokens, options.batch)
            begun[pool.submit(run, recipes[name], *rest)] = name
        for future in as_completed(begun):
            name = begun[future]
            try:
                runs[name] = {"change": wanted[name], "recipe": digest(recipes[name])} | future.result()
            except Exception as error:  # the others go on
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            print(name, runs[name]["scores"], flush=True)
            facts = {"recipe": options.recipe.name, "asked": asked, "runs": runs, "provenance": collect()}
            write_whole(options.out, json.dumps(facts, indent=2) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
