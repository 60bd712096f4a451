"""`train`: runs the stages of a recipe and publishes the checkpoint. A run that was cut off is continued."""

import copy
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.models import Settings, load_checkpoint
from mars.models.gated import GatedAdapter
from mars.models.layout import store_by_rows
from mars.models.loading import brings_adapter
from mars.models.settings import choose_mask_token
from mars.training.gated import ATTRIBUTE, gated_adapter, restore
from mars.training.objective import Objective, examine
from mars.training.packing import Collator
from mars.training.prepare import Prepared, check_owner, prepare
from mars.training.publish import publish
from mars.training.recipe import Recipe, Stage
from mars.training.trainer import MarsTrainer, arguments, check_trainer_options, last_checkpoint, rows_per_step

FINISHED = "finished"
RANK = 32
PATIENCE = timedelta(days=1)  # how long processes wait for the main one, which reads the data and publishes


@dataclass(frozen=True)
class TrainingModel:
    """The model in training."""

    module: nn.Module  # what is trained: the language model, or peft's wrapper around it
    language_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    mask_token: int
    settings: Settings | None  # of the finished checkpoint; None where no mask is trained
    adapter: GatedAdapter | None = None


def train(recipe: Recipe) -> Path:
    """Train by a recipe; returns the folder of the finished checkpoint, ``output/model``."""
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    model_folder = recipe.output / "model"
    if model_folder.exists():
        raise MarsError(f"{model_folder} is finished already: remove {recipe.output} or choose another output")
    with state.main_process_first():
        check_owner(recipe)
        check_trainer_options(recipe)
        model = load_model(recipe)
        if recipe.from_adapter is not None:
            _restore(model, recipe.from_adapter)
        data = prepare(recipe, model.tokenizer)
    if state.is_main_process:
        print(data.report, file=sys.stderr)
    before = recipe.from_adapter
    for number, stage in enumerate(recipe.stages, 1):
        folder = recipe.output / f"{number}-{stage.stage}"
        metrics = _run_stage(recipe, stage, folder, model if number == 1 else load_model(recipe), before, data)
        before = folder / FINISHED
    if state.is_main_process:
        publish(recipe, model.settings, folder / FINISHED, model_folder, metrics)
        print(f"The finished checkpoint is in {model_folder}")
    state.wait_for_everyone()
    return model_folder


def load_model(recipe: Recipe) -> TrainingModel:
    """The model to train, with a mask token. Weights are float32; under an adapter on a GPU bfloat16, and frozen."""
    if recipe.lora is not None and brings_adapter(recipe.model):
        raise MarsError(f"{recipe.model} brings an adapter: train a new one on its base or on a merged checkpoint")
    dtype = torch.bfloat16 if recipe.lora is not None and torch.cuda.is_available() else torch.float32
    loaded = load_checkpoint(recipe.model, device="cpu", dtype=dtype)
    if loaded.context is not None and recipe.data.length > loaded.context:
        raise MarsError(f"data.length is {recipe.data.length}, but {recipe.model} holds {loaded.context} tokens")
    model, tokenizer = loaded.module, loaded.tokenizer
    store_by_rows(model)
    if recipe.gated:
        if loaded.settings is not None:
            raise MarsError(f"{recipe.model} is a MARS model already: train a gated adapter on its base")
        adapter = gated_adapter(recipe, model)
        adapter.attach(model)
        setattr(model, ATTRIBUTE, adapter)
        mask = adapter.mask_token
        made = Settings(mask, recipe.block_size, recipe.dial)
        return TrainingModel(model, model, tokenizer, mask, made, adapter)
    mask = choose_mask_token(model, tokenizer) if loaded.settings is None else loaded.settings.mask_token_id
    settings = loaded.settings
    if recipe.trains_masks:
        settings = Settings(mask, recipe.block_size, recipe.dial)
        settings.write(model.generation_config)
    return TrainingModel(_trainable(recipe, model, mask), model, tokenizer, mask, settings)


