"""The benchmarks: what is asked, and that right answers score and wrong ones do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mars.errors import MarsError
from tests.evaluation.benchmark_files import ROWS, gpqa_letter, write_benchmarks

pytest.importorskip("lm_eval")
from mars.evaluation.tasks import BENCHMARKS, Exam, open_exam


def chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
    return f"{text}[assistant]" if add_generation_prompt else text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


def exam(name: str, data: Path, **options: object) -> Exam:
    return open_exam(name, **{"chat": chat, "data": data, **options})


RIGHT = {
    "ifeval": ["Spring Summer Autumn Winter", "a cat is small. it sleeps a lot."],
    "bbh": ["Not False is True. So the answer is True.", "1 + 1 + 2 = 4. So the answer is 4."],
    "mmlu_pro": ["An insect has six. The answer is (D).", "It is four. The answer is (B)."],
    "gsm8k": ["3 + 4 = 7. The answer is 7.", "3 * 60 = 180, so the answer is 180."],
    "humaneval": [row["canonical_solution"] + "```\nThat is it." for row in ROWS["humaneval"]],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_right_answers_score_and_wrong_ones_do_not(name: str, data: Path) -> None:
    asked = exam(name, data)
    letters = [gpqa_letter(item.prompt) for item in asked.items] if asked.benchmark.is_private else []
    right = RIGHT.get(asked.benchmark.form_of or name, [f"Think. The answer is ({letter})." for letter in letters])
    assert [each[asked.benchmark.score] for each in asked.score(right)] == [1.0, 1.0]
    assert [each[asked.benchmark.score] for each in asked.score(["WRONG, of course", right[1]])] == [0.0, 1.0]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_asked(name: str, data: Path) -> None:
    first, again = exam(name, data), exam(name, data)
    assert [item.prompt for item in first.items] == [item.prompt for item in again.items]
    assert len({item.id for item in first.items}) == len(first.items) == 2
    assert all("[user]" in item.prompt for item in first.items)
    if name == "bbh":
        assert first.items[0].prompt.count("[user]") == 4  # three examples before the question
    if name == "humaneval":
        assert first.items[0].prompt.endswith(ROWS["humaneval"][0]["prompt"] + "\n")
    if name.startswith("gsm8k"):
        assert first.items[0].prompt.count("[user]") == (6 if name == "gsm8k_cot_5" else 1)
        assert ("Let's think step by step" in first.items[0].prompt) == (name == "gsm8k")
    plain = exam(name, data, chat=None)
    assert "[user]" not in plain.items[0].prompt


def test_rows_of_an_unknown_part_are_refused(tmp_path: Path) -> None:
    rows = [ROWS["bbh"][0], ROWS["bbh"][0] | {"task": "Boolean Expressions!"}]
    (tmp_path / "bbh.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        MarsError, match="1 rows of bbh belong to no part of BBH: task must be such as boolean_expressions"
    ):
        exam("bbh", tmp_path)


def test_without_the_hub_it_says_what_to_do() -> None:
    with pytest.raises(MarsError, match=r"GSM8K cannot be had from the hub .*: give --data-dir, or leave the task out"):
        open_exam("gsm8k", chat=None)


def test_scores_do_not_depend_on_chance(data: Path) -> None:
    answers = ["ein zwei drei, vier", "the cat sat. le chat aussi."]
    assert exam("ifeval", data).score(answers) == exam("ifeval", data).score(answers)


def test_a_larger_limit_keeps_the_items_of_a_smaller_one(tmp_path: Path) -> None:
    rows = [f'{{"question": "What is {n} + 1?", "answer": "#### {n + 1}"}}' for n in range(40)]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(rows))
    few, many, other = (
        {item.id for item in exam("gsm8k", tmp_path, limit=limit, seed=seed).items}
        for limit, seed in ((5, 0), (20, 0), (5, 1))
    )
    assert len(few) == 5 and len(many) == 20 and few < many and few != other


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("other.jsonl", b"", "has no gsm8k_test.jsonl"),
        ("gsm8k_test.jsonl", b"", "has no rows"),
        ("gsm8k_test.jsonl", b'{"question": ', "cannot be read"),
        ("gsm8k_test.jsonl.gz", b"not gzip", "cannot be read"),
        ("gsm8k_test.zip", b"not zip", "cannot be read"),
        ("gsm8k_test.jsonl", b'{"query": 1}', "no 'question'"),
    ],
)
def test_files_that_are_no_benchmark(file: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(MarsError, match=says):
        exam("gsm8k", tmp_path)


def test_nltk_does_not_say_that_it_cannot_download(tmp_path: Path) -> None:
    """We say it ourselves, in one line."""
    code = "import nltk; nltk.data.path = []; from mars.evaluation.tasks import _prepare_ifeval; _prepare_ifeval()"
    offline = {"MARS_HOME": str(tmp_path), "HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | offline, text=True, capture_output=True, check=True
    )
    assert done.stderr.splitlines() == ["IFEval: nltk's punkt_tab cannot be downloaded; sentences are split without it"]
