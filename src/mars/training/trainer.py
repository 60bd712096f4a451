"""transformers' Trainer for both streams: its options, the loss, evaluation, and checkpoints of an unfinished run."""

import shutil
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mars.errors import MarsError
from mars.method.streams import Pack
from mars.method.visibility import PADDING
from mars.models.gated import GatedAdapter
from mars.training.evaluation import evaluate
from mars.training.gated import ATTRIBUTE, TRAINED
from mars.training.packing import Collator, Schedule
from mars.training.progress import Progress
from mars.training.recipe import Recipe, Stage

COMPLETE = "complete"  # the last file of a training checkpoint: with it, the checkpoint is complete
DEFAULTS: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": 2,
    "report_to": "none",
    "ddp_find_unused_parameters": False,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
OURS = {
    "remove_unused_columns": False,
    "disable_tqdm": True,
    "logging_nan_inf_filter": False,  # it would synchronise with the GPU at every step
    "dataloader_drop_last": False,
}


def arguments(recipe: Recipe, stage: Stage, folder: Path, rows: int) -> TrainingArguments:
    """TrainingArguments of a stage: our defaults, then the recipe's options, then the stage's. Epochs become steps."""
    defaults = DEFAULTS | {"learning_rate": 1e-4 if recipe.lora is None else 1e-3}
    options = {name: _number(value) for name, value in (defaults | recipe.trainer | stage.trainer).items()}
    _refuse(options)
    if torch.cuda.is_available():
        options = {"bf16": True, "dataloader_num_workers": 4} | options
    options = {"dataloader_pin_memory": torch.cuda.is_available()} | _renamed(options)
    try:
        made = TrainingArguments(output_dir=str(folder), seed=recipe.seed, **OURS | options)
    except (TypeError, ValueError) as error:
        raise MarsError(f"the trainer options of the recipe are not usable: {error}") from None
    if made.n_gpu > 1:
        made._n_gpu = 1  # several GPUs are several processes; without a launcher, one GPU works
    if made.max_steps <= 0:
        made.max_steps = max(1, round(made.num_train_epochs * rows / rows_per_step(made)))
    return made


def check_trainer_options(recipe: Recipe) -> None:
    """Raise if a stage's options are not usable, before anything is read or written."""
    for stage in recipe.stages:
        args = arguments(recipe, stage, recipe.output, rows=1)
        try:
            for callback in get_reporting_integration_callbacks(args.report_to):
                callback()
        except (ImportError, RuntimeError, ValueError) as error:
            raise MarsError(f"the trainer options of the recipe are not usable: {error}") from None


def _number(value: Any) -> Any:
    """YAML reads 1e-4 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """``gradient_checkpointing…`` by the newer name where the installed transformers has it: it warns about the old."""
    known = {each.name for each in fields(TrainingArguments)}
    renamed = {name: name.replace("gradient_checkpointing", "activation_checkpointing") for name in options}
    return {renamed[name] if renamed[name] in known else name: value for name, value in options.items()}


def _refuse(options: dict[str, Any]) -> None:
    """Raise for options that would not do what they say."""
    fixed = [name for name, value in OURS.items() if options.get(name, value) != value]
    if fixed or options.get("load_best_model_at_end"):
        raise MarsError(f"the trainer option {(*fixed, 'load_best_model_at_end')[0]} cannot be set in a recipe")
    by_epoch = [name for name in ("eval_strategy", "save_strategy", "logging_strategy") if options.get(name) == "epoch"]
    if by_epoch:
        raise MarsError(f"{by_epoch[0]} cannot be epoch, since epochs are spelled out as steps: use steps")
    if (options["save_total_limit"] or 2) < 2:
        raise MarsError("save_total_limit must be 2 or more: while a checkpoint is written, the one before must stay")


def rows_per_step(args: TrainingArguments) -> int:
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)


class MarsTrainer(Trainer):
    """Trains one stage of a recipe. The model's ``forward`` must be an `Objective`."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        collator: Collator,
        held_out: Pack,
        block_size: int,
        adapter: GatedAdapter | None = None,
    ) -> None:
        items = args.max_steps * rows_per_step(args)
        schedule = Schedule(len(collator.pack.tokens), items, args.seed)
        super().__init__(
            model=model, args=args, train_dataset=schedule, eval_dataset=held_out.tokens, data_collator=collator
        )
        self.remove_callback(PrinterCallback)
        tokens_per_row = float((collator.pack.documents != PADDING).sum(1).float().mean())
        self.add_callback(Progress(tokens_per_row * rows_per_step(args)))
        self.model_accepts_loss_kwargs = False  # our loss is a mean over rows: accumulation steps are averaged
        self._collator = collator
        self._held_out = held_out
        self._block_size = block_size
        self._adapter = adapter
        self._terms: dict[str, list[Tensor]] = defaultdict(list)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Tensor:
        terms = model(**inputs)
        for name, term in terms.items():
            if name != "loss":
                self._terms[name].append(term)
        return terms["loss"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the parts of the loss: means over all processes since the last call."""
        if "loss" in logs:
            means = {name: self.accelerator.gather(torch.stack(each)).mean() for name, each in self._terms.items()}
            logs |= {f"{name}_loss": mean.item() for name, mean in means.items()}
            self._terms.clear()
        super().log(logs, *args, **kwargs)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Evaluate on the held-out chats; every process evaluates all of them."""
        if not len(self._held_out.tokens):
            return {}
        self.model_wrapped.eval()
        found = evaluate(
            self._predict,
            self._held_out,
            block_size=self._block_size,
            mask_token=self._collator.mask_token,
            rows=self.args.per_device_eval_batch_size,
            width=self._held_out.tokens.shape[1] // 2,
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.metrics().items()}
        self.log(dict(metrics))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _predict(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        with self.compute_loss_context_manager():
            return self.model_wrapped(predict=True, **self._prepare_inputs(batch))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Of a model with a gated adapter, the adapter alone: the rest is not trained."""
        if self._adapter is None:
            super()._save(output_dir, state_dict)
            return
        if not self.args.should_save:  # newer versions of transformers call this on every rank
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{ATTRIBUTE}."
        trained = {} if state_dict is None else {n: each for n, each in state_dict.items() if n.startswith(prefix)}
        weights = {name.removeprefix(prefix): each for name, each in trained.items()} or self._adapter.state_dict()
        save_file({name: each.contiguous().cpu() for name, each in weights.items()}, folder / TRAINED)
        torch.save(self.args, folder / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._adapter is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._adapter.load_state_dict(load_file(Path(resume_from_checkpoint) / TRAINED))

    def _save_checkpoint(self, model: PreTrainedModel, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}" / COMPLETE).touch()


def last_checkpoint(folder: Path, *, clean: bool) -> Path | None:
    """The newest complete training checkpoint. With ``clean``, those that a kill left incomplete are removed."""
    found = sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda each: int(each.name.rpartition("-")[2]))
    for each in found if clean else []:
        if not (each / COMPLETE).exists():
            shutil.rmtree(each)
    return next((each for each in reversed(found) if (each / COMPLETE).exists()), None)
