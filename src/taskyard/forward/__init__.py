"""A worker that runs its tasks on another broker: a broker as a worker of another one.

Above workers and clients, because it is both. `lower` submits tasks and fetches results, `runner`
makes a worker's runner of it, and `process` connects the two.
"""
