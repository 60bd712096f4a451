"""Plain batched decoding over transformers' own modules: the reference that faster paths are held against."""
