"""The worker: requests tasks, runs them in child processes, and reports their results.

Owns processes, their limits and their output, and sends heartbeats from its own loop while they
run. Takes its transport and clock as arguments, and does not import the broker.
"""
