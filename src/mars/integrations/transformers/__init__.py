"""Decoding with the dials in plain transformers, by a file that a checkpoint carries."""
