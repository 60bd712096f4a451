"""Loading and saving of models: hub ids, folders, GGUF files, the built-in model, adapters, settings."""

from mars.models.checkpoint import Checkpoint
from mars.models.loading import load_checkpoint
from mars.models.saving import save_checkpoint
from mars.models.settings import Settings

__all__ = ["Checkpoint", "Settings", "load_checkpoint", "save_checkpoint"]
