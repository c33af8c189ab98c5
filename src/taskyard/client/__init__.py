"""The client: submits tasks and waits for them, from Python.

Owns futures and how one-task calls are gathered into batches. It speaks to a broker over the wire
and starts one, where it must, as a process: it does not import it.
"""
