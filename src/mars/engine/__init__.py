"""The engine: continuous batching over a paged cache, with windows of fixed shapes."""

from mars.engine.engine import Engine, QueueFullError, memory_for

__all__ = ["Engine", "QueueFullError", "memory_for"]
