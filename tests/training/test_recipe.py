from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mars.errors import MarsError
from mars.training.recipe import parse_recipe, read_recipe
from mars.training.trainer import arguments

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALL = {"model": "m", "output": "o", "data": {"train": ["d.jsonl"]}, "stages": [{"stage": "mars"}]}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_we_ship_are_usable(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the options of transformers, on a machine without the GPU they are meant for."""
    recipe = read_recipe(path)
    assert "cost" in path.read_text().lower()
    for stage in recipe.stages:
        cpu = stage.model_copy(update={"trainer": stage.trainer | {"use_cpu": True, "bf16": False}})
        assert arguments(recipe, cpu, tmp_path, 1000).max_steps > 0


def test_the_papers_recipe_is_the_papers_setting() -> None:
    recipe = read_recipe(next(path for path in RECIPES if path.stem == "qwen2.5-0.5b-paper"))
    assert [stage.stage for stage in recipe.stages] == ["ar", "mars"]
    mars = recipe.stages[1]
    assert mars.streams.anchors == "fixed"
    assert (mars.loss.clean, mars.loss.labels, mars.loss.distill, mars.loss.base) == (1.0, 1.0, 0.0, 0.0)
    assert recipe.data.length == 512
    options = recipe.trainer | mars.trainer
    assert options["learning_rate"] == 5e-6
    assert options["num_train_epochs"] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": "x"}, "modle"),
        ({"data": {"train": []}}, "data.train"),
        ({"data": {"train": ["x"], "length": 2}}, "data.length"),
        ({"stages": []}, "stages"),
        ({"stages": [{"stage": "sft"}]}, "stages.0.stage"),
        ({"stages": [{"stage": "mars", "loss": {"clean": -1}}]}, "stages.0.loss.clean"),
        ({"stages": [{"stage": "mars", "streams": {"block_size": 1}}]}, "block_size"),
        ({"stages": [{"stage": "mars", "streams": {"block_size": []}}]}, "block_size"),
        ({"dial": "faster"}, "dial"),
        ({"adapter": "gated"}, "a gated adapter needs lora"),
        ({"adapter": "merged"}, "a merged adapter needs lora"),
        ({"adapter": "runs/before/adapter", "lora": {}}, "adapter"),
        ({"from_adapter": "runs/before/adapter"}, "say in lora how it was made"),
        ({"lora": {}, "stages": [{"stage": "ar"}, {"stage": "mars"}]}, "it has no ar stage"),
        ({"lora": {}, "stages": [{"stage": "mars", "loss": {"clean": 1.0}}]}, "loss.clean has no effect"),
        ({"lora": {}, "stages": [{"stage": "mars", "loss": {"base": 0.5}}]}, "loss.base has no effect"),
        ({"lora": {"lora_dropout": 0.1}}, "lora.lora_dropout is not an option of a gated adapter"),
        ({"markov_rank": -1}, "markov_rank"),
    ],
)
def test_a_mistake_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(MarsError, match=message) as caught:
        parse_recipe(SMALL | change)
    assert "\n" not in str(caught.value)


def test_lora_is_a_gated_adapter_unless_it_is_to_be_merged() -> None:
    both = [{"stage": "ar"}, {"stage": "mars", "loss": {"clean": 0.5, "base": 0.5}}]
    assert not parse_recipe(SMALL).gated
    assert parse_recipe(SMALL | {"lora": {"r": 8}}).gated
    merged = parse_recipe(SMALL | {"lora": {"r": 8, "lora_dropout": 0.1}, "adapter": "merged", "stages": both})
    assert not merged.gated
    assert merged.stages[1].loss.base == 0.5


@pytest.mark.parametrize("change", [{}, {"lora": {}}, {"lora": {}, "adapter": "merged"}])
def test_what_is_written_can_be_read_again(change: dict[str, object]) -> None:
    recipe = parse_recipe(SMALL | change)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(MarsError, match=r"nowhere\.yaml"):
        read_recipe(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(MarsError, match="not YAML"):
        read_recipe(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([1]))
    with pytest.raises(MarsError, match="not a usable recipe"):
        read_recipe(tmp_path / "list.yaml")
