"""Decoders to compare with: the plain one, the paper's own, Jacobi decoding, and a separate draft model.

The plain decoder is the oracle for the engine. The others are greedy and written to be read.
"""

from mars.reference.block_cache import block_cache
from mars.reference.decoder import Decoder
from mars.reference.draft_model import draft_model
from mars.reference.jacobi import jacobi
from mars.reference.sliding_window import sliding_window

__all__ = ["Decoder", "block_cache", "draft_model", "jacobi", "sliding_window"]
