"""Prompts for self-distillation out of chats: their openings in random order, and kinds that chats are short of.

    python recipes/prompts.py --long 3000 --few-shot 8000 --code 3000 --out prompts.jsonl chats.jsonl.gz more-chats/
    python recipes/prompts.py --long 9000 --questions 5000 --texts books/*.txt --translations 5000 --german zeitung.txt

Instruction sets have few prompts with a long text in them, with solved examples in front, with a function to write or
a sentence to translate, and few short questions. Masks draft worse in answers to prompts of kinds they were not trained
on. Here passages come from plain texts, or are put together from other chats' answers; questions ask for names in the
texts, examples are other chats of the same file, and functions come from Python's own library.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import chain, islice
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
TRANSLATION_ASKS = (
    "Translate German to English: {text}",
    "Translate this German sentence into English: {text}",
    "{text}\n\nTranslate the text above to English.",
    "What does this mean in English? {text}",
)
QUESTIONS = (
    *("Who is {name}?", "What is {name}?", "Where is {name}?", "When did {name} begin?", "What is {name} known for?"),
    *("Who was the first {name}?", "Where does the name {name} come from?", "What is the meaning of {name}?"),
    *("How many people live in {name}?", "Who wrote {name}?", "When was {name} founded?", "Why is {name} important?"),
    *("What is the difference between {name} and {other}?", "How did {name} get its name?", "Who invented {name}?"),
    *("What happened to {name} in the end?", "Who plays {name} in the film?", "What does {name} stand for?"),
)
WORDS = (150, 650)
"""Of a passage"""
SENTENCE = (6, 40)
"""Words of a sentence to translate"""
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: (?:of )?[A-Z][a-z]+)*")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
SHOTS = (2, 4)
SHORT = 600
"""Letters of an example, at most"""
Messages = list[dict[str, str]]


def passages(texts: list[str], draw: random.Random) -> Iterator[str]:
    """Stretches of texts, without end; longer texts give more."""
    words = [text.split() for text in texts]
    for text in iter(lambda: draw.choices(words, weights=map(len, words))[0], None):
        size = draw.randint(*WORDS)
        start = draw.randrange(max(1, len(text) - size))
        yield " ".join(text[start : start + size])


def questions(text: str, count: int, draw: random.Random) -> Iterator[str]:
    """Questions about names in the text, none if it has too few."""
    names = sorted(set(NAME.findall(text)))
    for _ in range(count if len(names) > 1 else 0):
        name, other = draw.sample(names, 2)
        asked = draw.choice(QUESTIONS).format(name=name, other=other)
        yield draw.choice((asked, asked.lower()))


def translations(text: str, count: int, draw: random.Random) -> Iterator[str]:
    sentences = [" ".join(each.split()) for each in SENTENCE_END.split(text)]
    usable = sorted({each for each in sentences if SENTENCE[0] <= each.count(" ") <= SENTENCE[1]})
    for sentence in draw.choices(usable, k=count) if usable else ():
        yield draw.choice(TRANSLATION_ASKS).format(text=sentence)


def text_prompts(texts: list[str], count: int, draw: random.Random) -> Iterator[str]:
    """Asks about passages of texts; a third are a passage and a question behind it."""
    for passage in islice(passages(texts, draw), count):
        question = next(questions(passage, 1, draw), "What is the text about?")
        behind = "{text}\n{question}"
        yield draw.choice((behind, *draw.sample(ASKS, 2))).format(text=passage, question=question)


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
    parser.add_argument("--texts", nargs="*", type=Path, default=[], help="plain texts for long prompts")
    parser.add_argument("--questions", type=int, default=0, help="how many short questions about names in the texts")
    parser.add_argument("--german", nargs="*", type=Path, default=[], help="plain texts to translate")
    parser.add_argument("--translations", type=int, default=0, help="how many sentences of those")
    parser.add_argument("--openings", type=int, help="of the chats themselves, at most; all by default")
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
    texts, german = ([each.read_text(errors="replace") for each in some] for some in (options.texts, options.german))
    from_texts = options.long // 2 if texts else 0
    kept = len(openings) if options.openings is None else min(options.openings, len(openings))
    prompts = [*draw.sample(openings, kept), *few_shot_prompts(files, options.few_shot, draw)]
    asked = [*text_prompts(texts, from_texts, draw), *long_prompts(chats, options.long - from_texts, draw)]
    asked += questions(" ".join(texts), options.questions, draw)
    asked += translations(" ".join(german), options.translations, draw)
    for text in draw.choices(list(functions()), k=options.code) if options.code else ():
        asked.append(draw.choice(CODE_ASKS).format(text=text))
    prompts += [[{"role": "user", "content": text}] for text in asked]
    draw.shuffle(prompts)
    with options.out.open("w") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
