"""The client: submits tasks and waits for them, from Python.

Owns the session with a broker, futures, and the batching of single-task calls. Starts a broker only
as a process, and does not import it.
"""
