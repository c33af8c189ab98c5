"""Logs of events at a bounded rate, and the log of connections with the addresses of peers.

Peers of other machines are logged as info. Processes of this machine at a local socket are many
short commands, and are logged as debug. Where keys are required, a peer counts as connected with
its first message. A peer without a good key tries again and again: its address is logged once.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zmq

from taskyard.core.limits import SECOND_NS
from taskyard.net.accepted import listener_address, peer_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskyard.net.accepted import Connection


#: Lines of one event in an interval. More are counted.
LINES_MAX: Final = 50
INTERVAL_NS: Final = 10 * SECOND_NS


class EventLog:
    """Logs one kind of event: up to `LINES_MAX` lines in `INTERVAL_NS`, then their number."""

    def __init__(self, logger: logging.Logger, event: str, level: int = logging.INFO) -> None:
        self._logger = logger
        self._event = event
        self._level = level
        self._began_ns = -INTERVAL_NS
        self._count = 0

    def is_enabled(self) -> bool:
        return self._logger.isEnabledFor(self._level)

    def log(self, now_ns: int, fields: Callable[[], Mapping[str, object]]) -> None:
        """Log an event, or count it. `fields` is called only for a line."""
        if not self.is_enabled():
            return
        self.log_if_due(now_ns)
        if self._count < LINES_MAX:
            self._write(self._event, fields())
        self._count += 1

    def log_if_due(self, now_ns: int) -> None:
        """End an interval that is over: log the number of events without a line."""
        if now_ns - self._began_ns < INTERVAL_NS:
            return
        more = self._count - LINES_MAX
        if more > 0:
            self._write(f"{self._event}: not logged", {"count": more})
        self._began_ns, self._count = now_ns, 0

    def _write(self, event: str, fields: Mapping[str, object]) -> None:
        # The text is an argument, because a "%" in it would be taken for a placeholder.
        self._logger.log(self._level, "%s", event, extra={"fields": fields})


logger = logging.getLogger("taskyard.net")

#: A refused address is logged again after this time, and so many are remembered.
REFUSED_NS: Final = 600 * SECOND_NS
REFUSED_MAX: Final = 1_000

_KEY_HINT: Final = "create one with `taskyard keys invite ROLE NAME`, and give it to the peer"

#: Why a handshake failed, and what to do, at a listener with keys. Any other is malformed.
_REASONS: Final = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): f"it has no key ({_KEY_HINT})",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): f"its key is for another broker ({_KEY_HINT})",
}
_UNKNOWN_KEY: Final = f"its key is unknown or revoked ({_KEY_HINT})"
_KEY_NOT_USED: Final = "it uses a key, and this listener has none (start the broker with --secure)"


class PeerLog:
    """Logs `peer connected`, `peer disconnected` and `peer refused`. Used by the guard's thread."""

    def __init__(self) -> None:
        self._connected = EventLog(logger, "peer connected")
        self._disconnected = EventLog(logger, "peer disconnected")
        self._connected_here = EventLog(logger, "peer connected", logging.DEBUG)
        self._disconnected_here = EventLog(logger, "peer disconnected", logging.DEBUG)
        #: Connections that need a key and have sent no message, with their addresses.
        self._unproved: dict[Connection, dict[str, str]] = {}
        #: When a refused address was logged, without its port. The oldest comes first.
        self._refused: dict[str, int] = {}

    def on_accepted(self, found: Connection, now_ns: int) -> None:
        """Log a new connection, or remember it until it has proved its key."""
        if found.arrivals.has_keys:
            self._unproved[found] = _addresses(found)
        else:
            self._log_connected(found, None, now_ns)

    def _log_connected(
        self, found: Connection, addresses: dict[str, str] | None, now_ns: int
    ) -> None:
        log = self._connected_here if found.arrivals.is_local else self._connected

        def fields() -> dict[str, str]:
            known = addresses or _addresses(found)
            found.address = known["address"]
            return known

        log.log(now_ns, fields)

    def on_disconnected(self, found: Connection, messages: int, now_ns: int) -> None:
        """Log the end of a connection whose start was logged."""
        addresses = self._unproved.pop(found, None)
        if addresses and messages:
            self._log_connected(found, addresses, now_ns)
        if not found.address:
            return
        log = self._disconnected_here if found.arrivals.is_local else self._disconnected

        def fields() -> dict[str, object]:
            seconds = (now_ns - found.accepted_ns) / SECOND_NS
            return {"address": found.address, "seconds": round(seconds, 3), "messages": messages}

        log.log(now_ns, fields)

    def on_refused(self, found: Connection, kind: int, error: int, now_ns: int) -> None:
        """Log once why the peers of an address are refused."""
        addresses = self._unproved.pop(found, None) or {"address": found.address, "listener": ""}
        reason = _UNKNOWN_KEY if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH else _REASONS.get(error)
        if not found.arrivals.has_keys and error == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            reason = _KEY_NOT_USED
        # The host of a connection that has ended already is not known.
        host = f"{addresses['address'].rpartition(':')[0]} {reason}"
        if reason is None or now_ns - self._refused.get(host, -REFUSED_NS) < REFUSED_NS:
            return
        self._refused.pop(host, None)
        if len(self._refused) >= REFUSED_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[host] = now_ns
        logger.warning("peer refused: %s", reason, extra={"fields": addresses})

    def log_if_due(self, now_ns: int) -> None:
        """Log peers that have proved their keys, and the number of events that got no line."""
        if self._unproved:
            for found in [one for one in self._unproved if one.has_spoken]:
                self._log_connected(found, self._unproved.pop(found), now_ns)
        for log in (self._connected, self._disconnected):
            log.log_if_due(now_ns)


def _addresses(found: Connection) -> dict[str, str]:
    """Return the addresses of a peer and of its listener."""
    address, listener = "", "local"
    with suppress(OSError):  # it has ended already
        address = peer_address(found.descriptor)
        if not found.arrivals.is_local:
            listener = listener_address(found.descriptor)
    return {"address": address, "listener": listener}
