"""Benchmarks of the Spark jobs."""
