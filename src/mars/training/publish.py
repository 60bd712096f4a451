"""The published result of a training: a plain Hugging Face checkpoint with a model card, and the adapter."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers
import yaml
from jinja2 import Template
from safetensors.torch import load_file, save_file

import mars
from mars.integrations.transformers.bundle import ship
from mars.models import Checkpoint, Settings, load_checkpoint
from mars.models.adapter_files import FOLDER
from mars.models.loading import ADAPTER_FILE, source_folder
from mars.models.saving import save_checkpoint
from mars.training.gated import TRAINED, gated_adapter
from mars.training.recipe import Recipe


def publish(
    recipe: Recipe, settings: Settings | None, finished: Path, folder: Path, metrics: Mapping[str, float]
) -> None:
    """Write the checkpoint into ``folder`` (and the adapter beside it); each appears once it is complete."""
    text = card(recipe, settings, metrics)

    def add_files(unfinished: Path) -> None:
        (unfinished / "README.md").write_text(text)
        if settings is not None:
            ship(unfinished)

    if recipe.gated and settings is not None:
        _publish_gated(recipe, settings, finished, folder, add_files)
        return
    if (finished / ADAPTER_FILE).exists():
        adapter = _publish_adapter(finished, folder.with_name("adapter"), text)
        loaded = load_checkpoint(recipe.model, adapter=adapter, device="cpu", dtype=recipe.dtype)
    else:
        loaded = load_checkpoint(finished, device="cpu", dtype=recipe.dtype)
    save_checkpoint(Checkpoint(recipe.output.name, loaded.module, loaded.tokenizer, settings), folder, add_files)


def _publish_gated(
    recipe: Recipe, settings: Settings, finished: Path, folder: Path, add_files: Callable[[Path], None]
) -> None:
    """The base model's own files with the adapter beside them; and the adapter alone, which names its base."""
    loaded = load_checkpoint(recipe.model, device="cpu", dtype="float32")
    adapter = gated_adapter(recipe, loaded.module)
    adapter.load_state_dict(load_file(finished / TRAINED))
    checkpoint = Checkpoint(recipe.model, loaded.module, loaded.tokenizer, settings, adapter)
    save_checkpoint(checkpoint, folder, add_files, source_folder(recipe.model))
    alone = folder.with_name("adapter")
    if not alone.exists():
        unfinished = folder.with_name("adapter.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(folder / FOLDER, unfinished / FOLDER)
        shutil.copyfile(folder / "README.md", unfinished / "README.md")
        unfinished.rename(alone)


def _publish_adapter(finished: Path, folder: Path, text: str) -> Path:
    """The adapter alone, in half precision: small enough to send around."""
    if not folder.exists():
        unfinished = folder.with_name("adapter.tmp")
        ours = shutil.ignore_patterns("training_args.bin", "metrics.json")
        shutil.copytree(finished, unfinished, ignore=ours, dirs_exist_ok=True)
        weights = unfinished / "adapter_model.safetensors"
        halved = {
            name: tensor.half() if "lora_" in name or "trainable_tokens" in name else tensor
            for name, tensor in load_file(weights).items()
        }
        save_file(halved, weights, metadata={"format": "pt"})
        (unfinished / "README.md").write_text(text)
        unfinished.rename(folder)
    return folder


def card(recipe: Recipe, settings: Settings | None, metrics: Mapping[str, float]) -> str:
    """A model card that says what was trained, how, and what was measured."""
    base = Path(recipe.model).name if Path(recipe.model).exists() else recipe.model
    name = recipe.output.resolve().name
    front = {"library_name": "transformers", "base_model": base, "tags": ["mars", "multi-token-prediction"]}
    shown = recipe.model_dump(mode="json", exclude_defaults=True) | {"model": base, "output": name}
    source = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return Template(source, trim_blocks=True, keep_trailing_newline=True).render(
        name=name,
        base=base,
        settings=settings,
        gated=recipe.gated,
        metrics=metrics,
        front=yaml.safe_dump(front, sort_keys=False),
        recipe=yaml.safe_dump(shown, sort_keys=False),
        versions={"mars": mars.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )
