"""`load_checkpoint`: loads a model by its name, with its tokenizer, settings and adapter."""

import json
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from mars.errors import MarsError
from mars.models import builtin
from mars.models.adapter_files import find_adapter, read_adapter
from mars.models.checkpoint import Checkpoint
from mars.models.gguf import load_gguf
from mars.models.layout import store_by_columns
from mars.models.settings import Settings, rows_needed
from mars.models.support import is_llama_like, refuse_config, refuse_gaps, refuse_model

ADAPTER_FILE = "adapter_config.json"


def load_checkpoint(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> Checkpoint:
    """Load a hub id, a local folder, a local GGUF file, a built-in name, or an adapter that names its base.

    Built in are ``smollm2-135m`` and, without the adapter that makes it a MARS model, ``smollm2-135m-base``.

    ``adapter`` is a folder or hub id with a gated adapter, or a folder of peft's, which is merged. The device is a CUDA
    GPU if there is one, else the CPU. The dtype is bfloat16 on a GPU. On a CPU it is ``int8`` for weights from a GGUF
    file, as the built-in model's are: the engine keeps them in 8 bits, or in 4 if nothing is lost by it. Other weights
    are in bfloat16 where the processor multiplies it and the engine's compiled step can run the model, else in float32.
    """
    name = _expand(name)
    revision = None
    if (Path(name) / ADAPTER_FILE).is_file():
        name, adapter = _base_of(Path(name)), adapter or name
    elif name == builtin.NAME:
        adapter = adapter or builtin.ADAPTER
    elif adapter is None and name != builtin.BASE and (files := find_adapter(name)) is not None:
        adapter = name
        if not is_model(name):
            name, revision = files.base
    device = _device(device)
    if dtype is None:
        dtype = _default_dtype(name, device, revision)
    is_int8 = dtype in ("int8", torch.int8)
    if is_int8 and device.type != "cpu":
        raise MarsError(f"dtype int8 is for a CPU: use bfloat16, float16 or float32 on {device}")
    picked = torch.float32 if is_int8 else getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(picked, torch.dtype) or not picked.is_floating_point:
        raise MarsError(f"unknown dtype {dtype!r}: use float32, bfloat16, float16 or int8")
    model, tokenizer = _load(name, picked, revision)
    refuse_model(name, model)
    settings = Settings.read(model.generation_config)
    files = None if adapter is None else find_adapter(_expand(adapter))
    if files is not None:
        settings = Settings.of(files.config)
    elif adapter is not None:
        folder = Path(_expand(adapter))
        tokenizer = _adopt_tokenizer(model, tokenizer, folder)
        model = _merge(model, folder)
        _check_generation_config(folder)
        if (folder / "generation_config.json").is_file():
            settings = Settings.read(GenerationConfig.from_pretrained(folder)) or settings
    model = model.to(device).eval().requires_grad_(False)
    gated = None if files is None else read_adapter(files, model)
    if device.type == "cpu":
        store_by_columns(model)
    checkpoint = Checkpoint(name, model, tokenizer, settings, gated, is_int8)
    if settings is not None and gated is None and settings.mask_token_id >= checkpoint.vocabulary:
        raise MarsError(f"{name} has {checkpoint.vocabulary} tokens, but its mask token is {settings.mask_token_id}")
    return checkpoint


def _default_dtype(name: str, device: torch.device, revision: str | None) -> str:
    if device.type != "cpu":
        return "bfloat16"
    if name in (builtin.NAME, builtin.BASE) or name.endswith(".gguf"):
        return "int8"
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
    except Exception:  # `_load` will say what is wrong
        return "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() and is_llama_like(config) else "float32"


def _device(name: str | torch.device | None) -> torch.device:
    """The device asked for, by default a CUDA GPU if there is one, else the CPU; raises if it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise MarsError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise MarsError(f"this machine has no CUDA device for device={str(name)!r}: use device='cpu'")
        if (device.index or 0) >= count:
            raise MarsError(f"there is no device {str(name)!r}: this machine has cuda:0 to cuda:{count - 1}")
    elif device.type != "cpu":
        try:
            torch.zeros(1, device=device).item()
        except Exception as error:  # of the backend
            hint = "use cpu, cuda or cuda:N"
            raise MarsError(f"the device {str(name)!r} cannot be used on this machine: {hint}") from error
    return device


def brings_adapter(name: str) -> bool:
    """Does this name stand for a base model with an adapter?"""
    if name in (builtin.NAME, builtin.BASE):
        return name == builtin.NAME
    return (Path(_expand(name)) / ADAPTER_FILE).is_file() or find_adapter(_expand(name)) is not None


def is_put_together(name: str, adapter: str | Path | None) -> bool:
    """Do these weights exist in no folder or hub repository, because they are merged or converted on loading?"""
    if adapter is not None or name == builtin.BASE or name.endswith(".gguf"):
        return True
    complete = name != builtin.NAME and find_adapter(_expand(name)) is not None and is_model(_expand(name))
    return brings_adapter(name) and not complete


def _expand(name: str | Path) -> str:
    """Expand a leading ``~``; other names, such as hub ids, are not changed."""
    return str(Path(name).expanduser()) if str(name).startswith("~") else str(name)


def source_folder(name: str) -> Path | None:
    """The folder with a model's own files: of a hub id, of the built-in model, or itself; None for a GGUF file."""
    name = _expand(name)
    if name == builtin.BASE:
        return builtin.builtin_folder()
    if name.endswith(".gguf"):
        return None
    return Path(name) if Path(name).is_dir() else Path(str(cached_file(name, "config.json"))).parent


def is_model(name: str) -> bool:
    """Does this folder or repository have a model of its own?"""
    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError):
        return False
    return True


