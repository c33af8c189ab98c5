"""The log of connections: peers of every dialect, clients and workers, by their addresses.

Peers of other machines are logged as info. Processes of this machine at a local socket are many
short commands, and are logged as debug.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from taskyard.core.limits import SECOND_NS
from taskyard.net.accepted import listener_address, peer_address
from taskyard.net.event_log import EventLog

if TYPE_CHECKING:
    from taskyard.net.accepted import Connection

logger = logging.getLogger("taskyard.net")


class PeerLog:
    """Logs `peer connected` and `peer disconnected`. Used by the guard's thread."""

    def __init__(self) -> None:
        self._connected = EventLog(logger, "peer connected")
        self._disconnected = EventLog(logger, "peer disconnected")
        self._connected_here = EventLog(logger, "peer connected", logging.DEBUG)
        self._disconnected_here = EventLog(logger, "peer disconnected", logging.DEBUG)

    def on_accepted(self, found: Connection, now_ns: int) -> None:
        """Log a new connection."""
        log = self._connected_here if found.arrivals.is_local else self._connected

        def fields() -> dict[str, object]:
            listener = ""
            with suppress(OSError):  # it has ended already
                found.address = peer_address(found.descriptor)
                if not found.arrivals.is_local:
                    listener = listener_address(found.descriptor)
            return {"address": found.address, "listener": listener or "local"}

        log.log(now_ns, fields)

    def on_disconnected(self, found: Connection, messages: int, now_ns: int) -> None:
        """Log the end of a connection whose start was logged."""
        if not found.address:
            return
        log = self._disconnected_here if found.arrivals.is_local else self._disconnected

        def fields() -> dict[str, object]:
            seconds = (now_ns - found.accepted_ns) / SECOND_NS
            return {"address": found.address, "seconds": round(seconds, 3), "messages": messages}

        log.log(now_ns, fields)

    def log_if_due(self, now_ns: int) -> None:
        """Log the number of connections that got no line."""
        for log in (self._connected, self._disconnected):
            log.log_if_due(now_ns)
