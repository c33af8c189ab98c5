"""The relay process: a listener below, a socket to each manager above.

A message that can't be sent at once is dropped and counted. Only ZeroMQ's queues hold messages, and
WMP's peers retry. ZeroMQ connects to managers when they appear. SIGTERM and SIGINT stop the relay
at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from taskyard.net import sockets
from taskyard.net.guard import Guard
from taskyard.net.host import CountLog, Host
from taskyard.relay.forwarder import Forwarder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.protocols import MonotonicClock, Transport

logger = logging.getLogger("taskyard.relay")

#: Messages forwarded from one socket before the next one is read.
MESSAGES_PER_TURN: Final = 64

#: Log lines with the number of new drops and the total.
UNDELIVERED_TEXT: Final = "%d message(s) undeliverable, %d since the start"
MALFORMED_TEXT: Final = "%d message(s) malformed or with too long a path, %d since the start"


class Relay:
    """One listener below, any number of sockets above."""

    def __init__(self, below: Transport, above: Sequence[Transport]) -> None:
        self._below = below
        self._above = list(above)
        self._forwarder = Forwarder(len(self._above))
        #: Messages without a receiver: its route is gone, or a queue is full.
        self.undelivered = 0

    @property
    def malformed(self) -> int:
        return self._forwarder.malformed

    def turn(self) -> bool:
        """Forward some messages from each side. Returns whether there may be more."""
        left = self._turn_up()
        for number in range(len(self._above)):
            left = self._turn_down(number) or left
        return left

    def _turn_up(self) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._below.receive()
            if frames is None:
                return False
            for number, message in self._forwarder.up(frames):
                self.undelivered += not self._above[number].send(message)
        return True

    def _turn_down(self, number: int) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            frames = self._above[number].receive()
            if frames is None:
                return False
            message = self._forwarder.down(number, frames)
            if message is not None:
                self.undelivered += not self._below.send(message)
        return True


class LoggedRelay:
    """A relay that logs dropped messages, as the host drives it."""

    def __init__(self, relay: Relay, clock: MonotonicClock) -> None:
        self._relay = relay
        self.has_exited = False
        self._logs = (
            CountLog(lambda: relay.undelivered, clock, logger, UNDELIVERED_TEXT),
            CountLog(lambda: relay.malformed, clock, logger, MALFORMED_TEXT),
        )

    def turn(self) -> bool:
        more = self._relay.turn()
        for log in self._logs:
            log.log_if_due()
        return more

    def wake_at_ns(self) -> None:
        """Return no time: a relay has no timers."""

    def shut_down(self) -> None:
        """Exit at once: the peers repeat messages in transit."""
        self.has_exited = True


def serve(
    endpoint: str,
    upstreams: Sequence[str],
    announce: Callable[[str], None],
    *,
    until_eof: bool = False,
) -> None:
    """Forward messages until a signal. `announce` receives the endpoint when it is ready."""
    with Host(until_eof=until_eof) as host:
        guard = Guard()
        below = host.add_socket(sockets.listen(endpoint, guard=guard))
        host.callback(guard.close)
        guard.start()
        above = [host.add_socket(sockets.connect(one)) for one in upstreams]
        relay = Relay(below, above)
        announce(f"listening wmp {below.endpoint}")
        host.run(LoggedRelay(relay, host.clock))
        logger.info(
            "stopped: %d message(s) undeliverable, %d malformed", relay.undelivered, relay.malformed
        )
