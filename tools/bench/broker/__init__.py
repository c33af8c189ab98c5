"""Benchmarks of the broker with real sockets and real processes."""
