"""The benchmarks: how fast we are, and how the cost grows.

Owns measuring: CPU as well as wall time, the best of several, the spread shown. Nothing else
imports it, and no test asserts a time.
"""
