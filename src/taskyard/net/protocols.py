"""Protocols of the objects that loops take as arguments: clocks and transports.

Product loops, tests and the simulator implement them. Holds no I/O but the system's clocks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class MonotonicClock(Protocol):
    """A clock for leases and timers."""

    def monotonic_ns(self) -> int: ...


class Clock(MonotonicClock, Protocol):
    """Both clocks, real or simulated."""

    def wall_ns(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    #: For leases and timers. Setting the wall clock does not move it.
    monotonic_ns = staticmethod(time.monotonic_ns)
    #: For due times and for times shown to users.
    wall_ns = staticmethod(time.time_ns)


class Transport(Protocol):
    """A socket that never blocks."""

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message. Return False if it can't be sent now."""


class PeerTransport(Transport, Protocol):
    """A socket that connects to a broker, and reconnects."""

    def connections(self) -> int:
        """Return the number of connections made so far."""


class EndpointTransport(PeerTransport, Protocol):
    """A peer's socket with the endpoint that it connects to."""

    endpoint: str
