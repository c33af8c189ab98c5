"""The heartbeat interval that the broker requests from workers.

Few workers send heartbeats often, so that a stop reaches a running task soon. Many send them as
seldom as their leases allow, so that heartbeats take a small part of the broker's time. A worker
uses the interval of its last reply. Until it has confirmed a change, the longer interval counts
(`Worker.heartbeat_ns`).

A worker without tasks has no lease to renew. Among thousands it may send heartbeats less often
than its lease timeout allows, and is lost after three missed ones. With its first task it returns
to a third of its timeout by itself, and its lease begins at the assignment.
"""

from __future__ import annotations

from typing import Final

from taskyard.core.limits import HEARTBEATS_PER_LEASE_MIN, SECOND_NS

#: The interval of few workers.
INTERVAL_NS_MIN: Final = SECOND_NS

#: The longest interval, for long leases and workers without a timeout.
INTERVAL_NS_MAX: Final = 60 * SECOND_NS

#: Heartbeats of all workers. More workers than this send them less often than every second. At
#: 50 µs each they take a fortieth of a core.
RATE_MAX: Final = 500

#: How much longer than with tasks the interval of a worker without tasks may be. A lost worker
#: without tasks may be assigned some for so much longer.
IDLE_FACTOR: Final = 3

#: Intervals are multiples of this, so that a worker more or less rarely changes them.
STEP_NS: Final = SECOND_NS // 10


def interval_ns(workers: int, lease_timeout_ns: int) -> int:
    """Return the interval for a worker with this timeout, 0 for none, among so many workers."""
    return min(max(INTERVAL_NS_MIN, _spread_ns(workers)), longest_ns(lease_timeout_ns))


def idle_interval_ns(workers: int, lease_timeout_ns: int) -> int:
    """Return the interval for a worker without tasks, like `interval_ns`."""
    shortest_ns = interval_ns(workers, lease_timeout_ns)
    return max(shortest_ns, min(_spread_ns(workers), longest_ns(lease_timeout_ns, is_idle=True)))


def _spread_ns(workers: int) -> int:
    """Return the interval at which so many workers send `RATE_MAX` heartbeats a second."""
    spread_ns = -(-workers * SECOND_NS // (RATE_MAX * STEP_NS)) * STEP_NS
    return min(spread_ns, INTERVAL_NS_MAX)


def longest_ns(lease_timeout_ns: int, *, is_idle: bool = False) -> int:
    """Return the longest interval that a timeout allows, with tasks or without. 0 is no timeout."""
    interval_ns = lease_timeout_ns // HEARTBEATS_PER_LEASE_MIN or INTERVAL_NS_MAX
    return min(IDLE_FACTOR * interval_ns, INTERVAL_NS_MAX) if is_idle else interval_ns
