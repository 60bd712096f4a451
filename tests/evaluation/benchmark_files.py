"""A few rows of our own in the form of each benchmark, with answers that are right and wrong."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

ROWS: dict[str, list[dict[str, Any]]] = {
    "ifeval": [
        {
            "key": 1,
            "prompt": "Name the four seasons. Do not use any commas in your answer.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        },
        {
            "key": 2,
            "prompt": "Describe a cat in at least two sentences. Write everything in lowercase letters.",
            "instruction_id_list": ["change_case:english_lowercase", "length_constraints:number_sentences"],
            "kwargs": [{}, {"num_sentences": 2, "relation": "at least"}],
        },
    ],
    "bbh": [
        {"task": "boolean_expressions", "input": "not False and True is", "target": "True"},
        {
            "task": "object_counting",
            "input": "I have a drum, a flute, and two pianos. How many are these?",
            "target": "4",
        },
    ],
    "mmlu_pro_test": [
        {
            "question_id": number,
            "question": question,
            "options": ["3", "4", "5", "6"],
            "answer": "ABCD"[right],
            "answer_index": right,
            "cot_content": "",
            "category": category,
            "src": "",
        }
        for number, (question, right, category) in enumerate(
            [("What is two plus two?", 1, "math"), ("How many legs has an insect?", 3, "biology")]
        )
    ],
    "gsm8k_test": [
        {"question": "Ann has 3 pens and buys 4 more. How many has she?", "answer": "3 + 4 = 7\n#### 7"},
        {"question": "A train makes 60 km in an hour. How many in 3 hours?", "answer": "60 * 3 = 180\n#### 180"},
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'def add(a: int, b: int) -> int:\n    """Return the sum of a and b."""\n',
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        },
        {
            "task_id": "HumanEval/1",
            "prompt": 'def longest(words: list[str]) -> str:\n    """Return the longest of the words."""\n',
            "entry_point": "longest",
            "canonical_solution": "    return max(words, key=len)\n",
            "test": "def check(candidate):\n    assert candidate(['a', 'abc', 'ab']) == 'abc'\n",
        },
    ],
}
GPQA_ZIP = base64.b64decode(
    "UEsDBBQAAQAIAAAAIQAlkkJjmwAAAE0BAAASAAAAZ3BxYV9kaWFtb25kLmpzb25s9RvtG+sJPeM1kYOBL5q9Akhs66Z5PiQniSqkP9fcnPWe"
    "rEdcjo3Aa2WGG5GxBA115iG7QY/eHu+jPcMZkam9XbyNfnNN3iuQR2NIxFTN5ZbJFbSUn/4weFx9nQP1gckCZOluD7DW0M3Clbgjh+2GlKda"
    "DasImCDOCrUu58xKSSt7F9WVhjrHluR1jTuWU5v198mlJAtGUGGsy1tQSwECFAAUAAEACAAAACEAJZJCY5sAAABNAQAAEgAAAAAAAAAAAAAA"
    "AAAAAAAAZ3BxYV9kaWFtb25kLmpzb25sUEsFBgAAAAABAAEAQAAAAMsAAAAAAA=="
)
"""Two questions, whose right answers are 17 and a galaxy, behind the password of the real ones"""


def write_benchmarks(folder: Path) -> Path:
    """All six, some of them compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if name in ("bbh", "humaneval"):
            (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}.jsonl").write_text(text)
    for name in ("gpqa_diamond", "gpqa_main"):
        (folder / f"{name}.zip").write_bytes(GPQA_ZIP)
    return folder


def gpqa_letter(prompt: str) -> str:
    """Of the right answer, wherever the shuffle put it."""
    right = next(each for each in (") 17", ") a galaxy") if each in prompt)
    return prompt[prompt.index(right) - 1]
