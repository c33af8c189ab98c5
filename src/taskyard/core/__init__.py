"""The pure parts: what happened in, what was decided and what must be done out.

Owns the meaning of tasks, workers, leases, lanes and campaigns. It has no clock, socket, thread,
dice or disk: time and luck come in with the events. msgspec is its one third-party package.
"""
