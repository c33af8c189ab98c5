"""Benchmarks of the dialects: the same tasks through each of them."""
