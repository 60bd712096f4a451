"""Results of a conversion: tokens per forward by dial, and how far the one-token mode moved from its base.

    python benchmarks/conversion.py --base smollm2-135m-base --model smollm2-135m --prompts spec_bench.jsonl.gz

Prompts are JSON lines in a format of `mars distill`; results are grouped by ``category``, or by file where rows have
none. Decoding is greedy.
``--texts`` names chats that were not trained on: base and model compute the loss of the answers in them.
``--generate`` also writes the base's answers by transformers' own ``generate`` and counts which dials write the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import mars
from mars.core.output import RequestOutput
from mars.evaluation.peers import open_peer
from mars.evaluation.provenance import collect
from mars.method.windows import parse_window
from mars.models import Checkpoint
from mars.models.attention import own_attention
from mars.training.rows import read_rows, to_prompt

BATCH = 96  # prompts that transformers' generate gets at once
DIALS = (
    "one-token",
    "exact chain",
    "exact tree",
    "relaxed=0.3 chain",
    "threshold=0.95",
    "threshold=0.9",
    "threshold=0.7",
)


def read_prompts(paths: Sequence[Path], limit: int | None) -> tuple[list[Any], list[str]]:
    """Prompts, of each file at most ``limit``, and their categories: where a row names none, its file's name."""
    prompts, categories = [], []
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = [json.loads(line) for line in file]
        rows = rows[:: max(1, len(rows) // limit)][:limit] if limit else rows
        prompts += [to_prompt(row) for row in rows]
        categories += [str(row.get("category", path.name.partition(".")[0])) for row in rows]
    return prompts, categories


def decode(model: mars.Model, prompts: Sequence[Any], batch: int, **options: Any) -> list[RequestOutput]:
    answers: list[RequestOutput] = []
    for start in range(0, len(prompts), batch):
        answers += model.generate(list(prompts[start : start + batch]), **options)
    return answers


def with_words(name: str) -> dict[str, Any]:
    """Options of a request from a dial and the words behind it: ``exact tree lookup=15``."""
    dial, *words = name.split()
    drafts = [int(word.removeprefix("lookup=")) for word in words if word.startswith("lookup=")]
    window = next((word for word in words if not word.startswith("lookup=")), "chain")
    return {"dial": dial, "window": window, "lookup": drafts[0] if drafts else None}


def summary(answers: Sequence[RequestOutput]) -> dict[str, float]:
    tokens, forwards = (sum(getattr(each, name) for each in answers) for name in ("num_tokens", "forwards"))
    verified, agreed = (sum(getattr(each, name) for each in answers) for name in ("num_verified", "num_agreed"))
    return {"tokens": tokens, "tokens_per_forward": tokens / forwards, "agreement": agreed / max(1, verified)}


@torch.inference_mode()
def losses(checkpoint: Checkpoint, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> tuple[float, int]:
    """Summed loss of the answers' tokens, and how many there are."""
    total, count = 0.0, 0
    with own_attention(checkpoint.module) as model:
        for start in range(0, len(prompts), 8):
            pairs = list(zip(prompts[start : start + 8], answers[start : start + 8], strict=True))
            longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
            ids = torch.zeros(len(pairs), longest, dtype=torch.long)
            labels = torch.full_like(ids, -100)
            for row, (prompt, answer) in enumerate(pairs):
                ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
                labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
            logits = model(input_ids=ids.to(checkpoint.device), use_cache=False).logits[:, :-1]
            flat = labels[:, 1:].flatten().to(checkpoint.device)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat, reduction="sum")
            total, count = total + float(loss), count + int((flat >= 0).sum())
    return total, count


def held_out(models: Sequence[mars.Model], texts: str) -> list[float]:
    """Each model's loss per token on the first answers of the chats."""
    chats = [row.messages for row in read_rows(texts, on_bad_row=print)]
    openings = [to_prompt({"messages": chat}) for chat in chats]
    checkpoint = models[0].checkpoint
    answers = [chat[len(opening)]["content"] for chat, opening in zip(chats, openings, strict=True)]
    tokens = [checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers]
    sums = [losses(model.checkpoint, [checkpoint.encode(each) for each in openings], tokens) for model in models]
    return [total / count for total, count in sums]


def drift(base: mars.Model, model: mars.Model, prompts: Sequence[Any], theirs: Any, ours: Any) -> dict[str, float]:
    """Loss of both models on the base's greedy answers, and of the base on both models' answers."""
    tokens = [base.checkpoint.encode(prompt) for prompt in prompts]

    def per_token(measured: mars.Model, answers: Iterable[RequestOutput]) -> float:
        total, count = losses(measured.checkpoint, tokens, [each.token_ids for each in answers])
        return total / count

    return {
        "base_on_base": per_token(base, theirs),
        "model_on_base": per_token(model, theirs),
        "base_on_model": per_token(base, ours),
        "same_answers": sum(a.token_ids == b.token_ids for a, b in zip(theirs, ours, strict=True)) / len(theirs),
    }


def generated(base: mars.Model, prompts: Sequence[Any], max_new_tokens: int) -> list[list[int]]:
    """The base's greedy answers as transformers' ``generate`` writes them, prompts of like length together."""
    tokens = [base.checkpoint.encode(prompt) for prompt in prompts]
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    answers: dict[int, list[int]] = {}
    with open_peer("transformers", base.checkpoint, None, BATCH, max(map(len, tokens)) + max_new_tokens) as peer:
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            found = peer.decode([tokens[index] for index in some], max_new_tokens).answers
            answers |= {index: answer.token_ids for index, answer in zip(some, found, strict=True)}
    return [answers[index] for index in range(len(tokens))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="the model before training, for the drift")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", help="chats for the loss of base and model")
    parser.add_argument("--dials", nargs="+", default=list(DIALS), help='such as "exact tree lookup=15"')
    parser.add_argument("--generate", action="store_true", help="compare with transformers' generate of the base")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=480)
    parser.add_argument("--rows", type=int, default=64, help="requests that are decoded together")
    parser.add_argument("--memory", type=float, help="of the cache: bytes, or on a GPU a share of what is free")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prompts, categories = read_prompts(options.prompts, options.limit)
    cache = {"max_num_seqs": options.rows, "memory": options.memory}
    candidates = max(parse_window(with_words(name)["window"], 2).candidates for name in options.dials)
    model = mars.load(
        options.model, adapter=options.adapter, dtype=options.dtype, candidates=candidates, **cache
    )  # one engine for all dials
    asked = {key: str(value) for key, value in vars(options).items()}
    record: dict[str, Any] = {"options": asked, "requests": len(prompts), "dials": {}}
    answers: dict[str, list[RequestOutput]] = {}
    for name in options.dials:
        arguments = {"block_size": options.block_size} if options.block_size else {}
        arguments |= with_words(name) | {"max_new_tokens": options.max_new_tokens}
        answers[name] = decode(model, prompts, options.batch, **arguments)
        groups: dict[str, list[RequestOutput]] = defaultdict(list)
        for category, answer in zip(categories, answers[name], strict=True):
            groups[category].append(answer)
        whole = summary(answers[name])
        plain = answers.get("one-token", answers[name])
        whole["same_as_one_token"] = sum(
            a.token_ids == b.token_ids for a, b in zip(plain, answers[name], strict=True)
        ) / len(plain)
        record["dials"][name] = {"all": whole} | {category: summary(each) for category, each in groups.items()}
        print(name, {key: round(value, 4) for key, value in whole.items()}, flush=True)
    base = mars.load(options.base, dtype=options.dtype, **cache) if options.base else None
    if base is not None and options.generate:
        expected = generated(base, prompts, options.max_new_tokens)
        for name, found in answers.items():
            same = sum(each.token_ids == tokens for each, tokens in zip(found, expected, strict=True))
            record["dials"][name]["all"]["same_as_generate"] = same / len(expected)
            print(name, f"{same} of {len(expected)} as the base's generate", flush=True)
    if base is not None and "one-token" in answers:
        theirs = decode(base, prompts, options.batch, dial="one-token", max_new_tokens=options.max_new_tokens)
        record["drift"] = drift(base, model, prompts, theirs, answers["one-token"])
        if options.texts:
            record["drift"]["base_on_texts"], record["drift"]["model_on_texts"] = held_out((base, model), options.texts)
        print("drift", record["drift"], flush=True)
    if options.out:
        options.out.write_text(json.dumps(record | {"provenance": collect()}, indent=2))


if __name__ == "__main__":
    main()
