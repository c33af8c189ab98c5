"""Benchmarks of the scheduler alone, without I/O."""
