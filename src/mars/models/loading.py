"""`load_checkpoint`: a name in, a ready model out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mars.errors import MarsError
from mars.models import builtin
from mars.models.checkpoint import Checkpoint
from mars.models.gguf import load_gguf
from mars.models.layout import store_by_columns
from mars.models.settings import Settings
from mars.models.support import refuse_config, refuse_model

ADAPTER_FILE = "adapter_config.json"


def load_checkpoint(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Checkpoint:
    """Load a hub id, a local folder, a local GGUF file, the built-in ``smollm2-135m``, or a peft adapter folder.

    ``adapter`` is merged into the model. The device is the fastest there is, the dtype bfloat16 on an accelerator
    and float32 on a CPU, unless given.
    """
    logging.disable_progress_bar()
    name = str(name)
    if (Path(name) / ADAPTER_FILE).is_file():
        name, adapter = _base_of(Path(name)), adapter or name
    device = _pick_device(device)
    dtype = _pick_dtype(dtype, device)
    model, tokenizer = _load(name, dtype)
    refuse_model(name, model)
    settings = Settings.read(model.generation_config)
    if adapter is not None:
        model, settings = _merge(model, Path(adapter), settings)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        store_by_columns(model)
    return Checkpoint(name, model, tokenizer, settings)


def _load(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise MarsError(f"there is no file {name}")
        return load_gguf(Path(name), dtype)
    if name.startswith(("/", ".", "~")) and not Path(name).expanduser().is_dir():
        raise MarsError(f"there is no folder {name}")
    source = str(builtin.builtin_folder()) if name == builtin.NAME else str(Path(name).expanduser())
    try:
        config = AutoConfig.from_pretrained(source)
        refuse_config(name, config)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(source)
    except MarsError:
        raise
    except Exception as error:  # transformers, safetensors and the hub client each raise their own
        raise MarsError(_explain(name, error)) from error


def _explain(name: str, error: Exception) -> str:
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    if Path(name).is_dir():
        return f"the folder {name} does not hold a usable model: {first_line}"
    hint = f"give a hub id, a folder, a .gguf file or {builtin.NAME}"
    return f"no model {name!r} could be loaded ({first_line}): {hint}"


def _base_of(adapter: Path) -> str:
    base = json.loads((adapter / ADAPTER_FILE).read_text()).get("base_model_name_or_path")
    if not base:
        raise MarsError(f"{adapter} does not say which model it adapts: load that model and pass the adapter to it")
    return str(base)


def _merge(model: PreTrainedModel, adapter: Path, settings: Settings | None) -> tuple[PreTrainedModel, Settings | None]:
    """Fold a peft adapter into the weights; an adapter folder may bring its own MARS settings."""
    from peft import PeftModel
    from transformers import GenerationConfig

    if not (adapter / ADAPTER_FILE).is_file():
        raise MarsError(f"{adapter} is not an adapter folder: it has no {ADAPTER_FILE}")
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as error:  # peft raises what the mismatch happens to hit
        raise MarsError(f"the adapter {adapter} does not fit the model: {error}") from error
    if (adapter / "generation_config.json").is_file():
        settings = Settings.read(GenerationConfig.from_pretrained(adapter)) or settings
    return merged, settings


def _pick_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


def _pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    picked = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(picked, torch.dtype) or not picked.is_floating_point:
        raise MarsError(f"unknown dtype {dtype!r}: use float32, bfloat16 or float16")
    return picked
