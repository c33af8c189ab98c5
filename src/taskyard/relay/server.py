"""The relay as a process: a listener below, a wire to each manager above, and nothing kept between.

What can't be handed on at once is dropped and counted: ZeroMQ's queues are all that waits here, and
WMP's ends ask again. A manager or a worker that is not there is waited for by ZeroMQ. SIGTERM and
SIGINT end it at once: it owes nobody anything.
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

#: Messages handed on from one wire before the next one has its turn.
MESSAGES_PER_TURN: Final = 64

#: A person sees it soon enough, and a flood makes six lines a minute.
WARNING_NS: Final = 10 * SECOND_NS


class Relay:
    """One listener below, any number of wires above."""

    def __init__(self, below: Transport, above: Sequence[Transport]) -> None:
        self._below = below
        self._above = list(above)
        self._forwarder = Forwarder(len(self._above))
        #: Messages that nobody took: their way is dead, or a queue is full.
        self.undelivered = 0

    @property
    def malformed(self) -> int:
        return self._forwarder.malformed

    def turn(self) -> bool:
        """Hand on what is there, some of it from each side. Whether there may be more."""
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
    """Hand on until told to stop. `announce` is told where it listens when it is ready."""
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
    """What was dropped, told to the log now and then."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._told = 0
        self._told_ns = 0

    def __str__(self) -> str:
        return (
            f"{self._relay.undelivered} message(s) could not be delivered, "
            f"{self._relay.malformed} made no sense or came too far"
        )

    def log_if_due(self, now_ns: int) -> None:
        """Called every turn: mostly there is nothing to say."""
        count = self._relay.undelivered + self._relay.malformed
        if count == self._told or (self._told_ns and now_ns - self._told_ns < WARNING_NS):
            return
        self._told, self._told_ns = count, now_ns
        logger.warning("%s since the start", self)