def _load(
    name: str, dtype: torch.dtype, revision: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise MarsError(f"there is no file {name}")
        return load_gguf(Path(name), dtype)
    if name.startswith(("/", ".")) and not Path(name).is_dir():
        raise MarsError(f"there is no folder {name}")
    source = str(builtin.builtin_folder()) if name in (builtin.NAME, builtin.BASE) else name
    _check_generation_config(Path(source))
    try:
        refuse_config(name, AutoConfig.from_pretrained(source, revision=revision))
        model, report = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, dtype=dtype, output_loading_info=True
        )
        refuse_gaps(report)
        return model, AutoTokenizer.from_pretrained(source, revision=revision)
    except MarsError:
        raise
    except Exception as error:  # transformers, safetensors and the hub client each raise their own
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        if Path(name).is_dir():
            raise MarsError(f"the folder {name} does not hold a usable model: {first_line}") from error
        hint = f"give a hub id, a folder, a .gguf file or {builtin.NAME}"
        raise MarsError(f"no model {name!r} could be loaded ({first_line}): {hint}") from error


def _check_generation_config(folder: Path) -> None:
    """Raise for a damaged file: transformers would ignore it, and with it the settings and the end tokens."""
    try:
        if (path := folder / "generation_config.json").is_file():
            json.loads(path.read_text())
    except ValueError as error:
        raise MarsError(f"{path} is damaged: {error}") from None


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / ADAPTER_FILE).read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not base:
        raise MarsError(f"{adapter} does not say which model it adapts: load that model and pass the adapter to it")
    return _expand(base)


def _adopt_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, adapter: Path
) -> PreTrainedTokenizerBase:
    """The adapter's tokenizer if it has one. A new mask token in it needs a new row of the embedding."""
    if not (adapter / "tokenizer_config.json").is_file():
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    if rows_needed(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(rows_needed(tokenizer), mean_resizing=False)
    return tokenizer


def _merge(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Merge a peft adapter into the weights."""
    from peft import PeftModel

    if not (adapter / ADAPTER_FILE).is_file():
        raise MarsError(f"{adapter} is not an adapter folder: it has no {ADAPTER_FILE}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except Exception as error:  # peft raises what the mismatch happens to hit
        raise MarsError(f"the adapter {adapter} does not fit the model: {error}") from error
