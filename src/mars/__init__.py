"""MARS: several tokens per forward pass from a language model, with nothing added to the model."""

from mars.api import Model, Stream, load
from mars.decoding.request import Generation
from mars.errors import MarsError
from mars.method.dials import Dial
from mars.method.sampling import Sampling
from mars.models.settings import Settings

__all__ = ["Dial", "Generation", "MarsError", "Model", "Sampling", "Settings", "Stream", "load"]
__version__ = "0.1.0"
