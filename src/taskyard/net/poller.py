"""Waiting for wires and plain descriptors at once: the one place where a loop stands still."""

from typing import Any, Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net.sockets import ZmqSocket

#: ZeroMQ waits in milliseconds.
_TICK_NS: Final = SECOND_NS // 1_000

#: A longer wait comes back empty after this: a loop looks again, and no number overflows.
WAIT_MS_MAX: Final = 3_600_000


class Poller:
    """Remove a wire or a descriptor before it is closed."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        #: What ZeroMQ calls a thing, and what our callers do.
        self._sources: dict[Any, ZmqSocket | int] = {}

    def add(self, thing: ZmqSocket | int) -> None:
        """Watch it; what is watched already is watched once."""
        key = _key(thing)
        self._sources[key] = thing
        self._poller.register(key, zmq.POLLIN)

    def remove(self, thing: ZmqSocket | int) -> None:
        """Stop watching it; what is not watched raises KeyError."""
        key = _key(thing)
        del self._sources[key]
        self._poller.unregister(key)

    def wait(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """What is ready to read, or at its end, at the latest after `wait_ns` (None: long).

        Rounded up to the next millisecond: a timer must be due when its loop wakes.
        """
        wait_ms = WAIT_MS_MAX if wait_ns is None else min(-(-wait_ns // _TICK_NS), WAIT_MS_MAX)
        return [self._sources[key] for key, _ in self._poller.poll(max(wait_ms, 0))]


def _key(thing: ZmqSocket | int) -> zmq.Socket[bytes] | int:
    return thing.socket if isinstance(thing, ZmqSocket) else thing
