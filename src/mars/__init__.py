"""MARS: several tokens per forward pass from a language model, whose own weights stay as they are."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mars.api import AsyncStream, Model, Stream, load
    from mars.core.output import RequestOutput
    from mars.core.request import Request
    from mars.engine import Engine, run
    from mars.errors import MarsError
    from mars.method.acceptance import Dial
    from mars.method.sampling import SamplingParams
    from mars.models.settings import Settings

__version__ = "0.1.0"
__all__ = [
    "AsyncStream",
    "Dial",
    "Engine",
    "MarsError",
    "Model",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Settings",
    "Stream",
    "load",
    "run",
]

_MODULES = {
    "AsyncStream": "mars.api",
    "Dial": "mars.method.acceptance",
    "Engine": "mars.engine",
    "MarsError": "mars.errors",
    "Model": "mars.api",
    "Request": "mars.core.request",
    "RequestOutput": "mars.core.output",
    "SamplingParams": "mars.method.sampling",
    "Settings": "mars.models.settings",
    "Stream": "mars.api",
    "load": "mars.api",
    "run": "mars.engine",
}


def __getattr__(name: str) -> object:
    """Import torch and transformers when something is used, not when the command line only prints its help."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
