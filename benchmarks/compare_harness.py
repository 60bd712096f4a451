"""Answers and scores of lm-eval's own class for transformers, compared with ours in one-token mode.

    python benchmarks/compare_harness.py --model smollm2-135m --data-dir DATA --n 200 --out compare_harness.json

The data folder has ``gsm8k_test.jsonl.gz`` and ``ifeval.jsonl.gz``. Both classes get the same prompts and load the
same weights in float32. ``place`` is the first character in which two answers differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lm_eval.models.huggingface import HFLM

from mars.evaluation.harness import MarsLM
from mars.evaluation.provenance import collect
from mars.evaluation.tasks import Chat, Exam, open_exam
from mars.models import load_checkpoint

BEFORE, BEHIND = 20, 40
"""Characters around a difference that are shown"""


def load_items(data_dir: Path, name: str, n: int, chat: Chat | None) -> Exam:
    """``n`` questions of a benchmark, with the scorer of the answers."""
    return open_exam(name, chat=chat, data=data_dir, limit=n)


def answer(model: Any, exam: Exam, max_new_tokens: int) -> tuple[list[str], float]:
    """The texts, and how many seconds they took."""
    options = {"do_sample": False, "max_gen_toks": max_new_tokens}
    requests = [SimpleNamespace(args=(item.prompt, {**options, "until": list(item.stop)})) for item in exam.items]
    started = time.perf_counter()
    return model.generate_until(requests), time.perf_counter() - started


def first_difference(mine: str, theirs: str) -> int:
    both = enumerate(zip(mine, theirs, strict=False))
    return next((index for index, (one, other) in both if one != other), min(len(mine), len(theirs)))


def compare(exam: Exam, mine: Sequence[str], theirs: Sequence[str]) -> dict[str, Any]:
    scores = [exam.score(texts) for texts in (mine, theirs)]
    counted = exam.benchmark.score
    differences = []
    for item, one, other, my_score, their_score in zip(exam.items, mine, theirs, *scores, strict=True):
        if one == other and my_score == their_score:
            continue
        position = first_difference(one, other)
        around = slice(max(0, position - BEFORE), position + BEHIND)
        differences.append(
            {"item": item.id, "place": position, "mars": one[around], "hf": other[around]}
            | {"scores": {"mars": my_score[counted], "hf": their_score[counted]}}
        )
    return {
        "items": len(exam.items),
        "identical_answers": sum(one == other for one, other in zip(mine, theirs, strict=True)),
        "identical_scores": sum(one == other for one, other in zip(*scores, strict=True)),
        "score": {
            name: sum(each[counted] for each in figures) / len(figures)
            for name, figures in zip(("mars", "hf"), scores, strict=True)
        },
        "differences": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "ifeval"])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--n", type=int, default=200, help="questions of each benchmark")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    ours = MarsLM(args.model, dial="one-token", dtype="float32", batch_size=args.batch_size)
    plain = load_checkpoint(args.model, dtype="float32")
    theirs = HFLM(plain.module, tokenizer=plain.tokenizer, batch_size=args.batch_size)
    chat = ours.apply_chat_template if plain.tokenizer.chat_template else None
    results = {}
    for name in args.tasks:
        exam = load_items(args.data_dir, name, args.n, chat)
        (mine, seconds), (other, other_seconds) = (answer(each, exam, args.max_new_tokens) for each in (ours, theirs))
        results[name] = compare(exam, mine, other) | {"seconds": {"mars": seconds, "hf": other_seconds}}
        print(name, json.dumps(results[name], indent=2, ensure_ascii=False))
    asked = {key: value for key, value in vars(args).items() if key not in ("data_dir", "out")}
    args.out.write_text(json.dumps({**asked, "provenance": collect(), "tasks": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
