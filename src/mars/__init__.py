"""MARS: several tokens per forward pass from a language model, with nothing added to the model."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mars.api import Model, Stream, load
    from mars.decoding.request import Generation, Request
    from mars.engine import Engine
    from mars.errors import MarsError
    from mars.method.dials import Dial
    from mars.method.sampling import Sampling
    from mars.models.settings import Settings

__version__ = "0.1.0"
__all__ = ["Dial", "Engine", "Generation", "MarsError", "Model", "Request", "Sampling", "Settings", "Stream", "load"]

_HOMES = {
    "Dial": "mars.method.dials",
    "Engine": "mars.engine",
    "Generation": "mars.decoding.request",
    "MarsError": "mars.errors",
    "Model": "mars.api",
    "Request": "mars.decoding.request",
    "Sampling": "mars.method.sampling",
    "Settings": "mars.models.settings",
    "Stream": "mars.api",
    "load": "mars.api",
}


def __getattr__(name: str) -> object:
    """Import torch and transformers when something is used, not when the command line only prints its help."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
