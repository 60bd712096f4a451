"""The language model evaluation harness asks the server, and gets what the library writes one token at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import mars
from tests.serving.conftest import MODEL

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")  # lm-eval[api]

from lm_eval.tasks import TaskManager  # noqa: E402

QUESTIONS = ["abc", "bcd", "cde", "def", "efg", "fgh"]
LIMIT = 24


@pytest.fixture(scope="module")
def model(letters: Path) -> mars.Model:
    return mars.load(letters, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def until(model: mars.Model) -> list[str]:
    """Two letters that one of the answers has and two that none has."""
    text = model.generate(QUESTIONS[0], dial="one-token", max_new_tokens=LIMIT).text
    return [text[4:6], "##"]


@pytest.fixture(scope="module")
def expected(model: mars.Model, until: list[str]) -> list[str]:
    answers = model.generate(QUESTIONS, dial="one-token", max_new_tokens=LIMIT, stop=until)
    assert len({answer.finish_reason for answer in answers}) > 1, "all answers end alike: a weak test"
    return [answer.text for answer in answers]


@pytest.fixture
def tasks(tmp_path: Path, until: list[str], expected: list[str]) -> TaskManager:
    """One task, in which the library's answers are the right ones."""
    rows = [{"question": each, "answer": right} for each, right in zip(QUESTIONS, expected, strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": until, "max_gen_toks": LIMIT, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "letters.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.parametrize(
    ("kind", "address", "options"),
    [
        ("local-chat-completions", "chat/completions", {}),
        ("local-completions", "completions", {"tokenizer_backend": "huggingface", "batch_size": 2}),
    ],
)
def test_the_harness(
    server: str,
    letters: Path,
    tasks: TaskManager,
    expected: list[str],
    kind: str,
    address: str,
    options: dict[str, Any],
) -> None:
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": MODEL,
            "base_url": f"{server}/v1/{address}",
            "tokenizer": str(letters),
            "num_concurrent": 3,
            "max_retries": 1,
            "max_length": 256,
            **options,
        },
        tasks=["letters"],
        task_manager=tasks,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["letters"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == expected
    assert found["results"]["letters"]["exact_match,none"] == 1.0
