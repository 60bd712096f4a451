"""``mars eval``: all benchmarks with the built-in model; what it keeps, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mars import cli
from tests.conftest import save_chat_model
from tests.evaluation.benchmark_files import gpqa_letter, write_benchmarks

pytest.importorskip("lm_eval")
from mars.evaluation.tasks import open_exam

Run = Callable[..., int]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny", trained=True)


@pytest.fixture
def run(data: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Type ``mars eval …``; returns the exit code."""

    def typed(*arguments: object) -> int:
        typed = ["mars", "eval", "--data-dir", data, *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, typed)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return int(left.value.code or 0)

    return typed


def results(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["task"], row["dial"]): row for row in json.loads((out / "results.json").read_text())["rows"]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_six_with_the_built_in_model(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    dials = ("one-token", "exact chain")  # the engine might choose no window at all on a slow machine
    assert run("--dials", ",".join(dials), "--max-new-tokens", 24, "--rows", 4, "--dtype", "float32", "--out", out) == 0
    found = results(out)
    tasks = ("ifeval", "bbh", "mmlu_pro", "gpqa", "gsm8k", "humaneval")
    assert set(found) == {(task, dial) for task in tasks for dial in dials}
    for task in tasks:
        one_token, exact = (lines(out / "samples" / f"{task}.{dial.replace(' ', '-')}.jsonl") for dial in dials)
        said = "digest" if task == "gpqa" else "text"
        assert [(each["item"], each[said], each["score"]) for each in one_token] == [
            (each["item"], each[said], each["score"]) for each in exact
        ]
        row = found[task, dials[1]]
        assert row["items"] == 2 and row["same_text"] == row["agreement"] == 1.0
        assert row["low"] <= row["score"] <= row["high"]
        assert row["against"]["better"] == row["against"]["worse"] == 0 and row["against"]["p"] == 1.0
        assert found[task, "one-token"]["tokens_per_forward"] == 1.0 and found[task, "one-token"]["against"] is None
    assert sum(found[task, dials[1]]["forwards"] for task in tasks) < sum(
        found[task, "one-token"]["forwards"] for task in tasks
    )
    whole = json.loads((out / "results.json").read_text())
    assert [each["dial"] for each in whole["averages"]] == [*dials]
    assert len(whole["model"]["hash"]) == 16 and whole["runs"][0]["versions"]["torch"]
    shown = next(each for each in whole["examples"] if (each["task"], each["dial"]) == ("gsm8k", dials[1]))
    assert "pens" in shown["prompt"] or "train" in shown["prompt"]
    assert not any(each["task"] == "gpqa" for each in whole["examples"])
    said = capsys.readouterr().out
    assert (
        "GSM8K" in said and "results.json" in said and "| GSM8K | exact chain | 2 |" in (out / "results.md").read_text()
    )


def test_it_goes_on_where_it_was_killed(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    dials = "one-token,exact chain"  # a window that is given, so that forwards are the same ones again
    command = ("--model", model, "--tasks", "gsm8k,humaneval", "--dials", dials, "--max-new-tokens", 20)
    assert run(*command, "--out", out) == 0
    before = results(out)
    answers = out / "answers" / "gsm8k.exact-chain.jsonl"
    first, second = answers.read_text().splitlines()
    answers.write_bytes(f"{first}\n{second[:40]}ä".encode()[:-1])  # killed in the middle of a line, and of a letter
    (out / "runs.jsonl").open("a").write('{"task": "gs')
    (out / "results.json").unlink()
    assert run(*command, "--out", out) == 0
    after = results(out)
    timing = ("seconds", "tokens_per_second")
    for row in (*before.values(), *after.values()):
        for name in timing:
            row.pop(name)
    assert before == after
    assert sorted(answers.read_text().splitlines()) == sorted([first, second])
    assert [each["answers"] for each in lines(out / "runs.jsonl")][-1:] == [1]  # only what was missing
    assert len(lines(out / "runs.jsonl")) == 5


def test_more_dials_and_items_later(run: Run, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("--model", model, "--max-new-tokens", 20, "--out", out)
    assert run(*command, "--tasks", "gsm8k", "--dials", "one-token", "--limit", 1) == 0
    assert (
        run(*command, "--tasks", "gsm8k,ifeval", "--dials", "one-token,exact chain", "--limit", "gsm8k=2,ifeval=1") == 0
    )
    assert {key: row["items"] for key, row in results(out).items()} == {
        ("gsm8k", "one-token"): 2,
        ("gsm8k", "exact chain"): 2,
        ("ifeval", "one-token"): 1,
        ("ifeval", "exact chain"): 1,
    }
    assert [each["answers"] for each in lines(out / "runs.jsonl")] == [1, 1, 2, 1, 1]


def test_answers_of_another_engine_are_not_mixed_in(
    run: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("--model", model, "--tasks", "gsm8k", "--dials", "one-token", "--max-new-tokens", 8, "--out", out)
    assert run(*command) == 0
    stored = json.loads((out / "eval.json").read_text())
    del stored["plan"]["engine"]  # as in older folders
    (out / "eval.json").write_text(json.dumps(stored))
    assert run(*command) == 0
    (out / "eval.json").write_text(json.dumps(stored | {"plan": stored["plan"] | {"engine": "vllm"}}))
    assert run(*command) == 2
    assert "has answers with engine=vllm, not mars" in capsys.readouterr().err


def test_scores_alone_need_no_model(run: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ("--tasks", "gsm8k", "--dials", "one-token", "--max-new-tokens", 20, "--out", out)
    assert run("--model", model, *command) == 0
    answers = out / "answers" / "gsm8k.one-token.jsonl"
    changed = [each | {"text": "The answer is 7."} for each in lines(answers)]
    answers.write_text("".join(json.dumps(each) + "\n" for each in changed))
    shutil.rmtree(out / "samples")  # only the answers were brought from elsewhere
    assert run("--model", "no-such-model", *command, "--score-only") == 0
    assert results(out)["gsm8k", "one-token"]["score"] == 0.5
    assert run("--model", "no-such-model", *command, "--dials", "exact", "--score-only") == 2
    assert "has no answer to 2 items of gsm8k with exact" in capsys.readouterr().err
    answers.write_text("".join(json.dumps(each | {"row": "another"}) + "\n" for each in changed))
    assert run("--model", "no-such-model", *command, "--score-only") == 2
    assert "gsm8k_cot_zeroshot/0 was another question when" in capsys.readouterr().err


def test_no_file_shows_questions_or_choices_of_gpqa(
    run: Run, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where answers quote them, as in a folder of an earlier version, which kept their text."""
    out, page = tmp_path / "out", tmp_path / "report"
    command = ("--model", model, "--tasks", "gpqa,gsm8k", "--dials", "one-token,exact", "--max-new-tokens", 20)
    assert run(*command, "--out", out) == 0
    for dial in ("one-token", "exact"):
        answers = out / "answers" / f"gpqa.{dial}.jsonl"
        assert not any({"text", "pieces"} & each.keys() for each in lines(answers))
        items = open_exam("gpqa", chat=None, data=data).items
        quoting = [item.prompt + f" It is ({gpqa_letter(item.prompt)})." for item in items]
        old = [
            {name: value for name, value in each.items() if name not in ("digest", "letter", "metrics")}
            | {"text": text, "pieces": [text, " indeed"]}
            for each, text in zip(sorted(lines(answers), key=lambda each: each["item"]), quoting, strict=True)
        ]
        answers.write_text("".join(json.dumps(each) + "\n" for each in old))
    assert run(*command, "--out", out, "--score-only") == 0
    assert results(out)["gpqa", "exact"]["score"] == results(out)["gpqa", "exact"]["same_text"] == 1.0
    letters = [gpqa_letter(item.prompt) for item in items]
    assert [each["letter"] for each in lines(out / "samples" / "gpqa.exact.jsonl")] == letters
    monkeypatch.setattr(sys, "argv", ["mars", "report", str(out), "--out", str(page)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    written = [path for folder in (out, page) for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 10
    for path in written:
        content = path.read_bytes()
        for text in (b"prime number", b"the largest", b"a galaxy", b"a planet", b"a star", b"a moon"):
            assert text not in content, f"{path} has {text!r}"


def test_answers_of_different_models_are_not_mixed(
    run: Run, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("--model", model, "--tasks", "gsm8k", "--dials", "one-token", "--out", out)
    assert run(*command, "--max-new-tokens", 20, "--dtype", "float32") == 0
    assert run(*command, "--max-new-tokens", 21, "--dtype", "float32") == 2
    assert "max_new_tokens=20, not 21" in capsys.readouterr().err
    assert run(*command, "--max-new-tokens", 20, "--dtype", "bfloat16") == 2
    assert "dtype=float32, not bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tasks", "gsm9k"), "--tasks has no 'gsm9k': choose from ifeval"),
        (("--dials", "sloppy"), "sloppy"),
        (("--limit", "many"), "--limit must be"),
        (("--limit", "bbh=3", "--tasks", "gsm8k"), "--limit must be"),
        (("--max-new-tokens", 0), "--max-new-tokens must be at least 1"),
        (("--data-dir", "nowhere"), "is no folder"),
        (("--out", f"{__file__}/out"), "test_evaluate.py is a file"),
        (("--score-only",), "holds no answers yet"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[object, ...], says: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dials", "one-token", "--out", tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and said.count("\n") == 1
