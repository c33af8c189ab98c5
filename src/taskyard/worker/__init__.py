"""The worker: asks for tasks, runs them in child processes, reports what came of them.

Owns processes, their limits and their output, and shows life from its own loop while they run. It
takes its transport and clock as arguments, and does not import the broker.
"""
