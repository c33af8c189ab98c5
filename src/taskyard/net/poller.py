"""Poll sockets and plain descriptors together: the only place where a loop blocks."""

import time
from typing import Any, Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net.places import PlacesSocket
from taskyard.net.zmq_socket import ZmqSocket

#: ZeroMQ waits in milliseconds.
_TICK_NS: Final = SECOND_NS // 1_000

#: A longer wait returns empty after this: the loop polls again, and no number overflows.
WAIT_MS_MAX: Final = 3_600_000
_WAIT_NS_MAX: Final = WAIT_MS_MAX * _TICK_NS


class Poller:
    """Wait for sockets and descriptors. Remove each one before it is closed.

    It also drives sockets of several places: it polls their monitors as well.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        #: The object that ZeroMQ returns, and the one that the caller added.
        self._sources: dict[Any, ZmqSocket | int] = {}
        #: Sockets of several places, each with those of its own that are polled.
        self._places: dict[PlacesSocket, tuple[zmq.Socket[bytes], ...]] = {}
        #: The socket of several places that each polled monitor belongs to.
        self._monitors: dict[Any, PlacesSocket] = {}

    def add(self, source: ZmqSocket | int) -> None:
        """Watch a socket or descriptor. Adding it twice has no effect."""
        if isinstance(source, PlacesSocket):
            self._places.setdefault(source, ())
            return
        key = _key(source)
        self._sources[key] = source
        self._poller.register(key, zmq.POLLIN)

    def remove(self, source: ZmqSocket | int) -> None:
        """Stop watching a socket or descriptor. Raise KeyError if it is not watched."""
        if isinstance(source, PlacesSocket):
            self._unwatch(self._places.pop(source))
            return
        key = _key(source)
        del self._sources[key]
        self._poller.unregister(key)

    def wait(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """Return the sources that are readable or closed, after at most `wait_ns` (None: 1 hour).

        Rounded up to the next millisecond, so that a timer is due when its loop wakes.
        """
        if self._places:
            return self._wait_at_places(wait_ns)
        ready, sources, wait_ms = [], self._sources, WAIT_MS_MAX
        if wait_ns is not None and wait_ns < _WAIT_NS_MAX:
            wait_ms = -(-wait_ns // _TICK_NS) if wait_ns > 0 else 0
        for key, _ in zmq.zmq_poll(self._poller.sockets, wait_ms):
            ready.append(sources[key])  # a comprehension is one more call
        return ready

    def _wait_at_places(self, wait_ns: int | None) -> list[ZmqSocket | int]:
        """Return early without a source only when a socket was connected or lost its connection:
        loops take an empty list for the end of their time."""
        ends_ns = time.monotonic_ns() + (_WAIT_NS_MAX if wait_ns is None else max(wait_ns, 0))
        changes = self._changes()
        while True:
            now_ns = time.monotonic_ns()
            for source in self._places:
                if now_ns >= source.advance_at_ns:
                    source.advance()
                self._watch(source)
            due_ns = min(source.advance_at_ns for source in self._places)
            ready = self._poll_once(min(due_ns, ends_ns) - now_ns)
            if ready or self._changes() != changes or time.monotonic_ns() >= ends_ns:
                return ready

    def _poll_once(self, wait_ns: int) -> list[ZmqSocket | int]:
        """Return the sources that are ready. Monitors with events drive their sockets."""
        ready = []
        for key, _ in self._poller.poll(_milliseconds(wait_ns)):
            if key in self._monitors:
                self._monitors[key].advance()
            else:
                ready.append(self._sources[key])
        return ready

    def _changes(self) -> int:
        return sum(source.changes for source in self._places)

    def _watch(self, source: PlacesSocket) -> None:
        """Poll the present sockets of a source, and its former ones no more."""
        receiver = source.receiver
        wanted = source.monitors if receiver is None else (receiver, *source.monitors)
        watched = self._places[source]
        if wanted == watched:
            return
        self._unwatch(watched)
        for monitor in source.monitors:
            self._monitors[monitor] = source
        if receiver is not None:
            self._sources[receiver] = source
        for one in wanted:
            self._poller.register(one, zmq.POLLIN)
        self._places[source] = wanted

    def _unwatch(self, watched: tuple[zmq.Socket[bytes], ...]) -> None:
        for one in watched:
            self._monitors.pop(one, None)
            self._sources.pop(one, None)
            self._poller.unregister(one)


def _milliseconds(wait_ns: int | None) -> int:
    wait_ms = WAIT_MS_MAX if wait_ns is None else min(-(-wait_ns // _TICK_NS), WAIT_MS_MAX)
    return max(wait_ms, 0)


def _key(source: ZmqSocket | int) -> zmq.Socket[bytes] | int:
    return source.socket if isinstance(source, ZmqSocket) else source
