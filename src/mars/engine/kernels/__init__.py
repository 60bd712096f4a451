"""Triton kernels of the engine."""
