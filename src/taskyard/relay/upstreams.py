"""The brokers of a relay: whether each is connected, and whether it refuses the relay's key.

ZeroMQ connects without a report, and tries for ever. So a relay with the key of another broker
would look as if it worked. Takes its sockets and clock as arguments.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from taskyard.core.limits import SECOND_NS
from taskyard.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from taskyard.net.host import HostedProgram
    from taskyard.net.protocols import MonotonicClock

logger = logging.getLogger("taskyard.relay")

#: How often to check the connections.
CHECK_NS: Final = SECOND_NS

#: Log that a broker is not connected after this time.
MISSING_NS: Final = 3 * SECOND_NS

#: Log lines with the endpoint. ZeroMQ reports no reason, so the hint has the likely ones.
MISSING_TEXT: Final = (
    "broker at %s: no handshake for 3 s (is it running, does it listen there without keys?)"
)
MISSING_WITH_KEY_TEXT: Final = (
    "broker at %s: no handshake for 3 s (is it running, does it listen there with keys, and is key "
    "%r of this broker?)"
)
CONNECTED_TEXT: Final = "broker at %s: connected"


class Upstream(Protocol):
    """A socket to a broker: `net.zmq_socket.CountingSocket`."""

    endpoint: str
    #: Empty: it has no key.
    key_name: str

    @property
    def address(self) -> str:
        """The present one of several places. Empty: it is not connected."""

    def is_connected(self) -> bool: ...

    def check_accepted(self, unanswered_ns: int) -> None: ...


class UpstreamCheck:
    """Checks the connections to brokers every second."""

    def __init__(self, above: Sequence[Upstream], clock: MonotonicClock) -> None:
        self._above = above
        self._clock = clock
        now_ns = clock.monotonic_ns()
        #: When each was last connected.
        self._connected_ns = [now_ns] * len(above)
        self._missing: set[int] = set()
        #: Where each was last connected.
        self._places = [""] * len(above)
        #: Those that refuse the key. ZeroMQ does not connect to them again.
        self._refused: dict[int, Refused] = {}
        self.check_at_ns = now_ns + CHECK_NS

    def run_if_due(self) -> None:
        """Log missing brokers. Raise `Refused` if all refuse the key, and log it if some do."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self.check_at_ns:
            return
        self.check_at_ns = now_ns + CHECK_NS
        known = {*self._refused}
        for number, upstream in enumerate(self._above):
            if number not in known:
                self._check(number, upstream, now_ns)
        if len(self._refused) == len(self._above):
            raise self._refused[0]
        for number in self._refused.keys() - known:
            logger.warning("%s", self._refused[number])

    def _check(self, number: int, upstream: Upstream, now_ns: int) -> None:
        if upstream.is_connected():
            self._connected_ns[number] = now_ns
            place, self._places[number] = self._places[number], upstream.address
            if number in self._missing or place not in ("", upstream.address):
                self._missing.discard(number)
                logger.warning(CONNECTED_TEXT, upstream.address)
            return
        missing_ns = now_ns - self._connected_ns[number]
        try:
            upstream.check_accepted(missing_ns)
        except Refused as error:
            self._refused[number] = error
            return
        if missing_ns >= MISSING_NS and number not in self._missing:
            self._missing.add(number)
            _log_missing(upstream)


def _log_missing(upstream: Upstream) -> None:
    if upstream.key_name:
        logger.warning(MISSING_WITH_KEY_TEXT, upstream.endpoint, upstream.key_name)
    else:
        logger.warning(MISSING_TEXT, upstream.endpoint)


class CheckedRelay:
    """A relay and the check of its connections, as the host drives them."""

    def __init__(self, relay: HostedProgram, check: UpstreamCheck) -> None:
        self._relay = relay
        self._check = check
        self.shut_down = relay.shut_down

    @property
    def has_exited(self) -> bool:
        return self._relay.has_exited

    def turn(self) -> bool:
        more = self._relay.turn()
        self._check.run_if_due()
        return more

    def wake_at_ns(self) -> int | None:
        wake_at_ns = self._relay.wake_at_ns()
        check_at_ns = self._check.check_at_ns
        return check_at_ns if wake_at_ns is None else min(wake_at_ns, check_at_ns)
