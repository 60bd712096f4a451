"""Models for the commands, with a word on what takes time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from mars.api import Model


def load(model: str, adapter: str | None = None, **options: Any) -> Model:
    """`mars.load` with its progress on standard error."""
    from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]
    from transformers.utils import logging

    from mars.api import load as run
    from mars.models import builtin

    logging.disable_progress_bar()
    if model in (builtin.NAME, builtin.BASE):
        builtin.fetch()  # shows its own progress
    elif sys.stderr.isatty() and not Path(model).expanduser().exists():
        enable_progress_bars()  # a download may be gigabytes
        return run(model, adapter=adapter, **options)
    with Console(stderr=True).status(f"Loading {model} …"):
        return run(model, adapter=adapter, **options)


def load_warm(model: str, adapter: str | None = None, **options: Any) -> Model:
    """The same, ready for one request at a time: a GPU's graphs, a CPU's compiled step."""
    loaded = load(model, adapter, **options)
    takes = "a minute" if loaded.checkpoint.device.type == "cuda" else "some seconds"
    with Console(stderr=True).status(f"Warming up, which takes {takes} the first time …"):
        loaded.warm_up(num_seqs=1)
    return loaded
