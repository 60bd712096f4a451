"""Decoders to compare with: the plain one, the paper's own, Jacobi decoding, and a separate draft model.

The plain decoder is the oracle for the engine. The others are greedy and written to be read. Two
come in two forms: `paper_block_cache` and `paper_jacobi` as in the authors' scripts, `block_cache` and `jacobi` with
less work per token.
"""

from mars.reference.block_cache import block_cache
from mars.reference.decoder import Decoder
from mars.reference.draft_model import draft_model
from mars.reference.jacobi import jacobi, paper_jacobi
from mars.reference.paper_block_cache import paper_block_cache
from mars.reference.sliding_window import sliding_window

__all__ = ["Decoder", "block_cache", "draft_model", "jacobi", "paper_block_cache", "paper_jacobi", "sliding_window"]
