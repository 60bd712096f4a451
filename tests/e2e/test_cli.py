"""The command as a user types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mars import Model, cli, load
from mars.cli import main
from mars.engine.cpu import RaggedPolicy, StepSeconds
from mars.models import builtin

Command = Callable[..., subprocess.CompletedProcess[str]]


def mars(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mars.cli", *arguments]
    return subprocess.run(
        command, input=stdin, env=os.environ | environment, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, which need not load everything again."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["mars", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), said.out, said.err)

    return run


def test_show_steps_colours_by_forward() -> None:
    asked = ("generate", "Hi", "--max-new-tokens", "6", "--dial", "one-token", "--show-steps")
    done = mars(*asked, FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"\x1b\[(9[0-9])m", done.stdout))) >= 3
    assert "6 tokens in 6 forwards: 1.00 per forward" in done.stdout


def test_json_and_plain_text_of_a_prompt_typed_or_piped() -> None:
    asked = ("--max-new-tokens", "24", "--temperature", "0.3", "--seed", "1", "--system", "Answer with code only.")
    question = "Write a Python function that prints :smile: [bold]."
    typed = mars("generate", question, "--dial", "exact", *asked, "--json")
    assert typed.returncode == 0, typed.stderr
    out = json.loads(typed.stdout)
    assert out["text"] and out["finish_reason"] in ("stop", "length") and out["dial"] == "exact"
    assert out["tokens"] == len(out["token_ids"]) <= 24
    assert out["tokens_per_forward"] == out["tokens"] / out["forwards"]
    assert out["agreement"] == 1
    assert out["tokens_per_second"] == pytest.approx(out["tokens"] / out["seconds"])
    piped = mars("generate", "-", *asked, stdin=question)
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == out["text"] + "\n"


def test_chat_remembers_and_turns_the_dial() -> None:
    smollm = load("smollm2-135m", device="cpu")  # in the precision that the command has
    lines = ["My name is Ada.", "/dial exact", "What is my name?", "/dial warp", "/help", "/reset", "/exit"]
    done = mars("chat", "--max-new-tokens", "16", stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    said = [{"role": "user", "content": "My name is Ada."}]
    said.append({"role": "assistant", "content": smollm.generate(said, max_new_tokens=16).text})
    said.append({"role": "user", "content": "What is my name?"})
    remembered = smollm.generate(said, max_new_tokens=16).text
    assert remembered != smollm.generate("What is my name?", max_new_tokens=16).text
    assert remembered in done.stdout.split("dial exact", 1)[1]
    assert "error: unknown dial 'warp'" in done.stdout
    assert done.stdout.count("per second") == 2


def test_chat_ends_with_its_input(chat_model: Path) -> None:
    assert mars("chat", "--model", str(chat_model), stdin="").returncode == 0


def test_demo(smollm: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process and with two prompts, for the time it takes; the whole of it is `make demo`."""
    monkeypatch.setattr(cli, "_load", lambda *_: smollm)
    monkeypatch.setattr(cli, "DEMO_PROMPTS", cli.DEMO_PROMPTS[:2])
    monkeypatch.setattr(cli, "DEMO_TOKENS", 32)
    monkeypatch.setenv("COLUMNS", "100")
    engine = smollm.engine()
    policy = RaggedPolicy(engine.block_size, StepSeconds(lambda *_: 1.0, engine.block_size - 1))
    monkeypatch.setattr(engine, "policy", policy)
    monkeypatch.setattr(policy, "observe_step", lambda *_: None)  # masks cost nothing, whatever they take
    cli.demo()
    said = capsys.readouterr().out
    assert said.count("tokens per second") == 2
    rows = re.findall(r"│ (one-token|exact|threshold=0.9) +│ ([\d.]+) +│ [\d.]+ +│ ([\d.]+) +│ (yes|no) +│", said)
    assert [dial for dial, *_ in rows] == ["one-token", "exact", "threshold=0.9"] * 2
    for dial, per_forward, agreement, same in rows:
        if dial == "exact":
            assert float(per_forward) > 1.5
            assert (agreement, same) == ("1.00", "yes")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hi", "--dial", "warp"], "unknown dial 'warp'"),
        (["hi", "--dial", "threshold=1.5"], "τ must be between 0 and 1"),
        (["hi", "--dial", "relaxed=0"], "δ must be above 0"),
        (["hi", "--model", "/no/such/model"], "there is no folder /no/such/model"),
        (["hi", "--model", "nobody/nothing"], "no model 'nobody/nothing'"),
        (["hi", "--adapter", "/no/such/adapter"], "not an adapter folder"),
        (["hi", "--dial", "exact"], "train it with `mars train`"),
        (["hi", "--window", "forest"], "unknown window"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--temperature", "1e308"], "temperature must be between 0 (greedy) and 1e+06"),
        (["hi", "--temperature", "nan"], "temperature must be a finite number"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens"),
        (["", "--json"], "the prompt is empty"),
        (["a" * 300], "shorten the prompt"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], says: str, chat_model: Path, here: Command) -> None:
    model = () if "--model" in arguments else ("--model", str(chat_model))
    assert_one_line(here("generate", *arguments, *model), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nowhere.yaml"], "the recipe nowhere.yaml cannot be read"),
        (["train", "RECIPE"], "stages.0.loss.cleen"),
        (["distill", "out.jsonl"], "nothing to answer"),
        (["distill", "out.jsonl", "--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["distill", "out.jsonl", "--own-prompts", "1", "--temperatures", "hot"], "temperatures"),
        (["distill", "out.jsonl", "--own-prompts", "1", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["serve", "--rows", "0"], "--rows must be at least 1, not 0"),
        (["eval", "--dials", "one-token", "--out", "o", "--rows", "-1"], "--rows must be at least 1, not -1"),
        (["eval", "--dials", "one-token", "--out", "o", "--memory", "0.5"], "a share, which works on a GPU only"),
    ],
)
def test_training_mistakes_are_one_clear_line(
    arguments: list[str], says: str, chat_model: Path, tmp_path: Path, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = "{stage: mars, loss: {cleen: 1}}"
    (tmp_path / "RECIPE").write_text(f"{{model: m, output: o, data: {{train: [d]}}, stages: [{stage}]}}")
    model = () if arguments[0] == "train" else ("--model", str(chat_model))
    assert_one_line(here(*arguments, *model), says)


def test_a_server_that_cannot_start_says_why(chat_model: Path) -> None:
    done = mars("serve", "--model", str(chat_model), "--port", "0", "--memory", "0.5")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: memory=0.5 is a share, which works on a GPU only")


def test_a_damaged_cache_is_one_clear_line(tmp_path: Path) -> None:
    folder = tmp_path / builtin.builtin_folder().name
    shutil.copytree(builtin.builtin_folder(), folder)
    os.truncate(folder / "model.safetensors", 1000)
    assert_one_line(mars("generate", "hi", MARS_HOME=str(tmp_path)), f"delete {folder} and try again")


def assert_one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and says in lines[0]
