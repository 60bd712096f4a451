"""Evaluation: speed and accuracy of models, dials and other decoders, and reports on them."""
