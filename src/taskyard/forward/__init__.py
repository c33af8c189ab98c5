"""A worker that runs its tasks on another broker: a broker as a worker of another broker.

Above workers and clients, because it is both. `lower` submits tasks and fetches results, and
`runner` makes a worker's runner of it.
"""
