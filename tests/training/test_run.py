"""Whole training runs of a tiny model: what is learned, what survives a kill, what several processes make of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import mars
from mars import cli
from mars.errors import MarsError
from mars.models.adapter_files import dequantised
from mars.training.gated import TRAINED
from mars.training.recipe import Recipe
from mars.training.run import train
from mars.training.trainer import COMPLETE, arguments, last_checkpoint
from tests.training.conftest import small_recipe

LORA = {"r": 8}
MERGED: dict[str, Any] = {"lora": LORA, "adapter": "merged"}
GATED: dict[str, Any] = {"lora": LORA, "markov_rank": 4}


def write(recipe: Recipe, path: Path) -> Path:
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return path


def command(*arguments: object, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", *launcher, "mars", "train", *map(str, arguments)]


def trained(output: Path) -> dict[str, torch.Tensor]:
    """What was trained: all weights, or a gated adapter before it is rounded to 8 bits."""
    return next((load_file(path) for path in sorted(output.glob(f"*/finished/{TRAINED}"))[::-1]), weights(output))


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def published(output: Path) -> dict[str, torch.Tensor]:
    """The weights, or a gated adapter."""
    if not (output / "model" / "mars").exists():
        return weights(output)
    stored = load_file(output / "model" / "mars" / "adapter.safetensors")
    return {name: dequantised(stored, name) for name in stored if not name.endswith(".scale")}


def metrics(output: Path, stage: str = "1-mars") -> dict[str, float]:
    return json.loads((output / stage / "finished" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def whole_run(chat_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of both stages, trained without interruption."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    stages = [{"stage": "ar", "trainer": {"max_steps": 20}}, {"stage": "mars", "trainer": {"max_steps": 150}}]
    train(small_recipe(chat_model, chats, output, stages=stages))
    return output


def test_a_run_teaches_the_masks_to_guess(whole_run: Path) -> None:
    before, after = metrics(whole_run, "1-ar"), metrics(whole_run, "2-mars")
    assert after["eval_clean_loss"] < before["eval_clean_loss"]
    assert after["eval_mask_accuracy_2"] > before["eval_mask_accuracy_2"] + 0.3
    assert after["eval_tokens_per_forward_tree"] > after["eval_tokens_per_forward_chain"] > 1.3


def test_the_finished_checkpoint_decodes_faster_and_the_same(whole_run: Path) -> None:
    model = mars.load(whole_run / "model")
    prompts = ["abcdef", "bdfhj", "cfi", "ghijab", "fhjbd"]
    plain = model.generate(prompts, dial="one-token", max_new_tokens=30)
    exact = model.generate(prompts, max_new_tokens=30, window="tree")
    assert {each.dial for each in exact} == {"exact"}
    assert [each.token_ids for each in exact] == [each.token_ids for each in plain]
    assert sum(each.num_tokens for each in exact) > 1.2 * sum(each.forwards for each in exact)


def test_the_finished_checkpoint_is_a_plain_one(whole_run: Path) -> None:
    folder = whole_run / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("abc", return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    exact = model.generate(**inputs, **options, custom_generate=str(folder), trust_remote_code=True, dial="exact")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(plain[:, : exact.shape[1]], exact)
    card = (folder / "README.md").read_text()
    assert "tokens per forward chain" in card
    assert "the weights are not those of" in card and "bit for bit" not in card
    assert "learning_rate: 0.005" in card


def test_what_is_finished_is_not_trained_again(whole_run: Path) -> None:
    recipe = Recipe.model_validate_json((whole_run / "recipe.json").read_text())
    with pytest.raises(MarsError, match="finished already"):
        train(recipe)


def test_another_recipe_does_not_go_on_with_this_ones_output(whole_run: Path, chat_model: Path, chats: Path) -> None:
    (whole_run / "model").rename(whole_run / "aside")
    try:
        with pytest.raises(MarsError, match="another recipe"):
            train(small_recipe(chat_model, chats, whole_run, seed=1))
    finally:
        (whole_run / "aside").rename(whole_run / "model")


@pytest.mark.parametrize("kind", [{}, MERGED, GATED], ids=["weights", "merged", "gated"])
def test_a_killed_run_goes_on_to_the_same_end(
    kind: dict[str, Any], chat_model: Path, chats: Path, tmp_path: Path
) -> None:
    """Killed in the second stage: the first is taken as it is, the second from its last complete checkpoint."""
    trainer = {"max_steps": 12, "save_steps": 4}
    stages = [{"stage": "ar", "trainer": trainer}, {"stage": "mars", "trainer": trainer, "loss": {"base": 0.1}}]
    if kind is GATED:
        stages = [{"stage": "mars", "trainer": trainer, "streams": {"block_size": size}} for size in (2, 4)]
    changes = {"stages": stages, **kind}
    killed, whole = (small_recipe(chat_model, chats, tmp_path / name, **changes) for name in ("killed", "whole"))
    slow = dict(os.environ, OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command(write(killed, tmp_path / "recipe.yaml")), env=slow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    reached = killed.output / "2-mars" / "checkpoint-4" / COMPLETE
    while not reached.exists():
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed.output / "model").exists()
    (killed.output / "2-mars" / "checkpoint-11").mkdir()  # as if killed while it was being written
    train(killed)
    train(whole)
    assert metrics(killed.output, "2-mars") == pytest.approx(metrics(whole.output, "2-mars"), abs=1e-4)
    ours, theirs = trained(killed.output), trained(whole.output)
    for name, tensor in theirs.items():
        assert torch.allclose(tensor, ours[name], atol=1e-5), name


@pytest.mark.parametrize("kind", [{}, GATED], ids=["weights", "gated"])
@pytest.mark.parametrize("how", ["processes", "accumulation"])
def test_the_same_step_in_parts_is_the_same_step(
    how: str, kind: dict[str, Any], chat_model: Path, chats: Path, tmp_path: Path
) -> None:
    """Two processes, or two accumulation steps, of two rows each against one process with four rows."""
    one = small_recipe(chat_model, chats, tmp_path / "one", trainer=trainer_options(4), **kind)
    train(one)
    if how == "processes":
        parts = small_recipe(chat_model, chats, tmp_path / "parts", trainer=trainer_options(2), **kind)
        launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m")
        path = write(parts, tmp_path / "recipe.yaml")
        done = subprocess.run(
            command(path, launcher=launcher), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
    else:
        options = trainer_options(2) | {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
        parts = small_recipe(chat_model, chats, tmp_path / "parts", trainer=options, **kind)
        train(parts)
    assert metrics(parts.output) == pytest.approx(metrics(one.output), abs=1e-3)
    ours, theirs = trained(parts.output), trained(one.output)
    for name, tensor in theirs.items():
        assert torch.allclose(tensor, ours[name], atol=1e-3), name


def trainer_options(rows: int) -> dict[str, Any]:
    options = {"learning_rate": 5e-3, "logging_steps": 5, "use_cpu": True, "max_steps": 8}
    return options | {"per_device_train_batch_size": rows, "optim": "sgd"}


@pytest.mark.filterwarnings("error::FutureWarning")
def test_checkpointing_has_the_name_that_transformers_uses_now(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    options = trainer_options(2) | {"gradient_checkpointing": True}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", trainer=options)
    made = arguments(recipe, recipe.stages[0], tmp_path, rows=1)
    assert made.gradient_checkpointing and made.gradient_checkpointing_kwargs == {"use_reentrant": False}


def test_a_merged_adapter_is_published_beside_the_model(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    recipe = small_recipe(chat_model, chats, tmp_path / "run", **MERGED)
    train(recipe)
    merged, adapted = (mars.load(recipe.output / each, dtype="float32") for each in ("model", "adapter"))
    assert adapted.settings == merged.settings
    answers = [model.generate("abc", dial="threshold=0.5", max_new_tokens=20) for model in (merged, adapted)]
    assert answers[0].token_ids == answers[1].token_ids
    base = AutoModelForCausalLM.from_pretrained(chat_model)
    rows = merged.checkpoint.module.get_input_embeddings().weight - base.get_input_embeddings().weight
    mask = merged.checkpoint.mask_token_id
    changed = rows.abs().sum(1).nonzero().flatten().tolist()
    assert changed == [mask], "of the embedding, the mask's row alone was trained"


@pytest.fixture(scope="module")
def gated_run(chat_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a gated adapter's training."""
    output = tmp_path_factory.mktemp("runs") / "gated"
    trainer = trainer_options(4) | {"max_steps": 150, "learning_rate": 1e-2, "optim": "adamw_torch"}
    train(small_recipe(chat_model, chats, output, trainer=trainer, **GATED))
    return output


