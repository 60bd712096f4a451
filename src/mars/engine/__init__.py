"""The engine: continuous batching over a paged cache, with windows of one shape per step."""

from mars.engine.engine import Engine, error_text, memory_for
from mars.engine.run import run
from mars.engine.scheduler import QueueFullError
from mars.engine.shared import SharedEngine

__all__ = ["Engine", "QueueFullError", "SharedEngine", "error_text", "memory_for", "run"]