def _trainable(recipe: Recipe, model: PreTrainedModel, mask: int) -> nn.Module:
    """The model itself, or the model with a LoRA adapter and a trainable embedding of the mask token."""
    if recipe.lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    options = {
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * recipe.lora.get("r", RANK),
        "target_modules": "all-linear",
        "trainable_token_indices": {embedding.rpartition(".")[2]: [mask]},
    }
    torch.manual_seed(recipe.seed)
    try:
        config = LoraConfig(**options | recipe.lora)
        adapted = get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise MarsError(f"the lora options of the recipe are not usable: {error}") from None
    config.base_model_name_or_path = recipe.model
    return adapted


def _run_stage(
    recipe: Recipe, stage: Stage, folder: Path, model: TrainingModel, before: Path | None, data: Prepared
) -> dict[str, float]:
    """Train a stage from the weights in the folder ``before``; returns the metrics at its end."""
    state, finished = PartialState(), folder / FINISHED
    if finished.exists():
        return json.loads((finished / "metrics.json").read_text())
    with state.main_process_first():
        resume = last_checkpoint(folder, clean=state.is_main_process)
    unfinished = folder / f"{FINISHED}.tmp"
    with stage_trainer(recipe, stage, folder, model, data, before) as trainer:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        metrics = trainer.evaluate()
        trainer.save_model(str(unfinished))
    state.wait_for_everyone()  # no rank still writes into the folder when it is renamed
    if state.is_main_process:
        if model.adapter is None:
            model.language_model.generation_config.save_pretrained(unfinished)
        model.tokenizer.save_pretrained(unfinished)
        (unfinished / "metrics.json").write_text(json.dumps(metrics, indent=2))
        unfinished.rename(finished)
        for each in folder.glob("checkpoint-*"):
            shutil.rmtree(each)
    state.wait_for_everyone()
    return metrics


@contextmanager
def stage_trainer(
    recipe: Recipe, stage: Stage, folder: Path, model: TrainingModel, data: Prepared, before: Path | None = None
) -> Iterator[MarsTrainer]:
    """The trainer of a stage; inside the context, the model's forward computes the stage's loss."""
    args = arguments(recipe, stage, folder, len(data.train.tokens))
    objective = _objective(recipe, stage, model, args.device)
    if before is not None:
        _restore(model, before)
    collator = Collator(
        pack=data.train,
        streams=stage.streams if stage.stage == "mars" else None,
        mask_token=model.mask_token,
        decay=stage.loss.decay,
        seed=recipe.seed,
        rows_per_step=rows_per_step(args),
    )
    with objective.installed(model.language_model):
        try:
            trainer = MarsTrainer(model.module, args, collator, data.held_out, recipe.block_size, model.adapter)
        except (ImportError, RuntimeError, ValueError) as error:
            raise MarsError(f"the trainer options of the recipe are not usable: {error}") from error
        yield trainer


def _objective(recipe: Recipe, stage: Stage, model: TrainingModel, device: torch.device) -> Objective:
    """The stage's loss. For the KL to the base, it has the model without the adapter, or a copy of all weights."""
    copied = None
    if stage.loss.base and recipe.lora is None:
        copied = copy.deepcopy(model.language_model).requires_grad_(False).to(device)
        examine(copied)

    @contextmanager
    def base() -> Iterator[PreTrainedModel]:
        if copied is not None:
            yield copied
            return
        with model.module.disable_adapter():  # type: ignore[operator]
            yield model.language_model

    return Objective(stage.loss, base, flex=device.type == "cuda", compiled=recipe.compile, adapter=model.adapter)


def _restore(model: TrainingModel, finished: Path) -> None:
    """Load the weights of a finished stage, or of an adapter, into the model."""
    module = model.module
    if model.adapter is not None:
        restore(model.adapter, model.language_model, finished)
    elif hasattr(module, "peft_config"):
        from peft import set_peft_model_state_dict

        try:
            found = set_peft_model_state_dict(module, load_file(finished / "adapter_model.safetensors"))
        except (FileNotFoundError, RuntimeError) as error:
            raise MarsError(f"the adapter in {finished} cannot be gone on from: {str(error).splitlines()[0]}") from None
        if found.unexpected_keys:
            raise MarsError(f"the adapter in {finished} was made with other lora options: {found.unexpected_keys[0]}")
    else:
        module.load_state_dict(AutoModelForCausalLM.from_pretrained(finished, dtype=torch.float32).state_dict())
