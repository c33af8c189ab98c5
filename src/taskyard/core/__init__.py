"""The pure scheduler: events in, records and effects out.

Owns the meaning of tasks, workers, leases, lanes and campaigns. It has no clock, socket, thread,
randomness or disk: time and random bits arrive with the events. msgspec is its only third-party
package.
"""
