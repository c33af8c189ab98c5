"""Poll sockets and plain descriptors together: the only place where a loop blocks."""

from typing import Any, Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net.sockets import ZmqSocket

#: ZeroMQ waits in milliseconds.
_TICK_NS: Final = SECOND_NS // 1_000

#: A longer wait returns empty after this: the loop polls again, and no number overflows.
WAIT_MS_MAX: Final = 3_600_000


class Poller:
    """Wait for sockets and descriptors. Remove each one before it is closed."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        #: The object that ZeroMQ returns, and the one that the caller added.
        self._sources: dict[Any, ZmqSocket | int] = {}

    def add(self, source: ZmqSocket | int) -> None:
        """Watch a socket or descriptor. Adding it twice has no effect."""
        key = _key(source)
        self._sources[key] = source
        self._poller.register(key, zmq.POLLIN)

    def remove(self, source: ZmqSocket | int) -> None:
        """Stop watching a socket or descriptor. Raise KeyError if it is not watched."""
        key = _key(source)
        del self._sources[key]
        self._poller.unregister(key)

    def wait(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """Return the sources that are readable or closed, after at most `wait_ns` (None: 1 hour).

        Rounded up to the next millisecond, so that a timer is due when its loop wakes.
        """
        wait_ms = WAIT_MS_MAX if wait_ns is None else min(-(-wait_ns // _TICK_NS), WAIT_MS_MAX)
        return [self._sources[key] for key, _ in self._poller.poll(max(wait_ms, 0))]


def _key(source: ZmqSocket | int) -> zmq.Socket[bytes] | int:
    return source.socket if isinstance(source, ZmqSocket) else source
