"""Prompts for self-distillation out of chats: their openings in random order, and long ones made of their answers.

    python recipes/prompts.py --long 3000 --out prompts.jsonl chats.jsonl.gz more-chats/

Instruction sets have few prompts with a long text in them, which summaries and questions about documents need: here
passages are put together from other chats' answers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from mars.training.rows import read_rows, to_prompt

ASKS = (
    "Summarize the following text:\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nWrite a short summary of the text above.",
    "What are the main points of this text?\n\n{text}",
    "Context:\n{text}\n\nQuestion: {question}\n\nAnswer the question from the context.",
    "Answer the question based on the given passages.\n\nPassages: {text}\n\nQuestion: {question}",
    "Read these documents.\n\n{text}\n\nNow answer: {question}",
    "Rewrite the following text in simpler words:\n\n{text}",
)
WORDS = (150, 550)
"""Of a passage"""


def long_prompts(chats: list[tuple[str, str]], count: int, draw: random.Random) -> Iterator[str]:
    """Asks about passages; the question belongs to one of the answers in the passage."""
    for _ in range(count):
        size, words, parts = draw.randint(*WORDS), 0, []
        while words < size:
            parts.append(draw.choice(chats))
            words += len(parts[-1][1].split())
        text = "\n\n".join(answer for _, answer in parts)
        yield draw.choice(ASKS).format(text=text, question=draw.choice(parts)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--long", type=int, default=0, help="how many long prompts to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw = random.Random(options.seed)

    def complain(message: str) -> None:
        print(f"skipped {message}", file=sys.stderr)

    rows = [row.messages for source in options.sources for row in read_rows(source, on_bad_row=complain)]
    prompts = [to_prompt({"messages": messages}) for messages in rows]
    short = [messages[-1]["content"] for messages in prompts]
    answers = [messages[-1]["content"] for messages in rows]
    chats = [(ask, answer) for ask, answer in zip(short, answers, strict=True) if len(ask) < 200 < len(answer)]
    prompts += [[{"role": "user", "content": text}] for text in long_prompts(chats, options.long, draw)]
    draw.shuffle(prompts)
    with options.out.open("w") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
