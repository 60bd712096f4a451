"""`save_checkpoint`: writes a plain Hugging Face folder, which appears once it is complete."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mars.errors import MarsError
from mars.models.adapter_files import FOLDER, write_adapter
from mars.models.builtin import MANIFEST
from mars.models.checkpoint import Checkpoint
from mars.models.layout import store_by_columns, store_by_rows

NOT_COPIED = {"README.md", MANIFEST}  # of a base model's folder: the checkpoint has a model card of its own


def save_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    add_files: Callable[[Path], None] | None = None,
    base_files: Path | None = None,
) -> None:
    """Save weights, tokenizer, settings and a gated adapter to a folder that does not exist yet.

    ``add_files`` may put more into the folder before it appears. With a gated adapter the weights are the base model's:
    its own files are copied if ``base_files`` says where they are.
    """
    if folder.exists():
        raise MarsError(f"{folder} exists already: choose another folder or remove it")
    gated, settings = checkpoint.adapter, checkpoint.settings
    if settings is not None and gated is None:
        settings.write(checkpoint.module.generation_config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "checkpoint"
        if base_files is None:
            _save_module(checkpoint, unfinished)
        else:
            unfinished.mkdir()
            for path in base_files.iterdir():
                if path.is_file() and path.name not in NOT_COPIED:
                    shutil.copyfile(path, unfinished / path.name)
        if gated is not None and settings is not None:
            base = {"name": checkpoint.name, "revision": getattr(checkpoint.module.config, "_commit_hash", None)}
            write_adapter(gated, checkpoint.module, asdict(settings), base, unfinished / FOLDER)
        if add_files is not None:
            add_files(unfinished)
        unfinished.rename(folder)


def _save_module(checkpoint: Checkpoint, folder: Path) -> None:
    store_by_rows(checkpoint.module)
    try:
        checkpoint.module.save_pretrained(folder)
    finally:
        if checkpoint.device.type == "cpu":
            store_by_columns(checkpoint.module)
    checkpoint.tokenizer.save_pretrained(folder)
