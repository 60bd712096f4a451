"""The folder ``mars`` of a checkpoint: a gated adapter and its settings, beside the base model's own files or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from mars.errors import MarsError
from mars.models.gated import GatedAdapter, fingerprint, layer_sizes
from mars.models.layout import by_columns

FOLDER = "mars"
CONFIG, WEIGHTS = "config.json", "adapter.safetensors"
FORMAT = 1  # increased when older versions could not read the files any more
FINGERPRINT = "base.fingerprint"
SCALE = ".scale"


class AdapterFiles(NamedTuple):
    """Where an adapter is, and what its config says."""

    name: str  # as it was asked for
    config: dict[str, Any]
    weights: Path

    @property
    def base(self) -> tuple[str, str | None]:
        """The name and revision of the model that it belongs to."""
        base = self.config.get("base") or {}
        if not base.get("name"):
            advice = "load that model and pass the adapter to it"
            raise MarsError(f"{self.name} does not say which model it adapts: {advice}")
        return base["name"], base.get("revision")

    @property
    def belongs(self) -> str:
        """How a message begins that refuses another model."""
        return f"the adapter {self.name} belongs to {(self.config.get('base') or {}).get('name') or 'another model'}"


def find_adapter(name: str, revision: str | None = None) -> AdapterFiles | None:
    """The gated adapter in a folder, in the folder ``mars`` in it, or in a hub repository; None if there is none."""
    folder = Path(name)
    if folder.is_dir():
        inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        config, weights = inside / CONFIG, inside / WEIGHTS
        if not weights.is_file() or not config.is_file():
            return None
    elif name.startswith(("/", ".")) or name.endswith(".gguf"):
        return None
    else:
        found = [_from_hub(name, f"{FOLDER}/{file}", revision) for file in (CONFIG, WEIGHTS)]
        if found[0] is None or found[1] is None:
            return None
        config, weights = found[0], found[1]
    try:
        content = json.loads(config.read_text())
        if content["format"] > FORMAT:
            raise MarsError(f"{config} was written by a newer version of mars: update this one")
    except (ValueError, LookupError, TypeError) as error:
        raise MarsError(f"{config} is damaged: {error}") from None
    return AdapterFiles(name, content, weights)


def _from_hub(name: str, file: str, revision: str | None) -> Path | None:
    missing = ("gated_repo", "missing_entries", "connection_errors")
    quiet: dict[str, Any] = {f"_raise_exceptions_for_{each}": False for each in missing}
    try:
        found = cached_file(name, file, revision=revision, **quiet)
    except (OSError, ValueError):  # there is no such repository
        return None
    return None if found is None else Path(found)


def read_adapter(files: AdapterFiles, model: PreTrainedModel) -> GatedAdapter:
    """The adapter, attached to its base model; raises if it belongs to another one."""
    stored = read_weights(files)
    refuse_other_base(files, model, stored)
    names, sizes = files.config["layers"], layer_sizes(model)
    embedding = model.get_input_embeddings().weight
    rank, markov = files.config["rank"], files.config["markov_rank"]
    chosen = {name: sizes[name] for name in names}
    with torch.device("meta"):
        adapter = GatedAdapter(chosen, rank, embedding.shape[1], embedding.shape[0], markov)
    weights = {name: dequantised(stored, name) for name in adapter.state_dict()}
    adapter.load_state_dict(weights, assign=True)
    adapter = adapter.to(embedding.device, embedding.dtype).eval().requires_grad_(False)
    if embedding.device.type == "cpu":  # factors with few inputs and many outputs; the others are faster by rows
        wide = [adapter.change(name).b for name in names] + ([adapter.head.after] if adapter.head else [])
        for weight in wide:
            weight.data = by_columns(weight.data)
    adapter.attach(model)
    return adapter


def read_weights(files: AdapterFiles) -> dict[str, Tensor]:
    """All tensors of an adapter, as they are stored."""
    try:
        return load_file(files.weights)
    except Exception as error:  # safetensors has errors of its own
        raise MarsError(f"{files.weights} is damaged: {error}") from None


def refuse_other_base(files: AdapterFiles, model: PreTrainedModel, stored: dict[str, Tensor]) -> None:
    """Raise if the adapter was made for a model with other layers, other tokens or other weights."""
    wrong, names, sizes = files.belongs, files.config["layers"], layer_sizes(model)
    missing = [name for name in names if name not in sizes]
    if missing:
        raise MarsError(f"{wrong}: this one has no linear layer {missing[0]}")
    shapes = {name: (stored[f"{_weight(name)}.a"].shape[1], stored[f"{_weight(name)}.b"].shape[0]) for name in names}
    other = [name for name in names if shapes[name] != sizes[name]]
    rows = model.get_input_embeddings().weight.shape[0]
    if other or rows != files.config["mask_token_id"]:
        what = f"{other[0]} has another shape" if other else f"it has {rows} tokens"
        raise MarsError(f"{wrong}: {what} in this one")
    found = fingerprint(model, names)
    theirs = stored[FINGERPRINT].to(model.get_input_embeddings().weight.dtype).float()
    if not torch.equal(found, theirs):
        raise MarsError(f"{wrong}: the weights of this one are others")


def write_adapter(
    adapter: GatedAdapter, model: PreTrainedModel, settings: dict[str, Any], base: dict[str, Any], folder: Path
) -> None:
    """Write the files into a folder. ``model`` has the base's weights in their full precision."""
    folder.mkdir(parents=True)
    names = adapter.names
    weights = {name: tensor.detach().float().cpu() for name, tensor in adapter.state_dict().items()}
    weights = {name: tensor * adapter.scale if name.endswith(".b") else tensor for name, tensor in weights.items()}
    tensors = {FINGERPRINT: fingerprint(model, names)}
    for name, tensor in weights.items():
        tensors |= quantised(name, tensor)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    rank = adapter.change(names[0]).a.shape[0]
    markov = 0 if adapter.head is None else adapter.head.after.shape[1]
    config = {"format": FORMAT, **settings, "base": base, "rank": rank, "markov_rank": markov, "layers": names}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def quantised(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Matrices in 8 bits with a scale for each row; vectors as they are."""
    if tensor.ndim < 2:
        return {name: tensor}
    scale = (tensor.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return {name: (tensor / scale).round().to(torch.int8).contiguous(), name + SCALE: scale}


def dequantised(stored: dict[str, Tensor], name: str) -> Tensor:
    tensor = stored[name]
    return tensor.float() * stored[name + SCALE] if name + SCALE in stored else tensor


class Change(NamedTuple):
    """The change of a layer: its output has ``b @ a @ input`` added."""

    a: Tensor
    b: Tensor


def stored_change(stored: dict[str, Tensor], name: str) -> Change:
    """The change of the layer of this name."""
    return Change(*(dequantised(stored, f"{_weight(name)}.{each}") for each in "ab"))


def _weight(name: str) -> str:
    return f"changes.{name.replace('.', '/')}"
