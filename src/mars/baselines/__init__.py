"""What MARS is compared with: the paper's own decoders, Jacobi decoding, and a separate draft model.

Greedy, written to be read; each returns the same statistics as the decoder does.
"""

from mars.baselines.block_cache import block_cache
from mars.baselines.draft_model import draft_model
from mars.baselines.jacobi import jacobi
from mars.baselines.sliding_window import sliding_window

__all__ = ["block_cache", "draft_model", "jacobi", "sliding_window"]
