"""Prompts for self-distillation out of chats: their openings in random order, and kinds that chats are short of.

    python recipes/prompts.py --long 3000 --few-shot 8000 --code 3000 --out prompts.jsonl chats.jsonl.gz more-chats/

Instruction sets have few prompts with a long text in them, with solved examples in front, or with a function to write.
A model trained without such prompts answers them otherwise than before. Here passages are put together from
other chats' answers, examples from other chats of the same file, and functions come from Python's own library.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import chain
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
CODE_ASKS = (
    "Complete this function.\n\n```python\n{text}\n```",
    "Write the body of the function below. Answer with the whole function.\n\n```python\n{text}\n```",
    "Implement it:\n\n{text}",
    "Here is what a Python function has to do:\n\n{text}\n\nWrite it.",
)
WORDS = (150, 550)
"""Of a passage"""
SHOTS = (2, 4)
SHORT = 600
"""Letters of an example, at most"""
Messages = list[dict[str, str]]


def long_prompts(chats: list[tuple[str, str]], count: int, draw: random.Random) -> Iterator[str]:
    """Asks about passages; the question belongs to one of the answers in the passage."""
    for _ in range(count):
        size, words, parts = draw.randint(*WORDS), 0, []
        while words < size:
            parts.append(draw.choice(chats))
            words += len(parts[-1][1].split())
        text = "\n\n".join(answer for _, answer in parts)
        yield draw.choice(ASKS).format(text=text, question=draw.choice(parts)[0])


def few_shot_prompts(files: list[list[Messages]], count: int, draw: random.Random) -> Iterator[Messages]:
    """A question after a few others from the same file, solved; longer files give more."""
    chats = [[each for each in file if len(each) == 2 and len(str(each)) < SHORT] for file in files]
    usable = [file for file in chats if len(file) > SHOTS[1]]
    for file in draw.choices(usable, weights=map(len, usable), k=count if usable else 0):
        *solved, asked = draw.sample(file, draw.randint(*SHOTS) + 1)
        yield [*chain.from_iterable(solved), asked[0]]


def functions() -> Iterator[str]:
    """Heads and docstrings of functions in Python's own library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                head = "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].end_lineno])
                yield textwrap.dedent(head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--long", type=int, default=0, help="how many long prompts to make")
    parser.add_argument("--few-shot", type=int, default=0, help="how many with solved examples in front")
    parser.add_argument("--code", type=int, default=0, help="how many that ask for a function")
    parser.add_argument("--no-openings", action="store_true", help="leave the chats' own openings out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw = random.Random(options.seed)

    def complain(message: str) -> None:
        print(f"skipped {message}", file=sys.stderr)

    files = [[row.messages for row in read_rows(source, on_bad_row=complain)] for source in options.sources]
    rows = list(chain.from_iterable(files))
    openings = [to_prompt({"messages": messages}) for messages in rows]
    short = [messages[-1]["content"] for messages in openings]
    answers = [messages[-1]["content"] for messages in rows]
    chats = [(ask, answer) for ask, answer in zip(short, answers, strict=True) if len(ask) < 200 < len(answer)]
    prompts = [] if options.no_openings else openings
    prompts += [[{"role": "user", "content": text}] for text in long_prompts(chats, options.long, draw)]
    prompts += few_shot_prompts(files, options.few_shot, draw)
    for text in draw.choices(list(functions()), k=options.code) if options.code else ():
        prompts.append([{"role": "user", "content": draw.choice(CODE_ASKS).format(text=text)}])
    draw.shuffle(prompts)
    with options.out.open("w") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
