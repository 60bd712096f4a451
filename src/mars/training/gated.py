"""A gated adapter in training: made by a recipe, kept in a file of its own, and restored from it."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mars.errors import MarsError
from mars.models.adapter_files import dequantised, find_adapter, read_weights, refuse_other_base
from mars.models.gated import GatedAdapter, layer_sizes
from mars.training.recipe import Recipe

TRAINED = "trained.safetensors"  # the adapter, in a folder of training
ATTRIBUTE = "mars_adapter"  # where a model in training has it
RANK = 128


def gated_adapter(recipe: Recipe, model: PreTrainedModel) -> GatedAdapter:
    """A new gated adapter for a model, which is frozen."""
    options = recipe.lora or {}
    endings = options.get("target_modules")
    sizes = layer_sizes(model, None if endings in (None, "all-linear") else list(endings))
    if not sizes:
        raise MarsError(f"lora.target_modules: {recipe.model} has no linear layer named {' or '.join(endings or ())}")
    embedding = model.requires_grad_(False).get_input_embeddings().weight
    rank = options.get("r", RANK)
    torch.manual_seed(recipe.seed)
    adapter = GatedAdapter(sizes, rank, embedding.shape[1], embedding.shape[0], recipe.markov_rank)
    adapter.scale = options.get("lora_alpha", 2 * rank) / rank
    adapter.mask_row.data = embedding.float().mean(0)
    return adapter


def restore(adapter: GatedAdapter, model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a finished stage, or of a published adapter of this model."""
    try:
        if (folder / TRAINED).is_file():
            weights = load_file(folder / TRAINED)
        elif (files := find_adapter(str(folder))) is not None:
            stored = read_weights(files)
            refuse_other_base(files, model, stored)
            weights = {name: dequantised(stored, name) for name in adapter.state_dict()}
            weights = {name: each / adapter.scale if name.endswith(".b") else each for name, each in weights.items()}
        else:
            raise MarsError(f"{folder} has no gated adapter to go on from")
        adapter.load_state_dict(weights)
    except (LookupError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise MarsError(f"the adapter in {folder} was made with other options: {reason}") from None