def test_a_gated_checkpoint_has_the_files_of_its_base(gated_run: Path, chat_model: Path) -> None:
    folder, added = gated_run / "model", {"README.md", "mars", "custom_generate"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in chat_model.iterdir()} | added
    for path in chat_model.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list((gated_run / "1-mars" / "finished").glob("model*")), "of a stage, the adapter alone is kept"
    card = (folder / "README.md").read_text()
    assert "A gated adapter" in card and "bit for bit" in card and "mars/config.json" in card
    assert card == (gated_run / "adapter" / "README.md").read_text()


def test_a_gated_adapter_loads_with_its_base_and_alone(gated_run: Path, chat_model: Path) -> None:
    """Alone it names its base. All three ways draft the same, and `exact` writes what the base model writes."""
    ways = [mars.load(gated_run / "model"), mars.load(gated_run / "adapter")]
    ways.append(mars.load(chat_model, adapter=gated_run / "adapter"))
    prompts = ["abcdef", "bdfhj", "cfi", "ghijab", "fhjbd"]
    drafts = [[each.token_ids for each in model.generate(prompts, dial="threshold=0")] for model in ways]
    assert drafts[0] == drafts[1] == drafts[2]
    base = mars.load(chat_model).generate(prompts, max_new_tokens=30)
    exact = ways[0].generate(prompts, max_new_tokens=30, window="tree")
    assert [each.token_ids for each in exact] == [each.token_ids for each in base]
    assert sum(each.num_tokens for each in exact) > sum(each.forwards for each in exact)


