"""Counts of calls: what a message costs by itself, on any machine and without a clock."""
