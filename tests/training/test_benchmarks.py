"""The training benchmarks run and write what the docs quote."""

from __future__ import annotations

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


def test_ablations(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    trainer = {"max_steps": 2, "use_cpu": True}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", trainer=trainer, lora={"r": 4})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    (tmp_path / "vary.yaml").write_text(
        "ours:\nlabels: {loss: {labels: 1.0, distill: 0.0}}\nfew: {rows: 3}\nbare: {markov_rank: 0}\n"
    )
    record = run("ablations.py", tmp_path / "out.json", str(tmp_path / "recipe.yaml"), str(tmp_path / "vary.yaml"))
    assert list(record["results"]) == ["ours", "labels", "few", "bare"]
    assert all(each["B=4"]["tokens_per_forward_chain"] >= 1 for each in record["results"].values())


def test_conversion(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc", "category": "up"}\n{"turns": ["fed", "cba"]}\n')
    options = [f"--model={chat_model}", f"--base={chat_model}", "--dials", "one-token", "--max-new-tokens=8"]
    record = run("conversion.py", tmp_path / "out.json", *options, f"--prompts={tmp_path / 'prompts.jsonl'}")
    assert set(record["dials"]["one-token"]) == {"all", "up"}
    assert record["drift"]["base_on_base"] == record["drift"]["model_on_base"] == record["drift"]["base_on_model"]