def test_a_gated_adapter_learns_to_guess(gated_run: Path) -> None:
    found = metrics(gated_run)
    assert found["eval_mask_accuracy_2"] > 0.35
    assert found["eval_tokens_per_forward_tree"] > found["eval_tokens_per_forward_chain"] > 1.25


def test_a_gated_checkpoint_decodes_in_transformers(gated_run: Path) -> None:
    folder = gated_run / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("abc", return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    exact = model.generate(**inputs, **options, custom_generate=str(folder), trust_remote_code=True, dial="exact")
    assert torch.equal(plain, exact)


def test_the_papers_setting_trains(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    streams = {"anchors": "fixed", "block_size": 4}
    stage = {"stage": "mars", "streams": streams, "loss": {"clean": 1.0, "labels": 1.0, "distill": 0.0}}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", stages=[stage])
    train(recipe)
    assert metrics(recipe.output)["eval_mask_accuracy_2"] > 0.3


@pytest.mark.parametrize(
    ("kind", "message"),
    [(MERGED, "cannot be gone on from"), (GATED, "was made with other options")],
    ids=["merged", "gated"],
)
def test_training_goes_on_from_an_adapter(
    kind: dict[str, Any], message: str, chat_model: Path, chats: Path, tmp_path: Path
) -> None:
    first = small_recipe(chat_model, chats, tmp_path / "first", **kind)
    train(first)
    trainer = {"max_steps": 1, "learning_rate": 1e-9, "use_cpu": True}
    changes = kind | {"from_adapter": str(first.output / "adapter"), "trainer": trainer}
    second = small_recipe(chat_model, chats, tmp_path / "second", **changes)
    train(second)
    torch.testing.assert_close(published(second.output), published(first.output), rtol=0, atol=1e-6)
    with pytest.raises(MarsError, match=message):
        train(small_recipe(chat_model, chats, tmp_path / "other", **changes | {"lora": {"r": 4}}))
    assert not (tmp_path / "other").exists()


def test_training_does_not_go_on_from_the_adapter_of_another_model(
    chat_model: Path, chats: Path, tmp_path: Path
) -> None:
    """One of the same shape: only the weights tell them apart."""
    once = {"trainer": {"max_steps": 1, "use_cpu": True}}
    first = small_recipe(chat_model, chats, tmp_path / "first", **GATED | once)
    train(first)
    other = shutil.copytree(chat_model, tmp_path / "other-model")
    weights = load_file(other / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    changes = GATED | {"from_adapter": str(first.output / "adapter")}
    with pytest.raises(MarsError, match="the weights of this one are others"):
        train(small_recipe(other, chats, tmp_path / "second", **changes))
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("kind", [MERGED, GATED], ids=["merged", "gated"])
def test_a_second_adapter_on_top_of_one_is_refused(kind: dict[str, Any], chats: Path, tmp_path: Path) -> None:
    """It could not be published: an adapter is for a plain model."""
    with pytest.raises(MarsError, match="brings an adapter"):
        train(small_recipe(Path("smollm2-135m"), chats, tmp_path / "run", **kind))


def test_a_gated_adapter_needs_a_base_that_mars_has_not_trained(whole_run: Path, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(MarsError, match="is a MARS model already"):
        train(small_recipe(whole_run / "model", chats, tmp_path / "run", **GATED))


def test_an_ar_stage_alone_makes_an_ordinary_model(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    folder = train(small_recipe(chat_model, chats, tmp_path / "run", stages=[{"stage": "ar"}]))
    assert mars.load(folder).settings is None
    assert not (folder / "custom_generate").exists()
    assert "ordinary autoregressive" in (folder / "README.md").read_text()


def test_dropout_and_numbers_that_yaml_takes_for_texts(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    stages = [{"stage": "ar"}, {"stage": "mars", "streams": {"block_size": 2}}]
    trainer = {"max_steps": 2, "learning_rate": "1e-4", "use_cpu": True}
    kind = MERGED | {"lora": LORA | {"lora_dropout": 0.1}}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", stages=stages, trainer=trainer, **kind)
    assert mars.load(train(recipe)).settings.block_size == 2
    assert "training_args.bin" not in [path.name for path in (recipe.output / "adapter").iterdir()]


def test_answers_too_short_for_any_mask(chat_model: Path, tmp_path: Path) -> None:
    """One cut token: the clean stream is asked, no mask is."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "abc", "completion": "d", "ended": false}\n' * 3)
    data = {"train": [str(path)], "length": 16, "held_out": 0}
    trainer = {"max_steps": 2, "use_cpu": True, "logging_steps": 1}
    assert train(small_recipe(chat_model, path, tmp_path / "run", data=data, trainer=trainer)).exists()


def test_idle_sampling_flags_do_not_stop_the_saving(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(chat_model, tmp_path / "model"))
    config = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.6, "top_p": 0.9}))
    assert train(small_recipe(model, chats, tmp_path / "run", trainer=trainer_options(4))).exists()


def test_chats_with_the_same_prompt_are_held_out_together(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "twins.jsonl"
    rows = [{"prompt": prompt, "completion": answer} for prompt in "abcdefgh" for answer in ("ij", "ji")]
    path.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "a", "completion": "\ud83d"}])))
    data = {"train": [str(path)], "length": 16, "held_out": 3, "packing": False}
    recipe = small_recipe(chat_model, path, tmp_path / "run", data=data, trainer=trainer_options(2))
    train(recipe)
    packs = [load_file(recipe.output / "data" / f"{name}.safetensors")["tokens"] for name in ("train", "held_out")]
    prompts = [{int(row[0]) for row in tokens} for tokens in packs]
    assert not prompts[0] & prompts[1]
    assert len(packs[1]) == 2 * len(prompts[1]) >= 3
    assert "twins.jsonl:17: the content" in (recipe.output / "data" / "bad_rows.txt").read_text()


def test_block_sizes_may_change_from_step_to_step(chat_model: Path, chats: Path, tmp_path: Path) -> None:
    stage = {"stage": "mars", "streams": {"block_size": [2, 3, 6]}}
    recipe = small_recipe(chat_model, chats, tmp_path / "run", stages=[stage])
    assert mars.load(train(recipe)).settings.block_size == 6


def test_held_out_chats_are_measured_on_the_way(
    chat_model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = trainer_options(4) | {"eval_strategy": "steps", "eval_steps": 4}
    train(small_recipe(chat_model, chats, tmp_path / "run", trainer=options))
    lines = capsys.readouterr().err.splitlines()
    assert sum("eval_tokens_per_forward_tree" in line for line in lines) == 3  # after 4 and 8 steps, and at the end
    assert any("step 5/8" in line and "tokens/s" in line and "left" in line for line in lines)


def test_half_written_checkpoints_are_never_taken_for_whole_ones(tmp_path: Path) -> None:
    for step, complete in ((5, True), (10, True), (15, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / COMPLETE).touch()
    assert last_checkpoint(tmp_path, clean=False) == tmp_path / "checkpoint-10"
    assert (tmp_path / "checkpoint-15").exists()
    last_checkpoint(tmp_path, clean=True)
    assert not (tmp_path / "checkpoint-15").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"learning_rat": 1}}, "learning_rat"),
        ({"trainer": {"remove_unused_columns": True}}, "remove_unused_columns"),
        ({"trainer": {"save_total_limit": 1}}, "save_total_limit"),
        ({"trainer": {"eval_strategy": "epoch"}}, "eval_strategy"),
        ({"trainer": {"load_best_model_at_end": True}}, "load_best_model_at_end"),
        ({"trainer": {"report_to": "tensorboard"}}, "[Tt]ensor[Bb]oard"),
        ({"lora": {"rank": 4}}, "rank"),
        ({"lora": {"rank": 4}, "adapter": "merged"}, "rank"),
        ({"data": {"train": ["CHATS"], "length": 300}}, "data.length is 300"),
        ({"lora": {"target_modules": ["nothing"]}}, "nothing"),
        ({"lora": {"target_modules": ["nothing"]}, "adapter": "merged"}, "nothing"),
        ({"lora": {}, "from_adapter": "nowhere"}, "nowhere has no gated adapter"),
        ({"data": {"train": ["nowhere.jsonl"], "length": 64}}, "nowhere.jsonl"),
        ({"data": {"train": ["CHATS"], "length": 64, "held_out": 500}}, "no chat to train on"),
    ],
)
def test_a_recipe_that_cannot_work_says_why(
    change: dict[str, Any], message: str, chat_model: Path, chats: Path, tmp_path: Path
) -> None:
    """And leaves no output folder, so that the corrected recipe can be run."""
    text = json.dumps(change).replace("CHATS", str(chats))
    with pytest.raises(MarsError, match=message):
        train(small_recipe(chat_model, chats, tmp_path / "run", **json.loads(text)))
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("error::UserWarning")  # libraries have nothing to say
def test_a_corrected_recipe_runs_in_the_same_output(
    chat_model: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, output = tmp_path / "recipe.yaml", tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["mars", "train", str(path)])
    write(small_recipe(chat_model, chats, output, trainer=trainer_options(4) | {"max_stepz": 2}), path)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    said = capsys.readouterr().err
    assert "max_stepz" in said and said.startswith("error: ") and said.count("\n") == 1
    assert not output.exists()
    write(small_recipe(chat_model, chats, output, trainer=trainer_options(4) | {"max_steps": 2}), path)
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert (output / "model").exists()
