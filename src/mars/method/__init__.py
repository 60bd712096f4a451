"""The method itself: what a forward is fed, what is emitted from its logits, how a token is drawn.

Pure functions of values and tensors; no model, no cache, no state.
"""
