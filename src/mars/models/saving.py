"""`save_checkpoint`: writes a plain Hugging Face folder, which appears once it is complete."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from mars.errors import MarsError
from mars.models.checkpoint import Checkpoint
from mars.models.layout import store_by_columns, store_by_rows


def save_checkpoint(checkpoint: Checkpoint, folder: Path, add_files: Callable[[Path], None] | None = None) -> None:
    """Save weights, tokenizer and settings to a folder that does not exist yet.

    ``add_files`` may put more into the folder before it appears.
    """
    if folder.exists():
        raise MarsError(f"{folder} exists already: choose another folder or remove it")
    if checkpoint.settings is not None:
        checkpoint.settings.write(checkpoint.module.generation_config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as scratch:
        unfinished = Path(scratch) / "checkpoint"
        store_by_rows(checkpoint.module)
        try:
            checkpoint.module.save_pretrained(unfinished)
        finally:
            if checkpoint.device.type == "cpu":
                store_by_columns(checkpoint.module)
        checkpoint.tokenizer.save_pretrained(unfinished)
        if add_files is not None:
            add_files(unfinished)
        unfinished.rename(folder)
