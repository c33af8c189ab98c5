"""The relay process: a listener below, a socket to each manager above.

A message that can't be sent at once is dropped and counted. Only ZeroMQ's queues hold messages, and
WMP's peers retry. ZeroMQ connects to managers when they appear. SIGTERM and SIGINT stop the relay
at once.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

from taskyard.core.limits import SECOND_NS
from taskyard.net import sockets
from taskyard.net.guard import Guard
from taskyard.net.poller import Poller
from taskyard.net.protocols import SystemClock
from taskyard.net.signals import ParentPipe, Signals
from taskyard.relay.forwarder import Forwarder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from taskyard.net.protocols import Transport

logger = logging.getLogger("taskyard.relay")

#: Messages forwarded from one socket before the next one is read.
MESSAGES_PER_TURN: Final = 64

#: Soon enough for a reader, and at most six lines a minute in a flood.
WARNING_NS: Final = 10 * SECOND_NS


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


def serve(
    endpoint: str,
    upstreams: Sequence[str],
    announce: Callable[[str], None],
    *,
    until_eof: bool = False,
) -> None:
    """Forward messages until a signal. `announce` receives the endpoint when it is ready."""
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        guard = Guard()
        below = stack.enter_context(closing(sockets.listen(endpoint, guard=guard)))
        stack.enter_context(closing(guard))
        guard.start()
        above = [stack.enter_context(closing(sockets.connect(one))) for one in upstreams]
        poller = Poller()
        for wire in (below, *above):
            poller.add(wire)
        poller.add(signals.fileno())
        parent_pipe = ParentPipe() if until_eof else None
        if parent_pipe is not None:
            poller.add(parent_pipe.fileno())
        relay = Relay(below, above)
        losses = DropLog(relay)
        announce(f"listening wmp {below.endpoint}")
        left = False
        while True:
            ready = poller.wait(0 if left else None)
            if signals.fileno() in ready and signals.received():
                break
            if (
                parent_pipe is not None
                and parent_pipe.fileno() in ready
                and parent_pipe.is_closed()
            ):
                break
            left = relay.turn()
            losses.log_if_due(SystemClock.monotonic_ns())
        logger.info("stopped: %s", losses)


class DropLog:
    """Logs dropped messages, at most every 10 s."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._logged = 0
        self._logged_ns = 0

    def __str__(self) -> str:
        return (
            f"{self._relay.undelivered} message(s) undeliverable, "
            f"{self._relay.malformed} malformed or with too long a path"
        )

    def log_if_due(self, now_ns: int) -> None:
        """Log the counts if they have risen. Called every turn."""
        count = self._relay.undelivered + self._relay.malformed
        if count == self._logged or (self._logged_ns and now_ns - self._logged_ns < WARNING_NS):
            return
        self._logged, self._logged_ns = count, now_ns
        logger.warning("%s since the start", self)
