"""The training benchmarks run and write what the docs quote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.e2e.test_benchmarks import run
from tests.training.conftest import small_recipe

SIZES = ["--length=64", "--rows=2", "--steps=3", "--warm-up=1", "--no-compile"]


@pytest.mark.parametrize("options", [[], ["--lora=4", "--adapter=merged"]], ids=["weights", "merged"])
def test_training_speed(options: list[str], chat_model: Path, tmp_path: Path) -> None:
    record = run("training_speed.py", tmp_path / "out.json", "--model", str(chat_model), *SIZES, *options)
    assert [(each["stage"], each["lora"]) for each in record["results"]] == [(s, bool(options)) for s in ("ar", "mars")]
    assert record["time_ratio"] > 0


def test_training_speed_of_a_gated_adapter(chat_model: Path, tmp_path: Path) -> None:
    record = run("training_speed.py", tmp_path / "out.json", "--model", str(chat_model), *SIZES, "--lora=4")
    found = [(each["stage"], each["adapter"]) for each in record["results"]]
    assert found == [("ar", None), ("ar", "merged"), ("mars", "gated")]
    assert record["time_ratio"] > 0
    assert record["full_time_ratio"] > 0


def test_a_leaderboard_goes_on_where_it_was(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    trainer = {"max_steps": 2, "use_cpu": True}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", trainer=trainer, lora={"r": 4})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc", "category": "up"}\n{"prompt": "fed"}\n')
    runs, out = tmp_path / "runs.yaml", tmp_path / "out.json"
    given = [str(tmp_path / "recipe.yaml"), str(runs), f"--prompts={tmp_path / 'prompts.jsonl'}"]
    given += [f"--work={tmp_path / 'work'}", "--max-new-tokens=4"]
    runs.write_text("ours:\nbad: {lora: {dropout: 1}}\n")
    with pytest.raises(AssertionError, match=r"lora\.dropout is not an option"):
        run("leaderboard.py", out, *given)
    runs.write_text("ours:\n")
    first = run("leaderboard.py", out, *given)["runs"]
    runs.write_text("ours:\nno head: {markov_rank: 0}\n")
    second = run("leaderboard.py", out, *given)["runs"]
    assert set(second) == {"ours", "no head"} and second["ours"] == first["ours"]
    for found in second.values():
        assert found["scores"].keys() == {"chain", "tree", "chain, temperature 0.7"}
        assert all(set(each) == {"all", "up", "prompts"} and each["all"] >= 1 for each in found["scores"].values())
    config = json.loads((tmp_path / "work/no-head/recipe.json").read_text())
    assert config["markov_rank"] == 0 and config["lora"] == {"r": 4}
    runs.write_text("ours: {lora: {r: 2}}\n")  # another change of the same name is not scored with the old model
    assert run("leaderboard.py", out, *given)["runs"] == second


def test_conversion(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc", "category": "up"}\n{"turns": ["fed", "cba"]}\n')
    options = [f"--model={chat_model}", f"--base={chat_model}", "--dials", "one-token", "--max-new-tokens=8"]
    record = run("conversion.py", tmp_path / "out.json", *options, f"--prompts={tmp_path / 'prompts.jsonl'}")
    assert set(record["dials"]["one-token"]) == {"all", "up", "prompts"}
    assert record["drift"]["base_on_base"] == record["drift"]["model_on_base"] == record["drift"]["base_on_model"]
